"""Sums and averages of factors over steps, batches and devices."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from jaxkfac._errors import instance_of, named, nearest
from jaxkfac.blocks._factors import Factors, alike, stored_like, with_origin
from jaxkfac.blocks._origin import (
    Turn,
    check_all_layers,
    check_same_origin,
    check_turn,
    number_of_turns,
)
from jaxkfac.blocks._sides import BiasMode, Side, Sides, decayed
from jaxkfac.interception import Layer

# ---------------- running averages of factors


@runtime_checkable
class OfLayers(Protocol):
    """A collection with one block for each layer, such as factors or eigenbases."""

    @property
    def layers(self) -> tuple[Layer, ...]: ...
    @property
    def bias(self) -> BiasMode: ...
    def __iter__(self) -> Iterator[str]: ...


@runtime_checkable
class Measured(Protocol):
    """Fixed eigenvectors with sums and counts that are averaged: corrected eigenbases."""

    def decayed_sum(self, new: Any, decay: ArrayLike) -> Any:
        """``decay`` times its own sums and counts, plus those of ``new``."""
        ...


Average = TypeVar("Average", bound=Factors | Measured)


def zeros_like(shapes: Factors) -> Factors:
    """Factors with zero sums and zero counts, the neutral element of ``+``.

    Args:
        shapes: Factors, or their shapes from ``stats.factor_shapes``.

    Returns:
        Factors of the same layers, shapes and dtypes; their means read as 0.
    """
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def update_average(average: Average, factors: Average, decay: ArrayLike) -> Average:
    r"""Advance an exponential average by one step: ``decay * average + factors``.

    Sums and counts decay alike, so the mean read from the result,

    $$ \frac{\sum_t \beta^{T-t} \Sigma_t}{\sum_t \beta^{T-t} n_t}, $$

    needs no bias correction: after the first step it is that step's mean, with no $1 - \beta^t$ to
    divide by, and a step with twice as many rows counts twice as much. A sum whose count is zero
    leaves its average unchanged.

    Factors that come in turns (``collect=``) advance the averages of the layers, and iterations of
    scans, of their group. Each decays by its own steps: with $n_t = 0$ at the steps of other
    groups, the mean is the one above. G and diagonals are stored as means, with ``terms`` of 1, or
    0 until every group has come once. A sum of different groups leaves the average unchanged.

    Corrected eigenbases (:func:`correct_eigenvalues`) are averaged in the same way. Their measured
    eigenvalues are averaged in the eigenvectors of ``average``; both must have been measured there.

    Args:
        average: The average so far. Start from :func:`zeros_like`, or from eigenbases that are not
            corrected yet. Its dtypes are kept.
        factors: This step's factors, or corrected eigenbases. The result keeps the ``origin`` of
            ``average`` even if these belong to another Fisher type; eigenbases not corrected
            yet get the origin of the first measured ones.
        decay: $\beta \in [0, 1)$; may be traced.

    Returns:
        The new average, again as sums and counts.

    Raises:
        ValueError: ``decay`` is concrete and out of range, the two have different layers, or one
            of them comes in turns and the other does not.
        TypeError: one is factors and the other is not.

    Memory:
        One elementwise pass; under ``jit`` with a donated average nothing else.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> params = {"kernel": jnp.ones((3, 2))}
        >>> objective = jk.Objective(lambda p, x: x @ p["kernel"], jk.Gaussian())
        >>> stats, batch = jk.value_grad_and_factors(objective), (jnp.eye(3), jnp.zeros((3, 2)))
        >>> value, grads, factors = stats(params, batch)
        >>> average = jk.update_average(factors, 3.0 * factors, decay=0.5)
        >>> average.terms, average["kernel"].g[0].round(5)
        (Array(10.5, dtype=float32), Array([1., 1.], dtype=float32))
    """
    check_decay(decay)
    if type(average) is not type(factors):
        kinds = f"{type(factors).__name__} to an average of {type(average).__name__}"
        raise TypeError(f"update_average: cannot add {kinds}")
    if not isinstance(average, Factors):
        return average.decayed_sum(factors, decay)
    new = cast(Factors, factors)
    check_same_layers(new, average)
    if average.turn is not None or new.turn is not None:
        return _average_of_turns(average, new, decay)
    average, new = alike(average, new)
    if other := average.sides.keys() ^ new.sides.keys():
        raise ValueError(f"update_average: only one of the two has {min(other)}")
    decays = {field: _decay_of(getattr(new, field), decay) for field in ("terms", "loss_terms")}
    counts = {
        field: None if beta is None else decayed(getattr(average, field), beta, getattr(new, field))
        for field, beta in decays.items()
    }
    corrections = jax.tree.map(
        lambda x, y: decayed(x, decays["terms"], y), average.corrections, new.corrections
    )
    new_sides, sides = new.sides, {}
    for place, old in average.sides.items():
        side = new_sides[place]
        beta = _decay_of(side.count, decay) if place.table == "a" else decays["terms"]
        count = decayed(old.count, beta, side.count) if place.table == "a" else None
        sides[place] = Side(decayed(old.data, beta, side.data), count)
    return cast(Any, average).with_sides(sides, corrections=corrections, **counts)


def _average_of_turns(average: Factors, new: Factors, decay: ArrayLike) -> Factors:
    """Advance the averages of the layers, or of the iterations, that a step's group contains."""
    check_all_layers("average", average.turn)
    check_turn("update_average: factors", new.turn, number_of_turns(average.turn))
    assert average.turn is not None and new.turn is not None  # checked above
    new_turn = new.turn
    new, valid = stored_like(with_origin(new, average.origin), average), new_turn.is_valid
    arrays, terms = arrays_of_turn(average, new), jnp.where(valid, new.terms, 0)
    came, new_sides = terms > 0, new.sides
    sides: Sides = {}
    counts = {}
    for place, old in arrays.sides.items():
        side, total = new_sides[place], None
        if place.table == "a":
            count = jnp.where(valid, side.count, 0)
            beta, weight = _decay_of(count, decay), jnp.broadcast_to(valid, count.shape)
            total = decayed(old.count, beta, side.count, weight)
        else:
            # These are means: the old one is weighted by its share of all terms, the new sum by
            # 1 / all.
            count = _turn_of(arrays).counts[place.key]
            before = jnp.asarray(decay, count.dtype) * count
            counts[place.key] = jnp.where(came, before + terms.astype(count.dtype), count)
            share = jnp.where(came, counts[place.key], 1)
            beta, weight = jnp.where(came, before / share, 1), jnp.where(came, 1 / share, 0)
        sides[place] = Side(decayed(old.data, beta, side.data, weight), total)
    number = average.turn.number
    number = jnp.where(valid & (number < jnp.iinfo(jnp.int32).max), number + 1, number)
    arrays = arrays.with_sides(sides, turn=Turn(number, counts, new_turn.of))
    average = with_arrays_of_turn(average, arrays, new_turn)
    every = [(count > 0).all() for count in _turn_of(average).counts.values()]
    terms = jnp.stack(every).all().astype(average.terms.dtype)
    return dataclasses.replace(average, terms=terms)


