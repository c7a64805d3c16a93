"""A natural gradient in the space of a batch's rows: minSR, SPRING, Gauss-Newton by Woodbury."""

import dataclasses
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax.scipy.linalg import cho_factor, cho_solve
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jaxkfac._arguments import ArrayTree, check_arrays, leaves_by_path, with_leaves
from jaxkfac._errors import at_least_one, instance_of, one_of, scalar
from jaxkfac._mapped_axes import mean_over_devices, sum_over_devices
from jaxkfac.curvature.per_example import GatheredProducts, RowSource
from jaxkfac.factors import BatchCurvature
from jaxkfac.interception import fast_convolutions
from jaxkfac.linalg import is_all_finite
from jaxkfac.memory import ByteSize, parse_bytes
from jaxkfac.optim._mapped_update import Arguments, MappedAxes
from jaxkfac.optim._schedules import (
    Schedule,
    at_step,
    check_learning_rate,
    check_numbers,
    or_auto,
)
from jaxkfac.optim._trees import (
    check_like_momentum,
    checked_state,
    checked_value,
    gradients_only,
    sum_dtype,
    where,
)
from jaxkfac.optim._watch import StateWatch, warn_if_diverged

Rows = Literal["residuals", "scores"]
LENGTHS = (1.0, 0.5, 0.2, 0.05)  # of a step, tried on its batch
LARGEST = 0.1  # damping, relative to the trace
DECAY = 0.3  # share of all steps over which their length falls to zero

# ---------------- the state


class SpringState(NamedTuple):
    """State of :func:`spring`.

    Attributes:
        step: Updates so far, int32; skipped ones do not count.
        last: The last step, a tree like the parameters in at least float32, before the decay of
            the final steps; with a learning rate, its direction.
        damping: The damping of the next step, relative to the trace of the Gram matrix.
        length: Length of the last step that was made, of those tried; with a learning rate, the
            factor of the direction.
        skipped: Updates left out because a row, a residual or the loss was not finite, int32.
        rejected: Updates that moved nothing because no length lowered the loss of the batch, or
            because the solution was not finite, int32.
        watch: Counters that :func:`check_state` reads.
    """

    step: Int[Array, ""]
    last: ArrayTree
    damping: Float[Array, ""]
    length: Float[Array, ""]
    skipped: Int[Array, ""]
    rejected: Int[Array, ""]
    watch: StateWatch

    @property
    def missed(self) -> Int[Array, ""]:
        """Zero: there are no factors that could be missed."""
        return jnp.zeros((), jnp.int32)


# ---------------- one direction


class _Direction(NamedTuple):
    """A step in parameter space, to be subtracted, and what is known of it.

    Attributes:
        leaves: By parameter path.
        along: Its product with the Jacobian.
        change: The change of the loss that linear residuals predict; 0 for scores.
        finite: Whether the rows were finite.
    """

    leaves: dict[str, Array]
    along: Float[Array, " rows"]
    change: Float[Array, ""]
    finite: Bool[Array, ""]


def _solved(
    kernel: Float[Array, "n n"], shift: Float[Array, ""], rows: Float[Array, " n"]
) -> Float[Array, " n"]:
    """The solution of the damped system."""
    damped = kernel + shift * jnp.eye(len(kernel), dtype=kernel.dtype)
    return cho_solve(cho_factor(damped, lower=True), rows)


def _shift(kernel: Float[Array, "n n"], damping: Float[Array, ""]) -> Float[Array, ""]:
    """The damping in the kernel's units; one for a kernel of zeros, which any number solves."""
    shift = damping.astype(kernel.dtype) * jnp.trace(kernel)
    return jnp.where(shift > 0, shift, jnp.ones_like(shift))


