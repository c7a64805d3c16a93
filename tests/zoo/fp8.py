"""Dense layers in eight-bit floating point, by Flax's own operations."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import jaxkfac as jk
from tests._oracle import Block
from tests._programs import labels, normal, tree
from tests.zoo import Case, program

FAMILY = "Branches, batch statistics, custom derivatives"
OVERWRITTEN = "_overwrite_with_gradient"  # Flax's collection of scales and histories
ROWS = 4  # a power of two: a mean over them moves no mantissa, so rounding is as it is for one


def network(operation, last=True):
    """Two dense layers, the second one's product in eight bits if ``last``."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            def dense(size, name, op):
                return nn.Dense(size, param_dtype=jnp.float64, name=name, dot_general_cls=op)

            x = jnp.tanh(dense(5, "up", operation)(x))
            return dense(3, "down", operation if last else None)(x)

    return Net()


def rounded(x, dtype):
    """In eight bits, by a scale of one: that of a history in which nothing is."""
    return np.asarray(jnp.asarray(x).astype(dtype).astype(jnp.float64))


def by_hand(params, x, y, seen):
    """Blocks of each layer; ``seen(g)`` are the cotangents that a kernel's product sees."""
    low = lambda g: rounded(g, jnp.float8_e5m2)
    up, down = (rounded(params[name]["kernel"], jnp.float8_e4m3fn) for name in ("up", "down"))
    x = rounded(x, jnp.float8_e4m3fn)
    hidden = np.tanh(x @ up + np.asarray(params["up"]["bias"]))
    h = rounded(hidden, jnp.float8_e4m3fn)
    logits = h @ down + np.asarray(params["down"]["bias"])
    score = np.asarray(jax.nn.softmax(logits) - jax.nn.one_hot(y, 3)) / ROWS
    back = low(score) @ down.T * (1 - hidden**2)
    blocks = {}
    for name, a, g in (("up", x, back), ("down", h, score)):
        product = ROWS * seen(g).T @ seen(g)
        squares = ROWS * np.einsum("ni,nj->ij", a**2, low(g) ** 2)
        blocks[f"{name}/kernel@effective"] = Block("dense", a.T @ a / ROWS, product, None)
        blocks[f"{name}/kernel"] = Block("reparameterised", None, None, squares)
        blocks[f"{name}/bias"] = Block("bias", None, None, ROWS * (g**2).sum(0))
    return blocks


def eight_bits(operation, seen):
    """The kernel and its rows are rounded forward, cotangents backward, straight through."""
    net, (x, y) = network(operation), (normal(1, ROWS, 4), labels(2, ROWS))
    held = net.init(jax.random.key(0), x)[OVERWRITTEN]
    params = {
        "up": tree(3, kernel=(4, 5), bias=(5,)),
        "down": tree(4, kernel=(5, 3), bias=(3,)),
    }

    def apply_fn(params, x):
        return net.apply({"params": params, OVERWRITTEN: held}, x)

    objective = jk.Objective(apply_fn, jk.Categorical())
    return Case(objective, params, (x, y), factors=by_hand(params, x, y, seen))


@program("Linen: fp8 layers, Fp8DirectDotGeneralOp", family=FAMILY, checked="brute force")
def _direct():
    """The product of rounded arrays has a rule that rounds: its own cotangent is not rounded."""
    return eight_bits(nn.fp8_ops.Fp8DirectDotGeneralOp, lambda g: g)


@program("Linen: fp8 layers, Fp8DotGeneralOp", family=FAMILY, checked="brute force")
def _quantised_and_back():
    """A call behind the product rounds what comes back, so the product sees it rounded."""
    return eight_bits(nn.fp8_ops.Fp8DotGeneralOp, lambda g: rounded(g, jnp.float8_e5m2))


WITHIN = f"{OVERWRITTEN}/up/Fp8DirectDotGeneralOp_0"
NO_DERIVATIVE = "`convert_element_type` has no derivative"
LOST = "has the example axis lost at `mul`"


@program(
    "Linen: fp8 layer, its scales among the parameters",
    family=FAMILY,
    checked="gradient",
    uncovered={
        "params/up/kernel": LOST,
        f"{WITHIN}/kernel_scale": LOST,
        f"{WITHIN}/kernel_amax_history": LOST,
        f"{WITHIN}/input_scale": NO_DERIVATIVE,
        f"{WITHIN}/input_amax_history": NO_DERIVATIVE,
        f"{WITHIN}/output_grad_scale": "meets no data",
        f"{WITHIN}/output_grad_amax_history": "meets no data",
    },
)
def _overwritten():
    """As Flax trains them: a scale's gradient is its next value."""
    net, batch = (
        network(nn.fp8_ops.Fp8DirectDotGeneralOp, last=False),
        (normal(1, 4, 4), labels(2, 4)),
    )
    return Case(
        jk.Objective(net.apply, jk.Categorical()), net.init(jax.random.key(0), batch[0]), batch
    )
