"""The factors of a big batch from those of its micro-batches."""

from collections.abc import Mapping, Sequence

from torch_ref.factors._statistics import LayerFactors


def pool_factors(
    parts: Sequence[Mapping[str, LayerFactors]], *, loss_terms: Sequence[int]
) -> dict[str, LayerFactors]:
    r"""What :func:`collect_factors` would have given for all micro-batches at once.

    With $T_b$ loss terms and $r_b$ rows in micro-batch b, $T = \sum T_b$ and $r = \sum r_b$, the
    big batch's mean loss divides by T where the micro-batch's divides by $T_b$, so

    $$ A = \frac1r \sum_b r_b A_b, \qquad
       G = \frac1r \sum_b r_b \left(\frac{T_b}{T}\right)^2 G_b. $$

    Args:
        parts: On the documents' scale, one for each micro-batch.
        loss_terms: $T_b$ of each.

    Raises:
        ValueError: nothing to pool, lengths or layers that differ, or averages over steps with
            different row counts.
    """
    if not parts or len(parts) != len(loss_terms):
        raise ValueError(
            f"expected one number of loss terms for each micro-batch, got {len(loss_terms)} for "
            f"{len(parts)}"
        )
    if any(part.keys() != parts[0].keys() for part in parts):
        raise ValueError("the micro-batches have factors of different layers")
    total = sum(loss_terms)
    return {
        name: _pool_layer([part[name] for part in parts], [t / total for t in loss_terms], name)
        for name in parts[0]
    }


def _pool_layer(parts: list[LayerFactors], shares: list[float], name: str) -> LayerFactors:
    if any(part.rows is None for part in parts):
        raise ValueError(f"layer {name!r}: an average over different row counts cannot be pooled")
    rows = sum(part.rows for part in parts)
    a = sum(part.a * (part.rows / rows) for part in parts)
    g = sum(part.g * (part.rows / rows * share**2) for part, share in zip(parts, shares))
    return LayerFactors(a, g, rows, parts[0].bias)
