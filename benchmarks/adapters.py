r"""Cost of adapters: a training step of an adapted model against the base model's, and peers'.

Run: python -m benchmarks.adapters [--pairs 21] [--sizes 576 1024 3072] [--json FILE]

The model is four residual layers, ``x + relu(x W)`` with W (d, d), float32, on 1024 rows at
d = 576, 512 at 1024 and 256 at 3072; rank 16. A step is value and gradient with respect to the
adapters and to x, which a deep net needs too; W is frozen. "base" has no adapters and gives the
gradient of x. "linear" is plain LoRA here, "bottleneck" and "output" are the two placements of
the nonlinearity, qwix adapts the same NNX model, and PEFT the same shapes in PyTorch.

Contestants take turns in one process, in an order that turns round each time, and each ratio is
the median over turns of two neighbours' ratio; PyTorch's two have turns of their own, so that
its threads do not wait beside XLA's. They wait for each other, too: where other programs run,
PyTorch loses more than XLA, and ``taskset -c 0 python -m ...`` compares on one core, without
that. Ratios of processor time stand beside: there they are the steadier of the two, and they
decide no goal. The overhead is (adapted / base - 1), each in its own framework, and it is divided
by PEFT's: like for like is "linear", since PEFT has no nonlinearity.

glibc gives blocks above 32 MiB back to the kernel and pays page faults for them at the next
run, so a program just above it would seem slower than one just below by what has nothing to do
with either. That is switched off here, for all.

The floor: with n rows, the base step is 4 n d^2 operations a layer (y and the gradient of x).
An adapter adds 12 n d r (x A and h B, and two gradients of each), 3 r / d of that: 8.3%, 4.7%
and 1.6% at these sizes. The nonlinearity is below 0.1% in the bottleneck, where it
has n r values. On the outputs its n d values cost some 60 operations, as much as 15 columns of
W, 2.6% at d = 576, if they were as fast as those of a product. They are not: time goes with
the bytes, each pass over n d float32 values reads or writes 4 n d bytes. Plain LoRA adds a
write and a read of h B and of the branch's gradient of x; $\varphi$ on the outputs a write and a
read of what it keeps, and a read of that and of the cotangent for its own gradient. XLA on the
CPU has no loop with several results: it takes 3 writes and 13 reads for that gradient.

The gradient of A is ``dh.T @ x``: as ``x.T @ dh`` XLA on the CPU would run it far slower
(lslora/_product_axes.py says how it is kept from that). Reading x once for q, k and v, by
one product with their A side by side, was tried in a model of nothing else: it gained a few percent
at the smaller sizes and nothing at the largest. So each layer reads its own x, and the decoder's
fused projections read it once anyway.

A bank's adapters are chosen as data: the last check counts compilations while adapters are
swapped, replaced, disabled and mixed by row. The goal is none.
"""

import argparse
import ctypes
import importlib
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxkfac as jk
from benchmarks._record import stamp, write
from benchmarks.factors import compiled

RANK, ALPHA, LAYERS = 16, 32.0, 4
ROWS = {576: 1024, 1024: 512, 3072: 256}
PLACEMENTS = {"linear": "none", "bottleneck": "bottleneck", "output": "output"}
# {what: (which ratio, {d: at most})}
GOALS: dict[str, tuple[tuple[str, str], dict[int, float]]] = {
    "bottleneck / linear": (("bottleneck", "linear"), {1024: 1.08, 3072: 1.08}),
    "output / linear": (("output", "linear"), {576: 1.4, 3072: 1.25}),
}
OVER_PEFT = 0.7  # at most, of PEFT's overhead, which is that of plain LoRA
Step = Callable[[], Any]