def _of_residuals(
    rows: GatheredProducts,
    last: dict[str, Array],
    momentum: Array,
    damping: Array,
) -> _Direction:
    r"""$\mu \phi + J^\top (K + \lambda)^{-1} (r - \mu J \phi)$."""
    r, kernel = rows.residuals(), rows.gram()
    momentum, shift = momentum.astype(kernel.dtype), _shift(kernel, damping)
    x = _solved(kernel, shift, r - momentum * rows.jvp(last))
    leaves = _added(last, momentum, rows.vjp(x))
    # K x is known from the system, and so is J d, without another pass.
    along = r - shift * x
    change = 0.5 * (jnp.square(shift) * jnp.vdot(x, x) - jnp.vdot(r, r))
    return _Direction(leaves, along, change, is_all_finite(r, kernel))


def _of_scores(
    rows: GatheredProducts,
    last: dict[str, Array],
    momentum: Array,
    damping: Array,
    gradient: dict[str, Array],
) -> _Direction:
    r"""$\mu \phi + (J^\top J + \lambda)^{-1} (g - \mu J^\top J \phi)$ with centered rows.

    The rule of a custom derivative shows the gradient and not the residuals. By Woodbury's
    identity, $(J^\top J + \lambda)^{-1} g = (g - J^\top (K + \lambda)^{-1} J g) / \lambda$.
    """
    # Rows are scaled by the roots of their weights, so the weighted mean leaves this direction.
    order = rows.order
    scales = order.parts(order.joined(order.scales))
    units = [x / jnp.maximum(jnp.linalg.norm(x), 1e-30) for x in scales]

    def centered(x: Array) -> Array:
        parts = zip(units, order.parts(x), strict=True)
        return jnp.concatenate([part - jnp.multiply.outer(u, u @ part) for u, part in parts])

    kernel = centered(centered(rows.gram()).T)
    momentum, shift = momentum.astype(kernel.dtype), _shift(kernel, damping)
    selected = {path: gradient[path].astype(last[path].dtype) for path in rows.side.selected}
    slope = centered(rows.jvp(selected)) / shift
    x = _solved(kernel, shift, slope + momentum * centered(rows.jvp(last)))
    back = rows.vjp(centered(x))
    inverse = {path: g / shift.astype(g.dtype) for path, g in selected.items()}
    leaves = _added(last, momentum, {path: g - back[path] for path, g in inverse.items()})
    finite = is_all_finite(kernel, *selected.values())
    # J d is in the system too: the products with K cancel.
    return _Direction(leaves, shift * x, jnp.zeros_like(shift), finite)


def _added(last: dict[str, Array], momentum: Array, more: dict[str, Array]) -> dict[str, Array]:
    """The last step times the momentum, and more."""
    return {
        path: momentum.astype(x.dtype) * x + (more[path].astype(x.dtype) if path in more else 0)
        for path, x in last.items()
    }


# ---------------- the transformation


