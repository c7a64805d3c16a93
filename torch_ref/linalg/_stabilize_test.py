"""Clipping, powers, and where decompositions run."""

import pytest
import torch

from torch_ref.linalg import _placement as placement
from torch_ref.linalg import decompose, eigh_where_it_fits, fits_on_device, stabilize

DTYPE = torch.float64


def factor(n: int = 5, rank: int | None = None, seed: int = 0) -> torch.Tensor:
    rows = torch.randn(rank or 3 * n, n, dtype=DTYPE, generator=torch.Generator().manual_seed(seed))
    return rows.T @ rows / len(rows)


def test_well_conditioned_matrix_is_left_as_it_is():
    torch.testing.assert_close(stabilize(factor(), 1e6, 0.0), factor(), rtol=1e-12, atol=1e-12)


def test_eigenvalues_are_raised_to_the_bound_and_eigenvectors_stay():
    matrix = factor(rank=3)
    values, vectors = torch.linalg.eigh(matrix)
    clipped = stabilize(matrix, 10.0, 0.0)
    floor = values[-1] / 10
    assert (values < floor).sum() >= 2
    expected = vectors.T @ clipped @ vectors
    torch.testing.assert_close(expected, torch.diag(values.clamp(min=floor)), atol=1e-12, rtol=0)
    assert torch.linalg.cond(clipped).item() == pytest.approx(10.0)


def test_damping_is_a_floor_where_it_is_the_larger_bound():
    values = torch.linalg.eigvalsh(stabilize(factor(rank=3), 1e12, 0.25))
    assert values[0].item() == pytest.approx(0.25)


def test_zero_matrix_becomes_damping():
    torch.testing.assert_close(
        stabilize(torch.zeros(2, 2, dtype=DTYPE), 10.0, 0.5), 0.5 * torch.eye(2, dtype=DTYPE)
    )


def test_stack_is_clipped_slice_by_slice():
    stack = torch.stack([factor(rank=2), 100 * factor(rank=3, seed=1)])
    each = torch.stack([stabilize(m, 10.0, 1e-3) for m in stack])
    torch.testing.assert_close(stabilize(stack, 10.0, 1e-3), each, rtol=1e-12, atol=1e-12)


def test_diagonal_is_clipped_like_the_matrix_with_it():
    diagonal = torch.tensor([4.0, 0.0, 1.0], dtype=DTYPE)
    whole = stabilize(torch.diag(diagonal), 8.0, 0.1)
    torch.testing.assert_close(torch.diag(stabilize(diagonal, 8.0, 0.1)), whole)


@pytest.mark.parametrize("power", [-1.0, -0.5, 0.5, 1.0, 2.0])
def test_power_is_that_of_the_damped_matrix(power):
    spectrum = decompose(factor(), max_condition=1e9, damping=0.0)
    damped = factor() + 0.1 * torch.eye(5, dtype=DTYPE)
    found = spectrum.power(power, 0.1)
    # by integer powers alone: (P)^2 = M^(2p)
    expected = torch.linalg.matrix_power(damped, round(2 * power))
    torch.testing.assert_close(found @ found, expected, rtol=1e-10, atol=1e-12)


def test_negative_powers_take_clipped_values_and_positive_ones_raw():
    matrix = factor(rank=2)
    spectrum = decompose(matrix, max_condition=10.0, damping=0.0)
    torch.testing.assert_close(spectrum.power(1.0), matrix, rtol=1e-12, atol=1e-12)
    inverse = torch.linalg.inv(stabilize(matrix, 10.0, 0.0))
    torch.testing.assert_close(spectrum.power(-1.0), inverse, rtol=1e-10, atol=1e-10)


def test_zero_to_a_negative_power_is_zero():
    spectrum = decompose(torch.zeros(2, 2, dtype=DTYPE), max_condition=10.0, damping=0.0)
    assert not spectrum.power(-1.0).any()
    assert not spectrum.power(-0.5).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("diagonal", [False, True])
