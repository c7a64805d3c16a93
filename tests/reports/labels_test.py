"""Labels of any integer dtype, against NumPy in Python's own integers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkfac as jk

CLASSES = 200
INDICES = (-100, -1, 255, 65_535, CLASSES, CLASSES - 1)
NAMES = "int8 int16 int32 int64 uint8 uint16 uint32 uint64 int4 uint4".split()
LOGITS = np.random.default_rng(0).normal(size=(8, CLASSES))
GOOD = (1, 156, 3, 156, 7, 9, 156, 199)  # classes; those that a dtype cannot hold become 5


def rows_of(dtype, bits=64):
    """Rows of labels: classes alone, and with each number of ``INDICES`` that the dtype holds.

    Of the dtype's largest and smallest numbers only those of so many bits are there.
    """
    info, largest = jnp.iinfo(dtype), 2 ** (bits - 1)
    good = [y if y <= info.max else 5 for y in GOOD]
    ends = [y for y in (int(info.min), int(info.max)) if -largest <= y < largest or bits == 64]
    more = [*(y for y in INDICES if info.min <= y <= info.max), *ends]
    return [good, *([y, *good[1:]] for y in more)]


def mean_loss(labels, index):
    """The mean over the labels other than the index; NaN if one of them is no class."""
    kept = [n for n, y in enumerate(labels) if y != index]
    if any(not 0 <= labels[n] < CLASSES for n in kept):
        return np.nan
    x = LOGITS[kept]
    return np.mean(np.log(np.exp(x).sum(1)) - x[range(len(kept)), [labels[n] for n in kept]])


def objectives():
    return [jk.Objective(lambda p, x: x + p, jk.Categorical(ignore_index=k)) for k in INDICES]


@jax.jit
def losses(rows):
    batch = jnp.asarray(LOGITS, jnp.float32)
    of_row = lambda y: jnp.stack([o(jnp.zeros(()), (batch, y)) for o in objectives()])
    return jax.lax.map(of_row, rows)


@pytest.mark.default(1, slow=3)
@pytest.mark.parametrize("name", NAMES)
def test_labels_of_a_narrow_dtype_under_jit(name):
    dtype = jnp.dtype(name)
    rows = rows_of(dtype, bits=32)  # JAX itself narrows the arguments of jit
    expected = [[mean_loss(y, index) for index in INDICES] for y in rows]
    for labels in (np.array(rows).astype(dtype), jnp.asarray(np.array(rows).astype(dtype))):
        np.testing.assert_allclose(losses(labels), expected, rtol=1e-5)


@pytest.mark.default(7, slow=2)
@pytest.mark.parametrize("name", [*NAMES, ">i2", ">u2"])
def test_labels_of_a_narrow_dtype_outside_jit(name):
    dtype = jnp.dtype(name)
    for row in rows_of(dtype):
        for objective, index in zip(objectives(), INDICES, strict=True):
            kept, y = np.array([y != index for y in row]), np.array(row, object).astype(dtype)
            likelihood, outputs = objective.likelihood, jax.ShapeDtypeStruct(LOGITS.shape, "float")
            np.testing.assert_array_equal(likelihood.kept(y), kept)
            if np.isnan(mean_loss(row, index)):
                with pytest.raises(ValueError, match=r"targets run from .* from 0 to 199"):
                    likelihood.check(outputs, y, kept)
            else:
                likelihood.check(outputs, y, kept)
        if dtype.isnative and row in rows_of(dtype, bits=32):
            np.testing.assert_array_equal(likelihood.kept(jnp.asarray(y)), kept)


def test_labels_beyond_32_bits_without_64():
    """JAX would take the last 32 bits, which are a class, or the index to ignore."""
    batch = jnp.asarray(LOGITS, jnp.float32)
    for label in (2**32 + 1, 2**32 - 100, -(2**32) + 3):
        y = np.array([label, *GOOD[1:]])
        ignoring = jk.Objective(lambda p, x: x + p, jk.Categorical(ignore_index=label))
        with pytest.raises(ValueError, match=f"targets run from .*{label}.*"):
            objectives()[0](jnp.zeros(()), (batch, y))
        expected = mean_loss(list(y), label)
        np.testing.assert_allclose(ignoring(jnp.zeros(()), (batch, y)), expected, rtol=1e-5)


def uses(params, x, y):
    """What the library's uses of labels return; params and inputs of a linear classifier."""
    likelihood = jk.Categorical(ignore_index=-100)
    objective = jk.Objective(lambda p, x: x @ p["w"], likelihood)

    def marked(params, batch):
        x, y = batch
        kept = likelihood.kept(y)
        z = jk.mark_outputs(x @ params["w"], likelihood, mask=kept)
        return jnp.mean(likelihood.terms(z, y), where=kept)

    value, grads, factors = jax.jit(jk.value_grad_and_factors(objective))(params, (x, y))
    bases = jk.eigendecompose(factors)
    marks = jk.value_grad_and_factors(marked, fisher="exact")(params, (x, y)).factors
    exact = jax.jit(jk.value_grad_and_factors(objective, fisher="exact"))(params, (x, y)).factors
    measured = jk.eigendecompose(exact)
    posterior = jk.laplace(objective, params, measured, num_examples=len(x))
    scores = jk.influence(objective, params, bases, (x, y), (x, y))
    evidence = posterior.log_likelihood((x, y))
    return value, grads, factors["w"], marks["w"].g, exact["w"].g, scores, evidence


@pytest.mark.slow
@pytest.mark.sampled(1)
def test_labels_of_a_narrow_dtype_in_influence_laplace_and_marks():
    """uint8 holds no -100, so every use sees all eight terms; int64 gives the same bits."""
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(8, 3)), jnp.float32)
    params = {"w": jnp.asarray(rng.normal(size=(3, CLASSES)), jnp.float32)}
    wide, narrow = (uses(params, x, np.array(GOOD).astype(dtype)) for dtype in ("int64", "uint8"))
    jax.tree.map(np.testing.assert_array_equal, narrow, wide)
    *_, marked, exact, scores, evidence = narrow
    np.testing.assert_allclose(marked, exact, rtol=1e-5, atol=1e-9)
    assert evidence.terms == 8 and (np.diagonal(scores) > 0).all()


@pytest.mark.parametrize("index", [1.0, True, "1", np.float32(-100)])
def test_an_index_that_is_no_integer(index):
    with pytest.raises(TypeError, match="ignore_index"):
        jk.Categorical(ignore_index=index)


def test_labels_of_float_dtype_with_an_index():
    objective = objectives()[0]
    with pytest.raises(ValueError, match="targets have dtype float32, expected integers"):
        objective(jnp.zeros(()), (jnp.zeros((8, CLASSES)), jnp.zeros(8, jnp.float32)))
