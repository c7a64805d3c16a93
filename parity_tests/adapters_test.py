"""Adapters: outputs, all gradients, regulariser, diagnostics; both placements and plain LoRA."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxkfac import lslora
from parity_tests.adapters import (
    Gradients,
    Linked,
    Setting,
    gradient_program,
    leaf_pairs,
    linked,
    reference_loss,
    wide_dtype,
)
from parity_tests.cases import Tolerance, cases, exact, over
from parity_tests.compare import Pair
from parity_tests.sides import Sides
from torch_ref import lslora as reference

OUTPUT, BOTTLENECK, PLAIN = Setting(), Setting("bottleneck"), Setting("none")
SETTINGS = {
    "output": OUTPUT,
    "bottleneck": BOTTLENECK,
    "plain LoRA": PLAIN,
    "rsLoRA, ranks by layer": Setting(rslora=True, by_layer=True),
}


def _both(sides: Sides, setting: Setting) -> tuple[Linked, Gradients, dict[str, Any]]:
    """Gradients of jaxkfac, and PyTorch's in the model's leaves."""

    def make() -> Any:
        pair = linked(sides, setting)
        ours = gradient_program(sides, setting)(sides.params, pair.adapters, sides.our_batch())
        inputs, *rest = sides.batch()
        inputs = inputs.clone().requires_grad_()
        value = reference_loss(sides, setting, pair.model, (inputs, *rest))
        value.backward()
        with torch.no_grad():
            outputs = pair.model(inputs)
        return pair, ours, {"value": value, "inputs": inputs.grad, "outputs": outputs}

    return sides.kept(("adapter gradients", setting), make)


def forward(setting: Setting) -> Callable[[Sides], Iterable[Pair]]:
    def pairs(sides: Sides) -> Iterable[Pair]:
        _, ours, theirs = _both(sides, setting)
        yield Pair("model", "outputs", ours.outputs, theirs["outputs"])
        kept = f"torch.{ours.outputs.dtype}" == str(theirs["outputs"].dtype)
        yield Pair("model", "dtype of the outputs", kept, True)
        yield Pair("objective", "value", ours.value, theirs["value"])
        change = (theirs["outputs"] - sides.outputs()).abs().max().item()
        yield Pair("model", "the adapter does something", change > 0.1, True)

    return pairs


def backward(setting: Setting) -> Callable[[Sides], Iterable[Pair]]:
    def pairs(sides: Sides) -> Iterable[Pair]:
        pair, ours, theirs = _both(sides, setting)
        yield from leaf_pairs(
            sides, ours.adapters, pair.model, "gradient of", lambda leaf: leaf.grad
        )
        yield Pair("model", "gradient of x", ours.inputs, theirs["inputs"])

    return pairs


def regulariser(sides: Sides) -> Iterable[Pair]:
    """Value and gradient, of coefficients alone."""
    pair = linked(sides, OUTPUT)
    value, grads = jax.jit(jax.value_and_grad(lslora.fourier_loss))(pair.adapters)
    expected = reference.fourier_loss(pair.model)
    expected.backward()
    yield Pair("model", "regulariser", value, expected)

    def grad(leaf: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad

    yield from leaf_pairs(sides, grads, pair.model, "its gradient of", grad)


def diagnostics(placement: Any, *keys: str) -> Callable[[Sides], Iterable[Pair]]:
    """These numbers of :func:`diagnose`."""

    def pairs(sides: Sides) -> Iterable[Pair]:
        for pair in sides.kept(("diagnosis", placement), lambda: list(every(sides))):
            if pair.what in keys:
                yield pair

    def every(sides: Sides) -> Iterable[Pair]:
        pair = linked(sides, Setting(placement))
        adapted = lslora.attach(sides.problem.apply(), pair.config)
        ours = jax.jit(lambda a, p, x: lslora.diagnose(a, adapted, p, x))(
            pair.adapters, sides.params, sides.our_batch()[0]
        )
        theirs = reference.diagnose(pair.model, sides.batch()[0])
        own = {name.removesuffix("/default"): row._asdict() for name, row in theirs.items()}
        for twin in sides.problem.twins:
            for key, found in ours[twin.name]._asdict().items():
                expected = twin.stacked(own, lambda row, key=key: np.array(row[key]))
                yield Pair(twin.name, key, found, expected)
        fractions = [row.saturated for row in theirs.values()]
        yield Pair("model", "saturated", 0 < np.mean(fractions) < 1, True)  # some are

    return pairs


def nonlinearity(sides: Sides) -> Iterable[Pair]:
    r"""$\varphi$ by itself, of rows in the problem's dtype, in float32 at the least."""
    wide = torch.promote_types(sides.tensor_dtype, torch.float32)
    rng = np.random.default_rng(23)
    z, coefficients = 2 * rng.normal(size=(3, 64)), rng.normal(size=(3, 4))
    sigmas = np.array([0.6, -1.5, 4.0])
    rows = jnp.asarray(z, sides.dtype)
    dtype = wide_dtype(sides)
    ours = jax.jit(lslora.fourier)(
        rows, jnp.asarray(coefficients, dtype), jnp.asarray(sigmas, dtype)
    )
    yield Pair("phi", "computed in float32 or wider", ours.dtype == dtype, True)
    for i, sigma in enumerate(sigmas):
        phi = reference.FourierParams(sigma, device=sides.device).to(wide)
        with torch.no_grad():
            phi.weight.copy_(torch.from_numpy(coefficients[i]))
            phi.sigma.fill_(sigma)
        yield Pair(f"sigma {sigma:g}", "phi", ours[i], phi(sides.tensor(z[i])))


