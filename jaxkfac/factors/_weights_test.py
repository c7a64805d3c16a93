"""Weights of loss terms against explicit sums over terms, and against batches with repetitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.factors._build import value_grad_and_factors
from jaxkfac.factors._likelihoods import Categorical, Gaussian
from jaxkfac.factors._objective import Objective
from jaxkfac.interception import mark_outputs

pytestmark = pytest.mark.usefixtures("x64")
N, T, CLASSES = 3, 2, 3
RNG = np.random.default_rng(0)
PARAMS = {  # in NumPy, because JAX has float64 only inside the tests
    "w": RNG.normal(size=(4, 3)),
    "s": np.array([1.5, 0.5, 1.0]),
    "v": RNG.normal(size=(3, CLASSES)),
}
X, Y = RNG.normal(size=(N, T, 4)), RNG.integers(0, CLASSES, (N, T))
WEIGHTS = np.array([[0.3, 2.5], [0.0, 1.0], [0.7, 0.1]])
NONE = {"w": 0.0, "s": 0.0, "v": 0.0}


def model(params, x, shifts=None):
    """Two dense layers and a scale; the tokens of an example mix."""
    shifts = shifts or NONE
    h = jnp.tanh(x @ params["w"] + shifts["w"]) * (params["s"] + shifts["s"])
    h = h + jnp.square(h).mean(1, keepdims=True)
    return h @ params["v"] + shifts["v"]


def loss(params, terms):
    """The sum of weighted terms over a number."""
    logs = jax.nn.log_softmax(model(params, X))
    return -(WEIGHTS[..., None] * logs * jnp.eye(CLASSES)[Y]).sum() / terms


def explicit(fisher, sharing, y, terms):
    """G and the diagonal from the Jacobian of the outputs at each layer's rows."""
    zeros = {k: jnp.zeros((N, T, 3)) for k in PARAMS}
    jacobian = jax.jacrev(lambda shifts: model(PARAMS, X, shifts))(zeros)
    p, one = jax.nn.softmax(model(PARAMS, X)), jnp.eye(CLASSES)
    columns = (one[y] - p)[None]
    if fisher == "exact":  # one term of each example at a time
        columns = jnp.stack([jnp.sqrt(p[..., c, None]) * (one[c] - p) for c in range(CLASSES)])
        columns = (jnp.eye(T)[:, None, None, :, None] * columns).reshape(-1, N, T, CLASSES)
    expected = {}
    for name, j in jacobian.items():
        g = jnp.einsum("ntcmso,kntc->kmso", j, jnp.sqrt(WEIGHTS)[..., None] * columns)
        if sharing == "reduce":
            g = g.sum(2, keepdims=True)
        form = "kmso,kmso->o" if name == "s" else "kmso,kmsp->op"
        expected[name] = jnp.einsum(form, g, g) / terms
    return expected


def collect(objective, weights=None, batch=(X, Y), **options):
    labels = options.pop("labels", None)
    stats = jax.jit(value_grad_and_factors(objective, **options))
    batch = batch if weights is None else (*batch, weights)
    return stats(PARAMS, batch, labels=labels)


def assert_close(left, right, rtol=1e-12):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-14), left, right)


def output_sides(factors):
    return {name: jax.tree.leaves(factors[name])[-1] for name in factors}


