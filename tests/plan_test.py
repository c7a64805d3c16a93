"""Totals of the plan, beside those with what XLA allocates for a CPU.

For an H100 the record is ``benchmarks/results/plan.md``.
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

import jaxkfac as jk
from benchmarks.accelerators._programs import SIZES, Steps
from benchmarks.accelerators._record import RECORD
from benchmarks.plan import planned_bytes, trainings
from jaxkfac.memory import divided_shardings
from jaxkfac.planning import plan_memory, program_work
from jaxkfac.planning._temporaries import within

# Adam adds a Python number to an integer.
pytestmark = pytest.mark.standard_promotion

TRAININGS = {name: functools.cache(build) for name, build in trainings(scale=2).items()}
QUICK = ("scanned, rematted", "dense", "K-FAC in graph")
PLAN_RECORD = RECORD.with_name("plan.json")
SHARDED = [name for name in TRAININGS if "sharded" in name]
BOTH = "encoder-decoder, NF4"  # each of which is a training of its own; half a minute


def names(quick, others=pytest.mark.slow):
    last = pytest.mark.exhaustive
    marks = {x: [] if x in quick else [last if x == BOTH else others] for x in TRAININGS}
    return [pytest.param(x, marks=found) for x, found in marks.items()]


@pytest.mark.default(0)
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", names(QUICK, pytest.mark.exhaustive))
def test_a_total_is_what_the_trainings_own_programs_allocate(name):
    training = TRAININGS[name]()
    planned = planned_bytes(training, training.estimate(compiled="all", compiler="cpu"))
    assert planned == pytest.approx(training.compiled("cpu"), rel=0.05)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SHARDED)
def test_eight_devices_with_a_part_of_the_parameters_exchange_what_is_planned(name):
    """As compiled for them in a process of their own."""
    training = TRAININGS[name]()
    found = training.estimate(compiled="all", compiler="cpu").exchanged
    assert found == training.collectives("cpu") and found["all-gather"] > 0


@pytest.mark.exhaustive
def test_two_devices_with_a_part_of_the_parameters_hold_and_exchange_what_is_planned():
    """Arrays that are there, and the program that takes them."""
    objective, params, batch = TRAININGS["dense"]().problem
    tx, mesh = optax.adam(1e-3), jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    state = jax.eval_shape(tx.init, params)

    def step(params, state, batch):
        value, grads = jax.value_and_grad(objective)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    def filled(tree, shardings):
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)
        return jax.device_put(zeros, shardings)

    held = filled((params, state), divided_shardings((params, state), mesh, "data"))
    split = filled(batch, NamedSharding(mesh, PartitionSpec("data")))
    half = jax.tree.map(lambda x: jax.ShapeDtypeStruct((len(x) // 2, *x.shape[1:]), x.dtype), split)
    with jax.set_mesh(mesh):
        how = {"fully_sharded": True, "curvature": False, "compiled": "all", "options": ()}
        plan = plan_memory(objective, params, half, optimizer=tx, device_bytes="1TB", **how)
        results = divided_shardings(jax.eval_shape(step, params, state, batch), mesh, "data")
        run = jax.jit(step, donate_argnums=(0, 1), out_shardings=results)
        compiled = run.lower(*held, split).compile()
    own = [s.data for x in jax.tree.leaves(held) for s in x.addressable_shards[:1]]
    rows, memory = plan.now.device, compiled.memory_analysis()
    assert rows["parameters"] + rows["optimizer"] == sum(x.nbytes for x in own)
    allocated = memory.temp_size_in_bytes + memory.argument_size_in_bytes
    allocated += memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert planned_bytes(TRAININGS["dense"](), plan.now) == pytest.approx(allocated, rel=0.01)
    sent = program_work(compiled.as_text())["collectives"]
    assert plan.now.exchanged == {kind: found["bytes"] for kind, found in sent.items()}
    assert "between 2 sharded devices" in str(plan)


# What each training allocates is compiled above; what sharded ones gather is the compiler's choice.
@pytest.mark.default(0, slow=2)
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name", [x for x in names(QUICK[:1]) if "fully sharded" not in x.values[0]]
)
def test_a_total_from_equations_is_within_what_the_table_says(name):
    training = TRAININGS[name]()
    counted, compiled = (
        planned_bytes(training, training.estimate(compiled=sets)) for sets in ("none", "all")
    )
    assert counted == pytest.approx(compiled, rel=within("cpu", calibrated=False))


@pytest.mark.parametrize("target, platform", [("cpu", "cpu"), ("h100", "cuda")])
@pytest.mark.parametrize("column, calibrated", [("counted", False), ("calibrated", True)])
def test_the_margins_said_are_the_largest_of_the_record(target, platform, column, calibrated):
    record = json.loads(PLAN_RECORD.read_text())[target]
    furthest = max(abs(1 - row[column]) for row in record.values() if column in row)
    assert furthest <= within(platform, calibrated=calibrated) <= furthest + 0.02


def placed(tree, mesh, *axes):
    there = NamedSharding(mesh, PartitionSpec(*axes))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), tree)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axis"),
    [("dense", None), pytest.param("convolution", "data", marks=pytest.mark.exhaustive)],
)
def test_devices_exchange_what_the_compiled_program_does(name, axis):
    """Gradients and statistics are summed over devices once, and so are decompositions."""
    objective, params, batch = TRAININGS[name]().problem
    stats = jk.value_grad_and_factors(objective)
    like = stats.factor_shapes(params, batch)
    tx = jk.kfac(0.1, like=like, damping=1e-3, distribute=axis)

    def step(params, state, batch):
        value, grads, factors = stats(params, batch)
        updates, state = tx.update(grads, state, params, factors=factors)
        return value, optax.apply_updates(params, updates), state

    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    state = jax.eval_shape(tx.init, params)
    with jax.set_mesh(mesh):
        plan = plan_memory(
            *(objective, params, batch),
            optimizer=tx,
            device_bytes=1e15,
            options=(),
            compiled="none",
        )
        shapes = placed((params, state), mesh), placed(batch, mesh, "data")
        text = jax.jit(step).lower(*shapes[0], shapes[1]).compile().as_text()
    sent = sum(kind["bytes"] for kind in program_work(text)["collectives"].values())
    assert plan.devices == 2
    assert plan.now.exchanged_total == sent
    rows = {"gradients", "factors"} | ({"in the step"} if axis else set())
    assert plan.now.exchanged.keys() == rows
    assert "between 2 devices" in str(plan)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gradient", "K-FAC step", "K-FAC step, divided"])
def test_eight_h100s_exchange_what_the_plan_says(name, dtype):
    """As compiled for them: the rows of the record."""
    steps, mesh = Steps(SIZES["small"], jnp.dtype(dtype)), AbstractMesh((8,), ("data",))
    gathered, axis = name != "gradient", "data" if "divided" in name else None
    tx = jk.kfac(0.1, like=steps.like, damping=1e-3, distribute=axis) if gathered else None
    with jax.sharding.use_abstract_mesh(mesh):
        plan = plan_memory(
            *(steps.objective, steps.params, steps.batch),
            optimizer=tx,
            device_bytes=1e15,
            options=(),
            curvature=gathered,
            compiled="none",
            compiler="h100",
        )
    rows = json.loads(RECORD.read_text())["rows"]
    sent = rows[f"h100/data parallel/small/{dtype}/{name}"]["collectives"].values()
    assert plan.now.exchanged_total == sum(kind["bytes"] for kind in sent)
    assert ("in the step" in plan.now.exchanged) == (axis is not None)


@pytest.mark.slow
def test_each_micro_batch_is_summed_over_devices_and_one_device_exchanges_nothing():
    objective, params, batch = TRAININGS["dense"]().problem
    plan = {
        (devices, steps): plan_memory(
            *(objective, params, batch),
            device_bytes=1e15,
            options=(),
            compiled="none",
            curvature=False,
            devices=devices,
            accumulation_steps=steps,
        ).now
        for devices, steps in ((1, 1), (8, 1), (8, 4))
    }
    gradients = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    assert plan[1, 1].exchanged == {}
    assert plan[8, 1].exchanged == {"gradients": gradients + 4}
    assert plan[8, 4].exchanged_total == 4 * plan[8, 1].exchanged_total
    assert dataclasses.replace(plan[8, 1], exchanged={}) == plan[1, 1]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("named", [False, True])
def test_a_device_of_a_mesh_has_its_batch_whole_unless_the_objective_divides_it(monkeypatch, named):
    monkeypatch.setattr("jaxkfac.kinds._patches.AT_ONCE", 2**8)  # several runs of positions
    params = {"kernel": jnp.ones((3, 3, 4, 8)), "bias": jnp.ones(8)}
    batch = jnp.ones((16, 12, 12, 4)), jnp.ones((16, 12, 12, 8))

    def objective(params, batch):
        x, y = batch
        if named:
            x = jax.lax.with_sharding_constraint(x, PartitionSpec("data"))
        form = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "padding": "SAME"}
        found = jax.lax.conv_general_dilated(x, params["kernel"], (1, 1), **form)
        return ((found + params["bias"] - y) ** 2).mean()

    def plan():
        how = {"device_bytes": "1TB", "devices": 2, "options": (), "compiled": "all"}
        return plan_memory(objective, params, batch, optimizer=optax.sgd(0.1), **how).now

    with jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))):
        found = plan()
    if named:
        assert found.exchanged["gradients"] > 0
    else:
        assert found.device["activations"] == plan().device["activations"]
