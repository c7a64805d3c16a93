"""The set that is found is the smallest: against all sets, and on cases with a known answer."""

import functools
import itertools

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxkfac import lslora
from jaxkfac.factors import Categorical, Gaussian, Objective
from jaxkfac.memory import MemoryBudgetError
from jaxkfac.planning import OPTION_NAMES
from jaxkfac.planning import plan_memory as plan_by_default
from jaxkfac.planning._program_bytes import CurvatureChoice, MicroBatches
from jaxkfac.planning._search import Search
from jaxkfac.planning._setting import Setting, TrainingPrograms
from jaxkfac.planning._shapes import UnavailableError, nbytes
from jaxkfac.planning._temporaries import Needs, Temporaries

PLENTY = 1e15
plan_memory = functools.partial(plan_by_default, compiled="none")


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def scanned(params, x):
    def step(x, w):
        return jnp.tanh(x @ w), None

    x, _ = jax.lax.scan(step, x, params["blocks"])
    return x @ params["head"]


def problem():
    params = {"blocks": shape(6, 24, 24), "head": shape(24, 16)}
    batch = (shape(8, 24), jax.ShapeDtypeStruct((8,), jnp.int32))
    return Objective(scanned, Categorical()), params, batch


@pytest.fixture(scope="module", autouse=True)
def _activations_by_rule():
    """In place of programs, of which the search only asks what they need."""

    def allocated(self, step, *args, donate_argnums=None, in_turn=False, traced=None, only=None):
        whole = donate_argnums is not None and not in_turn  # gradients are among its temporaries
        batch = args[2] if whole else args[1]
        activations = 0 if in_turn else jax.tree.leaves(batch)[-1].shape[0] * 4000
        return Needs(activations + whole * nbytes(args[0]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Temporaries, "__call__", allocated)
        yield


@pytest.fixture(scope="module")
def programs():
    """The programs, shared by all searches."""
    return TrainingPrograms(*problem(), lslora.Config(rank=2), {}, Temporaries())


def search(programs, device_bytes, host_bytes=None, options=OPTION_NAMES, **more):
    return Search(
        programs,
        problem()[2],
        optax.adam(1e-3),
        CurvatureChoice(vectors=False, in_flight_bytes=1),
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        max_factor_bytes=None,
        options=options,
        micro_batches=MicroBatches(),
        **more,
    )


SOME = ("accumulation", "host", "budget", "adapters", "nf4")


def every_estimate(found):
    """``{options: estimate}`` of all sets that can be used."""
    estimates = {}
    for size in range(len(SOME) + 1):
        for options in itertools.combinations(SOME, size):
            if "nf4" in options and "adapters" not in options:
                continue
            try:
                estimates[options] = found.estimate(options)
            except UnavailableError:
                continue
    return estimates


@pytest.mark.exhaustive
def test_no_smaller_or_cheaper_set_fits(programs):
    totals = sorted(
        n.device_total for n in every_estimate(search(programs, 1.0, options=SOME)).values()
    )
    seen = set()
    for device_bytes in [totals[0] - 1, *totals[:: len(totals) // 3], totals[-1]]:
        one = search(programs, device_bytes, options=SOME)
        fitting = [x for x, estimate in every_estimate(one).items() if one.fits(estimate)]

        def order(options):
            return len(options), sorted(map(OPTION_NAMES.index, options), reverse=True)

        smallest = one.smallest()
        if not fitting:
            assert smallest is None and device_bytes < totals[0]
            continue
        assert smallest is not None
        assert set(smallest.options) == set(min(fitting, key=order))
        seen.add(len(smallest.options))
    assert len(seen) >= 3


@pytest.mark.slow
def test_accumulation_takes_the_fewest_micro_batches_that_fit(programs):
    steps = {}
    for exponent in range(1, 4):
        one = search(programs, 1.0, options=("accumulation",))
        steps[2**exponent] = one._estimate(_accumulating(2**exponent)).device_total
    assert list(steps.values()) == sorted(steps.values(), reverse=True)
    for wanted in (2, 4, 8):
        one = search(programs, steps[wanted], options=("accumulation",))
        estimate = one.estimate(("accumulation",))
        assert estimate.steps == wanted


def _accumulating(steps):
    return Setting(frozenset({"accumulation"}), steps)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("dearer", [0.6, 1.5])
def test_the_set_that_is_found_is_that_of_a_search_that_compiles_everything(dearer, monkeypatch):
    """Whether a compiler allocates more than was counted, or less."""
    counted = Temporaries.__call__

    def asked(self, step, *args, **how):
        found = counted(self, step, *args, **how)
        return Needs(round(dearer * found.temporaries)) if self.compiled else found

    monkeypatch.setattr(Temporaries, "__call__", asked)
    config = lslora.Config(rank=2)
    of = {
        compiled: TrainingPrograms(*problem(), config, {}, Temporaries(compiled=compiled))
        for compiled in (False, True)
    }
    names = ("accumulation", "host", "remat", "bf16")
    total = search(of[True], PLENTY).estimate(()).device_total
    for share in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4):
        asking = search(of[True], share * total, options=names)
        found = search(of[False], share * total, options=names, compiled=asking, within=1.0)
        found, wanted = found.smallest(), asking.smallest()
        assert (found is None) == (wanted is None)
        if found is not None:
            assert found.compiled and found.options == wanted.options
            assert found.device_total <= share * total


def test_a_budget_takes_what_is_left_over(programs):
    whole = search(programs, PLENTY).estimate(("budget",))
    assert "1 passes" in whole.costs["budget"]
    least = search(programs, 1.0).estimate(("budget",))
    middle = (least.device_total + whole.device_total) // 2
    estimate = search(programs, middle).estimate(("budget",))
    assert 0.8 * middle < estimate.device_total <= middle
    assert least.factor_budget < estimate.factor_budget


def test_host_memory_counts_where_it_is_limited(programs):
    host = search(programs, PLENTY).estimate(("host",))
    enough, short = (search(programs, PLENTY, host.host_total - less) for less in (0, 1))
    assert enough.fits(host) and not short.fits(host)


def planned(device_bytes, **changes):
    """One dense layer: 4e6 bytes of parameters, 4.8e7 of factors, hardly any activations."""
    return plan_memory(
        Objective(lambda p, x: x @ p["kernel"], Gaussian()),
        {"kernel": shape(1000, 1000)},
        (shape(2, 1000), shape(2, 1000)),
        **{"optimizer": optax.adam(1e-3), "headroom": 0.0, **changes},
        device_bytes=device_bytes,
    )


def test_each_constructed_case_has_its_known_answer():
    options = ("host", "bf16", "adapters")
    # Parameters, gradients and Adam's two averages: 16 MB, or 8 in bfloat16; factors are not.
    state = {"curvature": False, "options": options}
    assert planned(17e6, **state).smallest.options == ()
    assert planned(15e6, **state).smallest.options == ("bf16",)
    assert planned(7e6, **state).smallest.options == ("adapters",)
    assert planned(3e6, **state).smallest.options == ("bf16", "adapters")
    # Two factors of 4 MB, eigenvalues, and 12 MB of workspace that the host takes over.
    analysis = {"vectors": False, "in_flight_bytes": 1, "options": options}
    assert planned(37e6, **analysis).smallest.options == ()
    assert planned(31e6, **analysis).smallest.options == ("host",)


def test_where_nothing_fits_the_best_set_and_its_largest_row_are_said():
    plan = planned(1e6, curvature=False, options=("bf16", "adapters"))
    assert plan.smallest is None and not plan.fits()
    assert plan.best.options == ("bf16", "adapters") and plan.best.largest == "parameters"
    message = (
        r"nothing fits 977 KiB: with the closest options, bf16 \+ adapters, it still needs .* on "
        r"the device, .* more than may be used; the largest row is 'parameters' with"
    )
    with pytest.raises(MemoryBudgetError, match=message):
        plan.chosen()
    with pytest.raises(MemoryBudgetError):
        _ = plan.accumulation_steps
    assert "nothing fits 977 KiB" in str(plan)


def test_options_that_a_training_lacks_say_why():
    plan = planned(1e9, options=("remat", "accumulation"))
    assert plan.unavailable == {"remat": "there is no scan whose body is not rematted already"}
    single = plan_memory(
        lambda p, b: ((b @ p) ** 2).mean(),
        shape(3, 2),
        shape(1, 3),
        device_bytes=1e9,
        options=("accumulation", "nf4"),
    )
    assert single.unavailable["accumulation"] == "the batch is one example"
    assert "jk.Objective" in single.unavailable["nf4"]


def test_headroom_stays_free():
    state = {"curvature": False, "options": ()}
    total = planned(1e9, **state).now.device_total
    for headroom, fits in ((0.0, True), (0.1, False)):
        assert planned(total, headroom=headroom, **state).fits() is fits
    plan = planned(total / 0.9 + 1, headroom=0.1, **state)
    assert plan.fits() and plan.usable_bytes == pytest.approx(total, abs=1)
    with pytest.raises(ValueError, match=r"headroom=1.0: expected a share in \[0, 1\)"):
        planned(1e9, headroom=1.0)


def test_an_option_may_cost_too_much(programs):
    device = search(programs, 1.0).estimate(("remat", "budget"))
    assert device.gradients == pytest.approx(
        4 / 3 * float(device.costs["budget"].split()[-4]), 0.01
    )
    dear = search(programs, device.device_total, options=("remat", "budget"))
    found = dear.smallest()
    assert found is not None and found.gradients > 4 / 3
    dear.max_gradients = 4 / 3
    assert dear.smallest() is None


def test_what_costs_too_much_is_said():
    limits = {"options": ("budget",), "max_gradients": 1.0, "vectors": False, "headroom": 0.0}
    least = plan_memory(*problem(), device_bytes=1, **limits).alone["budget"].device_total
    plan = plan_memory(*problem(), device_bytes=least, **limits)
    with pytest.raises(MemoryBudgetError, match=r"takes the time of .* gradients a step, .* more"):
        plan.chosen()
    with pytest.raises(ValueError, match="max_gradients=0.5: expected at least 1"):
        planned(1e9, max_gradients=0.5)


def test_undonated_steps_hold_parameters_and_state_twice():
    state = {"curvature": False, "options": ()}
    donated, undonated = (planned(1e9, donate=d, **state).now for d in (True, False))
    kept = donated.device["parameters"] + donated.device["optimizer"]
    assert undonated.device["undonated"] == kept
    # A gradient may lie where the new state will, and no lower: the old state is read.
    assert kept / 2 <= undonated.device_total - donated.device_total <= kept
