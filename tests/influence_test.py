"""Influence against each example's gradient by itself and dense inverses, in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import jaxkfac as jk
from jaxkfac.curvature.per_example import read_many
from tests._cases import CASES, case
from tests._checks import objective_of

pytestmark = pytest.mark.usefixtures("x64")

INF = float("inf")
TOLERANCE = 1e-9
RNG = np.random.default_rng(0)


def bases_of(objective, params, batch, *, corrected=False, max_condition=INF, **options):
    stats = jax.jit(jk.value_grad_and_factors(objective, **options))
    bases = jk.eigendecompose(stats(params, batch)[2], max_condition=max_condition)
    return jax.jit(jk.correct_eigenvalues(objective, bases))(params, batch) if corrected else bases


def gradients(objective, params, batch):
    """``(N, *parameter)``: each example run by itself, the sum over its kept terms."""

    def total(params, one):
        one = jax.tree.map(lambda x: x[None], one)
        outputs = objective.outputs(params, one.inputs)[0]
        heads = objective.heads(outputs, one.targets, one.mask)
        return sum(head.kept_terms().sum() for head in heads)

    return jax.jit(jax.vmap(jax.grad(total), (None, 0)))(params, objective.batch(batch))


def first(tree, number=2):
    return jax.tree.map(lambda x: x[:number], tree)


def flat(tree):
    return np.asarray(jax.vmap(lambda one: ravel_pytree(one)[0])(tree))


def assert_close(found, expected, tolerance=TOLERANCE):
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def check(objective, params, batch, bases, damping=0.1):
    """Scores and self-influence against whole gradients and ``natural_gradient``."""
    found = jk.influence(objective, params, bases, first(batch), batch, damping=damping)
    own = jk.self_influence(objective, params, bases, batch, damping=damping)
    each = gradients(objective, params, batch)
    solve = jax.vmap(lambda g: jk.natural_gradient(g, bases, damping=damping, missing="zero"))
    expected = flat(jax.jit(solve)(each)) @ flat(each).T
    assert_close(found, expected[:2])
    assert_close(own, np.diagonal(expected))


# ------------------------------------------------------------ whole gradients


@pytest.mark.sampled(1)
@pytest.mark.parametrize("corrected", [False, True], ids=["factors", "measured"])
@pytest.mark.parametrize("name", CASES)
def test_scores_are_products_of_whole_gradients(name, corrected):
    model, _, params, batch = case(name)
    objective = objective_of(model)
    check(objective, params, batch, bases_of(objective, params, batch, corrected=corrected))


def convolution(p, x):
    x = jax.lax.conv_general_dilated(
        x, p["k"], (2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jnp.tanh(x + p["b"]).mean((1, 2)) @ p["head"]


def tied(p, ids):
    """An embedding whose transpose is the head, with a scale between, in remat."""
    x = jax.checkpoint(lambda x: x * p["scale"])(p["table"][ids])
    return jnp.tanh(x + x.mean(1, keepdims=True) @ p["w"]) @ p["table"].T


def normal(*shape):
    with jax.enable_x64(True):
        return jnp.asarray(RNG.normal(size=shape))


IDS = jnp.asarray(RNG.integers(0, 5, (3, 4)))


PROGRAMS = {
    "convolution": (
        convolution,
        {"k": normal(3, 2, 2, 3), "b": normal(3), "head": normal(3, 4)},
        (normal(3, 5, 4, 2), jnp.asarray([0, 3, 1])),
    ),
    "tied, some targets left out": (
        tied,
        {"table": normal(5, 3), "scale": normal(3), "w": normal(3, 3)},
        (IDS, jnp.roll(IDS, -1, 1).at[:, -1].set(-100)),
    ),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_scores_of_programs_that_are_no_matrix_product_of_rows(name):
    model, params, batch = PROGRAMS[name]
    objective = jk.Objective(model, jk.Categorical(ignore_index=-100))
    for corrected in (False, True):
        check(objective, params, batch, bases_of(objective, params, batch, corrected=corrected))


@pytest.mark.exhaustive
def test_a_weight_that_one_layer_answers_for_with_biases_of_two():
    def model(p, x):
        h = jnp.tanh(x @ p["w"] + p["b"])
        return jnp.tanh(h @ p["w"] + p["c"]) @ p["head"]

    params = {"w": normal(3, 3), "b": normal(3), "c": normal(3), "head": normal(3, 4)}
    batch = (normal(3, 3), jnp.asarray([0, 3, 1]))
    objective = jk.Objective(model, jk.Categorical())
    check(objective, params, batch, bases_of(objective, params, batch))


@pytest.mark.exhaustive
def test_each_output_of_several_counts_with_the_sum_of_its_terms():
    def model(p, x):
        h = jnp.tanh(x @ p["w"])
        return {"label": h.mean(1) @ p["label"], "box": h @ p["box"]}

    likelihood = {"label": jk.Categorical(), "box": jk.Gaussian()}
    objective = jk.Objective(model, likelihood)
    params = {"w": normal(3, 3), "label": normal(3, 4), "box": normal(3, 2)}
    mask = {"label": None, "box": jnp.asarray([[1, 1], [1, 0], [0, 0]], bool)}
    targets = {"label": jnp.asarray([0, 1, 3]), "box": normal(3, 2, 2)}
    batch = (normal(3, 2, 3), targets, mask)
    check(objective, params, batch, bases_of(objective, params, batch))


# ------------------------------------------------------------ the dense matrix


def perceptron(p, x):
    return jnp.tanh(x @ p["w"] + p["b"]) @ p["u"]


PARAMS = {"w": normal(3, 4), "b": normal(4), "u": normal(4, 2)}
BATCH = (normal(6, 3), jnp.asarray([0, 1, 1, 0, 1, 0]))
OBJECTIVE = jk.Objective(perceptron, jk.Categorical())
QUERIES = (normal(2, 3), jnp.asarray([1, 0]))


def rows(gradient, name):
    """``(N, in[+1] * out)``: the block's gradient, the bias as the last row."""
    parts = [gradient["w"], gradient["b"][:, None]] if name == "w" else [gradient["u"]]
    return np.concatenate(parts, 1).reshape(len(parts[0]), -1)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("damping", ["heuristic", 0.3])
