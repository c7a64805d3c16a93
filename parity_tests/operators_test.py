"""Exact operators times a vector, against PyTorch's own derivatives.

torch_ref has no operator for these; the reference here is the definition, written with
``torch.autograd`` and gradients of single examples.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jaxkfac as jk
from parity_tests.cases import cases, divided, exact, over
from parity_tests.compare import Pair
from parity_tests.ekfac_test import examples
from parity_tests.powers_test import tree_pairs
from parity_tests.sides import Sides
from torch_ref import curvature as ref

DAMPING = 0.1


def _vector(sides: Sides) -> dict[str, torch.Tensor]:
    rng, model = np.random.default_rng(51), sides.model
    return {n: sides.tensor(rng.normal(size=tuple(p.shape))) for n, p in model.named_parameters()}


def _tree(sides: Sides, tensors: dict[str, torch.Tensor]) -> Any:
    return sides.problem.parameters({n: x.detach().cpu().numpy() for n, x in tensors.items()})


def _our_vector(sides: Sides) -> Any:
    tree = _tree(sides, _vector(sides))
    return jax.tree.map(lambda x: jnp.asarray(x, sides.dtype), tree)


def _gradient(sides: Sides, loss: torch.Tensor, **options: Any) -> dict[str, torch.Tensor]:
    names, parameters = zip(*sides.model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters, **options), strict=True))


def _dot(x: dict[str, torch.Tensor], y: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.stack([(x[name] * y[name]).sum() for name in x]).sum()


# ---------------------------------------------------------------- the definitions


def _empirical(sides: Sides, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    """Outer products of each example's gradient, of the sum over its terms."""
    v, total = _vector(sides), None
    for batch, terms in examples(sides, targets=targets):
        if terms == 0:
            continue
        g = _gradient(sides, terms * sides.loss(sides.model, batch))
        weight = _dot(g, v) / sides.data().loss_terms
        total = {n: x * weight + (0 if total is None else total[n]) for n, x in g.items()}
    assert total is not None
    return total


def empirical(sides: Sides) -> Iterable[Pair]:
    operator = jk.operators.fisher(
        sides.objective, sides.params, sides.our_batch(), fisher="empirical"
    )
    expected = _empirical(sides, sides.batch()[1])
    return tree_pairs(operator @ _our_vector(sides), _tree(sides, expected))


def sampled(sides: Sides) -> Iterable[Pair]:
    drawn = sides.labels()
    operator = jk.operators.fisher(
        sides.objective, sides.params, sides.our_batch(), fisher="mc", labels=jnp.asarray(drawn)
    )
    parts = [_empirical(sides, torch.from_numpy(y).to(sides.device)) for y in drawn]
    expected = {n: sum(p[n] for p in parts) / len(parts) for n in parts[0]}
    return tree_pairs(operator @ _our_vector(sides), _tree(sides, expected))


def gauss_newton(sides: Sides) -> Iterable[Pair]:
    """J^T H J with H of cross entropy; the exact Fisher is the same matrix."""
    inputs, _, *mask = sides.batch()
    outputs = sides.model(**inputs) if isinstance(inputs, dict) else sides.model(inputs)
    # J v is the derivative of (J^T w) . v in w
    w = torch.zeros_like(outputs, requires_grad=True)
    pulled = _gradient(sides, (outputs * w).sum(), create_graph=True)
    tangent = torch.autograd.grad(_dot(pulled, _vector(sides)), w, retain_graph=True)[0]
    p = outputs.softmax(-1)
    curved = p * (tangent - (p * tangent).sum(-1, keepdim=True))
    if mask:
        curved = curved * mask[0][..., None]
    curved = (curved / sides.data().loss_terms).detach()
    expected = _gradient(sides, (outputs * curved).sum())
    for make in (jk.operators.ggn, jk.operators.fisher):
        operator = make(sides.objective, sides.params, sides.our_batch())
        yield from tree_pairs(operator @ _our_vector(sides), _tree(sides, expected))


def second_derivative(sides: Sides) -> Iterable[Pair]:
    loss = sides.loss(sides.model, sides.batch())
    gradient = _gradient(sides, loss, create_graph=True)
    expected = _gradient(sides, _dot(gradient, _vector(sides)))
    operator = jk.operators.hessian(sides.objective, sides.params, sides.our_batch())
    return tree_pairs(operator @ _our_vector(sides), _tree(sides, expected))


def solved(sides: Sides) -> Iterable[Pair]:
    """A damped system by conjugate gradients, against PyTorch's dense solver."""
    theirs = ref.KroneckerOperator(sides.bases())
    eye = torch.eye(theirs.shape[0], dtype=sides.tensor_dtype)
    matrix = torch.stack([theirs @ column for column in eye], dim=1)
    gradient = theirs.flatten(sides.gradients()).cpu()
    dense = torch.linalg.solve(matrix + DAMPING * eye, gradient)
    operator = jk.operators.kronecker(sides.our_bases(), sides.params).damped(DAMPING)
    found = jk.operators.solve(operator, sides.ours().grads, rtol=1e-12, max_steps=500)
    return tree_pairs(found.solution, sides.tree(theirs.unflatten(dense)))


# ---------------------------------------------------------------- the Jacobian


