"""Where factors come from: a Fisher type, likelihoods, and the turn of a step."""

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int

from jaxkfac.flax import serializable

# ---------------- the Fisher type and likelihoods of factors


@dataclasses.dataclass(frozen=True)
class Origin:
    """The Fisher type and likelihoods that factors were computed from; static, without arrays.

    Collectors record it and eigenbases carry it on. It is ``None`` if nothing is known: for factors
    built by hand, or read from a file written before this field existed.

    Attributes:
        fisher: The Fisher type, as ``fisher=`` calls it.
        likelihoods: Class names of the likelihoods, without repeats, in alphabetical order. Empty
            for a scalar loss that marks no outputs, whose likelihood is not known.
        examples: ``"apart"`` if the user declared that examples do not meet where the program does
            not prove it.
        axes: Mapped axes over which the factors, and the gradient that came with them, are reduced
            (``axis_name=``); ``()`` if the user reduces by hand, ``None`` if no axis was named. It
            describes a step, so averages, bases and files are without it.
        every: Steps from one collection of factors to the next (``every=``), or ``"refresh"`` if
            they are collected for the refreshes of an optimizer. Bases and files are without it.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> objective = jk.Objective(lambda p, x: x @ p["w"], jk.Gaussian())
        >>> params, batch = {"w": jnp.ones((3, 2))}, (jnp.eye(3), jnp.zeros((3, 2)))
        >>> factors = jk.value_grad_and_factors(objective, fisher="exact")(params, batch).factors
        >>> print(factors.origin, jk.eigendecompose(factors).origin == factors.origin)
        fisher='exact' of Gaussian True
    """

    fisher: str
    likelihoods: tuple[str, ...] = ()
    examples: str | None = None
    axes: tuple[str, ...] | None = None
    every: int | Literal["refresh"] = 1

    @classmethod
    def of(
        cls,
        fisher: str,
        likelihoods: Iterable[Any],
        examples: str | None = None,
        axes: tuple[str, ...] | None = None,
        every: int = 1,
    ) -> "Origin":
        """The origin for some likelihoods, of which only the classes matter."""
        names = tuple(sorted({type(x).__name__ for x in likelihoods}))
        return cls(fisher, names, examples, axes, every)

    def of_average(self) -> "Origin":
        """The origin of what is computed from the factors of several steps."""
        return dataclasses.replace(self, axes=None, every=1)

    def to_dict(self) -> dict[str, Any]:
        """The fields that a file holds: all but those that describe a training."""
        fields = dataclasses.asdict(self).items()
        return {k: v for k, v in fields if k not in ("axes", "every")}

    def __str__(self) -> str:
        named = f" of {' and '.join(self.likelihoods)}" if self.likelihoods else ""
        declared = "" if self.examples is None else f", examples={self.examples!r}"
        return f"fisher={self.fisher!r}{named}{declared}"

    def has_other_likelihoods(self, other: "Origin") -> bool:
        """Whether the likelihoods of both are known and differ."""
        both_known = self.likelihoods and other.likelihoods
        return bool(both_known) and self.likelihoods != other.likelihoods


def check_same_origin(what: str, one: Origin | None, other: Origin | None) -> None:
    """Refuse to add factors that are known to have different Fisher types or likelihoods.

    Args:
        what: Name of what is added, for the message.
        one: Origin of the first summand.
        other: Origin of the second summand.

    Raises:
        ValueError: naming both.
    """
    if one is None or other is None:
        return
    if one.fisher != other.fisher or one.has_other_likelihoods(other):
        raise ValueError(
            f"{what} of {other} cannot be added to those of {one}: collect both in the same "
            f"way; or, if the difference is intended, drop the record of one of them with "
            f"dataclasses.replace(..., origin=None)"
        )


# ---------------- factors that come in turns