@dataclasses.dataclass(frozen=True, eq=False)
class _Spring:
    """The transformation; see :func:`spring`."""

    num_steps: int | None
    rows: Rows
    rate: Any  # "search", a number or a schedule
    damping: Any  # "adaptive", or a number
    momentum: ArrayLike
    norm_constraint: ArrayLike | None
    floor: float
    weight_decay: ArrayLike
    max_bytes: int | None

    def init(self, params: ArrayTree) -> SpringState:
        check_arrays("params", params)
        wide = lambda x: jnp.zeros(x.shape, sum_dtype(x))
        none = lambda: jnp.zeros((), jnp.int32)  # a buffer each: it may be donated
        first = 1e-3 if isinstance(self.damping, str) else self.damping
        return SpringState(
            step=none(),
            last=jax.tree.map(wide, gradients_only(jax.tree.map(jnp.asarray, params))),
            damping=jnp.maximum(jnp.asarray(first, sum_dtype(params)), self.floor),
            length=jnp.zeros((), sum_dtype(params)),
            skipped=none(),
            rejected=none(),
            watch=StateWatch.initial(params),
        )

    def update(
        self,
        updates: ArrayTree,
        state: Any,
        params: ArrayTree | None = None,
        *,
        value: Any = None,
        value_fn: Any = None,
        curvature: Any = None,
        **extra: Any,
    ) -> tuple[ArrayTree, SpringState]:
        grads = updates  # optax uses one word for inputs and outputs
        state = checked_state("spring: the state", state, SpringState)
        batch = self._checked(grads, state, params, curvature, value, value_fn)
        source = RowSource(batch.loss, "residuals", axes=batch.axes, has_aux=batch.has_aux)
        rows = GatheredProducts(source, [_checked_batch(batch)], max_bytes=self.max_bytes)
        last = leaves_by_path(state.last)
        dtype = sum_dtype(params)
        momentum = jnp.asarray(self.momentum, dtype)
        damping = jnp.maximum(state.damping, self.floor)
        if self.rows == "residuals":
            found = _of_residuals(rows, last, momentum, damping)
        else:
            own = leaves_by_path(gradients_only(grads))
            found = _of_scores(rows, last, momentum, damping, own)
        value = jnp.asarray(value, dtype)
        finite = found.finite & jnp.isfinite(value)
        finite = sum_over_devices((~finite).astype(jnp.int32), rows.order.axes) == 0
        solved = is_all_finite(*found.leaves.values())
        change = mean_over_devices(found.change, rows.order.axes)
        if isinstance(self.rate, str):
            length, ratio = _searched(value_fn, params, found.leaves, value, change)
            kept = length
            factor = jnp.ones_like(length)
        else:
            along = mean_over_devices(jnp.vdot(found.along, found.along), rows.order.axes)
            length = jnp.asarray(at_step(self.rate, state.step), dtype)
            length = length * self._constraint(length, along.astype(dtype))
            ratio, kept = None, jnp.ones_like(length)
            factor = length
        made = solved & (length > 0)
        kept = jnp.where(made, kept, 0)
        step = {
            path: jnp.where(made, x, 0) * kept.astype(x.dtype) for path, x in found.leaves.items()
        }
        no = jnp.zeros((), bool)
        watch = state.watch.after(value, came=no, due=no, begun=no)
        new = state._replace(
            step=optax.safe_increment(state.step),
            last=with_leaves(state.last, step),
            damping=self._next_damping(damping, ratio, solved),
            length=jnp.where(made, length, 0).astype(dtype),
            rejected=state.rejected + (~made).astype(jnp.int32),
            watch=watch,
        )
        skipped = state._replace(skipped=optax.safe_increment(state.skipped), watch=watch)
        new = where(finite, new, skipped)
        warn_if_diverged(new, stacklevel=3)
        factor = jnp.where(finite, factor * self._decay(state.step, dtype), 0)
        shrink = factor * kept * jnp.asarray(self.weight_decay, dtype)
        return _updates(grads, params, step, factor, shrink, finite), new

    def _checked(
        self,
        grads: ArrayTree,
        state: SpringState,
        params: ArrayTree | None,
        curvature: Any,
        value: Any,
        value_fn: Any,
    ) -> BatchCurvature:
        """The batch of an update.

        Raises:
            TypeError: the batch, its loss or the parameters are missing.
            ValueError: they do not fit each other, or are those of one device.
        """
        remedy = (
            "as in tx.update(grads, state, params, **stats.adaptation(params, batch, key)) with "
            "stats = jk.value_grad_and_factors(loss), or train with jk.Optimizer(loss, jk.spring())"
        )
        instance_of("spring: curvature", curvature, BatchCurvature, remedy)
        if value is None or value_fn is None or params is None:
            raise TypeError(f"spring: update needs params, value= and value_fn=, {remedy}")
        checked_value(value)
        check_like_momentum(grads, state.last)
        curvature.check_params(params)
        axes = MappedAxes("spring", None, curvature.axes or None)
        axes.reduced(Arguments(grads, params, None, value, value_fn, curvature))
        return curvature

    def _constraint(self, rate: Array, along: Array) -> Array:
        """The factor of at most 1 by which the norm constraint shortens a step."""
        if self.norm_constraint is None:
            return jnp.ones_like(rate)
        limit = jnp.asarray(self.norm_constraint, rate.dtype)
        squared = 4 * jnp.square(rate) * along
        beyond = squared > limit
        return jnp.where(beyond, jnp.sqrt(limit / jnp.where(beyond, squared, 1)), 1)

    def _next_damping(self, damping: Array, ratio: Array | None, solved: Array) -> Array:
        """Levenberg's and Marquardt's rule, for a step of full length."""
        if ratio is None or not isinstance(self.damping, str):
            return damping
        good, bad = ratio > 0.75, ratio < 0.25
        new = jnp.where(good, damping / 1.3, jnp.where(bad, damping * 1.7, damping))
        new = jnp.where(solved, new, 10 * damping)
        return jnp.clip(new, self.floor, max(LARGEST, self.floor)).astype(damping.dtype)

    def _decay(self, step: Int[Array, ""], dtype: Any) -> Float[Array, ""]:
        """The factor of the last steps; those after them have that of the last one."""
        if self.num_steps is None:
            return jnp.ones((), dtype)
        left = jnp.maximum(self.num_steps - step, 1).astype(dtype)
        return jnp.minimum(1.0, left / (DECAY * self.num_steps)).astype(dtype)


