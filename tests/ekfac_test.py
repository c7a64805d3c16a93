"""EKFAC: measured eigenvalues against brute force and dense Fisher matrices, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkfac as jk
from tests._cases import CASES, case
from tests._checks import assert_tree_close, objective_of
from tests._convolutions import CONVOLUTIONS
from tests._dense import fisher_block, root_fisher
from tests._oracle import corrected_eigenvalues
from tests._programs import attention, attention_params, labels, mlp, mlp_params, normal

pytestmark = pytest.mark.exhaustive

INF = float("inf")


def _bases(model, params, batch, *, likelihood="categorical", max_condition=INF, **options):
    stats = jk.value_grad_and_factors(objective_of(model, likelihood), **options)
    return jk.eigendecompose(jax.jit(stats)(params, batch)[2], max_condition=max_condition)


def _corrected(model, params, batch, bases, *, likelihood="categorical", call=None, **options):
    correct = jk.correct_eigenvalues(objective_of(model, likelihood), bases, **options)
    return jax.jit(correct)(params, batch, **(call or {}))


def _vectors(bases):
    return {
        name: (getattr(basis, "a_vectors", None), getattr(basis, "g_vectors", None))
        for name, basis in bases.items()
    }


def _assert_values(corrected, expected, tolerance=1e-10):
    assert set(corrected) == set(expected)
    for name, want in expected.items():
        basis = corrected[name]
        found = basis.raw_diagonal if hasattr(basis, "raw_diagonal") else basis.raw_values
        assert found.shape == want.values.shape, name
        error = np.abs(np.asarray(found) - want.values).max()
        assert error <= tolerance * max(1.0, np.abs(want.values).max()), (name, error)
        if want.bias is not None and basis.bias_raw_values is not None:
            np.testing.assert_allclose(basis.bias_raw_values, want.bias, rtol=tolerance, atol=1e-12)


def _check(
    model, params, batch, *, oracle_model=None, bias="joint", scales="diagonal", per=("example",),
    positions=None, labels=None, bases=None, **options,
):  # fmt: skip
    """Measured eigenvalues in the bases of the empirical factors against the oracle's."""
    likelihood = options.get("likelihood", "categorical")
    if bases is None:
        bases = _bases(model, params, batch, likelihood=likelihood, bias=bias, scales=scales)
    given = {"positions": positions, "labels": labels}
    call = {name: value for name, value in given.items() if value is not None}
    for one in per:
        corrected = _corrected(model, params, batch, bases, per=one, call=call, **options)
        expected = corrected_eigenvalues(
            oracle_model or model, params, batch, _vectors(bases), per=one, bias=bias,
            scales=scales, **call, **options,
        )  # fmt: skip
        _assert_values(corrected, expected)
    return corrected


# ------------------------------------------------------------ the brute force


@pytest.mark.parametrize("name", CASES)
def test_layer_kinds_per_example_and_per_token(x64, name):
    model, plain, params, batch = case(name)
    _check(model, params, batch, oracle_model=plain, per=("example", "token"))


@pytest.mark.parametrize("name", ["1-D", "2-D, strided and padded", "depthwise", "3-D"])
def test_convolutions(x64, name):
    model, plain, params, batch = CONVOLUTIONS[name].case()
    _check(model, params, batch, per=("example", "token"))


@pytest.mark.parametrize("fisher", ["mc", "exact"])
@pytest.mark.parametrize("name", ["attention", "scan", "recurrent"])
def test_other_fisher_types(x64, name, fisher):
    model, plain, params, (x, y) = case(name)
    drawn = labels(8, 2, *y.shape) if fisher == "mc" else None
    _check(
        model, params, (x, y), oracle_model=plain, fisher=fisher, labels=drawn,
        per=("example", "token"),
    )  # fmt: skip


@pytest.mark.parametrize("fisher", ["empirical", "exact"])
@pytest.mark.parametrize("name", ["attention", "shared layers"])
def test_masked_terms_and_absent_positions(x64, name, fisher):
    model, plain, params, batch = case(name)
    here = jnp.asarray(np.arange(3) < np.array([[3], [2], [1]]))
    mask = here.at[0, 1].set(False)
    _check(
        model, params, (*batch, mask), oracle_model=plain, fisher=fisher, positions=here,
        per=("example", "token"),
    )  # fmt: skip


