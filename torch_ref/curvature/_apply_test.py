"""Powers of the Kronecker-factored Fisher against dense matrices."""

import pytest
import torch
from torch import nn

from torch_ref.curvature import (
    KroneckerOperator,
    apply_power,
    decompose_factors,
    fisher_vector_product,
    lanczos,
    natural_gradient,
)
from torch_ref.factors import (
    Categorical,
    LayerGradient,
    collect_factors,
    fisher_loss,
    read_gradients,
    write_gradients,
)

LOSS = fisher_loss(Categorical())
DAMPING = (0.02, 0.3)


class Net(nn.Module):
    """An embedding, a grouped convolution, a layer with a bias and one without."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.conv = nn.Conv1d(4, 6, 2, groups=2)
        self.up = nn.Linear(6, 4)
        self.head = nn.Linear(4, 3, bias=False)

    def forward(self, tokens):
        x = self.conv(self.embed(tokens).mT).mT
        return self.head(torch.tanh(self.up(x)))


@pytest.fixture(scope="module", params=["joint", "separate"])
def problem(request):
    torch.manual_seed(0)
    model = Net().double()
    batch = torch.randint(5, (8, 4)), torch.randint(3, (8, 3))
    factors = collect_factors(model, LOSS, batch, bias=request.param)
    LOSS(model, batch).backward()
    return model, factors, read_gradients(model, factors, bias=request.param)


def dense(side: torch.Tensor) -> torch.Tensor:
    return torch.diag(side) if side.ndim == 1 else side


def matrix_power(matrix: torch.Tensor, power: float, damping: float) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(dense(matrix))
    return (vectors * (values.clamp(min=0) + damping)[..., None, :] ** power) @ vectors.mT


@pytest.mark.parametrize("power", [-1.0, -0.5, 0.5, 1.0])
def test_power_multiplies_from_both_sides_with_a_damping_for_each(problem, power):
    _, factors, gradients = problem
    bases = decompose_factors(factors, max_condition=1e300)
    applied = apply_power(gradients, bases, power, damping=DAMPING)
    for name, f in factors.items():
        a, g = matrix_power(f.a, power, DAMPING[0]), matrix_power(f.g, power, DAMPING[1])
        expected = g @ gradients[name].weight @ a
        torch.testing.assert_close(applied[name].weight, expected, rtol=1e-10, atol=1e-10)
        if gradients[name].bias is not None:
            expected = (g @ gradients[name].bias[..., None])[..., 0]
            torch.testing.assert_close(applied[name].bias, expected, rtol=1e-10, atol=1e-10)


def test_fisher_vector_product_is_the_kronecker_product(problem):
    _, factors, gradients = problem
    product = fisher_vector_product(gradients, decompose_factors(factors, max_condition=10.0))
    f, vector = factors["up"], gradients["up"].weight
    expected = torch.kron(f.g, f.a) @ vector.flatten()  # clipping is not seen: raw values
    torch.testing.assert_close(product["up"].weight.flatten(), expected, rtol=1e-10, atol=1e-14)


def test_natural_gradient_solves_the_damped_system(problem):
    _, factors, gradients = problem
    bases = decompose_factors(factors, max_condition=1e300)
    direction = natural_gradient(gradients, bases, damping=DAMPING)["up"].weight
    f = factors["up"]
    a, g = (m + d * torch.eye(len(m), dtype=m.dtype) for m, d in zip((f.a, f.g), DAMPING))
    torch.testing.assert_close(g @ direction @ a, gradients["up"].weight, rtol=1e-9, atol=1e-12)


def test_natural_gradient_takes_clipped_values(problem):
    _, factors, gradients = problem
    bases = decompose_factors(factors, max_condition=5.0)
    direction = natural_gradient(gradients, bases)["head"].weight
    clipped = [bases["head"].a, bases["head"].g]
    for spectrum in clipped:
        assert spectrum.values[-1] / spectrum.values[0] == pytest.approx(5.0)
    a, g = ((s.vectors * s.values) @ s.vectors.T for s in clipped)
    torch.testing.assert_close(g @ direction @ a, gradients["head"].weight, rtol=1e-9, atol=1e-12)


def test_power_minus_one_inverts_power_one(problem):
    _, factors, gradients = problem
    bases = decompose_factors(factors, max_condition=1e300)
    there = apply_power(gradients, bases, 1.0, damping=DAMPING)
    back = apply_power(there, bases, -1.0, damping=DAMPING)
    for name in gradients:
        torch.testing.assert_close(back[name].weight, gradients[name].weight)


def test_directions_go_back_into_the_models_gradients(problem):
    model, factors, gradients = problem
    bases = decompose_factors(factors)
    direction = natural_gradient(gradients, bases, damping=DAMPING)
    write_gradients(model, direction)
    again = read_gradients(model, factors, bias=factors["up"].bias)
    assert not torch.equal(model.up.bias.grad, torch.zeros(4))
    for name in factors:
        torch.testing.assert_close(again[name].weight, direction[name].weight)
    write_gradients(model, gradients)  # the model is this module's: put back what it had


def test_result_has_the_gradients_dtype(problem):
    _, factors, gradients = problem
    halves = {
        n: LayerGradient(g.weight.bfloat16(), None if g.bias is None else g.bias.bfloat16())
        for n, g in gradients.items()
    }
    applied = fisher_vector_product(halves, decompose_factors(factors))
    assert {g.weight.dtype for g in applied.values()} == {torch.bfloat16}


def test_missing_layers_and_wrong_shapes_are_named(problem):
    _, factors, gradients = problem
    bases = decompose_factors(factors)
    with pytest.raises(ValueError, match=r"\['up'\]"):
        fisher_vector_product({n: g for n, g in gradients.items() if n != "up"}, bases)
    with pytest.raises(ValueError, match=r"'up'.*\(4, 2\)"):
        fisher_vector_product(gradients | {"up": LayerGradient(torch.ones(4, 2))}, bases)


def test_factor_that_is_not_finite_is_named(problem):
    _, factors, _ = problem
    broken = dict(factors)
    broken["up"] = type(factors["up"])(factors["up"].a, factors["up"].g * torch.nan, 1, "joint")
    with pytest.raises(ValueError, match="layer 'up', factor g: 16 of 16"):
        decompose_factors(broken)


# ------------------------------------------------------------------ operator, Lanczos


def dense_operator(operator: KroneckerOperator) -> torch.Tensor:
    eye = torch.eye(operator.shape[0], dtype=torch.float64)
    return torch.stack([operator @ column for column in eye], dim=1)


@pytest.mark.parametrize("power", [1.0, -0.5])
def test_operator_is_symmetric_and_block_diagonal(problem, power):
    _, factors, gradients = problem
    operator = KroneckerOperator(decompose_factors(factors), power=power, damping=DAMPING)
    matrix = dense_operator(operator)
    torch.testing.assert_close(matrix, matrix.T, rtol=1e-12, atol=1e-12)
    assert torch.linalg.eigvalsh(matrix)[0] > 0
    size = gradients["embed"].weight.numel()
    assert matrix[:size, :size].any() and not matrix[size:, :size].any()
    assert len(matrix) == sum(g.weight.numel() for g in gradients.values()) + sum(
        g.bias.numel() for g in gradients.values() if g.bias is not None
    )


def test_operator_multiplies_as_the_fisher_vector_product(problem):
    _, factors, gradients = problem
    bases = decompose_factors(factors)
    operator = KroneckerOperator(bases)
    product = operator.unflatten(operator @ operator.flatten(gradients))
    for name, expected in fisher_vector_product(gradients, bases).items():
        torch.testing.assert_close(product[name].weight, expected.weight, rtol=1e-12, atol=0)


def test_operator_refuses_a_vector_of_another_length(problem):
    operator = KroneckerOperator(decompose_factors(problem[1]))
    with pytest.raises(ValueError, match=r"\(3,\)"):
        operator @ torch.ones(3)


def test_lanczos_finds_the_extreme_eigenvalues(problem):
    operator = KroneckerOperator(decompose_factors(problem[1]), damping=DAMPING)
    exact = torch.linalg.eigvalsh(dense_operator(operator))
    some = lanczos(operator, 25)
    assert some[-1].item() == pytest.approx(exact[-1].item(), rel=1e-6)
    assert exact[0] * (1 - 1e-12) <= some[0] and some[-1] <= exact[-1] * (1 + 1e-12)
    found = lanczos(operator, operator.shape[0])
    extremes = [found[0].item(), found[-1].item()]
    assert extremes == pytest.approx([exact[0].item(), exact[-1].item()], rel=1e-10)


def test_lanczos_stops_where_the_krylov_space_ends():
    found = lanczos(torch.diag(torch.tensor([1.0, 1.0, 1.0, 3.0], dtype=torch.float64)), 4)
    torch.testing.assert_close(found, torch.tensor([1.0, 3.0], dtype=torch.float64))


def test_factors_come_to_the_vectors_device_and_stay_where_they_are(problem):
    bases = decompose_factors(problem[1])
    operator = KroneckerOperator(bases)
    product = operator @ torch.ones(operator.shape[0], device="meta")
    assert product.device.type == "meta" and product.shape == operator.shape[:1]
    assert {s.values.device.type for b in bases.values() for s in (b.a, b.g)} == {"cpu"}


@pytest.mark.gpu
def test_factors_come_to_the_vector_and_stay_on_the_cpu(problem):
    _, factors, gradients = problem
    bases = decompose_factors(factors, device="cuda")
    operator = KroneckerOperator(bases)
    vector = operator.flatten(gradients)
    product = operator @ vector.cuda()
    assert product.is_cuda and not bases["up"].a.vectors.is_cuda
    torch.testing.assert_close(product.cpu(), operator @ vector, rtol=1e-10, atol=1e-14)
