"""Planned bytes are those of the arrays and programs of the training itself."""

import dataclasses
import functools
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxkfac import lslora
from jaxkfac._errors import CompilerError, CompilerNotFoundError, UncoveredParameterError
from jaxkfac.curvature import eigendecompose
from jaxkfac.curvature.host import HostCurvature
from jaxkfac.factors import Categorical, Gaussian, Objective, value_grad_and_factors
from jaxkfac.interception import find_layers
from jaxkfac.memory import MemoryBudgetError
from jaxkfac.optim import MultiStepsState, kfac, multi_steps
from jaxkfac.planning import TARGETS, DecoderLayout, shaped
from jaxkfac.planning import plan_memory as plan_by_default
from jaxkfac.planning._memory_plan import _in_blocks
from jaxkfac.planning._options import OPTION_NAMES, OPTIONS
from jaxkfac.planning._shapes import micro_batch
from jaxkfac.planning._temporaries import Temporaries

EXAMPLES, STEPS, RANK = 32, 4, 4
plan_memory = functools.partial(plan_by_default, compiled="none")
PLENTY = 1e15
# Rows are within 10 % of what is measured; those that are counted rather than compiled are exact.
WITHIN = 0.1


@dataclasses.dataclass
class Case:
    """A training, its plans, and what its step gave."""

    objective: Any
    params: Any
    batch: Any

    @functools.cached_property
    def plan(self):
        return plan_memory(
            self.objective,
            self.params,
            self.batch,
            optimizer=optax.adam(1e-3),
            device_bytes=PLENTY,
            adapter_rank=RANK,
            compiler="cpu",
            compiled="all",
        )

    @functools.cached_property
    def collector(self):
        return value_grad_and_factors(self.objective)

    @functools.cached_property
    def like(self):
        return self.collector.factor_shapes(self.params, self.batch)

    @functools.cached_property
    def step(self):
        return jax.jit(self.collector).lower(self.params, self.batch).compile()

    @functools.cached_property
    def filled(self):
        params, batch = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), self.objects)
        return params, batch

    @property
    def objects(self):
        return self.params, self.batch

    @property
    def objects3(self):
        return self.objective, self.params, self.batch

    @functools.cached_property
    def out(self):
        return self.step(*self.filled)


def mlp():
    def apply_fn(params, x):
        for layer in params[:-1]:
            x = jax.nn.gelu(x @ layer["kernel"] + layer["bias"])
        return x @ params[-1]["kernel"] + params[-1]["bias"]

    def layer(inputs, outputs):
        sizes = {"kernel": (inputs, outputs), "bias": (outputs,)}
        return {name: jax.ShapeDtypeStruct(size, jnp.float32) for name, size in sizes.items()}

    batch = (
        jax.ShapeDtypeStruct((EXAMPLES, 64), jnp.float32),
        jax.ShapeDtypeStruct((EXAMPLES,), jnp.int32),
    )
    params = [layer(64, 64), layer(64, 64), layer(64, 10)]
    return Case(Objective(apply_fn, Categorical()), params, batch)


def decoder():
    layout = DecoderLayout(3, 64, 2, 64, 40, fused=False)
    return Case(*shaped(layout, examples=EXAMPLES, tokens=16))


COMPILED = pytest.param(decoder, marks=pytest.mark.exhaustive)  # every option, a minute


@pytest.fixture(scope="module", params=[mlp, COMPILED], ids=["mlp", "decoder"])
def case(request):
    return request.param()


