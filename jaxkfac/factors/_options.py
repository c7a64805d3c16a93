"""The options of ``value_grad_and_factors``, and what they must fulfill."""

import dataclasses
import functools
import numbers
from typing import Any, Literal, get_args

from jaxkfac._errors import at_least_one, one_of
from jaxkfac._mapped_axes import AxisName, axis_names
from jaxkfac.blocks import BiasMode
from jaxkfac.factors._fisher import Estimator, Fisher, estimator_of
from jaxkfac.factors._statistics import Scales, Sharing
from jaxkfac.interception.coupling import Word
from jaxkfac.kinds import Precision
from jaxkfac.memory import ByteSize

Uncovered = Literal["raise", "diagonal", "ignore"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatheringOptions:
    """What is gathered and how, under a budget or without one; see ``value_grad_and_factors``."""

    fisher: Fisher | Estimator = "empirical"
    sharing: Sharing = "expand"
    bias: BiasMode = "joint"
    scales: Scales = "auto"
    layers: str | None = None
    experts: str | None = None
    uncovered: Uncovered = "raise"
    max_dense: int = 16384
    has_aux: bool = False
    loss_terms: int | None = None
    samples: int = 1
    chunk: int = 1
    subsample: float | None = None
    every: int = 1
    precision: Precision = "highest"
    examples: Word | None = None
    packed: bool = False
    collect: int = 1
    axis_name: AxisName = None

    def __post_init__(self) -> None:
        estimator = self.estimator
        for name, words in _WORDS.items():
            one_of(name, getattr(self, name), words)
        check_word(self.examples)
        counts = ("max_dense", "samples", "chunk", "every", "collect")
        at_least_one(**{name: getattr(self, name) for name in counts})
        check_sparing(self.every, self.subsample)
        check_collect(self.collect, self.every)
        # With a unit G no gradient is gathered, so a diagonal has nothing to square.
        if estimator.unit_outputs and self.uncovered == "diagonal":
            raise ValueError(
                f'uncovered="diagonal" squares gradients, and fisher="{estimator.name}" has none: '
                'choose another Fisher type, or uncovered="ignore"'
            )

    @functools.cached_property
    def estimator(self) -> Estimator:
        """The Fisher type."""
        return estimator_of(self.fisher, samples=self.samples, chunk=self.chunk)

    @functools.cached_property
    def axis_names(self) -> tuple[str, ...] | None:
        """The mapped axes; ``None`` if they are not known."""
        return axis_names(self.axis_name)


_WORDS = {
    "sharing": get_args(Sharing),
    "bias": get_args(BiasMode),
    "scales": get_args(Scales),
    "uncovered": get_args(Uncovered),
    "precision": get_args(Precision),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectOptions(GatheringOptions):
    """The options without a budget."""

    max_factor_bytes: None = None
    sink: None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BudgetOptions(GatheringOptions):
    """The options under a budget."""

    max_factor_bytes: ByteSize
    sink: tuple[Any, int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.collect > 1:
            raise ValueError(
                f"collect={self.collect} gathers some layers at each step, and max_factor_bytes= "
                "all of them in several passes: choose one of the two"
            )
        if self.axis_names is not None:
            raise ValueError(
                f"axis_name={self.axis_name!r} and max_factor_bytes=: passes under a budget are "
                "compiled one by one, outside of jax.pmap and jax.shard_map: leave out one of the "
                "two"
            )


def check_word(examples: Any) -> None:
    """Refuse values of ``examples=`` other than ``None`` and ``"apart"``."""
    if examples not in (None, "apart"):
        raise ValueError(f"examples={examples!r}: expected None, or 'apart'")


def check_sparing(every: Any, subsample: Any) -> None:
    """Refuse an ``every`` that is no whole number, and a ``subsample`` outside (0, 1]."""
    # True is an int in Python, and `every=True` most likely means something else.
    if isinstance(every, bool) or every != int(every):
        raise ValueError(f"every={every}: expected a whole number of steps")
    if subsample is None:
        return
    number = isinstance(subsample, numbers.Real) and not isinstance(subsample, bool)
    if not number or not 0 < subsample <= 1:
        raise ValueError(f"subsample={subsample!r}: expected a part of the rows, in (0, 1]")


def check_collect(collect: Any, every: int) -> None:
    """Refuse a ``collect`` that is no whole number, or stands beside ``every``."""
    if isinstance(collect, bool) or collect != int(collect):
        raise ValueError(f"collect={collect}: expected a whole number of groups")
    if collect > 1 and every > 1:
        raise ValueError(
            f"collect={collect} collects some factors at each step, and every={every} all of them "
            "at some steps: choose one of the two"
        )