class Net(nnx.Module):
    """Residual layers without biases."""

    def __init__(self, d: int, *, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(d, d, use_bias=False, rngs=rngs) for _ in range(LAYERS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = x + jax.nn.relu(layer(x))
        return x


def ready(fn: Callable[..., Any], *args: Any) -> Step:
    """A compiled step on its arguments, run once."""
    program, _ = compiled(fn, *args)
    jax.block_until_ready(program(*args))
    return lambda: jax.block_until_ready(program(*args))


def adapters_of(config: jk.lslora.Config, apply_fn: Any, params: Any, x: Any, seed: int) -> Any:
    """Fresh adapters with B other than zero, so that every gradient is."""
    fresh = jk.lslora.init(apply_fn, config, params, x, key=jax.random.key(seed))
    keys = dict(zip(fresh, jax.random.split(jax.random.key(seed + 1), len(fresh)), strict=True))
    return {
        name: one._replace(b=0.05 * jax.random.normal(keys[name], one.b.shape))
        for name, one in fresh.items()
    }


def steps_in_jax(d: int) -> dict[str, Step]:
    """``{contestant: one step}``: the base model, the placements here, and qwix."""
    model = Net(d, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (ROWS[d], d))
    apply_fn, params = jk.from_nnx(model)

    def base(x: Any, params: Any) -> Any:
        return jnp.square(apply_fn(params, x)).mean()

    out = {"base": ready(jax.value_and_grad(base), x, params)}
    for name, placement in PLACEMENTS.items():
        config = jk.lslora.Config(rank=RANK, alpha=ALPHA, fourier_placement=placement)
        adapters = adapters_of(config, apply_fn, params, x, 2)
        adapted = jk.lslora.attach(apply_fn, config)

        def loss(adapters: Any, x: Any, params: Any, adapted: Any = adapted) -> Any:
            return jnp.square(adapted(params, adapters, x)).mean()

        out[name] = ready(jax.value_and_grad(loss, (0, 1)), adapters, x, params)
    return out | {"qwix": step_of_qwix(model, x)}


def step_of_qwix(model: Net, x: jax.Array) -> Step:
    import qwix

    provider = qwix.LoraProvider(module_path=".*", rank=RANK, alpha=ALPHA)
    adapted = qwix.apply_lora_to_model(model, provider, x, rngs=nnx.Rngs(3))
    graph, lora, rest = nnx.split(adapted, nnx.LoRAParam, ...)
    found = len(jax.tree.leaves(lora))
    if found != 2 * LAYERS:  # qwix itself says nothing when it adapts nothing
        raise RuntimeError(f"qwix: expected {2 * LAYERS} LoRA arrays, got {found}")

    def loss(lora: Any, x: Any, rest: Any) -> Any:
        return jnp.square(nnx.merge(graph, lora, rest)(x)).mean()

    return ready(jax.value_and_grad(loss, (0, 1)), lora, x, rest)


def steps_in_torch(d: int, threads: int) -> dict[str, Step]:
    """``{contestant: one step}``: the same base model in PyTorch, and PEFT on it."""
    import torch

    peft = imported_peft()
    torch.set_num_threads(threads)
    torch.manual_seed(0)

    class TorchNet(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(
                [torch.nn.Linear(d, d, bias=False) for _ in range(LAYERS)]
            )

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = x + torch.relu(layer(x))
            return x

    base = TorchNet().requires_grad_(False)
    names = [f"layers.{i}" for i in range(LAYERS)]
    config = peft.LoraConfig(r=RANK, lora_alpha=int(ALPHA), target_modules=names)
    adapted = peft.get_peft_model(TorchNet(), config)  # type: ignore[arg-type]
    x = torch.randn(ROWS[d], d)

    def step(model: Any) -> Step:
        trained = [p for p in model.parameters() if p.requires_grad]

        def run() -> Any:
            rows = x.detach().requires_grad_()
            return torch.autograd.grad(model(rows).square().mean(), [*trained, rows])

        run()
        return run

    return {"base": step(base), "peft": step(adapted)}


def imported_peft() -> Any:
    """PEFT, which imports torchvision wherever it is: also one that was built for another torch."""
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError):
        sys.modules["torchvision"] = None  # type: ignore[assignment]
    return importlib.import_module("peft")


def turns(steps: dict[str, Step], pairs: int) -> dict[str, list[tuple[float, float]]]:
    """``{contestant: (seconds, processor seconds) of each turn}``."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for turn in range(pairs + 1):
        for name in list(steps)[:: -1 if turn % 2 else 1]:
            wall, processor = time.perf_counter(), time.process_time()
            steps[name]()
            spent = (time.perf_counter() - wall, time.process_time() - processor)
            if turn:  # the first warms caches and thread pools
                found[name].append(spent)
    return found


def ratio(found: dict[str, list[tuple[float, float]]], over: str, under: str, which: int) -> float:
    """Median over turns; ``which`` is 0 for seconds, 1 for processor seconds."""
    both = zip(found[over], found[under], strict=True)
    return statistics.median(a[which] / b[which] for a, b in both)


def measure(d: int, pairs: int, threads: int) -> dict[str, Any]:
    """All figures of one size."""
    jax_turns = turns(steps_in_jax(d), pairs)
    torch_turns = turns(steps_in_torch(d, threads), pairs)
    record: dict[str, Any] = {"rows": ROWS[d]}
    everyone = [("jax", name, jax_turns) for name in jax_turns]
    everyone += [("torch", name, torch_turns) for name in torch_turns]
    for framework, name, found in everyone:
        row = {
            "ms": 1e3 * statistics.median(t for t, _ in found[name]),
            "processor_ms": 1e3 * statistics.median(t for _, t in found[name]),
        }
        for under in ("base", "linear"):
            if under in found and name != under:
                row[f"over_{under}"] = ratio(found, name, under, 0)
                row[f"processor_over_{under}"] = ratio(found, name, under, 1)
        record[f"{framework} {name}"] = row
    record["over_peft"] = {
        name: {
            key: (record[f"jax {name}"][key] - 1) / (record["torch peft"][key] - 1)
            for key in ("over_base", "processor_over_base")
        }
        for name in (*PLACEMENTS, "qwix")
    }
    return record


def compilations_of_swaps() -> int:
    """How often XLA compiles while the adapters of a bank are exchanged in every way there is."""
    d, rows = 64, 8
    apply_fn, params = jk.from_nnx(Net(d, rngs=nnx.Rngs(0)))
    x = jnp.ones((rows, d))
    config = jk.lslora.Config(rank=RANK, alpha=ALPHA)
    a, b, c = (adapters_of(config, apply_fn, params, x, seed) for seed in (0, 2, 4))
    bank = jk.lslora.stack({"a": a, "b": b})
    # Made before counting: building a bank runs small programs of its own.
    banks = [bank, bank.set("a", c), bank.disable("b"), bank.delete("b").set("other", c)]
    indices = [jnp.asarray(i, jnp.int32) for i in (0, 1, -1)]
    mixed = [jnp.asarray([i, i - 1] * (rows // 2), jnp.int32) for i in (0, 1)]
    adapted = jax.jit(jk.lslora.attach(apply_fn, config))
    adapted(params, bank, x, adapter=indices[0])
    adapted(params, bank, x, adapter=mixed[0])
    count = 0

    def compiling(event: str, seconds: float, **_: Any) -> None:
        nonlocal count
        count += event.endswith("backend_compile_duration")

    jax.monitoring.register_event_duration_secs_listener(compiling)
    jax.block_until_ready(
        [adapted(params, one, x, adapter=i) for one in banks for i in (*indices, *mixed)]
    )
    swaps = count
    jax.block_until_ready(jax.jit(lambda x: x * 3)(x))
    if count == swaps:
        raise RuntimeError("JAX reports no compilation where there is one: nothing is counted")
    return swaps


def judged(record: dict[str, Any], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Each goal with what was measured."""
    rows = []
    for name, ((over, under), limits) in GOALS.items():
        for d in (d for d in sizes if d in limits):
            rows.append((name, d, record[str(d)][f"jax {over}"][f"over_{under}"], limits[d]))
    for d in sizes:
        for name in ("linear", "bottleneck"):
            found = record[str(d)]["over_peft"][name]["over_base"]
            rows.append((f"overhead of {name} / PEFT's", d, found, OVER_PEFT))
    rows.append(("compilations of swaps", None, record["compilations_of_swaps"], 0))
    return [
        {"goal": name, "d": d, "measured": found, "at_most": limit, "met": found <= limit}
        for name, d, found, limit in rows
    ]


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed blocks, whatever their size; False where there is another malloc."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    trim_threshold, mmap_max = -1, -4  # malloc.h
    return bool(mallopt(mmap_max, 0)) and bool(mallopt(trim_threshold, 2**31 - 1))


def show(record: dict[str, Any], sizes: Sequence[int]) -> None:
    from rich.console import Console

    from jaxkfac.jobs.report import terminal_table

    console = Console()
    if not console.is_terminal:  # a file has no width to keep to
        console.width = 120
    for d in sizes:
        of = record[str(d)]
        title = f"d = {d}, {of['rows']} rows: a step (in brackets: in processor time)"
        rows = []
        for name, row in of.items():
            if not name.startswith(("jax ", "torch ")):
                continue
            cells = [f"{row['ms']:.1f} ({row['processor_ms']:.1f})"]
            versus = dict.fromkeys(("over_base", "over_linear"), row)
            versus_peft = of["over_peft"].get(name.removeprefix("jax "))
            for key, values in (*versus.items(), ("over_base", versus_peft)):
                known = values is not None and key in values
                pair = (values[key], values[f"processor_{key}"]) if known and values else None
                cells.append(f"{pair[0]:.2f} ({pair[1]:.2f})" if pair else "")
            rows.append([name, *cells])
        head = ["contestant", "ms", "/ base", "/ linear", "overhead / PEFT's"]
        console.print(terminal_table(title, head, rows))
    goals = []
    for row in record["goals"]:
        found, limit = f"{row['measured']:.3g}", f"{row['at_most']:g}"
        met = "yes" if row["met"] else "no"
        goals.append([row["goal"], str(row["d"] or ""), found, limit, met])
    head = ["goal", "d", "measured", "at most", "met"]
    console.print(terminal_table("goals", head, goals, text_columns=(0, 4)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=21, help="turns of each (default 21)")
    parser.add_argument("--sizes", type=int, nargs="*", choices=ROWS, default=list(ROWS))
    parser.add_argument("--json", type=Path, help="write the record here")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", module="peft")
    kept = keep_freed_memory()
    threads = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    record = stamp(
        command=" ".join(["python -m benchmarks.adapters", *sys.argv[1:]]),
        **{name: version(name) for name in ("flax", "qwix", "torch", "peft")},
        pairs=args.pairs,
        rank=RANK,
        layers=LAYERS,
        threads=threads,
        keeps_freed_memory=kept,
    )
    record["compilations_of_swaps"] = compilations_of_swaps()
    for d in args.sizes:
        print(f"d = {d}", file=sys.stderr, flush=True)
        record[str(d)] = measure(d, args.pairs, threads)
    record["goals"] = judged(record, args.sizes)
    show(record, args.sizes)
    write(record, args.json)


if __name__ == "__main__":
    main()
