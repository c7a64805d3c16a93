"""Parameters that a program transforms before they meet data; see also `tests/zoo/views.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.flatten_util import ravel_pytree

import jaxkfac as jk
from tests._checks import assert_tree_close
from tests._oracle import corrected_eigenvalues
from tests._programs import labels, normal, tree
from tests.zoo import all_programs

pytestmark = pytest.mark.usefixtures("x64")


def tokens():
    return normal(8, 2, 3, 4), labels(9, 2, 3)


def classifier(apply_fn):
    return jk.Objective(apply_fn, jk.Categorical())


def squares_by_example(objective, params, batch, terms):
    """Diagonal of the Fisher, from each example's gradient by itself."""
    each = jax.vmap(lambda one: jax.grad(objective)(params, jax.tree.map(lambda v: v[None], one)))
    rows = each(batch)
    return jax.tree.map(lambda g: (terms * g**2).mean(0), rows)


def transformed(p, x):
    """Every way to be no matrix: alone, twice, times another, as a gain of columns."""
    w = p["w"] * jax.nn.sigmoid(p["w"])
    x = jnp.tanh(x @ (w * jnp.exp(p["gain"])))
    x = jnp.tanh(jnp.einsum("oi,nsi->nso", jax.nn.softplus(p["v"]), x)) / (1 + p["d"] ** 2)
    return (x + jnp.tanh(p["t"])) @ p["head"] * jnp.exp(p["scale"])


def transformed_params():
    return tree(0, w=(4, 5), gain=(5,), v=(5, 5), d=(5,), t=(5,), head=(5, 3), scale=())


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("wall", [lambda f: f, jax.checkpoint, jax.jit], ids=["", "remat", "jit"])
def test_diagonals_are_squares_of_each_examples_gradient(wall):
    params, batch, objective = transformed_params(), tokens(), classifier(wall(transformed))
    stats = jax.jit(jk.value_grad_and_factors(objective, scales="exact_diagonal"))
    _, grads, factors = stats(params, batch)
    assert_tree_close(grads, jax.grad(objective)(params, batch), 1e-12)
    expected = squares_by_example(objective, params, batch, terms=3)
    for name in params.keys() - {"head"}:
        np.testing.assert_allclose(factors[name].diagonal, expected[name], rtol=1e-10, err_msg=name)


@pytest.mark.exhaustive
def test_in_a_scan_over_stacked_parameters_and_over_constant_ones():
    def apply_fn(p, x):
        def step(x, w):
            y = jnp.tanh((x * jnp.exp(w)) @ jax.nn.softplus(p["kernel"]))
            return x + y * jnp.tanh(p["gate"]), None

        return lax.scan(jax.checkpoint(step), x, p["log"])[0] @ p["head"]

    params = tree(3, log=(3, 4), kernel=(4, 4), gate=(4,), head=(4, 3))
    objective = classifier(apply_fn)
    stats = jax.jit(jk.value_grad_and_factors(objective, scales="exact_diagonal"))
    _, grads, factors = stats(params, tokens())
    assert_tree_close(grads, jax.grad(objective)(params, tokens()), 1e-12)
    expected = squares_by_example(objective, params, tokens(), terms=3)
    for name in ("log", "kernel", "gate"):
        np.testing.assert_allclose(factors[name].diagonal, expected[name], rtol=1e-10, err_msg=name)


@pytest.mark.slow
def test_padding_that_is_no_number_stays_outside():
    positions = jnp.asarray([[True, True, False], [True, False, False]])
    x = jnp.where(positions[..., None], tokens()[0], jnp.nan)
    objective = classifier(lambda p, x: jnp.tanh(x @ jax.nn.softplus(p["w"])) @ p["head"])
    params = tree(0, w=(4, 5), head=(5, 3))
    stats = jk.value_grad_and_factors(objective)
    batch = (x, tokens()[1], positions)
    clean = (jnp.nan_to_num(x), tokens()[1], positions)
    found, expected = (stats(params, b, positions=positions).factors["w"] for b in (batch, clean))
    assert np.isfinite(found.diagonal).all()
    np.testing.assert_allclose(found.diagonal, expected.diagonal, rtol=1e-12)