# ---------------------------------------------------------------- the table


def _without_tf32(tolerances: dict[str, Tolerance]) -> dict[str, Tolerance]:
    return {dtype: x for dtype, x in tolerances.items() if dtype != "tf32"}


POLYNOMIALS = "sin and cos of pi x are polynomials in float32, off by up to 3.5e-7"
VALUES = exact(times32=1e-5, why=POLYNOMIALS)
# In a softmax's head c0 shifts all classes: what remains of its gradient is the regulariser's.
CANCELLING = f"{POLYNOMIALS}; a scalar's gradient is a sum over rows that cancel, to 1e-3 of a term"
GRADIENTS = _without_tf32(exact(times32=5e-4, why=CANCELLING))
BFLOAT16 = {"bfloat16": Tolerance(3e-2, "rows rounded to 8 bits layer after layer; phi in float32")}
NUMBERS = ("coefficients", "sigma", "deviation", "nonlinearity")
QUOTIENT = Tolerance(2.0**-23, "a quotient of two counts, kept in float32 under float64 too")
PROBLEMS = ["classifier", "scanned", "projections"]
COVERS = ("Adapter", "Adapters", "Adapted", "Config", "attach", "lslora")

CASES = [
    *(
        case
        for name, setting in SETTINGS.items()
        for case in cases(
            "adapter forward",
            name,
            PROBLEMS if name in ("output", "bottleneck") else PROBLEMS[1:],
            forward(setting),
            covers=COVERS,
            tolerances=VALUES,
        )
    ),
    *(
        case
        for name, setting in SETTINGS.items()
        for case in cases(
            "adapter backward",
            f"A, B, x, c0 to c3, sigma, {name}",
            PROBLEMS if name in ("output", "bottleneck") else PROBLEMS[1:],
            backward(setting),
            covers=(*COVERS, "fourier_loss"),
            tolerances=GRADIENTS,
        )
    ),
    *(
        case
        for name in ("output", "bottleneck", "plain LoRA")
        for case in cases(
            "adapter forward",
            f"bfloat16 base, {name}",
            "classifier",
            forward(SETTINGS[name]),
            covers=COVERS,
            tolerances=BFLOAT16,
        )
    ),
    *cases(
        "adapter forward",
        "phi by itself",
        "classifier",
        nonlinearity,
        covers="fourier",
        tolerances=_without_tf32(VALUES)
        | {"bfloat16": Tolerance(2e-6, f"of the same rows, in float32; {POLYNOMIALS}")},
    ),
    *cases(
        "adapter regulariser",
        "value and gradient",
        PROBLEMS,
        regulariser,
        covers="fourier_loss",
        tolerances=_without_tf32(exact()),
    ),
    *(
        case
        for placement in ("output", "bottleneck")
        for case in (
            *cases(
                "adapter diagnostics",
                placement,
                PROBLEMS[1:],
                diagnostics(placement, *NUMBERS),
                covers=("diagnose", "Diagnosis"),
                tolerances=_without_tf32(exact(why="sums of four numbers")),
            ),
            *cases(
                "adapter diagnostics",
                f"saturated fraction, {placement}",
                PROBLEMS[1:],
                diagnostics(placement, "saturated"),
                covers=("diagnose", "Diagnosis"),
                tolerances={"float64": QUOTIENT, "float32": QUOTIENT},
            ),
        )
    ),
]


@pytest.mark.default(1, slow=6)
@over(CASES)
def test_adapters_agree(case, check):
    check(case)