def arrays_of_turn(average: Factors, new: Factors) -> Factors:
    """The part of an average that a step's factors update: their layers, and iterations of scans.

    Args:
        average: An average of factors that come in turns.
        new: The factors of a step.
    """
    scans, turn, new_turn = _scans(average), _turn_of(average), _turn_of(new)

    def rows_of(key: str) -> Callable[[Any], Any]:
        if not (scan := scans[key]):
            return lambda x: x
        start, size = new_turn.start_of(*scan), new_turn.rows_of(*scan)
        return lambda x: jax.lax.dynamic_slice_in_dim(x, start, size)

    sides = {place: average.side(place).map_stack(rows_of(place.key)) for place in new.sides}
    counts = {key: rows_of(key)(turn.counts[key]) for table, key in sides if table != "a"}
    return average.with_sides(sides, turn=dataclasses.replace(turn, counts=counts))


def shapes_of_turn(average: Factors) -> Factors:
    """Shapes of the factors of a step whose number is traced, from those of an average."""

    def step(average: Factors) -> Factors:
        assert average.turn is not None
        turn = Turn(jnp.zeros((), jnp.int32), {}, average.turn.of)
        arrays = arrays_of_turn(average, dataclasses.replace(average, turn=turn))
        return dataclasses.replace(arrays, turn=turn)

    return jax.eval_shape(step, average)


