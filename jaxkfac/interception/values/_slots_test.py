"""Slot entries follow their parameter as they declare, and none goes without a declaration."""

import jax
import jax.numpy as jnp
import pytest

from jaxkfac.interception._trace import trace
from jaxkfac.interception.values._slots import SlotEntry


@jax.custom_vjp
def product(x, w, slot):
    return x @ w


product.defvjp(
    lambda x, w, slot: (x @ w, (x, w)),
    lambda saved, g: (g @ saved[1].T, saved[0].T @ g, {"new": (saved[0] ** 2).sum()}),
)


def second_moment(fn, entries):
    """The sum of squares of what the layer of ``fn(w, x)`` reads, as an entry called "new"."""
    w, x = jnp.ones((1, 1)), jnp.full((1, 1), 3.0)
    traced = trace(fn, w, x)

    def handler(site, operands):
        return product(*operands, site.slots[0])

    def run(slot):
        return traced.emit(handler, w, {"": slot}, x, entries=entries).sum()

    return float(jax.grad(run)({"new": jnp.zeros(())})["new"])


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda w, x: x @ w, 9),
        (lambda w, x: x @ (3 * w), 81),
        (lambda w, x: x @ ((3 * w).T.reshape(1, 1) / 2), 81 / 4),
        (lambda w, x: jax.checkpoint(lambda w: x @ w)(3 * w), 81),
    ],
)
def test_a_constant_enters_an_entry_with_the_power_it_declares(fn, expected):
    assert second_moment(fn, {"new": SlotEntry(2)}) == expected


@pytest.mark.parametrize("fn", [lambda w, x: x @ -w, lambda w, x: x @ (2 - w)])
def test_a_sign_enters_odd_powers_alone(fn):
    assert [second_moment(fn, {"new": SlotEntry(power)}) for power in (0, 1, 2)] == [9, -9, 9]


def test_what_is_declared_with_power_zero_is_handed_on():
    assert second_moment(lambda w, x: x @ (3 * w), {"new": SlotEntry(0)}) == 9


@pytest.mark.parametrize("fn", [lambda w, x: x @ (3 * w), lambda w, x: x @ w])
def test_an_entry_that_declares_nothing_is_refused(fn):
    with pytest.raises(ValueError, match="'new', which declares no SlotEntry"):
        second_moment(fn, {"a": SlotEntry(2)})


def test_what_lies_inside_an_entry_declares_for_itself():
    slot = {"held": {"new": jnp.zeros(()), "other": jnp.ones(())}}
    traced = trace(lambda w, x: x @ (3 * w), jnp.ones((1, 1)), jnp.ones((1, 1)))
    seen = {}

    def handler(site, operands):
        seen.update(site.slots[0]["held"])
        return site.bind(*operands)

    def run(entries):
        traced.emit(handler, jnp.ones((1, 1)), {"": slot}, jnp.ones((1, 1)), entries=entries)

    with pytest.raises(ValueError, match="'other', which declares no SlotEntry"):
        run({"held": {"new": SlotEntry(1)}})
    run({"held": {"new": SlotEntry(1), "other": SlotEntry(1)}})
    assert (float(seen["new"]), float(seen["other"])) == (0, 3)