def _checked_batch(batch: BatchCurvature) -> Any:
    """The call of a batch in the form of its objective."""
    call, checked = batch.call, getattr(batch.loss, "batch", None)
    return call if checked is None else call._replace(batch=checked(call.batch))


def _searched(
    value_fn: Any, params: ArrayTree, step: dict[str, Array], value: Array, change: Array
) -> tuple[Array, Array]:
    """The best length of a step, 0 if none lowers the loss; and gained over predicted."""
    leaves = leaves_by_path(params)

    def tried(length: Array) -> Array:
        there = {
            path: leaves[path] - (length * x).astype(leaves[path].dtype) for path, x in step.items()
        }
        return value_fn(with_leaves(params, there)).astype(value.dtype)

    lengths = jnp.asarray(LENGTHS, value.dtype)
    values = jax.lax.map(fast_convolutions(tried), lengths)
    values = jnp.where(jnp.isfinite(values), values, jnp.inf)
    best = jnp.argmin(values)
    length = jnp.where(values[best] < value, lengths[best], 0)
    change = change.astype(value.dtype)
    ratio = (values[0] - value) / jnp.where(change < 0, change, -1)
    return length, jnp.where(change < 0, ratio, 1)


def _updates(
    grads: ArrayTree,
    params: ArrayTree,
    step: dict[str, Array],
    factor: Array,
    shrink: Array,
    finite: Array,
) -> ArrayTree:
    """The updates, in the dtypes of the gradients; leaves that are not gradients stay."""
    values = leaves_by_path(params)

    def update(path: str, g: Array) -> Array:
        x = step[path]
        move = factor.astype(x.dtype) * x + shrink.astype(x.dtype) * values[path].astype(x.dtype)
        return -jnp.where(finite, move, 0).astype(g.dtype)

    own = leaves_by_path(grads)
    return with_leaves(grads, {path: update(path, own[path]) for path in step})


