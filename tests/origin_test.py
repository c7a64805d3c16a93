"""What bases know of the Fisher type and likelihood of their factors, and what is made of that."""

import dataclasses
import functools
import json
import warnings
from pathlib import Path

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkfac as jk
from jaxkfac.blocks import Origin
from jaxkfac.curvature.host._state import FORM
from jaxkfac.files import Archive, write_archive

PARAMS = {"up": jnp.full((3, 4), 0.1), "down": jnp.linspace(-1, 1, 8).reshape(4, 2)}
BATCH = jnp.linspace(-1, 2, 18).reshape(6, 3) ** 2, jnp.arange(6) % 2
KEY = jax.random.key(2)
TYPES = ("empirical", "mc", "exact", "forward")
MC, EXACT = (Origin(fisher, ("Categorical",)) for fisher in ("mc", "exact"))


def net(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"]


OBJECTIVE = jk.Objective(net, jk.Categorical())


@functools.cache
def collected(fisher):
    return of_batch(fisher, OBJECTIVE, BATCH)


def of_batch(fisher, objective, batch):
    return jk.value_grad_and_factors(objective, fisher=fisher)(PARAMS, batch, KEY)


def bases_of(fisher, objective=OBJECTIVE, batch=BATCH):
    own = objective is OBJECTIVE
    found = collected(fisher) if own else of_batch(fisher, objective, batch)
    return jk.eigendecompose(found.factors)


def same_structure(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)


# ------------------------------------------------------------ what carries it on


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("fisher", TYPES)
def test_bases_are_of_what_their_factors_are(fisher):
    factors = collected(fisher).factors
    expected = Origin(fisher, ("Categorical",))
    assert jk.eigendecompose(factors).origin == expected
    assert jax.jit(jk.eigendecompose)(factors).origin == expected


@pytest.mark.slow
def test_measured_eigenvalues_are_of_what_was_measured():
    bases = bases_of("exact")
    found = jk.correct_eigenvalues(OBJECTIVE, bases, fisher="mc")(PARAMS, BATCH, KEY)
    assert found.origin == MC and (found + found).origin == MC
    assert jk.update_average(bases, found, 0.9).origin == MC
    other = jk.correct_eigenvalues(OBJECTIVE, bases, fisher="exact")(PARAMS, BATCH)
    with pytest.raises(ValueError, match="measured eigenvalues of fisher='exact' of Categorical"):
        found + other
    assert jk.update_average(found, other, 0.9).origin == MC


@pytest.mark.default(2, slow=0)
@pytest.mark.parametrize("options", [{}, {"rank": 2}, {"vectors_dtype": "bfloat16"}])
def test_a_service_hands_it_on_and_saves_it(tmp_path, options):
    factors = collected("mc").factors
    with jk.HostCurvature(refresh_every=1, lag=0, **options) as service:
        service.push(factors, 0)
        assert service.bases(0).origin == service.average().origin == MC
        service.save(tmp_path / "saved")
    with jk.HostCurvature.load(tmp_path / "saved") as service:
        service.push(factors, 1)
        assert service.bases(1).origin == service.average().origin == MC


def test_a_service_that_was_saved_before_there_was_one_knows_none(tmp_path):
    factors = collected("mc").factors
    with jk.HostCurvature(refresh_every=1, lag=0) as service:
        service.push(factors, 0)
        service.bases(0)
        service.save(tmp_path / "new")
    with Archive(tmp_path / "new", FORM, "saved service") as saved:
        kept = set(saved.about) - {"format", "version", "arrays", "origin"}
        about = {name: saved.about[name] for name in kept}
        arrays = [(name, saved.read(name)) for name in saved.names]
    write_archive(tmp_path / "old", FORM, about, arrays, what="it", nbytes=0)
    with jk.HostCurvature.load(tmp_path / "old") as service:
        service.push(factors, 1)
        assert service.bases(1).origin is None


def test_a_service_with_like_has_its_structure_from_the_first_bases_on():
    like = jk.value_grad_and_factors(OBJECTIVE, fisher="exact").factor_shapes(PARAMS, BATCH)
    with jk.HostCurvature(refresh_every=1, lag=0, like=like, initial="identity") as service:
        before = service.bases(0)
        service.push(collected("mc").factors, 1)
        same_structure(service.bases(1), before)


@pytest.mark.parametrize("made", [lambda x: x, jk.eigendecompose])
def test_bytes_hold_nothing_of_it_and_the_target_says_it(made):
    whole = made(collected("mc").factors)
    read = flax.serialization.from_bytes(whole, flax.serialization.to_bytes(whole))
    same_structure(read, whole)
    old = dataclasses.replace(whole, origin=None)
    assert flax.serialization.to_bytes(old) == flax.serialization.to_bytes(whole)


# ------------------------------------------------------------ like= of another type


def updates_of(tx, given):
    state = tx.init(PARAMS)
    updates, new = tx.update(given.grads, state, PARAMS, factors=given.factors)
    return updates, state, new


@pytest.mark.exhaustive
@pytest.mark.parametrize("inverse", ["eigh", "cholesky", "host"])
@pytest.mark.parametrize("fisher", ["empirical", "exact", None])
def test_kfac_takes_factors_of_another_type_than_like(fisher, inverse):
    """By itself and inside of ``jit`` and ``scan``; the state keeps its structure."""
    given, like = collected("mc"), collected(fisher or "mc").factors
    if fisher is None:
        like = dataclasses.replace(like, origin=None)
    options = {"damping": 0.1, "inverse": inverse, "refresh_every": 2}
    options |= {"damping_mode": "factored" if inverse == "cholesky" else "exact"}
    expected, *_ = updates_of(jk.kfac(0.1, like=given.factors, **options), given)
    tx = jk.kfac(0.1, like=like, **options)
    updates, state, new = updates_of(tx, given)
    jax.tree.map(np.testing.assert_array_equal, updates, expected)
    same_structure(state, new)
    assert new.average.origin == like.origin
    if inverse == "host":  # decomposes outside of jit
        return

    def step(state, _):
        out, state = tx.update(given.grads, state, PARAMS, factors=given.factors)
        return state, out

    carried, _ = jax.eval_shape(lambda state: jax.lax.scan(step, state, length=3), state)
    same_structure(carried, state)


@pytest.mark.exhaustive
def test_multi_steps_takes_factors_of_another_type_than_like():
    like, given = collected("exact").factors, collected("mc")
    tx = jk.multi_steps(jk.kfac(0.1, like=like, damping=0.1), every_k_schedule=2)
    expected, *_ = updates_of(jk.kfac(0.1, like=like, damping=0.1), given)
    state = tx.init(PARAMS)
    for _ in range(2):
        before = state
        updates, state = tx.update(given.grads, state, PARAMS, factors=given.factors)
        same_structure(before, state)
    for name, x in expected.items():
        np.testing.assert_allclose(updates[name], x, rtol=1e-3)


# ------------------------------------------------------------ bases of another likelihood


CALLS = {
    "influence": lambda o, bases: jk.influence(o, PARAMS, bases, BATCH, BATCH),
    "self_influence": lambda o, bases: jk.self_influence(o, PARAMS, bases, BATCH),
    "prepare_queries": lambda o, bases: jk.prepare_queries(o, PARAMS, bases, BATCH),
    "laplace": lambda o, bases: jk.laplace(o, PARAMS, bases, num_examples=6),
}


def run_unseen(call, bases):
    """Traced, so that nothing is known of the bases but what is static; nothing is computed."""
    jax.eval_shape(lambda bases: CALLS[call](OBJECTIVE, bases), bases)


GAUSSIAN, NUMBERS = jk.Objective(net, jk.Gaussian()), (BATCH[0], jnp.ones((6, 2)))


@pytest.mark.default(1, slow=1)
@pytest.mark.parametrize("call", CALLS)
def test_bases_of_another_likelihood_are_refused_with_both_names(call):
    bases = bases_of("exact", GAUSSIAN, NUMBERS)
    with pytest.raises(ValueError, match=r"of Gaussian, .* is Categorical: take the objective"):
        CALLS[call](OBJECTIVE, bases)
    run_unseen(call, dataclasses.replace(bases, origin=None))


@pytest.mark.slow
def test_queries_know_of_which_likelihood_their_bases_were():
    held = jk.prepare_queries(OBJECTIVE, PARAMS, bases_of("exact"), BATCH)
    assert held.origin == EXACT
    with pytest.raises(ValueError, match="come from factors of Categorical, .* is Gaussian"):
        jk.influence(GAUSSIAN, PARAMS, None, held, NUMBERS)


@pytest.mark.exhaustive
def test_a_loss_that_marks_its_outputs_fits_the_objective_of_the_same_likelihood():
    def loss(params, batch):
        outputs = jk.mark_outputs(net(params, batch[0]), jk.Categorical())
        log_p = jax.nn.log_softmax(outputs)
        return -jnp.take_along_axis(log_p, batch[1][:, None], 1).mean()

    bases = bases_of("exact", loss)
    expected, found = (jk.influence(OBJECTIVE, PARAMS, b, BATCH, BATCH)
                       for b in (bases_of("exact"), bases))  # fmt: skip
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    with pytest.raises(ValueError, match="come from factors of Categorical, .* is Gaussian"):
        jk.influence(GAUSSIAN, PARAMS, bases, NUMBERS, NUMBERS)


# ------------------------------------------------------------ a Fisher type that does not fit

UNFIT = {
    ("forward", "influence"): "hold no curvature of the loss",
    ("forward", "self_influence"): "hold no curvature of the loss",
    ("forward", "prepare_queries"): "hold no curvature of the loss",
    ("forward", "laplace"): "hold no curvature of the loss",
    ("empirical", "laplace"): "from gradients at the given labels",
}


@pytest.mark.default(3, slow=4)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("fisher", TYPES)
def test_a_fisher_type_that_does_not_fit_is_warned_of_with_the_reason(call, fisher):
    bases = bases_of(fisher)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run_unseen(call, bases)
    expected = UNFIT.get((fisher, call))
    assert len(said) == (expected is not None)
    assert all(expected in str(x.message) for x in said)


@pytest.mark.exhaustive
def test_forward_is_known_of_several_gaussian_heads_whose_every_g_is_the_identity():
    """By their G alone they could be of "exact": each head adds to its output as it is."""
    params = {"a": PARAMS["up"], "b": PARAMS["up"][:, :2]}
    heads = {"a": jk.Gaussian(), "b": jk.Gaussian()}
    objective = jk.Objective(lambda p, x: {k: x @ p[k] for k in heads}, heads)
    batch = BATCH[0], {"a": jnp.ones((6, 4)), "b": jnp.ones((6, 2))}
    for fisher, number in (("forward", 1), ("exact", 0)):
        stats = jk.value_grad_and_factors(objective, fisher=fisher)
        bases = jk.eigendecompose(stats(params, batch).factors)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            jk.prepare_queries(objective, params, bases, batch)
        assert len(said) == number


def test_of_bases_of_which_nothing_is_known_their_g_is_looked_at():
    unknown = dataclasses.replace(bases_of("forward"), origin=None)
    with pytest.warns(UserWarning, match="every G of the bases is the identity"):
        jk.laplace(OBJECTIVE, PARAMS, unknown, num_examples=6)


@pytest.mark.exhaustive
def test_eigenvalues_that_are_measured_fit_whatever_their_eigenvectors_are_of(recwarn):
    bases = bases_of("forward")
    measured = jk.correct_eigenvalues(OBJECTIVE, bases, fisher="exact")(PARAMS, BATCH)
    for call in CALLS:
        run_unseen(call, measured)
    assert not recwarn


# ------------------------------------------------------------ kronfluence


@pytest.mark.parametrize(
    ("written", "expected"),
    [(True, Origin("empirical")), (False, Origin("mc")), (None, None)],
)
def test_files_of_kronfluence_say_their_fisher_type(tmp_path, written, expected):
    for file in (Path(__file__).parent / "kronfluence").glob("*.safetensors"):
        (tmp_path / file.name).symlink_to(file)
    if written is not None:
        arguments = json.dumps({"strategy": "ekfac", "use_empirical_fisher": written})
        (tmp_path / "factor_arguments.json").write_text(arguments)
    found = np.load(Path(__file__).parent / "kronfluence" / "problem.npz")
    params = {x: jnp.asarray(found[f"layers.0.{x}"]) for x in "wb"}
    objective = jk.Objective(lambda p, x: x @ p["w"] + p["b"], jk.Gaussian())
    batch = jnp.ones((2, len(params["w"]))), jnp.ones((2, len(params["b"])))
    like = jk.value_grad_and_factors(objective).factor_shapes(params, batch)
    names = {"w": "layers.0"}
    bases = jk.uses.load_kronfluence(tmp_path, like, terms_per_example=1, names=names)
    assert bases.origin == expected