TYPES = [(f, s) for f in ("empirical", "mc", "exact") for s in ("expand", "reduce")]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fisher, sharing", TYPES)
def test_a_term_enters_g_and_diagonals_with_the_root_of_its_weight(fisher, sharing):
    labels = (Y + 1) % CLASSES
    stats = {"fisher": fisher, "sharing": sharing, "scales": "diagonal"}
    stats |= {"labels": labels[None]} if fisher == "mc" else {}
    for normalize, terms in (("weight", float(WEIGHTS.sum())), ("count", 5.0)):
        objective = Objective(model, Categorical(), normalize=normalize)
        value, grads, factors = collect(objective, WEIGHTS, **stats)
        given = labels if fisher == "mc" else Y
        assert_close(factors.terms, terms)
        assert_close(output_sides(factors), explicit(fisher, sharing, given, terms))
        assert_close((value, grads), jax.value_and_grad(loss)(PARAMS, terms))
        plain = collect(objective, WEIGHTS > 0, **stats).factors
        assert_close([factors[k].a for k in "wv"], [plain[k].a for k in "wv"])


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fisher, sharing", [*TYPES, ("forward", "expand")])
def test_a_weight_of_two_is_the_example_twice(fisher, sharing):
    objective, twice = Objective(model, Categorical()), lambda x: jnp.concatenate([x, x[1:2]])
    weights = np.ones((N, T)) + np.eye(N)[1][:, None]
    stats = {"fisher": fisher, "sharing": sharing}
    labels = (Y[None], twice(Y)[None]) if fisher == "mc" else (None, None)
    value, grads, factors = collect(objective, weights, labels=labels[0], **stats)
    again = collect(objective, batch=(twice(X), twice(Y)), labels=labels[1], **stats)
    assert_close((value, grads, factors.terms), (again.value, again.grads, again.factors.terms))
    plain = collect(objective, labels=labels[0], **stats).factors
    assert_close([factors[k].a for k in "wv"], [plain[k].a for k in "wv"])
    if fisher != "forward":  # its diagonal counts rows, as A does
        assert_close(output_sides(factors), output_sides(again.factors))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fisher, sharing", [("empirical", "expand"), ("exact", "reduce")])
def test_weights_of_zero_and_one_are_a_mask_bit_for_bit(fisher, sharing):
    """Not under jit, where a compiler may order the sums of two programs differently."""
    mask, stats = WEIGHTS > 0.2, {"fisher": fisher, "sharing": sharing}
    for normalize in ("weight", "count"):
        objective = Objective(model, Categorical(), normalize=normalize)
        run = value_grad_and_factors(objective, **stats)
        masked, weighed = (run(PARAMS, (X, Y, m)) for m in (mask, mask.astype(float)))
        jax.tree.map(np.testing.assert_array_equal, weighed, masked)
    assert_close(collect(objective, np.ones((N, T)), **stats), collect(objective, **stats))


@pytest.mark.slow
def test_weights_of_several_outputs_by_an_objective_and_by_marks():
    """Each output has weights of its own; the second output's are those of whole examples."""
    params = {"w": PARAMS["w"], "v": PARAMS["v"], "u": RNG.normal(size=(3, 2))}
    box, of_box = RNG.normal(size=(N, 2)), np.array([0.5, 3.0, 1.0])

    def outputs(p, x):
        h = jnp.tanh(x @ p["w"])
        return {"class": h @ p["v"], "box": h.mean(1) @ p["u"]}

    likelihoods = {"class": Categorical(), "box": Gaussian()}
    objective = Objective(outputs, likelihoods)

    def marked(p, batch):
        x, y, weights = batch
        total = 0.0
        for name, z in outputs(p, x).items():
            z, w = mark_outputs(z, likelihoods[name], mask=weights[name]), weights[name]
            total += (w * likelihoods[name].terms(z, y[name])).sum() / w.sum()
        return total

    batch = X, {"class": Y, "box": box}, {"class": WEIGHTS, "box": of_box}
    for fisher in ("empirical", "exact"):
        stats = {"fisher": fisher}
        whole = jax.jit(value_grad_and_factors(objective, **stats))(params, batch)
        marks = jax.jit(value_grad_and_factors(marked, **stats))(params, batch)
        assert_close(whole[:2], marks[:2])
        assert_close(output_sides(whole.factors), output_sides(marks.factors))
        assert_close(whole.factors.terms, WEIGHTS.sum() + of_box.sum())
        # The Gauss-Newton matrix of a linear loss is a sum over both means.
        alone = [
            jax.jit(value_grad_and_factors(Objective(f, l), **stats))(params, (X, y, w)).factors
            for f, l, y, w in (
                (lambda p, x: outputs(p, x)["class"], Categorical(), Y, WEIGHTS),
                (lambda p, x: outputs(p, x)["box"], Gaussian(), box, of_box),
            )
        ]
        if fisher == "exact":
            assert_close(whole.factors["w"].g, alone[0]["w"].g + alone[1]["w"].g)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_the_second_pass_weighs_terms_alike(fisher):
    def hidden(p, x):  # a sorted parameter is no layer; here it is the parameter itself
        return model({**p, "s": jnp.sort(p["s"])[np.array([2, 0, 1])]}, x)

    options = {"fisher": fisher, "scales": "exact_diagonal"}
    expected = collect(Objective(model, Categorical()), WEIGHTS, **options).factors["s"]
    second = Objective(hidden, Categorical())
    found = collect(second, WEIGHTS, fisher=fisher, uncovered="diagonal").factors["s"]
    assert_close(found.diagonal, expected.diagonal, 1e-10)


