"""Capacity metrics of a model, by layer and for the full model, from its eigenvalues."""

import dataclasses
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from jaxkfac._errors import UnknownLayerError, nearest
from jaxkfac._text import WIDTH, number, ruled, table_html
from jaxkfac.curvature._eigenbases import Eigenbases
from jaxkfac.curvature.capacity._definitions import (
    METRICS,
    MeasuredSpectrum,
    Scalar,
    Scale,
    Value,
    columns,
    legend,
)
from jaxkfac.curvature.capacity._eigenvalues import (
    CapacityBlock,
    LayerBlocks,
    Settings,
    Slice,
    Sums,
    combined,
    count_above,
    layer_blocks,
    sums_of,
)

# ---------------- the record of a layer or model


@dataclasses.dataclass(frozen=True)
class CapacityRecord:
    r"""Capacity metrics of the eigenvalues $\lambda$ of a block, or of several together.

    $\lambda$ are eigenvalues of the curvature of the *mean* loss as decomposed, without clipping
    unless stated; rounding errors below 0 count as 0. N is the number of examples and $\delta$ the
    damping that were passed to ``capacity_metrics``. Sums over no positive eigenvalue are 0.

    There are three scales. *scale-free*: unchanged when the curvature is multiplied by a constant,
    so these compare across batch sizes and losses. *mean*: in the units of the curvature of the
    mean loss. *sum*: in the units of N times it, the curvature of the sum over the data, together
    with $\delta$.

    Each metric is an attribute, ``record.entropy_rank``:

    {metrics}

    Attributes:
        values: ``{metric: value}``.
        slices: Records of the stacked slices of a layer, in the order of its stack; empty for a
            layer without a stack and for the full model.

    References:
        Roy and Vetterli, The effective rank: a measure of effective dimensionality, 2007.
        MacKay, Bayesian interpolation, 1992 (effective number of parameters).
        Abbas, Sutter, Figalli and Woerner, Effective dimension of machine learning models,
        2021 (local effective dimension).
    """

    values: dict[str, Value]
    slices: "tuple[CapacityRecord, ...]" = ()

    def __getattr__(self, name: str) -> Any:
        values = vars(self).get("values", {})  # copying looks up attributes before it is set
        if name in values:
            return values[name]
        raise AttributeError(f"no metric {name!r}; the nearest names are {nearest(name, values)}")

    @property
    def parts(self) -> "tuple[CapacityRecord, ...]":
        """The slices, or this record alone if there are none."""
        return self.slices or (self,)

    def by_scale(self) -> dict[str, dict[str, Scalar]]:
        """Every metric as one number, by scale; an entry of ``quantiles`` is ``quantile_0.5``."""
        return {
            scale: {name: x for field in fields for name, x in self._numbers(field)}
            for scale, fields in scales().items()
        }

    def scalars(self) -> dict[str, Scalar]:
        """:meth:`by_scale` without the scales."""
        return {name: x for metrics in self.by_scale().values() for name, x in metrics.items()}

    def _numbers(self, field: str) -> list[tuple[str, Scalar]]:
        if field not in self.values:  # measured before the metric was registered
            return []
        value = self.values[field]
        if not isinstance(value, dict):
            return [(field, value)]
        return [(f"{field.removesuffix('s')}_{key:g}", x) for key, x in value.items()]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: :meth:`scalars`, and ``slices`` if there are any."""
        slices = {"slices": [record.to_dict() for record in self.slices]} if self.slices else {}
        return {**self.scalars(), **slices}


def record_of(
    measured: MeasuredSpectrum, slices: tuple[CapacityRecord, ...] = ()
) -> CapacityRecord:
    """Compute every registered metric."""
    return CapacityRecord({name: m.definition(measured) for name, m in METRICS.items()}, slices)


def scales() -> dict[Scale, list[str]]:
    """``{scale: metrics}``, in the order of registration."""
    return {
        scale: [name for name, m in METRICS.items() if m.scale == scale]
        for scale in get_args(Scale)
    }


def _described() -> str:
    lines = [
        f"* ``{name}`` ({METRICS[name].scale}): {' '.join(METRICS[name].description.split())}"
        for names in scales().values()
        for name in names
    ]
    return "\n    ".join(lines)


if CapacityRecord.__doc__:  # python -OO strips docstrings
    CapacityRecord.__doc__ = CapacityRecord.__doc__.replace("{metrics}", _described())


# ---------------- capacity as text


def capacity_text(metrics: "CapacityMetrics") -> str:
    """The table of ``print(metrics)``, aligned, at most 120 columns wide."""
    lines = ruled(["layer", *columns()], _rows(metrics), total=True)
    return "\n".join([*lines, *_notes(metrics)])


def capacity_html(metrics: "CapacityMetrics") -> str:
    """The table of ``print(metrics)`` as HTML, for a notebook."""
    title = f"Capacity of {len(metrics)} layers"
    head = [heading.replace("\n", " ") for heading in ("layer", *columns())]
    return table_html(title, head, _rows(metrics), notes=_notes(metrics))


def _rows(metrics: "CapacityMetrics") -> list[list[str]]:
    records = (*metrics.layers.items(), ("whole model", metrics.model))
    return [[name, *_cells(record)] for name, record in records]


def _notes(metrics: "CapacityMetrics") -> list[str]:
    over = metrics.over_layers
    largest = ", ".join(map(number, (over.largest_condition, over.largest_condition_clipped)))
    lines = [
        f"over layers: mean participation ratio {number(over.mean_participation_ratio)}, mean "
        f"entropy rank {number(over.mean_entropy_rank)},",
        f"largest condition before and after clipping {largest}",
        f"N = {metrics.num_examples:,g}, δ = {metrics.damping:g}",
        *textwrap.wrap(legend(), WIDTH),
    ]
    if metrics.not_counted:
        lines.append(
            "not part of the whole model (another layer answers for the parameters): "
            + ", ".join(metrics.not_counted)
        )
    return lines


def _cells(record: CapacityRecord) -> list[str]:
    values = record.scalars()
    return [number(values.get(name)) for name in columns().values()]


# ---------------- the metrics of a model


@dataclasses.dataclass(frozen=True)
class OverLayers:
    """Summaries over the layers; each stacked slice counts as one.

    Attributes:
        mean_participation_ratio: Mean over the layers.
        mean_entropy_rank: Mean over the layers.
        largest_condition: Largest over the layers; ``None`` (infinite) if that of any layer is.
        largest_condition_clipped: Largest over the layers after clipping.
    """

    mean_participation_ratio: float
    mean_entropy_rank: float
    largest_condition: float | None
    largest_condition_clipped: float | None


@dataclasses.dataclass(frozen=True, eq=False)
class CapacityMetrics(Mapping[str, CapacityRecord]):
    """``{layer name: metrics}``, the metrics of the full model, and the arguments used.

    ``print(metrics)`` is a table; ``to_dict()`` is ready for JSON.

    Attributes:
        layers: ``{layer name: metrics}``. A stacked layer has the metrics of all slices together,
            and those of each slice in ``.slices``.
        model: Metrics of all blocks together, the block-diagonal curvature of the model.
        over_layers: Means and maxima over the layers.
        not_counted: Layers that are not part of ``model``, because another layer owns
            their parameters (a tied embedding beside its head).
        num_examples: N.
        damping: delta, in units of N times the curvature of the mean loss.
        threshold: The threshold of ``num_above``.
    """

    layers: dict[str, CapacityRecord]
    model: CapacityRecord
    over_layers: OverLayers
    not_counted: tuple[str, ...]
    num_examples: float
    damping: float
    threshold: float

    def __getitem__(self, name: str) -> CapacityRecord:
        if name not in self.layers:
            closest = nearest(name, self.layers)
            raise UnknownLayerError(f"no layer {name!r}; the nearest names are {closest}")
        return self.layers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __repr__(self) -> str:
        rank = f"entropy rank {number(self.model.entropy_rank)} of {self.model.dimension:,}"
        settings = f"num_examples={self.num_examples:,g}, damping={self.damping:g}"
        return f"CapacityMetrics of {len(self)} layers, {settings}: {rank}"

    def __str__(self) -> str:
        return capacity_text(self)

    def _repr_html_(self) -> str:
        return capacity_html(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, ``None`` where a metric is undefined or infinite."""
        return {
            "num_examples": self.num_examples,
            "damping": self.damping,
            "threshold": self.threshold,
            "scales": scales(),
            "model": self.model.to_dict(),
            "over_layers": dataclasses.asdict(self.over_layers),
            "not_counted": list(self.not_counted),
            "layers": {name: record.to_dict() for name, record in self.layers.items()},
        }