@pytest.mark.parametrize("corrected", [False, True], ids=["factors", "measured"])
def test_each_layer_is_solved_with_the_inverse_of_its_dense_block(corrected, damping):
    bases = bases_of(OBJECTIVE, PARAMS, BATCH, corrected=corrected)
    options = {"damping": damping}
    found = jk.influence(OBJECTIVE, PARAMS, bases, QUERIES, BATCH, per="layer", **options)
    queries, train = (gradients(OBJECTIVE, PARAMS, x) for x in (QUERIES, BATCH))
    expected = []
    for layer in bases.layers:
        basis = bases[layer.name]
        vectors = np.kron(basis.a_vectors, basis.g_vectors)
        values = np.outer(basis.a_raw_values, basis.g_raw_values)
        values = np.asarray(basis.raw_values) if corrected else values
        dense = vectors @ np.diag(values.reshape(-1)) @ vectors.T
        delta = 0.1 * np.trace(dense) / len(dense) if damping == "heuristic" else damping
        inverse = np.linalg.inv(dense + delta * np.eye(len(dense)))
        expected.append(rows(queries, layer.name) @ inverse @ rows(train, layer.name).T)
    assert_close(found, np.stack(expected, 1))
    whole = jk.influence(OBJECTIVE, PARAMS, bases, QUERIES, BATCH, **options)
    assert_close(whole, sum(expected))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("corrected", [False, True], ids=["factors", "measured"])
