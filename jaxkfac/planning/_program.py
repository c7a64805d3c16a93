"""A training as a program: what it trains, on which shapes, and its memory."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core as jex
from jax.sharding import AbstractMesh

from jaxkfac import lslora
from jaxkfac._arguments import ArrayTree
from jaxkfac._errors import JaxkfacError
from jaxkfac._interpreter import equations_in
from jaxkfac.blocks import Factors
from jaxkfac.factors import (
    FISHER_TYPES,
    Estimator,
    FactorCollector,
    Pass,
    takes_key,
    value_grad_and_factors,
)
from jaxkfac.interception import Layer, LayerTable
from jaxkfac.interception.values import Window
from jaxkfac.planning._shapes import WHOLE, Placement, UnavailableError
from jaxkfac.planning._temporaries import Needs, Temporaries

# ---------------- scratch of convolutions, by formula, since no compiler reports it


def convolution_scratch(jaxpr: Any) -> int:
    """Bytes of the patches of the largest convolution, the input of an explicit product.

    cuDNN chooses its algorithm at run time. ``IMPLICIT_GEMM`` needs nothing,
    ``IMPLICIT_PRECOMP_GEMM`` some indices, and ``GEMM`` the matrix of its input's patches,
    ``outputs * window * input features`` elements. For Fourier and Winograd transforms no size is
    documented.

    References:
        NVIDIA, cuDNN documentation, ``cudnnConvolutionFwdAlgo_t``.
    """
    return max(map(_patch_bytes, equations_in(jaxpr.eqns)), default=0)


def _patch_bytes(eqn: Any) -> int:
    if eqn.primitive.name != "conv_general_dilated":
        return 0
    numbers, kernel, out = eqn.params["dimension_numbers"], eqn.invars[1].aval, eqn.outvars[0].aval
    window = math.prod(kernel.shape) // kernel.shape[numbers.rhs_spec[0]]
    positions = math.prod(out.shape) // out.shape[numbers.out_spec[1]]
    return positions * window * out.dtype.itemsize


# ---------------- a training program


class ExtraInputs(NamedTuple):
    """Inputs of a call beside parameters and batch.

    Attributes:
        key: Key for random numbers, or ``None`` if none are drawn.
        state: State that a call changes, or ``None``.
        step: Number of the step, if factors are collected at some steps (``every=``) or in turns
            (``collect=``), or ``None``.
    """

    key: Any
    state: ArrayTree
    step: Any


@dataclasses.dataclass(frozen=True, eq=False)
class TrainingProgram:
    """A program for one set of shapes, with its trained and frozen parameters.

    Attributes:
        objective: ``objective(trained, batch[, key])``.
        trained: Shapes of what has a gradient: the parameters, or adapters.
        batch: Shapes of the batch; with adapters, its inputs include the frozen base.
        frozen: Shapes of the base beside adapters, ``None`` without.
        adapted: The layers of the base that have an adapter.
        collection: Arguments of ``value_grad_and_factors``.
        config: Settings of adapters, if any.
        has_aux: Whether the objective returns ``(value, aux)``.
        state: Shapes of the state that a call changes, ``None`` without.
        temporaries: Computes what a program needs beside its arguments and results.
        placement: Placement of its arrays.
        base_table: Layer table of the base beside adapters, ``None`` without.
        quantised: Whether the base is in 4 bits.
        same_factors: A program with factors of the same shapes, so that they are not traced again.
        wider: The same program with all its bits, if it has been built.
    """

    objective: Any
    trained: ArrayTree
    batch: Any
    frozen: ArrayTree
    adapted: tuple[Layer, ...]
    collection: Mapping[str, Any]
    config: lslora.Config
    has_aux: bool
    state: ArrayTree
    temporaries: Temporaries
    placement: Placement = WHOLE
    base_table: LayerTable | None = None
    quantised: bool = False
    same_factors: "TrainingProgram | None" = None
    wider: "TrainingProgram | UnavailableError | None" = None

    def divided(self, tree: ArrayTree) -> ArrayTree:
        """Shapes with the shardings of parameters, if a step is compiled; else plain shapes."""
        return self.placement.divided(tree) if self.temporaries.compiled else tree

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Shapes of the gradient's arguments; if compiled, those over all devices."""
        if not self.temporaries.compiled:
            return self.trained, self.batch, self.extra
        batch, extra = self.placement.batch(self.batch), self.placement.everywhere(self.extra)
        return self.placement.divided(self.trained), batch, extra

    @property
    def gradient_temporaries(self) -> int:
        """Bytes of value and gradient beside arguments and results."""
        return self.gradient_needs.temporaries

    @functools.cached_property
    def gradient_needs(self) -> Needs:
        """Memory needs of value and gradient."""
        args = self.arguments
        if self.temporaries.compiled or "_collected" not in vars(self):
            return self.temporaries(self.gradient, *args)
        jaxpr, out = self._collected
        only = len(jax.tree.leaves((out.value, out.grads)))
        return self.temporaries(self.collect, *args, traced=jaxpr, only=only)

    @property
    def known_temporaries(self) -> int:
        """A lower bound of :attr:`gradient_temporaries` that needs no trace.

        Casting leaves at least 16 bits of each value.
        """
        wider = self.wider
        if not isinstance(wider, TrainingProgram) or "gradient_needs" not in vars(wider):
            return 0
        leaves = jax.tree.leaves((wider.trained, wider.batch))
        return wider.gradient_temporaries * 2 // max(x.dtype.itemsize for x in leaves)

    @functools.cached_property
    def factor_needs(self) -> Needs:
        """Memory needs of value, gradient and all factors."""
        traced = None if self.temporaries.compiled else self._collected[0]
        return self.temporaries(self.collect, *self.arguments, traced=traced)

    def pass_temporaries(self, one: Pass) -> int:
        """Bytes of the gradient and one pass's factors beside arguments and results."""
        rows = {
            name: layer_part.rows
            for name, layer_part in one.parts.items()
            if layer_part.rows is not None
        }

        def run(trained: ArrayTree, batch: Any, extra: ExtraInputs, at: Any) -> Any:
            windows = {name: Window(at, count) for name, count in rows.items()}
            with self._of_each_device():
                call = self.collector.checked(batch, extra.key, state=extra.state)
                return self.collector.gather(trained, call, parts=dict(one.parts), windows=windows)

        at = jax.ShapeDtypeStruct((), np.int32)
        return self.temporaries(run, self.trained, self.batch, self.extra, at).temporaries

    @functools.cached_property
    def convolution_scratch(self) -> int:
        """Bytes that cuDNN may allocate itself: the patches of the largest convolution."""
        return convolution_scratch(self.value_jaxpr.jaxpr)

    @functools.cached_property
    def value_jaxpr(self) -> jex.ClosedJaxpr:
        """The trace of the objective."""
        return jax.make_jaxpr(self.value)(self.trained, self.batch, self.extra)

    def value(self, trained: ArrayTree, batch: Any, extra: "ExtraInputs") -> Any:
        """Evaluate the objective."""
        kwargs = {"key": extra.key} if self._takes_key else {}
        if extra.state is not None:
            kwargs["state"] = extra.state
        return self.objective(trained, batch, **kwargs)

    def gradient(self, trained: ArrayTree, batch: Any, extra: "ExtraInputs") -> Any:
        """Compute value and gradient."""
        beside = self.has_aux or extra.state is not None
        run = jax.value_and_grad(self.value, has_aux=beside, allow_int=True)
        with self._of_each_device():
            return run(trained, batch, extra)

    def collect(self, trained: ArrayTree, batch: Any, extra: "ExtraInputs") -> Any:
        """Compute value, gradient and factors."""
        with self._of_each_device():
            step = extra.step if self._largest_group is None else self._largest_group
            return self.collector(trained, batch, extra.key, state=extra.state, step=step)

    def _of_each_device(self) -> contextlib.AbstractContextManager[Any]:
        """The context to trace gradient and factors in: no mesh if shapes are those of one device.

        Under a mesh, such shapes would be divided a second time.
        """
        if self.placement.mesh is not None or self._names_axes:
            return contextlib.nullcontext()
        return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))

    @functools.cached_property
    def _names_axes(self) -> bool:
        """Whether the objective itself names axes of the mesh in context."""
        if jax.sharding.get_abstract_mesh().empty:
            return False
        try:
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                jax.eval_shape(self.value, self.trained, self.batch, self.extra)
        except Exception:  # any error of code that reads the mesh
            return True
        return False

    @property
    def extra(self) -> "ExtraInputs":
        """Shapes of the inputs of every call beside parameters and batch."""
        fisher = self.collection.get("fisher", "empirical")
        kind = fisher if isinstance(fisher, Estimator) else FISHER_TYPES.get(fisher)
        draws = kind is None or kind.samples_labels or self._takes_key
        draws = draws or self.collection.get("subsample") is not None
        sometimes = any(self.collection.get(name, 1) != 1 for name in ("every", "collect"))
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
        """The function that gathers the factors."""
        collector = value_grad_and_factors(self.objective, **self.collection)
        assert isinstance(collector, FactorCollector)  # the planner handles the budget itself
        return collector

    @property
    def comes_in_turns(self) -> bool:
        """Whether a step gathers the factors of one group of the layers (``collect=``)."""
        return self.collection.get("collect", 1) != 1

    @functools.cached_property
    def _largest_group(self) -> int | None:
        """The group with the most bytes, if each has a program of its own; otherwise ``None``."""
        if not self.comes_in_turns:
            return None
        call = self.collector.checked(self.batch, self.extra.key, state=self.state)
        return self.collector.largest_group(self.collector.traced(self.trained, call))

    @property
    def averages(self) -> Factors:
        """Shapes of an average of the factors."""
        if not self.comes_in_turns:
            return self.factors
        extra = self.extra
        return self.collector.factor_shapes(self.trained, self.batch, extra.key, state=extra.state)

    @functools.cached_property
    def factors(self) -> Factors:
        """Shapes of the factors of a step: of all layers, or of one group."""
        if self.same_factors is not None:
            return self.same_factors.factors
        return self._collected[1].factors

    @functools.cached_property
    def _collected(self) -> tuple[jex.ClosedJaxpr, Any]:
        """The trace of value, gradient and factors, and the shapes of its results."""
        trace = jax.make_jaxpr(self.collect, return_shape=True)
        return trace(self.trained, self.batch, self.extra)


def check_traces(program: TrainingProgram) -> None:
    """Raise an ``UnavailableError`` for a program that no longer runs after a change.

    Possible reasons are strict dtype promotion in bfloat16 and a fixed batch size.
    """
    try:
        program.value_jaxpr  # noqa: B018 (traced once and cached)
    except (JaxkfacError, ValueError, TypeError) as error:
        raise UnavailableError(first_line(error)) from None


def first_line(error: Exception) -> str:
    """The first line of an error's message; the name of its type if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def shape_of_key() -> Any:
    """The shape of a random key."""
    return jax.eval_shape(lambda: jax.random.key(0))
