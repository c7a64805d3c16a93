"""Cost of EKFAC: (measuring every eigenvalue) / gradient, in time and bytes.

Run: python -m benchmarks.ekfac [--pairs 21] [--per token] [--json FILE]

The programs are those of ``benchmarks.factors``; the eigenvectors are those of their factors.
The measurement is by itself, without value and gradient of the parameters. The two compiled
programs are timed in interleaved pairs, and the ratio is the median over pairs.

The floor, dense: a gradient is 6 n d^2 operations a layer (forward 2, backward 4). Measuring
needs the forward pass (2), the cotangents of layer inputs (2), the rotation of both sides'
rows (2 each) and one product of squares (2): 10 of 6, and 1.70 x the gradient where the first
layer needs no cotangent of its input. With several positions an example, its gradient (2)
takes the place of the product of squares.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import jax

import jaxkfac as jk
from benchmarks._record import shown, stamp, write
from benchmarks.factors import cases, compiled, seconds


def measure(objective: Any, params: Any, batch: Any, pairs: int, per: str) -> dict[str, float]:
    """All figures of one program."""
    stats = jax.jit(jk.value_grad_and_factors(objective))
    bases = jk.eigendecompose(stats(params, batch)[2])

    def corrections(bases: Any, params: Any, batch: Any) -> Any:
        return jk.correct_eigenvalues(objective, bases, per=per)(params, batch).corrections

    plain, plain_compile = compiled(jax.value_and_grad(objective), params, batch)
    full, full_compile = compiled(corrections, bases, params, batch)
    seconds(plain, params, batch), seconds(full, bases, params, batch)
    times = [
        (seconds(plain, params, batch), seconds(full, bases, params, batch)) for _ in range(pairs)
    ]
    found = full(bases, params, batch)
    before, after = plain.memory_analysis(), full.memory_analysis()
    return {
        "gradient_ms": 1e3 * statistics.median(t for t, _ in times),
        "time_ratio": statistics.median(b / a for a, b in times),
        "compile_ratio": full_compile / plain_compile,
        "gradient_temp_mib": before.temp_size_in_bytes / 2**20,
        "temp_mib": after.temp_size_in_bytes / 2**20,
        "values_mib": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(found)) / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=21, help="interleaved pairs (default 21)")
    parser.add_argument("--per", default="example", choices=("example", "token"))
    parser.add_argument("--cases", nargs="*", default=list(cases()), help="which programs")
    parser.add_argument("--json", type=Path, help="write the record here")
    args = parser.parse_args()
    record = stamp(per=args.per, pairs=args.pairs)
    for name, case in cases().items():
        if name not in args.cases:
            continue
        record[name] = measure(*case, args.pairs, args.per)
        shown(name, record[name])
    write(record, args.json)


if __name__ == "__main__":
    main()