CASES = ["q, k, v concatenated into one product", "a list of layers stacked for a scan"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_parts_are_measured_as_parameters_of_their_own(name):
    """EKFAC of the joined program against that of each example's gradient."""
    case = all_programs()[name].build()
    stats = jk.value_grad_and_factors(case.objective)
    _, _, factors = stats(case.params, case.batch)
    bases = jk.eigendecompose(factors)
    found = jax.jit(jk.correct_eigenvalues(case.objective, bases))(case.params, case.batch)
    vectors = {
        n: (getattr(bases[n], "a_vectors", None), getattr(bases[n], "g_vectors", None))
        for n in bases
    }
    expected = corrected_eigenvalues(case.twin, case.params, case.batch, vectors)
    for layer, want in expected.items():
        got = getattr(found[layer], "raw_values", None)
        got = found[layer].raw_diagonal if got is None else got
        np.testing.assert_allclose(got, want.values, rtol=1e-8, atol=1e-12, err_msg=layer)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    ["parameters as one flat vector", "a kernel under a constant mask, and a triangle"]
    + [pytest.param(n, marks=pytest.mark.exhaustive) for n in CASES],
)
def test_kfac_takes_a_step(name):
    case = all_programs()[name].build()
    stats = jk.value_grad_and_factors(case.objective)
    tx = jk.kfac(0.1, like=stats.factor_shapes(case.params, case.batch), damping=1e-2)

    @jax.jit
    def step(params, state):
        value, grads, factors = stats(params, case.batch)
        updates, state = tx.update(grads, state, params, factors=factors)
        return value, optax.apply_updates(params, updates), state

    before, params, _ = step(case.params, tx.init(case.params))
    assert case.objective(params, case.batch) < before


def test_a_masked_kernel_is_not_measured_and_its_name_is_said():
    case = all_programs()["a kernel under a constant mask, and a triangle"].build()
    bases = jk.eigendecompose(jk.value_grad_and_factors(case.objective)(case.params, case.batch)[2])
    with pytest.raises(ValueError, match="'w' is masked by a constant in `mul`"):
        jk.correct_eigenvalues(case.objective, bases)(case.params, case.batch)


@pytest.mark.exhaustive
def test_flat_preconditioning_is_that_of_the_tree():
    """The same network as a tree and as one vector: the same natural gradient."""
    params = tree(0, w=(4, 5), b=(5,), head=(5, 3))
    flat, unravel = ravel_pytree(params)

    def apply_fn(p, x):
        return jnp.tanh(x @ p["w"] + p["b"]) @ p["head"]

    def natural(objective, p):
        _, grads, factors = jk.value_grad_and_factors(objective)(p, tokens())
        return jk.natural_gradient(grads, jk.eigendecompose(factors), damping=1e-2)

    found = natural(classifier(lambda p, x: apply_fn(unravel(p), x)), flat)
    expected = natural(classifier(apply_fn), params)
    np.testing.assert_allclose(found, ravel_pytree(expected)[0], rtol=1e-8)


@pytest.mark.slow
def test_budgeted_passes_give_the_factors_of_one():
    case = all_programs()["a list of layers stacked for a scan"].build()
    whole = jk.value_grad_and_factors(case.objective)(case.params, case.batch).factors
    stats = jk.value_grad_and_factors(case.objective, max_factor_bytes=2000)
    _, _, factors = stats(case.params, case.batch)
    for x, y in zip(jax.tree.leaves(factors), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12)


# ------------------------------------------------------------------ what the table says


def test_a_missing_reading_is_said_where_every_parameter_is_covered():
    table = jk.find_layers(
        lambda p, x: x @ p["w"] + jnp.arctan2(jnp.linalg.norm(p["w"]), jnp.tanh(x[..., :3])),
        tree(0, w=(4, 3)),
        tokens()[0],
    )
    assert "1 layers cover 12 of 12 parameters; 1 reading is missing" in str(table)
    assert "not covered: w goes through" in str(table)


def lora(p, x):
    """Beside a kernel, a product of parameters that meets data in no rule."""
    return jnp.arctan2(x @ p["w"], (p["a"] @ p["b"]).sum(0))


def lora_params():
    return tree(0, w=(4, 3), a=(4, 2), b=(2, 3))