def capacity_metrics(
    bases: Eigenbases,
    *,
    num_examples: float | int,
    damping: float | int = 1.0,
    threshold: float | int = 1e-8,
    powers: Sequence[float | int] = (0.5, 2.0),
    quantiles: Sequence[float | int] = (0.05, 0.25, 0.5, 0.75, 0.95),
) -> CapacityMetrics:
    r"""Measure how many directions the curvature of each layer and the model has, and how strong.

    A block's eigenvalues are $\lambda_{ij} = \alpha_i \gamma_j$. The model's eigenvalues are those
    of all blocks together. With $T = \operatorname{tr} F$ of each block and $w = T / \sum T$,

    $$\operatorname{tr} F = \sum\alpha \sum\gamma, \quad
      \|F\|^2 = \sum\alpha^2 \sum\gamma^2, \quad
      H = H(w) + \sum w (H_A + H_G), \quad \ldots$$

    Metrics use raw eigenvalues; $\kappa$ is also given after clipping. :class:`CapacityRecord`
    lists each metric with its scale and reference. Ranks, entropies and condition numbers are
    scale-free. Trace, norm, quantiles and the counts above ``threshold`` belong to the curvature F
    of the *mean* loss. Metrics that weigh the data against a prior use $N F + \delta$.

    Args:
        bases: From :func:`eigendecompose`; ``vectors=False`` is enough. In corrected bases
            (EKFAC) the measured eigenvalues count instead of the products.
        num_examples: $N \ge 1$, the number of loss terms in the data set: examples, or tokens for
            a language model. It need not be that of the batch behind the factors.
        damping: $\delta \ge 0$, precision of the prior, added to $N \lambda$. The damping of a
            natural gradient step, which is added to $\lambda$, is $\delta / N$.
        threshold: Eigenvalues of the block and of each factor above it are counted; in the units of
            the mean loss.
        powers: The $p > 0$ of $\operatorname{tr} F^p$.
        quantiles: Fractions in [0, 1].

    Returns:
        Records by layer and for the full model, on the host, computed in float64.

    Raises:
        TypeError: ``bases`` is not an ``Eigenbases``.
        ValueError: an argument out of its range, or traced bases.
        NonFiniteFactorError: naming a layer with eigenvalues that are not finite.

    Memory:
        O(m + n) for factors of sizes m and n; for the full model the sum over layers, plus a
        copy of values that are stored one by one (diagonals, corrected eigenvalues). Time is O(m n)
        for the sums of $\ln$ and of $N\lambda / (N\lambda + \delta)$, otherwise O((m + n) log n).

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> params = {"kernel": jnp.ones((3, 2))}
        >>> objective = jk.Objective(lambda p, x: x @ p["kernel"], jk.Gaussian())
        >>> stats, batch = jk.value_grad_and_factors(objective), (jnp.eye(3), jnp.zeros((3, 2)))
        >>> value, grads, factors = stats(params, batch)
        >>> metrics = jk.capacity_metrics(jk.eigendecompose(factors), num_examples=3)
        >>> round(metrics["kernel"].entropy_rank, 3), metrics.model.dimension
        (3.0, 6)
    """
    if not isinstance(bases, Eigenbases):
        hint = "; decompose them: jk.eigendecompose(factors, vectors=False)"
        raise TypeError(f"bases must be Eigenbases, got {type(bases).__name__}{hint}")
    settings = Settings(
        float(num_examples),
        float(damping),
        float(threshold),
        tuple(map(float, powers)),
        tuple(map(float, quantiles)),
    )
    _check(settings)
    cached_sums: dict[int, Sums] = {}  # by id, which is not used again while ``layer_list`` lives
    layer_list = layer_blocks(bases)
    layers = {blocks.name: _measure_layer(blocks, settings, cached_sums) for blocks in layer_list}
    counted = [block for blocks in layer_list for block in blocks.counted]
    return CapacityMetrics(
        layers=layers,
        model=record_of(
            MeasuredSpectrum(_sums(counted, settings, cached_sums), counted, settings, None)
        ),
        over_layers=_over_layers([r for record in layers.values() for r in record.parts]),
        not_counted=tuple(blocks.name for blocks in layer_list if not blocks.counted),
        num_examples=settings.num_examples,
        damping=settings.damping,
        threshold=settings.threshold,
    )