def test_a_stack_has_the_damping_of_each_of_its_slices(corrected):
    params = {"w": normal(3, 4, 4), "s": normal(3, 4), "head": normal(4, 2)}
    batch = (normal(4, 4), jnp.asarray([0, 1, 1, 0]))

    def scanned(p, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w[0]) * w[1], None), x, (p["w"], p["s"]))
        return x @ p["head"]

    def unrolled(p, x):
        for w, s in zip(p["w"], p["s"], strict=True):
            x = jnp.tanh(x @ w) * s
        return x @ p["head"]

    apart = params | {k: [*params[k]] for k in "ws"}
    scores = []
    for model, p in ((scanned, params), (unrolled, apart)):
        objective = jk.Objective(model, jk.Categorical())
        bases = bases_of(objective, p, batch, corrected=corrected)
        scores.append(jk.influence(objective, p, bases, batch, batch))
    assert_close(*scores)


@pytest.mark.slow
def test_scores_by_token_are_those_of_a_copy_of_the_weights_for_each_position():
    n, s = 3, 4
    params = {"w": normal(3, 3), "scale": normal(3), "u": normal(3, 2)}
    batch = (normal(n, s, 3), jnp.asarray(RNG.integers(0, 2, (n, s))))

    def model(p, x):
        h = jnp.einsum("nsi,...io->nso", x, p["w"]) if p["w"].ndim == 2 else None
        h = jnp.einsum("nsi,sio->nso", x, p["w"]) if h is None else h
        h = jnp.tanh(h) * p["scale"]
        h = h + h.mean(1, keepdims=True)
        return h @ p["u"] if p["u"].ndim == 2 else jnp.einsum("nsi,sio->nso", h, p["u"])

    objective = jk.Objective(model, jk.Categorical())
    bases = bases_of(objective, params, batch)
    found = jk.influence(objective, params, bases, batch, batch, damping=0.1, per="token")
    copies = jax.tree.map(lambda x: jnp.broadcast_to(x, (s, *x.shape)), params)
    train = gradients(objective, copies, batch)
    each = gradients(objective, params, batch)
    solved = jax.vmap(lambda g: jk.natural_gradient(g, bases, damping=0.1))(each)
    expected = sum(
        np.einsum("qi,nsi->qns", np.reshape(solved[k], (n, -1)), np.reshape(train[k], (n, s, -1)))
        for k in params
    )
    assert found.shape == (n, n, s)
    assert_close(found, expected)


# ------------------------------------------------------------ queries of low rank


SCANNED = (
    lambda p, x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["w"])[0].mean(1),
    {"w": normal(2, 4, 4)},
    (normal(3, 2, 4), jnp.asarray([0, 3, 1])),
)


def nearest_of_rank(matrices, rank):
    u, s, v = np.linalg.svd(matrices, full_matrices=False)
    return (u[..., :rank] * s[..., None, :rank]) @ v[..., :rank, :], s[..., rank:]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [*PROGRAMS, "scanned"])
def test_queries_of_low_rank_score_as_the_nearest_matrices(name):
    model, params, batch = SCANNED if name == "scanned" else PROGRAMS[name]
    objective = jk.Objective(model, jk.Categorical(ignore_index=-100))
    bases = bases_of(objective, params, batch)
    whole = jk.prepare_queries(objective, params, bases, batch, damping=0.1)
    options = {"damping": 0.1, "per": "layer", "query_rank": 1}
    found = jk.influence(objective, params, bases, batch, batch, **options)
    exact = jk.influence(objective, params, None, whole, batch, per="layer")
    train, seen = gradients(objective, params, batch), 0
    for number, layer in enumerate(bases.layers):
        if layer.is_elementwise:
            np.testing.assert_array_equal(found.errors[:, number], 0)
            assert_close(found.scores[:, number], exact[:, number])
            continue
        weight = np.asarray(whole.of_weight(layer))
        cut, rest = nearest_of_rank(weight, 1)
        stack = tuple(range(len(layer.stack)))
        lost, all_of_it = np.square(rest).sum((*stack, -1)), np.square(weight).sum((*stack, -2, -1))
        np.testing.assert_allclose(found.errors[:, number], np.sqrt(lost / all_of_it), atol=1e-6)
        if name == "tied, some targets left out" and layer.weight.path == "table":
            continue  # whose gradient is of two layers
        each = np.asarray(read_many(train[layer.weight.path], layer.weight, layer))
        expected = np.einsum("...qio,...nio->...qn", cut, each).sum(stack)
        assert_close(found.scores[:, number] - part_of_bias(whole, layer, train), expected)
        seen += 1
    assert seen


