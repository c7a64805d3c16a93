"""What cannot be read from codes is refused, by the parameter's name and what reads it."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jaxkfac._errors import UncoveredParameterError
from jaxkfac.interception import find_layers
from jaxkfac.lslora import Config, attach, init, nf4

PARAMS = {
    "s": jax.random.normal(jax.random.key(0), (3, 4, 4)),
    "v": jax.random.normal(jax.random.key(1), (4, 4)),
}
X = jax.random.normal(jax.random.key(9), (3, 2, 4))  # examples, positions, features


def layer(x, w):
    return jnp.tanh(x @ w)


def looped(block, x, xs):
    return jax.lax.scan(lambda c, w: (block(c, w), None), x, xs)[0]


REFUSED = {
    "penalty": (lambda p, x: layer(x, p["s"][0]).sum() + jnp.square(p["s"]).sum(), "reduce_sum"),
    "bias": (lambda p, x: x + p["s"][0][:2], "add"),
    "scale": (lambda p, x: x * p["s"][0][:2], "mul"),
    "embedding": (lambda p, x: p["s"][0][(x[..., 0] > 0).astype(int)] + x, "gather"),
    "sum of parameters": (lambda p, x: x @ (p["s"][0] + p["v"]), "added to.*'v'"),
    "stop_gradient": (lambda p, x: x @ jax.lax.stop_gradient(p["s"][0]), "stop_gradient"),
    "result": (lambda p, x: (x @ p["s"][0], p["s"]), "the caller"),
    "custom derivative": (
        lambda p, x: jax.nn.relu(p["s"][0]).sum() * x,
        "reduce_sum",
    ),
    "while": (
        lambda p, x: jax.lax.fori_loop(0, x.shape[0] + jnp.int32(0), lambda _, x: x @ p["s"][0], x),
        "while",
    ),
    "stack moved before a scan": (
        lambda p, x: looped(lambda x, w: x @ w.T @ w, x, p["s"].transpose(1, 0, 2)),
        "`transpose` .3, 4, 4. -> .4, 3, 4. .*does not commute with slicing",
    ),
    "stack moved before an index": (
        lambda p, x: layer(x, p["s"].transpose(1, 2, 0)[:, :, 1]),
        "does not commute with slicing",
    ),
    "split over a mesh": (
        lambda p, x: jax.shard_map(
            lambda x, w: jax.lax.all_gather(x @ w, "i", axis=1, tiled=True),
            mesh=jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,)),
            in_specs=(PartitionSpec(), PartitionSpec(None, "i")),
            out_specs=PartitionSpec(),
            check_vma=False,
        )(x.reshape(6, 4), p["s"][0]),
        "shard_map",
    ),
}  # fmt: skip


@pytest.mark.default(2, slow=3)
@pytest.mark.parametrize("name", REFUSED)
def test_any_other_reading_is_refused_by_name(name):
    fn, reason = REFUSED[name]
    params4 = nf4.quantize(PARAMS, "s", stack=1, block=2)
    fn(PARAMS, X)  # a program that runs
    with pytest.raises(UncoveredParameterError, match=f"'s' is held as NF4.*({reason})"):
        attach(fn, Config(target="s"))(params4, {}, X)


def test_a_stack_that_was_quantised_as_one_kernel_is_refused_in_a_scan():
    table = find_layers(lambda p, x: jnp.einsum("nsd,hdk->nshk", x, p["s"]), PARAMS, X)
    params4 = nf4.quantize(PARAMS, "s", table=table, block=2)
    with pytest.raises(UncoveredParameterError, match="without a stacked axis"):
        attach(lambda p, x: looped(layer, x, p["s"]), Config(target="s"))(params4, {}, X)


def test_a_quantised_parameter_cannot_be_trained_whole():
    fn = lambda p, x: x @ p["s"][0] @ p["v"]
    params4 = nf4.quantize(PARAMS, "s", stack=1, block=2)
    config = Config(rank=2, target="v", modules_to_save="s")
    with pytest.raises(ValueError, match="s, which are quantised and cannot be trained"):
        init(fn, config, params4, X, key=jax.random.key(0))
    with pytest.raises(ValueError, match="'s', which is quantised"):
        attach(fn, config)(params4, {"s": PARAMS["s"]}, X)
