"""Tell characters apart that were never seen, from five images of each.

Run: python examples/fewshot.py

Episodes of embedded glyphs train the few-shot cosine transformer with Adam; novel classes in novel
typefaces measure it. A run that was killed continues with --resume, bit for bit.
--optimizer kfac trains with K-FAC instead of Adam. --plan prints the memory that a training needs
before anything is loaded, and --bytes what accumulation and fewer queries save. At full scale:

    python examples/fewshot.py --data miniImagenet --image-size 84 --backbone resnet34 --plan
"""

import argparse
import functools
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxkfac as jk
from jaxkfac import models
from jaxkfac.files import Archive, write_archive, write_text
from jaxkfac.interception import leaves_by_path, with_leaves
from jaxkfac.jobs.data.few_shot import Episodes, Splits, load_glyphs, read_splits

FORM = "jaxkfac.example.fewshot"
MEASURED = 5  # episodes that tell the time left
AT_ONCE = 10  # episodes of an evaluation in one program
DOCUMENTED = {1: "-", 4: "75 %", 8: "87.5 %"}  # what accumulation is said to save
MAY_CHANGE = ("resume", "epochs", "output", "plan", "bytes", "device_bytes", "n_test")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--n-way", type=int, default=5, help="classes of an episode")
    add("--k-shot", type=int, default=5, help="images of each class to learn from")
    add("--n-query", type=int, default=16, help="images of each class to classify")
    add("--n-episode", type=int, default=100, help="episodes in an epoch")
    add("--gradient-accumulation-steps", type=int, default=1, help="episodes in an update")
    add("--epochs", type=int, default=6, help="a checkpoint is written after each")
    add("--n-test", type=int, default=600, help="novel episodes of the test")
    add("--method", choices=("cosine", "prototypes"), default="cosine")
    add("--backbone", choices=("conv4", "resnet10", "resnet18", "resnet34"), default="conv4")
    add("--width", type=int, help="features of the backbone's first layer; 32 for glyphs, else 64")
    add("--optimizer", choices=("adam", "kfac"), default="adam")
    add("--rate", type=float, help="learning rate; 1e-3 for Adam, 1e-2 for K-FAC")
    add("--data", type=Path, help="folder with a folder for each class, or with such folders "
        "train, validation and novel; glyphs if left out")  # fmt: skip
    add(
        "--image-size",
        type=int,
        default=84,
        help="height and width of the images of --data, pixels",
    )
    add("--seed", type=int, default=0)
    add("--output", type=Path, default=Path("runs/fewshot"))
    add("--resume", action="store_true", help="continue from the checkpoint in --output")
    add("--plan", action="store_true", help="print the memory needed, and stop")
    add("--device-bytes", default="16GB", help="memory of the device, for --plan")
    add("--bytes", action="store_true", help="measure what accumulation saves, and stop")
    options = parser.parse_args()
    for name in ("n_episode", "gradient_accumulation_steps", "epochs", "n_test"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    options.rate = options.rate or {"adam": 1e-3, "kfac": 1e-2}[options.optimizer]
    options.width = options.width or (64 if options.data else 32)
    return options


def build(options: argparse.Namespace) -> nnx.Module:
    size, channels = (options.image_size, 3) if options.data else (28, 1)
    rngs = nnx.Rngs(options.seed)
    if options.backbone == "conv4":
        backbone = models.Conv4(size, channels, width=options.width, rngs=rngs)
    else:
        depth = int(options.backbone.removeprefix("resnet"))
        stem = "large" if size > 64 else "small"
        backbone = models.ResNet(depth, channels, width=options.width, stem=stem, rngs=rngs)
    if options.method == "prototypes":
        return models.PrototypicalNetwork(backbone)
    config = models.CosineTransformerConfig(options.n_way, options.k_shot)
    return models.CosineTransformer(backbone, config, rngs=rngs)


def batch_shapes(options: argparse.Namespace, n_query: int, episodes: int = 1) -> Any:
    image = (options.image_size,) * 2 + (3,) if options.data else (28, 28, 1)
    shape = lambda dtype, *sizes: jax.ShapeDtypeStruct((episodes, *sizes), dtype)
    support = shape(np.float32, options.n_way, options.k_shot, *image)
    queries = options.n_way * n_query
    return (support, shape(np.float32, queries, *image)), shape(np.int32, queries)


class Training:
    """One update's program and its optimizer, from the shapes of the model alone."""

    def __init__(self, options: argparse.Namespace) -> None:
        shapes = nnx.eval_shape(lambda: build(options))
        self.apply, self.shapes = jk.from_nnx(shapes, mutable=nnx.BatchStat)
        self.objective = jk.Objective(self.apply, jk.Categorical())
        self.kfac = options.optimizer == "kfac"
        if self.kfac:
            # Labels are drawn from the logits of each query: the Fisher that K-FAC approximates.
            self.collect = jk.value_grad_and_factors(self.objective, fisher="mc")
            batch = batch_shapes(options, options.n_query)
            like = self.collect.factor_shapes(self.shapes, batch, state=self.apply.state)
            self.tx = jk.kfac(options.rate, like=like, damping=1e-2, refresh_every=20,
                              norm_constraint=1e-2)  # fmt: skip
        else:
            self.tx = optax.adam(options.rate)
        self.seed = jax.random.key(options.seed)

    def step(self, tx: Any, carry: Any, batch: Any, number: Any) -> Any:
        """One micro-batch: its gradient is that of its queries' mean loss."""
        params, statistics, state = carry
        if self.kfac:
            key = jax.random.fold_in(self.seed, number)
            found = self.collect(params, batch, key, state=statistics)
            (loss, statistics), grads = found.value, found.grads
            extra = {"factors": found.factors, "value": loss}
        else:
            with_state = jax.value_and_grad(self.objective, has_aux=True)
            (loss, statistics), grads = with_state(params, batch, state=statistics)
            extra = {"terms": batch[1].size}
        updates, state = tx.update(grads, state, params, **extra)
        return (optax.apply_updates(params, updates), statistics, state), loss


def show_plan(options: argparse.Namespace, training: Training) -> None:
    plan = jk.plan_memory(
        training.objective, training.shapes, batch_shapes(options, options.n_query),
        state=training.apply.state, optimizer=training.tx, device_bytes=options.device_bytes,
        accumulation_steps=options.gradient_accumulation_steps, curvature=training.kfac,
        **({"fisher": "mc"} if training.kfac else {}),
    )  # fmt: skip
    print(plan)


def show_bytes(options: argparse.Namespace, training: Training) -> None:
    """Compiled bytes of a step: all it is given and all that it makes on the way."""

    @functools.cache
    def needed(steps: int, n_query: int, episodes: int) -> float:
        tx = jk.multi_steps(training.tx, steps)
        program = jax.jit(lambda *a: training.step(tx, *a), donate_argnums=0)
        carry = training.shapes, training.apply.state, jax.eval_shape(tx.init, training.shapes)
        batch = batch_shapes(options, n_query, episodes)
        found = program.lower(carry, batch, 0).compile().memory_analysis()
        return (found.argument_size_in_bytes + found.temp_size_in_bytes) / 2**20

    print("queries  accumulation  MiB  as documented, of no accumulation  of one batch  documented")
    for n_query in (options.n_query, max(1, options.n_query // 2)):
        for steps, documented in DOCUMENTED.items():
            one = needed(steps, n_query, 1)
            plain, large = needed(1, options.n_query, 1), needed(1, options.n_query, steps)
            print(f"{n_query:7d}  {steps:12d}  {one:5.1f}  saves {1 - one / plain:6.1%}  "
                  f"saves {1 - one / large:6.1%}  {documented}")  # fmt: skip


def save(path: Path, options: argparse.Namespace, carry: Any, records: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"options": recorded(options), "records": records}
    arrays = ((name, np.asarray(leaf)) for name, leaf in leaves_by_path(carry).items())
    write_archive(path, FORM, about, arrays, what="the checkpoint")


def load(path: Path, options: argparse.Namespace, carry: Any) -> tuple[Any, dict[str, Any]]:
    """The carry and records of a checkpoint that was written with the same options."""
    with Archive(path, FORM, "checkpoint") as stored:
        was, now = stored.about["options"], recorded(options)
        differ = [f"--{k.replace('_', '-')} was {was.get(k)}" for k in now if was.get(k) != now[k]]
        if differ:
            raise SystemExit(f"{path} is of another run: {', '.join(differ)}")
        leaves = {name: jnp.asarray(stored.read(name)) for name in stored.names}
        return with_leaves(carry, leaves), stored.about["records"]


def recorded(options: argparse.Namespace) -> dict[str, Any]:
    plain = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    return {k: v for k, v in plain.items() if k not in MAY_CHANGE}


def evaluation(options: argparse.Namespace) -> Any:
    """Logits by the running statistics, so that no query knows of another."""
    model = nnx.eval_shape(lambda: build(options))
    model.eval()
    apply, _ = jk.from_nnx(model, mutable=nnx.BatchStat)
    return jax.jit(lambda params, inputs, state: apply(params, *inputs, state=state)[0])


def accuracies(evaluate: Any, carry: Any, episodes: Episodes, count: int) -> np.ndarray:
    found: list[np.ndarray] = []
    for number in range(0, count, AT_ONCE):
        support, query, targets = episodes.at(number, min(AT_ONCE, count - number))
        logits = evaluate(carry[0], (support, query), carry[1])
        found.extend((np.asarray(logits).argmax(-1) == targets).mean(1))
    return np.asarray(found)


def main() -> None:
    options = parse()
    training = Training(options)
    if options.plan or options.bytes:
        (show_plan if options.plan else show_bytes)(options, training)
        return
    started, path = time.monotonic(), options.output / "checkpoint"
    splits: Splits = load_glyphs() if options.data is None else read_splits(
        options.data, image_size=options.image_size, seed=options.seed
    )  # fmt: skip
    train, validation, novel = (
        Episodes(x, options.n_way, options.k_shot, options.n_query, seed=options.seed)
        for x in splits
    )
    apply, params = jk.from_nnx(build(options), mutable=nnx.BatchStat)
    tx = jk.multi_steps(training.tx, options.gradient_accumulation_steps)
    carry, records = (params, apply.state, tx.init(params)), {"losses": [], "validation": []}
    if path.exists() and not options.resume:
        raise SystemExit(f"{path} exists: go on with --resume, or choose another --output")
    if path.exists():
        carry, records = load(path, options, carry)
    step = jax.jit(lambda *a: training.step(tx, *a), donate_argnums=0)
    evaluate = evaluation(options)
    first = len(records["validation"]) * options.n_episode
    for epoch in range(len(records["validation"]), options.epochs):
        losses = []
        for number in range(epoch * options.n_episode, (epoch + 1) * options.n_episode):
            support, query, targets = train.at(number)
            carry, loss = step(carry, ((support, query), targets), number)
            losses.append(loss)
            if number == first:  # the first step compiles
                jax.block_until_ready(loss)
                measured = time.monotonic()
            if number == first + MEASURED:
                jax.block_until_ready(loss)
                each = (time.monotonic() - measured) / MEASURED
                left = options.epochs * options.n_episode - number - 1
                print(f"about {each * left / 60:.1f} min of training left "
                      f"({each:.2g} s an episode, {left} episodes)", flush=True)  # fmt: skip
        records["losses"] += [float(np.mean(losses))]
        held_out = accuracies(evaluate, carry, validation, 50).mean()
        records["validation"] += [float(held_out)]
        save(path, options, carry, records)
        if training.kfac:
            jk.check_state(carry[2])
        spent = time.monotonic() - started
        print(f"epoch {epoch + 1:3d}  loss {records['losses'][-1]:.4f}  validation {held_out:.2%}  "
              f"{spent:.0f} s", flush=True)  # fmt: skip
    found = accuracies(evaluate, carry, novel, options.n_test)
    interval = 1.96 * found.std(ddof=1) / np.sqrt(len(found)) if len(found) > 1 else float("nan")
    records |= {"novel": float(found.mean()), "interval": float(interval), "episodes": len(found)}
    write_text(options.output / "records.json", json.dumps(records), "the records")
    print(f"loss {records['losses'][0]:.4f} -> {records['losses'][-1]:.4f}")
    print(f"{options.n_way}-way {options.k_shot}-shot accuracy over {len(found)} novel episodes: "
          f"{found.mean():.2%} ± {interval:.2%}")  # fmt: skip


if __name__ == "__main__":
    main()