def part_of_bias(queries, layer, train):
    if layer.bias is None:
        return 0
    return np.einsum("qo,no->qn", queries.of_bias(layer), train[layer.bias.path])


@pytest.mark.slow
def test_queries_within_a_budget_are_those_without_one():
    bases = bases_of(OBJECTIVE, PARAMS, BATCH)
    args = OBJECTIVE, PARAMS, bases, QUERIES
    each = 8 * sum(x.size for x in PARAMS.values())
    expected = jk.influence(*args, BATCH)
    for room in (2 + 3, 2 + 6):  # both are held, and one or two are in work
        assert_close(jk.influence(*args, BATCH, max_bytes=room * each), expected)
    with pytest.raises(jk.MemoryBudgetError, match="or give a query_rank="):
        jk.influence(*args, BATCH, max_bytes=(2 + 3) * each - 1)


@pytest.mark.exhaustive
def test_a_stream_in_two_parts_goes_on_where_the_first_ended():
    bases = bases_of(OBJECTIVE, PARAMS, BATCH)
    held = jk.prepare_queries(OBJECTIVE, PARAMS, bases, QUERIES)
    parts = [(BATCH[0][:2], BATCH[1][:2]), (BATCH[0][2:], BATCH[1][2:])]
    args = OBJECTIVE, PARAMS, None, held
    first = jk.influence(*args, parts[0], top_k=3)
    best = jk.influence(*args, parts[1], top_k=first, start=2)
    expected = jk.influence(OBJECTIVE, PARAMS, bases, QUERIES, BATCH, top_k=3)
    np.testing.assert_array_equal(best.indices, expected.indices)
    assert_close(best.scores, expected.scores)
    with pytest.raises(ValueError, match="of an earlier part of the stream: pass start="):
        jk.influence(*args, parts[1], top_k=first)
    for other, per in ((best, "layer"), (jax.tree.map(lambda x: x[:1], best), "sum")):
        with pytest.raises(ValueError, match=r"top_k: expected a TopK of scores \(2, .*'k'\)"):
            jk.influence(*args, parts[1], top_k=other, start=2, per=per)


# ------------------------------------------------------------ ridge regression

RIDGE = 0.05
FEATURES, ANSWERS = normal(9, 3), normal(9, 1)
ONE = (normal(1, 3), normal(1, 1))


def ridge(weights):
    """The minimum of the weighted mean of half squares and of half the damped square."""
    gram = (FEATURES * weights[:, None]).T @ FEATURES / 9 + RIDGE * jnp.eye(3)
    return jnp.linalg.solve(gram, (FEATURES * weights[:, None]).T @ ANSWERS / 9)


def ridge_scores():
    objective = jk.Objective(lambda p, x: x @ p["w"], jk.Gaussian())
    w, batch = ridge(jnp.ones(9)), (FEATURES, ANSWERS)
    args = objective, {"w": w}, bases_of(objective, {"w": w}, batch, fisher="exact")
    own = jk.self_influence(*args, batch, damping=RIDGE)
    return w, jk.influence(*args, ONE, batch, damping=RIDGE)[0], own


@pytest.mark.slow
def test_on_ridge_regression_a_score_is_the_derivative_in_an_examples_weight_times_minus_n():
    def loss(weights):
        return jnp.square(ONE[0] @ ridge(weights) - ONE[1]).sum() / 2

    _, scores, _ = ridge_scores()
    assert_close(-scores / 9, jax.grad(loss)(jnp.ones(9)))


