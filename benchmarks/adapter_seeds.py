r"""LS-LoRA against LoRA, seed by seed: what a small decoder answers after the same lessons.

Run: python -m benchmarks.adapter_seeds [--seeds 5] [--updates 16] [--questions 24] [--write]

SmolLM2-135M learns facts about the chemical elements as ``jaxkfac finetune`` does by default: rank
8 on every projection, batches of 8 records, AdamW at 2e-3 with a warmup and a cosine. A pair is
one seed: LS-LoRA (the nonlinearity on the outputs) and plain LoRA start from the same A, read the
same records in the same order, and answer the same questions, in words that no record uses.
LS-LoRA has five more numbers for each layer. The learning rate was tuned for neither.

Measured: the part of the questions that is answered rightly (the likeliest choice), the log
probability of the right choice among the four, in nats, and the loss of the last 5 updates. For
each the mean difference, LS-LoRA minus LoRA, with Student's 95% interval over seeds, the p-value of
the paired t-test, and that of the exact sign-flip test, which with n seeds is never below 2^(1-n).
With five seeds only differences larger than about 1.2 standard deviations are told from none.

A run is written to the record as soon as it has ended, so a stopped study goes on where it was.
``--seeds 10`` adds five to those that are there.
"""

import argparse
import itertools
import json
import resource
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import stats

import jaxkfac as jk
from benchmarks._record import stamp, write
from jaxkfac.jobs.data.choices import score_choices, target_log_likelihoods
from jaxkfac.jobs.data.elements import element_questions, element_records
from jaxkfac.jobs.data.text import TokenBatch, TokenBatches, encode_records
from jaxkfac.models import Tokens, smollm2

RESULTS = Path(__file__).parent / "results"
METHODS = {"ls-lora": "output", "lora": "none"}
SYSTEM = "Answer in a word."
BATCH, RATE, LAST = 8, 2e-3, 5
FEWEST = 5  # pairs from which on a difference is judged
MEASURES = {
    "accuracy": "questions answered rightly",
    "log_probability": "log probability of the right choice, nats",
    "loss": f"training loss of the last {LAST} updates, nats",
}


def model_batch(batch: TokenBatch) -> tuple[Tokens, jax.Array, jax.Array]:
    ids, positions, segments, targets, mask = map(jnp.asarray, batch)
    return Tokens(ids, positions, segments), targets, mask


