"""Losses of several outputs, as an ``Objective`` and by marks, against brute force."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import jaxkfac as jk

pytestmark = pytest.mark.usefixtures("x64")
N, S = 4, 3
LIKELIHOODS = {"box": jk.Gaussian(), "flag": jk.Bernoulli(), "token": jk.Categorical()}
NAMES = tuple(LIKELIHOODS)  # in the order of dictionaries, which is sorted
WEIGHTS = {"box": 0.5, "flag": 3.0, "token": 1.0}
EVEN = dict.fromkeys(NAMES, 1.0)


def problem():
    rng = np.random.default_rng(0)
    shapes = {"u": (3, 4), "v": (4, 3), "w": (4, 2), "f": (4,)}
    params = {k: jnp.asarray(rng.normal(size=s)) for k, s in shapes.items()}
    x = jnp.asarray(rng.normal(size=(N, S, 3)))
    targets = {
        "box": jnp.asarray(rng.normal(size=(N, 2))),
        "flag": jnp.asarray(rng.integers(0, 2, N), float),
        "token": jnp.asarray(rng.integers(0, 3, (N, S))),
    }
    mask = {"box": None, "flag": None, "token": jnp.arange(S) < jnp.asarray([[3], [1], [2], [3]])}
    return params, x, targets, mask


def model(p, x, shifts=None):
    """A trunk that mixes positions, and three heads of unlike numbers of terms."""
    shift = shifts or dict.fromkeys("uvwf", 0.0)
    h = jnp.tanh(x @ p["u"] + shift["u"])
    h = h + h.mean(1, keepdims=True)
    out = {
        "token": h @ p["v"] + shift["v"],
        "box": h.mean(1) @ p["w"] + shift["w"],
        "flag": h.sum(1) @ p["f"] + shift["f"],
    }
    return out, {"u": x, "v": h, "w": h.mean(1), "f": h.sum(1)}


def term_losses(name, y, targets):
    if name == "box":
        return 0.5 * jnp.square(y - targets).sum(-1)
    if name == "flag":
        return jnp.log1p(jnp.exp(y)) - targets * y
    return jax.nn.logsumexp(y, -1) - jnp.take_along_axis(y, targets[..., None], -1)[..., 0]


def marked(weights, how=lambda f: f):
    @how
    def heads(p, x, mask):
        out = model(p, x)[0]
        return {
            k: jk.mark_outputs(out[k], LIKELIHOODS[k], weight=weights[k], mask=mask[k])
            for k in NAMES
        }

    def loss(p, batch):
        x, targets, mask = batch
        out, total = heads(p, x, mask), 0.0
        for k in NAMES:
            terms = term_losses(k, out[k], targets[k])
            kept = jnp.ones(terms.shape, bool) if mask[k] is None else mask[k]
            total += weights[k] * jnp.where(kept, terms, 0.0).sum() / kept.sum(dtype=float)
        return total

    return loss


def pulls(fisher, weights, labels=None):
    """Cotangents of the outputs, each √(weight / T) times a score or a column."""
    params, x, targets, mask = problem()
    out = model(params, x)[0]
    kept = {k: jnp.ones((N,) + ((S,) if k == "token" else ()), bool) for k in NAMES}
    kept |= {k: m for k, m in mask.items() if m is not None}
    root = {k: jnp.sqrt(weights[k] / kept[k].sum(dtype=float)) for k in NAMES}
    zero = jax.tree.map(jnp.zeros_like, out)

    def spread(k, y):
        there = kept[k][..., None] if y.ndim > kept[k].ndim else kept[k]
        return jnp.where(there, y * root[k], 0.0)

    def score(at):
        grads = {k: jax.grad(lambda y, k=k: term_losses(k, y, at[k]).sum())(out[k]) for k in NAMES}
        return {k: spread(k, grads[k]) for k in NAMES}

    if fisher == "empirical":
        return [score(targets)]
    if fisher == "mc":
        number = len(labels["box"])
        each = [score({k: labels[k][s] for k in NAMES}) for s in range(number)]
        return [jax.tree.map(lambda y: y / np.sqrt(number), one) for one in each]
    found = [zero | {"box": spread("box", jnp.eye(2)[c] * jnp.ones((N, 1)))} for c in range(2)]
    sigmoid = jax.nn.sigmoid(out["flag"])
    found.append(zero | {"flag": spread("flag", jnp.sqrt(sigmoid * (1 - sigmoid)))})
    p = jax.nn.softmax(out["token"])
    for s in range(S):
        for c in range(3):
            column = jnp.sqrt(p[..., c, None]) * (jnp.eye(3)[c] - p)
            here = (np.arange(S) == s)[:, None]
            found.append(zero | {"token": spread("token", jnp.where(here, column, 0.0))})
    return found


def rows():
    """Input rows of each layer, and a function from a pull to its output rows."""
    params, x, _, _ = problem()
    _, inputs = model(params, x)
    shapes = {"u": (N, S, 4), "v": (N, S, 3), "w": (N, 2), "f": (N,)}
    shifts = {k: jnp.zeros(s) for k, s in shapes.items()}
    _, vjp = jax.vjp(lambda shifts: model(params, x, shifts)[0], shifts)

    def by_position(k, y):
        y = y[..., None] if k == "f" else y
        return y.reshape(N, -1, y.shape[-1])

    a = {k: y.reshape(N, -1, y.shape[-1]) for k, y in inputs.items()}
    return a, lambda pull: {k: by_position(k, y) for k, y in vjp(pull)[0].items()}


def brute(fisher, weights, sharing="expand", labels=None):
    """``{layer: (A, G)}``."""
    a, outputs_of = rows()
    each = [outputs_of(pull) for pull in pulls(fisher, weights, labels)]
    found = {}
    for k in "uvwf":
        x, g = a[k], [one[k] for one in each]
        if sharing == "reduce":
            x, g = x.mean(1, keepdims=True), [y.sum(1, keepdims=True) for y in g]
        x = x.reshape(-1, x.shape[-1])
        found[k] = (x.T @ x / len(x), sum(jnp.einsum("nsi,nsj->ij", y, y) for y in g))
    return found


def drawn(number):
    params, x, _, _ = problem()
    out = model(params, x)[0]
    keys = jax.random.split(jax.random.key(5), number)
    return {
        k: jax.vmap(lambda key, k=k: LIKELIHOODS[k].sample(key, out[k][..., None])[..., 0])(keys)
        if k == "flag"
        else jax.vmap(lambda key, k=k: LIKELIHOODS[k].sample(key, out[k]))(keys)
        for k in NAMES
    }


def assert_factors(factors, expected):
    for k, (a, g) in expected.items():
        np.testing.assert_allclose(factors[k].a, a, rtol=1e-10, atol=1e-13)
        np.testing.assert_allclose(factors[k].g, g, rtol=1e-10, atol=1e-13)


def options_of(fisher):
    labels = drawn(2) if fisher == "mc" else None
    return labels, {"fisher": fisher}


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("fisher", ["empirical", "mc", "exact"])
def test_a_dictionary_of_likelihoods_has_the_factors_of_the_sum_of_means(fisher, sharing):
    params, x, targets, mask = problem()
    objective = jk.Objective(lambda p, x: model(p, x)[0], LIKELIHOODS)
    labels, options = options_of(fisher)
    stats = jax.jit(jk.value_grad_and_factors(objective, sharing=sharing, **options))
    value, grads, factors = stats(params, (x, targets, mask), labels=labels)
    expected = jax.value_and_grad(marked(EVEN))(params, (x, targets, mask))
    np.testing.assert_allclose(value, expected[0], rtol=1e-12)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-10), grads, expected[1])
    assert_factors(factors, brute(fisher, EVEN, sharing, labels))
    assert int(factors.terms) == N + N + int(mask["token"].sum())


HOW = {"plain": lambda f: f, "jit": jax.jit, "remat": jax.checkpoint}


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "fisher, sharing, how",
    [
        ("empirical", "expand", "plain"),
        ("empirical", "reduce", "remat"),
        ("mc", "expand", "jit"),
        ("exact", "expand", "remat"),
        ("exact", "reduce", "plain"),
    ],
)
def test_marks_have_the_factors_of_their_weighted_means(fisher, sharing, how):
    params, x, targets, mask = problem()
    labels, options = options_of(fisher)
    labels = None if labels is None else [labels[k] for k in NAMES]
    loss = marked(WEIGHTS, HOW[how])
    stats = jax.jit(jk.value_grad_and_factors(loss, sharing=sharing, **options))
    value, grads, factors = stats(params, (x, targets, mask), labels=labels)
    expected = jax.value_and_grad(loss)(params, (x, targets, mask))
    np.testing.assert_allclose(value, expected[0], rtol=1e-12)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-10), grads, expected[1])
    labels = None if labels is None else dict(zip(NAMES, labels, strict=True))
    assert_factors(factors, brute(fisher, WEIGHTS, sharing, labels))


@pytest.mark.exhaustive
@pytest.mark.parametrize("fisher", ["empirical", "exact"])
@pytest.mark.parametrize("by", ["objective", "marks"])
def test_measured_eigenvalues_are_of_the_whole_loss(by, fisher):
    params, x, targets, mask = problem()
    weights = EVEN if by == "objective" else WEIGHTS
    objective = jk.Objective(lambda p, x: model(p, x)[0], LIKELIHOODS)
    loss = objective if by == "objective" else marked(WEIGHTS)
    batch = (x, targets, mask)
    *_, factors = jk.value_grad_and_factors(loss, fisher="exact")(params, batch)
    bases = jk.eigendecompose(factors)
    found = jk.correct_eigenvalues(loss, bases, fisher=fisher)(params, batch)
    a, outputs_of = rows()
    each = [outputs_of(pull) for pull in pulls(fisher, weights)]
    for k in "uvw":
        gradients = [jnp.einsum("nsi,nso->nio", a[k], one[k]) for one in each]
        rotated = [
            jnp.einsum("ki,nkl,lj->nij", bases[k].a_vectors, y, bases[k].g_vectors)
            for y in gradients
        ]
        expected = sum(jnp.square(y).sum(0) for y in rotated)
        np.testing.assert_allclose(found[k].raw_values, expected, rtol=1e-9, atol=1e-13)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["ggn", "fisher", "empirical", "marked ggn", "marked fisher"])
def test_operators_are_of_the_whole_loss(kind):
    params, x, targets, mask = problem()
    objective = jk.Objective(lambda p, x: model(p, x)[0], LIKELIHOODS)
    batch, weights = (x, targets, mask), WEIGHTS if "marked" in kind else EVEN
    if kind == "empirical":
        operator = jk.operators.fisher(objective, params, batch, fisher="empirical")
    else:
        make = getattr(jk.operators, kind.split()[-1])
        operator = make(marked(WEIGHTS) if "marked" in kind else objective, params, batch)
    flat, unravel = ravel_pytree(params)

    def gradients(pull):
        def one(n):
            _, vjp = jax.vjp(lambda w: model(unravel(w), x[n][None])[0], flat)
            return vjp(jax.tree.map(lambda y: y[n][None], pull))[0]

        return jnp.stack([one(n) for n in range(N)])

    each = [gradients(p) for p in pulls("empirical" if kind == "empirical" else "exact", weights)]
    expected = sum(g.T @ g for g in each)
    np.testing.assert_allclose(operator.to_dense(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_a_tuple_of_likelihoods_takes_tuples():
    params, x, targets, _ = problem()
    objective = jk.Objective(
        lambda p, x: (model(p, x)[0]["token"], model(p, x)[0]["flag"]),
        (jk.Categorical(), jk.Bernoulli()),
    )
    labels = targets["token"], targets["flag"]
    found = objective(params, (x, labels))
    out = model(params, x)[0]
    expected = sum(term_losses(k, out[k], targets[k]).mean() for k in ("token", "flag"))
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    hash(objective)


def test_a_form_that_is_not_that_of_the_likelihoods_is_named():
    params, x, targets, _ = problem()
    objective = jk.Objective(lambda p, x: model(p, x)[0], LIKELIHOODS)
    with pytest.raises(ValueError, match="batch: targets: expected {box: Gaussian"):
        objective(params, (x, targets["box"]))
    short = jk.Objective(lambda p, x: {"box": model(p, x)[0]["box"]}, LIKELIHOODS)
    with pytest.raises(ValueError, match="apply_fn: outputs: expected"):
        short(params, (x, targets))
    with pytest.raises(ValueError, match=r"output \['token'\]: the mask has shape \(4,\)"):
        objective(params, (x, targets, {"box": None, "flag": None, "token": jnp.ones(4, bool)}))
    with pytest.raises(ValueError, match=r"output \['box'\]: Gaussian: targets have shape"):
        objective(params, (x, targets | {"box": jnp.ones((N, 3))}))


@pytest.mark.slow
def test_one_output_for_each_example_is_a_column_of_one():
    params, x, targets, _ = problem()
    p, y = {"f": params["f"]}, targets["flag"]
    h = x @ params["u"]
    narrow = jk.Objective(lambda p, h: h.sum(1) @ p["f"], jk.Bernoulli())
    wide = jk.Objective(lambda p, h: (h.sum(1) @ p["f"])[:, None], jk.Bernoulli())
    for fisher in ("empirical", "mc", "exact"):
        of = lambda o, y, fisher=fisher: jk.value_grad_and_factors(o, fisher=fisher)(
            p, (h, y), jax.random.key(0)
        )
        jax.tree.map(np.testing.assert_array_equal, of(narrow, y)[:2], of(wide, y[:, None])[:2])
        a, b = of(narrow, y).factors["f"], of(wide, y[:, None]).factors["f"]
        np.testing.assert_allclose(a.a, b.a, rtol=1e-14)
        np.testing.assert_allclose(a.g, b.g, rtol=1e-14)
    with pytest.raises(ValueError, match="targets have shape"):  # (N,) and (N, 1) broadcast
        narrow(p, (h, y[:, None]))
    with pytest.raises(ValueError, match="for Categorical"):
        jk.Objective(narrow.apply_fn, jk.Categorical())(p, (h, y))


def test_a_tuple_of_inputs_is_unpacked_and_a_named_tuple_is_not():
    from typing import NamedTuple

    class Pair(NamedTuple):
        x: object
        z: object

    params, x, z, y = {"w": jnp.eye(3)}, jnp.ones((N, 3)), 2 * jnp.ones((N, 3)), jnp.zeros((N, 3))
    two = jk.Objective(lambda p, x, z: (x + z) @ p["w"], jk.Gaussian())
    one = jk.Objective(lambda p, pair: (pair[0] + pair[1]) @ p["w"], jk.Gaussian())
    assert two(params, ((x, z), y)) == one(params, ((x, z), y)) == one(params, (Pair(x, z), y))
    with pytest.raises(TypeError, match="missing 1 required"):
        two(params, (Pair(x, z), y))
    for objective in (two, one):
        *_, factors = jk.value_grad_and_factors(objective)(params, ((x, z), y))
        np.testing.assert_allclose(factors["w"].a, 9 * np.ones((3, 3)))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_an_output_that_keeps_no_term_has_no_part(fisher):
    """What is left is the loss of the other output, in the second pass as well."""
    params, x, *_ = problem()
    params, x = {"v": params["v"][:3], "w": params["w"][:3], "s": jnp.arange(3.0)}, x[:, 0]
    box = lambda p, x: x * jnp.sort(p["s"]) @ p["w"]
    both = jk.Objective(
        lambda p, x: {"token": x @ p["v"], "box": box(p, x)},
        {"token": jk.Categorical(ignore_index=-100), "box": jk.Gaussian()},
    )
    alone = jk.Objective(box, jk.Gaussian())
    none, y = jnp.full(N, -100), jnp.ones((N, 2))
    batches = (x, {"token": none, "box": y}), (x, y)
    options = {"fisher": fisher, "uncovered": "diagonal"}
    expected = {"w": params["w"], "s": params["s"]}
    found, expected = (
        jax.jit(jk.value_grad_and_factors(o, **options))(p, b)
        for o, p, b in zip((both, alone), (params, expected), batches, strict=True)
    )
    np.testing.assert_allclose(found.value, expected.value, 1e-12)
    assert not found.factors["v"].g.any()
    np.testing.assert_allclose(found.factors["w"].g, expected.factors["w"].g, 1e-12)
    diagonals = [f.factors["s"].diagonal for f in (found, expected)]
    np.testing.assert_allclose(*diagonals, 1e-12)
    assert both(params, batches[0]) == found.value  # outside of jit, where values are known
    with pytest.raises(ValueError, match="masks every loss term"):
        both(params, (*batches[0], {"token": None, "box": jnp.zeros(N, bool)}))


@pytest.mark.slow
def test_labels_of_each_output_are_drawn_with_a_key_of_its_own():
    params, x, _, _ = problem()
    heads = {"box": jk.Gaussian(), "token": jk.Categorical()}
    params = {"u": params["u"], "v": params["u"] / 2}
    objective = jk.Objective(lambda p, x: {"box": x @ p["u"], "token": x @ p["v"]}, heads)
    batch, key = (
        (x, {"box": jnp.zeros((N, S, 4)), "token": jnp.zeros((N, S), int)}),
        jax.random.key(0),
    )
    outputs = objective.apply_fn(params, x)
    keys = jax.random.split(jax.random.fold_in(key, 0x6C61), 2)
    labels = {k: heads[k].sample(each, outputs[k])[None] for k, each in zip(heads, keys)}
    stats = jk.value_grad_and_factors(objective, fisher="mc")
    drawn = stats(params, batch, key).factors
    given = stats(params, batch, labels=labels).factors
    for name in "uv":
        np.testing.assert_allclose(drawn[name].g, given[name].g, rtol=1e-12)


@pytest.mark.slow
def test_positions_may_be_those_of_any_output():
    """The first output has no positions; rows behind those of the second leave A and G."""
    params, x, targets, mask = problem()
    heads = {k: LIKELIHOODS[k] for k in ("flag", "token")}

    def two(p, x, shift_u=0.0, shift_v=0.0):
        h = jnp.tanh(x @ p["u"] + shift_u)
        return {"flag": x[:, 0] @ p["f"][:3], "token": h @ p["v"] + shift_v}, h

    stats = jk.value_grad_and_factors(
        jk.Objective(lambda p, x: two(p, x)[0], heads),
        fisher="empirical",
        layers="[uv]",
        uncovered="ignore",
    )
    exist = mask["token"]
    given = {k: targets[k] for k in heads}, {"flag": None, "token": exist}
    factors = stats(params, (x, *given), positions=exist).factors
    kept = exist.sum(dtype=float)

    def total(shift_u, shift_v):
        terms = term_losses("token", two(params, x, shift_u, shift_v)[0]["token"], targets["token"])
        return jnp.where(exist, terms, 0.0).sum()

    cotangents = jax.grad(total, (0, 1))(jnp.zeros((N, S, 4)), jnp.zeros((N, S, 3)))
    for name, rows_a, rows_g in zip("uv", (x, two(params, x)[1]), cotangents, strict=True):
        a, g = rows_a[exist], rows_g[exist]
        np.testing.assert_allclose(factors[name].a, a.T @ a / kept, rtol=1e-10)
        np.testing.assert_allclose(factors[name].g, g.T @ g / kept, rtol=1e-10)