def with_arrays_of_turn(average: Factors, arrays: Factors, turn: Turn) -> Factors:
    """An average with the arrays of :func:`arrays_of_turn` in their place.

    Args:
        average: The average.
        arrays: What its arrays of this turn become.
        turn: The turn of the step's factors.
    """
    scans = _scans(average)

    def written(old: Side, new: Side, key: str) -> Side:
        if not (scan := scans[key]):
            return new
        start = turn.start_of(*scan)
        return old.map_stack(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, start, 0), new)

    old, own, before = average.sides, _turn_of(arrays), _turn_of(average).counts
    sides = {place: written(old[place], x, place.key) for place, x in arrays.sides.items()}
    counts = {key: written(Side(before[key]), Side(x), key).data for key, x in own.counts.items()}
    return average.with_sides(
        {**old, **sides}, turn=dataclasses.replace(own, counts={**before, **counts})
    )


def _scans(average: Factors) -> dict[str, tuple[int, ...]]:
    """The iterations of each layer and input that come in turns; ``()`` where all come at once."""
    counts = _turn_of(average).counts
    of_inputs = {layer.input: counts[layer.name].shape for layer in average.layers}
    return of_inputs | {name: count.shape for name, count in counts.items()}


def _turn_of(factors: Factors) -> Turn:
    """The turn of factors that are known to come in turns."""
    assert factors.turn is not None
    return factors.turn


def _decay_of(count: Any, decay: ArrayLike) -> Any:
    """The factor for an average beside a contribution; 1 if the contribution is empty."""
    return None if count is None else jnp.where(count > 0, decay, 1.0)


def check_decay(decay: Any) -> None:
    """Refuse a decay outside ``[0, 1)`` if its value is concrete."""
    if isinstance(decay, Tracer):
        return
    if not isinstance(decay, ArrayLike) or np.shape(decay) != ():
        raise TypeError(f"decay: expected a number in [0, 1), got {named(decay)}")
    if not 0 <= float(np.asarray(decay)) < 1:
        raise ValueError(f"decay must be in [0, 1), got {decay}")


def check_like(like: Any) -> None:
    """Refuse a ``like`` that is not factors or their shapes, for example parameters."""
    remedy = "as stats.factor_shapes(params, batch) gives them"
    instance_of("like", like, Factors, remedy)
    check_all_layers("like=", like.turn)


def check_factors(factors: Any, expected: OfLayers) -> None:
    """Refuse what is not factors, and factors of other layers than expected."""
    remedy = "as jk.value_grad_and_factors gives them beside value and gradient"
    instance_of("factors", factors, Factors, remedy)
    check_same_layers(factors, expected)


def check_same_layers(factors: OfLayers, expected: OfLayers) -> None:
    """Refuse factors of other layers than expected, naming the first that differs."""
    if factors.layers == expected.layers and factors.bias == expected.bias:
        return
    if factors.bias != expected.bias:
        raise ValueError(f"factors have bias={factors.bias!r}, expected {expected.bias!r}")
    for name in expected:
        if name not in factors:
            raise ValueError(
                f"factors lack the layer {name!r}; the nearest names are {nearest(name, factors)}"
            )
    for name in factors:
        if name not in expected:
            raise ValueError(f"factors have the layer {name!r}, which was not expected")
    for one, other in zip(factors.layers, expected.layers, strict=True):
        if one != other:
            raise ValueError(layer_difference(one, other))


_MAX_SHOWN = 48  # characters; a longer repr is cut in the middle


def layer_difference(layer: Layer, expected: Layer) -> str:
    """Name a layer of the factors, and the first field in which it differs from the expected one.

    The whole layers have nearly 1,000 characters; this sentence has at most 200.
    """
    if layer.name != expected.name:
        return f"factors hold layer {_cut(layer.name)} where {_cut(expected.name)} was expected"
    fields = [field.name for field in dataclasses.fields(Layer)]
    differing = [x for x in fields if getattr(layer, x) != getattr(expected, x)]
    # A parameter's matrix explains little, and differs wherever a size does.
    name = min(differing, key=lambda field: field in ("weight", "bias"))
    values = [getattr(one, name) for one in (layer, expected)]
    if name in ("weight", "bias"):
        paths = [None if value is None else value.path for value in values]
        if paths[0] != paths[1]:
            values = paths
        else:
            values = [f"{value.atoms} at {value.index}" for value in values if value is not None]
    shown, wanted = map(_cut, values)
    return f"factors hold layer {_cut(layer.name)} with {name}={shown}, expected {name}={wanted}"