@pytest.mark.exhaustive
def test_leaving_an_example_out_changes_a_prediction_by_one_over_one_minus_its_leverage():
    w, scores, own = ridge_scores()
    residual = (FEATURES @ w - ANSWERS)[:, 0]
    leverage = own / jnp.square(residual) / 9
    change = scores / (ONE[0] @ w - ONE[1])[0, 0] / 9 / (1 - leverage)
    for i in range(9):
        left = jnp.delete(FEATURES, i, 0), jnp.delete(ANSWERS, i, 0)
        gram = left[0].T @ left[0] + 9 * RIDGE * jnp.eye(3)
        without = jnp.linalg.solve(gram, left[0].T @ left[1])
        np.testing.assert_allclose((ONE[0] @ (without - w))[0, 0], change[i], rtol=1e-9)


# ------------------------------------------------------------ streams


@pytest.mark.slow
def test_a_stream_gives_the_scores_of_one_batch_and_top_k_their_largest():
    bases = bases_of(OBJECTIVE, PARAMS, BATCH)
    args = OBJECTIVE, PARAMS, bases, QUERIES
    stream = [(BATCH[0][:4], BATCH[1][:4]), (BATCH[0][4:], BATCH[1][4:])]
    whole = jk.influence(*args, BATCH)
    assert_close(jk.influence(*args, iter(stream)), whole)
    by_layer = jk.influence(*args, BATCH, per="layer")
    assert_close(jk.influence(*args, stream, per="layer"), by_layer)
    for per, scores in (("sum", whole), ("layer", by_layer)):
        best = jk.influence(*args, iter(stream), top_k=3, per=per)
        order = np.argsort(-np.asarray(scores), -1)[..., :3]
        np.testing.assert_array_equal(best.indices, order)
        assert_close(best.scores, np.take_along_axis(np.asarray(scores), order, -1))


@pytest.mark.exhaustive
def test_examples_that_pad_the_last_batch_score_zero_and_are_not_among_the_best():
    bases = bases_of(OBJECTIVE, PARAMS, BATCH)
    mask = jnp.arange(6) < 4
    args = OBJECTIVE, PARAMS, bases, QUERIES
    scores = jk.influence(*args, (*BATCH, mask))
    assert_close(scores[:, :4], jk.influence(*args, BATCH)[:, :4])
    np.testing.assert_array_equal(scores[:, 4:], 0)
    best = jk.influence(*args, [(*BATCH, mask)], top_k=5)
    assert (np.sort(best.indices) == [-1, 0, 1, 2, 3]).all()
    assert (np.asarray(best.scores[:, -1]) == -np.inf).all()


@pytest.mark.slow
@pytest.mark.parametrize("per", ["sum", "layer"])
def test_a_batch_without_a_loss_takes_no_place_among_the_best_and_it_is_said(per):
    bases = bases_of(OBJECTIVE, PARAMS, BATCH)
    args = OBJECTIVE, PARAMS, bases, QUERIES
    parts = [(BATCH[0][i : i + 2], BATCH[1][i : i + 2]) for i in (0, 2, 4)]
    broken = [parts[0], (parts[1][0].at[1].set(jnp.nan), parts[1][1]), parts[2]]
    scores = np.delete(jk.influence(*args, BATCH, per=per), [2, 3], -1)
    order = np.argsort(-scores, -1)
    with pytest.warns(UserWarning, match="2 examples have a score that is NaN"):
        best = jk.influence(*args, iter(broken), top_k=5, per=per)
    np.testing.assert_array_equal(best.indices[..., :4], np.asarray([0, 1, 4, 5])[order])
    assert_close(best.scores[..., :4], np.take_along_axis(scores, order, -1))
    assert (best.indices[..., 4] == -1).all()


@pytest.mark.exhaustive
def test_scores_by_token_of_shorter_batches_end_in_zeros():
    def model(p, x):
        return jnp.tanh(x @ p["w"] + p["b"]) @ p["u"]

    train = normal(3, 4, 3), jnp.asarray(RNG.integers(0, 2, (3, 4)))
    objective = jk.Objective(model, jk.Categorical())
    args = objective, PARAMS, bases_of(objective, PARAMS, train), train
    short = tuple(x[:, :2] for x in train)
    found = jk.influence(*args, [short, train], per="token")
    assert found.shape == (3, 6, 4)
    assert_close(found[:, :3, :2], jk.influence(*args, short, per="token"))
    assert_close(found[:, 3:], jk.influence(*args, train, per="token"))
    np.testing.assert_array_equal(found[:, :3, 2:], 0)