def size(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def test_rows_are_the_bytes_of_the_steps_arrays(case):
    device = case.plan.now.device
    assert device["parameters"] == size(case.filled[0])
    assert device["batch"] == size(case.filled[1])
    assert device["gradients"] == size(case.out.grads)
    assert device["optimizer"] == size(optax.adam(1e-3).init(case.filled[0]))
    assert device["factors"] == size(case.out.factors)
    assert device["bases"] == size(eigendecompose(case.out.factors))
    largest = max(x.shape[-1] for x in jax.tree.leaves(case.out.factors) if x.ndim > 1)
    assert device["workspace"] == 4 * largest**2
    assert device["eigh scratch"] == 4 * (2 * largest**2 + 6 * largest + 1)


def test_activations_are_what_the_compiled_step_allocates(case):
    measured = case.step.memory_analysis().temp_size_in_bytes
    assert case.plan.now.device["activations"] == pytest.approx(measured, rel=WITHIN)


@pytest.mark.slow
def test_accumulation_has_the_buffers_of_multi_steps_and_a_micro_batchs_activations(case):
    estimate = case.plan.alone["accumulation"]
    assert estimate.steps == 2 and estimate.device["batch"] * 2 == case.plan.now.device["batch"]
    state = multi_steps(optax.identity(), STEPS, like=case.like).init(case.filled[0])
    assert estimate.device["accumulation"] == pytest.approx(size(state.accumulation), rel=1e-3)
    small = micro_batch(case.batch, estimate.steps)
    measured = jax.jit(case.collector).lower(case.params, small).compile().memory_analysis()
    assert estimate.device["activations"] == pytest.approx(measured.temp_size_in_bytes, rel=WITHIN)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("memory", ["device", "pinned_host"])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_accumulators_are_those_of_multi_steps_in_their_dtype_and_memory(dtype, memory):
    case = mlp()
    options = {"accumulator_dtype": dtype, "accumulator_memory_kind": memory}
    chosen = ("host", "accumulator")
    plan = plan_memory(
        *case.objects3, device_bytes=PLENTY, options=chosen, accumulation_steps=16, **options
    )
    for like, found in ((case.like, plan.now), (None, plan.alone["host"])):
        tx = multi_steps(optax.identity(), 16, like=like, **options)
        held = size(tx.init(case.filled[0]).accumulation.acc_grads)
        on_device, on_host = (held, 0) if memory == "device" else (0, held)
        assert found.device["accumulation"] == on_device and found.steps == 16
        assert found.host.get("accumulation", 0) == on_host
    assert plan.accumulation_steps == 16
    if dtype is None:
        tx = multi_steps(optax.identity(), 16, like=case.like, accumulator_dtype=jnp.bfloat16)
        held = size(tx.init(case.filled[0]).accumulation.acc_grads)
        half = plan.alone["accumulator"]
        assert (half.device | half.host)["accumulation"] == held
    else:
        assert "already" in plan.unavailable["accumulator"]


def test_the_option_of_accumulators_brings_accumulation_with_it(case):
    found = case.plan.alone["accumulator"]
    assert found.options == ("accumulation", "accumulator") and found.steps == 2
    wide = case.plan.alone["accumulation"].device["accumulation"]
    assert found.device["accumulation"] == pytest.approx(wide / 2, rel=0.1)


def test_host_rows_are_what_the_service_needs_and_holds(case):
    estimate = case.plan.alone["host"]
    service = {"like": case.like, "refresh_every": 1, "lag": 1}
    with pytest.raises(ValueError, match="host_bytes"):
        HostCurvature(**service, host_bytes=estimate.host_total - 1)
    with HostCurvature(**service, host_bytes=estimate.host_total) as host:
        host.push(case.out.factors, 0)
        host.flush()
        assert estimate.host["averages"] == pytest.approx(host._state.store.in_memory, rel=1e-3)
    assert (
        estimate.device["workspace"] == 0
        and estimate.device["bases"] == case.plan.now.device["bases"]
    )
    # This step's factors, and all of the last one's: they are less than what may be in flight.
    assert estimate.device["factors"] == pytest.approx(2 * size(case.out.factors), rel=0.02)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("decay", "pushes", "steps"), [(0.99, 3, 260), (0.999, 1, 350), (0.95, 12, 25)]
)
def test_averages_that_go_on_in_float64_have_a_row(case, decay, pushes, steps):
    host = {"options": ("host",), "decay": decay, "accumulation_steps": pushes}
    plan = plan_memory(*case.objects3, device_bytes=PLENTY, **host)
    rows = plan.alone["host"].host
    with HostCurvature(decay=decay, refresh_every=10 * steps, lag=0) as host:
        for step in range(1, steps):
            for _ in range(pushes):
                host.push(case.out.factors, step)
        host.bases(steps - 1)  # no snapshot is held any more
        host.flush()
        held = host._state.store.in_memory
    wide = rows.get("averages in float64", 0)
    assert rows["averages"] + wide == pytest.approx(held, rel=1e-3)
    assert bool(wide) == (pushes / (1 - decay) > 256)


