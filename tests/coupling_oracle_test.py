"""Whether examples meet: our two answers beside trial, by values and explicit Jacobians.

An answer may be "unknown" for a program that does not mix its examples, and is never "no" for one
that does. What a program does is decided by ``truth``, which knows nothing of our analysis.
"""

import gc
import weakref

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax

import jaxkfac as jk
from jaxkfac.interception import trace
from tests import _couplings
from tests._couplings import APART, EXPECTED, MIXING, PROGRAMS, Truth, truth
from tests._programs import normal

pytestmark = [pytest.mark.usefixtures("x64"), pytest.mark.standard_promotion]
N, D = _couplings.N, _couplings.D
every = pytest.mark.parametrize("name", PROGRAMS)


def answers(program, params, x):
    traced = trace(program, params, x, num_outputs=1)
    return traced.examples_meet("value").answer, traced.examples_meet("derivative").answer


def check(found, so):
    """Never "no" where examples meet."""
    for answer, mixes in zip(found, so, strict=True):
        assert not (mixes and answer == "no"), (found, so)


@pytest.mark.default(5, slow=30)
@every
def test_an_answer_is_never_no_where_examples_meet(name):
    check(answers(PROGRAMS[name], _couplings.params(), _couplings.batch()), EXPECTED[name])


@pytest.mark.default(1)
@pytest.mark.sampled(3)
@every
def test_what_is_expected_is_so_by_trial(name):
    found = truth(PROGRAMS[name], _couplings.params(), _couplings.batch(), draws=1)
    assert found == EXPECTED[name]


@pytest.mark.exhaustive
@every
def test_what_is_expected_is_so_at_other_draws(name):
    assert truth(PROGRAMS[name], _couplings.params(), _couplings.batch()) == EXPECTED[name]


@pytest.mark.slow
def test_nearly_all_programs_that_do_not_mix_are_proved_not_to():
    """Of at least 40, all but the two that are named at most."""
    unproved = {
        name
        for name, program in APART.items()
        if answers(program, _couplings.params(), _couplings.batch()) != ("no", "no")
    }
    assert len(APART) >= 40 and len(MIXING) >= 60
    assert unproved == set()


def test_a_stopped_gradient_couples_values_alone():
    traced = trace(MIXING["stopped mean"], _couplings.params(), _couplings.batch(), num_outputs=1)
    assert str(traced.examples_meet("value")) == "the examples meet at `reduce_sum`"
    assert traced.examples_meet("derivative").answer == "no"


def test_the_layer_table_names_the_equation_where_examples_meet():
    params, x = _couplings.params(), _couplings.batch()

    def said(program):
        of_model = str(jk.find_layers(program, params, x))
        targets = jnp.zeros(jax.eval_shape(program, params, x).shape)
        of_loss = str(jk.find_layers(jk.Objective(program, jk.Gaussian()), params, (x, targets)))
        lines = [
            [line for line in table.splitlines() if line.startswith("examples:")]
            for table in (of_model, of_loss)
        ]
        assert lines[0] == lines[1]
        return lines[0]

    assert said(MIXING["solve"]) == ["examples: the examples meet at `sub`"]
    assert said(MIXING["stopped mean"]) == [
        "examples: in values, the examples meet at `reduce_sum`; in derivatives, "
        "the examples do not meet"
    ]
    assert said(next(iter(APART.values()))) == []


@pytest.mark.slow
def test_the_table_of_an_objective_holds_none_of_its_arrays():
    params, x = _couplings.params(), jnp.array(_couplings.batch())
    objective = jk.Objective(MIXING["stopped mean"], jk.Gaussian())
    targets = jnp.zeros(jax.eval_shape(MIXING["stopped mean"], params, x).shape)
    table = jk.find_layers(objective, params, (x, targets))
    held = weakref.ref(x)
    del x
    gc.collect()
    assert held() is None and "examples: in values" in str(table)


WALLS = {
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "scan": lambda f: lambda p, x: lax.scan(lambda c, _: (f(p, c), None), x, None, length=3)[0],
    "vmap": lambda f: lambda p, x: jax.vmap(f, (None, 1), 1)(p, jnp.stack([x, x * x], 1)).sum(1),
    "custom_vjp": lambda f: _with_rule(f),
}
INSIDE = [
    "pmean under vmap", "running mean", "associative scan", "solve", "qr", "sparse graph", "fft",
    "convolution along", "window along", "top_k along", "two index arrays", "reshaped pairs",
    "a neighbor, by map", "split and swapped", "shifted concatenation", "custom_vjp backward",
    "crops", "time-major", "mapped with a remainder", "picked by an argmax", "solve by example",
    "eigh by example", "merged the other way", "sorted features",
]  # fmt: skip