@pytest.mark.exhaustive  # tests/laplace_test.py has the refusal
@pytest.mark.parametrize("pattern", ["table@embedding", "table@embedding|w"])
def test_one_reading_of_a_tied_table_is_no_gradient_of_it_and_is_refused(pattern):
    model, params, batch = PROGRAMS["tied, some targets left out"]
    objective = jk.Objective(model, jk.Categorical(ignore_index=-100))
    bases = bases_of(objective, params, batch)
    for given, options in (
        (bases, {"layers": pattern}),
        (bases_of(objective, params, batch, layers=pattern, uncovered="ignore"), {}),
    ):
        with pytest.raises(ValueError, match="'table' reads the same elements.*layers='table'"):
            jk.influence(objective, params, given, batch, batch, **options)
        with pytest.raises(ValueError, match="'table' reads the same elements"):
            jk.self_influence(objective, params, given, batch, **options)
    whole = dataclasses.replace(
        bases, layers=tuple(x for x in bases.layers if x.weight.path == "table")
    )
    found = jk.influence(objective, params, bases, batch, batch, layers="table", damping=0.1)
    each = gradients(objective, params, batch)
    solve = jax.vmap(lambda g: jk.natural_gradient(g, whole, damping=0.1, missing="zero"))
    assert_close(found, flat(jax.jit(solve)(each)) @ flat(each).T)


@pytest.mark.exhaustive
def test_one_slice_of_a_stack_is_read_by_no_other():
    def model(p, x):
        return jnp.tanh(x @ p["w"][0]) @ p["w"][1]

    params, batch = {"w": normal(2, 3, 3)}, (normal(4, 3), jnp.asarray([0, 2, 1, 0]))
    objective = jk.Objective(model, jk.Categorical())
    bases = bases_of(objective, params, batch)
    args = objective, params, bases, batch, batch
    found = jk.influence(*args, layers=r"w\[1\]")
    place = list(bases).index("w[1]")
    assert_close(found, jk.influence(*args, per="layer")[:, place])


@pytest.mark.exhaustive
def test_self_influence_is_the_same_whatever_fits_at_once():
    def model(p, x):  # a weight that is read twice, so that its gradients are held
        return jnp.tanh(jnp.tanh(x @ p["w"]) @ p["w"]) @ p["u"]

    objective, params = (
        jk.Objective(model, jk.Categorical()),
        {"w": normal(3, 3), "u": normal(3, 2)},
    )
    bases = bases_of(objective, params, BATCH)
    args, one = (objective, params, bases), 3 * 8 * params["w"].size
    whole = jk.self_influence(*args, BATCH)
    assert whole.shape == (6,)
    for budget in (one, 4 * one):
        assert_close(jk.self_influence(*args, BATCH, max_bytes=budget), whole)
    with pytest.raises(jk.MemoryBudgetError, match="gradients of one example take"):
        jk.self_influence(*args, BATCH, max_bytes=one - 1)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("queries", [None, 1, 2])
def test_gradients_of_a_layer_that_is_passed_once_are_not_held(monkeypatch, queries):
    """Of 128 examples these would be more than all that the program takes."""
    monkeypatch.setattr("jaxkfac.kinds._both_sides.CHUNK_BYTES", 2**16)
    params = {"w": normal(48, 48), "u": normal(48, 48)}
    batch = normal(128, 2, 48), jnp.zeros((128, 2), int)
    objective = jk.Objective(lambda p, x: jnp.tanh(x @ p["w"]) @ p["u"], jk.Categorical())
    bases = bases_of(objective, params, batch)

    def scores(params, batch):
        if queries is None:
            return jk.self_influence(objective, params, bases, batch, max_bytes=1)
        asked = jax.tree.map(lambda x: x[:queries], batch)
        return jk.influence(objective, params, bases, asked, batch)

    taken = jax.jit(scores).lower(params, batch).compile().memory_analysis().temp_size_in_bytes
    assert taken < 128 * 8 * 48 * 48


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("pattern", ["u", "w"])
def test_layers_picks_what_counts(pattern):
    bases = bases_of(OBJECTIVE, PARAMS, BATCH)
    place = list(bases).index(pattern)
    args = OBJECTIVE, PARAMS, bases, QUERIES, BATCH
    found = jk.influence(*args, layers=pattern)
    assert_close(found, jk.influence(*args, per="layer")[:, place])