@pytest.mark.slow
def test_a_budget_holds_and_says_how_many_passes_it_takes(case):
    smallest = plan_memory(
        *(case.objective, case.params, case.batch), device_bytes=1.0, options=("budget",)
    ).alone["budget"]
    budget = smallest.factor_budget
    with pytest.raises(MemoryBudgetError):
        value_grad_and_factors(case.objective, max_factor_bytes=budget - 1).plan(*case.objects)
    passes = value_grad_and_factors(case.objective, max_factor_bytes=budget).plan(*case.objects)
    assert f"{len(passes.passes)} passes" in smallest.costs["budget"] and len(passes.passes) > 2
    results = [one.results for one in passes.passes]
    assert smallest.device["factors"] == max(results) <= budget
    assert smallest.host["factors"] == size(case.out.factors)


@pytest.mark.exhaustive
def test_a_pass_under_a_budget_stays_within_its_rows():
    case = decoder()
    shapes = (case.objective, case.params, case.batch)
    budget = 60_000
    options = {"options": ("budget",), "max_factor_bytes": budget, "compiled": "all"}
    plan = plan_memory(*shapes, device_bytes=PLENTY, **options)
    device = plan.alone["budget"].device
    assert device["factors"] <= budget
    planned = sum(device[row] for row in ("activations", "gradients", "factors"))
    collector = value_grad_and_factors(case.objective, max_factor_bytes=budget)
    first = collector.lower(*case.filled)[0][1].compile().memory_analysis()
    measured = first.temp_size_in_bytes + first.output_size_in_bytes
    assert planned == pytest.approx(measured, rel=WITHIN)


def test_adapters_alone_leave_the_base_without_gradient_and_state(case):
    estimate, config = case.plan.alone["adapters"], lslora.Config(rank=RANK)
    params, batch = case.filled
    adapters = lslora.init(case.objective.apply_fn, config, params, batch[0], key=jax.random.key(0))
    assert estimate.device["gradients"] == size(adapters)
    assert estimate.device["parameters"] == size(adapters) + size(params)
    assert estimate.device["optimizer"] == size(optax.adam(1e-3).init(adapters))
    adapted = lslora.attach(case.objective.apply_fn, config)
    own = Objective(lambda a, x: adapted(params, a, x), Categorical())
    like = value_grad_and_factors(own, uncovered="ignore").factor_shapes(adapters, batch)
    assert estimate.device["factors"] == sum(
        x.size * x.dtype.itemsize for x in jax.tree.leaves(like)
    )
    quantised = case.plan.alone["nf4"]
    assert quantised.options == ("adapters", "nf4")
    names = "|".join(map(re.escape, adapters))
    table = find_layers(case.objective.apply_fn, params, batch[0])
    base = size(lslora.nf4.quantize(params, names, table=table))
    assert quantised.device["parameters"] == size(adapters) + base and base < size(params) / 4


def test_bfloat16_halves_what_follows_the_parameters_and_not_the_factors(case):
    now, half = case.plan.now.device, case.plan.alone["bf16"].device
    for row in ("parameters", "gradients"):
        assert half[row] * 2 == now[row]
    tx_state = optax.adam(1e-3).init(jax.tree.map(lambda x: x.astype("bfloat16"), case.filled[0]))
    assert half["optimizer"] == size(tx_state)
    assert half["factors"] == now["factors"]


