import jax
import jax.numpy as jnp
import pytest

from jaxkfac.blocks._random_factors_test import layer, random_factors
from jaxkfac.curvature import _apply as module
from jaxkfac.curvature import apply_power, eigendecompose, natural_gradient, reconstruct
from jaxkfac.curvature._apply import map_in_batches

pytestmark = pytest.mark.usefixtures("x64")


def model(count, size=3):
    return tuple(layer(f"l{i}/kernel", (size, size + 1), bias=f"l{i}/bias") for i in range(count))


def problem(layers, dtype=None):
    shapes = {m.path: m.atoms for x in layers for m in (x.weight, x.bias) if m is not None}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    tree = {
        p: jax.random.normal(k, s, dtype) for k, (p, s) in zip(keys, shapes.items(), strict=True)
    }
    return tree, eigendecompose(random_factors(layers, jax.random.key(1), dtype=dtype))


def equations(jaxpr):
    """Every equation, those of inner programs included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(tuple(eqn.params.values())):
            if hasattr(inner, "jaxpr"):
                yield from equations(inner.jaxpr)


def count(fn, *args, only=None):
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    return sum(only is None or eqn.primitive.name == only for eqn in equations(jaxpr))


MIXED = (
    *model(3),
    layer("alone/kernel", (3, 4)),  # the same shape, but no bias
    layer("wide/kernel", (3, 5), bias="wide/bias"),
    layer("stacked/kernel", (2, 3, 4), bias="stacked/bias", stack=1),
    layer("table", (6, 3), kind="embedding", a_dense=False),
    layer("table2", (6, 3), kind="embedding", a_dense=False),
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", [pytest.param("exact", marks=pytest.mark.exhaustive), "pi"])
def test_stacking_layers_changes_no_number(mode, monkeypatch):
    tree, bases = problem(MIXED)

    def run():
        return apply_power(tree, bases, -0.5, 0.1, mode, cut=1e-3), reconstruct(bases)

    stacked = run()
    monkeypatch.setattr(module, "LARGEST_STACKED_SIDE", 0)
    alone = run()
    assert jax.tree.structure(stacked) == jax.tree.structure(alone)
    for x, y in zip(jax.tree.leaves(stacked), jax.tree.leaves(alone), strict=True):
        assert jnp.allclose(x, y, rtol=1e-12, atol=1e-12)


def test_products_do_not_grow_with_the_number_of_equal_layers():
    def products(layers):
        tree, bases = problem(layers)
        power = count(lambda t, b: natural_gradient(t, b, damping=0.1), tree, bases)
        dots = count(
            lambda t, b: natural_gradient(t, b, damping=0.1), tree, bases, only="dot_general"
        )
        rebuilt = count(reconstruct, bases, only="dot_general")
        return power, dots, rebuilt

    few, many = products(model(4)), products(model(12))
    assert few[1:] == many[1:] == (4, 1)  # four products of a power, one of A and G together
    assert many[0] < 3 * few[0]  # equations: linear


@pytest.mark.slow
def test_layers_beyond_the_bound_are_solved_one_by_one():
    layers = model(3, size=module.LARGEST_STACKED_SIDE)  # outputs are one beyond it
    tree, bases = problem(layers)
    dots = count(lambda t, b: natural_gradient(t, b, damping=0.1), tree, bases, only="dot_general")
    assert dots == 4 * 3


@pytest.mark.exhaustive
def test_every_step_from_factors_to_update_is_linear_in_the_number_of_layers():
    def work(n):
        layers = model(n, size=1)
        factors = random_factors(layers, jax.random.key(1))
        tree, bases = problem(layers)
        with _counting_comparisons() as compared:
            eqns = count(
                lambda t, f: natural_gradient(t, eigendecompose(f), damping=0.1), tree, factors
            )
            jax.eval_shape(reconstruct, bases), [bases[name] for name in bases]
        return eqns, compared()

    one, two, four = (work(n) for n in (8, 16, 32))
    for i in range(2):
        assert four[i] - two[i] <= 2.2 * (two[i] - one[i]), (one, two, four)


class _counting_comparisons:
    """Counts how often a layer's name is read, which a search by name does for every layer."""

    def __enter__(self):
        from jaxkfac.interception._layer import Layer

        self.layer, self.reads = Layer, 0
        inner = Layer.__getattribute__

        def counted(this, name):
            if name == "name":
                self.reads += 1
            return inner(this, name)

        Layer.__getattribute__ = counted
        return lambda: self.reads

    def __exit__(self, *_):
        del self.layer.__getattribute__


def test_problems_of_other_dtypes_or_statics_stay_apart():
    seen = []

    def double(static, x):
        seen.append((static, x.shape))
        return 2 * x

    problems = {
        "a": ("s", jnp.ones(2)),
        "b": ("s", 2 * jnp.ones(2)),
        "c": ("s", jnp.ones(2, jnp.float32)),
        "d": ("t", jnp.ones(2)),
    }
    results = map_in_batches(double, problems)
    assert sorted(seen) == [("s", (2,)), ("s", (2, 2)), ("t", (2,))]
    assert all(jnp.array_equal(results[k], 2 * problems[k][1]) for k in problems)
    assert results["c"].dtype == jnp.float32


def test_layers_that_live_on_different_devices_are_not_stacked():
    first, second = jax.devices()[:2]
    problems = {
        name: (None, jax.device_put(jnp.ones(2), device))
        for name, device in (("a", first), ("b", second))
    }
    results = map_in_batches(lambda _, x: 2 * x, problems)
    assert [next(iter(x.devices())) for x in results.values()] == [first, second]
