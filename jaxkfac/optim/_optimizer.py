"""Training through one object: statistics, optimizer, model state and keys in one step."""

import dataclasses
import functools
import math
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Int, Key

from jaxkfac._arguments import (
    ArrayTree,
    check_arrays,
    is_differentiable,
)
from jaxkfac._errors import check_key, instance_of, named
from jaxkfac._mapped_axes import mean_over_devices, sum_over_devices
from jaxkfac.blocks import Factors, with_origin
from jaxkfac.factors import (
    FactorCollector,
    Objective,
    as_batch,
    takes_key,
    value_grad_and_factors,
)
from jaxkfac.flax import LinenTrainState, serializable, state_field
from jaxkfac.optim._curvature import factors_at_init
from jaxkfac.optim._kfac import kfac
from jaxkfac.optim._kfac_state import KfacState
from jaxkfac.optim._kfe_adam import KfeAdamState, kfe_adam
from jaxkfac.optim._mapped_update import Arguments, MappedAxes
from jaxkfac.optim._multi_steps_state import MultiStepsState
from jaxkfac.optim._spring import SpringState
from jaxkfac.optim._trees import checked_state, states_of

# ---------------- the state


@serializable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepForm:
    """What every step of a training has in common. A pytree without arrays.

    Attributes:
        batch: Structure of the inputs and targets, or of the batch of a scalar loss, static.
        draws: Whether the model draws random numbers, so that a step needs a key, static.
        key_impl: The generator of the key of ``init``; ``None`` for JAX's default, static.
        every: Updates from one collection of factors to the next, static.
    """

    batch: Any = dataclasses.field(metadata={"static": True})
    draws: bool = dataclasses.field(metadata={"static": True})
    key_impl: Any = dataclasses.field(default=None, metadata={"static": True})
    every: int = dataclasses.field(default=1, metadata={"static": True})


class OptimizerState(NamedTuple):
    """State of :class:`jaxkfac.Optimizer`.

    Attributes:
        step: Calls of ``step`` so far, int32.
        inner: State of the optax transformation.
        model_state: What a call of the model changes (batch statistics), after the last step;
            ``None`` if nothing.
        key: The data of the key from which each step's key is made; ``None`` if ``init`` got none.
        probabilities: Steps in a row whose outputs looked like probabilities where the likelihood
            expects logits, int32.
        form: What every step has in common; it holds no arrays.
    """

    step: Int[Array, ""]
    inner: Any
    model_state: Any
    key: Any
    probabilities: Int[Array, ""]
    form: StepForm


# ---------------- the optimizer


