"""Planned totals against compiled ones, for a CPU and for an H100.

Run: python -m benchmarks.plan [--targets cpu h100] [--python PYTHON] [--json F] [--markdown F]

Each training is compiled as it would run: gradient and update in one program where nothing
happens between them, else one program after the other. Compiled bytes of a program are arguments,
temporaries and results, donated ones once, and what else is alive meanwhile. The largest over the
programs is the column "compiled", in MiB. The others are the plan's total over it, without the
scratch of libraries, which no compiler sees:

- "plan": the plan compiles its own programs, as it does by itself for the training as it stands
  and for the set of options that it chooses.
- "calibrated": an option's estimate, from equations, times what the compiler's temporaries are of
  those counted for the training as it stands. So the plan judges the other sets.
- "counted": from equations alone, where no compiler is asked.

``PYTHON`` is an interpreter that has the targets' compilers.
"""

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import jaxkfac as jk
from benchmarks._record import shown, stamp, write
from jaxkfac.interception.values import Window
from jaxkfac.planning import (
    CompiledBytes,
    EncoderDecoderLayout,
    MemoryEstimate,
    compiled_bytes,
    plan_memory,
    shaped,
)

MIB = 2**20
PLENTY = "1PB"
ADAM = optax.adam(1e-3)
_NEEDED = {"nf4": ("adapters",)}  # by an option