@pytest.mark.slow
def test_weights_of_a_model_in_bfloat16_are_float32():
    half = jax.tree.map(lambda p: jnp.asarray(p, jnp.bfloat16), PARAMS)
    objective = Objective(model, Categorical())
    stats = jax.jit(value_grad_and_factors(objective))
    weights = WEIGHTS.astype(jnp.float32)
    value, grads, factors = stats(half, (jnp.asarray(X, jnp.bfloat16), Y, weights))
    full = stats(PARAMS, (X, Y, WEIGHTS))
    assert factors.terms.dtype == jnp.float32 and grads["w"].dtype == jnp.bfloat16
    np.testing.assert_allclose(factors.terms, full.factors.terms, rtol=1e-6)
    np.testing.assert_allclose(value, full.value, rtol=2e-2)
    np.testing.assert_allclose(factors["v"].g, full.factors["v"].g, atol=2e-3, rtol=5e-2)


@pytest.mark.exhaustive
def test_class_weights_are_weights_of_the_given_targets():
    classes = np.array([0.5, 0.0, 3.0])
    ignoring = Categorical(ignore_index=2, class_weights=classes)
    weights = classes[Y]
    for likelihood, of_terms in ((Categorical(class_weights=classes), weights), (ignoring, None)):
        of_terms = np.where(Y == 2, 0, weights) if of_terms is None else of_terms
        for fisher in ("empirical", "mc"):
            labels = {"labels": (Y + 1)[None] % CLASSES} if fisher == "mc" else {}
            by_class = collect(Objective(model, likelihood), WEIGHTS, fisher=fisher, **labels)
            given = collect(
                Objective(model, Categorical()), WEIGHTS * of_terms, fisher=fisher, **labels
            )
            assert_close(by_class[:2], given[:2])
            assert_close(output_sides(by_class.factors), output_sides(given.factors))
    assert Categorical(class_weights=[1, 2]) == Categorical(class_weights=jnp.asarray([1.0, 2.0]))
    shape = jax.ShapeDtypeStruct((2, 3), jnp.int8)
    assert ignoring.kept(shape) == jax.ShapeDtypeStruct((2, 3), jnp.float64)


def text_model(p, ids):
    """An embedding, a convolution over positions, a scan, and a head on the mean position."""
    ones, dimensions = jax.nn.one_hot(ids, 5, dtype=p["conv"].dtype), ("NHC", "HIO", "NHC")
    y = jax.lax.conv_general_dilated(ones, p["conv"], (1,), "SAME", dimension_numbers=dimensions)
    x = p["embedding"][ids] + y
    step = lambda h, w: (jnp.tanh(h @ w), None)
    x, _ = jax.lax.scan(step, x + p["bias"], p["stack"])
    return x @ p["head"] + x.mean(1, keepdims=True) @ p["pooled"]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_positions_weigh_a_and_nothing_else(fisher):
    params = {
        "embedding": RNG.normal(size=(5, 4)),
        "conv": RNG.normal(size=(3, 5, 4)),
        "bias": RNG.normal(size=4),
        "stack": RNG.normal(size=(2, 4, 4)),
        "head": RNG.normal(size=(4, CLASSES)),
        "pooled": RNG.normal(size=(4, CLASSES)),
    }
    ids, number = RNG.integers(0, 5, (N, T)), np.array([1.0, 2.0, 0.5])
    stats = jax.jit(value_grad_and_factors(Objective(text_model, Categorical()), fisher=fisher))
    positions = np.broadcast_to(number[:, None], (N, T))
    found = stats(params, (ids, Y), positions=positions)
    plain = stats(params, (ids, Y))
    assert_close(found[:2], plain[:2])
    assert_close(output_sides(found.factors), output_sides(plain.factors))
    # A sum over examples: each by itself, times the weight of its positions.
    alone = [stats(params, (ids[n, None], Y[n, None])).factors for n in range(N)]
    for name in ("a_sums", "a_counts"):
        total = jax.tree.map(
            lambda *x: sum(n * y for n, y in zip(number, x)), *[getattr(f, name) for f in alone]
        )
        assert_close(getattr(found.factors, name), total)
    # Weights of terms and of positions together are repetitions, A included.
    number = np.array([1, 2, 3])
    both = np.broadcast_to(number[:, None].astype(float), (N, T))
    again = np.repeat(np.arange(N), number)
    weighed = stats(params, (ids, Y, both), positions=both).factors
    repeated = stats(params, (ids[again], Y[again])).factors
    assert_close([*weighed.values()], [*repeated.values()])
    zeros = np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    left_out = [stats(params, (ids, Y), positions=p).factors for p in (zeros, zeros > 0)]
    assert_close(*left_out)


