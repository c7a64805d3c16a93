"""Every public function that can be jitted, as it is exported; of the others, why they cannot."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxkfac as jk
from jaxkfac import lslora, nf4, operators

ROWS, IN, HIDDEN, OUT = 24, 10, 14, 6
SIDES = {IN: 1, HIDDEN: 2, OUT: 1}  # A and G of two layers, products of rows by their size


class EntryPoint(NamedTuple):
    """How a function is exported, and what is in its module.

    ``build`` gives the function and the shapes of its arguments; ``grams`` are products of rows
    with themselves by size, ``eigh`` eigendecompositions, equal sizes in one call, ``qr``
    whether there are QR decompositions, and ``cholesky`` how many Cholesky decompositions.
    """

    build: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    grams: Mapping[int, int]
    eigh: int
    qr: bool
    cholesky: int


ENTRY_POINTS: dict[str, EntryPoint] = {}

_DATA = "works on data, files or memory, before or after what is compiled"
_PYTHON = "about programs, in Python: there is no array in or out"
_HOST = "measures on the host, in float64 or in order, what a compiled step returned"
NOT_EXPORTED = {
    "HostCurvature": "has threads, which decompose while compiled steps run",
    "capacity_interval": _HOST,
    "capacity_metrics": _HOST,
    "compare_capacity": _HOST,
    "cast_once": _DATA,
    "check_coverage": "prints what it finds out about a model, and runs it eagerly",
    "check_same_batch": "compares processes, and compiles nothing of its own",
    "check_state": "warns outside of jit, from the counters of a state",
    "find_layers": _PYTHON,
    "prepare_queries": "differentiates queries with a program that it compiles itself",
    "GradientStore": "what gradient_store has written: it reads files",
    "gradient_store": "streams batches to files, by programs that it compiles itself",
    "influence": "streams batches through programs that it compiles itself",
    "draw_rows": "returns functions; `draw` samples from a pool, by jax.random alone",
    "layer": "names a function, and lowers to that function's own program",
    "spring": "products of rows are those of jk.gram, which is exported, and one Cholesky follows",
    "laplace": "its result reads batches, and compiles what it computes itself",
    "join_processes": "starts processes, before anything is compiled",
    "load_safetensors": _DATA,
    "place_once": _DATA,
    "plan_memory": _PYTHON,
    "quadratic_penalty": "looks at the factors' values once, and returns a function of parameters",
    "self_influence": "streams batches through programs that it compiles itself",
    "lslora.Adapted": "what lslora.attach returns, which is exported",
    "lslora.Bank": "what lslora.stack returns, which is exported",
    "lslora.approximate_merge": _HOST,
    "lslora.find_nonlinearity": _PYTHON,
    "lslora.load": _DATA,
    "lslora.module_name": _PYTHON,
    "lslora.read_modules": _DATA,
    "lslora.register": _PYTHON,
    "lslora.save": _DATA,
    "nf4.from_bitsandbytes": _DATA,
    "nf4.quantize": _DATA,
    "nf4.quantize_slices": _DATA,
    "nf4.to_bitsandbytes": _DATA,
}


def entry(
    name: str,
    *,
    grams: Mapping[int, int] | None = None,
    eigh: int = 0,
    qr: bool = False,
    cholesky: int = 0,
) -> Any:
    """Enter a builder; of several of one function the names go on after a comma."""

    def register(build: Any) -> Any:
        ENTRY_POINTS[name] = EntryPoint(build, grams or {}, eigh, qr, cholesky)
        return build

    return register


def of(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def apply(params, x):
    hidden = jnp.tanh(x @ params["up"])
    return (hidden @ params["down"]).astype(jnp.float32)


def problem(dtype=jnp.float32):
    """Objective, parameters, batch: two dense layers without biases."""
    params = {"up": of(IN, HIDDEN, dtype=dtype), "down": of(HIDDEN, OUT, dtype=dtype)}
    batch = (of(ROWS, IN, dtype=dtype), of(ROWS, dtype=jnp.int32))
    return jk.Objective(apply, jk.Categorical()), params, batch


OBJECTIVE, PARAMS, BATCH = problem()
KEY = jax.eval_shape(lambda: jax.random.key(0))
CONFIG = lslora.Config(rank=2, target="up|down")
PLAIN = lslora.Config(rank=2, target="up|down", fourier_placement="none")


@functools.cache
def like():
    return jk.value_grad_and_factors(OBJECTIVE).factor_shapes(PARAMS, BATCH)


def decompose(factors):
    return jk.eigendecompose(factors, placement="device")


@functools.cache
def bases():
    return jax.eval_shape(decompose, like())


def adapters(config=CONFIG):
    init = functools.partial(lslora.init, apply, config, PARAMS, BATCH[0])
    return jax.eval_shape(lambda key: init(key=key), KEY)


# ------------------------------------------------------------------ statistics


def collects(name, objective=OBJECTIVE, *, grams=SIDES, params=PARAMS, batch=BATCH, **options):
    """Enter ``value_grad_and_factors`` of some options or program."""
    stats = jk.value_grad_and_factors(objective, **options)
    entry(name, grams=grams)(lambda: (stats, (params, batch, KEY)))


for fisher in ("empirical", "mc", "exact"):
    collects(f"value_grad_and_factors, {fisher}", fisher=fisher)
collects("value_grad_and_factors, forward", fisher="forward", grams={IN: 1, HIDDEN: 1})
collects("value_grad_and_factors, reduce", sharing="reduce")
collects("value_grad_and_factors, a part of the rows", subsample=0.5)


@entry("value_grad_and_factors, every", grams=SIDES)
def _():
    stats = jk.value_grad_and_factors(OBJECTIVE, every=4)
    step = of(dtype=jnp.int32)
    return lambda p, b, s: stats(p, b, step=s), (PARAMS, BATCH, step)


@entry("value_grad_and_factors, bases", grams=SIDES)
def _():
    stats = jk.value_grad_and_factors(OBJECTIVE)
    return lambda p, d, k, b: stats(p, d, k, bases=b), (PARAMS, BATCH, KEY, bases())


def with_marks(params, batch):
    outputs = jk.mark_outputs(apply(params, batch[0]), jk.Categorical(), weight=0.5)
    return 0.5 * optax.softmax_cross_entropy_with_integer_labels(outputs, batch[1]).mean()


def with_rows(params, inputs):
    x, exists = inputs
    return apply(params, jk.mark_rows(x, exists))


def transformed(params, x):
    return apply({**params, "up": jax.nn.softplus(params["up"])}, x)


collects("mark_outputs", with_marks)
collects(
    "mark_rows",
    jk.Objective(with_rows, jk.Categorical()),
    batch=((BATCH[0], of(ROWS, dtype=bool)), BATCH[1]),
)
collects("value_grad_and_factors, transformed", jk.Objective(transformed, jk.Categorical()))


class Normalised(nnx.Module):
    """Two layers and statistics of the batch between them."""

    def __init__(self, rngs):
        self.up = nnx.Linear(IN, HIDDEN, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(HIDDEN, use_bias=False, use_scale=False, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, OUT, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.norm(self.up(x))))


@entry("from_nnx", grams=SIDES)
def _():
    model = nnx.eval_shape(lambda: Normalised(nnx.Rngs(0)))
    apply_fn, params = jk.from_nnx(model, mutable=nnx.BatchStat)
    stats = jk.value_grad_and_factors(jk.Objective(apply_fn, jk.Categorical()))
    return lambda p, b, s: stats(p, b, state=s), (params, BATCH, apply_fn.state)


@entry("as_state")
def _():
    model = nnx.eval_shape(lambda: Normalised(nnx.Rngs(0)))
    _, params = jk.from_nnx(model, mutable=nnx.BatchStat)
    return lambda grads: jax.tree.leaves(jk.as_state(grads, model)), (params,)


@entry("Objective")
def _():
    return OBJECTIVE, (PARAMS, BATCH)


@entry("gram")
def _():
    return lambda p, b: jk.gram(OBJECTIVE, p, b, rows="losses"), (PARAMS, BATCH)


@entry("jacobian")
def _():
    def step(params, batch, x):
        return jk.jacobian(OBJECTIVE, params, batch, rows="losses").vjp(x)

    return step, (PARAMS, BATCH, of(ROWS))


@entry("update_average")
def _():
    return lambda average, factors: jk.update_average(average, factors, 0.9), (like(), like())


@entry("LongSum")
def _():
    total = jax.eval_shape(lambda: jk.LongSum.zeros(like()))
    return lambda total, new: total + new, (total, like())


# ------------------------------------------------------------------ curvature


@entry("eigendecompose", eigh=3)
def _():
    return decompose, (like(),)


@entry("apply_power")
def _():
    return lambda tree, bases: jk.apply_power(tree, bases, power=-0.5), (PARAMS, bases())


@entry("natural_gradient")
def _():
    return lambda g, b: jk.natural_gradient(g, b, damping=1e-3), (PARAMS, bases())


@entry("fisher_vector_product")
def _():
    return jk.fisher_vector_product, (PARAMS, bases())


@entry("reconstruct", grams={IN: 1, OUT: 1})  # not of rows: eigenvectors, two of one size in one
def _():
    return jk.reconstruct, (bases(),)


@entry("correct_eigenvalues")
def _():
    correct = lambda p, b, d, k: jk.correct_eigenvalues(OBJECTIVE, b)(p, d, k)
    return correct, (PARAMS, bases(), BATCH, KEY)


# ------------------------------------------------------------------ optimizers


def updates(tx, **extra):
    """An update with one more argument, and the shapes of all."""
    ((name, value),) = extra.items()
    state = jax.eval_shape(tx.init, PARAMS)
    return lambda g, s, p, more: tx.update(g, s, p, **{name: more}), (PARAMS, state, PARAMS, value)


def kfac():
    return jk.kfac(0.1, like=like(), damping=1e-3, norm_constraint=1e-2)


@entry("kfac", eigh=3)
def _():
    return updates(kfac(), factors=like())


# Products of directions in a bias: one for the first damping, two at a trial of dampings and at the
# step.
@entry("kfac, adaptive", eigh=3, grams={1: 1, 2: 2})
def _():
    tx = jk.kfac(like=like(), damping_mode="exact")

    def update(grads, state, params, factors, batch):
        loss = lambda params: OBJECTIVE(params, batch)
        curvature = operators.ggn(OBJECTIVE, params, batch)
        how = {"value": loss(params), "value_fn": loss, "curvature": curvature}
        return tx.update(grads, state, params, factors=factors, **how)

    return update, (PARAMS, jax.eval_shape(tx.init, PARAMS), PARAMS, like(), BATCH)


@entry("kfac, inverses", cholesky=3)  # sides of one size share a function of the module
def _():
    options = {"damping_mode": "factored", "inverse": "cholesky", "norm_constraint": None}
    return updates(jk.kfac(0.1, like=like(), damping=1e-3, **options), factors=like())


@entry("kfe_adam", eigh=3)
def _():
    return updates(jk.kfe_adam(0.01, like=like(), refresh="eigh"), factors=like())


@entry("multi_steps", eigh=3)
def _():
    return updates(jk.multi_steps(kfac(), 4, like=like()), factors=like())


@entry("has_updated")
def _():
    tx = jk.multi_steps(kfac(), 4, like=like())
    return jk.has_updated, (jax.eval_shape(tx.init, PARAMS),)


@entry("scale_by_bases")
def _():
    return updates(jk.scale_by_bases(damping=1e-3), bases=bases())


# ------------------------------------------------------------------ operators


def exact(name):
    """Enter the product of an exact operator with a vector."""
    build = getattr(operators, name)
    product = lambda p, d, v: build(OBJECTIVE, p, d) @ v
    entry(f"operators.{name}")(lambda: (product, (PARAMS, BATCH, PARAMS)))


exact("fisher")
exact("ggn")
exact("hessian")


@entry("operators.kronecker")
def _():
    return lambda b, v: operators.kronecker(b) @ v, (bases(), PARAMS)


@entry("operators.from_function")
def _():
    scaled = lambda scale, v: jax.tree.map(lambda x: scale * x, v)
    return lambda s, v: operators.from_function(scaled, s, PARAMS) @ v, (of(), PARAMS)


@entry("operators.solve")
def _():
    solve = lambda p, d, v: operators.solve(operators.ggn(OBJECTIVE, p, d), v, damping=0.1)
    return solve, (PARAMS, BATCH, PARAMS)


def estimates(name, *, grams=None, eigh=0, qr=False, **options):
    """Enter what is estimated of an operator from random vectors."""
    estimate = getattr(operators, name)

    @entry(f"operators.{name}", grams=grams, eigh=eigh, qr=qr)
    def _():
        of_model = lambda p, d, k: estimate(operators.ggn(OBJECTIVE, p, d), key=k, **options)
        return of_model, (PARAMS, BATCH, KEY)


estimates("spectrum", eigh=1, num_eigenvalues=3)
estimates("trace", grams={32: 2}, qr=True)  # of the sketch of its 32 samples
estimates("spectral_density", eigh=1)
estimates("log_determinant", eigh=1, damping=0.1)


# ------------------------------------------------------------------ adapters


@entry("lslora.init")
def _():
    init = functools.partial(lslora.init, apply, CONFIG, PARAMS, BATCH[0])
    return lambda key: init(key=key), (KEY,)


@entry("lslora.attach")
def _():
    return lslora.attach(apply, CONFIG), (PARAMS, adapters(), BATCH[0])


@entry("lslora.stack")
def _():
    adapted = lslora.attach(apply, CONFIG)

    def both(params, one, other, x):
        return adapted(params, lslora.stack({"a": one, "b": other}), x, adapter=1)

    return both, (PARAMS, adapters(), adapters(), BATCH[0])


@entry("lslora.calibrate")
def _():
    adapted = lslora.attach(apply, CONFIG)
    return functools.partial(lslora.calibrate, adapted), (PARAMS, adapters(), BATCH[0])


@entry("lslora.merge")
def _():
    adapted = lslora.attach(apply, PLAIN)
    return functools.partial(lslora.merge, adapted), (PARAMS, adapters(PLAIN), BATCH[0])


@entry("lslora.as_fourier")
def _():
    return lambda a: lslora.as_fourier(a, PLAIN, sigma=8.0)[0], (adapters(PLAIN),)


@entry("lslora.split")
def _():
    parts = {"up": {"left": 8, "right": HIDDEN - 8}}
    return lambda a: lslora.split(a, CONFIG, parts)[0], (adapters(),)


@entry("lslora.fuse")
def _():
    parts = {"up": {"left": 8, "right": HIDDEN - 8}}
    around = lambda a: lslora.fuse(*lslora.split(a, CONFIG, parts), parts)[0]
    return around, (adapters(),)


@entry("lslora.diagnose")
def _():
    return lslora.diagnose, (adapters(),)


@entry("lslora.fourier")
def _():
    return lslora.fourier, (of(5), of(4), of())


@entry("lslora.fourier_loss")
def _():
    return lslora.fourier_loss, (adapters(),)


@entry("lslora.regulariser")
def _():
    return lambda a: lslora.regulariser(a, "fourier"), (adapters(),)


@entry("nf4.dequantize")
def _():
    params = {"up": of(64, HIDDEN), "down": of(HIDDEN, OUT)}
    return nf4.dequantize, (jax.eval_shape(lambda: nf4.quantize(params, "up")),)
