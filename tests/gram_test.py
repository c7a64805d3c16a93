"""Gram matrices of gradients against JAX's own Jacobian, multiplied with itself, in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import jaxkfac as jk
from jaxkfac._arguments import leaves_by_path, with_leaves
from jaxkfac.curvature.per_example import GatheredProducts, _gram_plan
from tests._cases import CASES, case
from tests._checks import objective_of
from tests._programs import labels, normal, tree

pytestmark = pytest.mark.usefixtures("x64")

TOLERANCE = 1e-12


@pytest.fixture(params=["cheaper", "pairs", "gradients"])
def method(request, monkeypatch):
    """Every layer the cheaper way, or all layers one way where they can be."""
    if request.param != "cheaper":
        monkeypatch.setattr(_gram_plan, "_is_cheaper", lambda *_: request.param == "pairs")
    return request.param


def assert_close(found, expected, tolerance=TOLERANCE):
    assert found.shape == expected.shape
    bound = tolerance * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound)


def dense(objective, params, batch, rows="outputs", **call):
    """JAX's Jacobian ``(rows, parameters)``, masked rows not yet zero."""
    flat, unravel = ravel_pytree(params)
    inputs, targets, mask = objective.batch(batch)

    def of(flat):
        outputs = objective.outputs(unravel(flat), inputs, None, call.get("state"))[0]
        heads = objective.heads(outputs, targets, mask)
        if rows == "outputs":
            return jnp.concatenate([head.outputs.ravel() for head in heads])
        terms = [head.kept_terms() for head in heads]
        return sum(x.reshape(len(x), -1).sum(1) for x in terms)

    return np.asarray(jax.jit(jax.jacrev(of))(flat))


def first(tree, number):
    return jax.tree.map(lambda x: x[:number], tree)


def check(objective, params, batch, tolerance=TOLERANCE, **call):
    """Every product of the operator, for outputs and losses."""
    for rows in ("outputs", "losses"):
        J = dense(objective, params, batch, rows, **call)
        other = dense(objective, params, first(batch, 2), rows, **call)
        operator = jk.jacobian(objective, params, batch, rows=rows, **call)
        few = jk.jacobian(objective, params, first(batch, 2), rows=rows, **call)
        assert_close(operator.gram(), J @ J.T, tolerance)
        assert_close(operator.gram(few), J @ other.T, tolerance)
        assert_close(operator.squared_norms(), (J * J).sum(1), tolerance)
        x = jnp.cos(jnp.arange(len(J), dtype=float))
        assert_close(ravel_pytree(operator.vjp(x))[0], J.T @ x, tolerance)
        check_products(operator, J, tolerance)


def check_products(operator, J, tolerance):
    """Products with vectors: by passes of the model, and from gathered rows."""
    flat, unravel = ravel_pytree(operator.params)
    v = jnp.sin(jnp.arange(flat.size, dtype=float)).astype(flat.dtype)
    x = jnp.cos(jnp.arange(len(J), dtype=float))
    rows = GatheredProducts(operator.source, [operator.call])
    transposed = with_leaves(operator.params, rows.vjp(x))
    assert_close(ravel_pytree(transposed)[0], J.T @ x, tolerance)
    assert_close(rows.jvp(leaves_by_path(unravel(v))), J @ v, tolerance)
    if operator.source.rows != "losses":
        assert_close(operator @ unravel(v), J @ v, tolerance)


# ---------------- programs


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_products_are_those_of_the_jacobian(name, method):
    model, _, params, batch = case(name)
    check(objective_of(model), params, batch)


