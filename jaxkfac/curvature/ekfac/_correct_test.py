"""Measured eigenvalues against per-example gradients, formed one by one and rotated."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxkfac._arguments import leaves_by_path
from jaxkfac._errors import UnknownLayerError
from jaxkfac.blocks import update_average
from jaxkfac.curvature._apply import apply_power, fisher_vector_product
from jaxkfac.curvature._eigenbases import Eigenbases, KroneckerEigenbasis, identity_bases
from jaxkfac.curvature._eigendecompose import eigendecompose, reconstruct
from jaxkfac.curvature._layer_power import owners
from jaxkfac.curvature.ekfac._correct import correct_eigenvalues
from jaxkfac.factors import (
    Bernoulli,
    Categorical,
    Gaussian,
    Objective,
    value_grad_and_factors,
)

pytestmark = [pytest.mark.exhaustive, pytest.mark.usefixtures("x64")]

N = 5


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def tree(seed, **shapes):
    return {name: normal(seed + i, *shape) for i, (name, shape) in enumerate(shapes.items())}


# ------------------------------------------------------------------ programs


def mlp(p, x):
    return jnp.tanh(x @ p["u"] + p["b"]) @ p["w"] + p["c"]


MLP = dict(u=(3, 4), b=(4,), w=(4, 2), c=(2,))


def attention(p, x):
    """Token mixing, a scale, a table added to the data, and projections of several axes."""
    x = x + p["table"]
    x = x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-3) * p["scale"]
    q, k, v = (jnp.einsum("nsd,dhk->nshk", x, p[name]) for name in "qkv")
    mix = jax.nn.softmax(jnp.einsum("nshk,nthk->nhst", q, k))
    return jnp.einsum("nshk,hkd->nsd", jnp.einsum("nhst,nthk->nshk", mix, v), p["o"])


ATTENTION = dict(
    table=(6, 3), scale=(3,), q=(3, 2, 2), k=(3, 2, 2), v=(3, 2, 2), o=(2, 2, 3)
)  # fmt: skip


def tokens(p, ids):
    return jnp.tanh(p["e"][ids]) @ p["w"]


def two_lookups(p, ids):
    return (jnp.tanh(p["e"][ids]) + p["e"][jnp.roll(ids, 1, 1)]) @ p["w"]


def scanned(p, x):
    @jax.checkpoint
    def block(x, w):
        return x + jnp.tanh(x @ w[0] + w[1]), None

    return lax.scan(block, x, (p["k"], p["b"]))[0] @ p["w"]


def recurrent(p, x):
    def step(h, x):
        return jnp.tanh(x @ p["w"] + h @ p["u"] + p["b"]), None

    h = jnp.zeros((len(x), 3), x.dtype)
    return lax.scan(step, h, jnp.swapaxes(x, 0, 1))[0] @ p["v"]


def shared(p, x):
    for _ in range(3):
        x = jnp.tanh(x @ p["w"] + p["b"])
    return x


def indexed(p, x):
    """Slices of a stack picked by a loop's index; the middle one twice."""
    return lax.fori_loop(0, 4, lambda i, x: jnp.tanh(x @ p["w"][jnp.abs(i - 1)]), x)


def shared_experts(p, x):
    return jnp.einsum("nsi,eio->neso", x, p["w"]).sum(1)


def batched_experts(p, x):
    x = jnp.stack([x, jnp.sin(x)])
    return jnp.tanh(jnp.einsum("ensi,eio->enso", x, p["w"]) + p["b"][:, None, None]).sum(0)


def constant(p, x):
    return jnp.tanh(x @ (3.0 * p["u"]) + p["b"]) @ (p["w"] / 2)


