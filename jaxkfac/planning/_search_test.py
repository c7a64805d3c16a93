"""The set that is found is the smallest: against all sets, and on cases with a known answer."""

import itertools

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxkfac import lslora
from jaxkfac.factors import Categorical, Gaussian, Objective
from jaxkfac.memory import MemoryBudgetError
from jaxkfac.planning import LEVERS, _variant, plan_memory
from jaxkfac.planning._levers import Setting, UnavailableError
from jaxkfac.planning._rows import Accumulation, Curvature
from jaxkfac.planning._search import Search
from jaxkfac.planning._variant import Variants

PLENTY = 1e15


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
    """In place of compilations, which the search only asks for their result."""

    def allocated(step, trained, batch, *key):
        return jax.tree.leaves(batch)[-1].shape[0] * 4000

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_variant, "_compiled_temporaries", allocated)
        yield


@pytest.fixture(scope="module")
def variants():
    """The programs, shared by all searches."""
    return Variants(*problem(), lslora.Config(rank=2), {})


def search(variants, device_bytes, host_bytes=None, levers=LEVERS):
    return Search(
        variants,
        problem()[2],
        optax.adam(1e-3),
        Curvature(vectors=False, in_flight_bytes=1),
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        max_factor_bytes=None,
        levers=levers,
        accumulation=Accumulation(),
    )


SOME = ("accumulation", "host", "budget", "adapters", "nf4")


def every_need(found):
    """``{levers: need}`` of all sets that can be pulled."""
    needs = {}
    for size in range(len(SOME) + 1):
        for levers in itertools.combinations(SOME, size):
            if "nf4" in levers and "adapters" not in levers:
                continue
            try:
                needs[levers] = found.need(levers)
            except UnavailableError:
                continue
    return needs


def test_no_smaller_or_cheaper_set_fits(variants):
    totals = sorted(n.device_total for n in every_need(search(variants, 1.0, levers=SOME)).values())
    seen = set()
    for device_bytes in [totals[0] - 1, *totals[:: len(totals) // 3], totals[-1]]:
        one = search(variants, device_bytes, levers=SOME)
        fitting = [x for x, need in every_need(one).items() if one.fits(need)]

        def order(levers):
            return len(levers), sorted(map(LEVERS.index, levers), reverse=True)

        smallest = one.smallest()
        if not fitting:
            assert smallest is None and device_bytes < totals[0]
            continue
        assert smallest is not None
        assert set(smallest.levers) == set(min(fitting, key=order))
        seen.add(len(smallest.levers))
    assert len(seen) >= 3


def test_accumulation_takes_the_fewest_micro_batches_that_fit(variants):
    steps = {}
    for exponent in range(1, 4):
        one = search(variants, 1.0, levers=("accumulation",))
        steps[2**exponent] = one._need(_accumulating(2**exponent)).device_total
    assert list(steps.values()) == sorted(steps.values(), reverse=True)
    for wanted in (2, 4, 8):
        need = search(variants, steps[wanted], levers=("accumulation",)).need(("accumulation",))
        assert need.steps == wanted


def _accumulating(steps):
    return Setting(frozenset({"accumulation"}), steps)


def test_a_budget_takes_what_is_left_over(variants):
    whole = search(variants, PLENTY).need(("budget",))
    assert "1 passes" in whole.costs["budget"]
    least = search(variants, 1.0).need(("budget",))
    middle = (least.device_total + whole.device_total) // 2
    need = search(variants, middle).need(("budget",))
    assert need.device_total == middle and least.factor_budget < need.factor_budget
    assert search(variants, middle - 1).need(("budget",)).device_total == middle - 1


def test_host_memory_counts_where_it_is_limited(variants):
    host = search(variants, PLENTY).need(("host",))
    enough, short = (search(variants, PLENTY, host.host_total - less) for less in (0, 1))
    assert enough.fits(host) and not short.fits(host)


def planned(device_bytes, **changes):
    """One dense layer: 4e6 bytes of parameters, 4.8e7 of factors, hardly any activations."""
    return plan_memory(
        Objective(lambda p, x: x @ p["kernel"], Gaussian()),
        {"kernel": shape(1000, 1000)},
        (shape(2, 1000), shape(2, 1000)),
        **{"optimizer": optax.adam(1e-3), "device_bytes": device_bytes, **changes},
    )


def test_each_constructed_case_has_its_known_answer():
    levers = ("host", "bf16", "adapters")
    # Parameters, gradients and Adam's two averages: 16 MB, or 8 in bfloat16; factors are not.
    state = {"curvature": False, "levers": levers}
    assert planned(17e6, **state).smallest.levers == ()
    assert planned(15e6, **state).smallest.levers == ("bf16",)
    assert planned(7e6, **state).smallest.levers == ("adapters",)
    assert planned(3e6, **state).smallest.levers == ("bf16", "adapters")
    # Two factors of 4 MB, eigenvalues, and 12 MB of workspace that the host takes over.
    analysis = {"vectors": False, "in_flight_bytes": 1, "levers": levers}
    assert planned(37e6, **analysis).smallest.levers == ()
    assert planned(31e6, **analysis).smallest.levers == ("host",)


def test_where_nothing_fits_the_best_set_and_its_largest_row_are_said():
    plan = planned(1e6, curvature=False, levers=("bf16", "adapters"))
    assert plan.smallest is None and not plan.fits()
    assert plan.best.levers == ("bf16", "adapters") and plan.best.largest == "parameters"
    message = r"nothing fits 977 KiB: the best set, bf16 \+ adapters, needs .* 'parameters' with"
    with pytest.raises(MemoryBudgetError, match=message):
        plan.chosen()
    with pytest.raises(MemoryBudgetError):
        _ = plan.accumulation_steps
    assert "nothing fits 977 KiB" in str(plan)


def test_levers_that_a_training_lacks_say_why():
    plan = planned(1e9, levers=("remat", "accumulation"))
    assert plan.unavailable == {"remat": "there is no scan whose body is not rematted already"}
    single = plan_memory(
        lambda p, b: ((b @ p) ** 2).mean(),
        shape(3, 2),
        shape(1, 3),
        device_bytes=1e9,
        levers=("accumulation", "nf4"),
    )
    assert single.unavailable["accumulation"] == "the batch is one example"
    assert "jk.Objective" in single.unavailable["nf4"]
