"""Few-shot models of the library, against brute force over episodes: an episode is an example."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxkfac as jk
from jaxkfac.models import (
    Conv4,
    CosineTransformer,
    CosineTransformerConfig,
    PrototypicalNetwork,
    ResNet,
)
from tests._checks import squares
from tests._convolutions import Convolution
from tests._oracle import oracle
from tests._programs import labels, normal
from tests._taps import PLAIN, Tap
from tests.zoo import Case, program

FAMILY = "Few-shot episodes"
BRUTE = "brute force over episodes, written out"
WAY, SHOT, QUERIES, WIDTH, HEADS, SIZE, HIDDEN = 2, 2, 3, 2, 2, 3, 4


def normalised(x, p, name, tap):
    """Batch normalisation over the images and places of each episode, (E, I, H, W, C)."""
    mean, var = x.mean((1, 2, 3), keepdims=True), x.var((1, 2, 3), keepdims=True)
    x = (x - mean) / jnp.sqrt(var + 1e-5)
    x = tap.scale(f"{name}/scale", x, x * p["scale"], shape=p["scale"].shape)
    return tap.lone_bias(f"{name}/bias", x + p["bias"], shape=p["bias"].shape)


def convolved(x, kernel, name, tap, stride=1):
    size, _, *channels = kernel.shape
    layer = Convolution(
        x.shape[2:4], (size, size), (stride, stride), ((size // 2,) * 2,) * 2,
        channels=tuple(channels), bias=False,
    )  # fmt: skip
    flat = x.reshape(-1, *x.shape[2:])
    y = layer(flat, kernel)
    y = y if tap is PLAIN else layer.tapped(tap, f"{name}/kernel", flat, y)
    return y.reshape(*x.shape[:2], *y.shape[1:])


def conv4(p, x, tap):
    for i in range(4):
        x = convolved(x, p["convolutions"][i]["kernel"], f"backbone/convolutions/{i}", tap)
        x = jax.nn.relu(normalised(x, p["norms"][i], f"backbone/norms/{i}", tap))
        x = jnp.maximum(x[:, :, ::2], x[:, :, 1::2])  # a pool of 2 x 2
        x = jnp.maximum(x[:, :, :, ::2], x[:, :, :, 1::2])
    return x.reshape(*x.shape[:2], -1)


def resnet(p, x, tap):
    x = convolved(x, p["stem"]["kernel"], "backbone/stem", tap)
    x = jax.nn.relu(normalised(x, p["stem_norm"], "backbone/stem_norm", tap))
    for i, block in p["blocks"].items():
        at, stride = f"backbone/blocks/{i}", 2 if i else 1
        y = convolved(x, block["first"]["kernel"], f"{at}/first", tap, stride)
        y = jax.nn.relu(normalised(y, block["first_norm"], f"{at}/first_norm", tap))
        y = convolved(y, block["second"]["kernel"], f"{at}/second", tap)
        y = normalised(y, block["second_norm"], f"{at}/second_norm", tap)
        if "shortcut" in block:
            x = convolved(x, block["shortcut"]["kernel"], f"{at}/shortcut", tap, stride)
            x = normalised(x, block["shortcut_norm"], f"{at}/shortcut_norm", tap)
        x = jax.nn.relu(x + y)
    return x.mean((2, 3))


def embedded(backbone, p, inputs, tap):
    support, query = inputs
    flat = support.reshape(support.shape[0], WAY * SHOT, *support.shape[3:])
    z = backbone(p["backbone"], jnp.concatenate([flat, query], 1), tap)
    return z[:, : WAY * SHOT].reshape(z.shape[0], WAY, SHOT, -1), z[:, WAY * SHOT :]


def prototypes(backbone):
    def model(p, inputs, tap: Tap):
        support, query = embedded(backbone, p, inputs, tap)
        return -((query[:, :, None] - support.mean(2)[:, None]) ** 2).sum(-1)

    return model


def cosine(p, inputs, tap: Tap):
    support, query = embedded(conv4, p, inputs, tap)

    def norm(name, x, q):
        x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
        x = tap.scale(f"{name}/scale", x, x * q["scale"], shape=q["scale"].shape)
        return tap.lone_bias(f"{name}/bias", x + q["bias"], shape=q["bias"].shape)

    def dense(name, x, q):
        y = x @ q["kernel"] + q.get("bias", 0.0)
        return tap.dense(f"{name}/kernel", x, y, bias="bias" in q)

    unit = lambda x: x / jnp.sqrt((x * x).sum(-1, keepdims=True))
    weights = jax.nn.softmax(p["support_weights"], axis=1)
    x = jnp.einsum("enkd,nk->end", support, weights)[:, None]
    query, at = query[:, :, None], p["attention"]
    c, q = (
        dense("attention/input", norm("attention/norm", rows, at["norm"]), at["input"]).reshape(
            *rows.shape[:3], HEADS, SIZE
        )
        for rows in (x, query)
    )
    mixed = (unit(c) * unit(q)).sum(-1, keepdims=True) * q
    x = x + dense("attention/output", mixed.reshape(*mixed.shape[:3], -1), at["output"])
    hidden = jax.nn.gelu(dense("up", norm("norm", x, p["norm"]), p["up"]), approximate=False)
    x = x + dense("down", hidden, p["down"])
    x = unit(dense("head_input", norm("head_norm", x, p["head_norm"]), p["head_input"]))
    direction = p["head"]["direction"]
    y = x @ (direction / jnp.sqrt((direction**2).sum()) * p["head"]["norm"])
    return 2 * tap.dense("head/direction@effective", x, y)[..., 0]


def case(build, twin, side, computed=()):
    apply_fn, params = jk.from_nnx(build(nnx.Rngs(0)), mutable=nnx.BatchStat)
    draw = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(x + 0.3 * draw.normal(size=x.shape)), params)
    state = jax.tree.map(lambda x: x.astype(float), apply_fn.state)
    support = normal(1, 2, WAY, SHOT, side, side, 1, scale=1.0)
    query = normal(2, 2, QUERIES, side, side, 1, scale=1.0)
    batch = ((support, query), labels(3, 2, QUERIES, classes=WAY))
    objective = jk.Objective(apply_fn, jk.Categorical())
    factors = oracle(twin, params, batch)
    if computed:
        flat = lambda tree: {"/".join(p): _at(tree, p) for p in computed}
        own = lambda p, b: objective(_with(params, p), b, state=state)[0]
        factors |= squares(own, flat(params), batch, flat(params))
    return Case(objective, params, batch, factors=factors, call={"state": state})


def _at(tree, path):
    for key in path:
        tree = tree[key]
    return tree


def _with(tree, leaves):
    """The parameters with some of them replaced, by path."""
    tree = dict(tree)
    for path, leaf in leaves.items():
        first, _, rest = path.partition("/")
        tree[first] = _with(tree[first], {rest: leaf}) if rest else leaf
    return tree


@program(
    "prototypes on Conv-4, with batch statistics for each episode", family=FAMILY, checked=BRUTE
)
def _prototypes():
    build = lambda rngs: PrototypicalNetwork(Conv4(16, width=WIDTH, rngs=rngs))
    return case(build, prototypes(conv4), 16)


@program("prototypes on ResNet-10, likewise", family=FAMILY, checked=BRUTE)
def _residual():
    build = lambda rngs: PrototypicalNetwork(ResNet(10, 1, width=WIDTH, stem="small", rngs=rngs))
    return case(build, prototypes(resnet), 6)


@program("few-shot cosine transformer: learned support weights, weight norm", family=FAMILY,
         checked=f"{BRUTE}; squares of each episode's gradient")  # fmt: skip
def _cosine():
    config = CosineTransformerConfig(WAY, SHOT, num_heads=HEADS, head_size=SIZE, hidden=HIDDEN)
    # Four features: of two, a layer norm leaves signs.
    build = lambda rngs: CosineTransformer(Conv4(16, width=4, rngs=rngs), config, rngs=rngs)
    computed = (("support_weights",), ("head", "direction"), ("head", "norm"))
    return case(build, cosine, 16, computed)