@dataclasses.dataclass(frozen=True)
class Part:
    """A program of a training.

    Attributes:
        fn: What is compiled.
        args: Shapes.
        donated: Arguments that are written over.
        beside: Bytes of what is alive and is no argument.
        out_shardings: Of its results, on a mesh.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    donated: tuple[int, ...] = ()
    beside: int = 0
    out_shardings: Any = None


@dataclasses.dataclass(frozen=True)
class Training:
    """A training, as it is planned and as it runs.

    Attributes:
        problem: Objective, parameters and batch.
        plan: Arguments of ``plan_memory``.
        option: The option whose estimate is compared; ``None`` is the training as it stands.
        parts: Its programs.
        leaving_out: Rows of programs that are not compiled here.
    """

    problem: tuple[Any, Any, Any]
    plan: dict[str, Any]
    option: str | None
    parts: Sequence[Part]
    leaving_out: tuple[str, ...] = ()

    def estimate(self, **how: Any) -> MemoryEstimate:
        """What the plan says."""
        options = () if self.option is None else (self.option, *_NEEDED.get(self.option, ()))
        plan = plan_memory(*self.problem, device_bytes=PLENTY, options=options, **self.plan, **how)
        return plan.now if self.option is None else plan.alone[self.option]

    def compiled(self, target: Any, **how: Any) -> int:
        """What its programs allocate."""
        return max(_peak(part, target, **how) for part in self.parts)

    def collectives(self, target: Any, **how: Any) -> Mapping[str, int]:
        """What the one program of a step exchanges, by kind."""
        (part,) = self.parts
        return _compiled(part, target, **how).collectives


def planned_bytes(training: Training, estimate: MemoryEstimate) -> int:
    """The total without scratch of libraries, nor what is not compiled."""
    rows = {k: size for k, size in estimate.device.items() if k not in training.leaving_out}
    return dataclasses.replace(estimate, device=rows).device_total - estimate.scratch


def trainings(scale: int = 4) -> dict[str, Callable[[], Training]]:
    """What builds each configuration, by name; ``scale`` multiplies widths."""
    decoder, dense = partial(_decoder, scale), partial(_dense, scale)
    rematted = partial(_decoder, scale, remat=True)
    return {
        "scanned": lambda: _stepped(decoder()),
        "scanned, undonated": lambda: _stepped(decoder(), donate=False),
        "scanned, rematted": lambda: _stepped(rematted()),
        "dense": lambda: _stepped(dense()),
        "convolution": lambda: _stepped(_convolution(scale), tx=optax.sgd(1e-2, momentum=0.9)),
        "encoder-decoder": lambda: _stepped(_encoder_decoder(scale)),
        "adapters": lambda: _adapters(decoder(), quantised=False),
        "NF4": lambda: _adapters(decoder(), quantised=True),
        "K-FAC in graph": lambda: _in_graph(dense()),
        "host": lambda: _on_host(rematted()),
        "budget": lambda: _budgeted(rematted()),
        "accumulation": lambda: _accumulated(decoder()),
        # Nobody looked at the next three when the estimates were written.
        "encoder-decoder, NF4": lambda: _adapters(_encoder_decoder(scale), quantised=True),
        "batch statistics, K-FAC, accumulation": lambda: _in_graph(*_residual(scale), steps=4),
        "scanned bfloat16, K-FAC staggered": lambda: _in_graph(_in_half(decoder()), stagger=True),
        "scanned, K-FAC packed": lambda: _in_graph(
            decoder(), collection={"packed": True}, damping_mode="pi"
        ),
        "scanned, K-FAC packed, in 4 turns": lambda: _in_graph(
            decoder(), collection={"packed": True, "collect": 4}, damping_mode="pi"
        ),
        **{
            f"{name}, fully sharded": lambda build=build: _sharded(build())
            for name, build in {
                "scanned": lambda: _stepped(decoder()),
                "convolution": lambda: _stepped(_convolution(scale)),
                "K-FAC in graph": lambda: _in_graph(dense()),
            }.items()
        },
    }


def _sharded(training: Training, devices: int = 8) -> Training:
    """On so many devices, each of which has such a batch and its part of all else."""
    mesh = AbstractMesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    (part,) = training.parts
    params, state, batch, *rest = part.args
    rows = NamedSharding(mesh, PartitionSpec("data"))

    def placed(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    held = jax.tree.map(
        placed, (params, state), jk.memory.divided_shardings((params, state), mesh, "data")
    )
    wide = jax.tree.map(lambda x: _shape(devices * x.shape[0], *x.shape[1:], dtype=x.dtype), batch)
    args = (*held, jax.tree.map(lambda x: placed(x, rows), wide), *rest)
    with jax.sharding.use_abstract_mesh(mesh):
        results = jk.memory.divided_shardings(jax.eval_shape(part.fn, *args), mesh, "data")
    part = dataclasses.replace(part, args=args, out_shardings=results)
    plan = {**training.plan, "devices": devices, "fully_sharded": True}
    return dataclasses.replace(training, parts=[part], plan=plan)


def _decoder(scale: int, *, remat: bool = False) -> tuple[Any, Any, Any]:
    heads, width, hidden, vocabulary = 4, 64 * scale, 160 * scale, 512 * scale

    def block(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        h = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * p["norm"]
        q, k, v = (
            (h @ p[name]).reshape(*h.shape[:2], heads, -1).transpose(0, 2, 1, 3) for name in "qkv"
        )
        scores = q @ k.mT / (width // heads) ** 0.5
        seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        mixed = jax.nn.softmax(jnp.where(seen, scores, -1e9)) @ v
        x = x + mixed.transpose(0, 2, 1, 3).reshape(x.shape) @ p["o"]
        return x + jax.nn.silu(x @ p["up"]) @ p["down"], None

    def apply_fn(params: Any, ids: jax.Array) -> jax.Array:
        body = jax.checkpoint(block, prevent_cse=False) if remat else block
        x, _ = jax.lax.scan(body, params["embedding"][ids], params["blocks"])
        return x @ params["head"]

    kernels = {**dict.fromkeys("qkvo", (width, width)), "up": (width, hidden)}
    kernels |= {"down": (hidden, width), "norm": (width,)}
    params = {
        "embedding": _shape(vocabulary, width),
        "blocks": {name: _shape(4, *sizes) for name, sizes in kernels.items()},
        "head": _shape(width, vocabulary),
    }
    ids = _shape(4, 32 * scale, dtype=jnp.int32)
    return jk.Objective(apply_fn, jk.Categorical()), params, (ids, ids)


def _encoder_decoder(scale: int) -> tuple[Any, Any, Any]:
    layout = EncoderDecoderLayout(3, 64 * scale, 4, 160 * scale, 512 * scale)
    return tuple(shaped(layout, examples=4, tokens=32 * scale))


def _dense(scale: int) -> tuple[Any, Any, Any]:
    def apply_fn(params: Any, x: jax.Array) -> jax.Array:
        for layer in params[:-1]:
            x = jax.nn.gelu(x @ layer["kernel"] + layer["bias"])
        return x @ params[-1]["kernel"] + params[-1]["bias"]

    width = 128 * scale
    sizes = [width] * 4 + [10]
    params = [
        {"kernel": _shape(i, o), "bias": _shape(o)} for i, o in zip(sizes, sizes[1:], strict=False)
    ]
    batch = _shape(4 * width, width), _shape(4 * width, dtype=jnp.int32)
    return jk.Objective(apply_fn, jk.Categorical()), params, batch


def _convolution(scale: int) -> tuple[Any, Any, Any]:
    def apply_fn(params: Any, x: jax.Array) -> jax.Array:
        for kernel in params["kernels"]:
            axes = ("NHWC", "HWIO", "NHWC")
            x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=axes)
            x = jax.nn.relu(x)
        return x.mean((1, 2)) @ params["head"]

    width = 16 * scale
    kernels = [_shape(3, 3, 3, width), _shape(3, 3, width, width), _shape(3, 3, width, width)]
    batch = _shape(8 * scale, 16, 16, 3), _shape(8 * scale, dtype=jnp.int32)
    params = {"kernels": kernels, "head": _shape(width, 10)}
    return jk.Objective(apply_fn, jk.Categorical()), params, batch


class _Residual(nnx.Module):
    """A residual network of convolutions with batch statistics."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.first = nnx.Conv(3, width, (3, 3), rngs=rngs)
        self.convolutions = nnx.List(
            [nnx.Conv(width, width, (3, 3), use_bias=False, rngs=rngs) for _ in range(4)]
        )
        self.norms = nnx.List([nnx.BatchNorm(width, rngs=rngs) for _ in range(4)])
        self.head = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.first(x)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = x + jax.nn.relu(norm(convolution(x)))
        return self.head(x.mean((1, 2)))