@pytest.mark.slow
def test_only_remedies_that_work_are_printed():
    scalar = lambda p, b: jnp.mean(lora(p, b[0]) ** 2)
    with pytest.raises(jk.UncoveredParameterError) as raised:
        jk.value_grad_and_factors(scalar, loss_terms=6)(lora_params(), tokens())
    assert "'diagonal'" not in str(raised.value)
    with pytest.raises(jk.UncoveredParameterError) as raised:
        jk.value_grad_and_factors(classifier(lora))(lora_params(), tokens())
    assert "'diagonal'" in str(raised.value)
    kept = jk.value_grad_and_factors(classifier(lora), layers="w")(lora_params(), tokens()).factors
    assert list(kept) == ["w"]
    whole = jk.value_grad_and_factors(classifier(lora), uncovered="diagonal")(
        lora_params(), tokens()
    ).factors
    expected = squares_by_example(classifier(lora), lora_params(), tokens(), terms=3)
    np.testing.assert_allclose(whole["a"].diagonal, expected["a"], rtol=1e-10)


def test_sums_of_whole_examples_need_a_model():
    def apply_fn(p, x):
        return x @ (p["v"] * jnp.exp(p["gain"]))

    params = tree(0, v=(4, 3), gain=(3,))
    table = jk.find_layers(apply_fn, params, tokens()[0])
    assert ("gain", "has a diagonal of whole examples' gradients: a weight is formed for each") in (
        table.notes
    )
    scalar = lambda p, b: jnp.mean(apply_fn(p, b[0]) ** 2)
    with pytest.raises(ValueError, match="'gain' is one of whole examples' gradients"):
        jk.value_grad_and_factors(scalar, loss_terms=6)(params, tokens())


def test_an_adapter_beside_a_part_of_a_product_is_refused():
    config = jk.lslora.Config(rank=2, target="q")
    apply_fn = lambda p, x: x @ jnp.concatenate([p["q"], p["k"]], 1)
    params, (x, _) = tree(0, q=(4, 3), k=(4, 3)), tokens()
    adapters = jk.lslora.init(apply_fn, config, params, x, key=jax.random.key(0))
    with pytest.raises(ValueError, match="'q': the program joins its parameter with others"):
        jk.lslora.attach(apply_fn, config)(params, adapters, x)


def test_an_adapter_of_a_range_of_a_kernel():
    """The gate half is adapted, the other half is as it was."""
    config = jk.lslora.Config(rank=2, target=r"w\[:,3:6\]")
    apply_fn = lambda p, x: (x @ p["w"][:, :3], x @ p["w"][:, 3:])
    params, (x, _) = tree(0, w=(4, 6)), tokens()
    adapters = jk.lslora.init(apply_fn, config, params, x, key=jax.random.key(0))
    adapters = jax.tree.map(lambda v: v + 0.1, adapters)
    up, gate = jk.lslora.attach(apply_fn, config)(params, adapters, x)
    np.testing.assert_allclose(up, x @ params["w"][:, :3], rtol=1e-12)
    assert np.abs(gate - x @ params["w"][:, 3:]).max() > 1e-3


@pytest.mark.slow
@pytest.mark.standard_promotion
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["parameters as one flat vector", "Haiku: GRU"])
def test_a_saved_service_knows_ranges(name, tmp_path):
    """`jnp.split`, as in Haiku, says its sizes in NumPy's integers."""
    case = all_programs()[name].build()
    factors = jk.value_grad_and_factors(case.objective)(case.params, case.batch).factors
    with jk.HostCurvature(refresh_every=1, lag=1) as service:
        service.push(factors, 0)
        service.save(tmp_path / "service")
    with jk.HostCurvature.load(tmp_path / "service") as service:
        assert service.average().layers == factors.layers


@pytest.mark.exhaustive
def test_stacks_put_one_after_the_other_for_a_scan_have_diagonals():
    def apply_fn(p, x):
        w = jnp.concatenate([p["first"], p["second"]])
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0] @ p["head"]

    params, batch = tree(0, first=(2, 4, 4), second=(1, 4, 4), head=(4, 3)), tokens()
    objective = classifier(apply_fn)
    _, grads, factors = jk.value_grad_and_factors(objective)(params, batch)
    assert_tree_close(grads, jax.grad(objective)(params, batch), 1e-12)
    expected = squares_by_example(objective, params, batch, terms=3)
    for name in ("first", "second"):
        np.testing.assert_allclose(factors[name].diagonal, expected[name], rtol=1e-10)
