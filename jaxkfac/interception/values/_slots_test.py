"""Fields of records follow their parameter as they declare, and none goes without a declaration."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxkfac.interception._trace import trace
from jaxkfac.interception.values._slots import Slot, Statistic, entry, statistic


@statistic
class Counts(Statistic):
    new: Any = entry(0)


@statistic
class Rows(Statistic):
    new: Any = entry(1)


@statistic
class Moments(Statistic):
    new: Any = entry(2)


@statistic
class Both(Statistic):
    """Records inside a record, one of which declares its own power."""

    inside: Any = entry(None)
    other: Any = entry(0)


@jax.custom_vjp
def product(x, w, sums):
    return x @ w


product.defvjp(
    lambda x, w, sums: (x @ w, (x, w, sums)),
    lambda saved, g: (
        g @ saved[1].T,
        saved[0].T @ g,
        jax.tree.map(lambda _: (saved[0] ** 2).sum(), saved[2]),
    ),
)


def second_moment(fn, zeros):
    """The sum of squares of what the layer of ``fn(w, x)`` reads, in each field of a record."""
    w, x = jnp.ones((1, 1)), jnp.full((1, 1), 3.0)
    traced = trace(fn, w, x)

    def handler(site, operands):
        return product(*operands, site.slots[0].sums)

    def run(sums):
        return traced.run(handler, w, {"": Slot(sums)}, x).sum()

    return [float(x) for x in jax.tree.leaves(jax.grad(run)(zeros))]


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda w, x: x @ w, 9),
        (lambda w, x: x @ (3 * w), 81),
        (lambda w, x: x @ ((3 * w).T.reshape(1, 1) / 2), 81 / 4),
        (lambda w, x: jax.checkpoint(lambda w: x @ w)(3 * w), 81),
    ],
)
def test_a_constant_enters_a_field_with_the_power_it_declares(fn, expected):
    assert second_moment(fn, Moments(jnp.zeros(()))) == [expected]


@pytest.mark.parametrize("fn", [lambda w, x: x @ -w, lambda w, x: x @ (2 - w)])
def test_a_sign_enters_odd_powers_alone(fn):
    records = [record(jnp.zeros(())) for record in (Counts, Rows, Moments)]
    assert [second_moment(fn, record) for record in records] == [[9], [-9], [9]]


def test_what_is_declared_with_power_zero_is_handed_on():
    assert second_moment(lambda w, x: x @ (3 * w), Counts(jnp.zeros(()))) == [9]


def test_a_record_inside_declares_for_itself():
    zeros = Both((Moments(jnp.zeros(())), None, Rows(jnp.zeros(()))), jnp.zeros(()))
    assert second_moment(lambda w, x: x @ (3 * w), zeros) == [81, 27, 9]


def test_a_field_that_declares_nothing_is_refused():
    with pytest.raises(ValueError, match="Silent.new declares no power"):

        @statistic
        class Silent(Statistic):
            new: Any


@pytest.mark.parametrize("fn", [lambda w, x: x @ (3 * w), lambda w, x: x @ w])
def test_sums_that_are_no_record_are_refused(fn):
    with pytest.raises(ValueError, match="sums of type dict, which declares no powers"):
        second_moment(fn, {"new": jnp.zeros(())})


def test_constants_are_multiplied_where_they_declare_it():
    seen = []
    traced = trace(lambda w, x: x @ (3 * w), jnp.ones((1, 1)), jnp.ones((1, 1)))

    def handler(site, operands):
        seen.append(site.slots[0].constants)
        return site.bind(*operands)

    slot = Slot(constants=(jnp.ones(()), Rows(jnp.ones(()))))
    traced.run(handler, jnp.ones((1, 1)), {"": slot}, jnp.ones((1, 1)))
    ((plain, record),) = seen
    assert (float(plain), float(record.new)) == (1, 3)