@serializable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Turn:
    r"""Which part of a model's factors a step brings, where they come in turns (``collect=``).

    A layer of a scan of $n$ iterations contributes, in group $g$ of $k$, the
    $\lceil n / k \rceil$ iterations from $\lfloor g n / k \rfloor$ on. Windows may overlap; each
    iteration has a count of its own, so that those in two windows are averaged more often, and no
    mean is biased.

    Attributes:
        number: In the factors of a step, the group that they belong to, int32; -1 in a sum of
            different groups, which nothing averages. In an average, the number of steps averaged.
        counts: In an average, ``{layer: loss terms in its G or diagonal}``, decayed by its own
            steps: ``(stack[0],)`` for a layer whose iterations come in turns, else a scalar. Empty
            in the factors of a step.
        of: The number of groups, static.
    """

    number: Any
    counts: dict[str, Any]
    of: int = dataclasses.field(metadata={"static": True})

    @property
    def is_step(self) -> bool:
        """Whether the factors are those of a step, and not an average."""
        return not self.counts

    @property
    def is_valid(self) -> Bool[Array, ""]:
        """Whether the factors of a step belong to one group."""
        return jnp.asarray(self.number >= 0)

    def rows_of(self, iterations: int) -> int:
        """How many iterations of a scan each group contains."""
        return -(-iterations // self.of)

    def start_of(self, iterations: int) -> Int[Array, ""] | int:
        """The first of the iterations of a scan that this group contains."""
        # For n iterations in k groups the last window starts at n - ceil(n / k), so that no window
        # passes the end of the scan.
        start = self.number * iterations // self.of
        return int(start) if isinstance(start, np.integer) else start

    def of_layers(self, names: Collection[str]) -> "Turn":
        """The turn with the counts of some of the layers."""
        counts = {name: x for name, x in self.counts.items() if name in names}
        return dataclasses.replace(self, counts=counts)

    def __str__(self) -> str:
        number = "" if isinstance(self.number, Tracer) else f" {self.number}"
        return f"group{number} of {self.of}"


def sum_of_turns(one: Turn | None, other: Turn | None) -> Turn | None:
    """The turn of a sum: that of both summands, and number -1 if traced numbers differ.

    Raises:
        ValueError: one of them does not come in turns, is an average, or belongs to another group;
            inside ``jit`` the number of the group is not known.
    """
    if one is None and other is None:
        return None
    if one is None or other is None or one.of != other.of:
        numbers = " and ".join(f"collect={1 if turn is None else turn.of}" for turn in (one, other))
        raise ValueError(
            f"factors of {numbers} cannot be added: take both from one jk.value_grad_and_factors"
        )
    if not (one.is_step and other.is_step):
        raise ValueError(
            "an average of factors that come in turns (collect=) counts each layer by itself: "
            "jk.update_average adds the factors of a step to it, and + does not"
        )
    numbers = one.number, other.number
    if any(isinstance(number, Tracer) for number in numbers):
        same = jnp.asarray(one.number == other.number)
        return dataclasses.replace(one, number=jnp.where(same, one.number, -1))
    if not np.array_equal(*numbers):
        raise ValueError(
            f"factors of {one} and of {other} cannot be added: micro-batches of one step take "
            "the same step="
        )
    return one


def check_turn(what: str, turn: Turn | None, expected: int) -> None:
    """Refuse complete factors where those of a step in turns are expected, and the reverse.

    Args:
        what: Name of the factors, for the message.
        turn: Their turn.
        expected: The number of groups that are expected; 1 for complete factors.

    Raises:
        ValueError: naming both numbers, and the remedy.
    """
    if number_of_turns(turn) != expected:
        raise ValueError(
            f"{what} have collect={number_of_turns(turn)}, expected collect={expected}: take "
            "factors, and shapes for like= or zeros_like, from one jk.value_grad_and_factors"
        )
    if turn is not None and not turn.is_step:
        raise ValueError(
            f"{what} are an average of factors that come in turns (collect={turn.of}), expected "
            "those of a step"
        )


def check_all_layers(what: str, turn: Turn | None) -> None:
    """Refuse the factors of a step, where they come in turns and those of all layers are needed."""
    if turn is not None and turn.is_step:
        raise ValueError(
            f"{what}: the factors of one step of collect={turn.of} lack layers: take "
            "stats.factor_shapes(params, batch) for shapes, and for values an average, as "
            "state.average or jk.update_average gives it"
        )


def number_of_turns(turn: Turn | None) -> int:
    """The number of groups; 1 for factors that come all at once."""
    return 1 if turn is None else turn.of