def _residual(scale: int) -> tuple[Any, Any]:
    """The problem, and its state."""
    apply_fn, params = jk.from_nnx(_Residual(16 * scale, nnx.Rngs(0)), mutable=nnx.BatchStat)
    params, state = jax.eval_shape(lambda: (params, apply_fn.state))
    batch = _shape(8 * scale, 16, 16, 3), _shape(8 * scale, dtype=jnp.int32)
    return (jk.Objective(apply_fn, jk.Categorical()), params, batch), state


def _in_half(problem: Any) -> tuple[Any, Any, Any]:
    objective, params, batch = problem
    half = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), params)
    return objective, half, batch


def _stepped(problem: Any, *, tx: Any = ADAM, donate: bool = True, **plan: Any) -> Training:
    objective, params, batch = problem
    step = _step(jax.value_and_grad(objective), tx)
    part = Part(step, (params, _state(tx, params), batch), (0, 1) * donate)
    arguments = {"optimizer": tx, "curvature": False, "donate": donate, **plan}
    return Training(problem, arguments, None, [part])


def _step(gradient: Callable[..., Any], tx: Any, **extra: Any) -> Callable[..., Any]:
    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = gradient(params, batch)
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state, value

    return step


def _adapters(problem: Any, *, quantised: bool) -> Training:
    objective, params, batch = problem
    config = jk.lslora.Config(rank=8)
    key = jax.eval_shape(lambda: jax.random.key(0))
    adapters = jax.eval_shape(
        lambda p, x, key: jk.lslora.init(objective.apply_fn, config, p, x, key=key),
        *(params, batch[0], key),
    )
    table, base = jk.find_layers(objective.apply_fn, params, batch[0]), params
    if quantised:
        base = jk.nf4.quantize(params, layers="|".join(map(re.escape, adapters)), table=table)
    adapted = jk.lslora.attach(objective.apply_fn, config)
    own = dataclasses.replace(objective, apply_fn=lambda a, bx: adapted(bx[0], a, bx[1]))
    step = _step(jax.value_and_grad(own), ADAM)
    part = Part(step, (adapters, _state(ADAM, adapters), ((base, batch[0]), batch[1])), (0, 1))
    arguments = {"optimizer": ADAM, "curvature": False}
    return Training(problem, arguments, "nf4" if quantised else "adapters", [part])