@pytest.mark.exhaustive
def test_remat_has_the_activations_of_the_program_with_checkpoints():
    case, scan = decoder(), jax.lax.scan

    def rematted(params, inputs):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax.lax, "scan", lambda f, *rest: scan(jax.checkpoint(f), *rest))
            return case.objective.apply_fn(params, inputs)

    def planned(apply_fn):
        objective = dataclasses.replace(case.objective, apply_fn=apply_fn)
        shapes = (case.params, case.batch)
        return plan_memory(objective, *shapes, device_bytes=PLENTY, options=("remat",))

    plan, already = planned(case.objective.apply_fn), planned(rematted)
    before, after = plan.now.device["activations"], plan.alone["remat"].device["activations"]
    assert after < 0.7 * before
    assert already.now.device["activations"] == pytest.approx(after, rel=WITHIN)
    assert "rematted already" in already.unavailable["remat"]


@pytest.mark.slow
def test_what_recomputation_does_not_lower_is_not_called_activations():
    def planned(tokens):
        layout = DecoderLayout(3, 64, 2, 64, 40, fused=True)
        training = shaped(layout, examples=2, tokens=tokens, dtype=jnp.bfloat16)
        plan = plan_memory(
            *training,
            optimizer=optax.sgd(1e-2),
            device_bytes=PLENTY,
            curvature=False,
            compiled="none",
            accumulation_steps=4,
            options=("remat",),
            compiler="h100",
        )
        return plan.now, plan.alone["remat"]

    now, remat = planned(tokens=2)  # the peak is in the update: sums in float32
    assert now.device["update"] > now.device["activations"] > remat.device["activations"]
    assert now.device["update"] == remat.device["update"]
    assert now.device_total == remat.device_total
    now, remat = planned(tokens=128)
    assert now.device["update"] == 0 and remat.device_total < now.device_total
    assert remat.device["activations"] < now.device["activations"]


@pytest.mark.exhaustive
def test_half_precision_takes_fewer_bytes_where_it_is_not_computed_in_float32_as_on_a_cpu():
    half_of_now = {}
    for target in ("h100", "cpu"):
        asked = {"device_bytes": PLENTY, "options": ("bf16",), "compiler": target}
        plan = plan_memory(*decoder().objects3, **asked)
        now, half = (x.device["activations"] for x in (plan.now, plan.alone["bf16"]))
        half_of_now[target] = half / now
    assert 0.45 < half_of_now["h100"] < 0.85  # softmax and cross entropy stay in float32
    assert half_of_now["cpu"] == pytest.approx(1, abs=0.05)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["exact", "pi"])
def test_kfac_has_its_average_and_bases_in_their_own_rows(case, mode):
    tx = kfac(1e-3, like=case.like, damping_mode=mode)
    plan = plan_memory(
        *(case.objective, case.params, case.batch),
        optimizer=tx,
        device_bytes=PLENTY,
        options=("budget",),
    )
    state, device = tx.init(case.filled[0]), plan.now.device
    assert device["factors"] == size(state.average) + size(case.out.factors)
    assert device["bases"] == size(state.stacked_bases)
    assert device["optimizer"] + size((state.average, state.stacked_bases)) == size(state)
    assert "with host only" in plan.unavailable["budget"]


def test_without_curvature_there_are_no_rows_of_it():
    case = mlp()
    plan = plan_memory(
        *(case.objective, case.params, case.batch),
        device_bytes=PLENTY,
        curvature=False,
        options=("host", "budget"),
    )
    assert set(plan.now.device) == {
        "parameters",
        "gradients",
        "optimizer",
        "accumulation",
        "batch",
        "state",
        "activations",
        "update",
        "conv scratch",
    }
    assert plan.unavailable == dict.fromkeys(("host", "budget"), "no factors are gathered")