@pytest.mark.slow
def test_parameters_outside_the_bases_count_as_fixed():
    bases = bases_of(OBJECTIVE, PARAMS, BATCH)
    only = bases_of(OBJECTIVE, PARAMS, BATCH, layers="u")
    args = OBJECTIVE, PARAMS
    found = jk.influence(*args, only, QUERIES, BATCH)
    assert_close(found, jk.influence(*args, bases, QUERIES, BATCH, layers="u"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_scores_of_few_bits_are_near_those_of_many(dtype):
    def cast(tree):
        return jax.tree.map(lambda x: x.astype(dtype) if x.dtype == jnp.float64 else x, tree)

    bases = bases_of(OBJECTIVE, PARAMS, BATCH)
    few = bases_of(OBJECTIVE, cast(PARAMS), cast(BATCH))
    found = jk.influence(OBJECTIVE, cast(PARAMS), few, cast(QUERIES), cast(BATCH))
    assert found.dtype == jnp.float32
    expected = jk.influence(OBJECTIVE, PARAMS, bases, QUERIES, BATCH)
    assert_close(found, expected, 1e-4 if dtype == jnp.float32 else 0.1)


# ------------------------------------------------------------ what is refused


def coupled(p, x):
    h = x @ p["w"] + p["b"]
    return jnp.tanh(h - h.mean(0)) @ p["u"]


def one_layer(p, x):
    return x @ p["w"] + p["b"]


def refused(match, error=ValueError, *, model=perceptron, change=None, queries=QUERIES, **options):
    bases = bases_of(OBJECTIVE, PARAMS, BATCH)
    bases = bases if change is None else change(bases)
    train = options.pop("train", BATCH)
    objective = jk.Objective(model, jk.Categorical())
    with pytest.raises(error, match=match):
        jk.influence(objective, PARAMS, bases, queries, train, **options)


@pytest.mark.slow
def test_bad_input_is_refused_by_name():
    refused("'w', 'u': .* evaluation mode", jk.CoupledExamplesError, model=coupled)
    refused("matches no layer of the bases", jk.UnknownLayerError, layers="v")
    refused("the iterable is empty", train=iter([]))
    refused("zero or positive", damping=-1.0)
    refused(r"layer 'w' \(A\) are zero", damping=0.0, change=with_zeros)
    refused("layer 'w' are not finite", jk.NonFiniteFactorError, change=times(jnp.nan))
    refused("every eigenvalue is zero", change=times(0.0))
    refused("needs one output", per="token")
    refused("top_k ranks examples", per="token", top_k=1)
    refused("top_k=0: expected at least 1", top_k=0)
    refused("start=-5: expected a whole number", top_k=1, start=-5)
    refused("targets", queries=(QUERIES[0], normal(2, 2)))
    refused("queries: expected one batch, .* got list", TypeError, queries=[QUERIES, QUERIES])
    refused("'u' that the program lacks", jk.UnknownLayerError, model=one_layer)
    refused("'w': the bases have bias", model=lambda p, x: jnp.tanh(x @ p["w"]) @ p["u"])


def times(number):
    """A change that multiplies every array by a number."""
    return lambda bases: jax.tree.map(lambda x: number * x, bases)


def with_zeros(bases):
    """As of fewer examples than features."""
    name = bases.layers[0].input
    spectrum = bases.a[name]
    spectrum = spectrum._replace(values=spectrum.values.at[0].set(1e-20))
    return dataclasses.replace(bases, a=bases.a | {name: spectrum})


@pytest.mark.slow
def test_a_measurement_without_a_term_is_none():
    """``kfac`` keeps one after a refresh; the bases then read the eigenvalues of the factors."""
    bases = bases_of(OBJECTIVE, PARAMS, BATCH)
    corrected = bases_of(OBJECTIVE, PARAMS, BATCH, corrected=True)
    none = jax.tree.map(jnp.zeros_like, corrected.corrections)
    empty = dataclasses.replace(bases, corrections=none)
    expected = jk.influence(OBJECTIVE, PARAMS, bases, QUERIES, BATCH)
    assert_close(jk.influence(OBJECTIVE, PARAMS, empty, QUERIES, BATCH), expected)
    store, again = (jk.gradient_store(OBJECTIVE, PARAMS, x, BATCH) for x in (bases, empty))
    assert store.bases.corrections.terms == again.bases.corrections.terms == len(BATCH[0])


@pytest.mark.slow
def test_measured_eigenvalues_of_a_bias_that_are_not_finite_are_refused():
    bases = bases_of(OBJECTIVE, PARAMS, BATCH, corrected=True, bias="separate")
    nan = {name: x * jnp.nan for name, x in bases.corrections.bias_sums.items()}
    broken = dataclasses.replace(bases, corrections=bases.corrections._replace(bias_sums=nan))
    with pytest.raises(jk.NonFiniteFactorError, match="layer 'w' are not finite"):
        jk.influence(OBJECTIVE, PARAMS, broken, QUERIES, BATCH)


@pytest.mark.slow
def test_factors_without_gradients_are_no_curvature_and_it_is_said():
    bases = bases_of(OBJECTIVE, PARAMS, BATCH, fisher="forward")
    with pytest.warns(UserWarning, match="hold no curvature of the loss"):
        jk.influence(OBJECTIVE, PARAMS, bases, QUERIES, BATCH)


@pytest.mark.exhaustive
def test_of_a_gaussian_only_the_last_layers_gradients_are_the_identity(recwarn):
    batch = BATCH[0], normal(6, 2)
    objective = jk.Objective(perceptron, jk.Gaussian())
    exact = bases_of(objective, PARAMS, batch, fisher="exact")
    jk.influence(objective, PARAMS, exact, batch, batch)
    jk.influence(objective, PARAMS, exact, batch, batch, layers="u")
    assert not recwarn
    forward = bases_of(objective, PARAMS, batch, fisher="forward")
    with pytest.warns(UserWarning, match="hold no curvature of the loss"):
        jk.influence(objective, PARAMS, forward, batch, batch)


@pytest.mark.exhaustive
def test_of_a_linear_gaussian_every_layers_gradients_are_the_identity(recwarn):
    params = {"a": normal(3, 2), "b": normal(4, 2)}
    batch = (normal(6, 3), normal(6, 4)), normal(6, 2)
    objective = jk.Objective(lambda p, x, y: x @ p["a"] + y @ p["b"], jk.Gaussian())
    bases = bases_of(objective, params, batch, fisher="exact")
    assert all((bases.g[layer.name].values == 1).all() for layer in bases.layers)
    jk.influence(objective, params, bases, batch, batch)
    assert not recwarn


@pytest.mark.exhaustive
def test_zero_damping_says_which_bound_of_the_condition_number_is_enough():
    small = jax.tree.map(lambda x: x.astype(jnp.float32), PARAMS)
    batch = BATCH[0].astype(jnp.float32).at[:, 0].set(0), BATCH[1]
    stats = jk.value_grad_and_factors(OBJECTIVE)(small, batch)
    args = OBJECTIVE, small
    bases = jk.eigendecompose(stats[2], max_condition=1e8)
    with pytest.raises(ValueError, match=r"max_condition below 1 / \(n eps\) = 2.1e\+06"):
        jk.influence(*args, bases, batch, batch, damping=0.0)
    jk.influence(*args, jk.eigendecompose(stats[2], max_condition=2e6), batch, batch, damping=0.0)
