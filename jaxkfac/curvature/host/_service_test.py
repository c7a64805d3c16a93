import dataclasses
import gc
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.blocks import update_average
from jaxkfac.blocks._random_factors_test import layer, random_factors
from jaxkfac.curvature import eigendecompose, natural_gradient, reconstruct
from jaxkfac.curvature.host import (
    HostCurvature,
    HostOptions,
    _decompose,
    _push,
    _refresh,
    service_bytes,
)
from jaxkfac.linalg.spectral import Spectrum

LAYERS = (
    layer("q", (3, 4), bias="q_bias"),
    layer("k", (3, 4), input="q"),
    layer("stacked", (3, 4, 5), bias="stacked_bias", stack=1),
    layer("table", (6, 3), kind="embedding", a_dense=False),
    layer("scale", (2, 4), kind="scale", stack=1, inputs=(), g_dense=False),
)
NUM_MATRICES = 11  # A of q with its ones and without, 3 A's and 3 G's of the stack, 3 other G's
LIKE = jax.eval_shape(lambda: random_factors(LAYERS, jax.random.key(0)))


@pytest.fixture(scope="module")
def factors():
    return [random_factors(LAYERS, jax.random.key(i)) for i in range(12)]


def service(**kwargs):
    options = {"decay": 0.9, "refresh_every": 4, "lag": 2, "timeout": 60.0}
    return HostCurvature(**{**options, **kwargs})


def on_host(tree):
    return jax.tree.map(np.asarray, tree)


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))


def assert_close(a, b, tol=2e-5):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=tol, atol=tol)


def averages(factors, decay=0.9):
    out = [factors[0]]
    for new in factors[1:]:
        out.append(update_average(out[-1], new, decay))
    return out


def steps_of(running, factors, first=0):
    """The bases of every step, as they are used in a training loop."""
    seen = []
    for step, each in enumerate(factors, first):
        running.push(each, step)
        seen.append(running.bases(step))
    return seen


