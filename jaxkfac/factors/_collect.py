"""Value, gradient and every factor in one backward pass."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Key

from jaxkfac._arguments import (
    ArrayTree,
    check_arrays,
    partition,
    with_leaves,
)
from jaxkfac._errors import check_key, instance_of
from jaxkfac._jaxpr_compat import cast_varying
from jaxkfac._mapped_axes import axes_apart, check_mapped, sum_over_devices
from jaxkfac.blocks import (
    Factors,
    Turn,
)
from jaxkfac.factors._gather import (
    Call,
    Measurable,
    PassCollector,
    ValueGradAndFactors,
    gradient_tree,
)
from jaxkfac.factors._model_call import ModelCall, check_array
from jaxkfac.factors._objective import Objective
from jaxkfac.factors._passes import iterations_in_turns, largest_turn, part_of_turn
from jaxkfac.factors._scalar_loss import (
    AdaptationOfBatch,
    adaptation_of,
    share_of_loss,
    warn_of_sum,
)
from jaxkfac.factors._statistics import Statistics
from jaxkfac.interception import (
    Staged,
    TraceCache,
    Traced,
    check_weights,
    fast_convolutions,
)


class TrainingStep(NamedTuple):
    """What a step of training needs of one batch.

    Attributes:
        value: As in ``ValueGradAndFactors``.
        grads: The gradient.
        extra: The keyword arguments of ``tx.update(grads, state, params, **extra)``.
    """

    value: Any
    grads: ArrayTree
    extra: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class FactorCollector(PassCollector):
    """The function that ``value_grad_and_factors`` returns. Pure; jit it."""

    # Outside of jit, differentiation is staged too, so later calls only run equations.
    _staged: TraceCache[Staged] = dataclasses.field(
        default_factory=TraceCache, repr=False, compare=False
    )
    _warned: list[bool] = dataclasses.field(default_factory=list, repr=False, compare=False)

    def __call__(
        self,
        params: ArrayTree,
        batch: ArrayTree,
        key: Key[Array, ""] | None = None,
        positions: Bool[Array, "..."] | Float[Array, "..."] | None = None,
        labels: ArrayTree = None,
        state: ArrayTree | None = None,
        *,
        step: ArrayLike | None = None,
        bases: Measurable | None = None,
    ) -> ValueGradAndFactors:
        r"""Value, gradient and factors of one batch.

        Args:
            params: Parameters; integer leaves are not differentiated and get zero gradients.
            batch: ``(inputs, targets)`` or ``(inputs, targets, mask)`` for an ``Objective``;
                whatever the function takes, for a scalar loss.
            key: For dropout, for the labels of ``fisher="mc"`` and for the rows of ``subsample=``.
            positions: ``(N, S)`` bool: which positions exist. Other rows are left out of every
                factor and its count. The axes are those of the outputs. Or floating weights of
                positions, not negative: A is $\sum p a a^\top / \sum p$, and a row whose weight is
                not 0 exists for everything else. Weights take ``sharing="expand"``.
            labels: ``(samples, *targets)``: labels for ``fisher="mc"`` in place of sampled ones,
                for a test or another framework. With several likelihoods, a tree of their form;
                with a loss that marks its outputs, a list with an entry for each mark.
            state: What a call changes (batch statistics), for a function with a ``state=``
                argument.
            step: The number of the step. With ``every=``, factors are collected if it is a
                multiple of that. With ``collect=k``, those of group ``step % k`` are collected:
                count the calls of your loop, and not updates that were made, because none is made
                until every group has come. All micro-batches of one update take the same number.
            bases: Eigenbases of these layers, for example ``state.bases`` of :func:`jaxkfac.kfac`.
                The factors then include what :func:`jaxkfac.correct_eigenvalues` measures in them,
                with the same labels, as ``factors[name].corrected``. This takes a second pass over
                the batch, without gradients of parameters.

        Returns:
            ``(value, grads, factors)``; value is ``(value, aux)`` with ``has_aux``, ``(value,
            changed)`` with a state, and ``(value, (aux, changed))`` with both. At a step without
            collection, the sums and counts of the factors are zero; ``factors.loss_terms`` counts
            at every step.

        Raises:
            UncoveredParameterError: no layer covers a parameter.
            LostRowsError: rows cannot be followed to a layer, and ``positions`` or statistics of
                whole examples need them.
            ValueError: the batch is empty or does not fit the likelihood; ``step`` is missing with
                ``every=`` or ``collect=``, or ``key`` with ``subsample=``; with ``collect=``,
                ``bases`` are given, there are fewer layers than groups, or no layer is scanned
                and ``step`` is traced; or the call is not inside a map of ``axis_name``.
        """
        self.check_mapped()
        call = self.checked(batch, key, positions, labels, state, bases)
        due, turn = self.is_due(step), self._turn(step)
        if isinstance(self._program.objective, Objective):
            outputs = self._program.output_shapes(self.traced(params, call))
            call.estimator.check_values(self._program.objective, outputs, call.batch)
        if isinstance(due, Tracer):
            return self._gather_where(due, params, call)
        run = self.gather if due else self.without_factors
        if turn is not None:
            run = functools.partial(self._gather_turn, turn)
        if any(isinstance(x, Tracer) for x in jax.tree.leaves((params, call, turn))):
            return run(params, call)

        def stage() -> Staged:
            staged = Staged.of(run, params, call)
            self._warn_of_sum(params, call)
            return staged

        # Each group has a program of its own, and so has a step that collects nothing.
        static = due if turn is None else int(turn.number)
        return self._staged.get((params, call), stage, static=static)(params, call)

    def at_steps(self, every: int) -> "FactorCollector":
        """The collector of the same statistics with another ``every=``."""
        if every == self.options.every:
            return self
        options = dataclasses.replace(self.options, every=every)
        return dataclasses.replace(self, options=options, _staged=TraceCache())

    def check_mapped(self) -> None:
        """Refuse an ``axis_name`` that no map around the call has."""
        check_mapped("jk.value_grad_and_factors", self._program.axes)

    def checked(
        self,
        batch: ArrayTree,
        key: Key[Array | jax.ShapeDtypeStruct, ""] | None = None,
        positions: Bool[Array, "..."] | Float[Array, "..."] | None = None,
        labels: ArrayTree = None,
        state: ArrayTree | None = None,
        bases: Measurable | None = None,
    ) -> Call:
        """Check that the arguments fit together, and return them in the program's form."""
        if self.options.subsample is not None and key is None:
            raise ValueError(f"subsample={self.options.subsample} draws rows: pass key=")
        if self.options.subsample is not None:
            check_key(key)
        if positions is not None:
            check_array("positions", positions)
            check_weights("positions", positions)  # here they have values; the program is staged
        has_outputs = isinstance(self._program.objective, Objective)
        batch = self._program.objective.batch(batch) if has_outputs else batch
        estimator = self.options.estimator.bound(key, labels, batch if has_outputs else None)
        if bases is not None and self.options.collect > 1:
            raise ValueError(
                f"collect={self.options.collect} and bases=: measured eigenvalues have one count "
                "for all layers, and some layers come at each step: leave out one of the two"
            )
        if bases is not None:
            remedy = "as state.bases or jk.eigendecompose(factors) gives them"
            instance_of("bases", bases, Measurable, remedy)
        return Call(batch, key, positions, estimator, state, bases)

    def _warn_of_sum(self, params: ArrayTree, call: Call) -> None:
        """See ``warn_of_sum``; once for each collector."""
        is_mean = isinstance(self._program.objective, Objective) or self.options.loss_terms == 1
        if is_mean or self._warned:
            return
        value = lambda some: self._program.value(ModelCall(params, some, call.key, call.state))
        if warn_of_sum(value, call.batch):
            self._warned.append(True)

    def is_due(self, step: ArrayLike | None) -> Any:
        """Whether factors are collected at a step, as a bool; traced if the step is traced.

        Raises:
            ValueError: ``every=`` is above 1, and the step is missing or is no whole number.
        """
        if self.options.every == 1:
            return True
        why = f"every={self.options.every} collects at some steps"
        due = _number_of(step, why) % self.options.every == 0
        return due if isinstance(due, Tracer) else bool(due)

    def _turn(self, step: ArrayLike | None) -> Turn | None:
        """The group of a step; ``None`` if every step collects all factors."""
        if self.options.collect == 1:
            return None
        why = f"collect={self.options.collect} collects some factors at each step"
        number = _number_of(step, why) % self.options.collect
        if not isinstance(number, Tracer):
            return Turn(np.asarray(number, np.int32), {}, self.options.collect)
        return Turn(number.astype(jnp.int32), {}, self.options.collect)

    def _gather_turn(self, turn: Turn, params: ArrayTree, call: Call) -> ValueGradAndFactors:
        """``gather`` for one group of the layers."""
        traced = self.traced(params, call)
        static = not isinstance(turn.number, Tracer)
        parts, windows = part_of_turn(self.statistics(traced), turn, static=static)
        out = self.gather(params, call, parts=parts, windows=windows)
        # Layers of the model, with all iterations, so that the groups have one structure.
        layers = (*traced.table.tapped, *self._second_pass(traced, params))
        return out._replace(factors=dataclasses.replace(out.factors, layers=layers, turn=turn))

    def largest_group(self, traced: Traced) -> int | None:
        """With ``collect=``, the group with the most bytes; ``None`` if one program serves all."""
        return largest_turn(self.statistics(traced), self.options.collect)

    def statistics_of_step(self, traced: Traced) -> Statistics:
        """What a step gathers; with ``collect=``, the statistics of the largest group."""
        statistics = self.statistics(traced)
        if self.options.collect == 1:
            return statistics
        group = self.largest_group(traced)
        turn = Turn(np.int32(group or 0), {}, self.options.collect)
        parts, _ = part_of_turn(statistics, turn, static=group is not None)
        return dataclasses.replace(statistics, parts=parts)

    def _in_turns(self, factors: Factors, traced: Traced) -> Factors:
        """Shapes of complete factors, and of the counts of an average if they come in turns."""
        if self.options.collect == 1:
            return factors
        statistics, dtype = self.statistics(traced), factors.terms.dtype
        largest_turn(statistics, self.options.collect)  # refuses more groups than layers
        iterations = iterations_in_turns(statistics)
        counts = {
            layer.name: jax.ShapeDtypeStruct(layer.stack[: layer.name in iterations], dtype)
            for layer in factors.layers
        }
        number = jax.ShapeDtypeStruct((), jnp.int32)
        return dataclasses.replace(factors, turn=Turn(number, counts, self.options.collect))

    def _gather_where(
        self, due: Bool[Array, ""], params: ArrayTree, call: Call
    ) -> ValueGradAndFactors:
        """``gather`` if it is due, otherwise the gradient alone; both in one program."""
        collect = Staged.of(fast_convolutions(self.gather), params, call)

        @fast_convolutions
        def skip(params: ArrayTree, call: Call) -> ValueGradAndFactors:
            out = self.without_factors(params, call, collect.types.factors)
            # Inside `shard_map` both branches must vary over the same mesh axes.
            return jax.tree.map(cast_varying, out, collect.types)

        return jax.lax.cond(
            due,
            # `cond` keeps a weak reference, which `collect`, a NamedTuple, does not have.
            lambda params, call: collect(params, call),
            skip,
            params,
            call,
        )

    def adaptation(
        self,
        params: ArrayTree,
        batch: ArrayTree,
        key: Key[Array, ""] | None = None,
        *,
        state: ArrayTree | None = None,
    ) -> AdaptationOfBatch:
        """The keyword arguments that the update of an adaptive optimizer needs for a batch.

        Args:
            params: The parameters before the update.
            batch: The batch of the gradient; under :func:`jaxkfac.multi_steps` the batch of the
                full group.
            key: The key of the call that gave the gradient, so that dropout is the same.
            state: The state of that call.

        Returns:
            ``value``, ``value_fn`` and ``curvature``: ``tx.update(grads, state, params,
            factors=factors, **stats.adaptation(params, batch, key))``. Inside ``jit`` the value
            is free, because the curvature runs the same forward pass.

        Raises:
            TypeError: a scalar loss that marks no outputs, so that its curvature is not known.

        Example:
            >>> import jax.numpy as jnp, jaxkfac as jk
            >>> params = {"kernel": jnp.ones((3, 2))}
            >>> objective = jk.Objective(lambda p, x: x @ p["kernel"], jk.Gaussian())
            >>> stats, batch = jk.value_grad_and_factors(objective), (jnp.eye(3), jnp.zeros((3, 2)))
            >>> tx = jk.kfac(like=stats.factor_shapes(params, batch))
            >>> _, grads, factors = stats(params, batch)
            >>> adaptation = stats.adaptation(params, batch)
            >>> updates, state = tx.update(
            ...     grads, tx.init(params), params, factors=factors, **adaptation
            ... )
            >>> print(float(adaptation["value"]), int(state.step), int(state.adaptation.rejected))
            1.0 1 0
        """
        objective: Any = self._program.objective
        if not isinstance(objective, Objective) and self.options.loss_terms is not None:
            raise TypeError(
                "adaptation: a scalar loss whose outputs are not known (loss_terms=) has no "
                "curvature that could be computed: give a jk.Objective, or mark its outputs with "
                "jk.mark_outputs; or take an optimizer that needs none, jk.kfe_adam(1e-2) or "
                "jk.kfac(0.1) with a learning rate"
            )
        self.check_mapped()
        call = ModelCall(params, batch, key, state)
        return adaptation_of(objective, call, self._program.axes, has_aux=self.options.has_aux)

    def step(
        self,
        params: ArrayTree,
        batch: ArrayTree,
        key: Key[Array, ""] | None = None,
        positions: Bool[Array, "..."] | Float[Array, "..."] | None = None,
        labels: ArrayTree = None,
        state: ArrayTree | None = None,
        *,
        step: ArrayLike | None = None,
        bases: Measurable | None = None,
    ) -> TrainingStep:
        """A call, and ``adaptation`` of the same batch, key and state.

        Args:
            params: As in a call, like all that follow.
            batch: The batch.
            key: The key.
            positions: Which positions exist.
            labels: Labels in place of sampled ones.
            state: What a call changes.
            step: The number of the step.
            bases: Eigenbases in which eigenvalues are measured.

        Returns:
            ``(value, grads, extra)``. ``extra`` holds ``factors``, ``value`` (the loss alone) and,
            where the loss shows its outputs, ``value_fn`` and ``curvature``. These two are
            functions: an optimizer that does not adapt itself ignores them, and they cost nothing.

        Example:
            >>> import jax.numpy as jnp, jaxkfac as jk
            >>> params = {"kernel": jnp.ones((3, 2))}
            >>> objective = jk.Objective(lambda p, x: x @ p["kernel"], jk.Gaussian())
            >>> stats, batch = jk.value_grad_and_factors(objective), (jnp.eye(3), jnp.zeros((3, 2)))
            >>> tx = jk.kfac()
            >>> state = tx.init(params, like=stats.factor_shapes(params, batch))
            >>> loss, grads, extra = stats.step(params, batch)
            >>> updates, state = tx.update(grads, state, params, **extra)
            >>> print(float(loss), sorted(extra), int(state.step))
            1.0 ['curvature', 'factors', 'value', 'value_fn'] 1
        """
        out = self(params, batch, key, positions, labels, state, step=step, bases=bases)
        objective: Any = self._program.objective
        value = out.value[0] if self.has_aux or state is not None else out.value
        extra: dict[str, Any] = {"factors": out.factors, "value": value}
        if isinstance(objective, Objective) or self.options.loss_terms is None:
            call = ModelCall(params, batch, key, state)
            extra |= adaptation_of(
                objective, call, self._program.axes, has_aux=self.options.has_aux, value=value
            )
        return TrainingStep(out.value, out.grads, extra)

    def value_and_grad(
        self,
        params: ArrayTree,
        batch: ArrayTree,
        key: Key[Array, ""] | None = None,
        *,
        state: ArrayTree | None = None,
    ) -> tuple[Any, ArrayTree]:
        """Value and gradient of a call by JAX alone, for an optimizer that takes no factors.

        No layer has to be found for it.
        """
        self.check_mapped()
        call = ModelCall(params, batch, key, state)
        axes, has_aux = self._program.axes, self.has_aux

        def share(free: dict[str, Array]) -> tuple[Array, Any]:
            here = call._replace(params=with_leaves(params, free))
            return share_of_loss(self._program.objective, here, axes, has_aux=has_aux)

        free, _ = partition(params)
        (value, beside), grads = jax.value_and_grad(share, has_aux=True)(free)
        value, grads = sum_over_devices((value, grads), axes_apart(axes, value))
        value = (value, beside) if has_aux or state is not None else value
        return value, gradient_tree(params, grads)

    def factor_shapes(
        self,
        params: ArrayTree,
        batch: ArrayTree,
        key: Key[Array | jax.ShapeDtypeStruct, ""] | None = None,
        positions: Bool[Array, "..."] | Float[Array, "..."] | None = None,
        state: ArrayTree | None = None,
        *,
        bases: Measurable | None = None,
    ) -> Factors:
        """``Factors`` of ``jax.ShapeDtypeStruct``; nothing is computed.

        With ``bases`` (or their shapes) the result includes ``corrections``. With ``collect=`` it
        has the shapes of an average, with all layers and ``turn.counts``.
        """
        check_arrays("params", params)
        check_arrays("batch", batch)
        if key is None and (
            self.options.estimator.samples_labels or self.options.subsample is not None
        ):
            key = jax.eval_shape(lambda: jax.random.key(0))
        call = self.checked(batch, key, positions, None, state, bases)
        if positions is not None:  # the trace shows whether they reach every layer
            gather = self.on_one_device().gather
            shapes = jax.eval_shape(gather, params, call.quiet()).factors
        else:
            shapes = self.types(params, call)
        return self._in_turns(shapes, self.traced(params, call))

    def uncovered(
        self,
        params: ArrayTree,
        batch: ArrayTree,
        key: Any = None,
        *,
        state: ArrayTree | None = None,
    ) -> list[tuple[str, str]]:
        """``(parameter path, reason)`` of what no layer covers, though it has a gradient."""
        return self.traced(params, self.checked(batch, key, state=state)).table.problems


def _number_of(step: Any, why: str) -> Any:
    """The number of a step.

    Raises:
        ValueError: it is missing, or no whole number.
    """
    if step is None:
        raise ValueError(f"{why}: pass step=, the number of this one")
    kind = getattr(step, "dtype", type(step))
    if np.ndim(step) or not jnp.issubdtype(kind, jnp.integer):
        raise ValueError(f"step={step!r}: expected the number of this step, a whole number")
    return step