def test_values_alone_take_the_place_of_bases_in_an_analysis(case):
    plan = plan_memory(
        *(case.objective, case.params, case.batch), device_bytes=PLENTY, vectors=False, options=()
    )
    assert plan.now.device["bases"] == size(eigendecompose(case.out.factors, vectors=False))


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize(
    "tx",
    [
        multi_steps(optax.sgd(1e-2), 2),
        optax.MultiSteps(optax.sgd(1e-2), 2).gradient_transformation(),
    ],
    ids=["jk", "optax"],
)
def test_an_optimizer_that_accumulates_is_not_accumulated_again(tx):
    case = mlp()
    plan = plan_memory(
        *(case.objective, case.params, case.batch),
        optimizer=tx,
        device_bytes=PLENTY,
        options=("accumulation", "accumulator"),
    )
    assert "one micro-batch" in plan.unavailable["accumulation"]
    assert "one micro-batch" in plan.unavailable["accumulator"]
    accumulators = plan.now.device["accumulation"]
    assert accumulators == size(case.filled[0]) + 4 * isinstance(tx.init({}), MultiStepsState)
    with pytest.raises(ValueError, match="accumulation_steps=2: the optimizer accumulates"):
        plan_memory(*case.objects3, optimizer=tx, device_bytes=PLENTY, accumulation_steps=2)


@pytest.mark.slow
def test_a_scalar_loss_is_planned_and_has_no_adapters():
    case = mlp()
    plan = plan_memory(
        lambda params, batch: case.objective(params, batch),
        case.params,
        case.batch,
        device_bytes=PLENTY,
        options=("adapters", "remat"),
    )
    leaves = jax.tree.leaves(case.like)
    assert plan.now.device["factors"] == sum(x.size * x.dtype.itemsize for x in leaves)
    assert "scalar loss" in plan.unavailable["adapters"]


@pytest.mark.slow
def test_what_an_objective_returns_beside_its_value_is_planned_too():
    case = mlp()
    plain = lambda params, batch: case.objective(params, batch)
    both = lambda params, batch: (case.objective(params, batch), {"seen": jnp.ones(())})
    plan, with_both = (
        plan_memory(f, case.params, case.batch, device_bytes=PLENTY, options=(), has_aux=f is both)
        for f in (plain, both)
    )
    assert plan.now.device == with_both.now.device


def test_a_program_that_does_not_run_in_bfloat16_says_why():
    case = mlp()
    apply_fn = case.objective.apply_fn

    def mixed(params, x):
        return apply_fn(params, x) + jnp.zeros((), jnp.float32) * params[-1]["bias"]

    plan = plan_memory(
        Objective(mixed, Categorical()),
        case.params,
        case.batch,
        device_bytes=PLENTY,
        options=("bf16",),
        uncovered="ignore",
    )
    assert "no available implicit dtype promotion" in plan.unavailable["bf16"]


def test_the_table_and_the_record_hold_every_row_and_option(case):
    text, record = str(case.plan), json.loads(json.dumps(case.plan.to_dict(), allow_nan=False))
    assert max(map(len, text.splitlines())) <= 120
    head, *rows = text.partition("\n\n")[0].splitlines()
    assert head.split()[3:] == ["now", *(OPTIONS[name].title for name in case.plan.alone)]
    for row in case.plan.now.device:
        shown = any(line.strip().startswith(row) for line in rows)
        assert shown == any(x.device.get(row) for x in (case.plan.now, *case.plan.alone.values()))
    assert "it fits as it is" in text
    assert record["now"]["device_total"] == case.plan.now.device_total
    assert set(record["alone"]) | set(record["unavailable"]) == set(OPTION_NAMES)


