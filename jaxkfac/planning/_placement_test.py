"""What cannot be planned as fully sharded is refused, and shardings divide what they can."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkfac.factors import Gaussian, Objective
from jaxkfac.memory import divided_shardings
from jaxkfac.planning import compiled_bytes, plan_memory
from jaxkfac.planning._compilers import collective_bytes
from jaxkfac.planning._shapes import Placement

MESH = AbstractMesh((4,), ("data",))
TWO_AXES = AbstractMesh((2, 2), ("data", "model"))


def of(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.mark.parametrize(
    ("shape", "of_device"),
    [
        ((8, 12), (8, 3)),
        ((8, 6), (2, 6)),
        ((5, 6), (5, 6)),
        ((8,), (8,)),
        ((), ()),
        ((0, 4), (0, 1)),
    ],
)
def test_the_last_axis_that_devices_divide_is_split(shape, of_device):
    assert Placement(MESH).shardings(of(*shape)).shard_shape(shape) == of_device
    assert Placement(MESH).nbytes([of(*shape)] * 2) == 8 * of(*of_device).size


def planned(**how):
    objective = Objective(lambda p, x: x @ p["w"], Gaussian())
    shapes = objective, {"w": of(8, 4)}, (of(2, 8), of(2, 4))
    return plan_memory(*shapes, device_bytes="1GB", fully_sharded=True, **how)


def test_what_cannot_be_sharded_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match="more than 1 device; pass devices="):
        planned()
    with pytest.raises(ValueError, match="the compiler's choice; take compiled="):
        planned(devices=2, compiled="none")
    with jax.sharding.use_abstract_mesh(MESH), pytest.raises(ValueError, match="has 4"):
        planned(devices=2)
    with jax.sharding.use_abstract_mesh(TWO_AXES), pytest.raises(ValueError, match="over one axis"):
        planned()
    explicit = AbstractMesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.sharding.use_abstract_mesh(explicit), pytest.raises(ValueError, match="AxisType.Auto"):
        planned()
    sharded = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(MESH, P("data")))
    with pytest.raises(ValueError, match="some arguments lie on a mesh and others on none"):
        compiled_bytes(jnp.add, sharded, of(8), target="cpu")


def test_a_number_beside_the_batch_is_whole_on_every_device():
    found = Placement(MESH).batch((of(2, 8), of()))
    assert [x.shape for x in found] == [(8, 8), ()]
    assert found[1].sharding.is_fully_replicated


def test_bytes_of_collectives_count_every_dtype():
    text = """ENTRY %main (x: c64[8]) -> c64[64] {
  %a = c64[64]{0} all-gather(%x), dimensions={0}
  %b = (f8e4m3fn[16]{0}, s16[4]{0}) all-reduce(%y, %z), to_apply=%sum
"""
    assert collective_bytes(text) == {"all-reduce": 16 + 8, "all-gather": 512}


@pytest.mark.slow
def test_options_that_are_not_planned_sharded_are_named_and_the_others_are_estimated():
    plan = planned(devices=2, options=("accumulation", "host", "adapters", "bf16"))
    assert plan.unavailable.keys() == {"host", "adapters"}
    assert plan.alone.keys() == {"accumulation", "bf16"}
    assert not plan.alone["bf16"].compiled and plan.alone["bf16"].exchanged == {}
    assert plan.now.exchanged["all-reduce"] > 0 and plan.to_dict()["fully_sharded"]
    assert plan.to_dict()["alone"]["bf16"]["exchanged_total"] is None


@pytest.mark.slow
def test_a_child_process_says_of_a_mesh_what_a_direct_compilation_says():
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    there = divided_shardings([of(6, 8), of(10, 6)], mesh, "data")
    args = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
        for x, s in zip([of(6, 8), of(10, 6)], there, strict=True)
    ]
    run = lambda w, x: (jnp.tanh(x @ w), (x @ w).sum())
    places = divided_shardings(jax.eval_shape(run, of(6, 8), of(10, 6)), mesh, "data")
    direct = jax.jit(run, out_shardings=places).lower(*args).compile().memory_analysis()
    told = compiled_bytes(run, *args, target="cpu", out_shardings=places)
    assert told.arguments == direct.argument_size_in_bytes == 4 * (6 * 8 + 10 * 6) // 2
    assert told.outputs == direct.output_size_in_bytes
    assert told.temporaries == direct.temp_size_in_bytes and told.collectives