@dataclasses.dataclass(frozen=True, eq=False)
class Optimizer:
    """One step of training as a pure function: gradient, factors, update, model state and keys.

    A loop would otherwise call the statistics and the optimizer one by one, and give both the same
    parameters, batch, key and state.

    Args:
        objective: A :class:`jaxkfac.Objective`, or a scalar loss ``loss(params, batch)`` that is a
            mean and marks its outputs (:func:`jaxkfac.mark_outputs`).
        optimizer: :func:`jaxkfac.kfe_adam` or :func:`jaxkfac.kfac`, both without ``like=``, an
            ``optax.chain`` that ends in one of them, or any optax transformation, which then gets
            the gradient alone. ``None``: ``jk.kfac()``, which adapts itself; for a loss with
            ``loss_terms=``, whose outputs are not known, ``jk.kfe_adam(0.01)``.
        **statistics: Options of :func:`jaxkfac.value_grad_and_factors`, such as ``fisher=``,
            ``axis_name=`` or ``has_aux=``. ``fisher`` is ``"mc"`` by default, and ``"empirical"``
            for a loss with ``loss_terms=``. Without ``uncovered=``, parameters that no layer covers
            follow Adam (in ``kfe_adam``), gradient descent or ``others=`` (in ``kfac``), and
            ``init`` warns of them. Without ``every=``, factors are collected at the updates whose
            refresh reads them; ``every=1`` collects at every step.

    Raises:
        TypeError: ``optimizer`` is no optax transformation, or there is no such option.
        ValueError: see :func:`jaxkfac.value_grad_and_factors`; ``max_factor_bytes``, which does not
            run under ``jit``.

    Example:
        >>> import jax, jax.numpy as jnp, jaxkfac as jk
        >>> x = jax.random.normal(jax.random.key(0), (64, 4))
        >>> batch, params = (x, x[:, :2]), {"w": jnp.zeros((4, 2))}
        >>> opt = jk.Optimizer(jk.Objective(lambda p, x: x @ p["w"], jk.Gaussian()))
        >>> state, step = opt.init(params, batch), jax.jit(opt.step)
        >>> for _ in range(20):
        ...     params, state, loss = step(params, state, batch)
        >>> print(float(loss) < 1e-2)
        True
    """

    objective: Any
    optimizer: Any = None
    statistics: Any = None
    warns: bool = True
    is_local: bool = True
    every: int | None = None
    _at_steps: Any = None  # collectors by ``every``: outside of jit each caches its traces

    def __init__(
        self,
        objective: Any,
        optimizer: Any = None,
        **statistics: Any,
    ) -> None:
        shows_outputs = statistics.get("loss_terms") is None
        if optimizer is None:
            optimizer = kfac() if shows_outputs else kfe_adam(0.01)
        if not isinstance(optimizer, optax.GradientTransformation):
            raise TypeError(
                "optimizer: expected jk.kfe_adam(...), jk.kfac(...) or another optax "
                f"transformation, got {named(optimizer)}"
            )
        fisher = "mc" if shows_outputs else "empirical"
        options = {"fisher": fisher, "uncovered": "ignore", **statistics}
        watched = objective.watched() if isinstance(objective, Objective) else objective
        collector = value_grad_and_factors(watched, **options)
        if not isinstance(collector, FactorCollector):
            raise ValueError(
                "max_factor_bytes= collects in several passes outside of jit: call "
                "jk.value_grad_and_factors and tx.update yourself"
            )
        for name, value in (
            ("objective", objective),
            ("optimizer", optax.with_extra_args_support(optimizer)),
            ("statistics", collector),
            ("warns", "uncovered" not in statistics),
            ("is_local", statistics.get("axis_name") is None),
            ("every", statistics.get("every")),
            ("_at_steps", {}),
        ):
            object.__setattr__(self, name, value)

    def init(
        self,
        params: ArrayTree,
        batch: ArrayTree,
        key: Key[Array, ""] | None = None,
        *,
        state: ArrayTree | None = None,
    ) -> OptimizerState:
        """The state before the first step.

        Args:
            params: The parameters.
            batch: A batch of any size, or its shapes (``jax.ShapeDtypeStruct``).
            key: If given, each step makes its key from it, and needs none.
            state: What a call of the model changes, for a model with a ``state=`` argument; by
                default the model's own ``state`` (:func:`jaxkfac.from_nnx`), if it has one.

        Raises:
            TypeError: ``key`` is a seed, or a leaf is no array.
            ValueError: the batch does not fit the objective, or ``optimizer`` accumulates
                micro-batches of an adaptive ``kfac``.
            UncoveredParameterError: with ``uncovered="raise"``, if no layer covers a parameter.

        Warns:
            UserWarning: no layer covers a parameter; the message names it and the reason.
        """
        check_arrays("params", params)
        check_arrays("batch", batch)
        if key is not None:
            check_key(key)
        state = getattr(self._function, "state", None) if state is None else state
        # Copies, because a step may donate its state; Python's numbers become arrays.
        state = jax.tree.map(jnp.array, state)
        any_key = jax.random.key(0) if key is None else key

        def shapes() -> Factors:
            like = self.statistics.factor_shapes(params, batch, any_key, state=state)
            if self.every is not None or like.origin is None:
                return like
            return with_origin(like, dataclasses.replace(like.origin, every="refresh"))

        with factors_at_init(shapes) as periods:
            inner = self.optimizer.init(params)
        every = self.every or math.gcd(*periods) or 1
        if self.warns and _takes_factors(inner):
            _warn_of_uncovered(self.statistics.uncovered(params, batch, any_key, state=state))
        _refuse_groups(inner)
        draws = key is None and self._draws(params, batch, state)
        form = StepForm(self._form(batch), draws, None if key is None else _generator(key), every)
        data = None if key is None else jnp.array(jax.random.key_data(key))
        none = (jnp.zeros((), jnp.int32) for _ in range(2))  # a buffer each: it may be donated
        return OptimizerState(next(none), inner, state, data, next(none), form)

    def step(
        self,
        params: ArrayTree,
        state: Any,
        batch: ArrayTree,
        key: Key[Array, ""] | None = None,
    ) -> tuple[ArrayTree, OptimizerState, Any]:
        """One step. It is pure: compile, scan or map it as you like.

        Args:
            params: The parameters.
            state: That of ``init`` or of the last step.
            batch: As for :func:`jaxkfac.value_grad_and_factors`.
            key: For dropout and sampled labels. If left out, it is made from the key of ``init``,
                or, for labels alone, from the number of the step.

        Returns:
            ``(params, state, loss)``, with the loss of this batch before the update. With
            ``has_aux``, ``(loss, aux)`` in its place.

        Raises:
            TypeError: ``state`` is not from ``init``.
            ValueError: the batch has another structure than that of ``init``, or the model draws
                random numbers and there is no key.
        """
        state = checked_state("state", state, OptimizerState, "as opt.init(params, batch) gives it")
        form = self._form(batch)
        if form != state.form.batch:
            raise ValueError(
                f"batch: its structure is {form}, and that of opt.init was {state.form.batch}: "
                "pass batches of one structure (their sizes may differ), or make a new state with "
                "opt.init(params, batch)"
            )
        call = {"key": self._key(state, key)}
        if state.model_state is not None:
            call["state"] = state.model_state
        if _takes_factors(state.inner):
            statistics, number = self._collector(state)
            value, grads, extra = statistics.step(params, batch, step=number, **call)
        else:
            value, grads = self.statistics.value_and_grad(params, batch, **call)
            extra = {}
            if states_of(state.inner, SpringState):
                extra |= self.statistics.adaptation(params, batch, **call)
        loss, aux, model_state, looks = self._parts(value, state.model_state)
        if "value" in extra:
            extra["value"] = loss
        else:
            extra = {"value": loss}
            if self.is_local:
                no_axes = MappedAxes("Optimizer", None, None)
                no_axes.reduced(Arguments(grads, params, None, value=loss))
        updates, inner = self.optimizer.update(grads, state.inner, params, **extra)
        axes = self.statistics.axes
        # On every device, because the state is one.
        looks = sum_over_devices((~looks).astype(jnp.int32), axes) == 0
        new = OptimizerState(
            step=jnp.asarray(optax.safe_increment(state.step)),
            inner=inner,
            # Each device has its own rows' batch statistics; one state goes on.
            model_state=mean_over_devices(model_state, axes),
            key=state.key,
            probabilities=jnp.where(looks, state.probabilities + 1, 0).astype(jnp.int32),
            form=state.form,
        )
        has_aux = getattr(self.objective, "has_aux", self.statistics.has_aux)
        return _moved(params, updates), new, (loss, aux) if has_aux else loss

    @property
    def _function(self) -> Any:
        """The user's function: the model of an objective, or the loss."""
        objective = self.objective
        return objective.apply_fn if isinstance(objective, Objective) else objective

    def _collector(self, state: OptimizerState) -> tuple[FactorCollector, Any]:
        """The statistics of a step, and its number, which says whether it collects factors."""
        every = state.form.every
        if every == 1:
            return self.statistics, state.step
        collector = self._at_steps.setdefault(every, self.statistics.at_steps(every))
        return collector, _since_collection(state.inner, every)

    def _form(self, batch: ArrayTree) -> Any:
        """The structure of a batch; that of an ``Objective`` may come with a mask or without."""
        if isinstance(self.objective, Objective):
            batch = tuple(as_batch(batch)[:2])
        return jax.tree.structure(batch)

    def _draws(self, params: ArrayTree, batch: ArrayTree, state: ArrayTree | None) -> bool:
        """Whether the model fails without a key."""
        if not takes_key(self._function):
            return False
        alone = self.statistics.on_one_device()

        def traced(key: Any) -> None:
            run = lambda p, x: alone.value_and_grad(p, x, key, state=state)
            jax.eval_shape(run, params, batch)

        try:
            traced(None)
        except Exception:  # a model may raise anything without a key
            traced(jax.random.key(0))  # raises again if the key is not what it lacks
            return True
        return False

    def _parts(self, value: Any, state: Any) -> tuple[Any, Any, Any, Bool[Array, ""]]:
        """``(loss, aux, model state, whether outputs look like probabilities)`` of a value."""
        aux = changed = None
        if state is not None:
            value, changed = value
            if self.statistics.has_aux:
                aux, changed = changed
        elif self.statistics.has_aux:
            value, aux = value
        if not isinstance(self.objective, Objective):
            return value, aux, changed, jnp.zeros((), jnp.bool_)
        assert aux is not None  # see ``Objective.watched``
        aux, looks = aux
        return value, aux, changed, looks

    def _key(self, state: OptimizerState, key: Any) -> Any:
        """The key of a step."""
        if key is not None:
            return key
        if state.key is not None:
            key = jax.random.wrap_key_data(state.key, impl=state.form.key_impl)
        elif state.form.draws:
            raise ValueError(
                "key: the model draws random numbers (dropout): pass opt.step(params, state, "
                "batch, key) a new key at each step, or opt.init(params, batch, key) one for all"
            )
        else:
            key = jax.random.key(0)
        return jax.random.fold_in(key, state.step)