def _in_graph(
    problem: Any,
    statistics: Any = None,
    *,
    collection: Mapping[str, Any] | None = None,
    steps: int = 1,
    **options: Any,
) -> Training:
    """K-FAC in one program with the gradient.

    Args:
        problem: Objective, parameters and one micro-batch.
        statistics: State that a call changes.
        collection: How factors are collected, for ``jk.value_grad_and_factors``.
        steps: Micro-batches a step.
        options: Of ``jk.kfac``.
    """
    objective, params, batch = problem
    collection = collection or {}
    stats = jk.value_grad_and_factors(objective, **collection)
    like = stats.factor_shapes(params, batch, state=statistics)
    kfac = jk.kfac(1e-3, like=like, damping=1e-3, **options)
    tx = jk.multi_steps(kfac, steps) if steps > 1 else kfac
    turn = {"step": jax.ShapeDtypeStruct((), jnp.int32)} if "collect" in collection else {}

    def step(params: Any, state: Any, batch: Any, statistics: Any, turn: Any) -> Any:
        value, grads, factors = stats(params, batch, state=statistics, **turn)
        updates, state = tx.update(grads, state, params, factors=factors)
        return optax.apply_updates(params, updates), state, value

    part = Part(step, (params, _state(tx, params), batch, statistics, turn), (0, 1))
    plan = {"optimizer": kfac, "state": statistics, "accumulation_steps": steps, **collection}
    return Training(problem, plan, None, [part])


def _on_host(problem: Any) -> Training:
    objective, params, batch = problem
    stats = jk.value_grad_and_factors(objective)
    like, state = stats.factor_shapes(params, batch), _state(ADAM, params)
    bases = jax.eval_shape(lambda f: jk.eigendecompose(f, placement="device"), like)

    def update(params: Any, state: Any, grads: Any, bases: Any) -> Any:
        grads = jk.natural_gradient(grads, bases, damping=1e-3)
        updates, state = ADAM.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    # Those of this step, and those of the last that are on their way.
    in_flight = _nbytes(like)
    collect = Part(stats, (params, batch), (), _nbytes((state, bases)) + in_flight)
    apply = Part(update, (params, state, params, bases), (0, 1), _nbytes(batch) + 2 * in_flight)
    return Training(problem, {"optimizer": ADAM}, "host", [collect, apply])


def _budgeted(problem: Any) -> Training:
    objective, params, batch = problem
    stats = jk.value_grad_and_factors(objective)
    like = stats.factor_shapes(params, batch)
    budget = 4 * _nbytes(like) // 5
    plan = jk.value_grad_and_factors(objective, max_factor_bytes=budget).plan(params, batch)
    first = plan.passes[0]

    def run(params: Any, batch: Any) -> Any:
        rows = {name: part.rows for name, part in first.parts.items() if part.rows is not None}
        windows = {name: Window(first.start, count) for name, count in rows.items()}
        return stats.gather(params, stats.checked(batch), parts=dict(first.parts), windows=windows)

    bases = jax.eval_shape(lambda f: jk.eigendecompose(f, placement="device", vectors=False), like)
    part = Part(run, (params, batch), (), _nbytes((_state(ADAM, params), bases)))
    arguments = {"optimizer": ADAM, "max_factor_bytes": budget, "vectors": False}
    # What comes back from the host is decomposed one matrix at a time, between two steps.
    return Training(problem, arguments, "budget", [part], leaving_out=("workspace",))