def _measure_layer(
    layer: LayerBlocks, settings: Settings, cached_sums: dict[int, Sums]
) -> CapacityRecord:
    above = [_above_per_factor(piece, settings.threshold) for piece in layer.slices]
    slices = [
        record_of(
            MeasuredSpectrum(
                _sums(piece.blocks, settings, cached_sums), piece.blocks, settings, count
            )
        )
        for piece, count in zip(layer.slices, above, strict=True)
    ]
    if not layer.stacked:
        return slices[0]
    blocks = [block for piece in layer.slices for block in piece.blocks]
    counts = [count for count in above if count is not None]
    total = (sum(a for a, _ in counts), sum(g for _, g in counts)) if counts else None
    measured = MeasuredSpectrum(_sums(blocks, settings, cached_sums), blocks, settings, total)
    return record_of(measured, tuple(slices))


def _above_per_factor(piece: Slice, threshold: float) -> tuple[int, int] | None:
    if piece.a is None or piece.g is None:
        return None
    return int((piece.a > threshold).sum()), count_above(piece.g, threshold)


def _sums(blocks: Sequence[CapacityBlock], settings: Settings, cached: dict[int, Sums]) -> Sums:
    """The sums of ``blocks`` together; the sums of each block are cached by its id."""
    for block in blocks:
        if id(block) not in cached:
            cached[id(block)] = sums_of(block, settings)
    return combined([cached[id(block)] for block in blocks])


