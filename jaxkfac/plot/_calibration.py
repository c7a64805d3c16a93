"""Whether a classifier is right as often as it says."""

from typing import Any

import numpy as np
from jax.typing import ArrayLike

from jaxkfac._checks import at_least_one
from jaxkfac.plot._style import MUTED, SIDES, drawing


def calibration(
    probabilities: ArrayLike, targets: ArrayLike, *, num_bins: int = 15, ax: Any = None
) -> Any:
    r"""Draw accuracy over confidence, in bins of equal width.

    The expected calibration error $\sum_b \frac{n_b}{N} |\text{acc}_b - \text{conf}_b|$ stands
    in the title. A bin without examples is left out.

    Args:
        probabilities: ``(N, C)``, rows summing to one, such as those that a posterior's
            ``predict`` returns.
        targets: ``(N,)``, integers below C.
        num_bins: Of the confidence, from 0 to 1.
        ax: matplotlib axes to draw on; by default new ones.

    Returns:
        The axes.

    Raises:
        TypeError: ``targets`` are no integers.
        ValueError: shapes that do not go together, nothing to draw, rows that are no
            probabilities, targets that are no classes, or ``num_bins < 1``.
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