def _accumulated(problem: Any) -> Training:
    objective, params, batch = problem
    tx = jk.multi_steps(ADAM, 4)
    step = _step(jax.value_and_grad(objective), tx, terms=jnp.float32(batch[1].size))
    part = Part(step, (params, _state(tx, params), batch), (0, 1))
    arguments = {"optimizer": ADAM, "curvature": False, "accumulation_steps": 4}
    return Training(problem, arguments, None, [part])


def _peak(part: Part, target: Any, **how: Any) -> int:
    return _compiled(part, target, **how).peak + part.beside


def _compiled(part: Part, target: Any, **how: Any) -> CompiledBytes:
    how = {"donate_argnums": part.donated, "out_shardings": part.out_shardings, **how}
    return compiled_bytes(part.fn, *part.args, target=target, **how)


def _state(tx: Any, params: Any) -> Any:
    return jax.eval_shape(tx.init, params)


def _nbytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def compare(training: Training, target: Any, python: str) -> dict[str, float]:
    """Compiled MiB, and what the plan's totals are of them."""
    how = {"compiler": target, "compiler_python": python}
    compiled = training.compiled(target, python=python)
    found = {"compiled_mib": compiled / MIB}
    for name, sets in (("plan", "all"), ("calibrated", "chosen"), ("counted", "none")):
        if sets == "none" and training.plan.get("fully_sharded"):
            continue  # what is gathered is the compiler's choice
        if training.option is not None or name != "calibrated":
            estimate = training.estimate(compiled=sets, **how)
            found[name] = planned_bytes(training, estimate) / compiled
    return found


def table(record: dict[str, Any], targets: Sequence[str]) -> str:
    """The record as a page."""
    columns = ("compiled_mib", "plan", "calibrated", "counted")
    titles = ("compiled", *columns[1:])
    head = ["training", *(f"{target}: {x}" for target in targets for x in titles)]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for name in dict.fromkeys(name for target in targets for name in record[target]):
        cells = [name]
        for target in targets:
            found = record[target].get(name, {})
            cells += [f"{found[x]:.3g}" if x in found else "–" for x in columns]
        lines.append(cells)
    for title, pick in (("furthest below", min), ("furthest above", max)):
        cells = [title]
        for target in targets:
            for x in columns:
                ratios = [row[x] for row in record[target].values() if x in row]
                cells.append("" if x == "compiled_mib" else f"{pick(ratios):.3g}")
        lines.append(cells)
    rows = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    intro, _, about = (__doc__ or "").partition("\n\n")
    _, _, about = about.partition("\n\n")
    when = f"Written on {record['date']} with jax {record['jax']} and `python -m benchmarks.plan"
    when += f" --targets {' '.join(targets)} --scale {record['scale']}` (`make plan-record`)."
    if record["only"]:
        when += f" Only these rows are of that run: {'; '.join(record['only'])}."
    return f"# {intro}\n\n{about}\n{when}\n\n{rows}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--targets", nargs="+", default=["cpu", "h100"])
    parser.add_argument("--python", default=sys.executable, help="has the targets' compilers")
    parser.add_argument("--only", nargs="+", help="these trainings; the others stay as recorded")
    parser.add_argument("--scale", type=int, default=4, help="multiplies widths")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    args = parser.parse_args()
    known = json.loads(args.json.read_text()) if args.only and args.json else {}
    record: dict[str, Any] = {**known, **stamp(scale=args.scale, only=args.only)}
    for target in args.targets:
        record.setdefault(target, {})
        for name, build in trainings(args.scale).items():
            if args.only is None or name in args.only:
                record[target][name] = compare(build(), target, python=args.python)
                shown(f"{target} {name}", record[target][name])
                write(record, args.json)
    if args.markdown is not None:
        args.markdown.write_text(table(record, args.targets))


if __name__ == "__main__":
    main()