def convolution(p, x, groups=1):
    y = lax.conv_general_dilated(
        x, p["k"], (2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )  # fmt: skip
    return jnp.tanh(y + p["b"]).mean((1, 2)) @ p["w"]


def grouped(p, x):
    return convolution(p, x, groups=2)


def convolution_twice(p, x):
    for _ in range(2):
        y = lax.conv_general_dilated(
            x, p["k"], (1,), "SAME", dimension_numbers=("NCH", "OIH", "NHC")
        )
        x = jnp.swapaxes(jnp.tanh(y), 1, 2)
    return x.sum(2)


def frames(p, x):
    """A convolution whose batch axis holds examples and frames."""
    y = convolution(p, x.reshape(-1, *x.shape[2:]))
    return y.reshape(*x.shape[:2], -1)


IDS = np.random.default_rng(9).integers(0, 4, (N, 7))
PROGRAMS = {
    "one_row": (mlp, MLP, (N, 3), {}),
    "pairs_of_positions": (mlp, MLP, (N, 3, 3), {}),
    "many_positions": (mlp, MLP, (N, 7, 3), {}),
    "two_axes_of_positions": (mlp, MLP, (N, 2, 3, 3), {}),
    "one_example": (mlp, MLP, (1, 7, 3), {}),
    "attention": (attention, ATTENTION, (N, 6, 3), {}),
    "full_blocks": (attention, ATTENTION, (N, 6, 3), dict(scales="full_block")),
    "diagonal_sides": (attention, ATTENTION, (N, 6, 3), dict(max_dense=3)),
    "diagonal_side_with_ones": (mlp, MLP, (N, 7, 3), dict(max_dense=4)),
    "embedding": (tokens, dict(e=(4, 3), w=(3, 2)), IDS, {}),
    "two_lookups": (two_lookups, dict(e=(4, 3), w=(3, 2)), IDS, {}),
    "scanned": (scanned, dict(k=(3, 4, 4), b=(3, 4), w=(4, 2)), (N, 6, 4), {}),
    "recurrent": (recurrent, dict(w=(4, 3), u=(3, 3), b=(3,), v=(3, 2)), (N, 6, 4), {}),
    "shared": (shared, dict(w=(3, 3), b=(3,)), (N, 2, 3), {}),
    "indexed": (indexed, dict(w=(3, 3, 3)), (N, 3), {}),
    "shared_experts": (shared_experts, dict(w=(2, 3, 4)), (N, 6, 3), dict(experts="w")),
    "batched_experts": (batched_experts, dict(w=(2, 3, 4), b=(2, 4)), (N, 6, 3), {}),
    "constant": (constant, dict(u=(3, 4), b=(4,), w=(4, 2)), (N, 6, 3), {}),
    "convolution": (convolution, dict(k=(2, 3, 2, 4), b=(4,), w=(4, 2)), (N, 5, 4, 2), {}),
    "grouped": (grouped, dict(k=(2, 3, 2, 4), b=(4,), w=(4, 2)), (N, 5, 4, 4), {}),
    "convolution_twice": (convolution_twice, dict(k=(2, 2, 3)), (N, 2, 5), {}),
    "frames": (frames, dict(k=(2, 3, 2, 4), b=(4,), w=(4, 2)), (N, 2, 5, 4, 2), {}),
}


def problem(name):
    fn, shapes, inputs, options = PROGRAMS[name]
    params = tree(0, **shapes)
    x = normal(20, *inputs) if isinstance(inputs, tuple) else jnp.asarray(inputs)
    out = jax.eval_shape(fn, params, x)
    mask = np.random.default_rng(21).random(out.shape[:-1]) < 0.7
    mask[0] = True
    batch = (x, normal(22, *out.shape), jnp.asarray(mask))
    return Objective(fn, Gaussian()), params, batch, options


def bases_of(objective, params, batch, **options) -> Eigenbases:
    stats = value_grad_and_factors(objective, **options)
    return jax.jit(lambda *args: eigendecompose(stats(*args)[2]))(params, batch)


def correct(objective, bases, params, batch, key=None, positions=None, labels=None, **options):
    """One compiled call."""

    def run(bases, *args):
        return correct_eigenvalues(objective, bases, **options)(*args)

    return jax.jit(run)(bases, params, batch, key, positions, labels)


# -------------------------------------------------------------------- oracle


def example_gradients(objective, params, batch):
    """Gradient of each example's sum of terms, by path, and the number of terms."""

    def loss(params, example):
        one = jax.tree.map(lambda x: x[None], example)
        outputs = objective.outputs(params, one[0])[0]
        terms = objective.likelihood.terms(outputs, one[1])
        return jnp.where(one[2], terms, 0).sum()

    gradients = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(params, batch)
    return jax.device_get(leaves_by_path(gradients)), float(batch[2].sum())


def read(bases):
    """Every layer's basis, as NumPy arrays."""
    return jax.device_get(jax.jit(lambda b: {x.name: b.basis(x) for x in b.layers})(bases))


def in_own_basis(layer, basis, gradients):
    """Gradients by example of one layer, ``(examples, stack..., in[+1], out)``, and its bias's."""
    gradient = gradients[layer.weight.path]
    if not isinstance(basis, KroneckerEigenbasis):
        return gradient, None
    lead = (len(gradient), *layer.stack)
    matrix = np.asarray(jax.vmap(layer.weight.read)(jnp.asarray(gradient)))
    matrix = matrix.reshape(*lead, layer.in_features, layer.out_features)
    row = None
    if layer.bias is not None:
        row = np.asarray(jax.vmap(layer.bias.read)(jnp.asarray(gradients[layer.bias.path])))
        row = row.reshape(*lead, 1, layer.out_features)
        if basis.a_values.shape[-1] > layer.in_features:
            matrix, row = np.concatenate([matrix, row], -2), None
    if basis.a_vectors is not None:
        matrix = np.swapaxes(basis.a_vectors, -1, -2) @ matrix
    if basis.g_vectors is not None:
        matrix = matrix @ basis.g_vectors
        row = None if row is None else (row @ basis.g_vectors)[..., 0, :]
    return matrix, row


def raw_of(basis):
    return basis.raw_values if isinstance(basis, KroneckerEigenbasis) else basis.raw_diagonal


def assert_close(found, expected, name):
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape, (name, found.shape, expected.shape)
    bound = 1e-10 * np.abs(expected).max()
    assert np.abs(found - expected).max() <= bound, (name, found, expected)


def assert_measured(corrected, objective, params, batch):
    """Every eigenvalue is the mean of squares of rotated per-example gradients."""
    gradients, terms = example_gradients(objective, params, batch)
    bases = read(corrected)
    for layer in corrected.layers:
        if layer.computed_from:
            continue
        basis = bases[layer.name]
        matrix, row = in_own_basis(layer, basis, gradients)
        assert_close(raw_of(basis), (matrix**2).sum(0) / terms, layer.name)
        if isinstance(basis, KroneckerEigenbasis):
            assert (row is None) == (basis.bias_raw_values is None)
        if row is not None:
            assert_close(basis.bias_raw_values, (row**2).sum(0) / terms, layer.name)


# ----------------------------------------------------------------- eigenvalues


WITH_BIAS = (
    "one_row", "pairs_of_positions", "many_positions", "diagonal_side_with_ones", "scanned",
    "shared", "batched_experts", "constant", "grouped",
)  # fmt: skip
CASES = [(name, "joint") for name in PROGRAMS] + [(name, "separate") for name in WITH_BIAS]


@pytest.mark.parametrize(("name", "bias"), CASES)
def test_eigenvalues_are_mean_squares_of_rotated_example_gradients(name, bias):
    objective, params, batch, options = problem(name)
    bases = bases_of(objective, params, batch, bias=bias, **options)
    found = correct(objective, bases, params, batch, experts=options.get("experts"))
    assert_measured(found, objective, params, batch)


@pytest.mark.parametrize(
    ("name", "bias"),
    [("many_positions", "separate"), ("embedding", "joint"), ("constant", "joint")],
)
def test_per_token_treats_positions_as_examples(name, bias):
    """Where positions do not mix, each may as well be an example."""
    objective, params, batch, options = problem(name)
    bases = bases_of(objective, params, batch, bias=bias, **options)
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
    found = correct(objective, bases, params, batch, per="token")
    assert_measured(found, objective, params, flat)


@pytest.mark.parametrize("kind", ["embedding", "dense"])
def test_the_head_of_a_tie_sees_the_whole_gradient_and_the_other_block_its_own_part(kind):
    def fn(p, ids, head=None):
        first = p["e"][ids] if kind == "embedding" else jax.nn.one_hot(ids, 4, dtype=float) @ p["e"]
        return jnp.tanh(first) @ p[head or "e"].T

    params = tree(0, e=(4, 3))
    batch = (jnp.asarray(IDS), normal(22, N, 7, 4), jnp.ones((N, 7), bool))
    objective = Objective(lambda p, ids: fn(p, ids), Gaussian())
    bases = bases_of(objective, params, batch)
    found = read(correct(objective, bases, params, batch))
    untied = Objective(lambda p, ids: fn(p, ids, "head"), Gaussian())
    gradients, terms = example_gradients(untied, params | {"head": params["e"]}, batch)
    whole = gradients["e"] + gradients["head"]
    (head,) = (owner.layer for owner in owners(bases.layers))
    for layer, part in zip(bases.layers, ("e", "head"), strict=True):
        basis = found[layer.name]
        its = whole if layer == head else gradients[part]
        matrix, _ = in_own_basis(layer, basis, {"e": its})
        assert_close(basis.raw_values, (matrix**2).sum(0) / terms, layer.name)
    assert head.kind == "dense"
    trace = found[head.name].raw_values.sum() * terms
    np.testing.assert_allclose(trace, jnp.square(whole).sum(), rtol=1e-12)


@pytest.mark.parametrize("groups", [1, 2])
def test_per_token_of_a_convolution_squares_each_patch(groups):
    objective, params, batch, _ = problem("grouped" if groups == 2 else "convolution")
    x, y, mask = batch
    bases = bases_of(objective, params, batch)
    found = correct(objective, bases, params, batch, per="token")["k"]

    def loss(shift):  # added to the convolution's output
        out = lax.conv_general_dilated(
            x, params["k"], (2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )  # fmt: skip
        outputs = jnp.tanh(out + params["b"] + shift).mean((1, 2)) @ params["w"]
        return jnp.where(mask, objective.likelihood.terms(outputs, y), 0).sum()

    g = jax.grad(loss)(jnp.zeros((N, 3, 4, 4))).reshape(-1, groups, 4 // groups)
    padded = jnp.pad(x, ((0, 0), (0, 1), (1, 1), (0, 0)))
    rows = [padded[:, i : i + 5 : 2, j : j + 4] for i in range(2) for j in range(3)]
    a = jnp.stack(rows, 3).reshape(-1, 6, groups, 2).swapaxes(1, 2).reshape(-1, groups, 12)
    a = jnp.concatenate([a, jnp.ones_like(a[..., :1])], -1)
    a_vectors = found.a_vectors.reshape(groups, 13, 13)
    g_vectors = found.g_vectors.reshape(groups, 4 // groups, 4 // groups)
    a, g = jnp.einsum("rei,eij->rej", a, a_vectors), jnp.einsum("reo,eop->rep", g, g_vectors)
    expected = jnp.einsum("rei,reo->eio", jnp.square(a), jnp.square(g)) / mask.sum(dtype=float)
    assert_close(found.raw_values, expected.reshape(found.raw_values.shape), "k")


def test_per_token_adds_uses_and_iterations_up():
    """A cell of a loop: each time step is a row; nothing is kept by example."""
    objective, params, batch, _ = problem("recurrent")
    bases = bases_of(objective, params, batch)
    x, y, mask = batch
    found = correct(objective, bases, params, batch, per="token")["w"]

    def loss(shifts):
        h = jnp.zeros((N, 3))
        for t in range(6):
            h = jnp.tanh(x[:, t] @ params["w"] + h @ params["u"] + params["b"] + shifts[:, t])
        return jnp.where(mask, objective.likelihood.terms(h @ params["v"], y), 0).sum()

    a, g = x @ found.a_vectors, jax.grad(loss)(jnp.zeros((N, 6, 3))) @ found.g_vectors
    expected = jnp.einsum("nsi,nso->io", jnp.square(a), jnp.square(g)) / mask.sum(dtype=float)
    assert_close(found.raw_values, expected, "w")


def test_positions_that_do_not_exist_count_nowhere():
    """Rows outside the mask may hold anything, NaN included."""
    objective, params, (x, y, _), _ = problem("many_positions")
    exists = jnp.arange(7) < jnp.arange(3, 8)[:, None]
    batch = (x, y, exists)
    stats = value_grad_and_factors(objective)
    bases = jax.jit(lambda: eigendecompose(stats(params, batch, positions=exists)[2]))()
    padded = (jnp.where(exists[..., None], x, jnp.nan), y, exists)
    for each in (batch, padded):
        found = correct(objective, bases, params, each, positions=exists)
        assert_measured(found, objective, params, batch)


def test_exact_fisher_measures_the_expectation_over_labels():
    """Each example's expected square, by the probability of every label; tokens mix."""
    fn, shapes, _, _ = PROGRAMS["attention"]
    objective, params = Objective(fn, Categorical()), tree(0, **shapes | dict(table=(2, 3)))
    x = normal(20, 3, 2, 3)
    batch = (x, jnp.zeros((3, 2), int), jnp.ones((3, 2), bool))
    bases = bases_of(objective, params, batch, fisher="exact")
    found = read(correct(objective, bases, params, batch, fisher="exact", chunk=4))
    log_p = np.asarray(jax.nn.log_softmax(fn(params, x)))
    expected = dict.fromkeys(bases, 0.0)
    for first, second in np.ndindex(3, 3):
        labels = jnp.broadcast_to(jnp.array([first, second]), (3, 2))
        probability = np.exp(log_p[:, 0, first] + log_p[:, 1, second])
        gradients, terms = example_gradients(objective, params, (x, labels, batch[2]))
        for layer in bases.layers:
            matrix, _ = in_own_basis(layer, found[layer.name], gradients)
            expected[layer.name] += np.tensordot(probability, matrix**2, 1) / terms
    for name, values in expected.items():
        assert_close(raw_of(found[name]), values, name)


def test_mc_measures_the_mean_over_samples_of_given_labels():
    objective, params, (x, _, mask), _ = problem("many_positions")
    objective = dataclasses.replace(objective, likelihood=Categorical())
    labels = jnp.asarray(np.random.default_rng(3).integers(0, 2, (3, N, 7)))
    batch = (x, labels[0], mask)
    bases = bases_of(objective, params, batch)
    found = correct(objective, bases, params, batch, fisher="mc", labels=labels)
    singles = [correct(objective, bases, params, (x, y, mask)) for y in labels]
    for name in bases:
        mean = sum(each[name].raw_values for each in singles) / 3
        assert_close(found[name].raw_values, mean, name)


def test_mc_samples_its_labels_from_the_model():
    objective, params, batch, _ = problem("one_row")
    objective = dataclasses.replace(objective, likelihood=Categorical())
    batch = (batch[0], jnp.zeros(N, int), batch[2])
    bases = bases_of(objective, params, batch)
    exact = correct(objective, bases, params, batch, fisher="exact")
    many = dict(fisher="mc", samples=4000, chunk=500)
    found = correct(objective, bases, params, batch, jax.random.key(0), **many)
    for name in bases:
        error = jnp.abs(found[name].raw_values - exact[name].raw_values).max()
        assert error < 0.05 * exact[name].raw_values.max(), name


# ------------------------------------------------------------------ invariants


def dense_block(basis):
    """A layer's block of the curvature as a matrix, as its own basis says."""
    rotation = np.kron(basis.a_vectors, basis.g_vectors)
    values = basis.raw_values
    if values is None:
        values = basis.a_raw_values[:, None] * basis.g_raw_values
    return rotation * values.reshape(-1) @ rotation.T


@pytest.mark.parametrize("fisher", ["empirical", "exact"])
@pytest.mark.parametrize("positions", [(), (3,), (7,)])
def test_corrected_block_is_nearer_to_the_fisher_and_has_its_trace(fisher, positions):
    def fn(p, x):
        return jnp.tanh(x @ p["u"]) @ p["w"]

    objective = Objective(fn, Categorical())
    params = {"u": normal(0, 3, 4), "w": normal(1, 4, 2)}
    x = normal(2, N, *positions, 3)
    y = jnp.asarray(np.random.default_rng(3).integers(0, 2, (N, *positions)))
    batch = (x, y, jnp.ones(y.shape, bool))
    bases = bases_of(objective, params, batch, fisher=fisher)
    corrected = read(correct(objective, bases, params, batch, fisher=fisher))
    bases = read(bases)
    if fisher == "empirical":
        gradients, terms = example_gradients(objective, params, batch)
        rows = {name: g.reshape(N, -1) for name, g in gradients.items()}
        blocks = {name: g.T @ g / terms for name, g in rows.items()}
    else:  # of the mean loss: the Gauss-Newton matrix
        jacobian = jax.jacobian(lambda p: fn(p, x).reshape(-1, 2))(params)
        p = jax.nn.softmax(fn(params, x)).reshape(-1, 2)
        of_outputs = jnp.einsum("rc,cd->rcd", p, jnp.eye(2)) - jnp.einsum("rc,rd->rcd", p, p)
        blocks = {}
        for name, j in jacobian.items():
            j = j.reshape(*j.shape[:2], -1)
            blocks[name] = jnp.einsum("rci,rcd,rdj->ij", j, of_outputs, j) / len(p)
    for name, block in blocks.items():
        kfac, ekfac = dense_block(bases[name]), dense_block(corrected[name])
        assert np.linalg.norm(ekfac - block) < np.linalg.norm(kfac - block)
        assert_close(np.trace(ekfac), np.trace(block), name)


def test_a_single_row_is_exact():
    """One example, one row: the block is of rank one, and both its forms are equal to it."""
    objective, params, batch, _ = problem("one_row")
    batch = jax.tree.map(lambda x: x[:1], batch)
    bases = bases_of(objective, params, batch)
    for name, basis in read(correct(objective, bases, params, batch)).items():
        product = basis.a_raw_values[:, None] * basis.g_raw_values
        assert_close(basis.raw_values, product, name)


@pytest.mark.parametrize("mode", ["exact", "factored", "pi", "pair"])
@pytest.mark.parametrize("power", [-1.0, 0.5])
def test_where_values_are_the_products_every_damping_gives_what_it_gave(mode, power):
    objective, params, batch, _ = problem("one_row")
    batch = jax.tree.map(lambda x: x[:1], batch)
    bases = bases_of(objective, params, batch)
    bases = dataclasses.replace(bases, max_condition=float("inf"))
    corrected = correct(objective, bases, params, batch)
    damping = (0.1, 0.3) if mode == "pair" else 0.2
    mode = "exact" if mode == "pair" else mode
    before, after = (apply_power(params, b, power, damping, mode) for b in (bases, corrected))
    for name in params:
        assert_close(after[name], before[name], name)


@pytest.mark.parametrize(
    ("name", "bias"),
    [("one_row", "joint"), ("attention", "joint"), ("scanned", "separate"), ("grouped", "joint")],
)
def test_powers_use_the_measured_values(name, bias):
    """(F + delta)^p in the eigenbasis, by hand, and no negative power of zero."""
    objective, params, batch, options = problem(name)
    bases = bases_of(objective, params, batch, bias=bias, **options)
    corrected = correct(objective, bases, params, batch)
    own = read(corrected)
    before = {path: np.asarray(x)[None] for path, x in leaves_by_path(params).items()}
    for power, damping in ((-1.0, 0.1), (1.0, 0.0), (0.5, 0.0)):
        powered = jax.jit(
            lambda p, b, power=power, damping=damping: apply_power(p, b, power, damping)
        )
        after = leaves_by_path(powered(params, corrected))
        after = {path: np.asarray(x)[None] for path, x in after.items()}
        for layer in bases.layers:
            basis, raw = own[layer.name], power > 0
            x, row = in_own_basis(layer, basis, before)
            y, row_after = in_own_basis(layer, basis, after)
            clipped = basis.values if isinstance(basis, KroneckerEigenbasis) else basis.diagonal
            values = raw_of(basis) if raw else clipped
            assert_close(y, x * (values + damping) ** power, layer.name)
            if row is not None:
                values = basis.bias_raw_values if raw else basis.bias_values
                assert_close(row_after, row * (values + damping) ** power, layer.name)


@pytest.mark.parametrize(
    ("damping", "mode"), [(0.0, "exact"), (1e-37, "exact"), (1e-37, "pi"), ((1e-23, 1e-22), "pi")]
)
@pytest.mark.parametrize("name", ["linear", "tokens_of_one", "batched"])
def test_squares_below_the_smallest_float32_are_not_lost(name, damping, mode):
    """Of rows and gradients of size 1e-11: their products' squares are of size 1e-44."""
    double = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float64), tree)
    single = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)
    x, params = 1e-11 * normal(0, 40, 4), {"w": normal(1, 4, 3)}
    apply_fn = lambda p, x: x @ p["w"]
    if name == "tokens_of_one":  # an example's gradient is a sum over its positions
        x = 1e-11 * normal(0, 40, 6, 4)
    if name == "batched":
        x, params = 1e-11 * normal(0, 40, 2, 4), {"w": normal(1, 2, 4, 3)}
        apply_fn = lambda p, x: jnp.einsum("nei,eio->neo", x, p["w"])
    batch = x, 1e-11 * normal(2, *x.shape[:-1], 3)
    objective = Objective(apply_fn, Gaussian())
    params, batch = single((params, batch))
    bases = eigendecompose(value_grad_and_factors(objective)(params, batch).factors)
    tree = single({"w": 1e-22 * normal(3, *params["w"].shape)})
    got, wanted = (
        apply_power(
            cast(tree),
            correct_eigenvalues(objective, cast(bases))(cast(params), cast(batch)),
            *(-1.0, damping, mode),
        )["w"]
        for cast in (single, double)
    )
    assert got.dtype == jnp.float32 and jnp.abs(wanted).max() > 0
    assert jnp.abs(double(got) - wanted).max() < 1e-4 * jnp.abs(wanted).max()


def test_values_are_clipped_on_read_over_each_block():
    objective, params, batch, options = problem("scanned")
    bases = dataclasses.replace(bases_of(objective, params, batch), max_condition=4.0)
    basis = read(correct(objective, bases, params, batch))["k"]
    largest = basis.raw_values.max((-2, -1), keepdims=True)
    assert (basis.raw_values < largest / 4).any()
    assert_close(basis.values, np.maximum(basis.raw_values, largest / 4), "k")


def test_a_cut_takes_measured_values_below_it_for_zero():
    objective, params, batch, _ = problem("one_row")
    bases = bases_of(objective, params, batch)
    corrected = correct(objective, bases, params, batch)
    basis = corrected["u"]
    kept = basis.raw_values > 0.1 * basis.raw_values.max()
    assert kept.any() and not kept.all()
    found = apply_power(params, corrected, -1.0, 0.5, cut=0.1)
    matrix = jnp.concatenate([params["u"], params["b"][None]])
    inside = basis.a_vectors.T @ matrix @ basis.g_vectors
    scaled = jnp.where(kept, inside / (basis.values + 0.5), 0)
    assert_close(found["u"], (basis.a_vectors @ scaled @ basis.g_vectors.T)[:-1], "u")


# ------------------------------------------------------------------- averages


def in_parts(objective, bases, params, batch, **options):
    """Measured from two unequal parts of a batch, and from the whole."""
    parts = (slice(2), slice(2, N), slice(N))
    batches = [jax.tree.map(lambda x, part=part: x[part], batch) for part in parts]
    return [correct(objective, bases, params, each, **options) for each in batches]


def assert_same(found, expected):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_close(x, y, "")


@pytest.mark.parametrize("per", ["example", "token"])
def test_micro_batches_add_up_to_the_whole_batch(per):
    """Unequal numbers of terms included."""
    objective, params, batch, _ = problem("attention")
    bases = bases_of(objective, params, batch)
    first, second, whole = in_parts(objective, bases, params, batch, per=per)
    assert_same(first + second, whole)
    assert float(first.corrections.terms) != float(second.corrections.terms)


def test_streaming_average_weighs_by_decay_and_by_terms():
    objective, params, batch, _ = problem("many_positions")
    bases = bases_of(objective, params, batch)
    first, second, whole = in_parts(objective, bases, params, batch)
    average = update_average(update_average(bases, first, 0.5), second, 0.5)
    n, m = first.corrections.terms / 2, second.corrections.terms
    expected = (n * first["u"].raw_values + m * second["u"].raw_values) / (n + m)
    assert_close(average["u"].raw_values, expected, "u")
    pooled = update_average(first, second, 0.999999999999999)
    assert_close(pooled["u"].raw_values, whole["u"].raw_values, "u")


def masked_mlp(likelihood):
    batch = (normal(9, N, 3), jnp.full((N, 2), 0.5), jnp.arange(N) % 2 == 0)
    return Objective(mlp, likelihood), tree(5, **MLP), batch


def test_measurements_in_bases_of_other_shapes_are_refused():
    objective, params, batch = masked_mlp(Gaussian())
    bases = bases_of(objective, params, batch)
    corrected = correct_eigenvalues(objective, bases)(params, batch)
    without = eigendecompose(value_grad_and_factors(objective)(params, batch)[2], vectors=False)
    with pytest.raises(ValueError, match="in the same eigenvectors.*expected"):
        update_average(without, corrected, 0.5)
    with pytest.raises(ValueError, match="in the same eigenvectors.*expected"):
        without + corrected


@pytest.mark.parametrize("likelihood", [Gaussian(), Bernoulli()], ids=repr)
def test_targets_of_masked_terms_may_be_nan(likelihood):
    objective, params, (x, y, mask) = masked_mlp(likelihood)
    wild = jnp.where(mask[:, None], y, jnp.nan)
    correct = correct_eigenvalues(objective, bases_of(objective, params, (x, y, mask)))
    found, expected = correct(params, (x, wild, mask)), correct(params, (x, y, mask))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_averages_of_other_things_are_refused():
    objective, params, batch, _ = problem("one_row")
    factors = jax.jit(value_grad_and_factors(objective))(params, batch)[2]
    bases = eigendecompose(factors)
    corrected = correct(objective, bases, params, batch)
    with pytest.raises(TypeError, match="cannot add Eigenbases to an average of Factors"):
        update_average(factors, corrected, 0.5)
    with pytest.raises(ValueError, match="these bases hold none"):
        update_average(corrected, bases, 0.5)
    other = problem("shared")
    foreign = bases_of(*other[:3])
    foreign = correct(other[0], foreign, *other[1:3])
    with pytest.raises(ValueError, match="lack the layer"):
        update_average(bases, foreign, 0.5)


# --------------------------------------------------------------- whole programs


def test_scan_with_remat_equals_the_unrolled_program():
    objective, params, batch, _ = problem("scanned")

    def unrolled(p, x):
        for i in range(3):
            x = x + jnp.tanh(x @ p["k"][i] + p["b"][i])
        return x @ p["w"]

    bases = bases_of(objective, params, batch)
    found = correct(objective, bases, params, batch)
    other = Objective(unrolled, Gaussian())
    theirs = bases_of(other, params, batch)
    expected = correct(other, theirs, params, batch)
    v, u = (jax.jit(fisher_vector_product)(params, each) for each in (found, expected))
    for name in params:
        assert_close(v[name], u[name], name)


def test_bases_are_an_argument_and_nothing_is_traced_again():
    objective, params, batch, _ = problem("attention")
    bases = bases_of(objective, params, batch)
    traces = []

    @jax.jit
    def step(bases, params, batch):
        traces.append(None)
        return correct(objective, bases, params, batch)

    first = step(bases, params, batch)
    other = bases_of(objective, jax.tree.map(lambda x: 2 * x, params), batch)
    second = step(other, params, batch)
    assert len(traces) == 1
    assert_measured(first, objective, params, batch)
    assert_measured(second, objective, params, batch)


def test_parameters_that_no_rule_covers_get_their_per_example_diagonal():
    def fn(p, x):
        return (x @ (p["w"] * jnp.sum(p["w"]))) * p["s"]

    objective, params = Objective(fn, Gaussian()), tree(0, w=(3, 2), s=(2,))
    batch = (normal(5, N, 3), normal(6, N, 2), jnp.ones(N, bool))
    bases = bases_of(objective, params, batch, uncovered="diagonal")
    corrected = correct(objective, bases, params, batch)
    # Only the computed weight is read as a kernel, and it is no leaf that has a gradient.
    assert [layer.name for layer in corrected.layers if layer.computed_from] == ["w@effective"]
    assert_measured(corrected, objective, params, batch)


def test_bfloat16_rows_are_accumulated_in_float32():
    objective, params, batch, _ = problem("many_positions")
    narrow = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float64 else x, (params, batch)
    )
    wide = jax.tree.map(lambda x: x.astype(float) if x.dtype == jnp.bfloat16 else x, narrow)
    bases = bases_of(objective, *narrow)
    found = correct(objective, bases, *narrow)
    assert found["u"].raw_values.dtype == jnp.float32
    exact = jax.tree.map(lambda x: x.astype(float), bases)
    expected = correct(objective, exact, *wide)
    for name in bases:  # eight bits of the rows; their rotation and squares add none
        difference = found[name].raw_values.astype(float) - expected[name].raw_values
        assert jnp.abs(difference).max() < 0.05 * expected[name].raw_values.max()


