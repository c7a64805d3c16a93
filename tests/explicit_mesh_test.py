"""A mesh with explicit axes: types carry shardings, and the statistics are those of one device."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkfac as jk
from tests._checks import assert_tree_close, objective_of, two_devices
from tests._programs import (
    attention,
    attention_params,
    labels,
    mlp,
    mlp_params,
    normal,
    scanned,
    scanned_params,
    tree,
)

N, S = 4, 6


@pytest.fixture
def mesh():
    with two_devices():
        yield jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))


def _looked_up(p, ids, tap):
    """A gather must say how its result is split; where types carry no sharding, it may not."""
    split = {"out_sharding": P("x")} if jax.typeof(ids).sharding.mesh.explicit_axes else {}
    h = jnp.tanh(p["table"].at[ids].get(**split) @ p["w"] + p["b"])
    return jnp.cumsum(h, axis=1) @ p["head"]


def _recurrent(p, x, tap):
    def step(h, x):
        return jnp.tanh(x @ p["w"] + h @ p["u"] + p["b"]), None

    xs = jnp.swapaxes(x, 0, 1)
    h, _ = jax.lax.scan(step, jnp.zeros_like(xs[0] @ p["w"]), xs)
    return jnp.broadcast_to((h @ p["head"])[:, None], (*x.shape[:2], 3))


def _case(name):
    x, y = normal(1, N, S, 4, scale=1.0), labels(2, N, S)
    if name == "mlp":
        return mlp, mlp_params(), (x, y)
    if name == "attention":
        return attention, attention_params(), (x, y)
    if name == "scan":
        return scanned, scanned_params(), (x, y)
    if name == "recurrent":
        return _recurrent, tree(26, w=(4, 4), u=(4, 4), b=(4,), head=(4, 3)), (x, y)
    p = tree(43, table=(7, 4), w=(4, 5), b=(5,), head=(5, 3))
    return _looked_up, p, (labels(1, N, S, classes=7), y)


OPTIONS = {
    "": {},
    "reduce": {"sharing": "reduce"},
    "exact": {"fisher": "exact", "sharing": "reduce"},
    "mc": {"fisher": "mc"},
    "full_block": {"scales": "full_block"},
}
NAMES = ("mlp", "attention", "scan", "recurrent", "looked up")


def _assert_same(found, expected):
    assert_tree_close(jax.device_get(found), jax.device_get(expected), 1e-12)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "options"),
    [(name, options) for name in NAMES for options in ("", "reduce")]
    + [("mlp", options) for options in ("exact", "mc", "full_block")],
)
def test_factors_of_a_split_batch_are_those_of_one_device(x64, mesh, name, options):
    model, p, batch = _case(name)
    stats = jax.jit(jk.value_grad_and_factors(objective_of(model), **OPTIONS[options]))
    expected = stats(p, batch, jax.random.key(0))
    with jax.set_mesh(mesh):
        found = stats(jax.device_put(p, P()), jax.device_put(batch, P("x")), jax.random.key(0))
    _assert_same(found, expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_positions_may_be_split_too(x64, mesh, sharing):
    model, p, batch = _case("mlp")
    here = jnp.arange(S) < jnp.array([6, 3, 1, 4])[:, None]
    stats = jax.jit(jk.value_grad_and_factors(objective_of(model), sharing=sharing))
    expected = stats(p, (*batch, here), positions=here)
    for spec in (P("x"), P(None, "x")):
        with jax.set_mesh(mesh):
            split, exist = jax.device_put(((*batch, here), here), spec)
            found = stats(jax.device_put(p, P()), split, positions=exist)
        _assert_same(found, expected)


def _by_features(p, x, tap):
    h = jnp.tanh(x @ p["w"])
    names = {"out_sharding": P()} if jax.typeof(x).sharding.mesh.explicit_axes else {}
    return jnp.einsum("nsi,io->nso", h, p["v"], **names)


def _split_by_features(p):
    return {"w": jax.device_put(p["w"], P(None, "x")), "v": jax.device_put(p["v"], P("x", None))}


@pytest.mark.slow
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_parameters_may_be_split(x64, mesh, sharing):
    p, batch = tree(4, w=(4, 6), v=(6, 3)), _case("mlp")[2]
    stats = jax.jit(jk.value_grad_and_factors(objective_of(_by_features), sharing=sharing))
    expected = stats(p, batch)
    with jax.set_mesh(mesh):
        found = stats(_split_by_features(p), jax.device_put(batch, P()))
    _assert_same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_the_arrays_may_bring_the_mesh(x64, mesh, sharing):
    """No ``jax.set_mesh``: the mesh is known from the types of the arguments alone."""
    model, p, batch = _case("mlp")
    stats = jax.jit(jk.value_grad_and_factors(objective_of(model), sharing=sharing))
    expected = stats(p, batch)
    p = jax.device_put(p, NamedSharding(mesh, P()))
    _assert_same(stats(p, jax.device_put(batch, NamedSharding(mesh, P("x")))), expected)


@pytest.mark.slow
def test_a_wide_side_is_gathered_in_panels(x64, mesh):
    def model(p, x, tap):
        return jnp.tanh(x @ p["w"]) @ p["v"]

    p, batch = tree(3, w=(4, 600), v=(600, 3)), _case("mlp")[2]
    stats = jax.jit(jk.value_grad_and_factors(objective_of(model)))
    expected = stats(p, batch)
    with jax.set_mesh(mesh):
        found = stats(jax.device_put(p, P()), jax.device_put(batch, P("x")))
    _assert_same(found, expected)


@pytest.mark.slow
def test_the_second_pass_takes_examples_of_a_split_batch(x64, mesh):
    def model(p, x, tap):
        return x @ (p["w"] * jnp.tanh(p["w"])) + p["b"]

    p, batch = tree(3, w=(4, 3), b=(3,)), _case("mlp")[2]
    stats = jax.jit(jk.value_grad_and_factors(objective_of(model), uncovered="diagonal"))
    expected = stats(p, batch)
    with jax.set_mesh(mesh):
        found = stats(jax.device_put(p, P()), jax.device_put(batch, P("x")))
    _assert_same(found, expected)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "options"),
    [(name, {}) for name in NAMES]
    + [("mlp", o) for o in ({"per": "token"}, {"fisher": "mc"}, {"fisher": "exact"})],
    ids=str,
)
def test_corrected_eigenvalues_are_those_of_one_device(x64, mesh, name, options):
    """EKFAC, in the eigenbases of one device: those of equal eigenvalues are not unique."""
    model, p, batch = _case(name)
    objective = objective_of(model)
    factors = jax.jit(jk.value_grad_and_factors(objective))(p, batch).factors
    bases = jk.eigendecompose(factors)

    @jax.jit
    def correct(bases, p, batch):
        corrector = jk.correct_eigenvalues(objective, bases, **options)
        return corrector(p, batch, jax.random.key(0)).corrections

    expected = correct(bases, p, batch)
    with jax.set_mesh(mesh):
        bases, p = jax.device_put((bases, p), P())
        found = correct(bases, p, jax.device_put(batch, P("x")))
    _assert_same(found, expected)


def test_the_statistics_of_a_split_batch_are_reduced_not_gathered(x64, mesh):
    """No device sees all rows under expand: they are multiplied where they lie."""
    model, p, batch = _case("mlp")
    stats = jax.jit(jk.value_grad_and_factors(objective_of(model)))
    with jax.set_mesh(mesh):
        args = jax.device_put(p, P()), jax.device_put(batch, P("x"))
        text = stats.lower(*args).compile().as_text()
    assert "all-reduce" in text
    assert "all-gather" not in text


def _kfac_step(stats, tx, *, measured):
    @jax.jit
    def step(p, state, batch):
        bases = {"bases": state.bases} if measured else {}
        _, grads, factors = stats(p, batch, **bases)
        updates, state = tx.update(grads, state, p, factors=factors)
        return jax.tree.map(jnp.add, p, updates), state

    return step


def _trained(step, tx, p, batch):
    state = tx.init(p)
    for _ in range(3):
        p, state = step(p, state, batch)
    return p


@pytest.mark.slow
def test_a_step_is_compiled_once(x64, mesh):
    """The first state has the types of those that steps return."""
    model, p, batch = _case("mlp")
    stats = jk.value_grad_and_factors(objective_of(model))
    tx = jk.kfac(0.1, like=stats.factor_shapes(p, batch), damping=0.1, refresh_every=2)
    expected = _trained(_kfac_step(stats, tx, measured=False), tx, p, batch)
    step = _kfac_step(stats, tx, measured=False)
    with jax.set_mesh(mesh):
        # An entry for each axis, as results have it: P() is another sharding to jax.jit.
        whole = jax.tree.map(lambda x: jax.device_put(x, P(*[None] * x.ndim)), p)
        found = _trained(step, tx, whole, jax.device_put(batch, P("x")))
    _assert_same(found, expected)
    assert step._cache_size() == 1


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:kfac. the factors hold eigenvalues measured")
def test_measured_eigenvalues_that_like_knows_nothing_of(x64, mesh):
    p, batch = tree(4, w=(4, 6), v=(6, 3)), _case("mlp")[2]
    stats = jk.value_grad_and_factors(objective_of(_by_features))
    tx = jk.kfac(0.1, like=stats.factor_shapes(p, batch), damping=0.1, refresh_every=2)
    step = _kfac_step(stats, tx, measured=True)
    expected = _trained(step, tx, p, batch)
    with jax.set_mesh(mesh):
        found = _trained(step, tx, _split_by_features(p), jax.device_put(batch, P()))
    assert_tree_close(jax.device_get(found), jax.device_get(expected), 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("curvature", ["ggn", "empirical"])
def test_inner_products_of_a_split_batch_are_those_of_one_device(x64, mesh, curvature):
    model, p, batch = _case("mlp")

    @jax.jit
    def form(p, batch):
        objective, half = objective_of(model), jax.tree.map(lambda x: x / 2 + 1, p)
        make = jk.operators.ggn
        if curvature == "empirical":
            make = functools.partial(jk.operators.fisher, fisher="empirical")
        return make(objective, p, batch).inner_products([p, half])

    expected = form(p, batch)
    with jax.set_mesh(mesh):
        found = form(jax.device_put(p, P()), jax.device_put(batch, P("x")))
    _assert_same(found, expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "split", [pytest.param("rows", marks=pytest.mark.exhaustive), "parameters"]
)
def test_adapted_steps_are_those_of_one_device(x64, mesh, split):
    """Rates of the quadratic model, and a trial of the damping at every other step."""
    model, p, batch = _case("mlp")
    if split == "parameters":
        model, p = _by_features, tree(4, w=(4, 6), v=(6, 3))
    objective = objective_of(model)
    stats = jk.value_grad_and_factors(objective)
    damping = jk.LevenbergMarquardt(initial=0.1, every=2)
    like = stats.factor_shapes(p, batch)
    tx = jk.kfac(like=like, damping=damping, damping_mode="exact", refresh_every=2)

    def step(p, state, batch):
        value, grads, factors = stats(p, batch)
        loss = functools.partial(objective, batch=batch)
        told = {
            "value": value,
            "value_fn": loss,
            "curvature": jk.operators.ggn(objective, p, batch),
        }
        updates, state = tx.update(grads, state, p, factors=factors, **told)
        return jax.tree.map(jnp.add, p, updates), state

    def trained(step, p, batch):
        state = tx.init(p)
        for _ in range(4):
            p, state = step(p, state, batch)
        return p, state.adaptation

    expected = trained(jax.jit(step), p, batch)
    assert expected[1].damping < 0.1 and expected[1].displaced == 0  # it was adapted
    with jax.set_mesh(mesh):
        if split == "rows":
            p, batch = jax.device_put(p, P()), jax.device_put(batch, P("x"))
        else:
            p, batch = _split_by_features(p), jax.device_put(batch, P())
        for run in (jax.jit(step), step):  # outside of jit what can be seen to be wrong is refused
            found = trained(run, p, batch)
            assert_tree_close(jax.device_get(found), jax.device_get(expected), 1e-9)
            kept = [jax.typeof(x).sharding.spec for x in jax.tree.leaves((p, found[0]))]
            assert kept[: len(kept) // 2] == kept[len(kept) // 2 :]
