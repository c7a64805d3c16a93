"""Every public entry point with the wrong thing in each argument: a sentence, never a bare error.

Without the type hook of the tests, in a user's process. What is no array and no function is refused
by the library itself: the last frame of the traceback is a ``raise`` of its own.
"""

import subprocess
import sys

import pytest

SCRIPT = """
import traceback
import warnings

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxkfac as jk

warnings.simplefilter("ignore")
x, y = jnp.ones((5, 4)), jnp.arange(5) % 3
model, batch = nnx.Sequential(nnx.Linear(4, 3, rngs=nnx.Rngs(0))), (x, y)


def made(apply_fn, params, batch, likelihood):
    objective = jk.Objective(apply_fn, likelihood)
    stats = jk.value_grad_and_factors(objective)
    _, grads, factors = stats(params, batch)
    state = jk.kfac(0.1, like=factors).init(params)
    return objective, stats, grads, factors, jk.eigendecompose(factors), state


apply_fn, params = jk.from_nnx(model)
objective, stats, grads, factors, bases, state = made(apply_fn, params, batch, jk.Categorical())
foreign = {"w": jnp.ones((2, 2))}
pair = (jnp.ones((3, 2)), jnp.ones((3, 2)))
*_, others, other_bases, other_state = made(lambda p, x: x @ p["w"], foreign, pair, jk.Gaussian())
scaling = jk.scale_by_bases(damping=0.1)
tx = jk.kfac(0.1, like=factors)
several = jk.multi_steps(tx, 2)
config = jk.lslora.Config(rank=2, alpha=1.0, target=".*kernel")
key = jax.random.key(0)

# What stands in for each argument in turn.
WRONG = {
    "model": model, "linen": nn.Dense(3), "params": params, "foreign": foreign, "batch": batch,
    "grads": grads, "factors": factors, "bases": bases, "state": state, "others": others,
    "other_bases": other_bases, "other_state": other_state, "apply_fn": apply_fn,
    "objective": objective, "stats": stats, "array": x, "nothing": None, "number": 3,
    "name": "adam", "likelihood": jk.Categorical(),
}
ARRAYS = {"params", "grads"}  # of one form
ANY_FACTORS, ANY_BASES = {"factors", "others"}, {"bases", "other_bases"}
FUNCTIONS = {"apply_fn", "objective", "stats"}  # functions like any other

# Name: the call, its arguments, and what else is right in each argument.
ENTRIES = {
    "find_layers": (lambda fn, params: jk.find_layers(fn, params, x),
                    {"fn": (apply_fn, {"objective", "stats"}), "params": (params, ARRAYS)}),
    "Objective": (jk.Objective, {"apply_fn": (apply_fn, FUNCTIONS),
                                 "likelihood": (jk.Categorical(), {"likelihood"})}),
    "objective": (objective, {"params": (params, ARRAYS), "batch": (batch, {"batch"})}),
    "value_grad_and_factors": (jk.value_grad_and_factors, {"objective": (objective, FUNCTIONS)}),
    "stats": (stats, {"params": (params, ARRAYS), "batch": (batch, {"batch"})}),
    "factor_shapes": (stats.factor_shapes, {"params": (params, ARRAYS), "batch": (batch, set())}),
    "eigendecompose": (jk.eigendecompose, {"factors": (factors, ANY_FACTORS)}),
    "reconstruct": (jk.reconstruct, {"bases": (bases, ANY_BASES)}),
    "update_average": (jk.update_average, {"average": (factors, set()), "factors": (factors, set()),
                                           "decay": (0.9, set())}),
    "apply_power": (jk.apply_power, {"tree": (grads, ARRAYS), "bases": (bases, set())}),
    "natural_gradient": (lambda grads, bases: jk.natural_gradient(grads, bases, damping=0.1),
                         {"grads": (grads, ARRAYS), "bases": (bases, set())}),
    "fisher_vector_product": (jk.fisher_vector_product,
                              {"tree": (grads, ARRAYS), "bases": (bases, set())}),
    "correct_eigenvalues": (jk.correct_eigenvalues,
                            {"objective": (objective, FUNCTIONS), "bases": (bases, ANY_BASES)}),
    "corrected": (jk.correct_eigenvalues(objective, bases),
                  {"params": (params, ARRAYS), "batch": (batch, set())}),
    "ggn": (jk.operators.ggn, {"objective": (objective, FUNCTIONS), "params": (params, ARRAYS),
                               "batch": (batch, set())}),
    "fisher": (jk.operators.fisher, {"objective": (objective, FUNCTIONS),
                                     "params": (params, ARRAYS), "batch": (batch, set())}),
    "hessian": (jk.operators.hessian, {"objective": (objective, FUNCTIONS),
                                       "params": (params, ARRAYS), "batch": (batch, set())}),
    "kronecker": (jk.operators.kronecker, {"bases": (bases, ANY_BASES)}),
    "spectrum": (lambda operator: jk.spectrum(operator, 2, key=key),
                 {"operator": (jk.operators.ggn(objective, params, batch), set())}),
    "capacity_metrics": (lambda bases: jk.capacity_metrics(bases, num_examples=5),
                         {"bases": (bases, ANY_BASES)}),
    "laplace": (lambda objective, params, bases: jk.laplace(
                    objective, params, bases, num_examples=5),
                {"objective": (objective, set()), "params": (params, ARRAYS),
                 "bases": (bases, set())}),
    "kfac": (lambda like: jk.kfac(0.1, like=like), {"like": (factors, {*ANY_FACTORS, "nothing"})}),
    "kfac.init": (tx.init, {"params": (params, ARRAYS)}),
    "kfac.update": (lambda grads, state, params, factors: tx.update(
                        grads, state, params, factors=factors),
                    {"grads": (grads, ARRAYS), "state": (state, set()),
                     "params": (params, {*ARRAYS, "nothing"}), "factors": (factors, {"nothing"})}),
    "kfac.update(value=)": (lambda value: tx.update(
                                grads, state, params, factors=factors, value=value),
                            {"value": (1.0, {"number", "nothing"})}),
    "stats.adaptation": (stats.adaptation, {"params": (params, ARRAYS), "batch": (batch, set())}),
    "check_state": (jk.check_state, {"state": (state, {"other_state"})}),
    "scale_by_bases.update": (lambda grads, state, bases: scaling.update(grads, state, bases=bases),
                              {"grads": (grads, ARRAYS), "state": (scaling.init(params), set()),
                               "bases": (bases, set())}),
    "multi_steps": (lambda tx: jk.multi_steps(tx, 2), {"tx": (tx, set())}),
    "multi_steps(like=)": (lambda like: jk.multi_steps(optax.sgd(0.1), 2, like=like),
                           {"like": (factors, {*ANY_FACTORS, "nothing"})}),
    "multi_steps.update": (lambda grads, state, factors: several.update(
                               grads, state, params, factors=factors),
                           {"grads": (grads, ARRAYS), "state": (several.init(params), set()),
                            "factors": (factors, set())}),
    "HostCurvature.push": (lambda factors: jk.HostCurvature().push(factors, 0),
                           {"factors": (factors, ANY_FACTORS)}),
    "plan_memory": (lambda objective, params, batch: jk.plan_memory(
                        objective, params, batch, optimizer=tx, device_bytes=1e9),
                    {"objective": (objective, FUNCTIONS), "params": (params, ARRAYS),
                     "batch": (batch, set())}),
    "from_nnx": (jk.from_nnx, {"model": (model, set())}),
    "as_state": (jk.as_state, {"grads": (grads, ARRAYS), "model": (model, set())}),
    "lslora.init": (lambda fn, params: jk.lslora.init(fn, config, params, x, key=key),
                    {"apply_fn": (apply_fn, FUNCTIONS), "params": (params, ARRAYS)}),
    "lslora.attach": (lambda fn: jk.lslora.attach(fn, config), {"apply_fn": (apply_fn, FUNCTIONS)}),
}

two_outputs = jk.Objective(lambda p, x: {"a": x, "b": x},
                       {"a": jk.Categorical(), "b": jk.Gaussian()})
haiku = hk.transform(lambda x: hk.Linear(3)(x))
with_state = hk.transform_with_state(lambda x: hk.Linear(3)(x))
mlp = eqx.nn.MLP(4, 3, 5, 1, key=key)
sparing = jk.value_grad_and_factors(objective, every=2)


class Normalised(nnx.Module):
    def __init__(self):
        self.dense = nnx.WeightNorm(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.norm(self.dense(x))


def called(model, mutable, **state):
    apply_fn, params = jk.from_nnx(model, mutable=mutable)
    return apply_fn(params, x, **state)


# What each of these must say: the argument, what came, and what to do.
WORDS = {
    "a parameter that a call writes": (
        lambda: called(Normalised().dense, None), "'layer_instance/kernel'", "mutable=nnx.Param",
        "dropped"),
    "a parameter that is written beside state": (
        lambda: called(Normalised(), nnx.BatchStat), "'dense/layer_instance/kernel'",
        "mutable=(nnx.BatchStat, nnx.Param)"),
    "state beside a parameter that is written": (
        lambda: called(Normalised(), nnx.Param), "'norm/mean'",
        "mutable=(nnx.Param, nnx.BatchStat)) and carry the state"),
    "a state of parameters alone": (
        lambda: called(Normalised().dense, nnx.Param, state={}), "state=", "nnx.Param", "leave"),
    "a target without its key": (
        lambda: two_outputs(params, (x, {"a": y})), "batch: targets", "without 'b'"),
    "a period that is not whole": (
        lambda: jk.LevenbergMarquardt(every=2.5), "every=2.5", "expected a whole number"),
    "another word for the first damping": (
        lambda: jk.LevenbergMarquardt(initial="large"), "initial='large'",
        'a positive number or "auto"'),
    "another word for the rate": (
        lambda: jk.kfac("adaptive", like=factors), "learning_rate='adaptive'", '"quadratic"'),
    "another word for the momentum": (
        lambda: jk.kfac(0.1, like=factors, momentum="nesterov"), "momentum='nesterov'",
        '"quadratic"'),
    "a number where the curvature is expected": (
        lambda: jk.kfac("quadratic", like=factors).update(
            grads, jk.kfac("quadratic", like=factors).init(params), params, factors=factors,
            value=0.0, value_fn=apply_fn, curvature=bases), "curvature", "jk.operators.ggn"),
    "an update without factors": (
        lambda: tx.update(grads, state, params), "kfac: update needs factors=",
        "tx.update(grads, state, params, factors=factors)", "factors=None"),
    "an adaptive update that is told nothing": (
        lambda: jk.kfac(like=factors).update(
            grads, jk.kfac(like=factors).init(params), params, factors=factors),
        "needs value and value_fn and curvature", "**stats.adaptation(params, batch, key)"),
    "a target too many": (
        lambda: two_outputs(params, (x, {"a": y, "b": x, "c": y})), "with 'c'", "no likelihood"),
    "Haiku's own apply": (lambda: jk.Objective(haiku.apply, jk.Categorical()),
                          "hk.without_apply_rng", "key"),
    "Haiku's own apply with state": (lambda: jk.Objective(with_state.apply, jk.Categorical()),
                                     "model.apply(params, state, key, x)", "state"),
    "an Equinox model for parameters": (lambda: stats(mlp, batch), "params", "eqx.partition"),
    "half a step": (lambda: sparing(params, batch, step=2.5), "step=2.5", "whole number"),
    "half a step, an array": (lambda: sparing(params, batch, step=jnp.asarray(2.5)), "step=",
                              "whole number"),
    "every= as a word": (lambda: jk.value_grad_and_factors(objective, every="a"), "every",
                         "whole number"),
    "distribute= of two axes": (
        lambda: jk.kfac(0.1, like=factors, distribute=("data", "model")),
        "distribute=('data', 'model')", "the name of one mesh axis"),
    "distribute= of two axes, at once": (
        lambda: jk.eigendecompose(factors, distribute=("data", "model")),
        "distribute=('data', 'model')", "the name of one mesh axis"),
    "no number of examples": (
        lambda: jk.laplace(objective, params, bases, num_examples=None), "num_examples",
        "a positive number", "None"),
    "a prior precision as a word": (
        lambda: jk.laplace(objective, params, bases, num_examples=5, prior_precision="a"),
        "prior_precision", "one for each layer", "str"),
    "a Laplace posterior of another model": (
        lambda: jk.laplace(objective, foreign, bases, num_examples=5), "'layers/0/kernel'",
        "no such parameter", "'w'"),
    "an unknown predictive": (
        lambda: jk.laplace(objective, params, bases, num_examples=5).predict(x, "brdge"),
        "method='brdge'", "Categorical", "'probit', 'bridge', 'mc'"),
    "samples= as a word": (lambda: jk.value_grad_and_factors(objective, samples="a"), "samples",
                           "whole number"),
}
for name, (call, *words) in WORDS.items():
    try:
        call()
    except (TypeError, ValueError) as error:
        missing = [word for word in words if word not in str(error)]
        if missing:
            print(f"{name}: {missing} not in {error}")
    else:
        print(f"{name}: nothing is raised")

tried = 0
for entry, (call, arguments) in ENTRIES.items():
    right = [value for value, _ in arguments.values()]
    for place, (argument, (value, allowed)) in enumerate(arguments.items()):
        for name, wrong in WRONG.items():
            if wrong is value or name in allowed:
                continue
            tried += 1
            try:
                call(*right[:place], wrong, *right[place + 1 :])
            except Exception as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                if "/jaxkfac/" in last.filename and last.line.startswith("raise"):
                    continue
                found = f"{type(error).__name__}: {str(error)[:80]!r}"
            else:
                found = "nothing is raised"
            print(f"{entry}({argument}={name}): {found}")
print(tried)
"""


@pytest.mark.slow
def test_wrong_arguments_are_refused_in_words():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    *bare, tried = done.stdout.splitlines()
    assert not bare, "\n".join(bare)
    assert int(tried) > 1000