def test_weights_of_positions_that_no_factor_can_have():
    objective, half = Objective(model, Categorical()), jnp.full((N, T), 0.5)
    with pytest.raises(
        ValueError, match="positions= has weights, and the layer is read by example"
    ):
        value_grad_and_factors(objective, sharing="reduce")(PARAMS, (X, Y), positions=half)
    stats = value_grad_and_factors(objective)
    with pytest.raises(ValueError, match=r"positions has the weight -0.5 at \[0, 0\]"):
        stats(PARAMS, (X, Y), positions=-half)
    factors = jax.jit(stats)(PARAMS, (X, Y), positions=-half).factors
    assert not factors.is_finite()["w"]


@pytest.mark.slow
def test_weights_of_positions_with_a_sample_of_the_rows_are_unbiased():
    objective = Objective(lambda p, x: x @ p["w"] + p["b"], Gaussian())
    params, x = {"w": np.ones((4, 2)), "b": np.zeros(2)}, RNG.normal(size=(64, 4))
    weights = RNG.uniform(0.5, 2, size=64) * (RNG.uniform(size=64) > 0.25)
    stats = value_grad_and_factors(objective, subsample=0.5)

    def a(key):
        return stats(params, (x, x[:, :2]), key, positions=jnp.asarray(weights)).factors.a_sums["w"]

    found = jax.jit(jax.vmap(a))(jax.random.split(jax.random.key(0), 400))
    ones = np.concatenate([x, np.ones((64, 1))], 1)
    expected = ones.T @ (weights[:, None] * ones)
    error = np.asarray(found.std(0)) / 20  # of the mean of 400
    assert (abs(found.mean(0) - expected) < 5 * error + 1e-9).all()


@pytest.mark.slow
def test_rows_of_a_layer_with_two_marks_have_the_marks_weights_and_not_those_of_terms():
    x, z = RNG.normal(size=(5, 4)), RNG.normal(size=(3, 4))

    def marked(p, masks):
        total = 0.0
        for rows, weight, mask in ((x, 1.0, masks[0]), (z, 4.0, masks[1])):
            y = mark_outputs(rows @ p["w"], Gaussian(), weight=weight, mask=mask)
            w = mask.astype(y.dtype)
            total += weight * (w * Gaussian().terms(y, jnp.zeros_like(y))).sum() / w.sum()
        return total

    stats, ones, twos = jax.jit(value_grad_and_factors(marked)), np.ones(3), np.full(5, 2.0)
    found, plain = (stats({"w": PARAMS["w"]}, (w, ones)) for w in (twos, np.ones(5)))
    assert_close([*found[:2], found.factors["w"]], [*plain[:2], plain.factors["w"]])
    kept = np.arange(5) < 4
    found, plain = (stats({"w": PARAMS["w"]}, (w, ones)) for w in (kept * 0.3, kept))
    assert_close([*found[:2], found.factors["w"]], [*plain[:2], plain.factors["w"]])
