"""Scalar losses that mark their outputs: what a mark says, and what is refused."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxkfac as jk
from jaxkfac.uses._examples import check_shows_examples
from tests._checks import equations
from tests._programs import normal as _normal

pytestmark = pytest.mark.usefixtures("x64")
RNG = np.random.default_rng(0)
N = 5


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape))


def cross_entropy(z, y):
    return -jnp.take_along_axis(jax.nn.log_softmax(z), y[..., None], -1).mean()


def model(p, x):
    return jnp.tanh(x @ p["w"] + p["b"]) @ p["v"]


def marked(p, batch):
    return cross_entropy(jk.mark_outputs(model(p, batch[0]), jk.Categorical()), batch[1])


def net():
    params = {"w": normal(3, 4), "b": normal(4), "v": normal(4, 3)}
    return params, (normal(N, 3), jnp.asarray(RNG.integers(0, 3, N)))


def assert_equal(x, y, rtol=1e-12):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-14), x, y)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("fisher", ["empirical", "mc", "exact", "forward"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_one_mark_of_weight_one_is_an_objective(fisher, sharing):
    params, batch = net()
    options = {"fisher": fisher, "sharing": sharing}
    of = lambda loss: jk.value_grad_and_factors(loss, **options)(params, batch, jax.random.key(0))
    assert_equal(of(jax.jit(marked)), of(jk.Objective(model, jk.Categorical())))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("wall", [lambda f: f, jax.jit, jax.checkpoint])
def test_what_a_loss_holds_beside_its_marks_is_in_no_factor(wall):
    """A penalty on activations has no likelihood: G is that of the mark, as of mc and exact."""
    params, batch = net()

    def penalised(p, batch):
        h = jnp.tanh(batch[0] @ p["w"] + p["b"])
        z = wall(lambda h: jk.mark_outputs(h @ p["v"], jk.Categorical()))(h)
        return cross_entropy(z, batch[1]) + 3.0 * jnp.square(h).mean() + jnp.square(p["w"]).sum()

    value, grads, factors = jax.jit(jk.value_grad_and_factors(penalised))(params, batch)
    assert_equal((value, grads), jax.value_and_grad(penalised)(params, batch))
    assert_equal(factors, jk.value_grad_and_factors(marked)(params, batch).factors)


@pytest.mark.slow
@pytest.mark.parametrize("extra", [False, True])
def test_only_what_leads_past_the_marks_takes_a_second_pass(extra):
    params, batch = net()

    def loss(p, batch):
        h = jnp.tanh(batch[0] @ p["w"] + p["b"])
        z = jk.mark_outputs(h @ p["v"], jk.Categorical())
        return cross_entropy(z, batch[1]) + jnp.square(p["w"]).sum() + (h.mean() if extra else 0.0)

    closed = jax.make_jaxpr(jk.value_grad_and_factors(loss))(params, batch)
    products = [e for e in equations(closed.jaxpr) if e.primitive.name == "dot_general"]
    plain = jax.make_jaxpr(jk.value_grad_and_factors(marked))(params, batch)
    alone = [e for e in equations(plain.jaxpr) if e.primitive.name == "dot_general"]
    assert (len(products) > len(alone)) == extra


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", ["number", "array"])
def test_a_linear_loss_of_two_terms_has_its_gauss_newton_matrix(form):
    """A weighs rows by weight / T: pooled by their number it would be another."""
    weight = 2.0 if form == "number" else jnp.asarray(2.0)
    params = {"w": normal(3, 2)}
    batch = (normal(4, 3), normal(4, 2)), (normal(7, 3), normal(7, 2)), jnp.arange(7) < 5

    def loss(p, batch):
        (x1, y1), (x2, y2), kept = batch
        x2 = jk.mark_rows(x2, kept)
        first = jk.mark_outputs(x1 @ p["w"], jk.Gaussian(), weight=weight)
        second = jk.mark_outputs(x2 @ p["w"], jk.Gaussian(), weight=0.5, mask=kept)
        squares = jnp.where(kept, jnp.square(second - y2).sum(-1), 0)
        mean = squares.sum() / kept.sum(dtype=float)
        return weight * 0.5 * jnp.square(first - y1).sum(-1).mean() + 0.5 * 0.5 * mean

    hessian = jax.hessian(lambda w: loss({"w": w}, batch))(params["w"]).reshape(6, 6)
    factors = jax.jit(jk.value_grad_and_factors(loss, fisher="exact"))(params, batch).factors
    np.testing.assert_allclose(np.kron(*factors["w"]), hessian, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(jk.operators.ggn(loss, params, batch).to_dense(), hessian, 1e-10)
    np.testing.assert_allclose(factors.a_counts["w"], 9)  # the rows there are
    with pytest.raises(ValueError, match="'w'.*lead to different jk.mark_outputs"):
        jk.value_grad_and_factors(loss, sharing="reduce")(params, batch)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("first", ["u", "v"])
def test_layers_that_weigh_the_rows_of_one_input_unlike_share_no_factor(first):
    """The second layer read an A that was weighed as the first one weighs its rows."""
    params = {"u": normal(3, 2), "v": normal(3, 2)}
    weights = {"u": (1.0, 4.0), "v": (9.0, 0.5)}
    batch = normal(4, 3), normal(4, 3)

    def loss(p, batch):
        total = 0.0
        for name in (first, "v" if first == "u" else "u"):
            for x, weight in zip(batch, weights[name], strict=True):
                z = jk.mark_outputs(x @ p[name], jk.Gaussian(), weight=weight)
                total += weight * 0.5 * jnp.square(z).sum(-1).mean()
        return total

    factors = jk.value_grad_and_factors(loss, fisher="exact")(params, batch).factors
    for name in params:
        hessian = jax.hessian(lambda w, name=name: loss({**params, name: w}, batch))(params[name])
        expected = hessian.reshape(6, 6)
        np.testing.assert_allclose(np.kron(*factors[name]), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_forward_needs_no_cotangents_of_marks():
    """Marks in a row, and one in a custom derivative, are refused where cotangents count."""

    def in_a_row(p, batch):
        h = jk.mark_outputs(batch[0] @ p["w"], jk.Gaussian(), weight=2.0)
        z = jk.mark_outputs(jnp.tanh(h) @ p["v"], jk.Gaussian())
        return jnp.square(h).sum(-1).mean() + 0.5 * jnp.square(z - batch[1]).sum(-1).mean()

    @jax.custom_jvp
    def squares(z, y):
        return 0.5 * jnp.square(jk.mark_outputs(z, jk.Gaussian()) - y).sum(-1).mean()

    squares.defjvp(lambda at, d: (squares(*at), ((at[0] - at[1]) * d[0]).sum(-1).mean()))
    inside = lambda p, batch: squares(jnp.tanh(batch[0] @ p["w"]) @ p["v"], batch[1])
    params, batch = {"w": normal(3, 2), "v": normal(2, 2)}, (normal(4, 3), normal(4, 2))
    for loss in (in_a_row, inside):
        with pytest.raises(ValueError, match="jk.mark_outputs: mark"):
            jk.value_grad_and_factors(loss)(params, batch)
        exact, forward = (
            jk.value_grad_and_factors(loss, fisher=fisher)(params, batch).factors
            for fisher in ("exact", "forward")
        )
        assert_equal((forward.a_sums, forward.a_counts), (exact.a_sums, exact.a_counts))
        np.testing.assert_array_equal(forward["w"].g, jnp.eye(2))


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize("weights", [(2.0, 2.0), (1.0, 4.0)])
def test_layers_whose_rows_lead_to_the_same_marks_still_share_one(weights):
    def loss(p, batch):
        total = 0.0
        for x, weight in zip(batch, weights, strict=True):
            z = jk.mark_outputs(x @ p["u"] + x @ p["v"], jk.Gaussian(), weight=weight)
            total += weight * 0.5 * jnp.square(z).sum(-1).mean()
        return total

    params = {"u": normal(3, 2), "v": normal(3, 2)}
    factors = jk.value_grad_and_factors(loss)(params, (normal(4, 3), normal(4, 3))).factors
    assert list(factors.a_sums) == ["u"]


def clip(p, batch, marks=True):
    images, texts = batch
    z = (images @ p["i"]) @ (texts @ p["t"]).T
    y = jnp.arange(len(images))

    def one_way(z):
        return cross_entropy(jk.mark_outputs(z, jk.Categorical(), weight=0.5) if marks else z, y)

    return 0.5 * one_way(z) + 0.5 * one_way(z.T)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_a_contrastive_loss_in_both_directions(fisher, sharing):
    """Each term reads all rows of the other tower: exact propagates one after the other."""
    params, batch = {"i": normal(3, 4), "t": normal(2, 4)}, (normal(N, 3), normal(N, 2))
    stats = jax.jit(jk.value_grad_and_factors(clip, fisher=fisher, sharing=sharing))
    value, grads, factors = stats(params, batch)
    assert_equal((value, grads), jax.value_and_grad(lambda p: clip(p, batch, marks=False))(params))

    def logits(rows):
        return rows[0] @ rows[1].T

    rows = batch[0] @ params["i"], batch[1] @ params["t"]
    z, vjp = jax.vjp(logits, rows)
    root, p, q = np.sqrt(0.5 / N), jax.nn.softmax(z), jax.nn.softmax(z.T)
    if fisher == "empirical":
        pulls = [root * ((p - jnp.eye(N)) + (q - jnp.eye(N)).T)]
    else:  # one term in one direction after the other: rows of a tower read all of them
        pulls = []
        for softmax, turn in ((p, lambda x: x), (q, lambda x: x.T)):
            for n in range(N):
                for c in range(N):
                    column = jnp.sqrt(softmax[n, c]) * (jnp.eye(N)[c] - softmax[n])
                    pulls.append(root * turn(jnp.zeros((N, N)).at[n].set(column)))
    for k, name in enumerate("it"):
        g = [vjp(pull)[0][k] for pull in pulls]
        np.testing.assert_allclose(factors[name].a, batch[k].T @ batch[k] / N, rtol=1e-10)
        expected = sum(y.T @ y for y in g)
        np.testing.assert_allclose(factors[name].g, expected, rtol=1e-10, atol=1e-13)


@pytest.mark.exhaustive
def test_sampled_labels_of_a_contrastive_loss_expect_its_exact_factors():
    params, batch = {"i": normal(3, 4), "t": normal(2, 4)}, (normal(N, 3), normal(N, 2))
    sampled = jk.value_grad_and_factors(clip, fisher="mc")
    drawn = jax.vmap(lambda key: sampled(params, batch, key).factors.g_sums)
    found = jax.jit(drawn)(jax.random.split(jax.random.key(0), 2000))
    exact = jk.value_grad_and_factors(clip, fisher="exact")(params, batch).factors
    for name in "it":
        error = found[name].std(0) / 2000**0.5
        assert (abs(found[name].mean(0) - exact.g_sums[name]) < 4 * error + 1e-12).all()


@pytest.mark.slow
def test_forward_factors_of_a_contrastive_loss_are_of_inputs_alone():
    params, batch = {"i": normal(3, 4), "t": normal(2, 4)}, (normal(N, 3), normal(N, 2))
    factors = jk.value_grad_and_factors(clip, fisher="forward")(params, batch).factors
    for k, name in enumerate("it"):
        np.testing.assert_allclose(factors[name].a, batch[k].T @ batch[k] / N, rtol=1e-10)
        np.testing.assert_array_equal(factors[name].g, np.eye(4))


def attended(h):
    """Each token of an example reads the others; then examples and tokens are one axis."""
    h = h.reshape(2, -1, h.shape[-1])
    return (jax.nn.softmax(h @ h.mT) @ h).reshape(-1, h.shape[-1])


MEETINGS = {
    "a tower times itself": lambda h: h @ h.T,
    "distances in pairs": lambda h: -jnp.square(h[:, None] - h).sum(-1),
    "less the mean": lambda h: jnp.tanh(h - h.mean(0)),
    "tokens side by side": attended,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [k if k == "a tower times itself" else pytest.param(k, marks=pytest.mark.exhaustive)
             for k in MEETINGS]
)  # fmt: skip
def test_terms_whose_rows_meet_are_propagated_one_by_one(name, capsys):
    """Their axes are those of the examples, and yet a row has a part in several terms."""
    meet, params, x = MEETINGS[name], {"w": normal(3, 4)}, normal(6, 3)

    def loss(p, batch):
        z = jk.mark_outputs(meet(batch @ p["w"]), jk.Categorical())
        return cross_entropy(z, jnp.arange(len(z)) % z.shape[1])

    factors = jax.jit(jk.value_grad_and_factors(loss, fisher="exact"))(params, x).factors
    z, vjp = jax.vjp(meet, x @ params["w"])
    p, expected = jax.nn.softmax(z), 0.0
    for n, c in np.ndindex(*z.shape):
        column = jnp.sqrt(p[n, c] / len(z)) * (jnp.eye(z.shape[1])[c] - p[n])
        (g,) = vjp(jnp.zeros_like(z).at[n].set(column))
        expected += g.T @ g
    np.testing.assert_allclose(factors["w"].g, expected, rtol=1e-10, atol=1e-13)
    assert f"takes {z.size} backward passes" in capsys.readouterr().err


@pytest.mark.slow
def test_mapped_outputs_are_terms_like_any_other():
    params, (x, y) = net()

    def mapped(p, batch):
        def one(x):
            return jk.mark_outputs(model(p, x), jk.Categorical())

        return cross_entropy(jax.vmap(one)(batch[0]), batch[1])

    of = lambda loss: jk.value_grad_and_factors(loss, fisher="exact")(params, (x, y))
    assert_equal(of(mapped), of(marked))


@pytest.mark.exhaustive
def test_a_layer_in_a_loop_leads_to_the_mark_behind_it():
    params = {"w": normal(3, 3), "v": normal(3, 3)}
    batch = net()[1]

    def run(p, x):
        return lax.scan(lambda h, _: (jnp.tanh(h @ p["w"]), None), x, None, length=2)[0] @ p["v"]

    def loss(p, batch):
        return cross_entropy(jk.mark_outputs(run(p, batch[0]), jk.Categorical()), batch[1])

    of = lambda loss: jk.value_grad_and_factors(loss, fisher="exact")(params, batch)
    assert_equal(of(loss), of(jk.Objective(run, jk.Categorical())))


def collect(loss, *, params=None, batch=None, **options):
    mine, its = net()
    return jk.value_grad_and_factors(loss, **options)(params or mine, batch or its)


def of_itself(fn):
    """A function with a derivative of its own, which is the one it has."""
    wrapped = jax.custom_vjp(fn)
    wrapped.defvjp(lambda *args: jax.vjp(fn, *args), lambda vjp, cotangent: vjp(cotangent))
    return wrapped


def on_a_mesh(fn):
    replicated = (jax.P(), jax.P())
    return jax.shard_map(
        fn, mesh=jax.make_mesh((1,), ("d",)), in_specs=replicated, out_specs=jax.P()
    )


HIDING = {
    "cond": lambda fn: lambda *args: lax.cond(args[0]["b"][0] > 0, fn, fn, *args),
    "scan": lambda fn: lambda *args: lax.map(lambda _: fn(*args), jnp.arange(2)).mean(),
    "while": lambda fn: lambda *args: lax.while_loop(jnp.isnan, lambda _: fn(*args), jnp.nan),
    "custom_vjp_call": of_itself,
    "shard_map": on_a_mesh,
}


@pytest.mark.parametrize("name", HIDING)
def test_marks_that_something_hides_are_refused(name):
    def loss(p, batch):
        value = lambda p, x: jnp.square(jk.mark_outputs(model(p, x), jk.Gaussian())).mean()
        return HIDING[name](value)(p, batch[0])

    with pytest.raises(jk.HiddenMarkError, match=f"inside `{name}`.*mark them outside"):
        collect(loss)


def test_marks_of_one_row_with_masks_are_refused():
    def of_masks(p, batch):
        def one(x, kept):
            return jk.mark_outputs(model(p, x), jk.Categorical(), mask=kept)

        return cross_entropy(jax.vmap(one)(batch[0], batch[1] > 0), batch[1])

    with pytest.raises(jk.HiddenMarkError, match=r"mapped by jax.vmap.*after vmap"):
        collect(of_masks)


def test_one_mark_with_several_weights_is_refused():
    def of_weights(p, batch):
        weighed = lambda w: jk.mark_outputs(model(p, batch[0]), jk.Categorical(), weight=w)
        return cross_entropy(jax.vmap(weighed)(jnp.array([1.0, 2.0])).mean(0), batch[1])

    with pytest.raises(jk.HiddenMarkError, match=r"mapped by jax.vmap.*after vmap"):
        collect(of_weights)


def test_marks_that_do_not_fit_are_refused():
    z, kind = jnp.ones((N, 3)), jk.Categorical()
    for wrong, words in (
        (lambda: jk.mark_outputs(z.astype(int), kind), "dtype int64, expected outputs"),
        (lambda: jk.mark_outputs(z, kind, mask=jnp.ones(3, bool)), r"one entry per term, \(5,\)"),
        (lambda: jk.mark_outputs(z, kind, mask=jnp.ones(N, int)), "mask is int64 of shape"),
        (lambda: jk.mark_outputs(z, kind, weight=-1.0), "weight=-1.0, expected a positive"),
        (lambda: jk.mark_outputs(z, kind, weight=jnp.ones(2)), "expected a scalar"),
        (lambda: jk.mark_outputs(z.sum(), kind), "x is a scalar"),
        (lambda: jk.mark_outputs(z, jk.Categorical), r"write jk.Categorical\(\)"),
        (lambda: jk.mark_outputs(z, "categorical"), "jk.Categorical.*got 'categorical'"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            wrong()

    def flat(p, batch):
        return jk.mark_outputs(model(p, batch[0]).sum(-1), jk.Categorical()).mean()

    with pytest.raises(ValueError, match=r"mark 0.*shape \(5,\), expected .*Categorical"):
        collect(flat)


@pytest.mark.slow
def test_what_does_not_go_with_marks_is_refused():
    params, _ = net()
    inside = lambda p, x: jk.mark_outputs(model(p, x), jk.Categorical())
    with pytest.raises(ValueError, match="inside the apply_fn of a jk.Objective"):
        collect(jk.Objective(inside, jk.Categorical()))
    with pytest.raises(ValueError, match="loss_terms=5 beside jk.mark_outputs"):
        collect(marked, loss_terms=5)
    with pytest.raises(ValueError, match='fisher="mc" samples labels'):
        collect(marked, fisher="mc")
    with pytest.raises(ValueError, match='"exact" needs the model.*jk.mark_outputs'):
        collect(lambda p, batch: cross_entropy(model(p, batch[0]), batch[1]), fisher="exact")

    def of_parameters(p, batch):
        z = jk.mark_outputs(jnp.tanh(p["v"]), jk.Categorical())
        return cross_entropy(model(p, batch[0]), batch[1]) + z.sum()

    with pytest.raises(ValueError, match="mark 0 .*does not depend on the batch"):
        collect(of_parameters)

    def beside(p, batch):
        return marked(p, batch) + jnp.square(batch[0] @ p["u"]).mean()

    with pytest.raises(jk.UncoveredParameterError, match="layers 'u' lead to none of"):
        collect(beside, params=params | {"u": normal(3, 2)})
    collect(beside, params=params | {"u": normal(3, 2)}, layers="[vwb]", uncovered="ignore")


@pytest.mark.slow
def test_marks_that_follow_each_other_need_equal_shares_for_given_targets():
    """The loss's own cotangent of the first holds that of the second."""

    def loss(p, batch):
        h = jk.mark_outputs(batch[0] @ p["w"] + p["b"], jk.Gaussian(), weight=3.0)
        z = jk.mark_outputs(jnp.tanh(h) @ p["v"], jk.Categorical())
        return cross_entropy(z, batch[1]) + 1.5 * jnp.square(h).sum(-1).mean()

    collect(loss, fisher="exact")
    with pytest.raises(ValueError, match="mark 1 is computed from mark 0"):
        collect(loss)


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize("marks", [True, False])
def test_a_sum_over_rows_is_noticed(marks):
    def total(p, batch):
        z = model(p, batch[0])
        z = jk.mark_outputs(z, jk.Categorical()) if marks else z
        return cross_entropy(z, batch[1]) * len(batch[1])

    options = {} if marks else {"loss_terms": N}
    stats = jk.value_grad_and_factors(total, **options)
    params, batch = net()
    with pytest.warns(UserWarning, match="the loss looks like a sum over rows"):
        stats(params, batch)
    with warnings.catch_warnings():  # once for each collector, whatever the shapes are
        warnings.simplefilter("error")
        stats(params, jax.tree.map(lambda x: x[1:], batch))


