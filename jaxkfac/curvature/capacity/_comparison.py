"""What has changed between two checkpoints, metric by metric."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxkfac._text import number, ruled
from jaxkfac.curvature.capacity._interval import check_same_settings
from jaxkfac.curvature.capacity._metric import Scalar, columns
from jaxkfac.curvature.capacity._metrics import CapacityMetrics
from jaxkfac.curvature.capacity._record import CapacityRecord


class Change(NamedTuple):
    """One metric before and after.

    Attributes:
        before: ``None`` where undefined or infinite, as in the record.
        after: Likewise.
        difference: ``after - before``, ``None`` where either is.
        ratio: ``after / before``, ``None`` where either is or ``before`` is 0.
    """

    before: Scalar
    after: Scalar
    difference: Scalar
    ratio: Scalar


@dataclasses.dataclass(frozen=True, eq=False)
class CapacityComparison:
    """Changes of every metric. ``print`` shows ratios, ``to_dict()`` is ready for JSON.

    Attributes:
        model: ``{metric: Change}`` of the whole model.
        layers: ``{layer: {metric: Change}}`` of the layers in both.
        only_before: Layers that are not in ``after``.
        only_after: Layers that are not in ``before``.
    """

    model: dict[str, Change]
    layers: dict[str, dict[str, Change]]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]

    def __repr__(self) -> str:
        """One line; ``print`` shows the table."""
        alone = len(self.only_before) + len(self.only_after)
        return f"CapacityComparison of {len(self.layers)} layers, {alone} in one of both only"

    def __str__(self) -> str:
        rows = [[name, *_ratios(changes)] for name, changes in self.layers.items()]
        rows.append(["whole model", *_ratios(self.model)])
        lines = ruled(["after / before", *columns()], rows, total=True)
        for title, names in (("before", self.only_before), ("after", self.only_after)):
            lines += [f"only {title}: {name}" for name in names]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "model": _plain(self.model),
            "layers": {name: _plain(changes) for name, changes in self.layers.items()},
            "only_before": list(self.only_before),
            "only_after": list(self.only_after),
        }


def compare_capacity(before: CapacityMetrics, after: CapacityMetrics) -> CapacityComparison:
    """Differences and ratios of every metric, per layer and for the whole model.

    Args:
        before: Metrics of one checkpoint.
        after: Of another, with the same ``num_examples``, ``damping`` and ``threshold``. The
            models may differ: layers in only one of them are named, and their blocks are part
            of their own whole model.

    Returns:
        The changes.

    Raises:
        ValueError: the metrics were asked with different arguments.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> params = {"kernel": jnp.ones((3, 2))}
        >>> objective = jk.Objective(lambda p, x: x @ p["kernel"], jk.Gaussian())
        >>> stats, metrics = jk.value_grad_and_factors(objective), []
        >>> for target in (0.0, -1.0):  # the residual doubles
        ...     value, grads, factors = stats(params, (jnp.eye(3), jnp.full((3, 2), target)))
        ...     bases = jk.eigendecompose(factors, vectors=False)
        ...     metrics.append(jk.capacity_metrics(bases, num_examples=3))
        >>> round(jk.compare_capacity(*metrics).model["trace"].ratio, 3)
        4.0
    """
    check_same_settings(before, after)
    both = [name for name in before.layers if name in after.layers]
    return CapacityComparison(
        model=_changes(before.model, after.model),
        layers={name: _changes(before.layers[name], after.layers[name]) for name in both},
        only_before=tuple(name for name in before.layers if name not in after.layers),
        only_after=tuple(name for name in after.layers if name not in before.layers),
    )


def _changes(before: CapacityRecord, after: CapacityRecord) -> dict[str, Change]:
    old, new = before.scalars(), after.scalars()
    return {name: _change(old[name], new[name]) for name in old if name in new}


def _change(before: Scalar, after: Scalar) -> Change:
    if before is None or after is None:
        return Change(before, after, None, None)
    return Change(before, after, after - before, after / before if before else None)


def _ratios(changes: Mapping[str, Change]) -> list[str]:
    return [number(changes[name].ratio) for name in columns().values()]


def _plain(changes: Mapping[str, Change]) -> dict[str, dict[str, Scalar]]:
    return {name: change._asdict() for name, change in changes.items()}
