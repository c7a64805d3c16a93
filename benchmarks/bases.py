"""What eigenbases cost where and as they are kept: on the device or the host, in half, of low rank.

Run: python -m benchmarks.bases [--width 512] [--depth 4] [--calls 5] [--json F] [--markdown F]

One preconditioning (``natural_gradient``) of a scanned stack of square layers, with bases of a
``HostCurvature``. By row:

- processor seconds of one call: under ``jit`` where the bases are on the device, and outside of it
  where one block's eigenvectors at a time cross from the host;
- MiB of the bases that stay on the device, and the most of them that are sent there at once: two
  blocks, since the next is on its way while one is used;
- MiB of the compiled call's arguments and temporaries, all that it needs on a device (of the call
  outside of ``jit``: of the program that solves one block, beside gradient and result);
- MiB that cross from the host in one call;
- how far the natural gradient is from that of whole float32 bases, relative. Inputs and targets
  are random, so that spectra are flat: the worst case of a low rank.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkfac as jk
from benchmarks._record import shown, stamp, write
from jaxkfac.curvature import _apply

MIB = 2**20
DAMPING = 1e-3
KEPT: dict[str, dict[str, Any]] = {
    "device": {},
    "device, bfloat16": {"vectors_dtype": "bfloat16"},
    "device, rank {rank}": {"rank": "rank"},
    "host": {"bases_in": "host"},
    "host, bfloat16": {"bases_in": "host", "vectors_dtype": "bfloat16"},
    "host, rank {rank}": {"bases_in": "host", "rank": "rank"},
}


def problem(width: int, depth: int) -> tuple[Any, Any]:
    """A gradient and its factors."""

    def apply_fn(params: Any, x: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["blocks"])
        return x @ params["head"]

    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "blocks": jax.random.normal(keys[0], (depth, width, width)) / width**0.5,
        "head": jax.random.normal(keys[1], (width, width)) / width**0.5,
    }
    batch = tuple(jax.random.normal(key, (2 * width, width)) for key in keys[2:])
    stats = jax.jit(jk.value_grad_and_factors(jk.Objective(apply_fn, jk.Gaussian())))
    _, grads, factors = stats(params, batch)
    return grads, factors


def bases_of(factors: Any, **options: Any) -> Any:
    with jk.HostCurvature(refresh_every=1, lag=0, **options) as service:
        service.push(factors, 0)
        return service.bases(0)


def precondition(grads: Any, bases: Any) -> Any:
    return jk.natural_gradient(grads, bases, damping=DAMPING)


def row(grads: Any, bases: Any, exact: Any, calls: int) -> dict[str, float]:
    """The figures of one way to keep bases."""
    resident = _nbytes([x for x in jax.tree.leaves(bases) if isinstance(x, jax.Array)])
    on_host = any(isinstance(x, np.ndarray) for x in jax.tree.leaves(bases))
    run, sent = (precondition, _sent_by(grads, bases)) if on_host else (jax.jit(precondition), [])
    found = jax.block_until_ready(run(grads, bases))
    seconds = []
    for _ in range(calls):
        start = time.process_time()
        jax.block_until_ready(run(grads, bases))
        seconds.append(time.process_time() - start)
    return {
        "cpu_seconds": statistics.median(seconds),
        "bases_on_device_mib": resident / MIB,
        "sent_at_once_mib": 2 * max(sent, default=0) / MIB,
        "program_mib": (_of_one_block(grads, bases) if on_host else _of_all(grads, bases)) / MIB,
        "sent_a_call_mib": sum(sent) / MIB,
        "off_by": _distance(found, exact),
    }


def _sent_by(grads: Any, bases: Any) -> list[int]:
    """Bytes of eigenvectors that each block sends."""
    blocks: list[int] = []
    put, solve = _apply.put_result, _apply._solved_into
    now = 0

    def counted(x: Any, where: Any) -> Any:
        nonlocal now
        now += x.nbytes
        return put(x, where)

    def solved(*args: Any, **options: Any) -> Any:
        nonlocal now
        blocks.append(now)
        now = 0
        return solve(*args, **options)

    _apply.put_result, _apply._solved_into = counted, solved
    try:
        precondition(grads, bases)
    finally:
        _apply.put_result, _apply._solved_into = put, solve
    return blocks


def _of_all(grads: Any, bases: Any) -> int:
    memory = jax.jit(precondition).lower(grads, bases).compile().memory_analysis()
    return memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes


def _of_one_block(grads: Any, bases: Any) -> int:
    """What solves the largest block, its next eigenvectors, and the rest of gradient and result."""
    most, solve = 0, _apply._solved_into

    def solved(out: Any, one: Any, *args: Any, **options: Any) -> Any:
        nonlocal most
        memory = solve.lower(out, one, *args, **options).compile().memory_analysis()
        assert memory is not None
        own = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        most = max(most, own - _nbytes(out) + _nbytes(one.basis))
        return solve(out, one, *args, **options)

    _apply._solved_into = solved
    try:
        precondition(grads, bases)
    finally:
        _apply._solved_into = solve
    return most + 2 * _nbytes(grads)


def _nbytes(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def _distance(tree: Any, other: Any) -> float:
    one, two = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(t)]) for t in (tree, other))
    return float(np.linalg.norm(one - two) / np.linalg.norm(two))


def table(record: dict[str, Any]) -> str:
    """The record as a page."""
    rows = record["rows"]
    columns = list(next(iter(rows.values())))
    lines = [["bases", *columns], ["---", *["---:"] * len(columns)]]
    lines += [[name, *(f"{found[x]:.3g}" for x in columns)] for name, found in rows.items()]
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    title, _, about = (__doc__ or "").partition("\n\n")
    _, _, about = about.partition("\n\n")
    how = f"Written on {record['date']} with `python -m benchmarks.bases --width "
    how += f"{record['width']} --depth {record['depth']}`, on {record['device']}."
    return f"# {title}\n\n{about}\n{how}\n\n{text}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    args = parser.parse_args()
    record = stamp(width=args.width, depth=args.depth, calls=args.calls)
    grads, factors = problem(args.width, args.depth)
    exact = precondition(grads, bases_of(factors))
    rank, record["rows"] = args.width // 8, {}
    for title, options in KEPT.items():
        name = title.format(rank=rank)
        bases = bases_of(factors, **{k: rank if v == "rank" else v for k, v in options.items()})
        record["rows"][name] = row(grads, bases, exact, args.calls)
        shown(name, record["rows"][name])
    write(record, args.json)
    if args.markdown is not None:
        args.markdown.write_text(table(record))


if __name__ == "__main__":
    main()