def test_a_mean_over_a_number_in_the_batch_is_no_sum():
    def mean(p, batch):
        return cross_entropy(model(p, batch["x"]), batch["y"]) * len(batch["y"]) / batch["n"]

    params, (x, y) = net()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collect(mean, params=params, batch={"x": x, "y": y, "n": jnp.asarray(5.0)}, loss_terms=N)


@pytest.mark.exhaustive
def test_a_contrastive_loss_is_no_sum():
    """On two rows it is log 2, and on these twice 2 log 2: three times tells."""
    params = {"i": jnp.zeros((3, 4)), "t": jnp.zeros((2, 4))}
    batch = normal(7, 3), normal(7, 2)
    jk.value_grad_and_factors(clip)(params, batch)


def test_targets_that_a_mark_does_not_see_are_left_out_by_its_mask():
    z, ignoring = jnp.ones((N, 3)), jk.Categorical(ignore_index=-100)
    with pytest.raises(
        ValueError, match=r"ignore_index= of Cat.*give mask=likelihood.kept\(targets\)"
    ):
        jk.mark_outputs(z, ignoring)
    jk.mark_outputs(z, ignoring, mask=jnp.ones(N, bool))
    with pytest.raises(ValueError, match="weight=-1.0, expected a number that is not negative"):
        jk.mark_outputs(z, jk.Categorical(), weight=jnp.asarray(-1.0))


