"""Lanczos with vectors on disk finds the eigenvalues, and goes on where it was."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac._errors import DamagedFileError, NonFiniteFactorError
from jaxkfac.jobs.cli.analysis._decompose import lanczos
from jaxkfac.jobs.cli.analysis._files import Folder


def matrix(size, rank=None):
    rng = np.random.default_rng(0)
    q = np.linalg.qr(rng.standard_normal((size, size)))[0]
    values = np.concatenate([[30.0, 10.0, 5.0], rng.uniform(0, 1, size - 3)])
    values[size if rank is None else rank :] = 0
    return ((q * values) @ q.T).astype(np.float32), np.sort(values)[::-1]


def run(path, product, size, *, steps=12, count=3, eps=0.0):
    path.mkdir(exist_ok=True)
    return lanczos(
        product,
        size,
        Folder(path),
        count=count,
        steps=steps,
        seed=0,
        eps=eps,
        advance=lambda *_: None,
    )


def test_the_largest_eigenvalues_lie_within_their_bounds(tmp_path):
    dense, values = matrix(40)
    found = run(tmp_path, lambda v: dense @ v, 40, steps=12)
    for value, bound, expected in zip(found.eigenvalues, found.error_bounds, values, strict=False):
        assert abs(value - expected) <= bound + 1e-5 * values[0]
    assert found.error_bounds[0] < 1e-2


def test_the_bounds_hold_where_products_are_rounded_to_bfloat16(tmp_path):
    """Also where nothing is left of the Krylov space but their rounding."""
    dense, values = matrix(20, rank=3)

    def product(vector):
        rounded = jnp.asarray(vector).astype(jnp.bfloat16)
        return np.array((jnp.asarray(dense) @ rounded.astype(jnp.float32)).astype(jnp.bfloat16))

    def both(vector):
        return product(vector).astype(np.float32)

    eps = float(jnp.finfo(jnp.bfloat16).eps)
    found = run(tmp_path / "rounded", both, 20, steps=19, eps=eps)
    for value, bound in zip(found.eigenvalues, found.error_bounds, strict=True):
        assert np.abs(values - value).min() <= bound
    assert found.steps <= 6
    assert found.error_bounds[0] < values[0]


def test_as_many_steps_as_dimensions_find_all_and_a_low_rank_ends_early(tmp_path):
    dense, values = matrix(8)
    found = run(tmp_path / "all", lambda v: dense @ v, 8, steps=50, count=8)
    np.testing.assert_allclose(found.eigenvalues, values, atol=1e-4)
    dense, values = matrix(20, rank=3)
    low = run(tmp_path / "low", lambda v: dense @ v, 20, steps=20)
    assert low.steps <= 6
    np.testing.assert_allclose(low.eigenvalues, values[:3], rtol=1e-4)


def test_a_run_that_was_broken_off_makes_only_the_products_that_it_lacks(tmp_path):
    dense, _ = matrix(30)
    expected = run(tmp_path / "whole", lambda v: dense @ v, 30)
    calls = []

    def failing(vector):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return dense @ vector

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "broken", failing, 30)
    assert run(tmp_path / "broken", failing, 30) == expected
    assert len(calls) == 13


def test_a_digit_that_has_changed_is_not_gone_on_with(tmp_path):
    dense, _ = matrix(8)
    run(tmp_path, lambda v: dense @ v, 8, steps=3)
    state = tmp_path / "lanczos" / "state.json"
    text = state.read_text()
    digit = text.index(".", text.index("alphas")) + 1
    state.write_text(f"{text[:digit]}{(int(text[digit]) + 1) % 10}{text[digit + 1 :]}")
    with pytest.raises(DamagedFileError, match=r"state\.json is damaged .* --overwrite"):
        run(tmp_path, lambda v: dense @ v, 8, steps=3)


def test_a_product_that_is_not_finite_is_refused(tmp_path):
    with pytest.raises(NonFiniteFactorError, match=r"product 1 of Lanczos"):
        run(tmp_path, lambda v: np.full_like(v, np.nan), 4)
