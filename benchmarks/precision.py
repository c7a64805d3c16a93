"""What Gram products lose in the precisions of matrix units: simulated by rounding on the CPU.

Run: python -m benchmarks.precision [--markdown FILE]

``precision="auto"`` forms Gram products as the model forms its own. Rows of float32 are rounded
here as the units round them: once to bfloat16 (8 bits), to TF32 (11 bits), or into a sum of two
bfloat16 numbers, three of whose four products are added. Products are summed in float32. The rows
(4096 of 512 features) have variances that fall over four decades, as activations' do. Beside the
error of the matrix stands that of what is used of it: its inverse, damped by a part of its largest
eigenvalue, times a random gradient. All figures are against float64.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROWS, FEATURES, DECADES = 4096, 512, 4
DAMPINGS = (1e-2, 1e-4, 1e-6)


def rounded(x: np.ndarray, bits: int) -> np.ndarray:
    """Float32 numbers with ``bits`` bits of mantissa, the leading one included."""
    drop = 24 - bits
    whole = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    even = (whole >> np.uint64(drop)) & np.uint64(1)
    whole = (whole + np.uint64(2 ** (drop - 1) - 1) + even) & ~np.uint64(2**drop - 1)
    return whole.astype(np.uint32).view(np.float32)


def one_pass(bits: int) -> Callable[[np.ndarray], np.ndarray]:
    def gram(x: np.ndarray) -> np.ndarray:
        y = rounded(x, bits)
        return y.T @ y

    return gram


def three_passes(x: np.ndarray) -> np.ndarray:
    high = rounded(x, 8)
    low = rounded(x - high, 8)
    cross = high.T @ low
    return high.T @ high + cross + cross.T


PRECISIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "float32": lambda x: x.T @ x,
    "bfloat16, 3 passes": three_passes,
    "TF32": one_pass(11),
    "bfloat16, 1 pass": one_pass(8),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--markdown", type=Path, help="write the table here")
    args = parser.parse_args()
    random = np.random.default_rng(0)
    basis = np.linalg.qr(random.normal(size=(FEATURES, FEATURES)))[0]
    scales = np.logspace(0, -DECADES / 2, FEATURES)
    x = ((random.normal(size=(ROWS, FEATURES)) * scales) @ basis).astype(np.float32)
    gradient = random.normal(size=FEATURES)
    exact = x.astype(np.float64).T @ x.astype(np.float64)
    top = np.linalg.norm(exact, 2)

    def step(matrix: np.ndarray, damping: float) -> np.ndarray:
        return np.linalg.solve(matrix + damping * top * np.eye(FEATURES), gradient)

    head = ["precision", "matrix", *(f"step, damping {d:.0e}" for d in DAMPINGS)]
    lines = [head, ["---"] * len(head)]
    for name, gram in PRECISIONS.items():
        matrix = gram(x).astype(np.float64)
        errors = [np.linalg.norm(matrix - exact) / np.linalg.norm(exact)]
        for damping in DAMPINGS:
            right = step(exact, damping)
            errors.append(np.linalg.norm(step(matrix, damping) - right) / np.linalg.norm(right))
        lines.append([name, *(f"{error:.1e}" for error in errors)])
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
    print(table)
    if args.markdown is not None:
        text = "Relative errors, `python -m benchmarks.precision`; rows and steps as it says there."
        args.markdown.write_text(f"{text}\n\n{table}")


if __name__ == "__main__":
    main()
