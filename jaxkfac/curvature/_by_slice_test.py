"""Eigenvectors in host memory, or in fewer bits, precondition as those on the device do."""

import dataclasses

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from jaxkfac.curvature import (
    HostCurvature,
    _apply,
    correct_eigenvalues,
    eigendecompose,
    natural_gradient,
    reconstruct,
)
from jaxkfac.curvature.host import HostOptions, service_bytes
from jaxkfac.factors import Gaussian, Objective, value_grad_and_factors

WIDTH, DEPTH = 70, 3  # a side beyond what is solved in batches


def apply_fn(params, x):
    def block(x, p):
        return jnp.tanh(x @ p["kernel"] + p["bias"]), None

    x, _ = jax.lax.scan(block, x, params["blocks"])
    return x @ params["head"]


@pytest.fixture(scope="module")
def problem():
    keys = jax.random.split(jax.random.key(0), 4)
    blocks = {
        "kernel": jax.random.normal(keys[0], (DEPTH, WIDTH, WIDTH)) / 8,
        "bias": jnp.zeros((DEPTH, WIDTH)),
    }
    params = {"blocks": blocks, "head": jax.random.normal(keys[1], (WIDTH, 5))}
    batch = jax.random.normal(keys[2], (96, WIDTH)), jax.random.normal(keys[3], (96, 5))
    _, grads, factors = value_grad_and_factors(Objective(apply_fn, Gaussian()))(params, batch)
    return params, grads, factors


def bases_of(factors, **options):
    with HostCurvature(refresh_every=1, lag=0, **options) as service:
        service.push(factors, 0)
        return service.bases(0)


def distance(tree, other):
    flat = [np.concatenate([np.ravel(x) for x in jax.tree.leaves(t)]) for t in (tree, other)]
    return np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[1])


@pytest.mark.slow
def test_one_layer_at_a_time_from_the_host_gives_the_same(problem):
    _, grads, factors = problem
    held = bases_of(factors, bases_in="host")
    vectors = [x.vectors for x in (*held.a.values(), *held.g.values())]
    assert all(isinstance(x, np.ndarray) for x in vectors)
    expected = natural_gradient(grads, bases_of(factors), damping=1e-3)
    # Products of one slice and of a batch round differently, times a condition number of 1e3.
    assert distance(natural_gradient(grads, held, damping=1e-3), expected) < 1e-4


@pytest.mark.slow
def test_from_the_host_a_call_sends_one_iteration_at_a_time(problem, monkeypatch):
    _, grads, factors = problem
    held, sent, put = bases_of(factors, bases_in="host"), [], _apply.put_result
    monkeypatch.setattr(_apply, "put_result", lambda x, *a: sent.append(x.shape) or put(x, *a))
    natural_gradient(grads, held, damping=1e-3)
    stacked = sorted(x for x in sent if x[0] in (WIDTH, WIDTH + 1))
    assert all(len(x) == 2 for x in sent)
    assert stacked.count((WIDTH, WIDTH)) >= DEPTH and stacked.count((WIDTH + 1,) * 2) >= DEPTH


@pytest.mark.slow
def test_under_jit_eigenvectors_in_host_memory_are_refused(problem):
    _, grads, factors = problem
    held = bases_of(factors, bases_in="host")
    with pytest.raises(TypeError, match="outside of jit"):
        jax.jit(lambda grads: natural_gradient(grads, held, damping=1e-3))(grads)


@pytest.mark.slow
@pytest.mark.parametrize("bases_in", ["device", "host"])
def test_bfloat16_eigenvectors_have_half_the_bytes_and_are_off_by_their_rounding(problem, bases_in):
    _, grads, factors = problem
    held = bases_of(factors, vectors_dtype="bfloat16", bases_in=bases_in)
    assert {x.vectors.dtype for x in held.g.values()} == {jnp.dtype("bfloat16")}
    assert {x.values.dtype for x in held.g.values()} == {jnp.dtype("float32")}
    found = natural_gradient(grads, held, damping=1e-2)
    expected = natural_gradient(grads, eigendecompose(factors), damping=1e-2)
    # 2**-9 an element, and what small eigenvalues make of vectors that are not quite orthogonal.
    assert 1e-4 < distance(found, expected) < 4e-2


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize("bases_in", ["device", "host"])
def test_a_saved_service_keeps_its_eigenvectors_where_and_as_they_were(problem, bases_in, tmp_path):
    _, grads, factors = problem
    options = {"vectors_dtype": "bfloat16", "bases_in": bases_in, "refresh_every": 1, "lag": 0}
    with HostCurvature(**options) as service:
        service.push(factors, 0)
        before = service.bases(0)
        service.save(tmp_path / "saved")
    with HostCurvature.load(tmp_path / "saved") as service:
        after = service.bases(0)
    same = jax.tree.map(lambda x, y: type(x) is type(y) and bool((x == y).all()), before, after)
    assert all(jax.tree.leaves(same))


