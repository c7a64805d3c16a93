"""A constant times a parameter: rows of input like any other, where they are the examples.

A recurrent state written out in Python starts from zeros, so at the first step a weight meets
no data. Its statistics are those of the same loop in a scan, and of the brute force.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxkfac as jk
from tests._checks import assert_factors_close, check, mean_loss, objective_of, squares
from tests._oracle import oracle
from tests._programs import labels, normal, recurrent, recurrent_unrolled, tree
from tests._taps import PLAIN

N, S, D = 3, 4, 4

STATES = {
    "zeros": lambda x: jnp.zeros((x.shape[0], D), x.dtype),
    "iota": lambda x: lax.broadcasted_iota(x.dtype, (x.shape[0], D), 1) / 3,
    "closed over": lambda x: np.full((x.shape[0], D), 0.7) * np.array([1.0, -1.0, 0.5, 2.0]),
}


def _params():
    return tree(26, w=(D, D), u=(D, D), b=(D,), head=(D, 3))


def _batch(masked=False):
    mask = (jnp.array([True, False, True]),) if masked else ()
    return (normal(1, N, S, D, scale=1.0), labels(2, N), *mask)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_a_loop_written_out_has_the_factors_of_the_scan(x64, sharing, masked):
    for model in (recurrent, recurrent_unrolled):
        *_, factors = check(
            model, _params(), _batch(masked), oracle_model=recurrent_unrolled, sharing=sharing
        )
        assert float(factors.a_counts["u"]) == (N * S if sharing == "expand" else N)


def _with_bias(p, x, tap, state):
    """The bias belongs to the product of the state alone, as in Flax's cells."""
    h = state(x)
    for t in range(x.shape[1]):
        z = tap.dense("w", x[:, t], x[:, t] @ p["w"])
        z = z * jax.nn.sigmoid(tap.dense("u", h, h @ p["u"] + p["b"], bias=True))
        h = jnp.tanh(z)
    return tap.dense("head", h, h @ p["head"])


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("bias", ["joint", "separate"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("state", STATES)
def test_any_constant_is_a_row_beside_the_ones_of_a_bias(x64, state, sharing, bias):
    def model(p, x, tap):
        return _with_bias(p, x, tap, STATES[state])

    *_, factors = check(model, _params(), _batch(), sharing=sharing, bias=bias)
    assert factors.layer("u").bias.path == "b"


@pytest.mark.exhaustive
@pytest.mark.parametrize("fisher", ["mc", "exact"])
def test_every_step_has_a_term(x64, fisher):
    def model(p, x, tap):
        h, outputs = jnp.zeros((x.shape[0], D), x.dtype), []
        for t in range(x.shape[1]):
            z = tap.dense("w", x[:, t], x[:, t] @ p["w"]) + tap.dense("u", h, h @ p["u"])
            h = jnp.tanh(tap.lone_bias("b", z + p["b"], shape=(D,)))
            outputs.append(tap.dense("head", h, h @ p["head"]))
        return jnp.stack(outputs, axis=1)

    drawn = labels(3, 2, N, S) if fisher == "mc" else None
    batch = (normal(1, N, S, D, scale=1.0), labels(2, N, S))
    check(model, _params(), batch, fisher=fisher, labels=drawn)


@pytest.mark.slow
def test_a_single_example(x64):
    batch = jax.tree.map(lambda x: x[:1], _batch())
    check(recurrent_unrolled, _params(), batch, sharing="reduce")


@pytest.mark.exhaustive
def test_gates_that_read_one_state_share_its_factor(x64):
    """The state is constant at the first step, and then data: one input all the same."""

    def model(p, x, tap):
        h = jnp.zeros((x.shape[0], D), x.dtype)
        for t in range(x.shape[1]):
            z = tap.dense("w", x[:, t], x[:, t] @ p["w"]) + tap.dense("u", h, h @ p["u"])
            h = jnp.tanh(z) * jax.nn.sigmoid(tap.dense("v", h, h @ p["v"]) + 1.0)
        return tap.dense("head", h, h @ p["head"])

    p = tree(26, w=(D, D), u=(D, D), v=(D, D), head=(D, 3))
    *_, factors = check(model, p, _batch())
    assert factors.layer("v").shares_input_with == "u"


@pytest.mark.exhaustive
def test_one_product_for_all_gates_is_split_before_it_meets_data(x64):
    def model(p, x, tap):
        h = jnp.zeros((x.shape[0], D), x.dtype)
        for t in range(x.shape[1]):
            a = tap.dense("w", x[:, t], x[:, t] @ p["w"])
            b = tap.dense("u", h, h @ p["u"])
            (az, an), (bz, bn) = jnp.split(a, 2, axis=-1), jnp.split(b, 2, axis=-1)
            z = jax.nn.sigmoid(az + bz)
            h = (1 - z) * jnp.tanh(an + bn) + z * h
        return tap.dense("head", h, h @ p["head"])

    check(model, tree(26, w=(D, 2 * D), u=(D, 2 * D), head=(D, 3)), _batch(), sharing="reduce")


@pytest.mark.exhaustive
def test_a_convolution_of_zeros(x64):
    def convolve(x, k):
        return lax.conv_general_dilated(
            x, k, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )  # fmt: skip

    def model(loop, p, x, tap):
        def step(h, x):
            return jnp.tanh(convolve(x, p["k"]) + convolve(h, p["l"])), None

        h = jnp.zeros((N, 5, 2))
        h, _ = loop(step, h, jnp.swapaxes(x, 0, 1))
        return h.sum(1)

    def written_out(step, h, xs):
        for x in xs:
            h, _ = step(h, x)
        return h, None

    p, batch = tree(5, k=(3, 2, 2), l=(3, 2, 2)), (normal(1, N, S, 5, 2), labels(2, N, classes=2))
    one, other = (
        jax.jit(jk.value_grad_and_factors(objective_of(functools.partial(model, loop))))(p, batch)
        for loop in (lax.scan, written_out)
    )
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-13)


@pytest.mark.exhaustive
def test_corrected_eigenvalues_of_the_loop_and_the_scan(x64):
    p, batch = _params(), _batch()
    bases = jk.eigendecompose(
        jax.jit(jk.value_grad_and_factors(objective_of(recurrent)))(p, batch).factors
    )
    found = [
        jax.jit(jk.correct_eigenvalues(objective_of(model), bases))(p, batch).corrections
        for model in (recurrent, recurrent_unrolled)
    ]
    for x, y in zip(jax.tree.leaves(found[0]), jax.tree.leaves(found[1]), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-13)


# ------------------------------------------------------- rows that are not examples


def _one_state_for_all(p, x, tap):
    """The state has no axis of examples: its cotangent is a sum over them."""
    h = jnp.zeros((D,), x.dtype)
    if tap is not PLAIN:  # of whose rows there is one for each
        h = jnp.broadcast_to(h, (x.shape[0], D))
    for t in range(x.shape[1]):
        z = tap.dense("w", x[:, t], x[:, t] @ p["w"]) + tap.dense("u", h, h @ p["u"])
        h = jnp.tanh(tap.lone_bias("b", z + p["b"], shape=(D,)))
    return tap.dense("head", h, h @ p["head"])


@pytest.mark.slow
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_a_state_without_examples_is_a_row_of_each(x64, sharing):
    """It meets each example's data in an addition; its product is made for each of them."""
    check(_one_state_for_all, _params(), _batch(), sharing=sharing)


@pytest.mark.slow
def test_a_scalar_loss_shows_no_examples_and_its_state_may_start_from_data(x64):
    def loss(p, batch, depends):
        x, y = batch
        h = jnp.zeros((N, D)) + (0 * x[:, 0, :1] if depends else 0)
        for t in range(S):
            h = jnp.tanh(x[:, t] @ p["w"] + h @ p["u"] + p["b"])
        return -jnp.take_along_axis(jax.nn.log_softmax(h @ p["head"]), y[:, None], 1).mean()

    with pytest.raises(jk.UncoveredParameterError, match=r"u: .*`h \+ 0 \* x"):
        jk.value_grad_and_factors(lambda p, b: loss(p, b, False), loss_terms=N)(_params(), _batch())
    stats = jk.value_grad_and_factors(lambda p, b: loss(p, b, True), loss_terms=N)
    *_, factors = stats(_params(), _batch())
    *_, expected = jk.value_grad_and_factors(objective_of(recurrent))(_params(), _batch())
    for name in ("w", "u", "head"):
        np.testing.assert_allclose(factors[name].a, expected[name].a, rtol=1e-10)
        np.testing.assert_allclose(factors[name].g, expected[name].g, rtol=1e-10)


@pytest.mark.exhaustive
@pytest.mark.parametrize("positions", [S, N])
def test_a_projected_table_of_positions_is_read_by_each_example(x64, positions):
    """Its rows are positions, even where there are as many of them as examples."""
    table = normal(9, positions, 5)

    def model(p, x, tap):
        places = jnp.broadcast_to(table, (x.shape[0], *table.shape)) if tap is not PLAIN else table
        x = x + tap.dense("places", places, places @ p["places"])
        return tap.dense("head", jnp.tanh(x), jnp.tanh(x) @ p["head"])

    p = tree(8, places=(5, D), head=(D, 3))
    batch = (normal(1, N, positions, D), labels(2, N, positions))
    for sharing in ("expand", "reduce"):
        check(model, p, batch, sharing=sharing)


@pytest.mark.slow
def test_a_weight_in_a_fixed_basis_is_no_layer_but_what_it_gives_is(x64):
    """Its rows are features of the data, even where there are as many of them as examples."""
    basis = normal(9, N, 2)

    def model(p, x, tap):
        return jnp.tanh(x @ (basis @ p["w"])) @ p["head"]

    p, batch = tree(8, w=(2, 5), head=(5, 3)), (normal(1, N, N), labels(2, N))
    factors = jk.value_grad_and_factors(objective_of(model))(p, batch).factors
    expected = squares(objective_of(model), p, batch, ["w"])
    assert list(factors) == ["w@effective", "head", "w"]
    assert_factors_close({"w": factors["w"]}, expected, 1e-10)


@pytest.mark.slow
def test_a_penalty_on_a_product_is_a_note(x64):
    probe = normal(9, N, D)

    def loss(p, batch):
        x, y = batch
        return (
            mean_loss(lambda p, x, tap: x @ p["w"], "categorical", p, (x[:, 0], y))
            + 0.1 * jnp.square(probe @ p["w"]).sum()
        )

    p = {"w": normal(1, D, 3)}
    table = jk.find_layers(loss, p, _batch())
    assert table.uncovered == [] and table.notes[0][0] == "w"
    *_, factors = jk.value_grad_and_factors(loss, loss_terms=N)(p, _batch())
    plain = lambda p, x, tap: tap.dense("w", x, x @ p["w"])
    x, y = _batch()
    expected = oracle(plain, p, (x[:, 0], y))
    np.testing.assert_allclose(factors["w"].a, expected["w"].a, rtol=1e-10)


def test_the_report_of_an_apply_function_agrees(x64):
    table = jk.find_layers(lambda p, x: recurrent_unrolled(p, x, PLAIN), _params(), _batch()[0])
    assert table.uncovered == [] and table["u"].uses == S


# ------------------------------------------------------------------ lookups by constants

LOOKUPS = {"index": lambda table, ids: table[ids], "take": lambda table, ids: table.take(ids, 0)}


def _bert(p, ids, tap, look=LOOKUPS["index"]):
    """Positions and token types of the batch's shape, as Flax's BERT makes them."""
    at, types = jnp.broadcast_to(jnp.arange(S), ids.shape), jnp.zeros_like(ids)
    x = tap.embedding("words", ids, look(p["words"], ids), size=7)
    y = tap.embedding("at", at, look(p["at"], at), size=6)
    x = jnp.tanh(y + tap.embedding("types", types, look(p["types"], types), size=2) + x)
    return tap.dense("head", x, x @ p["head"])


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{}, {"sharing": "reduce"}, {"fisher": "exact"}], ids=str)
@pytest.mark.parametrize("wall", [lambda f: f, jax.jit, jax.checkpoint], ids=["", "jit", "remat"])
@pytest.mark.parametrize("look", LOOKUPS)
def test_a_lookup_by_constants_is_an_embedding_where_they_hold_the_examples(
    x64, look, wall, options
):
    def model(p, ids, tap):
        return wall(lambda p, ids: _bert(p, ids, PLAIN, LOOKUPS[look]))(p, ids)

    p = tree(27, words=(7, D), at=(6, D), types=(2, D), head=(D, 3))
    batch = (labels(1, N, S, classes=7), labels(2, N, S))
    check(model, p, batch, oracle_model=_bert, **options)


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize("index", [jnp.arange(S), jnp.arange(S)[None]], ids=["(S,)", "(1, S)"])
def test_a_lookup_for_all_examples_at_once_is_a_bias(x64, index):
    def model(p, x, tap):
        y = jnp.broadcast_to(p["at"][:S], x.shape)  # every example's
        y = tap.lone_bias("at", x + y, shape=(S, D))
        return tap.dense("head", y, y @ p["head"])

    def looked_up(p, x, tap):
        return (x + p["at"][index]) @ p["head"]

    p, batch = tree(27, at=(S, D), head=(D, 3)), (normal(1, N, S, D), labels(2, N, S))
    check(looked_up, p, batch, oracle_model=model)