def _generator(key: Any) -> Any:
    """The generator of a key; ``None`` for a raw key, which is of JAX's default."""
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return str(jax.random.key_impl(key)) if typed else None


def _takes_factors(state: ArrayTree) -> bool:
    """Whether the state of an optax transformation holds one of an optimizer with factors."""
    return bool(states_of(state, KfacState, KfeAdamState))


def _since_collection(state: ArrayTree, every: int) -> Any:
    """Updates since factors were collected; 0 at an update that needs them.

    The first are needed until they come, and an update that is skipped needs them again.
    """
    since = [
        jnp.where(node.stacked_average.terms == 0, 0, node.step % every)
        for node in states_of(state, KfacState, KfeAdamState)
    ]
    return functools.reduce(jnp.minimum, since)


def _warn_of_uncovered(problems: list[tuple[str, str]]) -> None:
    if problems:
        rows = "\n".join(f"  {path}: {reason}" for path, reason in problems)
        warnings.warn(
            f"{len(problems)} uses of parameters are covered by no layer, so that jk.kfe_adam "
            "moves them as Adam does, and jk.kfac by gradient descent or its others=:\n"
            f'{rows}\nGive uncovered="ignore" if this is right, or uncovered="raise".',
            stacklevel=3,
        )


def _refuse_groups(state: ArrayTree) -> None:
    """Refuse micro-batches for an optimizer that needs the loss of their whole group."""
    groups = states_of(state, MultiStepsState)
    if any(node.adaptation for group in groups for node in states_of(group.inner, KfacState)):
        raise ValueError(
            "jk.multi_steps around a kfac that adapts itself needs the loss of the whole group, "
            "and a step has that of one micro-batch: give jk.kfac a learning rate, take "
            "jk.kfe_adam, or write the loop with stats.adaptation(params, group, key)"
        )