def _with_rule(f):
    ruled = jax.custom_vjp(f)
    ruled.defvjp(lambda p, x: (f(p, x), (p, x)), lambda held, g: jax.vjp(f, *held)[1](g))
    return ruled


@pytest.mark.default(5, slow=4)
@pytest.mark.sampled(18)
@pytest.mark.parametrize("wall", WALLS)
@pytest.mark.parametrize("name", INSIDE)
def test_the_answers_are_the_same_inside(name, wall):
    """In a loop a second round may undo what the first mixes; three rounds of these do not."""
    shape = jax.eval_shape(PROGRAMS[name], _couplings.params(), _couplings.batch()).shape
    if wall == "scan" and shape != (N, D):
        wall = "jit"
    program = WALLS[wall](PROGRAMS[name])
    if EXPECTED[name].derivative:
        check(answers(program, _couplings.params(), _couplings.batch()), EXPECTED[name])
    else:
        found = answers(program, _couplings.params(), _couplings.batch())
        assert found == ("no", "no")


# ------------------------------------------------------------------ random chains

STEPS = {
    "tanh": jnp.tanh,
    "product": lambda h: h @ normal(5, D, D),
    "center features": lambda h: h - h.mean(1, keepdims=True),
    "center examples": lambda h: h - h.mean(0, keepdims=True),
    "stop": lambda h: h + lax.stop_gradient(h),
    "stopped roll": lambda h: h + lax.stop_gradient(jnp.roll(h, 1, 0)),
    "cumsum": lambda h: jnp.cumsum(h, 0),
    "cumsum of features": lambda h: jnp.cumsum(h, 1),
    "roll": lambda h: jnp.roll(h, 1, 0),
    "roll back": lambda h: jnp.roll(h, -1, 0),
    "reverse": lambda h: h[::-1],
    "permute": lambda h: h[_couplings.PERMUTED],
    "unpermute": lambda h: h[jnp.argsort(_couplings.PERMUTED)],
    "merge and split": lambda h: jnp.sin(h.reshape(-1)).reshape(N, D),
    "across": lambda h: h.T.reshape(N, D),
    "back across": lambda h: h.reshape(D, N).T,
    "pairs": lambda h: (h.reshape(N // 2, 2, D) * 2).reshape(N, D),
    "mixed pairs": lambda h: jnp.cumsum(h.reshape(N // 2, 2, D), 1).reshape(N, D),
    "tile and crop": lambda h: jnp.tile(h, (2, 1))[:N],
    "tile and shift": lambda h: jnp.tile(h, (2, 2))[1 : N + 1, D:],
    "repeat and crop": lambda h: jnp.repeat(h, 2, 0)[1::2],
    "determinants": lambda h: (
        h * jnp.linalg.slogdet(jax.vmap(jnp.outer)(h, h) + jnp.eye(D))[1][:, None]
    ),
    "sort features": lambda h: jnp.sort(h, 1),
    "sort examples": lambda h: jnp.sort(h, 0),
    "crops": lambda h: sum(jnp.split(jnp.tanh(jnp.concatenate([h, 2 * h])), 2)),
    "shifted crops": lambda h: jnp.concatenate([h, 2 * h])[1 : N + 1],
    "pad and cut": lambda h: jnp.pad(h, ((1, 1), (0, 0)))[1:-1],
    "pad and shift": lambda h: jnp.pad(h, ((2, 0), (0, 0)))[:-2],
    "column": lambda h: h.at[jnp.arange(N), h.argmax(1)].add(1.0 * h[:, 0]),
    "other column": lambda h: h.at[_couplings.PERMUTED, 0].add(h[:, 1]),
    "map": lambda h: lax.map(jnp.sin, h, batch_size=4),
    "scan": lambda h: lax.scan(lambda c, r: (c + r, c + r), jnp.zeros(D), h)[1],
    "scan of features": lambda h: lax.scan(lambda c, r: (c + r, c + r), jnp.zeros(N), h.T)[1].T,
    "window": lambda h: lax.reduce_window(h, 0.0, lax.add, (2, 1), (1, 1), "SAME"),
    "compare": lambda h: jnp.where(h > h.mean(0), h, 0.5 * h),
    "maximum": lambda h: jnp.maximum(h, 0.1 * h.max(1, keepdims=True)),
    "gram": lambda h: h @ h.T @ h,
}


def chained(names):
    def program(params, x):
        for name in names:
            x = STEPS[name](x)
        return x

    return program


def check_chain(names):
    x = _couplings.batch() + 0.0
    check(answers(chained(names), {}, x), truth(chained(names), {}, x, draws=1))


CHAINS = st.lists(st.sampled_from(sorted(STEPS)), min_size=5, max_size=5)


@pytest.mark.slow
@hypothesis.settings(max_examples=2, deadline=None, derandomize=True)
@hypothesis.given(CHAINS)
@hypothesis.example(["stopped roll", "roll back", "tanh", "product", "stop"])
@hypothesis.example(["across", "tanh", "back across", "reverse", "reverse"])
def test_no_random_chain_is_called_apart_where_it_mixes(names):
    check_chain(names)


@pytest.mark.exhaustive
@hypothesis.settings(max_examples=400, deadline=None)
@hypothesis.given(CHAINS)
def test_no_random_chain_is_called_apart_where_it_mixes_at_length(names):
    check_chain(names)


def test_chains_that_go_there_and_back_are_proved():
    x = _couplings.batch()
    for names in (["roll", "tanh", "roll back"], ["permute", "product", "unpermute"],
                  ["across", "tanh", "back across"], ["reverse", "map", "reverse"]):  # fmt: skip
        assert answers(chained(names), {}, x) == ("no", "no"), names


# ------------------------------------------------------------------ what rests on it


def exact_factors(program, params, batch):
    objective = jk.Objective(program, jk.Gaussian())
    return jk.value_grad_and_factors(objective, fisher="exact", uncovered="ignore")(params, batch)


LEFT_UNNOTICED = [
    "batch norm under vmap", "recurrence along the batch", "associative scan", "solve",
    "sparse graph", "fft", "reshaped pairs", "custom_vjp forward", "convolution along",
    "top_k along",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", LEFT_UNNOTICED)
def test_the_exact_fisher_is_that_of_explicit_jacobians(name):
    """G of the first layer from Jacobians of the outputs in its own rows, example by example."""
    params, x = _couplings.params(), _couplings.batch()
    width = PROGRAMS[name](params, x).shape[1:]
    factors = exact_factors(PROGRAMS[name], params, (x, jnp.zeros((N, *width)))).factors

    def of_rows(shift):  # a bias added to every row of the layer has the derivative of that row
        return _shifted(PROGRAMS[name], params, x, shift)

    jacobian = jax.jacobian(of_rows)(jnp.zeros((N, D)))  # (N, *width, N, D)
    rows = np.asarray(jacobian).reshape(-1, N, D)
    expected = np.einsum("onk,onl->kl", rows, rows) / N
    np.testing.assert_allclose(factors["w"].g, expected, rtol=1e-8, atol=1e-12)


def _shifted(program, params, x, shift):
    """The program with a shift of the rows of its one layer."""
    held = _couplings.hidden
    try:
        _couplings.hidden = lambda p, x: jnp.tanh(x @ p["w"] + shift)
        return program(params, x)
    finally:
        _couplings.hidden = held


@pytest.mark.parametrize("mixes", [False, True])
def test_inside_shard_map_a_collective_mixes_and_a_shard_does_not(mixes):
    def of_device(x):
        h = jnp.tanh(x).reshape(-1).reshape(x.shape)
        return h - jax.lax.psum(h.sum(0), "rows") if mixes else h

    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("rows")
    split = jax.shard_map(of_device, mesh=mesh, in_specs=spec, out_specs=spec)
    found = answers(lambda p, x: split(x @ p["w"]), _couplings.params(), _couplings.batch())
    assert found == (("yes", "yes") if mixes else ("no", "no"))


def test_rows_of_a_layer_that_are_constants_are_rows_of_examples():
    """Constant rows have no value of an example, and a cotangent of the outputs that read them."""

    def shifted(p, x):
        rows = jnp.tanh(jnp.ones((N, D)) @ p["w"])
        return x + jnp.cumsum(rows, 0)

    traced = trace(shifted, _couplings.params(), _couplings.batch(), num_outputs=1)
    assert traced.examples_meet("derivative").answer != "no"


def test_truth_sees_what_it_should():
    """The judge itself: a program that mixes values alone, one that mixes both, one neither."""
    params, x = _couplings.params(), _couplings.batch()
    assert truth(lambda p, x: x + x.sum(0), params, x, draws=1) == Truth(True, True)
    stopped = lambda p, x: x + lax.stop_gradient(x.sum(0))
    assert truth(stopped, params, x, draws=1) == Truth(True, False)
    assert truth(lambda p, x: jnp.sin(x), params, x, draws=1) == Truth(False, False)