def test_what_is_looked_up_once_and_broadcast_then_is_no_embedding(x64):
    """The cotangent at the lookup is a sum over examples, also where a convolution makes tokens."""

    def model(p, x, tap):
        h = jax.lax.conv_general_dilated(
            x, p["conv"], (2,), "VALID", dimension_numbers=("NHC", "HIO", "NHC")
        )
        h = h + jnp.broadcast_to(p["at"][jnp.arange(h.shape[1])], h.shape)
        return jnp.tanh(h).mean(1) @ p["head"]

    p = tree(27, conv=(2, 3, D), at=(4, D), head=(D, 3))
    batch = (normal(1, N, 8, 3), labels(2, N))
    with pytest.raises(jk.UncoveredParameterError, match="at: has the example axis lost"):
        jk.value_grad_and_factors(objective_of(model))(p, batch)


def test_a_lookup_that_meets_what_all_examples_share_is_used_where_that_meets_data(x64):
    """No axis of a batch mean is the examples', so none of the lookup's is."""

    def model(p, x, tap):
        return (x + (x.mean(0) + p["at"][jnp.arange(S)])) @ p["head"]

    p, batch = tree(27, at=(6, D), head=(D, 3)), (normal(1, N, S, D), labels(2, N, S))
    table = jk.find_layers(objective_of(model), p, batch)
    assert [(layer.name, layer.kind) for layer in table.layers] == [
        ("at", "bias"),
        ("head", "dense"),
    ]