def test_a_table_of_many_options_has_blocks_of_columns_and_whole_names():
    head = ["on the device", *(f"option {i}" for i in range(14))]
    rows = [["averages in float64", *["59.5G"] * 14], ["on the host"]]
    lines = _in_blocks([head, *rows])
    assert len(lines) == 6 and max(map(len, lines)) <= 120
    assert [line.split("  ")[0] for line in lines].count("averages in float64") == 2
    assert sum(line.count("59.5G") for line in lines) == 14 and not any("…" in x for x in lines)
    assert len(_in_blocks([row[:5] for row in (head, *rows)])) == 3


@pytest.mark.parametrize("device_bytes", [0, -1.0, float("nan"), float("inf")])
def test_a_device_without_bytes_is_refused(device_bytes):
    with pytest.raises(ValueError, match="device_bytes=.*positive number of bytes"):
        plan_memory(lambda p, b: p, 1.0, 1.0, device_bytes=device_bytes)


def test_an_unknown_option_and_an_uncovered_parameter_are_named():
    with pytest.raises(ValueError, match="options='fp8': expected one of 'accumulation'"):
        plan_memory(lambda p, b: p, 1.0, 1.0, device_bytes=1.0, options=("fp8",))
    with pytest.raises(UncoveredParameterError):
        plan_memory(
            Objective(lambda p, x: jnp.arctan2(x @ jnp.ones((3, 2)), p["w"].sum(0)), Categorical()),
            {"w": jax.ShapeDtypeStruct((3, 2), jnp.float32)},
            (jax.ShapeDtypeStruct((4, 3), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.int32)),
            device_bytes=1e9,
        )


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("tx", [optax.sgd(0.1), optax.adam(1e-3)])
def test_what_just_fits_as_it_is_needs_no_option(tx):
    params = {name: jax.ShapeDtypeStruct((64, 64), jnp.float32) for name in "abc"}
    batch = (jax.ShapeDtypeStruct((32, 64), jnp.float32),) * 2

    def apply_fn(params, x):
        for kernel in params.values():
            x = jnp.tanh(x @ kernel)
        return x

    def plan(device_bytes):
        objective = Objective(apply_fn, Gaussian())
        return plan_memory(
            objective, params, batch, optimizer=tx, device_bytes=device_bytes, headroom=0.0,
            options=("bf16", "accumulation"),
        )  # fmt: skip

    smallest = plan(plan(1e12).now.device_total).smallest
    assert smallest is not None and smallest.options == ()


@pytest.mark.slow
def test_an_update_that_cannot_be_traced_is_said():
    params = {"kernel": jax.ShapeDtypeStruct((4, 2), jnp.float32)}
    batch = (jax.ShapeDtypeStruct((3, 4), jnp.float32), jax.ShapeDtypeStruct((3, 2), jnp.float32))
    objective = Objective(lambda params, x: x @ params["kernel"], Gaussian())
    found = plan_memory(objective, params, batch, optimizer=optax.lbfgs(), device_bytes=1e9)
    assert "update are not counted: TypeError" in " ".join(str(found).split())


@pytest.mark.exhaustive
def test_by_default_the_training_as_it_stands_and_the_chosen_set_are_compiled():
    objective, params, batch = decoder().objects3
    asked = {"optimizer": optax.adam(1e-3), "headroom": 0.0, "options": ("remat", "host")}
    now = plan_by_default(objective, params, batch, device_bytes=PLENTY, **asked).now
    plan = plan_by_default(objective, params, batch, device_bytes=now.device_total - 1, **asked)
    assert plan.now.compiled and plan.now == now and plan.smallest.compiled
    (chosen,) = plan.smallest.options
    assert plan.alone[chosen] == plan.smallest
    (other,) = {"remat", "host"} - {chosen}
    assert not plan.alone[other].compiled
    rows = (line.split() for line in str(plan).partition("\n\n")[0].splitlines())
    (said,) = (cells for cells in rows if cells[0] == "compiled")
    assert sorted(said[1:]) == ["yes", "yes", f"±{plan.within:.0%}"]
    counted = plan_memory(objective, params, batch, device_bytes=PLENTY, **asked).now
    assert not counted.compiled and counted.device != now.device