def convolution(p, x):
    x = jax.lax.conv_general_dilated(
        x, p["k"], (2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jnp.tanh(x + p["b"]).mean((1, 2)) @ p["head"]


def tied(p, ids):
    """An embedding, scaled as in a transformer, whose transpose is the head."""
    x = jax.checkpoint(lambda x: x * p["scale"])((2.0 * p["table"])[ids])
    return jnp.tanh(x + x.mean(1, keepdims=True) @ p["w"]) @ p["table"].T


def looked_up(p, ids):
    """A table times a constant, read twice; one index is out of range."""
    table = 3.0 * p["table"]
    h = table.at[ids].get(mode="fill", fill_value=0) + table.at[ids + 1].get(mode="clip")
    return jnp.tanh(h @ (0.5 * p["w"]) + p["b"])


def weight_norm(p, x):
    v = p["v"] / jnp.linalg.norm(p["v"], axis=0)
    return jnp.tanh(x @ p["first"]) @ (v * p["g"])


def masked_kernel(p, x):
    return jnp.tanh(x @ jnp.tril(p["w"]) + p["b"]) @ p["head"]


def each_alone(p, x):
    return jax.lax.map(lambda x: jnp.tanh(x @ p["w"] + p["b"]) @ p["w"], x)


def slope(p, x):
    """A network's value and its derivatives in its inputs: several uses of each layer."""
    u = lambda x: jnp.tanh(jnp.tanh(x @ p["w"] + p["b"]) @ p["v"]) @ p["head"]

    def both(x):
        value, first = jax.jvp(u, (x,), (jnp.ones_like(x),))
        second = jax.jvp(lambda x: jax.jvp(u, (x,), (jnp.ones_like(x),))[1], (x,), (x,))[1]
        return jnp.concatenate([value, first, second])

    return jax.vmap(both)(x)


def routed(p, x):
    """Each example picks its expert."""
    expert = (x[:, 0] > 0).astype(jnp.int32)
    return jnp.einsum("ni,nio->no", jnp.tanh(x @ p["w"]), p["experts"][expert])


PROGRAMS = {
    "convolution": (convolution, {"k": (3, 2, 2, 3), "b": (3,), "head": (3, 4)}, (5, 4, 2)),
    "tied": (tied, {"table": (5, 3), "scale": (3,), "w": (3, 3)}, "ids"),
    "looked up": (looked_up, {"table": (5, 3), "w": (3, 4), "b": (4,)}, "ids"),
    "weight norm": (weight_norm, {"first": (4, 3), "v": (3, 2), "g": (2,)}, (4,)),
    "masked kernel": (masked_kernel, {"w": (4, 4), "b": (4,), "head": (4, 2)}, (3, 4)),
    "each alone": (each_alone, {"w": (4, 4), "b": (4,)}, (4,)),
    "derivatives": (slope, {"w": (2, 5), "b": (5,), "v": (5, 5), "head": (5, 1)}, (2,)),
    "experts": (routed, {"w": (4, 3), "experts": (2, 3, 2)}, (4,)),
}


def program(name, number=3):
    model, sizes, inputs = PROGRAMS[name]
    params = tree(7, **sizes)
    x = labels(1, number, 4, classes=5) if inputs == "ids" else normal(2, number, *inputs)
    shape = jax.eval_shape(model, params, x).shape
    # A function of its own each time, so that no compiled program of another method is found.
    return jk.Objective(lambda p, x: model(p, x), jk.Gaussian()), params, (x, normal(3, *shape))


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", PROGRAMS)
def test_products_of_programs_of_every_kind_of_layer(name, method):
    check(*program(name))


@pytest.mark.slow
def test_what_no_layer_covers_takes_a_second_pass():
    methods = {}
    for name in ("weight norm", "masked kernel", "each alone", "derivatives"):
        plan = jk.jacobian(*program(name)).plan()
        methods[name] = {x.name: x.method for x in plan.layers if x.method == "second pass"}
        assert all(x.reason for x in plan.layers if x.method == "second pass")
    assert methods["weight norm"].keys() == {"v", "g"}
    assert methods["masked kernel"].keys() == {"w", "b"}
    assert methods["each alone"].keys() == {"w", "b"}
    assert not methods["derivatives"]


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_float32_agrees_with_float64(name, method):
    objective, params, batch = program(name)

    def of_dtype(dtype):
        cast = lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
        return jax.tree.map(cast, (params, batch))

    params, batch = of_dtype(jnp.float32)
    found = jk.gram(objective, params, batch)
    assert found.dtype == jnp.float32
    params, batch = of_dtype(jnp.float64)
    J = dense(objective, params, batch)
    assert_close(found, J @ J.T, 1e-6)


@pytest.mark.slow
def test_rows_in_bfloat16_are_accumulated_in_float32():
    objective, params, batch = program("convolution")
    params, batch = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params, batch))
    found = jk.gram(objective, params, batch, rows="losses")
    assert found.dtype == jnp.float32 and np.all(np.linalg.eigvalsh(found) > 0)