class Study:
    """The model, its lessons, and one compiled step and one examination for each method."""

    def __init__(self, updates: int, questions: int) -> None:
        self.updates, self.questions = updates, questions
        self.model = smollm2(remat=False)
        encoded = encode_records(
            element_records(system=SYSTEM), self.model.tokenizer, max_length=512
        )
        self.examples = encoded.examples
        warmup = max(updates // 10, 1)
        rate = optax.warmup_cosine_decay_schedule(RATE / (warmup + 1), RATE, warmup, updates)
        self.tx = optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(rate, b1=0.9, b2=0.99, weight_decay=0.0)
        )
        self._programs: dict[str, Any] = {}

    def programs(self, method: str) -> Any:
        if method in self._programs:
            return self._programs[method]
        config = jk.lslora.Config(target=r".*_proj/kernel", fourier_placement=METHODS[method])
        adapted = jk.lslora.attach(self.model.apply_fn, config)

        def loss_of(adapters: Any, params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
            objective = jk.Objective(lambda p, x: adapted(params, p, x), jk.Categorical())
            loss = objective(adapters, batch)
            penalty = 0.0
            if config.phi is not None:
                penalty = config.reg_weight * jk.lslora.fourier_loss(adapters)
            return loss + penalty, loss

        @jax.jit
        def step(params: Any, adapters: Any, state: Any, batch: Any) -> Any:
            grads, loss = jax.grad(loss_of, has_aux=True)(adapters, params, batch)
            updates, state = self.tx.update(grads, state, adapters)
            return optax.apply_updates(adapters, updates), state, loss

        @jax.jit
        def read(params: Any, adapters: Any, batch: Any) -> jax.Array:
            inputs, targets, _ = batch
            return target_log_likelihoods(adapted(params, adapters, inputs), targets)

        self._programs[method] = config, step, read
        return self._programs[method]

    def run(self, method: str, seed: int) -> dict[str, Any]:
        """Teach and examine one adapter."""
        config, step, read = self.programs(method)
        params, apply_fn, tokenizer = self.model.params, self.model.apply_fn, self.model.tokenizer
        batches = TokenBatches.padded(
            self.examples, batch_size=BATCH, pad_id=tokenizer.pad_id, seed=seed
        )
        inputs = model_batch(batches.at(0))[0]
        adapters = jk.lslora.init(apply_fn, config, params, inputs, key=jax.random.key(seed))
        state, losses = self.tx.init(adapters), []
        for number in range(self.updates):
            batch = model_batch(batches.at(number))
            adapters, state, loss = step(params, adapters, state, batch)
            losses.append(float(loss))
        scores = score_choices(
            lambda batch: np.asarray(read(params, adapters, model_batch(batch))),
            tokenizer,
            element_questions(self.questions, seed=seed),
            max_length=self.model.config.longest,
            system=SYSTEM,
        )
        answers = [q.answer for q in scores.questions]
        among = [x - np.logaddexp.reduce(x) for x in scores.sums]
        return {
            "accuracy": scores.accuracy("sum").value,
            "log_probability": float(np.mean([x[i] for x, i in zip(among, answers)])),
            "loss": float(np.mean(losses[-LAST:])),
            "losses": losses,
            "parameters": sum(x.size for x in jax.tree.leaves(adapters)),
        }


def compared(runs: dict[str, Any]) -> dict[str, Any]:
    """Paired differences of each measure, over the seeds whose two runs are there."""
    seeds = sorted({int(x.split("/")[1]) for x in runs})
    pairs = [[runs.get(f"{m}/{seed}") for m in METHODS] for seed in seeds]
    pairs = [pair for pair in pairs if None not in pair]
    found: dict[str, Any] = {}
    for name in MEASURES if len(pairs) > 1 else ():
        left, right = np.array([[run[name] for run in pair] for pair in pairs]).T
        change = left - right
        signs = np.array(list(itertools.product((-1, 1), repeat=len(change))))
        flipped = np.abs((signs * change).mean(1))
        test = stats.ttest_rel(left, right)
        interval = test.confidence_interval(0.95)
        found[name] = {
            "ls-lora": float(left.mean()),
            "lora": float(right.mean()),
            "difference": float(change.mean()),
            "interval": [float(interval.low), float(interval.high)],
            "t_test": float(test.pvalue),
            "sign_flip": float(np.mean(flipped >= abs(change.mean()) * (1 - 1e-12))),
            "pairs": len(pairs),
        }
    return found


def page(record: dict[str, Any]) -> str:
    """The record as a page."""
    settings, runs = record["settings"], record["runs"]
    words = " ".join(f"--{name} {value}" for name, value in settings.items())
    pairs = max((row["pairs"] for row in record["compared"].values()), default=0)
    cpu = sum(run["cpu_seconds"] for run in runs.values())
    sizes = {name.split("/")[0]: run["parameters"] for name, run in runs.items()}
    lines = [
        f"Made by `python -m benchmarks.adapter_seeds --seeds {pairs} {words} --write` on",
        f"{record['cores']} cores, {cpu:.0f} s of CPU time. "
        f"Parameters: {', '.join(f'{name} {size:,}' for name, size in sizes.items())}.",
        *([] if pairs >= FEWEST else ["", f"Of {FEWEST} pairs {pairs} are there: not judged yet."]),
        "",
        f"| over {pairs} seeds | LS-LoRA | LoRA | difference | 95% interval | t-test | signs |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in record["compared"].items():
        low, high = row["interval"]
        lines.append(
            f"| {MEASURES[name]} | {row['ls-lora']:.3f} | {row['lora']:.3f} | "
            f"{row['difference']:+.3f} | {low:+.3f} to {high:+.3f} | p = {row['t_test']:.3f} | "
            f"p = {row['sign_flip']:.3f} |"
        )
    lines += ["", "| seed | method | right | log probability | loss |", "|---|---|---|---|---|"]
    for name, run in sorted(runs.items(), key=lambda x: int(x[0].split("/")[1])):
        method, seed = name.split("/")
        values = " | ".join(f"{run[key]:.3f}" for key in MEASURES)
        lines.append(f"| {seed} | {method} | {values} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=16)
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--write", action="store_true", help="keep results/adapter_seeds.json, .md")
    arguments = parser.parse_args()
    settings = {"updates": arguments.updates, "questions": arguments.questions}
    file = RESULTS / "adapter_seeds.json"
    record = stamp(settings=settings, runs={})
    if arguments.write and file.exists():
        record = json.loads(file.read_text())
        if record["settings"] != settings:
            raise SystemExit(f"{file} is of {record['settings']}: remove it, or ask for the same")
    study = None
    for seed, method in itertools.product(range(arguments.seeds), METHODS):
        if (name := f"{method}/{seed}") in record["runs"]:
            continue
        before, started = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
        study = study or Study(**settings)
        found = study.run(method, seed)
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        seconds = time.monotonic() - started
        record["runs"][name] = found | {"cpu_seconds": cpu, "seconds": seconds}
        record["compared"] = compared(record["runs"])
        print(name, {k: found[k] for k in MEASURES}, f"{cpu:.0f} CPU s", flush=True)
        if arguments.write:
            write(record, file)
            file.with_suffix(".md").write_text(page(record))
    for name, row in record["compared"].items():
        print(name, row)


if __name__ == "__main__":
    main()