def _moved(params: ArrayTree, updates: ArrayTree) -> ArrayTree:
    """The parameters after an update; leaves without a gradient stay."""
    return jax.tree.map(
        lambda x, u: (x + u.astype(x.dtype)) if is_differentiable(x) else x, params, updates
    )


# ---------------- Linen's TrainState


class TrainState(LinenTrainState):
    """Flax's ``TrainState`` for the optimizers of this library.

    ``tx`` is an :class:`Optimizer`, for ``state, loss = state.train_step(batch, key)``; or an optax
    transformation, for ``state.apply_gradients(grads=grads, **extra)`` with what
    ``stats.step(params, batch, key)`` returns.

    Example:
        >>> import jax, jax.numpy as jnp, flax.linen as nn, jaxkfac as jk
        >>> model, x = nn.Dense(2), jax.random.normal(jax.random.key(0), (64, 4))
        >>> batch, params = (x, x[:, :2]), model.init(jax.random.key(1), x)
        >>> opt = jk.Optimizer(jk.Objective(model.apply, jk.Gaussian()))
        >>> state = jk.TrainState.create(apply_fn=model.apply, params=params, tx=opt, batch=batch)
        >>> train_step = jax.jit(lambda state, batch: state.train_step(batch))
        >>> for _ in range(20):
        ...     state, loss = train_step(state, batch)
        >>> print(int(state.step), float(loss) < 1e-2)
        20 True
    """

    params: Any = state_field(pytree_node=True)
    tx: Any = state_field(pytree_node=False)
    opt_state: Any = state_field(pytree_node=True)

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Any,
        params: Any,
        tx: Any,
        batch: Any = None,
        key: Any = None,
        model_state: Any = None,
        like: Factors | None = None,
        **fields: Any,
    ) -> "TrainState":
        """The state before the first step.

        Args:
            apply_fn: Flax's: usually ``model.apply``; this class does not call it.
            params: The parameters.
            tx: An :class:`Optimizer`, or an optax transformation.
            batch: For an ``Optimizer``: a batch or its shapes.
            key: For an ``Optimizer``: see its ``init``.
            model_state: For an ``Optimizer``: its ``state=``.
            like: For an optax transformation with :func:`jaxkfac.kfac` or
                :func:`jaxkfac.kfe_adam` that was built without ``like=``.
            **fields: Fields of a subclass.
        """
        if isinstance(tx, Optimizer):
            if batch is None:
                raise ValueError("batch: an Optimizer needs a batch, or its shapes")
            inner = tx.init(params, batch, key, state=model_state)
            return cls(step=0, apply_fn=apply_fn, params=params, tx=tx, opt_state=inner, **fields)
        if like is None:
            return super().create(apply_fn=apply_fn, params=params, tx=tx, **fields)
        with factors_at_init(lambda: like):
            return super().create(apply_fn=apply_fn, params=params, tx=tx, **fields)

    def train_step(self, batch: ArrayTree, key: Any = None) -> tuple["TrainState", Any]:
        """``(state, loss)`` after a step of the ``Optimizer``; see its ``step``."""
        instance_of("tx", self.tx, Optimizer, "in TrainState.create(tx=jk.Optimizer(objective))")
        params, inner, loss = self.tx.step(self.params, self.opt_state, batch, key)
        return self.replace(step=self.step + 1, params=params, opt_state=inner), loss

    def apply_gradients(self, *, grads: Any, **extra: Any) -> "TrainState":
        """Flax's ``apply_gradients``, with keyword arguments for the optax transformation.

        Args:
            grads: The gradients.
            **extra: New values of fields, as in Flax; all others go to ``tx.update``.
        """
        if isinstance(self.tx, Optimizer):
            raise TypeError(
                "tx is a jk.Optimizer, which computes gradients itself: call train_step"
            )
        names = {field.name for field in dataclasses.fields(self)}
        fields = {name: x for name, x in extra.items() if name in names}
        extra = {name: x for name, x in extra.items() if name not in names}
        update = optax.with_extra_args_support(self.tx).update
        bound: Any = lambda updates, state, params=None: update(updates, state, params, **extra)
        step = self.replace(tx=optax.GradientTransformation(self.tx.init, bound))
        moved = super(TrainState, step).apply_gradients(grads=grads, **fields)
        return moved.replace(tx=self.tx)