# ---------------- several outputs, marks, masks, weights


def heads():
    apply = lambda p, x: {
        "label": jnp.tanh(x @ p["w"]) @ p["label"],
        "box": jnp.tanh(x @ p["w"]) @ p["box"],
    }
    params, x = tree(5, w=(4, 3), label=(3, 3), box=(3, 2)), normal(6, 4, 2, 4)
    likelihood = {"label": jk.Categorical(), "box": jk.Gaussian()}
    targets = {"label": labels(8, 4, 2), "box": normal(9, 4, 2, 2)}
    return jk.Objective(apply, likelihood, weight={"label": 2.0, "box": 0.5}), params, (x, targets)


@pytest.mark.slow
@pytest.mark.sampled(1)
def test_several_outputs_follow_one_another(method):
    check(*heads())


def two_sets(params, batch):
    """Two squared errors, on points of their own, with a weight and a mask."""
    (inside, f), (border, g), mask = batch
    u = lambda x: jnp.tanh(x @ params["w"] + params["b"]) @ params["head"]
    keep = mask.astype(f.dtype)
    inner = jk.mark_outputs(u(inside), jk.Gaussian(), weight=3.0, mask=mask) - f
    outer = jk.mark_outputs(u(border) ** 2, jk.Gaussian()) - g
    return 1.5 * (keep[:, None] * inner**2).sum() / keep.sum() + 0.5 * (outer**2).sum(1).mean()


def two_sets_problem():
    params = tree(11, w=(2, 4), b=(4,), head=(4, 2))
    mask = jnp.asarray([True, False, True, True, True])
    inside, border = (normal(12, 5, 2), normal(13, 5, 2)), (normal(14, 3, 2), normal(15, 3, 2))
    return params, (inside, border, mask)


@pytest.mark.slow
@pytest.mark.sampled(1)
def test_residuals_of_marks_have_the_loss_and_its_gauss_newton_matrix(method):
    params, batch = two_sets_problem()
    (inside, f), (border, g), mask = batch
    flat, unravel = ravel_pytree(params)

    def residuals(flat):
        p = unravel(flat)
        u = lambda x: jnp.tanh(x @ p["w"] + p["b"]) @ p["head"]
        inner = jnp.where(mask[:, None], u(inside) - f, 0.0) * np.sqrt(3 / 4)
        outer = (u(border) ** 2 - g) / np.sqrt(3)
        return jnp.concatenate([inner.ravel(), outer.ravel()])

    r = residuals(flat)
    np.testing.assert_allclose(two_sets(params, batch), 0.5 * r @ r)
    J = np.asarray(jax.jacrev(residuals)(flat))
    loss = lambda params, batch: two_sets(params, batch)  # compiled anew for each method
    operator = jk.jacobian(loss, params, batch, rows="residuals")
    assert_close(operator.gram(), J @ J.T)
    assert_close(operator.squared_norms(), (J * J).sum(1))
    assert_close(
        ravel_pytree(operator.vjp(r))[0], ravel_pytree(jax.grad(two_sets)(params, batch))[0]
    )
    ggn = jk.operators.ggn(two_sets, params, batch)
    assert_close(J.T @ (J @ flat), np.asarray(ravel_pytree(ggn @ params)[0]))


@pytest.mark.slow
def test_rows_of_marks_are_unscaled_outputs():
    params, batch = two_sets_problem()
    scaled = jk.gram(two_sets, params, batch, rows="residuals")
    scale = np.repeat([3 / 4, 1 / 3], [10, 6])
    found = jk.gram(two_sets, params, batch)
    assert_close(np.sqrt(np.outer(scale, scale)) * found, np.asarray(scaled))