def test_result_has_the_dtype_that_came_in(dtype, diagonal):
    matrix = factor().diagonal() if diagonal else factor()
    assert stabilize(matrix.to(dtype), 10.0, 0.0).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once_at_the_end(dtype):
    matrix = factor(rank=3).to(dtype)
    spectrum = decompose(matrix, max_condition=10.0, damping=0.0)
    assert spectrum.values.dtype == spectrum.vectors.dtype == torch.float32
    found = stabilize(matrix, 10.0, 0.0)
    assert torch.equal(found, stabilize(matrix.float(), 10.0, 0.0).to(dtype))
    assert not torch.equal(found, matrix)


@pytest.mark.parametrize(
    ("matrix", "options", "message"),
    [
        (torch.eye(2), {"max_condition": 0.5}, "max_condition >= 1"),
        (torch.eye(2), {"damping": -1.0}, "damping >= 0"),
        (torch.ones(2, 3), {}, r"\(2, 3\)"),
        (torch.tensor([[1.0, torch.nan], [0.0, 1.0]]), {}, "1 of 4 entries are not finite"),
    ],
)
def test_bad_input_is_refused(matrix, options, message):
    with pytest.raises(ValueError, match=message):
        stabilize(matrix, **({"max_condition": 10.0, "damping": 0.0} | options))


# ------------------------------------------------------------------ placement


def test_three_matrices_must_fit_into_half_of_what_is_free():
    matrix = torch.zeros(10, 10)  # 400 bytes
    assert fits_on_device(matrix, 2 * 3 * 400)
    assert not fits_on_device(matrix, 2 * 3 * 400 - 2)
    stack = matrix.expand(5, 10, 10)
    assert fits_on_device(stack, 5 * 2 * 3 * 400)
    assert not fits_on_device(stack, 5 * 2 * 3 * 400 - 2)


class Solver:
    """eigh that counts, and fails as a full device does the first ``failures`` times."""

    def __init__(self, failures: int):
        self.failures, self.calls = failures, 0

    def __call__(self, matrix):
        self.calls += 1
        if self.calls <= self.failures:
            raise torch.cuda.OutOfMemoryError("the device is full")
        return EIGH(matrix)


EIGH = torch.linalg.eigh


def test_out_of_memory_is_retried_on_the_cpu(monkeypatch):
    solver = Solver(failures=1)
    monkeypatch.setattr(torch.linalg, "eigh", solver)
    monkeypatch.setattr(placement, "free_bytes", lambda device: 1 << 40)
    found = stabilize(factor(), 1e6, 0.0)
    assert solver.calls == 2
    torch.testing.assert_close(found, factor(), rtol=1e-12, atol=1e-12)


def test_out_of_memory_on_the_cpu_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.linalg, "eigh", Solver(failures=2))
    with pytest.raises(torch.cuda.OutOfMemoryError):
        eigh_where_it_fits(factor(), "cpu", free=1 << 40)


def test_what_does_not_fit_never_goes_to_the_device():
    # The meta device computes nothing: had the matrix gone there, no numbers came back.
    values, vectors = eigh_where_it_fits(factor(), "meta", free=100)
    torch.testing.assert_close((vectors * values) @ vectors.T, factor(), rtol=1e-12, atol=1e-12)
    assert values.device.type == "cpu"


@pytest.mark.gpu
def test_what_fits_is_decomposed_on_the_gpu(monkeypatch):
    devices = []

    def spy(matrix):
        devices.append(matrix.device.type)
        return EIGH(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", spy)
    found = stabilize(factor(), 1e6, 0.0, device="cuda")
    assert devices == ["cuda"] and found.device.type == "cpu"
    torch.testing.assert_close(found, factor(), rtol=1e-10, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_result_is_where_the_matrix_came_from(device):
    found = stabilize(factor().cuda(), 1e6, 0.0, device=device)
    assert found.device.type == "cuda"
    torch.testing.assert_close(found.cpu(), factor(), rtol=1e-10, atol=1e-10)