@pytest.mark.slow
def test_identities_are_kept_likewise(problem):
    _, grads, factors = problem
    options = {"bases_in": "host", "initial": "identity", "like": factors}
    with HostCurvature(**options) as service:
        held = service.bases(0)
    assert all(isinstance(x.vectors, np.ndarray) for x in held.g.values())
    halved = natural_gradient(grads, dataclasses.replace(held), damping=1.0)
    assert distance(halved, jax.tree.map(lambda g: g / 2, grads)) < 1e-6


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "options", [{}, {"vectors_dtype": "bfloat16"}, {"rank": 9}, {"bases_in": "device", "rank": 9}]
)
def test_identities_are_formed_as_they_are_kept(problem, options, monkeypatch):
    """None is formed in full, and on the host one of a size serves all factors of it."""
    _, grads, factors = problem
    bound = WIDTH * 9 if "rank" in options else (WIDTH + 1) ** 2
    formed, eye = [], np.fill_diagonal
    monkeypatch.setattr(np, "fill_diagonal", lambda x, value: formed.append(x) or eye(x, value))
    whole = {"bases_in": "host", "initial": "identity", "like": factors, **options}
    with monkeypatch.context() as patch:
        if whole["bases_in"] == "host":
            patch.setattr(jnp, "eye", lambda *a, **k: pytest.fail("formed on the device"))
        with HostCurvature(**whole) as service:
            held = service.bases(0)
            store = service._state.store.in_memory
    if whole["bases_in"] == "host":
        assert len(formed) == len(
            {x.vectors.shape[-2] for x in (*held.a.values(), *held.g.values())}
        )
        itemsize = 2 if "vectors_dtype" in options else 4
        assert store <= 3 * itemsize * max(bound, (WIDTH + 1) * options.get("rank", WIDTH + 1))
    halved = natural_gradient(grads, held, damping=1.0)
    assert distance(halved, jax.tree.map(lambda g: g / 2, grads)) < 1e-2


@pytest.mark.parametrize("options", [{}, {"vectors_dtype": "bfloat16"}, {"rank": 9}])
def test_eigenvectors_on_the_host_count_in_its_budget_and_go_to_the_disk(
    problem, options, tmp_path
):
    _, grads, factors = problem
    whole = {"bases_in": "host", "refresh_every": 1, "lag": 0, **options}
    needed = service_bytes(factors, HostOptions(**whole))
    held = 0.9 * (needed.averages + needed.bases)  # beside which it has room for rounding up
    with HostCurvature(**whole, host_bytes=sum(needed), like=factors) as service:
        service.push(factors, 0)
        expected = service.bases(0)
        store = service._state.store
        assert store.in_memory > held
        service.save(tmp_path / "saved")
    with HostCurvature.load(tmp_path / "saved", host_bytes=sum(needed)) as service:
        assert service._state.store.in_memory > held
    with HostCurvature(
        **whole, host_bytes=needed.fixed + 1, disk=tmp_path, like=factors
    ) as service:
        service.push(factors, 0)
        found = service.bases(0)
        assert service._state.store.on_disk > held
    same = jax.tree.map(lambda x, y: bool((np.asarray(x) == np.asarray(y)).all()), found, expected)
    assert all(jax.tree.leaves(same))


def solved_densely(grads, rebuilt, damping):
    """``(A x G + damping)^-1`` of a kernel with its bias, from whole matrices in float64."""
    a, g = (np.asarray(x, np.float64) for x in rebuilt)
    (a_values, a_vectors), (g_values, g_vectors) = np.linalg.eigh(a), np.linalg.eigh(g)
    inside = np.swapaxes(a_vectors, -1, -2) @ np.asarray(grads, np.float64) @ g_vectors
    inside /= a_values[..., :, None] * g_values[..., None, :] + damping
    return a_vectors @ inside @ np.swapaxes(g_vectors, -1, -2)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("bases_in", ["device", "host"])