def _cut(value: Any) -> str:
    """A value in a few characters, without its middle if it is long."""
    text, half = repr(value), (_MAX_SHOWN - 1) // 2
    return text if len(text) <= _MAX_SHOWN else f"{text[:half]}…{text[-half:]}"


# ---------------- sums of very many batches


Summed = TypeVar("Summed")
# Adding this many similar terms in float32 may lose 1e-5 of the sum: each addition rounds by up to
# 2**-24 of the partial sum, which on average is half of the final sum.
PLAIN_TERMS = 256


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class LongSum(Generic[Summed]):
    r"""A sum of very many terms that also keeps the rounding error of each addition.

    A plain float32 sum of $n$ similar terms rounds each term to a multiple of the sum's last digit.
    After $n$ terms that is up to $n \varepsilon$ of one term: with 200,000 batches 1 % may be lost,
    in the same direction each time. Here the error stays near $\varepsilon$ for any $n$. An
    average with a decay $\beta$ does not need this: it is a sum of $1 / (1 - \beta)$ terms.

    Build it with :meth:`zeros`, then add: ``total = total + factors``. Its structure never changes,
    so it can be the carry of a ``scan``.

    Attributes:
        total: The sum.
        rounded: The amount by which ``total`` is too large, in the same structure.

    Memory:
        Twice that of the summed arrays; under ``jit`` with a donated sum nothing else.

    Example:
        >>> import jax, jax.numpy as jnp, jaxkfac as jk
        >>> params = {"kernel": jnp.ones((3, 2))}
        >>> objective = jk.Objective(lambda p, x: x @ p["kernel"], jk.Gaussian())
        >>> stats, batch = jk.value_grad_and_factors(objective), (jnp.eye(3), jnp.zeros((3, 2)))
        >>> total = jk.LongSum.zeros(stats.factor_shapes(params, batch))
        >>> add = lambda i, total: total + stats(params, batch).factors
        >>> total = jax.lax.fori_loop(0, 200, add, total).total
        >>> total.terms, total["kernel"].g[0].round(5)
        (Array(600., dtype=float32), Array([1., 1.], dtype=float32))

    References:
        Kahan, Further remarks on reducing truncation errors, 1965.
    """

    total: Summed
    rounded: Any

    @classmethod
    def zeros(cls, shapes: Summed) -> "LongSum[Summed]":
        """An empty sum.

        Args:
            shapes: Factors, the ``corrections`` of corrected eigenbases, or any tree of arrays that
                combine by adding; or their shapes.

        Raises:
            ValueError: factors that come in turns (``collect=``).
        """
        if getattr(shapes, "turn", None) is not None:
            raise ValueError(
                "LongSum adds complete factors, and these come in turns (collect=): average them "
                "with jk.update_average, or leave collect= out"
            )
        nothing = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return cls(nothing(), nothing())

    def __add__(self, new: Summed) -> "LongSum[Summed]":
        """The sum with one more term, rounded to the sum's dtypes."""
        origins = [getattr(x, "origin", None) for x in (self.total, new)]
        if origins[0] != origins[1]:  # of factors; other trees have none, and so twice `None`
            check_same_origin("factors", *origins)
            new = dataclasses.replace(cast(Any, new), origin=origins[0])
        owed = jax.tree.map(lambda x, r: x.astype(r.dtype) - r, new, self.rounded)
        total = jax.tree.map(jnp.add, self.total, owed)
        gained = jax.tree.map(jnp.subtract, total, self.total)
        # In exact arithmetic this is zero. It is the rounding of the addition, and stays, because
        # XLA does not reassociate sums of floats.
        return LongSum(total, jax.tree.map(jnp.subtract, gained, owed))