def until(condition, seconds=60.0):
    """Wait for something that happens in a thread; it fails rather than hangs."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def with_nan(factors, name):
    bad = {**factors.g_sums, name: factors.g_sums[name].at[..., 0, 2].set(jnp.nan)}
    return dataclasses.replace(factors, g_sums=bad)


def threads():
    return [t for t in threading.enumerate() if t.name.startswith("jaxkfac-")]


class Gate:
    """Decompositions wait until it is opened."""

    def __init__(self, monkeypatch, closed=True):
        self.open, self.calls, solve = threading.Event(), [], _decompose.eigh_on_host

        def gated(matrix, *, name, dtype):
            self.calls.append(name)
            assert self.open.wait(60), "the gate was never opened"
            return solve(matrix, name=name, dtype=dtype)

        monkeypatch.setattr(_decompose, "eigh_on_host", gated)
        if not closed:
            self.open.set()


def test_bases_are_those_of_the_average_at_the_refresh_step(factors):
    with service(max_condition=np.inf) as running:
        seen = steps_of(running, factors)
    expected = averages(factors)
    for step, bases in enumerate(seen):
        at = 0 if step < 6 else (4 if step < 10 else 8)
        wanted = eigendecompose(expected[at], max_condition=np.inf)
        assert jax.tree.structure(bases) == jax.tree.structure(wanted)
        rebuilt = reconstruct(bases)
        assert_close(rebuilt, {name: expected[at][name] for name in rebuilt})
        assert_close(bases["q"].a_values, wanted["q"].a_values)
        assert (step in (0, 6, 10)) == (step == 0 or bases is not seen[step - 1])
    assert seen[0]["k"].a_vectors.shape == (3, 3) and seen[0]["q"].a_vectors.shape == (4, 4)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_doubles_stay_doubles():
    double = [random_factors(LAYERS, jax.random.key(i)) for i in range(4)]
    with service(max_condition=np.inf, refresh_every=2, lag=1) as running:
        bases = steps_of(running, double)[-1]
        total = running.average()
    assert {x.dtype for x in jax.tree.leaves((bases, total))} == {np.dtype(np.float64)}
    expected = averages(double)
    assert same(total, expected[-1])
    rebuilt = reconstruct(bases)
    assert_close(rebuilt, {name: expected[2][name] for name in rebuilt}, tol=1e-11)


def test_micro_batches_and_parts_of_a_step_add_up(factors):
    def halves(each):
        stacked = each.a_sums["stacked"], each.g_sums["stacked"], each.a_counts["stacked"]
        for first, rows in ((1, slice(1, 3)), (0, slice(0, 1))):
            a, g, n = (x[rows] for x in stacked)
            part = dataclasses.replace(
                each, a_sums={"stacked": a}, g_sums={"stacked": g}, diagonals={},
                a_counts={"stacked": n},
            )  # fmt: skip
            yield part, first
        rest = lambda table: {k: v for k, v in table.items() if k != "stacked"}
        yield dataclasses.replace(each, a_sums=rest(each.a_sums), g_sums=rest(each.g_sums)), 0

    with service() as running, service() as whole:
        for step, each in enumerate(factors[:6]):
            for part, first in halves(each):
                running.push(on_host(part), step, first_iteration=first)
            whole.push(each, step)
            assert same(running.bases(step), whole.bases(step))
        assert same(running.average(), whole.average())
        for _ in range(2):  # micro-batches: not a new step
            whole.push(factors[6], 6)
        pooled = update_average(averages(factors[:6])[-1], 2.0 * factors[6], 0.9)
        assert_close(on_host(whole.average()), on_host(pooled))


def test_layers_may_come_one_group_after_the_other(factors):
    """As the passes of a byte budget push them: each knows only its own layers."""

    def parts(each):
        for names in (("stacked", "scale"), ("table",), ("q", "k")):
            own = tuple(x for x in LAYERS if x.name in names)
            pick = lambda table: {k: v for k, v in table.items() if k in names}  # noqa: B023
            tables = (each.a_sums, each.a_counts, each.g_sums, each.diagonals)
            yield type(each)(*map(pick, tables), each.terms, own, each.bias)

    with service() as running, service() as whole:
        for step, each in enumerate(factors[:7]):
            for part in parts(each):
                running.push(on_host(part), step)
            whole.push(each, step)
            bases, expected = running.bases(step), whole.bases(step)
            assert {*bases} == {*expected}
            for name in expected:
                assert same(bases[name], expected[name])
        with pytest.raises(ValueError, match="layer 'late', which was not expected"):
            running.push(random_factors((layer("late", (2, 2)),), jax.random.key(0)), 7)
        wider = random_factors((layer("k", (4, 4), input="q"),), jax.random.key(0))
        with pytest.raises(ValueError, match="factors hold .*'k'.*in_features=4.*in_features=3"):
            running.push(wider, 7)


def test_a_step_that_is_no_hand_over_waits_for_nothing(factors, monkeypatch):
    with service(initial="identity", like=LIKE) as running:
        gate = Gate(monkeypatch)
        seen = [None] * 3
        for step in range(2):  # the hand-over of step 0 is at 2
            running.push(factors[step], step)
            seen[step] = running.bases(step)
        assert seen[0] is seen[1]
        assert np.array_equal(seen[0]["k"].a_vectors, np.eye(3))
        until(lambda: gate.calls)  # the workers are at it and cannot get on
        running.push(factors[2], 2)
        timer = threading.Timer(0.2, gate.open.set)
        timer.start()
        bases = running.bases(2)
        assert gate.open.is_set() and bases is not seen[1]
        timer.join()


def test_a_refresh_sees_its_own_step_and_nothing_after_it(factors, monkeypatch):
    with service(initial="identity", like=LIKE, max_condition=np.inf) as running:
        gate = Gate(monkeypatch)
        running.push(factors[0], 0)
        running.push(factors[1], 0)
        running.push(factors[2], 1)
        running.flush()  # in the average, before anything has been decomposed
        gate.open.set()
        bases = running.bases(2)
    pooled = factors[0] + factors[1]
    assert_close(reconstruct(bases)["q"], pooled["q"])


def test_staggered_layers_are_refreshed_in_turn(factors, monkeypatch):
    with service(stagger=2, lag=1) as running:
        gate = Gate(monkeypatch, closed=False)
        seen = steps_of(running, factors[:10])
    assert len(gate.calls) == NUM_MATRICES + 2 * NUM_MATRICES  # steps 2, 4, 6 and 8: each twice
    new = {
        step: {name for name in LIKE if not shares(seen[step], seen[step - 1], name)}
        for step in range(1, 10)
    }
    changed = {step: names for step, names in new.items() if names}
    assert list(changed) == [3, 5, 7, 9]  # the steps after those
    assert changed[3] == changed[7] and changed[5] == changed[9]
    assert changed[3] | changed[5] == set(LIKE)
    assert "stacked" not in changed[3] & changed[5]  # the largest is a group by itself


def shares(a, b, name):
    """Whether two bases hold the same arrays for a layer."""
    values = lambda basis: basis.raw_diagonal if name == "scale" else basis.g_raw_values
    return values(a[name]) is values(b[name])


@pytest.mark.parametrize("held", [False, True])
def test_each_old_basis_is_let_go_before_its_successor_arrives(factors, monkeypatch, held):
    with service(refresh_every=1, lag=1) as running:
        running.push(factors[0], 0)
        bases = running.bases(0)
        kept = bases if held else None
        old = [weakref.ref(values) for values in all_values(bases)]
        del bases
        running.push(factors[1], 1)
        running.push(factors[2], 2)
        bring, alive = _refresh.put_result, []

        def counted(result, sharding):
            alive.append(sum(reference() is not None for reference in old))
            return bring(result, sharding)

        monkeypatch.setattr(_refresh, "put_result", counted)
        running.bases(2)
    if kept is None:  # two arrays for each spectrum
        assert alive[0] == len(old) - 1 and alive[-1] == 0
        assert all(a - b in (0, 1) for a, b in zip(alive, alive[1:]))
    else:
        assert set(alive) == {len(old)}
        assert np.isfinite(np.asarray(kept["q"].a_vectors)).all()


def all_values(bases):
    """The eigenvalues of every spectrum, and the diagonals."""
    yield from bases.diagonals.values()
    for table in (bases.a, bases.a_without_ones, bases.g):
        yield from (spectrum.values for spectrum in table.values())


def test_a_basis_that_still_fits_is_kept_and_one_that_does_not_is_replaced(factors, monkeypatch):
    same_again = [factors[0]] * 7
    with service(reuse_tolerance=1e-4, max_condition=np.inf) as running:
        gate = Gate(monkeypatch, closed=False)
        bases = steps_of(running, [*same_again, *[3.0 * f for f in same_again[:4]]])
        assert len(gate.calls) == NUM_MATRICES  # of the first refresh
        assert bases[-1] is not bases[0]
        assert_close(reconstruct(bases[-1]), reconstruct(bases[0]), tol=1e-3)
        steps_of(running, factors[1:8], first=11)
        assert len(gate.calls) > NUM_MATRICES


def test_old_eigenvectors_are_transferred_once_for_all_slices(factors, monkeypatch):
    transferred, whole_here = [], _refresh.whole_here

    def counted(x):
        transferred.append(x.shape)
        return whole_here(x)

    monkeypatch.setattr(_refresh, "whole_here", counted)
    with service(reuse_tolerance=1e-4, refresh_every=1, lag=0) as running:
        steps_of(running, factors[:1])
        assert not transferred
        steps_of(running, factors[1:2], first=1)
    # A of q with its ones and without, G of q, k and the table, A and G of the stack.
    assert len(transferred) == 7 and transferred.count((3, 5, 5)) == 2


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize("options", [{}, {"stagger": 2}, {"stagger": 2, "storage": "bfloat16"}])
def test_the_least_host_bytes_that_are_accepted_suffice(factors, options):
    options = {"refresh_every": 2, "lag": 1, "in_flight_bytes": 300, **options}
    least = sum(service_bytes(LIKE, HostOptions(**options)))
    with pytest.raises(ValueError, match="too small"):
        service(**options, like=LIKE, host_bytes=least - 1)
    with service(**options, like=LIKE, host_bytes=least) as running, service(**options) as free:
        for step, each in enumerate(factors[:8]):
            committed = jax.device_put(each, jax.devices()[0])
            running.push(committed, step)
            free.push(each, step)
            assert same(running.bases(step), free.bases(step))


def test_what_is_pushed_may_be_changed_or_dropped_afterwards(factors):
    numpy = jax.tree.map(np.array, factors[0])
    with service() as running, service() as calm:
        with running.room(LIKE):
            running.push(numpy, 0)
        for leaf in jax.tree.leaves(numpy):
            leaf[...] = np.nan
        calm.push(factors[0], 0)
        assert same(running.average(), calm.average())


def test_a_read_only_view_of_what_can_be_written_is_copied(factors):
    numpy = jax.tree.map(np.array, factors[0])
    views = jax.tree.map(lambda x: np.broadcast_to(x, x.shape), numpy)
    assert not any(x.flags.writeable for x in jax.tree.leaves(views))
    with service() as running, service() as calm:
        with running.room(LIKE):
            running.push(views, 0)
        for leaf in jax.tree.leaves(numpy):
            leaf[...] = np.nan
        calm.push(factors[0], 0)
        assert same(running.average(), calm.average())


def test_donated_arrays_are_deleted_and_others_are_not(factors):
    given = jax.tree.map(lambda x: x + 0, factors[0])
    kept = given.terms
    with service() as running:
        running.push(factors[0], 0)
        running.push(given, 1, donate=True)
        running.flush()
        assert all(x.is_deleted() for x in jax.tree.leaves((given.a_sums, given.g_sums)))
        assert not kept.is_deleted()
        assert not any(x.is_deleted() for x in jax.tree.leaves(factors[0]))
        with pytest.raises(ValueError, match="A of layer 'q' has been deleted or donated"):
            running.push(given, 2)
        with pytest.raises(ValueError, match="G of layer 'q' is traced|A of layer 'q' is traced"):
            jax.jit(lambda f: running.push(f, 2))(factors[0])


@pytest.mark.slow
def test_references_are_dropped_as_soon_as_the_average_has_them(factors):
    class Tracked(np.ndarray):
        """An array that can be watched."""

    array = np.array(factors[0].g_sums["k"]).view(Tracked)
    array.flags.writeable = False  # so it is not copied
    gone = weakref.ref(array)
    part = dataclasses.replace(
        factors[0], a_sums={}, a_counts={}, diagonals={}, g_sums={"k": array}
    )
    with service() as running:
        running.push(part, 0)
        del part, array
        running.flush()
        gc.collect()
        assert gone() is None


def test_bytes_in_flight_stay_within_the_limit(factors, monkeypatch):
    from jaxkfac.curvature.host import _average

    largest = 3 * 5 * 5 * 4
    slow = _average.pack

    def packed(*args):
        time.sleep(0.002)
        return slow(*args)

    monkeypatch.setattr(_average, "pack", packed)
    with service(in_flight_bytes=largest) as running, service(in_flight_bytes=8) as alone:
        for step, each in enumerate(factors[:3]):
            running.push(each, step)
            alone.push(each, step)
        assert same(running.average(), alone.average())
        flights = running._averaging, alone._averaging
        assert flights[0].taken == flights[1].taken == 0
        assert 0 < flights[0].most <= largest
        assert flights[1].most == largest  # the largest went alone


def test_room_is_taken_before_dispatch_and_given_back(factors):
    with service(in_flight_bytes=10_000, timeout=0.2) as running:
        flight = running._averaging
        with running.room(LIKE):
            taken = flight.taken
            assert taken > 0
            running.push(factors[0], 0)
            assert flight.most == taken  # the push took nothing more
        running.flush()
        assert flight.taken == 0
        with pytest.raises(ValueError, match="of the user"), running.room(8_000):
            raise ValueError("of the user")
        assert flight.taken == 0
        with (
            running.room(8_000),
            pytest.raises(TimeoutError, match="waited 0.2 s for room"),
            running.room(8_000),
        ):
            pass


def test_device_placement_falls_back_to_the_host(factors, monkeypatch):
    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    with service(max_condition=np.inf, placement="device") as running:
        on_device = steps_of(running, factors[:1])[0]
    monkeypatch.setattr(_decompose, "_eigh", full)
    gate = Gate(monkeypatch, closed=False)
    with service(max_condition=np.inf, placement="device") as running:
        on_the_host = steps_of(running, factors[:1])[0]
    assert len(gate.calls) == NUM_MATRICES
    assert_close(reconstruct(on_device), reconstruct(on_the_host), tol=1e-4)


class _Accelerator:
    """A device that knows its memory and decomposes at a given speed."""

    platform = "gpu"

    def __init__(self, free):
        self._free = free

    def memory_stats(self):
        return {"bytes_limit": self._free}


@pytest.mark.parametrize(
    ("free", "seconds", "chosen"),
    [(10**9, 0.0, "device"), (10**9, 0.05, "host"), (100, 0.0, "host")],
)
def test_auto_takes_the_faster_place_that_has_room(monkeypatch, free, seconds, chosen):
    cpu = jax.devices("cpu")[0]
    on_device, on_host, used, clock = _decompose._on_device, _decompose.eigh_on_host, [], [0.0]

    def timed_device(matrix, device):
        used.append(len(matrix))
        clock[0] += seconds
        return on_device(matrix, cpu)

    def timed_host(matrix, *, name, dtype):
        clock[0] += 0.02
        return on_host(matrix, name=name, dtype=dtype)

    monkeypatch.setattr(_decompose, "_on_device", timed_device)
    monkeypatch.setattr(_decompose, "eigh_on_host", timed_host)
    monkeypatch.setattr(_decompose.time, "perf_counter", lambda: clock[0])
    decomposer = _decompose.Decomposer("auto", None, "float64")
    matrix = np.diag(np.arange(1, 6, dtype=np.float32))
    arguments = {"name": "x", "device": _Accelerator(free), "previous": None}
    spectrum = decomposer.decompose(matrix, **arguments)
    np.testing.assert_allclose(spectrum.values, np.arange(1, 6), rtol=1e-5)
    assert decomposer.chosen == {"5/float32": chosen}
    before = len(used)
    decomposer.decompose(matrix, **arguments)  # measured once
    assert len(used) - before == (chosen == "device")


def factors_of_condition(condition, stack):
    """Float32 factors of one layer whose eigenvalues fall evenly, in logarithms, to the last."""
    rng, sums = np.random.default_rng(0), []
    for n in (48, 32):
        q = np.linalg.qr(rng.normal(size=(*stack, n, n)))[0]
        values = np.logspace(0, -np.log10(condition), n)
        sums.append(jnp.asarray((q * values) @ np.swapaxes(q, -1, -2), jnp.float32))
    made = random_factors((layer("w", (*stack, 48, 32), stack=len(stack)),), jax.random.key(0))
    one = jnp.ones((), jnp.float32)
    counts = {"w": jnp.ones(stack, jnp.float32)}
    return dataclasses.replace(
        made, a_sums={"w": sums[0]}, a_counts=counts, g_sums={"w": sums[1]}, terms=one
    )


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("stack", [(), (2,)])
@pytest.mark.parametrize("where", ["auto", "host", "service"])
def test_the_natural_gradient_is_that_of_a_rounded_float64_decomposition(where, stack):
    factors = factors_of_condition(1e6, stack)
    tree = {"w": jax.random.normal(jax.random.key(1), (*stack, 48, 32), jnp.float32)}

    def bases(dtype):
        if where != "service":
            return eigendecompose(factors, placement=where, dtype=dtype)
        with HostCurvature(dtype=dtype) as running:
            running.push(factors, 0)
            return running.bases(0)

    (a, q_a), (g, q_g) = (np.linalg.eigh(np.asarray(m, np.float64)) for m in factors["w"])
    rounded = dataclasses.replace(
        bases("float64"),
        a={"w": Spectrum(jnp.asarray(a, jnp.float32), jnp.asarray(q_a, jnp.float32))},
        g={"w": Spectrum(jnp.asarray(g, jnp.float32), jnp.asarray(q_g, jnp.float32))},
    )
    a, g = (np.maximum(x, x.max(-1, keepdims=True) / 1e6) for x in (a, g))
    turned = np.swapaxes(q_a, -1, -2) @ np.asarray(tree["w"], np.float64) @ q_g
    exact = q_a @ (turned / (a[..., :, None] * g[..., None, :])) @ np.swapaxes(q_g, -1, -2)

    def error(bases):
        found = natural_gradient(tree, bases, damping=0.0)["w"]
        return np.linalg.norm(np.asarray(found, np.float64) - exact) / np.linalg.norm(exact)

    assert error(bases(np.float64)) <= 1.5 * error(rounded) < 1e-5
    assert error(bases(np.float32)) > 0.01  # as much as is lost without


@pytest.mark.gpu
@pytest.mark.parametrize("placement", ["host", "device", "auto"])
def test_bases_return_to_the_accelerator(factors, placement):
    accelerator = jax.devices()[0]
    given = [jax.device_put(on_host(each), accelerator) for each in factors[:6]]
    with service(placement=placement, max_condition=np.inf) as running:
        for step, each in enumerate(given):
            running.push(each, step, donate=True)
            bases = running.bases(step)
        running.flush()
        assert all(x.is_deleted() for x in jax.tree.leaves(given[0].a_sums))
        assert {x.device for x in jax.tree.leaves(bases)} == {accelerator}
        total = running.average()
        chosen = set(running.placements.values())
    assert bool(chosen) == (placement == "auto") and chosen <= {"host", "device"}
    wanted = averages(factors[:6])
    for name in LIKE:  # the device adds the average in an order of its own
        for x, y in zip(total[name], wanted[-1][name], strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


WIDE = (layer("wide", (64, 65), bias="wide_bias"), layer("stack", (2, 70, 3), stack=1))


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_packed_factors_give_the_average_of_dense_ones(storage):
    """The rectangle of a packed factor is the one in which the average is kept."""
    pushes = [random_factors(WIDE, jax.random.key(i)) for i in range(3)]
    averages = []
    for given in (pushes, [x.packed() for x in pushes]):
        with service(storage=storage) as running:
            for step, each in enumerate(given):
                running.push(each, step)
            running.flush()
            averages.append(running.average())
    assert same(*averages)
    packed = pushes[0].packed()
    wrong = dataclasses.replace(packed, g_sums=packed.g_sums | {"wide": jnp.eye(3)})
    with service() as running, pytest.raises(ValueError, match=r"shape \(3, 3\), expected"):
        running.push(wrong, 0)


def test_a_push_of_packed_factors_copies_one_triangle_of_each_matrix(monkeypatch):
    start, copied = _push.start_copy, []

    def counted(x):
        copied.append(x)
        return start(x)

    monkeypatch.setattr(_push, "start_copy", counted)
    factors = random_factors(WIDE, jax.random.key(0))
    for given, elements in (
        (factors, lambda n: n * n),
        (factors.packed(), lambda n: n * (n + 1) // 2),
    ):
        copied.clear()
        with service() as running:
            running.push(given, 0)
            running.flush()
        counts = 1 + 2 + 2  # the A of "wide", those of "stack", and the loss terms of both G
        wide, stack = elements(65) + elements(65), 2 * (elements(70) + 3 * 3)
        assert sum(x.size for x in copied) == wide + stack + counts
