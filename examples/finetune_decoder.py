"""Teach a pretrained language model facts about the chemical elements with an LS-LoRA adapter.

Run: python examples/finetune_decoder.py --steps 40

Downloads SmolLM2-135M-Instruct (93 MB) on first use; 2.5 minutes on two cores. With --tiny a
small random decoder stands in for it, in seconds. `jaxkfac finetune` does the same with
checkpoints, a report and many options.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxkfac as jk
from jaxkfac.jobs.data.choices import compare, score_choices, target_log_likelihoods
from jaxkfac.jobs.data.elements import element_questions, element_records
from jaxkfac.jobs.data.text import TokenBatches, encode_records
from jaxkfac.models import Decoder, DecoderConfig, Pretrained, Tokenizer, Tokens, generate, smollm2

SYSTEM, BATCH, ACCUMULATE = "Answer in a word.", 4, 2


def tiny() -> Pretrained:
    """A random decoder that reads bytes."""
    import tokenizers

    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)} | {"<end>": 256}
    bytewise = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    bytewise.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = tokenizers.decoders.ByteLevel()
    bytewise.add_special_tokens(["<end>"])
    template = "{% for m in messages %}{{ m.content }}<end>{% endfor %}"
    config = DecoderConfig(
        vocabulary=257, width=32, hidden=48, depth=2, num_heads=4, num_kv_heads=2, head_size=8,
        context=128, tied_head=True, eos_ids=(256,),
    )  # fmt: skip
    apply_fn, params = jk.from_nnx(Decoder(config, rngs=nnx.Rngs(0)))
    tokenizer = Tokenizer(bytewise, eos_ids=(256,), chat_template=template)
    return Pretrained(config, apply_fn, params, tokenizer)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--steps", type=int, default=40, help="parameter updates")
parser.add_argument("--rate", type=float, default=2e-3, help="largest learning rate")
parser.add_argument("--questions", type=int, default=40, help="to be examined with")
parser.add_argument("--tiny", action="store_true", help="a random decoder instead of SmolLM2")
parser.add_argument("--adapter", default="runs/elements-adapter", help="folder to save it in")
options = parser.parse_args()

# bfloat16 is for accelerators: a CPU computes it by way of float32.
on_cpu = jax.default_backend() == "cpu"
pretrained = tiny() if options.tiny else smollm2(dtype=jnp.float32 if on_cpu else jnp.bfloat16)
apply_fn, params, tokenizer = pretrained.apply_fn, pretrained.params, pretrained.tokenizer

encoded = encode_records(element_records(system=SYSTEM), tokenizer, max_length=128)
batches = TokenBatches.padded(encoded.examples, batch_size=BATCH, pad_id=tokenizer.pad_id, seed=0)
questions = element_questions(options.questions, seed=0)
print(encoded)

config = jk.lslora.Config(rank=8, alpha=16.0, target=r".*_proj/kernel", reg_weight=0.01)
adapters = jk.lslora.init(
    apply_fn, config, params, jnp.asarray(batches.at(0).ids), key=jax.random.key(0),
    dtype=jnp.float32,
)  # fmt: skip
adapted = jk.lslora.attach(apply_fn, config)
# The rate rises from zero, so that the first update changes nothing.
rate = optax.warmup_cosine_decay_schedule(
    0.0, options.rate, max(1, options.steps // 10), options.steps
)
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.0))
tx = jk.multi_steps(tx, every_k_schedule=ACCUMULATE)


@jax.jit
def micro_step(params, adapters, state, batch):
    # The base is an argument: what a compiled function closes over is copied into it.
    objective = jk.Objective(lambda a, inputs: adapted(params, a, inputs), jk.Categorical())
    loss, grads = jax.value_and_grad(objective)(adapters, batch)
    penalty_grads = jax.grad(lambda a: config.reg_weight * jk.lslora.fourier_loss(a))(adapters)
    grads = jax.tree.map(jnp.add, grads, penalty_grads)
    updates, state = tx.update(grads, state, adapters, terms=batch[2].sum())
    return optax.apply_updates(adapters, updates), state, loss


@jax.jit
def log_likelihoods(params, adapters, inputs, targets):
    return target_log_likelihoods(adapted(params, adapters, inputs), targets)


def on_device(batch):
    ids, positions, segments, targets, mask = map(jnp.asarray, batch)
    return Tokens(ids, positions, segments), targets, mask


def examine(adapters):
    def ask(batch):
        return log_likelihoods(params, adapters, *on_device(batch)[:2])

    return score_choices(ask, tokenizer, questions, max_length=128, system=SYSTEM)


def say(question, adapters):
    turns = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    ids = generate(
        pretrained, tokenizer.chat(turns), max_new_tokens=8, adapted=adapted, adapters=adapters
    )
    print(f"{question} {tokenizer.decode(ids).strip()!r}")


before, state, losses = examine(adapters), tx.init(adapters), []
for number in range(options.steps * ACCUMULATE):
    batch = on_device(batches.at(number))
    adapters, state, loss = micro_step(params, adapters, state, batch)
    losses.append(float(loss))
    if (number + 1) % (10 * ACCUMULATE) == 0:
        print(f"update {(number + 1) // ACCUMULATE:3d}  loss {np.mean(losses[-ACCUMULATE:]):.4f}")
after = examine(adapters)

say("What is the symbol of silver?", adapters)
jk.lslora.save(options.adapter, adapters, config)
for variant in ("sum", "pmi"):
    found = compare(before.correct(variant), after.correct(variant))
    print(f"accuracy by {variant}: {before.accuracy(variant)} -> {after.accuracy(variant)}, "
          f"p = {found.p_value:.2g}")  # fmt: skip
tenth = max(1, len(losses) // 10)
print(f"loss {np.mean(losses[:tenth]):.4f} -> {np.mean(losses[-tenth:]):.4f}")
