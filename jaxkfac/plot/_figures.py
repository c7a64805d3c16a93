"""Figures of results; each function takes a result and returns the axes."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxkfac._errors import at_least_one, installed_by, instance_of, named, one_of
from jaxkfac._text import shortened
from jaxkfac.curvature import Eigenbases
from jaxkfac.curvature.capacity import CapacityMetrics
from jaxkfac.interception import LayerTable, selector
from jaxkfac.lslora import Adapter, find_nonlinearity
from jaxkfac.planning import MemoryPlan

# ---------------- the style of every figure: few colors, thin lines, fonts drawn as paths
#
# A figure has a white face, on light and dark pages and on paper. Without one, its text would need
# a color that is legible on white and on a dark page: such a page, #131416, is 18.4 times darker
# than white, so the best gray between has a contrast of 4.3 with each, and 4.5 is required (Web
# Content Accessibility Guidelines 2.2, 1.4.3). Lines need 3 (1.4.11).


FACE = "#ffffff"
INK, MUTED, RULE = "#1c2733", "#6b7885", "#d9dee3"
SIDES = {"A": "#1f5a92", "G": "#8a3b52", "diagonal": "#4d7358"}
COLORS = ("#1f5a92", "#c8752d", "#4d7358", "#8a3b52", "#7a6aa0", "#a68824", "#5f8fa8", "#98684f")

FIGURE_STYLE: dict[Any, Any] = {
    "figure.facecolor": FACE,
    "figure.figsize": (6.4, 3.2),
    "axes.facecolor": FACE,
    "savefig.facecolor": FACE,
    "savefig.transparent": False,
    "axes.prop_cycle": f"cycler('color', {list(COLORS)})",  # a string, as matplotlib may be missing
    "font.size": 9,
    "font.family": "sans-serif",
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.5,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.4,
    "svg.fonttype": "path",
    "svg.hashsalt": "jaxkfac",
}


@contextmanager
def drawing(ax: Any, *, height: float = 3.2) -> Iterator[Any]:
    """The axes to draw on: those given, unchanged, or new ones in this style.

    Args:
        ax: Axes given by the caller, or ``None``.
        height: Height of a new figure, inches.

    Raises:
        ImportError: matplotlib is not installed; the extra is named.
    """
    with installed_by("report", needs="figures need matplotlib"):
        import matplotlib as mpl
        from matplotlib import pyplot
    if ax is not None:
        yield ax
        return
    with mpl.rc_context(FIGURE_STYLE):
        yield pyplot.subplots(figsize=(6.4, height), layout="constrained")[1]


# ---------------- calibration of a classifier


def calibration(
    probabilities: ArrayLike, targets: ArrayLike, *, num_bins: int = 15, ax: Any = None
) -> Any:
    r"""Draw accuracy over confidence, in bins of equal width.

    The title is the expected calibration error
    $\sum_b \frac{n_b}{N} |\text{acc}_b - \text{conf}_b|$. Bins without examples are left out.

    Args:
        probabilities: ``(N, C)``, rows summing to one, such as those that a posterior's
            ``predict`` returns.
        targets: ``(N,)``, integers below C.
        num_bins: Number of bins of the confidence, from 0 to 1.
        ax: matplotlib axes to draw on; by default new ones.

    Returns:
        The axes.

    Raises:
        TypeError: ``targets`` are not integers.
        ValueError: shapes do not match, there is nothing to draw, rows are not probabilities,
            targets are not classes, or ``num_bins < 1``.
        ImportError: matplotlib is not installed.

    References:
        Guo, Pleiss, Sun, Weinberger, On calibration of modern neural networks, 2017.
    """
    at_least_one(num_bins=num_bins)
    p, y = np.asarray(probabilities, np.float64), np.asarray(targets)
    if not np.issubdtype(y.dtype, np.integer):
        raise TypeError(f"targets: expected integers, got {y.dtype}")
    if p.ndim != 2 or y.shape != p.shape[:1] or not p.size:
        raise ValueError(
            f"probabilities and targets: expected (N, C) and (N,), got {p.shape} and {y.shape}"
        )
    if not (np.isfinite(p).all() and p.min() >= -1e-6 and p.max() <= 1 + 1e-6):
        raise ValueError("probabilities: expected values in [0, 1]; of logits take jax.nn.softmax")
    if y.min() < 0 or y.max() >= p.shape[1]:
        raise ValueError(f"targets: expected 0 to {p.shape[1] - 1}, got {y.min()} to {y.max()}")
    if np.abs(p.sum(1) - 1).max() > 1e-3:
        raise ValueError("probabilities: expected rows that sum to one")
    confidence, right = p.max(1), p.argmax(1) == y
    bins = np.minimum((confidence * num_bins).astype(int), num_bins - 1)
    used = np.unique(bins)
    means = [(confidence[bins == b].mean(), right[bins == b].mean()) for b in used]
    share = [(bins == b).mean() for b in used]
    error = sum(n * abs(acc - conf) for n, (conf, acc) in zip(share, means, strict=True))
    with drawing(ax) as axes:
        axes.plot([0, 1], [0, 1], color=MUTED, linestyle=(0, (4, 3)))
        conf, acc = zip(*means, strict=True)
        axes.plot(conf, acc, color=SIDES["A"], marker="o", markersize=4)
        axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy")
        axes.set_title(f"expected calibration error {error:.3f}")
    return axes


# ---------------- a capacity metric over depth


_MOST_NAMES = 24  # largest number of names below the axis


def capacity(metrics: CapacityMetrics, *, metric: str = "entropy_rank", ax: Any = None) -> Any:
    """Draw one metric of each layer and slice, in the model's order.

    Args:
        metrics: From ``jk.capacity_metrics``.
        metric: A metric of a record, such as ``"entropy_rank"``, ``"participation_ratio"``,
            ``"effective_dimension"``.
        ax: matplotlib axes to draw on; by default new ones.

    Returns:
        The axes. An undefined or infinite value leaves a gap.

    Raises:
        TypeError: ``metrics`` is not a ``CapacityMetrics``.
        ValueError: there is no such metric; lists all.
        ImportError: matplotlib is not installed.
    """
    instance_of("metrics", metrics, CapacityMetrics, "from jk.capacity_metrics(bases, ...)")
    one_of("metric", metric, list(metrics.model.scalars()))
    names, values = [], []
    for name, record in metrics.layers.items():
        for i, slice_record in enumerate(record.parts):
            names.append(f"{name}[{i}]" if record.slices else name)
            value = slice_record.scalars().get(metric)
            values.append(float("nan") if value is None else value)
    with drawing(ax) as axes:
        places = range(len(names))
        axes.plot(places, values, color=SIDES["A"], marker="o", markersize=3)
        step = -(-len(names) // _MOST_NAMES)
        shown = [shortened(name, 28) for name in names[::step]]
        axes.set_xticks(places[::step], shown, rotation=60, ha="right")
        axes.set(ylabel=metric.replace("_", " "))
    return axes


# ---------------- which parameters are covered, and how many


_COLORS = {"two factors": SIDES["A"], "a diagonal": SIDES["diagonal"], "not covered": MUTED}


def coverage(layers: LayerTable, *, ax: Any = None) -> Any:
    """Draw a bar for each layer and for each uncovered parameter, by number of parameters.

    Args:
        layers: From ``jk.find_layers``.
        ax: matplotlib axes to draw on; by default new ones.

    Returns:
        The axes: parameters to the right on a logarithmic scale, the first layer on top.

    Raises:
        TypeError: ``layers`` is not a ``LayerTable``.
        ImportError: matplotlib is not installed.
    """
    instance_of("layers", layers, LayerTable, "from jk.find_layers(fn, params, *args)")
    rows = [
        (x.name, "a diagonal" if x.is_diagonal else "two factors", x.num_parameters)
        for x in layers.layers
    ]
    missing = dict.fromkeys(path for path, _ in layers.uncovered)
    rows += [(path, "not covered", layers.sizes.get(path, 0)) for path in missing]
    with drawing(ax, height=0.8 + 0.2 * max(len(rows), 1)) as axes:
        for kind, color in _COLORS.items():
            places = [i for i, row in enumerate(rows) if row[1] == kind]
            if places:
                sizes = [rows[i][2] for i in places]
                axes.barh(places, sizes, color=color, label=kind, height=0.7)
        axes.set_yticks(range(len(rows)), [shortened(name, 40) for name, *_ in rows])
        axes.set(ylim=(len(rows) - 0.4, -0.6), xlabel="parameters")
        if rows:
            axes.set_xscale("log")
            axes.legend()
    return axes


# ---------------- the learned nonlinearity of each adapter


def nonlinearities(
    adapters: Mapping[str, Any],
    *,
    nonlinearity: str = "fourier",
    width: float = 3.0,
    ax: Any = None,
) -> Any:
    r"""Draw $\varphi(u)$ of every layer and slice.

    Args:
        adapters: ``{layer: Adapter}``, from ``jk.lslora.init``, ``load`` or training.
        nonlinearity: Name of their nonlinearity, ``config.nonlinearity``.
        width: Range of $u = z / \sigma$, from minus this to this.
        ax: matplotlib axes to draw on; by default new ones.

    Returns:
        The axes; the dashed line is the initial function of an adapter.

    Raises:
        TypeError: ``adapters`` holds no adapter with a nonlinearity.
        ValueError: no nonlinearity has this name.
        ImportError: matplotlib is not installed.
    """
    if not isinstance(adapters, Mapping):
        raise TypeError(
            "adapters: expected {layer: Adapter}, from jk.lslora.init or load, got "
            f"{named(adapters)}"
        )
    chosen = [x for x in adapters.values() if isinstance(x, Adapter)]
    learnt = [x.coefficients for x in chosen if x.coefficients is not None]
    if not learnt:
        raise TypeError("adapters: expected some with a nonlinearity, got none (plain LoRA)")
    phi = find_nonlinearity(nonlinearity)
    u = jnp.linspace(-width, width, 201)
    x = phi.argument(u)

    def values(coefficients: Any) -> np.ndarray:
        return np.asarray(phi.apply(x, [jnp.asarray(c, u.dtype) for c in coefficients]))

    with drawing(ax) as axes:
        for coefficients in learnt:
            for row in np.asarray(coefficients).reshape(-1, len(phi.initial)):
                axes.plot(u, values(row), color=SIDES["A"], alpha=0.5, linewidth=0.9)
        start = values(phi.initial)
        axes.plot(u, start, color=MUTED, linestyle=(0, (4, 3)), label="at the start")
        axes.set(xlabel="u = z / σ", ylabel="φ(u)")
        axes.legend()
    return axes


# ---------------- device memory of a plan, option by option


def plan(plan: MemoryPlan, *, ax: Any = None) -> Any:
    """Draw the device memory of the training as it stands and with each option.

    If two rows are never in memory at the same time, only the larger is drawn.

    Args:
        plan: From ``jk.plan_memory``.
        ax: matplotlib axes to draw on; by default new ones.

    Returns:
        The axes: a bar for each option with its rows stacked, in GiB; the line marks what there is.

    Raises:
        TypeError: ``plan`` is not a ``MemoryPlan``.
        ImportError: matplotlib is not installed.
    """
    instance_of("plan", plan, MemoryPlan, "from jk.plan_memory(objective, params, batch, ...)")
    estimates = {"as it stands": plan.now, **plan.alone}
    if plan.smallest is not None and len(plan.smallest.options) > 1:
        estimates["the smallest set that fits"] = plan.smallest
    rows = dict.fromkeys(row for x in estimates.values() for row, n in x.at_once.items() if n)
    with drawing(ax, height=1.2 + 0.32 * len(estimates)) as axes:
        offsets = [0.0] * len(estimates)
        for i, row in enumerate(rows):
            sizes = [x.at_once.get(row, 0) / 2**30 for x in estimates.values()]
            color = COLORS[i % len(COLORS)]
            axes.barh(range(len(sizes)), sizes, left=offsets, color=color, label=row, height=0.7)
            offsets = [a + b for a, b in zip(offsets, sizes, strict=True)]
        if plan.usable_bytes < 4 * 2**30 * max(offsets):  # else the bars would be too small to see
            axes.axvline(plan.usable_bytes / 2**30, color=INK, linestyle=(0, (4, 3)))
        axes.set_yticks(range(len(estimates)), list(estimates))
        axes.set(ylim=(len(estimates) - 0.4, -0.6), xlabel="GiB on the device")
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return axes


# ---------------- spectra of the factors


def spectra(bases: Eigenbases, *, layers: str | None = None, ax: Any = None) -> Any:
    """Draw the eigenvalues of each factor as decomposed, the largest first.

    Each slice of a stack has a line. Non-positive values are left out.

    Args:
        bases: From ``jk.eigendecompose``; ``vectors=False`` is enough.
        layers: Full-match pattern of the layers; ``None`` selects all.
        ax: matplotlib axes to draw on; by default new ones.

    Returns:
        The axes, both logarithmic.

    Raises:
        TypeError: ``bases`` is not an ``Eigenbases``.
        UnknownLayerError: ``layers`` matches nothing.
        ImportError: matplotlib is not installed.
    """
    instance_of("bases", bases, Eigenbases, "from jk.eigendecompose(factors)")
    chosen = selector(layers, list(bases))
    with drawing(ax) as axes:
        named: set[str] = set()
        for layer in bases.layers:
            if layer.name not in chosen:
                continue
            basis: Any = bases[layer.name]
            if layer.is_diagonal:
                values = np.asarray(basis.raw_diagonal, np.float64)
                stack = values.shape[: len(layer.stack)]
                sides = {"diagonal": values.reshape(*stack, -1)}
            else:
                sides = {
                    "A": np.asarray(basis.a_raw_values, np.float64),
                    "G": np.asarray(basis.g_raw_values, np.float64),
                }
            for side, values in sides.items():
                for row in values.reshape(-1, values.shape[-1]):
                    row = np.sort(row)[::-1]
                    label = None if side in named else side
                    named.add(side)
                    ranks = np.arange(1, len(row) + 1)
                    drawn = np.where(row > 0, row, np.nan)
                    marker = "." if len(row) == 1 else None
                    style = {"color": SIDES[side], "alpha": 0.6, "linewidth": 0.9}
                    axes.plot(ranks, drawn, marker=marker, label=label, **style)
        axes.set(xscale="log", yscale="log", xlabel="rank", ylabel="eigenvalue")
        axes.legend()
    return axes
