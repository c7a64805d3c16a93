"""The plan takes every objective and option that ``value_grad_and_factors`` takes."""

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxkfac.factors import (
    FISHER_TYPES,
    Categorical,
    Gaussian,
    Objective,
    value_grad_and_factors,
)
from jaxkfac.interception import mark_outputs
from jaxkfac.planning import plan_memory

KEY = jax.eval_shape(lambda: jax.random.key(0))


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


PARAMS = {"up": shape(12, 16), "bias": shape(16), "scale": shape(16), "down": shape(16, 5)}
BATCH = shape(6, 12), shape(6, dtype=jnp.int32)


def model(params, x):
    return (jnp.tanh(x @ params["up"] + params["bias"]) * params["scale"]) @ params["down"]


def dropped(params, x, key=None):
    kept = 1.0 if key is None else jax.random.bernoulli(key, 0.5, x.shape).astype(x.dtype)
    return model(params, x * kept)


def normalised(params, x, *, state):
    """The mean of the batch, and its running average."""
    mean = x.mean(0)
    return model(params, x - mean), {"mean": 0.9 * state["mean"] + 0.1 * mean}


def marked(params, batch):
    x, target = batch
    logits = mark_outputs(model(params, x), Categorical())
    return optax.softmax_cross_entropy_with_integer_labels(logits, target).mean()


def two_outputs(params, x):
    out = model(params, x)
    return {"label": out, "size": out[:, :1]}


def plain(params, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(params, batch[0]), batch[1]).mean()


def of(fn, likelihood=None, **more):
    return Objective(fn, likelihood or Categorical(), **more)


CASES = {
    "subsample": (of(model), BATCH, {"subsample": 0.5}),
    "every": (of(model), BATCH, {"every": 3}),
    "marks": (marked, BATCH, {}),
    "marks, mc": (marked, BATCH, {"fisher": "mc"}),
    "state": (of(normalised), BATCH, {"state": {"mean": shape(12)}}),
    "state, aux": (
        of(
            lambda p, x, *, state: ((normalised(p, x, state=state)[0], x.sum()), state),
            has_aux=True,
        ),
        BATCH,
        {"state": {"mean": shape(12)}},
    ),
    "key": (of(dropped), BATCH, {}),
    "mask": (of(model), (*BATCH, shape(6, dtype=bool)), {}),
    "several likelihoods": (
        of(two_outputs, {"label": Categorical(), "size": Gaussian()}),
        (BATCH[0], {"label": BATCH[1], "size": shape(6, 1)}),
        {},
    ),
    "scalar loss": (plain, BATCH, {"loss_terms": 6}),
    "scalar loss, unsaid": (plain, BATCH, {}),
    "scalar loss, aux": (lambda p, b: (plain(p, b), 1.0), BATCH, {"has_aux": True}),
    "mc": (of(model), BATCH, {"fisher": "mc", "samples": 2, "chunk": 2}),
    "exact": (of(model), BATCH, {"fisher": "exact"}),
    "forward": (of(model), BATCH, {"fisher": "forward"}),
    "an estimator": (of(model), BATCH, {"fisher": FISHER_TYPES["mc"](samples=2)}),
    "reduce": (of(model), BATCH, {"sharing": "reduce"}),
    "separate bias": (of(model), BATCH, {"bias": "separate"}),
    "full blocks": (of(model), BATCH, {"scales": "full_block"}),
    "some layers": (of(model), BATCH, {"layers": "up|down", "uncovered": "ignore"}),
    "a wide side": (of(model), BATCH, {"max_dense": 12}),
    "own precision": (of(model), BATCH, {"precision": "auto"}),
}
QUICK = ("every", "marks")


def parameters(names):
    return [pytest.param(x, marks=() if x in QUICK else pytest.mark.exhaustive) for x in names]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", parameters(CASES))
def test_its_factors_and_its_state_are_in_the_plan(name):
    objective, batch, options = CASES[name]
    collection = {k: v for k, v in options.items() if k != "state"}
    if name in ("scalar loss, unsaid", "scalar loss, aux"):
        collection["loss_terms"] = 1
    stats = value_grad_and_factors(objective, **collection)
    like = jax.eval_shape(
        lambda params, batch, key, state: stats(params, batch, key, state=state, step=0),
        *(PARAMS, batch, KEY, options.get("state")),
    ).factors
    for options_of_plan in ((), ("host",), ("budget",), ("accumulation",)):
        plan = plan_memory(
            *(objective, PARAMS, batch),
            optimizer=optax.adam(1e-3),
            device_bytes=1e12,
            options=options_of_plan,
            compiled="none",
            **options,
        )
        assert not plan.unavailable
    assert plan.now.device["factors"] == nbytes(like)
    assert plan.now.device["state"] == nbytes(options.get("state"))


def test_a_state_is_compiled_with_the_step_and_beside_undonated_ones_there_are_two():
    objective, batch, options = CASES["state"]
    arguments = {
        "optimizer": optax.sgd(0.1),
        "device_bytes": 1e12,
        "options": ("remat", "adapters"),
    }
    plan = plan_memory(objective, PARAMS, batch, **arguments, **options)
    assert plan.now.compiled and "state that calls change" in plan.unavailable["adapters"]
    kept = plan_memory(
        objective, PARAMS, batch, donate=False, curvature=False, **arguments, **options
    )
    assert kept.now.device["undonated"] == nbytes((PARAMS, options["state"]))


def nbytes(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
