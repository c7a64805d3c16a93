"""Programs that map a model over devices, or over members with parameters of their own."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxkfac as jk
from tests._oracle import oracle
from tests._programs import labels, mlp, mlp_params, normal
from tests._taps import PLAIN
from tests.zoo import Case, program

FAMILY = "Devices and members"


def batch():
    return normal(1, 4, 4), labels(2, 4)


def on_one_device(how):
    """The multi-layer perceptron, its examples split over the one device of a mesh."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    objective = jk.Objective(how(mesh), jk.Categorical())
    return Case(objective, mlp_params(), batch(), mlp)


@program("shard_map around the model, one device", family=FAMILY, checked="brute force")
def _shard_map():
    def how(mesh):
        specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
        return jax.shard_map(lambda p, x: mlp(p, x, PLAIN), mesh=mesh, **specs)

    return on_one_device(how)


@program("shard_map with a mean over the device inside", family=FAMILY, checked="brute force")
def _collective():
    """Inputs are centred by the mean of the batch, a sum over devices."""

    def how(mesh):
        def apply_fn(p, x):
            return mlp(p, x - jax.lax.pmean(x.mean(0), "data"), PLAIN)

        specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
        return jax.shard_map(apply_fn, mesh=mesh, **specs)

    x, y = batch()
    case = on_one_device(how)
    factors = oracle(mlp, case.params, (x - x.mean(0), y))
    return Case(case.objective, case.params, case.batch, factors=factors)


@program("pmap around the model, one device", family=FAMILY, checked="brute force")
def _pmap():
    def apply_fn(p, x):
        return jax.pmap(
            lambda p, x: mlp(p, x, PLAIN), in_axes=(None, 0), devices=jax.devices()[:1]
        )(p, x[None])[0]

    return Case(jk.Objective(apply_fn, jk.Categorical()), mlp_params(), batch(), mlp)


MEMBERS = 3


def members():
    """Parameters of three networks, stacked."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(mlp_params, range(MEMBERS)))


def twin(join):
    """The members of an ensemble one by one; ``join`` makes one output of theirs.

    The first layer of members with one input is one layer, whose outputs are those of all.
    """

    def model(p, x, tap):
        up, down = p["up"], p["down"]
        if x.ndim == 2:
            h = jnp.einsum("ni,mio->nmo", x, up["kernel"]) + up["bias"]
            h = tap.dense("up/kernel", x, h.reshape(len(x), -1), bias=True).reshape(h.shape)
        else:
            each = enumerate(zip(up["kernel"], up["bias"], strict=True))
            rows = [(i, x[:, i], x[:, i] @ w + b) for i, (w, b) in each]
            h = [tap.dense("up/kernel", x, y, at=(i,), bias=True) for i, x, y in rows]
            h = jnp.stack(h, 1)
        h = jnp.tanh(h)
        outputs = [
            tap.dense("down/kernel", h[:, i], h[:, i] @ w + b, at=(i,), bias=True)
            for i, (w, b) in enumerate(zip(down["kernel"], down["bias"], strict=True))
        ]
        return join(jnp.stack(outputs, 1))

    return model


@program("an ensemble under vmap, its logits averaged", family=FAMILY, checked="brute force")
def _averaged():
    def apply_fn(p, x):
        return jax.vmap(lambda p: mlp(p, x, PLAIN))(p).mean(0)

    model = twin(lambda y: y.mean(1))
    return Case(jk.Objective(apply_fn, jk.Categorical()), members(), batch(), model)


@program("an ensemble under vmap, each member on data of its own", family=FAMILY,
         checked="brute force")  # fmt: skip
def _apart():
    def apply_fn(p, x):
        return jax.vmap(lambda p, x: mlp(p, x, PLAIN), (0, 1), 1)(p, x)

    data = normal(1, 4, MEMBERS, 4), labels(2, 4, MEMBERS)
    return Case(jk.Objective(apply_fn, jk.Categorical()), members(), data, twin(lambda y: y))
