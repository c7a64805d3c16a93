"""Twelve named faults, and twenty mutants of four rooms drawn with seed 40, each against tests.

Run: make faults, which calls python -m benchmarks.faults RECORD COMMIT in a copy of the commit.

The record has the form of the mutants' (``benchmarks.mutants``): what no test has killed and no
``why`` explains runs again each time. What a test of an earlier commit killed is tried once more,
with that test alone and, if it passes, with all tests. These are the ones of the fault's own file,
then the list of its room here: the room's tests beside the code, oracles, and parity in float64.
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.mutants import drawn, run

RECORD = Path(__file__).parent / "results" / "faults.json"
SEED, DRAWN = 40, 20
FACTORS = (
    "jaxkfac/factors/_patches_test.py jaxkfac/blocks/_average_test.py jaxkfac/kinds "
    "parity_tests/factors_test.py parity_tests/averages_test.py tests/factors_oracle_test.py"
)
ROOMS = {  # sources of the draw; tests, those that are quick first
    "kinds": ("kinds/*", FACTORS),
    "linalg": ("linalg/* linalg/spectral/*", "jaxkfac/linalg parity_tests/powers_test.py"),
    "NF4": ("lslora/nf4/*", "jaxkfac/lslora/nf4 parity_tests/adapters_nf4_test.py"),
    "optim": ("optim/*", "jaxkfac/optim parity_tests/accumulation_test.py"),
}
OTHER_TESTS = {
    "factors": FACTORS,
    "adapters": "jaxkfac/lslora/_nonlinearity_test.py parity_tests/adapters_test.py",
    "encoder-decoder": "jaxkfac/jobs/models/encoder_decoder parity_tests/factors_test.py",
    "few-shot": "jaxkfac/jobs/models/few_shot parity_tests/few_shot_test.py",
}


class Fault(NamedTuple):
    """A fault that somebody has named: a part of one line, and what replaces it."""

    name: str
    room: str
    file: str
    line: str
    old: str
    new: str


_MEAN = "    return total / count.reshape((*count.shape, *[1] * matrix_axes))"
_SLOPE = (
    "        du = (c[1] * cotangent + math.pi * (c[2] * by_cosine - c[3] * by_sine)) * (1 - x * x)"
)
_OFFSET = "        offset = np.float32(scales.mean(dtype=np.float64))"
_PATCHES = "    x = side.x.transpose(*side.rows, *side.feature_axes).reshape(-1, size)"
_BLOCKS = "jobs/models/encoder_decoder/_blocks"
_FACTORS, _TENSOR, _PHI = "factors/_factors", "lslora/nf4/_tensor", "lslora/_nonlinearity"
NAMED = (
    Fault("a mean over N - 1", "factors", _FACTORS, _MEAN, "count.re", "(count - 1).re"),
    Fault("a sum in place of a mean", "factors", _FACTORS, _MEAN, _MEAN[16:], ""),
    Fault("a level of NF4", "NF4", _TENSOR, "        0.16093020141124725,", "0.16", "0.17"),
    Fault("the second level's offset is 0", "NF4", _TENSOR, _OFFSET, _OFFSET[28:-1], "0"),
    Fault("the sign of a term of phi'", "adapters", _PHI, _SLOPE, "- c[3]", "+ c[3]"),
    Fault("phi' with 1 - x", "adapters", _PHI, _SLOPE, "1 - x * x", "1 - x"),
    Fault(
        "micro-batches of equal weight",
        "optim",
        "optim/_multi_steps",
        "        return jax.tree.map(lambda g: count * g.astype(dtype), grads)",
        "count * ",
        "",
    ),
    Fault(
        "reduce counts all positions for each example",
        "factors",
        "factors/_taps",
        "        return jnp.full(like.shape, side.number // like.shape[-1], like.dtype)",
        " // like.shape[-1]",
        "",
    ),
    Fault(
        "a bucket of T5",
        "encoder-decoder",
        _BLOCKS,
        "    far = single + (far * np.float32(num - single)).astype(np.int32)",
        "single))",
        "single - 1))",
    ),
    Fault(
        "an episode's variance without Bessel's correction",
        "few-shot",
        "jobs/models/few_shot/_backbones",
        "            self._average(self.var, var * (count / max(count - 1, 1)))",
        " * (count / max(count - 1, 1))",
        "",
    ),
    Fault(
        "the axes of a wide convolution's patches in another order",
        "kinds",
        "kinds/_moments",
        _PATCHES,
        "feature_axes",
        "feature_axes[::-1]",
    ),
    Fault(
        "an average whose G does not decay",
        "factors",
        "factors/_average",
        "        g_sums=dict.fromkeys(new.g_sums, terms),",
        "terms",
        "jnp.ones(())",
    ),
)


def drawn_faults(tree: Path) -> list[dict[str, Any]]:
    """The named faults, found in a tree, and the drawn ones."""
    named = []
    for fault in NAMED:
        file = f"jaxkfac/{fault.file}.py"
        line = (tree / file).read_text().split("\n").index(fault.line) + 1
        row = {"room": fault.room, "file": file, "line": line, "what": fault.name}
        after = fault.line.replace(fault.old, fault.new, 1)
        named.append({**row, "before": fault.line, "after": after})
    return [*named, *drawn(tree, DRAWN, SEED, ROOMS)]


def tests_of(fault: dict[str, Any]) -> list[str]:
    """The tests of its room."""
    tests = {room: tests for room, (_, tests) in ROOMS.items()} | OTHER_TESTS
    return tests[fault["room"]].split()


if __name__ == "__main__":
    run(
        Path(sys.argv[1]),
        sys.argv[2],
        draw=lambda: {"seed": SEED, "mutants": drawn_faults(Path())},
        tests_of=tests_of,
        again=True,
    )