def _kept_rows(sides: Sides, rows: int) -> torch.Tensor:
    """1 for the rows of terms that the mask keeps, 0 for the others."""
    _, _, *mask = sides.batch()
    if not mask:
        return torch.ones(rows, dtype=sides.tensor_dtype, device=sides.device)
    kept = mask[0].reshape(-1).to(sides.tensor_dtype)
    return kept.repeat_interleave(rows // len(kept))


def gram_of_outputs(sides: Sides) -> Iterable[Pair]:
    matrix = ref.gram(sides.model, sides.batch()[0])
    kept = _kept_rows(sides, len(matrix))
    operator = jk.jacobian(sides.objective, sides.params, sides.our_batch())
    expected = (matrix * kept * kept[:, None]).cpu().numpy()
    yield Pair("", "Gram matrix", operator.gram(), expected)
    yield Pair("", "squared norms", operator.squared_norms(), expected.diagonal())


def least_squares_step(sides: Sides) -> Iterable[Pair]:
    """J^T (K + damping)^-1 x, the damping being the mean eigenvalue of K."""
    rows = ref.jacobian(sides.model, sides.batch()[0])
    rows = rows * _kept_rows(sides, len(rows))[:, None]
    x = np.random.default_rng(52).normal(size=len(rows))
    matrix, eye = rows @ rows.T, torch.eye(len(rows), dtype=rows.dtype, device=rows.device)
    solved = torch.linalg.solve(matrix + matrix.trace() / len(rows) * eye, sides.tensor(x))
    flat, expected, start = rows.T @ solved, {}, 0
    for name, parameter in sides.model.named_parameters():
        expected[name] = flat[start : start + parameter.numel()].reshape(parameter.shape)
        start += parameter.numel()
    operator = jk.jacobian(sides.objective, sides.params, sides.our_batch())
    ours = operator.gram()
    damped = ours + jnp.trace(ours) / len(ours) * jnp.eye(len(ours), dtype=ours.dtype)
    step = operator.vjp(jnp.linalg.solve(damped, jnp.asarray(x, ours.dtype)))
    return tree_pairs(step, _tree(sides, expected))


def two_steps(sides: Sides) -> Iterable[Pair]:
    """Two updates of ``jk.spring`` at a rate, the second with the momentum of the first."""
    inputs = sides.batch()[0]
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else ((inputs,), {})
    with torch.no_grad():
        outputs = sides.model(*args, **kwargs)
    y = np.random.default_rng(53).normal(size=tuple(outputs.shape))
    kept = _kept_rows(sides, outputs.numel())
    terms = kept.sum() / outputs.shape[-1]
    rows = ref.jacobian(sides.model, inputs) * (kept / terms.sqrt())[:, None]
    residuals = (outputs - sides.tensor(y)).reshape(-1) * kept / terms.sqrt()
    options = {"damping": DAMPING, "momentum": 0.9}
    first = ref.spring_direction(rows, residuals, torch.zeros_like(rows[0]), **options)
    # At the same parameters, so that both sides need no second model.
    second = ref.spring_direction(rows, residuals, first, **options)
    objective = jk.Objective(sides.problem.apply(), jk.Gaussian())
    tx = jk.spring(learning_rate=0.5, damping=DAMPING)
    ours = sides.our_batch()
    batch = (ours[0], jnp.asarray(y, sides.dtype), *ours[2:])
    stats, state = jk.value_grad_and_factors(objective), tx.init(sides.params)

    @jax.jit
    def update(params: Any, state: Any, batch: Any) -> Any:
        return tx.update(params, state, params, **stats.adaptation(params, batch))

    for what, direction in (("first", first), ("second", second)):
        updates, state = update(sides.params, state, batch)
        expected, start = {}, 0
        for name, parameter in sides.model.named_parameters():
            part = direction[start : start + parameter.numel()]
            expected[name], start = -0.5 * part.reshape(parameter.shape), start + parameter.numel()
        for pair in tree_pairs(updates, _tree(sides, expected)):
            yield pair._replace(layer=f"{what} {pair.layer}")


# ---------------------------------------------------------------- the table

CPU = {name: exact()[name] for name in ("float64", "float32")}
NAMES = ["classifier", "conv2d", "masked tokens"]


def _table(name: str, pairs: Callable[[Sides], Iterable[Pair]], *covers: str) -> list[Any]:
    covered = (*covers, "ExactOperator", "Operator")
    return cases("operators", name, NAMES, pairs, covers=covered, tolerances=CPU)


CASES = [
    *_table("empirical Fisher", empirical, "fisher"),
    *_table("sampled Fisher", sampled, "fisher"),
    *_table("Gauss-Newton and exact Fisher", gauss_newton, "fisher", "ggn"),
    *_table("Hessian", second_derivative, "hessian"),
    *cases(
        "operators",
        "Gram matrix",
        NAMES,
        gram_of_outputs,
        covers=("gram", "jacobian", "Jacobian"),
        tolerances=CPU,
    ),
    *cases(
        "operators",
        "step from a Gram matrix",
        NAMES,
        least_squares_step,
        covers=("gram", "jacobian", "Jacobian"),
        tolerances={"float64": divided(100)["float64"]},
    ),
    *cases(
        "operators",
        "two steps in the space of rows",
        NAMES,
        two_steps,
        covers=("spring", "SpringState"),
        tolerances={"float64": divided(100)["float64"]},
    ),
    *cases(
        "operators",
        "conjugate gradients",
        ["classifier", "shared"],
        solved,
        covers=("solve", "Solution"),
        tolerances={"float64": divided(100)["float64"]},
    ),
]


@pytest.mark.default(1, slow=1)
@over(CASES)
def test_products_agree(case, check):
    check(case)