def test_a_mark_of_what_is_marked_already_is_refused():
    def twice(p, batch):
        z = jk.mark_outputs(model(p, batch[0]), jk.Categorical())
        return cross_entropy(jk.mark_outputs(z, jk.Categorical()), batch[1])

    for fisher in ("empirical", "exact"):
        with pytest.raises(ValueError, match="mark 1 is of what mark 0 marks already"):
            collect(twice, fisher=fisher)


@pytest.mark.slow
def test_labels_of_marks_are_checked():
    params, batch = net()
    stats = jk.value_grad_and_factors(marked, fisher="mc")
    y = batch[1]
    for labels, words in (
        (y[None], "labels: expected a list"),
        ([y[None], y[None]], "each of the 1 marks"),
        ([None], r"labels\[0\]: expected an array"),
        ([y], r"labels\[0\]: .*targets have shape \(\), expected \(5,\)"),
        ([y[None].astype(float)], r"labels\[0\]: .*expected integers"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            stats(params, batch, labels=labels)
    stats(params, batch, labels=[jnp.stack([y, y])])


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fisher", ["empirical", "mc", "exact"])
def test_a_mark_of_weight_zero_has_no_part(fisher):
    """As at the start of a schedule: the weight is an array, and the layer leads to both marks."""
    params, (x, y) = net()

    def loss(p, batch):
        x, y, weight = batch
        z = jk.mark_outputs(model(p, x), jk.Categorical())
        h = jk.mark_outputs(x[:3] @ p["w"] + p["b"], jk.Gaussian(), weight=weight)
        return cross_entropy(z, y) + weight * 0.5 * jnp.square(h).sum(-1).mean()

    of = lambda loss, *more: jax.jit(jk.value_grad_and_factors(loss, fisher=fisher))(
        params, (x, y, *more), jax.random.key(0)
    )
    found, expected = of(loss, jnp.asarray(0.0)), of(marked)
    assert_equal(found[:2], expected[:2])
    assert all(jax.tree.leaves(found.factors.is_finite()))
    if fisher != "mc":  # whose labels are drawn mark by mark
        assert_equal(found.factors["v"].g, expected.factors["v"].g)
        product = lambda f: np.kron(*f.factors["w"])
        assert_equal(product(found), product(expected))


def test_refusals_of_a_scalar_loss_say_what_to_write():
    """Influence of a marked loss, adaptation of a loss without outputs, a loss with aux."""

    def marked(p, batch):
        outputs = jk.mark_outputs(batch["x"] @ p["w"], jk.Gaussian())
        return 0.5 * jnp.mean(jnp.sum((outputs - batch["y"]) ** 2, -1))

    params, batch = {"w": _normal(0, 3, 2)}, {"x": _normal(1, 4, 3), "y": _normal(2, 4, 2)}
    with pytest.raises(TypeError, match=r"jk.Objective\(apply_fn, likelihood\).*a VAE"):
        check_shows_examples(marked)
    plain = lambda p, batch: jnp.mean((batch["x"] @ p["w"]) ** 2)
    stats = jk.value_grad_and_factors(plain, loss_terms=4)
    with pytest.raises(TypeError, match=r"jk.kfe_adam\(1e-2\) or jk.kfac\(0.1\)"):
        stats.adaptation(params, batch)
    pair = jk.value_grad_and_factors(lambda p, batch: (plain(p, batch), 1.0), loss_terms=4)
    with pytest.raises(ValueError, match="a tuple of 2, expected a scalar.*has_aux=True"):
        pair.factor_shapes(params, batch)


def test_influence_of_a_batched_graph_says_what_to_write():
    def graph(p, inputs):
        of_node = jnp.repeat(jnp.arange(3), inputs["n_node"], total_repeat_length=7)
        return jax.ops.segment_sum(inputs["nodes"] @ p["w"], of_node, 3)

    params, inputs = {"w": _normal(0, 4, 2)}, {"nodes": _normal(1, 7, 4), "n_node": jnp.arange(3)}
    batch, objective = (inputs, _normal(2, 3, 2)), jk.Objective(graph, jk.Gaussian())
    bases = jk.eigendecompose(jk.value_grad_and_factors(objective)(params, batch).factors)
    with pytest.raises(jk.CoupledExamplesError, match="batched graph.*rows of its own, padded"):
        jk.self_influence(objective, params, bases, batch)