@pytest.mark.slow
def test_residuals_of_an_objective_weigh_its_terms():
    objective, params, (x, y) = program("convolution")
    weights = jnp.asarray([0.5, 0.0, 2.0])
    J = dense(objective, params, (x, y)).reshape(3, 4, -1)
    J = (J * np.sqrt(np.asarray(weights) / 2.5)[:, None, None]).reshape(12, -1)
    assert_close(jk.gram(objective, params, (x, y, weights), rows="residuals"), J @ J.T)


@pytest.mark.slow
@pytest.mark.sampled(1)
def test_masked_rows_are_zero_and_count_nowhere(method):
    objective, params, (x, y) = program("derivatives", 4)
    mask = jnp.asarray([True, True, False, True])
    K = jk.gram(objective, params, (x, y))
    rows = np.repeat(np.asarray(mask), 3)
    found = jk.gram(objective, params, (x.at[2].set(jnp.nan), y, mask))
    assert_close(found, np.where(np.outer(rows, rows), K, 0))
    norms = jk.gram(objective, params, (x.at[2].set(jnp.nan), y, mask), diagonal=True)
    assert_close(norms, np.where(rows, np.diagonal(K), 0))
    losses = jk.gram(objective, params, (x, y.at[2].set(jnp.nan), mask), rows="losses")
    assert np.isfinite(losses).all() and not losses[2].any() and losses[0, 0] > 0


def test_a_target_out_of_range_spoils_its_own_row_alone():
    model, _, params, (x, y) = case("rows")
    objective = jk.Objective(objective_of(model).apply_fn, jk.Categorical())
    found = jax.jit(lambda y: jk.gram(objective, params, (x, y), rows="losses"))(y.at[1].set(99))
    bad = np.asarray([False, True, False])
    np.testing.assert_array_equal(np.isnan(found), bad[:, None] | bad)


# ---------------- choices


def test_layers_leave_other_parameters_fixed():
    model, _, params, batch = case("rows")
    objective = objective_of(model)
    J = dense(objective, params, batch)
    split = len(ravel_pytree(params["down"])[0])  # leaves are in order of their names
    operator = jk.jacobian(objective, params, batch, layers="up/.*")
    assert_close(operator.gram(), J[:, split:] @ J[:, split:].T)
    x = jnp.ones(len(J))
    back = operator.vjp(x)
    assert_close(ravel_pytree(back["up"])[0], J[:, split:].T @ x)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(back["down"]))


@pytest.mark.sampled(1)
def test_one_slice_of_a_stack_is_a_layer_of_its_own(method):
    apply = lambda p, x: jnp.tanh(x @ p["w"][0]) @ p["w"][1]
    objective, params = jk.Objective(apply, jk.Gaussian()), tree(21, w=(2, 3, 3))
    batch = normal(22, 4, 3), normal(23, 4, 3)
    J = dense(objective, params, batch)
    operator = jk.jacobian(objective, params, batch, layers=r"w\[1\]")
    assert_close(operator.gram(), J[:, 9:] @ J[:, 9:].T)
    x = jnp.arange(12.0)
    assert_close(ravel_pytree(operator.vjp(x))[0], np.where(np.arange(18) < 9, 0, J.T @ x))


def test_the_cheaper_way_is_chosen_layer_by_layer():
    apply = lambda p, x: jnp.tanh(x @ p["thin"]).mean(1) @ p["wide"]
    params = {"thin": jnp.zeros((4, 8)), "wide": jnp.zeros((8, 64))}
    batch = jnp.zeros((5, 32, 4)), jnp.zeros((5, 64))
    objective = jk.Objective(apply, jk.Gaussian())
    plan = jk.jacobian(objective, params, batch, rows="losses").plan()
    thin, wide = plan.layers
    assert (thin.method, wide.method) == ("gradients", "pairs")
    # 2 n S in out to form, 2 n^2 in out to multiply; 2 n^2 S^2 (in + out).
    assert thin.operations == 2 * 5 * 32 * 4 * 8 + 2 * 25 * 4 * 8
    assert wide.operations == 2 * 25 * (8 + 64)
    assert plan.explicit_operations == 2 * 25 * (4 * 8 + 8 * 64) and plan.shape == (5, 5)
    assert plan.num_bytes == 8 * (25 + 5 * 4 * 8 + 5 * (8 + 64))
    shapes = jax.eval_shape(lambda *args: args, params, batch)
    assert jk.jacobian(objective, *shapes, rows="losses").plan() == plan
    assert "gradients" in str(plan) and "5 x 5 in" in repr(plan)
    diagonal = jk.jacobian(objective, params, batch, rows="losses").plan(diagonal=True)
    assert diagonal.shape == (5,) and diagonal.operations < plan.operations


