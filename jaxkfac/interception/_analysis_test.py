"""What an analysis raises inside is a reason not to cover, never an exception of ours."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxkfac.interception import _analysis, _equation_rules, find_layers, trace

PARAMS = {"w": jnp.ones((3, 3)), "u": jnp.ones((3, 2)), "v": jnp.ones((3, 3))}


def model(p, x):
    x = lax.scan(lambda h, _: (jnp.tanh(h @ p["w"]), None), x, None, length=2)[0]
    return jnp.sin(x) @ p["u"]


def fails(*args, **named):
    raise TypeError("unhashable type: 'Anything'\nand more lines")


def test_a_rule_that_raises_names_the_parameter_the_primitive_and_what_it_raised(monkeypatch):
    monkeypatch.setitem(_analysis._STRUCTURED, "scan", fails)
    table = find_layers(model, PARAMS, jnp.ones((5, 3)))
    reasons = dict(table.problems)
    whole = "`scan`, whose analysis failed (TypeError: unhashable type: 'Anything' and more lines)"
    assert whole in reasons["w"]


@pytest.mark.parametrize("rule", ["uses_in", "seen_in", "kind_reading", "propagate"])
def test_whatever_rule_raises_every_parameter_is_accounted_for(monkeypatch, rule):
    monkeypatch.setattr(_equation_rules, rule, fails)
    table = find_layers(model, PARAMS, jnp.ones((5, 3)))
    assert {"w", "u"} <= {path for path, _ in table.uncovered} | set(table)
    assert table.problems


def test_the_program_still_runs_as_it_was(monkeypatch):
    x = jnp.linspace(-1, 1, 15).reshape(5, 3)
    expected = model(PARAMS, x)
    monkeypatch.setitem(_analysis._STRUCTURED, "scan", fails)
    traced = trace(model, PARAMS, x)
    found = traced.run(lambda site, operands: site.bind(*operands), PARAMS, {}, x)
    assert (found == expected).all()


def test_a_rule_of_a_custom_derivative_that_refuses_a_tangent_is_a_reason():
    @jax.custom_jvp
    def guarded(x, t):
        return x * t

    @guarded.defjvp
    def _(primals, tangents):
        raise RuntimeError("unexpected tangent")

    table = find_layers(lambda p, x: guarded(x @ p["u"], p["w"][0, :2]), PARAMS, jnp.ones((5, 3)))
    reasons = dict(table.problems)
    assert "whose analysis failed (RuntimeError: unexpected tangent)" in reasons["w"]
    assert "u" in table
