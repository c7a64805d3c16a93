"""Examples that are coupled: a row's gradient is that of the whole loss, all else held as it is.

Brute force takes the batch for one example with many loss terms; that is the same definition.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import jaxkfac as jk
from tests._checks import assert_factors_close, assert_tree_close, objective_of
from tests._convolutions import Convolution
from tests._likelihoods import mean_loss
from tests._oracle import oracle
from tests._programs import labels, normal, tree
from tests._taps import PLAIN

CONV = Convolution(
    space=(4, 4), window=(3, 3), padding=((1, 1), (1, 1)), channels=(2, 3), bias=False
)
NARROW = Convolution(space=(4, 4), window=(1, 1), strides=(2, 2), channels=(3, 4), bias=False)


def of_batch(model, params, batch, **options):
    """Brute force over the batch as one example."""
    one = jax.tree.map(lambda x: x[None], batch)
    return oracle(lambda p, x, tap: model(p, x[0], tap)[None], params, one, **options)


def normalised(x):
    over = tuple(range(x.ndim - 1))
    mean, var = x.mean(over, keepdims=True), x.var(over, keepdims=True)
    return (x - mean) / jnp.sqrt(var + 1e-3)


def batch_norm(tap, name, p, x):
    """As brute force sees it: the scale of a row of data."""
    y = normalised(x)
    y = tap.scale(f"{name}/scale", y, y * p["scale"], shape=p["scale"].shape)
    return tap.lone_bias(f"{name}/bias", y + p["bias"], shape=p["bias"].shape)


def batch_norm_folded(tap, name, p, x):
    """As libraries write it: the scale meets the statistics first."""
    over = tuple(range(x.ndim - 1))
    multiplier = lax.rsqrt(x.var(over, keepdims=True) + 1e-3) * p["scale"]
    return (x - x.mean(over, keepdims=True)) * multiplier + p["bias"]


def batch_norm_divided(tap, name, p, x):
    over = tuple(range(x.ndim - 1))
    return (x - x.mean(over)) * (p["scale"] / jnp.sqrt(x.var(over) + 1e-3)) + p["bias"]


def residual(norm):
    """A residual block with a projection on its shortcut, mean pooling, a head."""

    def model(p, x, tap):
        y = CONV.tapped(tap, "stem", x, CONV(x, p["stem"])) if tap is not PLAIN else CONV(
            x, p["stem"]
        )  # fmt: skip
        y = jax.nn.relu(norm(tap, "one", p["one"], y))
        z = NARROW(y, p["in"])
        z = z if tap is PLAIN else NARROW.tapped(tap, "in", y, z)
        z = norm(tap, "two", p["two"], z)
        short = NARROW(y, p["short"])
        short = short if tap is PLAIN else NARROW.tapped(tap, "short", y, short)
        y = jnp.tanh(z + norm(tap, "three", p["three"], short)).mean((1, 2))
        return tap.dense("head", y, y @ p["head"])

    return model


def residual_params():
    return tree(
        0, stem=CONV.kernel_shape(), one__scale=(3,), one__bias=(3,), two__scale=(4,),
        two__bias=(4,), three__scale=(4,), three__bias=(4,), short=NARROW.kernel_shape(),
        head=(4, 3),
    ) | {"in": normal(9, *NARROW.kernel_shape())}  # fmt: skip


def check(model, twin, params, batch, *, wrap=lambda f: f, labels=None, **options):
    stats = jk.value_grad_and_factors(objective_of(wrap(model)), scales="diagonal", **options)
    extra = {} if labels is None else {"labels": labels}
    value, grads, factors = jax.jit(stats)(params, batch, **extra)
    loss, gradient = jax.value_and_grad(lambda p: mean_loss(twin, "categorical", p, batch))(params)
    np.testing.assert_allclose(value, loss, rtol=1e-10)
    assert_tree_close(grads, gradient, 1e-10)
    of_one = {} if labels is None else {"labels": labels[:, None]}
    assert_factors_close(factors, of_batch(twin, params, batch, **options, **of_one), 1e-10)
    return factors


@pytest.mark.exhaustive
@pytest.mark.parametrize("norm", [batch_norm_folded, batch_norm_divided])
def test_a_residual_net_with_batch_statistics_has_the_factors_of_its_rows(x64, norm):
    batch = normal(1, 5, 4, 4, 2), labels(2, 5)
    check(residual(norm), residual(batch_norm), residual_params(), batch)


def mlp(norm):
    def model(p, x, tap):
        y = jnp.tanh(norm(tap, "norm", p["norm"], tap.dense("up", x, x @ p["up"])))
        return tap.dense("down", y, y @ p["down"])

    return model


def mlp_params():
    return tree(0, up=(4, 5), norm__scale=(5,), norm__bias=(5,), down=(5, 3))


def mlp_batch():
    return normal(1, 6, 4), labels(2, 6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint], ids=["jit", "remat"])
def test_batch_statistics_inside_walls(x64, wrap):
    def wrapped(model):
        return lambda p, x, tap: wrap(lambda p, x: model(p, x, PLAIN))(p, x)

    check(mlp(batch_norm_folded), mlp(batch_norm), mlp_params(), mlp_batch(), wrap=wrapped)


@pytest.mark.exhaustive
def test_batch_statistics_inside_a_scan_over_layers(x64):
    def scanned(p, x, tap):
        def layer(x, w):
            return jnp.tanh(batch_norm_folded(tap, "", w, x @ w["kernel"])), None

        x, _ = lax.scan(jax.checkpoint(layer), x, p["layers"])
        return x @ p["head"]

    def unrolled(p, x, tap):
        for i in range(2):
            w = jax.tree.map(lambda v, i=i: v[i], p["layers"])
            y = normalised(tap.dense("layers/kernel", x, x @ w["kernel"], at=(i,)))
            y = tap.scale("layers/scale", y, y * w["scale"], shape=(4,), at=(i,))
            x = jnp.tanh(tap.lone_bias("layers/bias", y + w["bias"], shape=(4,), at=(i,)))
        return tap.dense("head", x, x @ p["head"])

    params = tree(0, layers__kernel=(2, 4, 4), layers__scale=(2, 4), layers__bias=(2, 4),
                  head=(4, 3))  # fmt: skip
    check(scanned, unrolled, params, mlp_batch())


@pytest.mark.exhaustive
def test_a_weight_times_a_batch_statistic_is_a_layer_of_the_product(x64):
    """Its inputs are those of the weight itself: times the statistic."""

    def model(p, x, tap):
        return (x @ (p["w"] * jnp.mean(x * x))) / jnp.std(x)

    def twin(p, x, tap):
        scaled = x * jnp.mean(x * x)
        return tap.dense("w", scaled, scaled @ p["w"]) / jnp.std(x)

    check(model, twin, tree(0, w=(4, 3)), mlp_batch())


@pytest.mark.slow
def test_sampled_labels_are_right_one_by_one(x64):
    drawn = labels(7, 2, 6)
    check(
        mlp(batch_norm_folded),
        mlp(batch_norm),
        mlp_params(),
        mlp_batch(),
        fisher="mc",
        labels=drawn,
    )


@pytest.mark.exhaustive
def test_drawn_labels_are_unbiased(x64):
    """Over keys, within four standard errors of the expectation."""
    objective, number = objective_of(mlp(batch_norm_folded)), 4000
    drawn = jk.value_grad_and_factors(objective, fisher="mc")
    every = jax.jit(jax.vmap(lambda key: drawn(mlp_params(), mlp_batch(), key).factors))(
        jax.random.split(jax.random.key(0), number)
    )
    exact = jk.value_grad_and_factors(objective, fisher="exact")(mlp_params(), mlp_batch()).factors
    for field in ("g_sums", "diagonals"):
        for name, expected in getattr(exact, field).items():
            found = np.asarray(getattr(every, field)[name])
            error = 4 * found.std(0, ddof=1) / np.sqrt(number)
            assert (np.abs(found.mean(0) - expected) <= error + 1e-12).all(), name


@pytest.mark.slow
def test_the_exact_fisher_runs_every_example_by_itself_and_says_so(x64, capsys):
    check(mlp(batch_norm_folded), mlp(batch_norm), mlp_params(), mlp_batch(), fisher="exact")
    assert "takes 18 backward passes" in capsys.readouterr().err
    plain = mlp(lambda tap, name, p, x: x * p["scale"] + p["bias"])
    jax.eval_shape(
        jk.value_grad_and_factors(objective_of(plain), fisher="exact"), mlp_params(), mlp_batch()
    )
    assert not capsys.readouterr().err


def in_pairs(p, x, tap):
    z = jnp.tanh(x @ p["w"])
    return z @ z.T


def along_the_batch(p, x, tap):
    return jnp.tanh(x @ p["w"] + jnp.cumsum(x, 0))


def with_a_neighbour(p, x, tap):
    return jnp.tanh(x @ p["w"] + x[::-1])


COUPLED = {
    "batch statistics": lambda p, x, tap: normalised(x @ p["w"]),
    "pairs": in_pairs,
    "cumulative": along_the_batch,
    "reversed": with_a_neighbour,
    "permuted": lambda p, x, tap: x @ p["w"] + x[jnp.array([1, 2, 3, 4, 5, 0])],
    "graph": lambda p, x, tap: jnp.eye(6)[::-1] @ jnp.tanh(x @ p["w"]),
    "loop": lambda p, x, tap: lax.scan(lambda c, r: (c + r @ p["w"], c), jnp.zeros(4), x)[1],
}


@pytest.mark.default(3, slow=1)
@pytest.mark.parametrize("model", COUPLED.values(), ids=COUPLED.keys())
def test_an_isolated_pass_is_refused_where_examples_meet(x64, model):
    def odd(p, x, tap):
        return model(p, x, tap) + jnp.sort(p["odd"])  # for which there is no rule

    objective = objective_of(odd)
    params, batch = tree(0, w=(4, 4), odd=(4,)), (normal(1, 6, 4), labels(2, 6))
    if model is in_pairs:
        params["odd"] = normal(3, 6)
    with pytest.raises(jk.CoupledExamplesError, match="'odd'"):
        jk.value_grad_and_factors(objective, uncovered="diagonal")(params, batch)


@pytest.mark.slow
def test_statistics_that_only_leave_the_model_couple_nothing(x64):
    """Running averages are read by no output of this step."""

    def apply_fn(p, x):
        return x @ p["w"] + jnp.sort(p["odd"]), x.mean(0)

    objective = jk.Objective(apply_fn, jk.Categorical(), has_aux=True)
    stats = jk.value_grad_and_factors(objective, uncovered="diagonal")
    params, batch = tree(0, w=(4, 4), odd=(4,)), (normal(1, 6, 4), labels(2, 6))
    factors = stats(params, batch).factors
    assert float(factors["odd"].diagonal.sum()) > 0


@pytest.mark.slow
def test_eigenvalues_of_single_examples_are_refused_where_they_meet(x64):
    objective = objective_of(mlp(batch_norm_folded))
    factors = jk.value_grad_and_factors(objective)(mlp_params(), mlp_batch()).factors
    bases = jk.eigendecompose(factors)
    with pytest.raises(jk.CoupledExamplesError, match="'up', 'norm/scale'"):
        jk.correct_eigenvalues(objective, bases)(mlp_params(), mlp_batch())
    jk.correct_eigenvalues(objective, bases, per="token")(mlp_params(), mlp_batch())


def test_a_parameter_whose_rows_are_nowhere_is_reported(x64):
    """A penalty weighted by data reaches the loss without a row of data on its way."""

    def loss(p, batch):
        x, y = batch
        return jnp.mean((x @ p["w"] - y) ** 2) + jnp.sum(x.mean(0) * p["scale"])

    params = tree(0, w=(4, 2), scale=(4,))
    ((path, reason),) = jk.find_layers(loss, params, (normal(1, 6, 4), normal(2, 6, 2))).problems
    assert (path, reason) == ("scale", "has the example axis lost at `mul`")


@pytest.mark.exhaustive
def test_kfac_trains_a_residual_net_of_nnx(x64):
    class Block(nnx.Module):
        def __init__(self, i, o, rngs):
            self.conv = nnx.Conv(i, o, (3, 3), strides=2, use_bias=False, rngs=rngs)
            self.norm = nnx.BatchNorm(o, rngs=rngs)
            self.short = nnx.Conv(i, o, (1, 1), strides=2, use_bias=False, rngs=rngs)
            self.short_norm = nnx.BatchNorm(o, rngs=rngs)

        def __call__(self, x):
            return nnx.relu(self.norm(self.conv(x)) + self.short_norm(self.short(x)))

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.stem, self.norm = nnx.Conv(2, 4, (3, 3), rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
            self.block, self.head = Block(4, 8, rngs), nnx.Linear(8, 3, rngs=rngs)

        def __call__(self, x):
            x = self.block(nnx.relu(self.norm(self.stem(x))))
            return self.head(x.mean((1, 2)))

    apply_fn, params = jk.from_nnx(Net(nnx.Rngs(0)), mutable=nnx.BatchStat)
    params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    objective = jk.Objective(apply_fn, jk.Categorical())
    batch = (normal(1, 8, 6, 6, 2).astype(jnp.float32), labels(2, 8))
    stats = jk.value_grad_and_factors(objective)
    held = apply_fn.state
    like = stats.factor_shapes(params, batch, state=held)
    tx = jk.kfac(0.1, like=like, damping=0.1)

    @jax.jit
    def step(params, state, held):
        (value, held), grads, factors = stats(params, batch, state=held)
        updates, state = tx.update(grads, state, params, factors=factors)
        return optax.apply_updates(params, updates), state, held, value

    state, values = tx.init(params), []
    for _ in range(8):
        params, state, held, value = step(params, state, held)
        values.append(float(value))
    assert values[-1] < 0.7 * values[0]