def spring(
    num_steps: int | None = None,
    *,
    rows: Rows = "residuals",
    learning_rate: ArrayLike | Schedule | Literal["search", "auto"] = "auto",
    damping: ArrayLike | Literal["adaptive", "auto"] = "auto",
    momentum: ArrayLike | Literal["auto"] = "auto",
    norm_constraint: ArrayLike | Literal["auto"] | None = "auto",
    floor: float = 1e-6,
    weight_decay: ArrayLike = 0.0,
    max_bytes: ByteSize | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""A natural gradient or Gauss-Newton step, solved in the space of the batch's rows.

    Where a batch has fewer rows than the model has parameters, as points of an equation or walkers
    of a wave function, the exact damped step needs only a matrix of the rows. With residuals $r$,
    whose half squared norm is the loss, their Jacobian $J$, $K = J J^\top$ and the last step
    $\phi$,

    $$ d = \mu \phi + J^\top (K + \lambda I)^{-1} (r - \mu J \phi) , \qquad
       \Delta = -s\, t\, (d + w\, \theta) . $$

    This is the minimum of $|r - J d|^2 + \lambda |d - \mu \phi|^2$: SPRING, and with $\mu = 0$
    minSR, or energy natural gradient descent with Woodbury's identity (ENGD-W). $K$ comes from
    layer inputs and cotangents, see :func:`jaxkfac.gram`.

    With ``rows="residuals"`` the lengths $t = 1, 0.5, 0.2, 0.05$ are tried on the batch, and the
    best is taken, or none if all of them raise the loss. $\lambda$ follows Levenberg's and
    Marquardt's rule: it is divided by 1.3 where the full step gains more than 3/4 of what linear
    residuals predict, and multiplied by 1.7 where it gains less than 1/4. $s$ falls to zero over
    the last 0.3 of ``num_steps``. Draw new rows at every step, 100 to 300 of each term
    (:func:`jaxkfac.draw_rows`): the time of a step grows with their square and their cube.

    With ``rows="scores"`` the loss has a derivative of its own (``custom_jvp``), which marks
    $\log \psi$ as a ``jk.Gaussian()``, as for the energy of a wave function. The rows are centered:
    $J$ has the derivatives of $\log \psi$ less their mean, and $(J^\top J + \lambda)^{-1}$
    multiplies the gradient that the rule gives. A step has the length ``learning_rate``, and is
    shortened to $4 |J \Delta|^2 \le c$, the norm constraint.

    Args:
        num_steps: Length of the training, over the last 0.3 of which steps become shorter. ``None``
            leaves their length; later steps have that of the last one.
        rows: ``"residuals"`` of ``jk.Gaussian()`` outputs or marks, several with weights; or
            ``"scores"`` of a loss with a derivative of its own.
        learning_rate: $t$: ``"search"``, a number, or a schedule of the step. ``"auto"`` is
            ``"search"`` for residuals and 0.05 for scores, which cannot be searched: their walkers
            belong to the old parameters.
        damping: $\lambda$ over the trace of $K$: a positive number, or ``"adaptive"``, which begins
            at 1e-3 and stays between ``floor`` and 0.1. ``"auto"`` is ``"adaptive"`` with
            ``"search"``, else 1e-3.
        momentum: $\mu \in [0, 1)$; ``"auto"`` is 0.9 for residuals and 0.95 for scores.
        norm_constraint: $c > 0$, or ``None``; ``"auto"`` is none for residuals and 1e-3 for scores.
            It is not read with ``"search"``.
        floor: The least damping over the trace of $K$; the system is solved in float32.
        weight_decay: $w \ge 0$, decoupled, of all parameters.
        max_bytes: Most bytes of $K$ and of what is gathered for it, a number or ``"4GB"``;
            unlimited by default. It is checked before anything is computed.

    Returns:
        A transformation used inside ``jit`` and ``lax.scan``, in :class:`jaxkfac.Optimizer`, or as
        ``tx.update(grads, state, params, **stats.adaptation(params, batch, key))`` with ``stats =
        jk.value_grad_and_factors(loss)``. Put it last in a chain: it does not read the gradient of
        ``rows="residuals"``, and moves by its own step. It takes the rows of all devices if
        ``stats`` or ``jk.Optimizer`` have ``axis_name=``. A batch whose rows or loss are not
        finite changes nothing but ``state.skipped``. Parameters that no row depends on stay, but
        for weight decay.

    Raises:
        ValueError: when built, naming the argument out of range. In ``update``: the loss has no
            residuals (another likelihood, a penalty beside the marks, marks in the rule of a custom
            derivative), or devices would take steps of their own.
        TypeError: in ``update``, ``curvature=`` of ``stats.adaptation`` is missing, or the loss
            marks no outputs.
        CoupledExamplesError: in ``update``, rows depend on several examples.
        MemoryBudgetError: in ``update``, the rows do not fit into ``max_bytes``.

    Memory:
        One copy of the parameters for the last step. During an update $K$ with its Cholesky factor,
        $2 n^2$ numbers for $n$ rows, and what the plan of ``jk.jacobian(...).plan()`` counts.

    Example:
        >>> import jax, jax.numpy as jnp, jaxkfac as jk
        >>> x = jnp.linspace(0.0, 1.0, 20)[:, None]
        >>> params = {"w": jnp.linspace(-3.0, 3.0, 16)[None], "v": jnp.ones((16, 1)) / 16}
        >>> objective = jk.Objective(lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"], jk.Gaussian())
        >>> opt, batch = jk.Optimizer(objective, jk.spring(20)), (x, jnp.sin(3 * x))
        >>> state, step = opt.init(params, batch), jax.jit(opt.step)
        >>> for _ in range(20):
        ...     params, state, loss = step(params, state, batch)
        >>> print(float(loss) < 1e-5)
        True

    References:
        Ao Chen and Markus Heyl, "Empowering deep neural quantum states through efficient
        optimization", 2024 (minSR).
        Gil Goldshlager, Nilin Abrahamsen and Lin Lin, "A Kaczmarz-inspired approach to accelerate
        the optimization of neural network wavefunctions", 2024 (SPRING).
        Johannes Müller and Marius Zeinhofer, "Achieving High Accuracy with PINNs via Energy Natural
        Gradient Descent", 2023.
        Andrés Guzmán-Cordero, Felix Dangel, Gil Goldshlager and Marius Zeinhofer, "Improving Energy
        Natural Gradient Descent through Woodbury, Momentum, and Randomization", 2025.
    """
    one_of("rows", rows, get_args(Rows))
    of_residuals = rows == "residuals"
    rate: Any = or_auto(learning_rate, "search" if of_residuals else 0.05)
    searches = isinstance(rate, str)
    damping = or_auto(damping, "adaptive" if searches else 1e-3)
    decay: Any = or_auto(momentum, 0.9 if of_residuals else 0.95)
    constraint = or_auto(norm_constraint, None if of_residuals else 1e-3)
    if num_steps is not None:
        at_least_one(num_steps=num_steps)
    if searches:
        one_of("learning_rate", rate, ("search",))
    else:
        check_learning_rate(rate)
    if searches and not of_residuals:
        raise ValueError(
            'rows="scores": a step is not tried on the batch, whose walkers belong to the old '
            "parameters: give learning_rate= a number"
        )
    _check_damping(damping, searches=searches)
    scalar("floor", floor, "a positive number")
    if not 0 < float(floor) < 1:
        raise ValueError(f"floor must be between 0 and 1, got {floor}")
    check_numbers(
        refresh_every=1, momentum=decay, norm_constraint=constraint, weight_decay=weight_decay
    )
    budget = None if max_bytes is None else parse_bytes(max_bytes, name="max_bytes")
    tx = _Spring(num_steps, rows, rate, damping, decay, constraint, floor, weight_decay, budget)
    return optax.GradientTransformationExtraArgs(tx.init, tx.update)


def _check_damping(damping: Any, *, searches: bool) -> None:
    if isinstance(damping, str):
        one_of("damping", damping, ("adaptive",))
        if not searches:
            raise ValueError('damping="adaptive" compares full steps: take learning_rate="search"')
        return
    scalar("damping", damping, 'a positive number, or "adaptive"')
    if not 0 < float(damping) < float("inf"):
        raise ValueError(f"damping must be finite and positive, got {damping}")