def _over_layers(records: Sequence[CapacityRecord]) -> OverLayers:
    return OverLayers(
        mean_participation_ratio=_mean([record.participation_ratio for record in records]),
        mean_entropy_rank=_mean([record.entropy_rank for record in records]),
        largest_condition=_largest([record.condition for record in records]),
        largest_condition_clipped=_largest([record.condition_clipped for record in records]),
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _largest(values: Sequence[float | None]) -> float | None:
    finite = [value for value in values if value is not None]
    return max(finite) if len(finite) == len(values) else None


def _check(settings: Settings) -> None:
    if not 1 <= settings.num_examples < math.inf:
        raise ValueError(f"num_examples must be at least 1 and finite, got {settings.num_examples}")
    for name in ("damping", "threshold"):
        if not 0 <= getattr(settings, name) < math.inf:
            got = getattr(settings, name)
            raise ValueError(f"{name} must be zero or positive, and finite, got {got}")
    if bad := [p for p in settings.powers if not 0 < p < math.inf]:
        raise ValueError(
            f"powers must be positive, got {bad}: a negative power of raw eigenvalues is "
            "decided by rounding; use jk.apply_power with damping"
        )
    if bad := [q for q in settings.quantiles if not 0 <= q <= 1]:
        raise ValueError(f"quantiles must lie in [0, 1], got {bad}")
