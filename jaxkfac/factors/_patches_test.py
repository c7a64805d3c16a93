"""Convolutions against explicit patches: windows cut out by a NumPy loop, and plain sums."""

import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxkfac.factors._build import value_grad_and_factors
from jaxkfac.factors._likelihoods import Gaussian
from jaxkfac.factors._objective import Objective
from jaxkfac.interception._kind import LayerVjp, Site
from jaxkfac.interception._trace import trace
from jaxkfac.kinds import _patches
from jaxkfac.kinds._patches import over_patches, patches_of, summed_patches


class Case(NamedTuple):
    """A convolution; ``space`` and ``size`` give the number of dimensions."""

    space: tuple[int, ...]
    size: tuple[int, ...]
    channels: int = 2
    outputs: int = 4
    groups: int = 1
    strides: tuple[int, ...] | None = None
    padding: tuple[tuple[int, int], ...] | None = None
    input_dilation: tuple[int, ...] | None = None
    dilation: tuple[int, ...] | None = None
    layout: tuple[str, str, str] | None = None
    examples: int = 3

    @property
    def layouts(self):
        space = "DHW"[-len(self.space) :]
        return self.layout or (f"N{space}C", f"{space}IO", f"N{space}C")

    def convolve(self, x, k):
        ones = (1,) * len(self.space)
        return lax.conv_general_dilated(
            x, k, self.strides or ones, self.padding or ((0, 0),) * len(ones),
            self.input_dilation or ones, self.dilation or ones, self.layouts, self.groups,
        )  # fmt: skip

    def arrays(self, dtype=np.float64):
        """Signal, kernel and bias; the bias is shaped so that it can be added."""
        rng = np.random.default_rng(0)
        sizes = dict(zip("DHW"[-len(self.space) :], self.space, strict=True))
        lengths = dict(zip("DHW"[-len(self.size) :], self.size, strict=True))
        sizes |= {"N": self.examples, "C": self.channels}
        lengths |= {"I": self.channels // self.groups, "O": self.outputs}
        left, right, out = self.layouts
        bias = [self.outputs if axis == "C" else 1 for axis in out]
        shapes = [sizes[a] for a in left], [lengths[a] for a in right], bias
        return tuple(jnp.asarray(rng.normal(size=s), dtype) for s in shapes)

    def last(self, y):
        """An output with its channels last."""
        return jnp.moveaxis(y, self.layouts[2].index("C"), -1)

    def windows(self, x):
        """(groups, examples, positions, in), the inputs in the kernel's own axis order."""
        x, n = np.asarray(x), len(self.space)
        space = "DHW"[-n:]
        x = x.transpose([self.layouts[0].index(a) for a in f"N{space}C"])
        spread, dilation = (d or (1,) * n for d in (self.input_dilation, self.dilation))
        strides, padding = self.strides or (1,) * n, self.padding or ((0, 0),) * n
        length = [(s - 1) * d + 1 for s, d in zip(self.space, spread, strict=True)]
        span = [(k - 1) * d + 1 for k, d in zip(self.size, dilation, strict=True)]
        out = [
            (s + sum(p) - w) // t + 1
            for s, p, w, t in zip(length, padding, span, strides, strict=True)
        ]
        found = np.zeros((*out, len(x), *self.size, x.shape[-1]), x.dtype)
        for at in itertools.product(*map(range, out)):
            for k in itertools.product(*map(range, self.size)):
                where = [
                    o * t + i * d - p[0]
                    for o, t, i, d, p in zip(at, strides, k, dilation, padding, strict=True)
                ]
                points = list(zip(where, length, spread, strict=True))
                if all(0 <= w < s and w % d == 0 for w, s, d in points):
                    index = tuple(w // d for w, _, d in points)
                    found[(*at, slice(None), *k)] = x[(slice(None), *index)]
        positions = math.prod(out)
        found = found.reshape(positions, len(x), *self.size, self.groups, -1)
        found = np.moveaxis(found, (n + 2, 0), (0, 2))  # (groups, examples, positions, *size, in)
        axes = f"{space}I"
        order = [3 + axes.index(a) for a in self.layouts[1] if a != "O"]
        found = found.transpose(0, 1, 2, *order)
        return found.reshape(self.groups, len(x), positions, -1)


CASES = {
    "1d": Case((7,), (3,)),
    "1d-all": Case((9,), (3,), 4, 6, 2, (2,), ((2, 1),), (2,), (2,)),
    "1d-first": Case((7,), (2,), layout=("NCW", "OIW", "NCW"), padding=((1, 0),)),
    "1d-causal-depthwise": Case((6,), (3,), 3, 6, 3, padding=((4, 0),), dilation=(2,)),
    "2d-strided": Case((6, 5), (3, 2), strides=(2, 1), padding=((1, 1), (0, 1))),
    "2d-first-grouped": Case(
        (4, 5), (2, 3), 4, 6, 2, padding=((1, 0), (1, 1)), layout=("NCHW", "OIHW", "NCHW")
    ),
    "2d-mixed-layout": Case((4, 5), (2, 3), layout=("CHWN", "OHWI", "HNWC"), dilation=(1, 2)),
    "2d-input-dilated": Case((3, 4), (3, 3), input_dilation=(2, 1), padding=((2, 2), (1, 1))),
    "2d-cropped": Case((6, 6), (2, 2), padding=((-1, 0), (1, -2))),
    "2d-depthwise": Case((4, 4), (3, 3), 4, 4, 4, padding=((1, 1), (1, 1))),
    "3d-all": Case((4, 3, 4), (2, 2, 3), 2, 4, 2, (1, 1, 2), ((0, 0), (1, 0), (1, 1))),
    "pointwise": Case((4, 4), (1, 1), strides=(2, 2)),
}

each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def vjp_of(case, x, k, weights=None):
    """The convolution with a cotangent of ones."""
    traced = trace(lambda p, x: case.convolve(x, p), k, x)
    assert not traced.table.uncovered
    ((use,),) = [traced.uses_of(layer) for layer in traced.table.layers]
    site = Site(use.at.eqn, [use], [], [], [], traced.analysis.table)
    return LayerVjp(site, use, [x, k], jnp.ones(use.at.eqn.outvars[0].aval.shape), weights)


def some_rows(case, x, k):
    """Weights of about 0.6 of the positions."""
    eqn = vjp_of(case, x, k).site.eqn
    shape = [eqn.outvars[0].aval.shape[d] for d in eqn.params["dimension_numbers"].out_spec]
    return jnp.asarray(np.random.default_rng(2).random((shape[0], *shape[2:])) < 0.6)


def flat(case, side):
    """(groups, examples, positions, in) from rows in the engine's order."""
    n = len(case.space)
    assert side.x.ndim == len(side.batch) + len(side.rows) + len(side.features)
    x = np.asarray(side.x).transpose(*side.batch, *side.rows, *side.feature_axes)
    window = case.channels // case.groups
    x = x.reshape(case.groups, case.examples, -1, *case.size, window)
    order = [3 + f"{'DHW'[-n:]}I".index(a) for a in case.layouts[1] if a != "O"]
    return x.transpose(0, 1, 2, *order).reshape(*x.shape[:3], -1)


@pytest.mark.sampled(3)
@each_case
def test_patches_are_the_windows_that_the_kernel_meets(x64, case):
    x, k, _ = case.arrays()
    patches = case.windows(x)
    np.testing.assert_array_equal(flat(case, patches_of(vjp_of(case, x, k))), patches)
    matrix = np.moveaxis(np.asarray(k), case.layouts[1].index("O"), -1)
    matrix = matrix.reshape(-1, case.groups, case.outputs // case.groups)
    product = np.einsum("gnpi,igo->npgo", patches, matrix)
    y = np.asarray(case.last(case.convolve(x, k)))
    if case.layouts[2][0] != "N":
        y = np.moveaxis(y, case.layouts[2].index("N"), 0)
    np.testing.assert_allclose(product.reshape(y.shape), y, rtol=1e-12, atol=1e-12)


def factors_by_hand(case, x, y, targets, *, sharing, bias):
    """A and G of ``0.5 * sum over outputs (y - targets)**2``, a term at each position."""
    a, g = case.windows(x), np.asarray(y - targets)
    g = np.moveaxis(g.reshape(len(g), -1, case.groups, case.outputs // case.groups), 2, 0)
    terms = g.shape[1] * g.shape[2]
    if bias == "joint":
        a = np.concatenate([a, np.ones((*a.shape[:-1], 1))], -1)
    if sharing == "reduce":
        a, g = a.mean(2, keepdims=True), g.sum(2, keepdims=True)
    rows = a.shape[1] * a.shape[2]
    found = np.einsum("gnpi,gnpj->gij", a, a) / rows, np.einsum("gnpi,gnpj->gij", g, g) / terms
    return found if case.groups > 1 else tuple(m[0] for m in found)


@pytest.mark.sampled(5)
@each_case
@pytest.mark.parametrize("sharing, bias", [("expand", "joint"), ("reduce", "joint")])
def test_factors_equal_sums_over_explicit_patches(x64, case, sharing, bias):
    check_factors(case, sharing=sharing, bias=bias)


@pytest.mark.default(1)
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", ["2d-strided", "2d-first-grouped"])
def test_a_separate_bias_leaves_the_ones_column_out(x64, name, sharing):
    check_factors(CASES[name], sharing=sharing, bias="separate")


def check_factors(case, *, sharing, bias):
    x, k, b = case.arrays()
    batch_axis = case.layouts[2].replace("C", "").index("N")

    def model(p, x):
        return jnp.moveaxis(case.last(case.convolve(x, p["k"]) + p["b"]), batch_axis, 0)

    params = {"k": k, "b": b}
    y = model(params, x)
    targets = jnp.asarray(np.random.default_rng(1).normal(size=y.shape))
    objective = Objective(model, Gaussian())
    stats = value_grad_and_factors(objective, sharing=sharing, bias=bias)
    _, grads, factors = jax.jit(stats)(params, (x, targets))
    layer = factors.layer("k")
    assert layer.bias is not None and layer.stack == ((case.groups,) if case.groups > 1 else ())
    a, g = factors_by_hand(case, x, y, targets, sharing=sharing, bias=bias)
    np.testing.assert_allclose(factors["k"].a, a, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(factors["k"].g, g, rtol=1e-10, atol=1e-12)
    expected = jax.grad(objective)(params, (x, targets))
    for name in params:
        np.testing.assert_allclose(grads[name], expected[name], rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_patches_that_are_computed_by_panels_keep_their_order(x64):
    """576 features, as in the body of a ResNet; panels begin at 512."""
    check_factors(Case((4, 3), (3, 3), 64, 2), sharing="expand", bias="joint")


@pytest.mark.default(1)
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_a_convolution_over_no_space_is_a_dense_layer(x64, sharing):
    def convolution(k, x):
        return lax.conv_general_dilated(x, k, (), (), dimension_numbers=("NC", "IO", "NC"))

    rng = np.random.default_rng(0)
    k, x, y = (jnp.asarray(rng.normal(size=s)) for s in ((4, 2), (5, 4), (5, 2)))
    results = []
    for model in (convolution, lambda k, x: x @ k):
        stats = value_grad_and_factors(Objective(model, Gaussian()), sharing=sharing)
        value, grads, factors = stats(k, (x, y))
        (factor,) = factors.values()
        results.append((value, grads, factor.a, factor.g))
    for found, expected in zip(*results, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12)


# ------------------------------------------------------------------ runs of positions

RUNS = {
    "even": Case((20,), (3,), 1),  # six runs of three positions
    "rest": Case((25,), (3,), 1),  # four runs of five positions, and three more
    "strided": Case((5, 24), (2, 3), 1, strides=(1, 2), dilation=(1, 2), padding=((0, 1), (1, 0))),
    "grouped": Case((16, 3), (3, 2), 2, 4, 2, padding=((1, 1), (0, 0))),
    "first": Case((3, 16), (1, 3), 2, layout=("NCHW", "OIHW", "NCHW")),
}


@pytest.mark.default(1)
@pytest.mark.sampled(3)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("case", RUNS.values(), ids=RUNS)
def test_runs_of_positions_add_up_to_all_of_them(x64, monkeypatch, case, masked):
    monkeypatch.setattr(_patches, "AT_ONCE", 1)
    x, k, _ = case.arrays()
    patches, weights = case.windows(x), None
    if masked:
        weights = some_rows(case, x, k)
        patches = patches * np.asarray(weights).reshape(len(x), -1)[..., None]
    sizes = []

    def statistic(side, there):
        assert (there is None) == (weights is None)
        assert there is None or there.shape == tuple(side.x.shape[d] for d in side.rows)
        sizes.append(side.number)
        lead = len(side.batch)
        rows = side.x.reshape(*side.x.shape[:lead], side.number, -1)
        count = side.number if there is None else there.sum()
        return jnp.einsum("...ri,...rj->...ij", rows, rows), rows.sum(-2), jnp.asarray(count)

    gram, total, count = over_patches(vjp_of(case, x, k, weights), statistic)
    positions = patches.shape[1] * patches.shape[2]
    assert max(sizes) <= positions // 2, "every run holds a part of the rows only"
    # the engine's window order, channels last, is the kernel's own but for channels first
    order = np.arange(patches.shape[-1])
    if case.layouts[1].startswith("OI"):
        order = order.reshape(case.channels // case.groups, -1).T.ravel()
    patches = patches[..., order].reshape(case.groups, positions, -1)
    expected = np.einsum("gri,grj->gij", patches, patches)
    np.testing.assert_allclose(gram, expected.reshape(gram.shape), atol=1e-12)
    np.testing.assert_allclose(total, patches.sum(1).reshape(total.shape), atol=1e-12)
    assert count == (positions if weights is None else weights.sum())


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("masked", [False, True])
def test_runs_on_several_devices_are_summed_over_them_once(x64, monkeypatch, masked):
    """After the loop, not in each of its iterations."""
    monkeypatch.setattr(_patches, "AT_ONCE", 1)
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    case = Case((16,), (3,), examples=4, groups=2)
    x, k, _ = case.arrays()
    there = jnp.arange(14) < jnp.array([14, 5, 9, 7])[:, None]
    batch, more = (x, case.convolve(x, k)), {"positions": there} if masked else {}
    stats = value_grad_and_factors(Objective(lambda p, x: case.convolve(x, p), Gaussian()))
    expected = jax.jit(stats)(k, batch, **more)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        split = jax.device_put((batch, more), jax.sharding.PartitionSpec("data"))
        program = jax.jit(lambda k, batch, more: stats(k, batch, **more))
        compiled = program.lower(k, *split).compile()
        found = compiled(k, *split)
    (_, entry) = (text := compiled.as_text()).rsplit("ENTRY", 1)
    assert " while(" in text and text.count(" all-reduce(") == entry.count(" all-reduce(") > 0
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.default(2)
@pytest.mark.sampled(5)
@pytest.mark.parametrize("masked", [False, True])
@each_case
def test_sums_over_positions_equal_summed_windows(x64, case, masked):
    x, k, _ = case.arrays()
    patches, weights = case.windows(x), None
    if masked:
        weights = some_rows(case, x, k)
        patches = patches * np.asarray(weights).reshape(case.examples, -1)[..., None]
    side = summed_patches(vjp_of(case, x, k, weights))
    assert all(side.x.shape[d] == 1 for d in side.rows[1:])
    expected = patches.sum(2, keepdims=True)
    np.testing.assert_allclose(flat(case, side), expected, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------ masks, dtypes, memory


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_rows_that_do_not_exist_are_left_out_even_if_they_hold_nan(x64, monkeypatch, sharing):
    """A causal convolution whose padding positions come last and hold NaN."""
    monkeypatch.setattr(_patches, "AT_ONCE", 1)
    case = Case((12,), (3,), 1, 2, padding=((2, 0),))
    x, k, _ = case.arrays()
    lengths = np.array([12, 5, 9])
    there = np.arange(12) < lengths[:, None]
    padded = jnp.where(there[..., None], x, jnp.nan)

    def model(p, x):
        return case.convolve(x, p)

    y = model(k, x)
    targets = jnp.zeros_like(y)
    stats = jax.jit(value_grad_and_factors(Objective(model, Gaussian()), sharing=sharing))
    _, _, factors = stats(k, (padded, targets, jnp.asarray(there)), positions=jnp.asarray(there))
    a, g = case.windows(x)[0], np.asarray(y)
    a, g = ([each[n][: lengths[n]] for n in range(3)] for each in (a, g))
    if sharing == "reduce":
        a, g = [each.mean(0, keepdims=True) for each in a], [each.sum(0)[None] for each in g]
    a, g = np.concatenate(a), np.concatenate(g)
    np.testing.assert_allclose(factors[""].a, a.T @ a / len(a), rtol=1e-10)
    np.testing.assert_allclose(factors[""].g, g.T @ g / there.sum(), rtol=1e-10)


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_half_precision_patches_accumulate_in_float32(sharing):
    case = Case((40, 40), (3, 3), 1, 1, examples=2)
    x, k, _ = case.arrays(jnp.bfloat16)
    x = jnp.abs(x) + 1  # sums of 1444 positive squares lose what a bfloat16 sum would drop

    def model(k, x):
        return case.convolve(x, k).astype(jnp.float32)

    targets = jnp.zeros((2, 38, 38, 1))
    stats = jax.jit(value_grad_and_factors(Objective(model, Gaussian()), sharing=sharing))
    factors = stats(k, (x, targets)).factors
    a = case.windows(x.astype(jnp.float32))[0].astype(np.float64)
    a = a.mean(1) if sharing == "reduce" else a.reshape(-1, 9)
    assert factors[""].a.dtype == jnp.float32
    np.testing.assert_allclose(factors[""].a, a.T @ a / len(a), rtol=1e-5)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_patches_of_the_whole_batch_are_never_formed(sharing):
    """Beside the gradient's own buffers: the padded signal and the patches of one run.

    In copies of the signal on the CPU (jax 0.10.2): 3 for the gradient alone; 5.3 more with
    factors of positions, since XLA does not add what is put together of panels in place, 2.2 with
    those of examples, of which 2 are the cotangent transposed
    for G. Patches of the whole batch would be 9, and took 20 with their copies in the product.
    """
    case = Case((32, 32), (3, 3), 64, 64, padding=((1, 1), (1, 1)), examples=16)
    x, k = jax.ShapeDtypeStruct((16, 32, 32, 64), jnp.float32), jnp.zeros((3, 3, 64, 64))
    objective = Objective(lambda k, x: case.convolve(x, k), Gaussian())

    def temporaries(fn):
        return jax.jit(fn).lower(k, (x, x)).compile().memory_analysis().temp_size_in_bytes

    stats = value_grad_and_factors(objective, sharing=sharing)
    more = temporaries(stats) - temporaries(jax.value_and_grad(objective))
    signal = math.prod(x.shape) * 4
    bound = {"expand": 5.5, "reduce": 2.5}[sharing]
    assert more < bound * signal, f"{more / signal:.1f} signals, and all patches are 9"
