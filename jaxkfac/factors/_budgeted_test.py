"""Byte budgets: several passes gather what one pass gathers, and each stays inside the budget."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxkfac.factors._build import value_grad_and_factors
from jaxkfac.factors._likelihoods import Categorical
from jaxkfac.factors._objective import Objective
from jaxkfac.memory._budget import MemoryBudgetError


class Block(nn.Module):
    """A pre-norm transformer block: q, k and v share their input."""

    @nn.compact
    def __call__(self, x, _):
        d = x.shape[-1]
        x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
        return x + nn.Dense(d)(nn.gelu(nn.Dense(2 * d)(nn.LayerNorm()(x)))), None


class Transformer(nn.Module):
    """Scanned and, if asked, rematted blocks between an embedding and a head."""

    layers: int
    width: int
    remat: bool = True

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(self.width, self.width)(ids)
        block = nn.remat(Block) if self.remat else Block
        stack = nn.scan(
            block, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers
        )
        x, _ = stack()(x, None)
        return nn.Dense(self.width)(nn.LayerNorm()(x))


def transformer(layers, width, *, remat=True, tokens=(2, 8)):
    model = Transformer(layers, width, remat)
    ids = jax.random.randint(jax.random.key(0), tokens, 0, width)
    params = model.init(jax.random.key(1), ids)
    return Objective(model.apply, Categorical()), params, (ids, jnp.roll(ids, -1, 1))


def nested(width=4):
    """A scan over groups of a scan over layers; one weight of the inner scan is shared."""
    keys, square = jax.random.split(jax.random.key(0), 4), (width, width)
    params = {
        "inner": jax.random.normal(keys[0], (3, 2, *square)) / width**0.5,
        "outer": jax.random.normal(keys[1], (3, *square)) / width**0.5,
        "shared": jax.random.normal(keys[2], square) / width**0.5,
        "head": jax.random.normal(keys[3], (width, 3)),
    }

    def apply(p, x):
        def group(x, w):
            def layer(x, w):
                return jnp.tanh(x @ w + x @ p["shared"]), None

            x, _ = jax.lax.scan(jax.checkpoint(layer), x, w["inner"])
            return x @ (2.0 * w["outer"]), None

        stacked = {"inner": p["inner"], "outer": p["outer"]}
        x, _ = jax.lax.scan(group, x, stacked, reverse=True)
        return x @ p["head"]

    x = jax.random.normal(jax.random.key(4), (5, width))
    return Objective(apply, Categorical()), params, (x, jnp.arange(5) % 3)


def assert_same(factors, expected):
    assert factors.layers == expected.layers
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-14), factors, expected
    )


def units(plan, table):
    """How often each side of each layer, at each iteration, is gathered."""
    seen = collections.Counter()
    for one in plan.passes:
        for name, part in one.parts.items():
            layer = table[name]
            rows = [None] if part.rows is None else range(one.start, one.start + part.rows)
            for row in rows:
                if row is not None and row >= layer.stack[0]:
                    continue
                seen.update([(name, "inputs", row)] * (part.inputs and layer.input == name))
                seen.update([(name, "outputs", row)] * part.outputs)
    return seen


OPTIONS = [
    {},
    {"fisher": "mc"},
    {"fisher": "exact", "chunk": 2},
    {"sharing": "reduce", "bias": "separate"},
    {"fisher": "forward"},
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o.values())) or "-")
def test_passes_gather_what_one_pass_gathers(x64, options):
    objective, params, batch = nested()
    key = jax.random.key(5)
    expected = jax.jit(value_grad_and_factors(objective, **options))(params, batch, key)
    budget = 4000 if options.get("fisher") == "exact" else 2000
    stats = value_grad_and_factors(objective, max_factor_bytes=budget, **options)
    value, grads, factors = stats(params, batch, key)
    assert len(stats.plan(params, batch, key).passes) > 2
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(factors.a_sums))
    assert_same(factors, expected.factors)
    assert value == expected.value
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), grads, expected.grads)


@pytest.mark.exhaustive
def test_packed_factors_take_fewer_passes_and_are_the_same(x64):
    objective, params, batch = nested(64)
    dense, packed = (
        value_grad_and_factors(objective, max_factor_bytes=300_000, packed=x) for x in (False, True)
    )
    expected, factors = (stats(params, batch).factors for stats in (dense, packed))
    assert factors.is_packed and not expected.is_packed
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(factors.a_sums))
    assert_same(factors.unpacked(), expected)
    plans = [stats.plan(params, batch) for stats in (dense, packed)]
    assert 1 < len(plans[1].passes) < len(plans[0].passes)
    sums = jax.tree.leaves((factors.a_sums, factors.g_sums))
    assert plans[1].nbytes == sum(x.nbytes for x in sums)


@pytest.mark.slow
@pytest.mark.standard_promotion  # Flax creates its epsilons in float32
def test_masks_hold_in_every_pass(x64):
    objective, params, (ids, targets) = transformer(3, 8)
    params = jax.tree.map(lambda x: x.astype(jnp.float64), params)
    there = jnp.arange(8) < jnp.array([[8], [5]])
    batch = (ids, targets, there)
    expected = jax.jit(value_grad_and_factors(objective))(params, batch, positions=there)
    stats = value_grad_and_factors(objective, max_factor_bytes=16_000)
    assert_same(stats(params, batch, positions=there).factors, expected.factors)


def test_each_side_is_in_exactly_one_pass_and_a_shared_input_too():
    objective, params, batch = transformer(5, 16)
    stats = value_grad_and_factors(objective, max_factor_bytes=60_000)
    plan = stats.plan(params, batch)
    table = stats.factor_shapes(params, batch).layers
    table = {layer.name: layer for layer in table}
    seen = units(plan, table)
    assert set(seen.values()) == {1}
    scanned = [x for x in table.values() if x.stack and not x.is_elementwise]
    assert {x.name for x in scanned if x.shares_input_with}  # q, k, v
    for layer in scanned:
        for row in range(5):
            assert (layer.name, "outputs", row) in seen
            assert ((layer.name, "inputs", row) in seen) == (layer.input == layer.name)
    assert all(one.nbytes <= 60_000 for one in plan.passes)


def test_one_pass_needs_exactly_the_bytes_it_says():
    objective, params, batch = nested()

    def passes(budget):
        return value_grad_and_factors(objective, max_factor_bytes=budget).plan(params, batch).passes

    (whole,) = passes(2**30)
    assert len(passes(whole.nbytes)) == 1
    assert len(passes(whole.nbytes - 1)) > 1


def test_labels_that_are_given_count_like_as_many_samples():
    objective, params, (x, y) = nested()[:3]
    labels = jnp.stack([y] * 6)
    stats = value_grad_and_factors(objective, fisher="mc", chunk=3, max_factor_bytes=2**30)
    drawn = value_grad_and_factors(
        objective, fisher="mc", chunk=3, samples=6, max_factor_bytes=2**30
    )
    given = stats.plan(params, (x, y), labels=labels).passes
    assert given == drawn.plan(params, (x, y), jax.random.key(0)).passes


# Without remat the gradient fuses what the branch that skips statistics reads as arrays: the rows
# of one layer, here at most 256 tokens of 64 + 128 features at each of six layers.
ROWS = {"remat": 0, "saved": 6 * 256 * (64 + 128) * 4}


@pytest.mark.exhaustive
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kept", ["remat", pytest.param("saved", marks=pytest.mark.exhaustive)])
def test_a_pass_stays_under_the_gradient_and_the_budget(kept, packed):
    objective, params, batch = transformer(24, 64, remat=kept == "remat", tokens=(4, 64))
    budget = 2**20
    gradient = jax.jit(jax.value_and_grad(objective)).lower(params, batch).compile()
    stats = value_grad_and_factors(objective, max_factor_bytes=budget, packed=packed)
    before, programs = gradient.memory_analysis(), {}
    for number, (one, lowered) in enumerate(stats.lower(params, batch)):
        programs.setdefault((number == 0, tuple(one.parts.items())), lowered)
    assert len(programs) == 2  # the first pass, and one program for all further windows
    for (first, _), lowered in programs.items():
        now = lowered.compile().memory_analysis()
        outputs = now.output_size_in_bytes - before.output_size_in_bytes * first
        assert now.temp_size_in_bytes + outputs <= before.temp_size_in_bytes + budget + ROWS[kept]


@pytest.mark.exhaustive
def test_windows_of_one_size_run_one_compiled_program():
    objective, params, batch = transformer(6, 8)
    stats = value_grad_and_factors(objective, max_factor_bytes=18_000)
    stats(params, batch)
    plan = stats.plan(params, batch)
    assert len(plan.passes) >= 3
    assert [p._cache_size() for p in stats._programs.values()] == [1, 1]


def test_each_pass_of_the_plan_is_lowered():
    objective, params, batch = nested()
    stats = value_grad_and_factors(objective, max_factor_bytes=2000)
    lowered = stats.lower(params, batch)
    assert [one for one, _ in lowered] == list(stats.plan(params, batch).passes)
    assert all("main" in program.as_text() for _, program in lowered)


def test_the_plan_is_printed_once(capsys):
    objective, params, batch = nested()
    stats = value_grad_and_factors(objective, max_factor_bytes=2000)
    stats(params, batch)
    stats(params, batch)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert f"{len(stats.plan(params, batch).passes)} passes, about" in lines[0]


@pytest.mark.exhaustive
def test_a_sink_takes_every_row_once():
    objective, params, batch = transformer(4, 8)
    pushed = collections.defaultdict(list)

    class Service:
        def push(self, factors, step, *, first_iteration):
            pushed[step].append((factors, first_iteration))

    stats = value_grad_and_factors(objective, max_factor_bytes=6000, sink=(Service(), 3))
    _, _, factors = stats(params, batch)
    stats(params, batch, step=4)
    assert len(factors) == 0 and len(pushed[3]) == len(pushed[4]) > 2
    expected = jax.jit(value_grad_and_factors(objective))(params, batch).factors
    for kind in ("a_sums", "a_counts", "g_sums", "diagonals"):
        total = jax.tree.map(np.zeros_like, getattr(expected, kind))
        for part, start in pushed[3]:
            assert all(layer in expected.layers for layer in part.layers)
            for name, value in getattr(part, kind).items():
                rows = slice(start, start + len(value)) if expected.layer(name).stack else ...
                total[name][rows] += value
        for name, value in getattr(expected, kind).items():
            np.testing.assert_allclose(total[name], value, rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_a_budget_below_one_side_names_it():
    objective, params, batch = transformer(4, 8)
    with pytest.raises(MemoryBudgetError, match=r"the (in|out)put side of .* needs \d+ bytes"):
        value_grad_and_factors(objective, max_factor_bytes=500)(params, batch)


def test_it_refuses_to_be_jitted():
    objective, params, batch = nested()
    with pytest.raises(TypeError, match="call it outside of jit"):
        jax.jit(value_grad_and_factors(objective, max_factor_bytes=10_000))(params, batch)


def test_a_sink_without_a_budget_is_refused():
    with pytest.raises(ValueError, match="push the factors that the function returns"):
        value_grad_and_factors(nested()[0], sink=(None, 0))


@pytest.mark.exhaustive
def test_passes_by_themselves_add_up_to_the_whole_and_carry_the_loss():
    def apply(p, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["blocks"])[0] @ p["head"]

    keys = jax.random.split(jax.random.key(0), 3)
    params = {"blocks": jax.random.normal(keys[0], (3, 4, 4)), "head": jnp.ones((4, 2))}
    batch = jax.random.normal(keys[1], (5, 4)), jax.random.randint(keys[2], (5,), 0, 2)
    objective = Objective(apply, Categorical())
    stats = value_grad_and_factors(objective, max_factor_bytes=1)
    least, most = stats.budgets(params, batch)
    assert 0 < least < most
    stats = value_grad_and_factors(objective, max_factor_bytes=least)
    plan = stats.plan(params, batch)
    assert len(plan.passes) > 1
    whole = value_grad_and_factors(objective)(params, batch)
    for one in plan.passes:
        value, factors = stats.pass_program(one)(params, stats.call(batch), np.int32(one.start))
        assert float(value) == pytest.approx(float(whole.value), rel=1e-6)
        for name, sums in factors.g_sums.items():
            rows = slice(None) if one.parts[name].rows is None else slice(one.start, None)
            expected = np.asarray(whole.factors.g_sums[name])[rows][: len(sums)]
            np.testing.assert_allclose(sums[: len(expected)], expected, rtol=1e-5, atol=1e-6)
    single = value_grad_and_factors(objective, max_factor_bytes=most)
    assert len(single.plan(params, batch).passes) == 1
