"""Programs whose control flow or coupling decides what a row is."""

import flax.linen as nn
import jax
import jax.numpy as jnp

import jaxkfac as jk
from tests import (
    branches_test,
    coupled_examples_test,
    custom_derivatives_test,
    initial_states_test,
    ragged_experts_test,
)
from tests._checks import objective_of
from tests._oracle import oracle
from tests._programs import labels, normal
from tests.zoo import Case, program

FAMILY = "Branches, batch statistics, custom derivatives"


@program(
    "residual net with batch statistics", family=FAMILY, checked="brute force over the whole batch"
)
def _residual():
    net = coupled_examples_test
    params, batch = net.residual_params(), (normal(1, 5, 4, 4, 2), labels(2, 5))
    factors = net.of_batch(net.residual(net.batch_norm), params, batch)
    return Case(objective_of(net.residual(net.batch_norm_folded)), params, batch, factors=factors)


@program("Linen: ResNet, BatchNorm in training", family=FAMILY, checked="gradient")
def _linen_resnet():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            def norm():
                return nn.BatchNorm(use_running_average=False, param_dtype=jnp.float64)

            def conv(features, size, strides):
                return nn.Conv(features, (size, size), strides, use_bias=False,
                               param_dtype=jnp.float64)  # fmt: skip

            x = nn.relu(norm()(conv(4, 3, 1)(x)))
            y = nn.relu(norm()(conv(6, 3, 2)(x)))
            x = nn.relu(norm()(conv(6, 3, 1)(y)) + norm()(conv(6, 1, 2)(x)))
            return nn.Dense(3, param_dtype=jnp.float64)(x.mean((1, 2)))

    net, x = Net(), normal(1, 4, 6, 6, 2)
    variables = net.init(jax.random.key(0), x)

    def apply_fn(params, x):
        held = {"params": params, "batch_stats": variables["batch_stats"]}
        return net.apply(held, x, mutable=["batch_stats"])[0]

    objective = jk.Objective(apply_fn, jk.Categorical())
    return Case(objective, variables["params"], (x, labels(2, 4)))


@program("switch over experts, by example under vmap", family=FAMILY, checked="brute force")
def _routed():
    params, batch = branches_test.experts_params(), branches_test.batch(0, 1, 1, 0, 0, 1)
    factors = branches_test.factors_of_selected(params, batch)
    return Case(objective_of(branches_test.routed), params, batch, factors=factors)


@program(
    "cond with layers in its branches", family=FAMILY, checked="brute force", unchecked=("up",)
)
def _cond():
    params, batch = branches_test.experts_params(), branches_test.batch(1)
    taken = oracle(branches_test.of_branch(1), params, batch)
    return Case(objective_of(branches_test.with_cond), params, batch, factors=taken)


@program("custom_vjp layer norm, custom_jvp dense layers", family=FAMILY, checked="brute force")
def _custom_derivatives():
    model, twin = custom_derivatives_test.model, custom_derivatives_test.twin
    params, batch = custom_derivatives_test.problem()
    return Case(objective_of(model), params, batch, twin)


@program("recurrence from a learned state", family=FAMILY, checked="brute force, unrolled")
def _learned_state():
    net = initial_states_test
    return Case(objective_of(net.looped), net.params(), net.batch(), net.unrolled)


@program(
    "experts over sorted rows: ragged_dot",
    family=FAMILY,
    checked="brute force",
    unchecked=("router",),
)
def _ragged():
    net = ragged_experts_test
    params, (x, y) = net.params(), net.batch()
    objective = jk.Objective(net.routed, jk.Categorical())
    return Case(objective, params, (x, y), factors=net.blocks(params, x, y))
