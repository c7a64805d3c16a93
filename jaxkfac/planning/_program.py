"""A training as a program: what it trains, on which shapes, and what XLA allocates for it."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core as jex
from jax.sharding import AbstractMesh
from jaxtyping import PyTree

from jaxkfac import lslora
from jaxkfac._errors import JaxkfacError
from jaxkfac.factors import (
    FISHER_TYPES,
    Estimator,
    FactorCollector,
    Factors,
    Pass,
    takes_key,
    value_grad_and_factors,
)
from jaxkfac.interception import Layer, LayerTable, Window, body_of, call_kind
from jaxkfac.planning._shapes import WHOLE, Placement, UnavailableError
from jaxkfac.planning._temporaries import Needs, Temporaries

# ---------------- scratch of convolutions: what no compiler sees, from a formula


def convolution_scratch(jaxpr: Any) -> int:
    """Bytes of the patches of the largest convolution: what an explicit product would read.

    cuDNN chooses among algorithms when it runs. ``IMPLICIT_GEMM`` takes nothing,
    ``IMPLICIT_PRECOMP_GEMM`` some indices, and ``GEMM`` the matrix of its input's patches,
    ``outputs * window * input features`` elements. For those by Fourier and Winograd transforms
    no size is stated.

    References:
        NVIDIA, cuDNN documentation, ``cudnnConvolutionFwdAlgo_t``.
    """
    return max(map(_patch_bytes, _convolutions(jaxpr)), default=0)


def _convolutions(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "conv_general_dilated":
            yield eqn
        elif call_kind(eqn) in ("jit", "checkpoint", "custom", "scan", "shard_map"):
            yield from _convolutions(body_of(eqn)[0])


def _patch_bytes(eqn: Any) -> int:
    numbers, kernel, out = eqn.params["dimension_numbers"], eqn.invars[1].aval, eqn.outvars[0].aval
    window = math.prod(kernel.shape) // kernel.shape[numbers.rhs_spec[0]]
    positions = math.prod(out.shape) // out.shape[numbers.out_spec[1]]
    return positions * window * out.dtype.itemsize


# ----------------


class ExtraInputs(NamedTuple):
    """What a call takes beside parameters and batch.

    Attributes:
        key: Of random numbers, or ``None`` where none are drawn.
        state: What a call changes, or ``None``.
        step: Its number, where factors are collected at some steps (``every=``), or ``None``.
    """

    key: Any
    state: PyTree
    step: Any


@dataclasses.dataclass(frozen=True, eq=False)
class TrainingProgram:
    """A program for one set of shapes, what it trains, and what it does not.

    Attributes:
        objective: ``objective(trained, batch[, key])``.
        trained: Shapes of what has a gradient: the parameters, or adapters.
        batch: Shapes; beside adapters the frozen base is among the inputs.
        frozen: Shapes of the base beside adapters, ``None`` without.
        adapted: The layers of the base that have an adapter.
        collection: For ``value_grad_and_factors``.
        config: Of adapters, if there are to be any.
        has_aux: Whether the objective returns ``(value, aux)``.
        state: Shapes of what a call changes, ``None`` without.
        temporaries: Who says what a program needs beside its arguments and results.
        placement: Where its arrays lie.
        base_table: Of the base beside adapters, ``None`` without.
        quantised: Whether the base is in 4 bits.
        same_factors: A program with factors of the same shapes, which are not traced again.
        wider: The program with all of its bits, if that is known.
    """

    objective: Any
    trained: PyTree
    batch: Any
    frozen: PyTree
    adapted: tuple[Layer, ...]
    collection: Mapping[str, Any]
    config: lslora.Config
    has_aux: bool
    state: PyTree
    temporaries: Temporaries
    placement: Placement = WHOLE
    base_table: LayerTable | None = None
    quantised: bool = False
    same_factors: "TrainingProgram | None" = None
    wider: "TrainingProgram | UnavailableError | None" = None

    def divided(self, tree: PyTree) -> PyTree:
        """Shapes of parameters, or of what lies as they do, for whom a step is compiled."""
        return self.placement.divided(tree) if self.temporaries.compiled else tree

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Shapes that the gradient is a function of, where it is compiled on all devices."""
        if not self.temporaries.compiled:
            return self.trained, self.batch, self.extra
        batch, extra = self.placement.batch(self.batch), self.placement.everywhere(self.extra)
        return self.placement.divided(self.trained), batch, extra

    @property
    def gradient_temporaries(self) -> int:
        """Bytes beside arguments and results of value and gradient."""
        return self.gradient_needs.temporaries

    @functools.cached_property
    def gradient_needs(self) -> Needs:
        """What value and gradient need."""
        args = self.arguments
        if self.temporaries.compiled or "_collected" not in vars(self):
            return self.temporaries(self.gradient, *args)
        jaxpr, out = self._collected
        only = len(jax.tree.leaves((out.value, out.grads)))
        return self.temporaries(self.collect, *args, traced=jaxpr, only=only)

    @property
    def known_temporaries(self) -> int:
        """A lower bound of :attr:`gradient_temporaries` that takes no trace.

        Of each value at least 16 bits are left.
        """
        wider = self.wider
        if not isinstance(wider, TrainingProgram) or "gradient_needs" not in vars(wider):
            return 0
        leaves = jax.tree.leaves((wider.trained, wider.batch))
        return wider.gradient_temporaries * 2 // max(x.dtype.itemsize for x in leaves)

    @functools.cached_property
    def factor_needs(self) -> Needs:
        """What value, gradient and all factors need."""
        traced = None if self.temporaries.compiled else self._collected[0]
        return self.temporaries(self.collect, *self.arguments, traced=traced)

    def pass_temporaries(self, one: Pass) -> int:
        """Bytes beside arguments and results of the gradient and one pass's factors."""
        rows = {name: part.rows for name, part in one.parts.items() if part.rows is not None}

        def run(trained: PyTree, batch: Any, extra: ExtraInputs, at: Any) -> Any:
            windows = {name: Window(at, count) for name, count in rows.items()}
            with self._of_each_device():
                call = self.collector.checked(batch, extra.key, state=extra.state)
                return self.collector.gather(trained, call, parts=dict(one.parts), windows=windows)

        at = jax.ShapeDtypeStruct((), np.int32)
        return self.temporaries(run, self.trained, self.batch, self.extra, at).temporaries

    @functools.cached_property
    def convolution_scratch(self) -> int:
        """What cuDNN may allocate by itself: the patches of the largest convolution."""
        return convolution_scratch(self.value_jaxpr.jaxpr)

    @functools.cached_property
    def value_jaxpr(self) -> jex.ClosedJaxpr:
        """The trace of the objective."""
        return jax.make_jaxpr(self.value)(self.trained, self.batch, self.extra)

    def value(self, trained: PyTree, batch: Any, extra: "ExtraInputs") -> Any:
        """What the objective returns."""
        kwargs = {"key": extra.key} if self._takes_key else {}
        if extra.state is not None:
            kwargs["state"] = extra.state
        return self.objective(trained, batch, **kwargs)

    def gradient(self, trained: PyTree, batch: Any, extra: "ExtraInputs") -> Any:
        """The value and the gradient."""
        beside = self.has_aux or extra.state is not None
        run = jax.value_and_grad(self.value, has_aux=beside, allow_int=True)
        with self._of_each_device():
            return run(trained, batch, extra)

    def collect(self, trained: PyTree, batch: Any, extra: "ExtraInputs") -> Any:
        """Value, gradient and factors."""
        with self._of_each_device():
            return self.collector(trained, batch, extra.key, state=extra.state, step=extra.step)

    def _of_each_device(self) -> contextlib.AbstractContextManager[Any]:
        """Where gradient and factors are traced: not under a mesh if shapes are of one device.

        What is divided among its devices would be a part of a part.
        """
        if self.placement.mesh is not None or self._names_axes:
            return contextlib.nullcontext()
        return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))

    @functools.cached_property
    def _names_axes(self) -> bool:
        """Whether the objective itself names axes of the mesh that is set."""
        if jax.sharding.get_abstract_mesh().empty:
            return False
        try:
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                jax.eval_shape(self.value, self.trained, self.batch, self.extra)
        except Exception:  # whatever it raises that reads the mesh itself
            return True
        return False

    @property
    def extra(self) -> "ExtraInputs":
        """Shapes of what every call takes beside parameters and batch."""
        fisher = self.collection.get("fisher", "empirical")
        kind = fisher if isinstance(fisher, Estimator) else FISHER_TYPES.get(fisher)
        draws = kind is None or kind.samples_labels or self._takes_key
        draws = draws or self.collection.get("subsample") is not None
        sometimes = self.collection.get("every", 1) != 1
        return ExtraInputs(
            shape_of_key() if draws else None,
            self.state,
            jax.ShapeDtypeStruct((), np.int32) if sometimes else None,
        )

    @property
    def _takes_key(self) -> bool:
        return takes_key(getattr(self.objective, "apply_fn", self.objective))

    @functools.cached_property
    def collector(self) -> FactorCollector:
        """What would gather the factors."""
        collector = value_grad_and_factors(self.objective, **self.collection)
        assert isinstance(collector, FactorCollector)  # the budget is the planner's own
        return collector

    @functools.cached_property
    def factors(self) -> Factors:
        """Shapes of all factors."""
        if self.same_factors is not None:
            return self.same_factors.factors
        return self._collected[1].factors

    @functools.cached_property
    def _collected(self) -> tuple[jex.ClosedJaxpr, Any]:
        """The trace of value, gradient and factors, and the shapes of what it returns."""
        trace = jax.make_jaxpr(self.collect, return_shape=True)
        return trace(self.trained, self.batch, self.extra)


def check_traces(program: TrainingProgram) -> None:
    """Raise an ``UnavailableError`` for a program that does not run once it has been changed.

    Strict promotion in bfloat16 is a reason, and a fixed batch another.
    """
    try:
        program.value_jaxpr  # noqa: B018 (traced once, and kept)
    except (JaxkfacError, ValueError, TypeError) as error:
        raise UnavailableError(first_line(error)) from None


def first_line(error: Exception) -> str:
    """What an error says, in one line without the name of its type, unless it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def shape_of_key() -> Any:
    """The shape of a key of random numbers."""
    return jax.eval_shape(lambda: jax.random.key(0))