def test_maps_loops_and_jit_around_it():
    model, _, params, batch = case("rows")
    objective = objective_of(model)
    gram = lambda params: jk.gram(objective, params, batch, rows="losses")
    params2 = jax.tree.map(lambda x: 2 * x, params)
    both = jax.tree.map(lambda *x: jnp.stack(x), params, params2)
    expected = jnp.stack([gram(params), gram(params2)])
    assert_close(jax.jit(jax.vmap(gram))(both), expected)
    assert_close(jax.lax.map(gram, both), expected)
    operator = jax.jit(lambda p: jk.jacobian(objective, p, batch, rows="losses"))(params)
    assert_close(operator.gram(), expected[0])


@pytest.mark.slow
def test_one_row_and_equal_rows():
    objective, params, batch = program("tied")
    J = dense(objective, params, batch, "losses")
    assert_close(jk.gram(objective, params, first(batch, 1), rows="losses"), J[:1] @ J[:1].T)
    twice = jax.tree.map(lambda x: x[jnp.asarray([0, 1, 0])], batch)
    found = jk.gram(objective, params, twice, rows="losses")
    assert_close(found[0], found[2])
    assert np.linalg.matrix_rank(found, tol=1e-10 * found.max()) == 2


@pytest.mark.slow
def test_a_damped_least_squares_step_from_either_side():
    params, batch = two_sets_problem()
    operator = jk.jacobian(two_sets, params, batch, rows="residuals")
    gradient, unravel = ravel_pytree(jax.grad(two_sets)(params, batch))
    ggn = jk.operators.ggn(two_sets, params, batch)
    dense_ggn = jax.vmap(lambda v: ravel_pytree(ggn @ unravel(v))[0])(jnp.eye(len(gradient)))
    (inside, f), (border, g), mask = batch
    u = lambda x: jnp.tanh(x @ params["w"] + params["b"]) @ params["head"]
    r = jnp.concatenate(
        [
            (jnp.where(mask[:, None], u(inside) - f, 0.0) * np.sqrt(3 / 4)).ravel(),
            ((u(border) ** 2 - g) / np.sqrt(3)).ravel(),
        ]
    )
    K = operator.gram()
    step = operator.vjp(jnp.linalg.solve(K + 1e-3 * jnp.eye(len(K)), r))
    expected = jnp.linalg.solve(dense_ggn + 1e-3 * jnp.eye(len(gradient)), gradient)
    assert_close(ravel_pytree(step)[0], np.asarray(expected), 1e-9)


# ---------------- what the page docs/gram.md does with it


def test_clipped_gradients_are_those_of_single_examples():
    model, _, params, batch = case("rows")
    objective = objective_of(model)
    J = dense(objective, params, batch, "losses")
    operator = jk.jacobian(objective, params, batch, rows="losses")
    norms = np.linalg.norm(J, axis=1)
    bound = np.median(norms)
    weights = jnp.minimum(1.0, bound / jnp.sqrt(operator.squared_norms()))
    clipped = J * np.minimum(1.0, bound / norms)[:, None]
    assert np.linalg.norm(clipped, axis=1).max() <= bound * (1 + 1e-12)
    assert_close(ravel_pytree(operator.vjp(weights / len(J)))[0], clipped.mean(0))


def test_the_noise_scale_is_that_of_single_gradients():
    model, _, params, batch = case("one row")
    objective = objective_of(model)
    J = dense(objective, params, batch, "losses")
    kernel = jk.gram(objective, params, batch, rows="losses")
    number, square_of_mean = len(kernel), kernel.mean()
    trace = (jnp.trace(kernel) / number - square_of_mean) * number / (number - 1)
    assert_close(trace, np.trace(np.cov(J.T)))
    assert_close(square_of_mean, np.square(J.mean(0)).sum())


# ---------------- bad input