def test_identity_bases_are_measured_along_the_parameters():
    objective, params, batch, _ = problem("one_row")
    like = value_grad_and_factors(objective).factor_shapes(params, batch)
    found = correct(objective, identity_bases(like), params, batch)
    gradients, terms = example_gradients(objective, params, batch)
    assert_close(found["u"].raw_values[:-1], jnp.square(gradients["u"]).sum(0) / terms, "u")


# ------------------------------------------------------------------- bad input


def test_positions_of_examples_that_a_loop_runs_over_are_measured():
    def fn(p, x):
        return lax.map(lambda row: jnp.tanh(row @ p["w"]), x)

    objective, params = Objective(fn, Gaussian()), tree(0, w=(3, 2))
    batch = (normal(1, N, 6, 3), normal(2, N, 6, 2), jnp.ones((N, 6), bool))
    bases = bases_of(objective, params, batch)
    found = correct(objective, bases, params, batch, per="token")
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
    plain = Objective(lambda p, x: jnp.tanh(x @ p["w"]), Gaussian())
    assert_measured(found, plain, params, flat)


def test_what_cannot_be_measured_is_refused():
    objective, params, batch, _ = problem("one_row")
    factors = jax.jit(value_grad_and_factors(objective))(params, batch)[2]
    bases = eigendecompose(factors)
    with pytest.raises(ValueError, match="samples=0"):
        correct_eigenvalues(objective, bases, samples=0)
    with pytest.raises(ValueError, match="no eigenvectors of layer 'u'"):
        correct_eigenvalues(objective, eigendecompose(factors, vectors=False))
    with pytest.raises(ValueError, match="pass key="):
        correct_eigenvalues(objective, bases, fisher="mc")(params, batch)
    lone = Objective(lambda p, x: jnp.tanh(x @ lax.stop_gradient(p["u"])) @ p["w"], Gaussian())
    with pytest.raises(UnknownLayerError, match="'u' that the program lacks"):
        correct_eigenvalues(lone, bases)(params, batch)
    squared = Objective(lambda p, x: (x @ (p["u"] ** 2)) @ p["w"], Gaussian())
    with pytest.raises(ValueError, match="layer 'u': the bases have kind dense, the program trans"):
        correct_eigenvalues(squared, bases)(params, batch)
    bare = Objective(lambda p, x: jnp.tanh(x @ p["u"]) @ p["w"] + p["c"], Gaussian())
    with pytest.raises(ValueError, match="layer 'u': the bases have bias"):
        correct_eigenvalues(bare, bases)(params, batch)


def test_measured_values_are_no_factors():
    objective, params, batch, _ = problem("one_row")
    bases = bases_of(objective, params, batch)
    with pytest.raises(ValueError, match="no products of two factors"):
        reconstruct(correct(objective, bases, params, batch))


def test_values_that_are_not_finite_are_named():
    objective, params, batch, _ = problem("one_row")
    bases = bases_of(objective, params, batch)
    batch = (batch[0].at[0, 0].set(jnp.nan), *batch[1:])
    corrected = correct(objective, bases, params, batch)
    assert {name: bool(ok) for name, ok in corrected.is_finite().items()} == {
        "u": False,
        "w": False,
    }