@pytest.mark.parametrize("likelihood", ["bernoulli", "gaussian"])
def test_other_likelihoods(x64, likelihood):
    y = (normal(2, 2, 3, 3) > 0).astype(jnp.float64)
    batch = (normal(1, 2, 3, 4), y)
    _check(attention, attention_params(), batch, likelihood=likelihood, fisher="exact")


def test_a_separate_bias_has_values_of_its_own(x64):
    model, plain, params, batch = case("scan")
    corrected = _check(model, params, batch, oracle_model=plain, bias="separate")
    assert corrected["blocks/kernel"].raw_values.shape == (3, 4, 4)
    assert corrected["blocks/kernel"].bias_raw_values.shape == (3, 4)


@pytest.mark.parametrize("read", [lambda w: 0.5 * w, lambda w: -w])
@pytest.mark.parametrize("bias", ["joint", "separate"])
@pytest.mark.parametrize("positions", [2, 5])
def test_a_constant_times_a_weight_is_in_the_weights_gradient_alone(x64, positions, bias, read):
    """The bias beside c W is not scaled; held to the Fisher of the parameters themselves."""

    def model(p, x, tap):
        return jnp.cumsum(jnp.tanh(x @ read(p["w"]) + p["b"]), axis=1) @ p["v"]

    p = {"w": normal(1, 4, 5), "b": normal(2, 5), "v": normal(3, 5, 3)}
    batch = (normal(1, 3, positions, 4, scale=1.0), labels(2, 3, positions))
    basis = _corrected(model, p, batch, _bases(model, p, batch, bias=bias))["w"]
    paths = ("w", "b") if bias == "joint" else ("w",)
    root = root_fisher(model, p, batch, fisher="empirical")
    turn = np.kron(np.asarray(basis.a_vectors), np.asarray(basis.g_vectors))
    rotated = np.diag(turn.T @ fisher_block(root, *paths) @ turn).reshape(-1, 5)
    np.testing.assert_allclose(basis.raw_values, rotated, rtol=1e-9, atol=1e-15)
    if bias == "separate":
        q = np.asarray(basis.g_vectors)
        rotated = np.diag(q.T @ fisher_block(root, "b") @ q)
        np.testing.assert_allclose(basis.bias_raw_values, rotated, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("name", ["attention", "nested scan"])
def test_full_blocks_are_layers_with_one_input(x64, name):
    model, plain, params, batch = case(name)
    _check(model, params, batch, oracle_model=plain, scales="full_block")


def test_padding_may_hold_nan(x64):
    here = jnp.asarray(np.arange(3) < np.array([[3], [2], [1]]))
    clean, y = jnp.where(here[..., None], normal(1, 3, 3, 4), 0.0), labels(2, 3, 3)
    bases = _bases(mlp, mlp_params(), (clean, y, here))
    spoiled = jnp.where(here[..., None], clean, jnp.nan)
    one, other = (
        _corrected(mlp, mlp_params(), (x, y, here), bases, call={"positions": here})
        for x in (clean, spoiled)
    )
    assert_tree_close(other["up/kernel"].raw_values, one["up/kernel"].raw_values, 1e-12)


# ------------------------------------------------------------------- theorems


def _dense(basis, values):
    """Q diag(values) Qᵀ of one layer without a stack."""
    turn = np.kron(np.asarray(basis.a_vectors), np.asarray(basis.g_vectors))
    return turn @ np.diag(np.asarray(values).reshape(-1)) @ turn.T


def _layers_of(params):
    """Paths of each layer's kernel, then its bias."""
    if "up" in params:
        return {f"{name}/kernel": (f"{name}/kernel", f"{name}/bias") for name in ("up", "down")}
    return {"q": ("q",), "v": ("v",), "o": ("o",), "head": ("head", "head_bias")}


@pytest.mark.parametrize("fisher", ["empirical", "exact"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", ["one row", "attention"])
def test_ekfac_is_never_further_from_the_fisher_than_kfac(x64, name, sharing, fisher):
    """In Frobenius norm, and nearer here; its trace is the Fisher's, in whatever basis."""
    model, _, params, batch = case(name)
    bases = _bases(model, params, batch, sharing=sharing, fisher=fisher)
    corrected = _corrected(model, params, batch, bases, fisher=fisher)
    root = root_fisher(model, params, batch, fisher=fisher)
    for layer, paths in _layers_of(params).items():
        block, basis = fisher_block(root, *paths), corrected[layer]
        products = basis.a_raw_values[:, None] * basis.g_raw_values
        kfac = np.linalg.norm(_dense(basis, products) - block)
        ekfac = np.linalg.norm(_dense(basis, basis.raw_values) - block)
        assert ekfac < kfac * (1 + 1e-12)
        np.testing.assert_allclose(basis.raw_values.sum(), np.trace(block), rtol=1e-10)
        turn = np.kron(np.asarray(basis.a_vectors), np.asarray(basis.g_vectors))
        rotated = np.diag(turn.T @ block @ turn).reshape(basis.raw_values.shape)
        np.testing.assert_allclose(basis.raw_values, rotated, rtol=1e-8, atol=1e-15)


def test_no_other_diagonal_in_the_same_basis_is_nearer(x64):
    model, _, params, batch = case("one row")
    bases = _bases(model, params, batch)
    corrected = _corrected(model, params, batch, bases)
    block = fisher_block(
        root_fisher(model, params, batch, fisher="empirical"), "up/kernel", "up/bias"
    )
    basis = corrected["up/kernel"]
    best = np.linalg.norm(_dense(basis, basis.raw_values) - block)
    for seed in range(3):
        moved = basis.raw_values + normal(seed, *basis.raw_values.shape, scale=0.01)
        assert np.linalg.norm(_dense(basis, moved) - block) > best


def test_one_row_per_example_leaves_no_difference_between_example_and_token(x64):
    model, _, params, batch = case("one row")
    bases = _bases(model, params, batch)
    one, other = (_corrected(model, params, batch, bases, per=per) for per in ("example", "token"))
    assert_tree_close(one, other, 1e-13)


def test_values_of_a_single_datum_are_products_of_the_factors_eigenvalues(x64):
    params, batch = mlp_params(), (normal(1, 1, 4), labels(2, 1))
    bases = _bases(mlp, params, batch)
    corrected = _corrected(mlp, params, batch, bases)
    for name in corrected:
        basis = corrected[name]
        products = basis.a_raw_values[:, None] * basis.g_raw_values
        np.testing.assert_allclose(basis.raw_values, products, atol=1e-12)


def test_per_token_keeps_the_trace_of_the_rows_and_per_example_that_of_the_fisher(x64):
    """They differ by the products of different positions."""
    model, _, params, batch = case("rows")
    bases = _bases(model, params, batch)
    example, token = (
        _corrected(model, params, batch, bases, per=per)["up/kernel"].raw_values
        for per in ("example", "token")
    )
    block = fisher_block(
        root_fisher(model, params, batch, fisher="empirical"), "up/kernel", "up/bias"
    )
    np.testing.assert_allclose(example.sum(), np.trace(block), rtol=1e-10)
    assert abs(float(token.sum()) - np.trace(block)) > 0.02 * np.trace(block)


def test_sampled_labels_average_to_the_exact_values(x64):
    """Many samples against the exact Fisher; the bound is five standard errors."""
    model, _, params, (x, y) = case("attention")
    bases = _bases(model, params, (x, y))
    correct = jk.correct_eigenvalues(objective_of(model), bases, fisher="mc")
    keys = jax.random.split(jax.random.key(0), 600)
    run = jax.jit(jax.vmap(lambda k: correct(params, (x, y), key=k)["v"].raw_values))
    draws = np.asarray(run(keys))
    exact = np.asarray(_corrected(model, params, (x, y), bases, fisher="exact")["v"].raw_values)
    error = np.abs(draws.mean(0) - exact)
    assert (error <= 5 * draws.std(0) / np.sqrt(len(keys)) + 1e-13).all()
    assert draws.std(0).max() > 0


# ------------------------------------------------------------------------ use


def test_the_natural_gradient_solves_with_the_corrected_block(x64):
    model, _, params, batch = case("one row")
    bases = _bases(model, params, batch)
    corrected = _corrected(model, params, batch, bases)
    grads = jax.grad(objective_of(model))(params, batch)
    found = jk.natural_gradient(grads, corrected, damping=1e-3)
    for name in ("up", "down"):
        basis = corrected[f"{name}/kernel"]
        block = _dense(basis, basis.values) + 1e-3 * np.eye(basis.values.size)
        kernel, bias = grads[name]["kernel"], grads[name]["bias"]
        stacked = np.concatenate([kernel, bias[None]]).reshape(-1)
        expected = np.linalg.solve(block, stacked).reshape(len(kernel) + 1, -1)
        np.testing.assert_allclose(found[name]["kernel"], expected[:-1], rtol=1e-8)
        np.testing.assert_allclose(found[name]["bias"], expected[-1], rtol=1e-8)


def test_the_fisher_vector_product_uses_the_values_as_measured(x64):
    model, _, params, batch = case("one row")
    bases = _bases(model, params, batch, max_condition=10.0)
    corrected = _corrected(model, params, batch, bases)
    vector = jax.tree.map(lambda x: normal(5, *x.shape), params)
    found = jk.fisher_vector_product(vector, corrected)
    basis = corrected["up/kernel"]
    stacked = np.concatenate([vector["up"]["kernel"], vector["up"]["bias"][None]]).reshape(-1)
    expected = (_dense(basis, basis.raw_values) @ stacked).reshape(5, -1)
    np.testing.assert_allclose(found["up"]["kernel"], expected[:-1], rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("per", ["example", "token"])
def test_parts_of_the_batch_add_up_to_the_whole(x64, per):
    model, _, params, (x, y) = case("attention")
    mask = jnp.asarray(np.arange(3) < np.array([[3], [1], [2]]))
    bases = _bases(model, params, (x, y, mask))
    whole = _corrected(model, params, (x, y, mask), bases, per=per)
    parts = [
        _corrected(model, params, (x[i], y[i], mask[i]), bases, per=per)
        for i in (slice(0, 1), slice(1, 3))
    ]
    pooled = parts[0] + parts[1]
    for name in ("q", "o", "head"):
        np.testing.assert_allclose(
            pooled[name].raw_values, whole[name].raw_values, rtol=1e-10, atol=1e-15
        )
    np.testing.assert_allclose(
        pooled["norm"].raw_diagonal, whole["norm"].raw_diagonal, rtol=1e-10, atol=1e-15
    )


def test_loops_written_out_have_the_same_values(x64):
    """The same bases, measured through a scan of remat and through the loop written out."""
    model, plain, params, batch = case("shared layers")
    bases = _bases(model, params, batch)
    one = _corrected(model, params, batch, bases)
    other = _corrected(plain, params, batch, _bases(plain, params, batch))
    for name in ("up", "down", "head"):
        dense = [_dense(c[name], c[name].raw_values) for c in (one, other)]
        np.testing.assert_allclose(dense[0], dense[1], atol=1e-9)


def test_tied_embedding_and_head(x64):
    """One block per orientation: the head's with the whole gradient, the other's with its own."""

    def model(p, ids, tap):
        h = tap.embedding("embedding", ids, p["table"][ids], size=6)
        h = jnp.tanh(tap.dense("w", h, h @ p["w"]))
        h = jnp.cumsum(h, axis=1)
        return tap.dense("head", h, h @ p["table"].T)

    p = {"table": normal(1, 6, 4), "w": normal(2, 4, 4)}
    batch = (labels(1, 3, 4, classes=6), labels(2, 3, 4, classes=6))
    bases = _bases(model, p, batch)
    kinds = {layer.kind: layer.name for layer in bases.layers if layer.weight.path == "table"}
    names = {"embedding": kinds["embedding"], "head": kinds["dense"], "w": "w"}
    vectors = {mine: _vectors(bases)[theirs] for mine, theirs in names.items()}
    for per in ("example", "token"):
        corrected = _corrected(model, p, batch, bases, per=per)
        expected = corrected_eigenvalues(model, p, batch, vectors, per=per)
        if per == "example":
            expected["head"] = expected["head"]._replace(
                values=_of_whole_gradient(model, p, batch, corrected[names["head"]])
            )
        _assert_values({mine: corrected[theirs] for mine, theirs in names.items()}, expected)


def _of_whole_gradient(model, p, batch, basis):
    """Squares of the gradient of each example's sum of terms, in the head's bases."""

    def losses(table):
        objective = objective_of(model)
        outputs, _ = objective.outputs(p | {"table": table}, batch[0])
        return objective.likelihood.terms(outputs, batch[1]).sum(-1)

    gradient = jax.jacrev(losses)(p["table"]).swapaxes(1, 2)
    rotated = np.einsum("ij,nip,pq->njq", basis.a_vectors, gradient, basis.g_vectors)
    return np.square(rotated).sum(0) / batch[1].size
