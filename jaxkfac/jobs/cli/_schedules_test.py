import numpy as np
import pytest

from jaxkfac.jobs.cli._problem import warmup_schedule


def rates(shape, updates=20, warmup=0.25):
    schedule = warmup_schedule(2.0, warmup, updates, shape)
    return np.array([float(schedule(step)) for step in range(updates + 3)])


@pytest.mark.parametrize(
    ("shape", "left"),
    [
        ("cosine", lambda x: (1 + np.cos(np.pi * x)) / 2),
        ("linear", lambda x: 1 - x),
        ("constant", np.ones_like),
    ],
)
def test_the_rate_rises_along_a_line_and_falls_as_its_shape_says(shape, left):
    found = rates(shape)
    np.testing.assert_allclose(found[:5], 2.0 * np.arange(1, 6) / 5, rtol=1e-6)
    np.testing.assert_allclose(found[5:20], 2.0 * left(np.arange(15) / 15), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(found[20:], 2.0 * left(np.ones(3)), atol=1e-6)


def test_without_warmup_the_first_update_has_the_largest_rate():
    assert rates("cosine", warmup=0.0)[0] == 2.0
    assert rates("linear", updates=1, warmup=0.9)[0] == 2.0