@pytest.mark.slow
def test_a_compiler_that_fails_leaves_estimates_and_says_so(monkeypatch):
    def fail(*_, **__):
        raise CompilerError("compiling for this CPU: no result after 1 s; raise timeout=")

    monkeypatch.setattr(Temporaries, "_ask", fail)
    plan = plan_by_default(*mlp().objects3, device_bytes=PLENTY, options=())
    assert not plan.now.compiled and not plan.smallest.compiled
    assert "not compiled: compiling for this CPU: no result after 1 s" in str(plan)


@pytest.mark.slow
def test_a_compiler_that_is_not_installed_is_needed_only_where_it_is_asked(monkeypatch):
    absent = dataclasses.replace(TARGETS["h100"], module="no_such_plugins.xla_cuda")
    monkeypatch.setitem(TARGETS, "h100", absent)
    asked = {"device_bytes": PLENTY, "options": (), "compiler": "h100"}
    assert "H100" in plan_memory(*mlp().objects3, **asked).compiled_for
    with pytest.raises(CompilerNotFoundError, match="pip install"):
        plan_by_default(*mlp().objects3, **asked)


@pytest.mark.exhaustive
def test_an_optimizer_of_the_base_leaves_adapters_out():
    params = {"up": jnp.ones((32, 48)), "down": jnp.ones((48, 10))}
    batch = jnp.ones((64, 32)), jnp.zeros(64, jnp.int32)
    objective = Objective(lambda p, x: jnp.tanh(x @ p["up"]) @ p["down"], Categorical())
    like = value_grad_and_factors(objective).factor_shapes(params, batch)
    found = plan_memory(
        objective, params, batch, optimizer=kfac(0.1, like=like), device_bytes="1GB"
    )
    assert "optimizer was made for the parameters of the base" in found.unavailable["adapters"]
    assert "Error:" not in str(found)  # reasons are sentences


def test_frozen_parameters_as_long_as_the_batch_are_not_divided_with_it():
    def loss(params, batch):
        inputs, frozen = batch
        return jnp.mean(inputs @ params["kernel"] + frozen["table"].mean(0))

    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    plan = plan_by_default(
        *(loss, {"kernel": shape}, (shape, {"table": shape})),
        frozen={"table": shape},
        device_bytes="1GB",
        curvature=False,
        compiled="none",
        options=("accumulation",),
    )
    assert "frozen" in plan.unavailable["accumulation"] and not plan.alone


@pytest.mark.slow
def test_a_budget_holds_the_factors_of_the_largest_pass_which_may_be_a_later_one():
    def apply_fn(params, x):
        for kernel in params:
            x = jnp.tanh(x @ kernel)
        return x

    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    params = [shape(64, 16), shape(16, 16), shape(16, 700), shape(700, 16)]
    plan = plan_by_default(
        *(Objective(apply_fn, Gaussian()), params, (shape(8, 64), shape(8, 16))),
        device_bytes="1GB",
        max_factor_bytes=3_300_000,
        compiled="none",
        options=("budget",),
    )
    # The first pass holds what is in front of the wide layer, 21504 bytes.
    assert plan.alone["budget"].device["factors"] >= 4 * 700**2


def test_fewer_bits_are_not_widened_to_bfloat16():
    params = {
        "small": jax.ShapeDtypeStruct((64, 64), jnp.float8_e4m3fn),
        "wide": jax.ShapeDtypeStruct((64, 64), jnp.float32),
    }

    def loss(params, batch):
        kernels = (x.astype(jnp.float32) for x in params.values())
        return jnp.mean(sum(batch.astype(jnp.float32) @ kernel for kernel in kernels))

    plan = plan_by_default(
        *(loss, params, jax.ShapeDtypeStruct((8, 64), jnp.float32)),
        device_bytes="1GB",
        curvature=False,
        compiled="none",
        options=("bf16",),
    )
    assert plan.alone["bf16"].device["parameters"] == 64 * 64 * (1 + 2)