def test_more_rows_than_fit_are_refused_with_their_bytes():
    objective = jk.Objective(lambda p, x: x @ p["w"], jk.Gaussian())
    params, batch = {"w": normal(1, 40, 3)}, (normal(2, 3, 40), normal(3, 3, 3))
    with pytest.raises(jk.MemoryBudgetError, match=r"9 x 9 takes .*KiB \(648 B for itself"):
        jk.gram(objective, params, batch, max_bytes=1000)
    with pytest.raises(jk.MemoryBudgetError, match="a result of 9 takes"):
        jk.gram(objective, params, batch, diagonal=True, max_bytes=1000)
    x = np.asarray(batch[0])
    found = jk.gram(objective, params, batch, max_bytes="1MB")
    assert_close(found, np.kron(x @ x.T, np.eye(3)))  # the rows of an example stand together
    with pytest.raises(ValueError, match="max_bytes=0"):
        jk.gram(objective, params, batch, max_bytes=0)


def test_examples_that_meet_are_refused():
    apply = lambda p, x: (x - x.mean(0)) @ p["w"] + (x @ p["w"]).mean(0)
    objective = jk.Objective(apply, jk.Gaussian())
    batch = normal(1, 4, 3), normal(2, 4, 2)
    with pytest.raises(jk.CoupledExamplesError, match="use evaluation mode"):
        jk.gram(objective, {"w": normal(3, 3, 2)}, batch)

    def contrastive(params, x):
        z = jk.mark_outputs((x @ params["w"]) @ (x @ params["w"]).T, jk.Categorical())
        return -jax.nn.log_softmax(z).diagonal().mean()

    with pytest.raises(jk.CoupledExamplesError, match="examples meet"):
        jk.gram(contrastive, {"w": normal(3, 3, 2)}, normal(1, 4, 3))


def test_rows_that_do_not_exist_are_refused():
    params, batch = two_sets_problem()
    with pytest.raises(ValueError, match="does not show the losses of its examples"):
        jk.gram(two_sets, params, batch, rows="losses")
    with pytest.raises(TypeError, match="marks its outputs"):
        jk.gram(lambda p, x: jnp.square(x @ p["w"]).mean(), {"w": normal(1, 3, 1)}, normal(2, 4, 3))
    objective, params, batch = heads()
    with pytest.raises(ValueError, match=r"output \['label'\] has Categorical.*no residuals"):
        jk.gram(objective, params, batch, rows="residuals")


def test_arguments_that_do_not_fit_are_refused():
    objective, params, batch = program("tied")
    with pytest.raises(ValueError, match="leave out other"):
        jk.gram(objective, params, batch, batch, diagonal=True)
    operator = jk.jacobian(objective, params, batch, rows="losses")
    with pytest.raises(ValueError, match="the same rows="):
        operator.gram(jk.jacobian(objective, params, batch))
    with pytest.raises(ValueError, match=r"x has shape \(4,\), expected .* \(3,\)"):
        operator.vjp(jnp.ones(4))
    with pytest.raises(jk.UnknownLayerError, match="nearest names"):
        jk.gram(objective, params, batch, layers="tabel")
    with pytest.raises(ValueError, match="reads the same elements"):
        jk.gram(objective, params, batch, layers="table")
    with pytest.raises(ValueError, match="needs a jk.Objective"):
        jk.jacobian(two_sets, *two_sets_problem(), state={})
    objective = jk.Objective(lambda p, x: (x.astype(complex) @ p["w"]).real, jk.Gaussian())
    params, batch = {"w": jnp.ones((3, 2), complex)}, (normal(1, 4, 3), normal(2, 4, 2))
    with pytest.raises(jk.UncoveredParameterError, match="is complex"):
        jk.gram(objective, params, batch)


def test_jacobians_of_one_objective_are_static_data_of_one_program():
    objective, params, batch = program("tied")
    one, two = (jk.jacobian(objective, params, batch, rows="losses") for _ in range(2))
    assert jax.tree.structure(one) == jax.tree.structure(two)
    other = dataclasses.replace(one, source=one.source._replace(rows="outputs"))
    assert jax.tree.structure(other) != jax.tree.structure(one)
