"""An option made outside the planner: asked for by name, tried, chosen where it fits, printed."""

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxkfac.factors import Gaussian, Objective
from jaxkfac.planning import plan_memory
from jaxkfac.planning._options import OPTIONS, Option


class NoOptimizer(Option):
    """The optimizer's state left on another machine."""

    name, title = "remote", "remote opt."

    def change(self, rows, of, choice):
        rows.device["optimizer"] = 0

    def cost(self, of, choice):
        return "a message a step"


def plan(device_bytes):
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    return plan_memory(
        Objective(lambda p, x: x @ p["kernel"], Gaussian()),
        {"kernel": shape(100, 50)},
        (shape(8, 100), shape(8, 50)),
        optimizer=optax.adam(1e-3),
        device_bytes=device_bytes,
        curvature=False,
        options=("remote",),
    )


def test_without_registration_its_name_is_refused():
    with pytest.raises(ValueError, match="remote"):
        plan(1e9)


def test_it_is_tried_chosen_and_printed(monkeypatch):
    monkeypatch.setitem(OPTIONS, "remote", NoOptimizer())
    now = plan(1e9).now
    found = plan(now.device_total - now.device["optimizer"] / 2)
    assert found.alone["remote"].device_total == now.device_total - now.device["optimizer"]
    assert found.smallest.options == ("remote",)
    assert "remote opt.: a message a step" in str(found)
