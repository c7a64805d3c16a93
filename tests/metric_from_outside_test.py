"""A capacity metric registered from outside is in every result and every table."""

import json

import jax.numpy as jnp
import pytest
from rich.console import Console

import jaxkfac as jk
from jaxkfac.curvature.capacity import METRICS, _definitions, metric
from jaxkfac.jobs.report import CapacityReport
from jaxkfac.jobs.report._capacity import capacity_table, comparison_table, model_table


@pytest.fixture
def mean_eigenvalue():
    @metric("mean", heading="mean\nλ", legend="Σλ / dim.", label="mean eigenvalue")
    def mean_eigenvalue(measured):
        """The mean of all eigenvalues."""
        return measured.sums.trace / measured.sums.size

    yield
    del _definitions._REGISTERED["mean_eigenvalue"]


def measure():
    params = {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}
    objective = jk.Objective(lambda p, x: x @ p["kernel"] + p["bias"], jk.Gaussian())
    stats = jk.value_grad_and_factors(objective)
    factors = stats(params, (jnp.eye(3), jnp.zeros((3, 2)))).factors
    return jk.capacity_metrics(jk.eigendecompose(factors), num_examples=3)


def printed(table):
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_a_metric_of_ones_own_is_in_the_result_in_json_and_in_every_table(mean_eigenvalue):
    metrics = measure()
    expected = metrics.model.trace / metrics.model.dimension
    assert metrics["kernel"].mean_eigenvalue == metrics.model.mean_eigenvalue == expected
    plain = json.loads(json.dumps(metrics.to_dict()))
    assert plain["model"]["mean_eigenvalue"] == expected
    assert "mean_eigenvalue" in plain["scales"]["mean"]

    comparison = jk.compare_capacity(metrics, metrics)
    interval = jk.capacity_interval([metrics, metrics])
    assert comparison.model["mean_eigenvalue"].ratio == 1
    assert interval.model["mean_eigenvalue"].mean == pytest.approx(expected)
    assert "mean λ: Σλ / dim." in str(metrics)
    report = CapacityReport(metrics, interval, comparison)
    heads = capacity_table(report).head
    assert "mean\nλ" in heads
    assert "mean\nλ" in comparison_table(report).head
    assert f"{expected:.3g}" in printed(capacity_table(report))
    assert "mean eigenvalue" in printed(model_table(report))


def test_a_name_is_taken_once(mean_eigenvalue):
    with pytest.raises(ValueError, match="there is a capacity metric 'mean_eigenvalue' already"):
        metric("sum")(METRICS["mean_eigenvalue"].definition)