@pytest.mark.parametrize("rank", [3, 20])
def test_a_low_rank_inverts_the_factor_that_it_stands_for(problem, rank, bases_in):
    _, grads, factors = problem
    held = bases_of(factors, rank=rank, bases_in=bases_in, max_condition=float("inf"))
    assert held.a["blocks/kernel"].vectors.shape == (DEPTH, WIDTH + 1, rank)
    rebuilt = reconstruct(held)
    found = natural_gradient(grads, held, damping=1e-2)
    head = solved_densely(grads["head"], rebuilt["head"], 1e-2)
    assert distance(found["head"], head) < 1e-4
    blocks = grads["blocks"]
    both = np.concatenate([blocks["kernel"], blocks["bias"][:, None]], 1)
    solved = solved_densely(both, rebuilt["blocks/kernel"], 1e-2)
    assert distance(found["blocks"]["kernel"], solved[:, :-1]) < 1e-4
    assert distance(found["blocks"]["bias"], solved[:, -1]) < 1e-4


@pytest.mark.slow
def test_the_error_of_a_low_rank_is_that_of_the_rebuilt_factor(problem, tmp_path):
    *_, factors = problem
    with HostCurvature(refresh_every=1, lag=0, rank=9, max_condition=float("inf")) as service:
        service.push(factors, 0)
        rebuilt, errors = reconstruct(service.bases(0)), service.rank_errors
        service.save(tmp_path / "saved")
    collected, kept = factors["blocks/kernel"], rebuilt["blocks/kernel"]
    for name, whole, left in (("A", collected.a, kept.a), ("G", collected.g, kept.g)):
        off = np.linalg.norm(whole - left, axis=(-2, -1)) / np.linalg.norm(whole, axis=(-2, -1))
        (said,) = (e for n, e in errors.items() if "blocks/kernel" in n and n.startswith(name))
        assert said == pytest.approx(off.max(), rel=1e-3) and said > 0.01
        np.testing.assert_allclose(
            np.trace(whole, axis1=-2, axis2=-1), np.trace(left, axis1=-2, axis2=-1), rtol=1e-4
        )
    with HostCurvature.load(tmp_path / "saved") as service:
        assert service.rank_errors == errors


def test_a_rank_that_is_no_bound_changes_nothing(problem):
    _, grads, factors = problem
    found = natural_gradient(grads, bases_of(factors, rank=WIDTH + 1), damping=1e-3)
    expected = natural_gradient(grads, bases_of(factors), damping=1e-3)
    assert distance(found, expected) == 0


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"rank": 0}, "rank must be at least 1"),
        ({"rank": 3, "reuse_tolerance": 0.1}, "give one of them"),
        ({"vectors_dtype": "bfloat16", "reuse_tolerance": 0.1}, "orthonormal .* give one of them"),
        ({"bases_in": "disk"}, "bases_in='disk': expected one of"),
        ({"vectors_dtype": "int8"}, "vectors_dtype='int8': expected one of"),
    ],
)
def test_bad_arguments_are_named(bad, message, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=message):
        HostCurvature(**bad)


def test_measured_eigenvalues_need_all_eigenvectors(problem):
    *_, factors = problem
    with pytest.raises(ValueError, match="'blocks/kernel' has 9 eigenvectors of 71"):
        correct_eigenvalues(Objective(apply_fn, Gaussian()), bases_of(factors, rank=9))


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [{}, {"vectors_dtype": "bfloat16"}, {"rank": 2}])
def test_small_layers_are_solved_together_wherever_their_eigenvectors_are(options):
    keys = jax.random.split(jax.random.key(0), 4)
    params = [jax.random.normal(key, (4, 4)) for key in keys[:2]]
    batch = jax.random.normal(keys[2], (9, 4)), jax.random.normal(keys[3], (9, 4))
    objective = Objective(lambda p, x: jnp.tanh(x @ p[0]) @ p[1], Gaussian())
    _, grads, factors = value_grad_and_factors(objective)(params, batch)
    there, here = (bases_of(factors, bases_in=x, **options) for x in ("device", "host"))
    found = natural_gradient(grads, here, damping=0.1)
    assert distance(found, natural_gradient(grads, there, damping=0.1)) < 1e-6
    assert distance(reconstruct(here)["0"].a, reconstruct(there)["0"].a) < 1e-6
