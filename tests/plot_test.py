"""``jk.plot``: takes the object, returns the axes, says what it takes."""

import io
import subprocess
import sys

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import colors, pyplot

import jaxkfac as jk


@pytest.fixture(scope="module")
def things():
    """A stacked layer and a scale; everything that is drawn of them."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {"block": jax.random.normal(keys[0], (3, 4, 4)), "scale": jnp.ones(4)}

    def apply_fn(params, x):
        x, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["block"])
        return x * params["scale"]

    batch = (jax.random.normal(keys[1], (6, 4)), jnp.arange(6) % 4)
    objective = jk.Objective(apply_fn, jk.Categorical())
    factors = jk.value_grad_and_factors(objective)(params, batch)[2]
    bases = jk.eigendecompose(factors, vectors=False)
    config = jk.lslora.Config(rank=2, target="block")
    return {
        "spectra": bases,
        "coverage": jk.find_layers(apply_fn, params, batch[0]),
        "capacity": jk.capacity_metrics(bases, num_examples=6),
        "plan": jk.plan_memory(objective, params, batch, device_bytes=1e6, compiled="none"),
        "nonlinearities": jk.lslora.init(apply_fn, config, params, batch[0], key=keys[2]),
    }


@pytest.fixture(autouse=True)
def _closed():
    yield
    pyplot.close("all")


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["spectra", "coverage", "capacity", "plan", "nonlinearities"])
def test_a_figure_is_drawn_where_it_is_asked_for(things, name):
    draw = getattr(jk.plot, name)
    own = draw(things[name])
    _, given = pyplot.subplots()
    assert draw(things[name], ax=given) is given is not own
    for axes in (own, given):
        assert axes.has_data()
        axes.figure.canvas.draw()


@pytest.mark.slow
def test_every_slice_is_a_line_and_values_are_the_eigenvalues(things):
    bases = things["spectra"]
    axes = jk.plot.spectra(bases, layers="block")
    assert len(axes.lines) == 6
    expected = np.sort(np.asarray(bases["block"].a_raw_values[1]))[::-1]
    drawn = axes.lines[1].get_ydata()
    np.testing.assert_allclose(drawn[expected > 0], expected[expected > 0], rtol=1e-6)
    assert len(jk.plot.spectra(bases).lines) == 7
    with pytest.raises(jk.UnknownLayerError):
        jk.plot.spectra(bases, layers="nowhere")


def test_bars_are_parameters_and_bytes(things):
    bars = jk.plot.coverage(things["coverage"]).patches
    assert sorted(bar.get_width() for bar in bars) == [4, 48]
    plan = things["plan"]
    widths = [c.patches[0].get_width() * 2**30 for c in jk.plot.plan(plan).containers]
    assert sum(widths) == pytest.approx(plan.now.device_total)


def test_capacity_follows_the_depth(things):
    metrics = things["capacity"]
    (line,) = jk.plot.capacity(metrics, metric="stable_rank").lines
    slices = [part.stable_rank for part in metrics["block"].slices]
    assert line.get_ydata().tolist() == [*slices, metrics["scale"].stable_rank]


def test_a_fresh_adapter_draws_the_function_that_it_begins_with(things):
    *learnt, start = jk.plot.nonlinearities(things["nonlinearities"]).lines
    assert len(learnt) == 3
    for line in learnt:
        np.testing.assert_allclose(line.get_ydata(), start.get_ydata(), atol=1e-6)


def test_the_calibration_error_is_that_of_the_bins():
    probabilities = np.array([[0.95, 0.05], [0.05, 0.95], [0.62, 0.38], [0.38, 0.62]])
    axes = jk.plot.calibration(probabilities, np.array([0, 1, 1, 1]), num_bins=10)
    assert axes.get_title("left") == "expected calibration error 0.085"  # (0.05 + 0.12) / 2
    np.testing.assert_allclose(axes.lines[1].get_xdata(), [0.62, 0.95])
    np.testing.assert_allclose(axes.lines[1].get_ydata(), [0.5, 1.0])
    right = jk.plot.calibration(jnp.eye(3, dtype=jnp.bfloat16), jnp.arange(3))
    assert right.get_title("left") == "expected calibration error 0.000"


def test_what_cannot_be_drawn_is_said(things):
    with pytest.raises(ValueError, match="metric='nix': expected one of"):
        jk.plot.capacity(things["capacity"], metric="nix")
    with pytest.raises(ValueError, match=r"take jax.nn.softmax"):
        jk.plot.calibration(np.array([[3.0, -1.0]]), np.array([0]))
    with pytest.raises(TypeError, match="got none"):
        jk.plot.nonlinearities({})


def contrast(one, other):
    """Of two colours, 1 to 21: Web Content Accessibility Guidelines 2.2, "contrast ratio"."""

    def luminance(color):
        channels = np.array(colors.to_rgb(color))
        linear = np.where(
            channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4
        )
        return linear @ [0.2126, 0.7152, 0.0722]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_words_and_lines_read_on_the_face_and_no_ink_would_do_without_one():
    assert contrast("white", "black") == pytest.approx(21)
    with mpl.rc_context():
        mpl.rcParams.update(jk.plot.FIGURE_STYLE)
        words = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color")
        for color in (*(mpl.rcParams[key] for key in words), *jk.plot.SIDES.values()):
            assert contrast(color, jk.plot.FACE) >= 4.5, color
        cycle = mpl.rcParams["axes.prop_cycle"].by_key()["color"]
    assert tuple(cycle) == jk.plot.COLORS
    for color in cycle:
        assert contrast(color, jk.plot.FACE) >= 3, color
    greys = np.linspace(0, 1, 1001)
    assert (
        max(min(contrast((g,) * 3, "#ffffff"), contrast((g,) * 3, "#131416")) for g in greys) < 4.5
    )


@pytest.mark.parametrize("around", ["default", "dark_background"])
def test_a_saved_figure_has_a_face_whatever_is_set_around_it(around):
    with pyplot.style.context(around):
        mpl.rcParams.update(jk.plot.FIGURE_STYLE)
        figure, axes = pyplot.subplots()
        axes.set_title("words")
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png")
    drawn.seek(0)
    pixels = pyplot.imread(drawn)  # red, green, blue, alpha
    assert (pixels[..., 3] == 1).all() and (pixels[[0, -1], :, :3] == 1).all()
    assert (pixels[..., :3] == 1).all(-1).mean() > 0.8


_WRONG = """
import jaxkfac as jk
for name in ("spectra", "coverage", "capacity", "plan", "nonlinearities"):
    try:
        getattr(jk.plot, name)(3)
    except TypeError as error:
        print(name, error)
import sys
assert "matplotlib" not in sys.modules
sys.modules["matplotlib"] = None
try:
    jk.plot.calibration([[1.0, 0.0]], [0])
except ImportError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_wrong_object_is_refused_by_name_and_without_matplotlib_the_extra_is_named():
    run = subprocess.run([sys.executable, "-c", _WRONG], capture_output=True, text=True, check=True)
    lines = run.stdout.splitlines()
    assert lines[0] == (
        "spectra bases: expected Eigenbases, from jk.eigendecompose(factors), got int"
    )
    assert [line.split()[0] for line in lines[:5]] == [
        "spectra", "coverage", "capacity", "plan", "nonlinearities"
    ]  # fmt: skip
    assert lines[5] == 'figures need matplotlib: pip install "jaxkfac[report]"'
