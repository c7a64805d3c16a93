"""The Jacobian of outputs or losses as an operator: its Gram matrix, and its transpose."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxkfac._arguments import (
    ArrayTree,
    check_arrays,
    check_function,
    is_differentiable,
    path_of,
)
from jaxkfac._errors import one_of
from jaxkfac.curvature.per_example._gram_plan import (
    GramPlan,
    plan_of,
)
from jaxkfac.curvature.per_example._jacobian_rows import JacobianRows, RowKind, RowSource
from jaxkfac.curvature.per_example._row_taps import (
    GatheredRows,
    leaf_products,
    pair_norms,
    pair_products,
)
from jaxkfac.factors import ModelCall, Objective, check_word
from jaxkfac.interception.coupling import Word
from jaxkfac.memory import ByteSize, MemoryBudgetError, bytes_text, parse_bytes

# ---------------- products of two sides


def _sides(source: RowSource, calls: Sequence[ModelCall]) -> list[JacobianRows]:
    """The rows of each call."""
    sides = [JacobianRows(source, call) for call in calls]
    second: dict[str, str] = {}
    for side in sides:
        second |= side.second
    for side in sides:
        side.second = second
    return sides


def _gathered(
    sides: Sequence[JacobianRows], plan: GramPlan, max_bytes: int | None
) -> tuple[list[list[GatheredRows]], list[Bool[Array, " rows"]]]:
    """What each side gathers, by group; and which rows exist.

    Raises:
        MemoryBudgetError: the plan takes more than ``max_bytes``.
    """
    if max_bytes is not None and plan.num_bytes > max_bytes:
        result = " x ".join(map(str, plan.shape))
        raise MemoryBudgetError(
            f"max_bytes={max_bytes}: a result of {result} takes {bytes_text(plan.num_bytes)} "
            f"({bytes_text(plan.result_bytes)} for itself, the rest for rows and gradients of the "
            "layers, without the passes of the model): allow that much, give fewer rows, or choose "
            "fewer layers="
        )
    by_pairs = [layer.name for layer in plan.layers if layer.method == "pairs"]
    by_rows = [layer.name for layer in plan.layers if layer.from_rows]
    both = [side.gathered(by_pairs, by_rows) for side in sides]
    return [rows for rows, _ in both], [kept for _, kept in both]


def _block(side: JacobianRows, one: GatheredRows, other: GatheredRows) -> Float[Array, "N D M E"]:
    """Inner products of the rows of two groups."""
    parts = [leaf_products(one.leaves[path], other.leaves[path]) for path in one.leaves]
    for name, rows in one.rows.items():
        weight, bias = side.parts(side.traced.table[name])
        parts.append(pair_products(rows, other.rows[name], weight=weight, bias=bias))
    return sum(parts[1:], parts[0])


def _norms(side: JacobianRows, one: GatheredRows) -> Float[Array, "N D"]:
    """Squared norms of the rows of a group."""
    parts = [jnp.square(x).reshape(*x.shape[:2], -1).sum(-1) for x in one.leaves.values()]
    for name, rows in one.rows.items():
        weight, bias = side.parts(side.traced.table[name])
        parts.append(pair_norms(rows, weight=weight, bias=bias))
    return sum(parts[1:], parts[0])


def _in_order(side: JacobianRows, groups: Sequence[Array], axis: int) -> Array:
    """``(N, D)`` of each group at ``axis``, as rows in the order of the outputs."""
    parts: dict[int, Array] = {}
    for group, x in zip(side.groups, groups, strict=True):
        start = 0
        for output, number in zip(group.outputs, group.columns, strict=False):
            part = jax.lax.slice_in_dim(x, start, start + number, axis=axis + 1)
            shape = *x.shape[:axis], group.number * number, *x.shape[axis + 2 :]
            parts[output], start = part.reshape(shape), start + number
    return jnp.concatenate([parts[output] for output in sorted(parts)], axis)


def _gram(source: RowSource, calls: Sequence[ModelCall], max_bytes: int | None) -> Array:
    """The Gram matrix of the rows of one call, or of the rows of two."""
    sides = _sides(source, calls)
    first, last = sides[0], sides[-1]
    rows, kept = _gathered(sides, plan_of([first, last]), max_bytes)
    blocks: dict[tuple[int, int], Array] = {}
    for i, x in enumerate(rows[0]):
        for j, y in enumerate(rows[-1]):
            symmetric = len(sides) == 1 and j < i
            blocks[i, j] = blocks[j, i].transpose(2, 3, 0, 1) if symmetric else _block(first, x, y)
    lines = [
        _in_order(last, [blocks[i, j] for j in range(len(rows[-1]))], 2)
        for i in range(len(rows[0]))
    ]
    matrix = _in_order(first, lines, 0)
    return jnp.where(kept[0][:, None] & kept[-1], matrix, jnp.zeros((), matrix.dtype))


def _squared_norms(source: RowSource, calls: Sequence[ModelCall], max_bytes: int | None) -> Array:
    (side,) = sides = _sides(source, calls)
    (rows,), (kept,) = _gathered(sides, plan_of(sides), max_bytes)
    norms = _in_order(side, [_norms(side, x) for x in rows], 0)
    return jnp.where(kept, norms, jnp.zeros((), norms.dtype))


def _vjp(source: RowSource, calls: Sequence[ModelCall], x: Array) -> dict[str, Array]:
    (side,) = _sides(source, calls)
    heads, vjp = side.outputs_and_vjp()
    cotangents = side.cotangents_of(heads)
    if x.shape != (number := len(cotangents.kept()),):
        raise ValueError(f"x has shape {x.shape}, expected one number for each row, ({number},)")
    gradients = vjp(cotangents.sums(x))
    return {path: side.elements(path, gradients[path]) for path in side.selected}


def _compiled(run: Callable[..., Any], source: RowSource, *static: Any) -> Callable[..., Any]:
    """``run(source, calls, *rest, *static)`` as ``f(calls, *rest)``, compiled once.

    It is stored with an ``Objective``, and freed with it.
    """
    if not source.has_outputs:
        return functools.partial(_of_loss, run, source, static)

    def make() -> Callable[..., Any]:
        return jax.jit(lambda calls, *rest: run(source, calls, *rest, *static))

    return source.objective.programs.get((run, source[1:], *static), make)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _of_loss(
    run: Callable[..., Any], source: RowSource, static: tuple[Any, ...], calls: Any, *rest: Any
) -> Any:
    return run(source, calls, *rest, *static)


# ---------------- the operator


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Jacobian:
    """The matrix J of derivatives of outputs or losses, from :func:`jacobian`; never formed.

    It is a pytree: it can be built inside ``jit`` and passed to a jitted function.

    Attributes:
        params: The parameters.
        batch: The batch.
        state: What a call of the model takes besides its inputs, or ``None``.
        source: The objective, and what the rows are; static.
    """

    params: Any
    batch: Any
    state: Any
    source: RowSource = dataclasses.field(metadata={"static": True})

    @property
    def call(self) -> ModelCall:
        """The call of the model or loss at which it is differentiated."""
        return ModelCall(self.params, self.batch, state=self.state)

    def gram(
        self, other: "Jacobian | None" = None, *, max_bytes: ByteSize | None = None
    ) -> Float[Array, "rows columns"]:
        r"""The Gram matrix $J J^\top$, or $J J'^\top$ with rows of another batch.

        Args:
            other: The Jacobian of the same objective with the same options on another batch; it
                may have other parameters.
            max_bytes: As for :func:`gram`.

        Raises:
            ValueError: ``other`` has another objective or other options.
            MemoryBudgetError: as for :func:`gram`.
        """
        self._check(other)
        calls = [self.call] if other is None else [self.call, other.call]
        return _compiled(_gram, self.source, _budget(max_bytes))(calls)

    def squared_norms(self, *, max_bytes: ByteSize | None = None) -> Float[Array, " rows"]:
        r"""The diagonal of $J J^\top$: the squared norm of each row's gradient.

        Args:
            max_bytes: As for :func:`gram`.
        """
        return _compiled(_squared_norms, self.source, _budget(max_bytes))([self.call])

    def vjp(self, x: Float[Array, " rows"]) -> ArrayTree:
        r"""$J^\top x$: the gradient of the weighted sum of all rows, in one backward pass.

        Args:
            x: One number for each row.

        Returns:
            A tree like the parameters. Parameters that ``layers=`` leaves out have zeros, and
            leaves without a gradient ``float0``.

        Raises:
            ValueError: ``x`` has another shape.
        """
        leaves = _compiled(_vjp, self.source)([self.call], jnp.asarray(x))

        def of_leaf(key_path: Any, leaf: Any) -> Any:
            if not is_differentiable(leaf):
                return np.zeros(jnp.shape(leaf), jax.dtypes.float0)
            gradient = leaves.get(path_of(key_path))
            return jnp.zeros_like(leaf) if gradient is None else gradient

        return jax.tree_util.tree_map_with_path(of_leaf, self.params)

    def plan(self, other: "Jacobian | None" = None, *, diagonal: bool = False) -> GramPlan:
        """How :meth:`gram` or, with ``diagonal``, :meth:`squared_norms` computes each layer.

        Nothing is computed, and shapes suffice for parameters and batch; ``print`` the result for a
        table.

        Args:
            other: As for :meth:`gram`.
            diagonal: Whether the diagonal alone is computed.
        """
        self._check(other)
        sides = _sides(self.source, [self.call] if other is None else [self.call, other.call])
        return plan_of(sides if diagonal else [sides[0], sides[-1]])

    def _check(self, other: "Jacobian | None") -> None:
        if other is not None and other.source != self.source:
            raise ValueError(
                "other: expected a Jacobian of the same objective with the same rows=, layers=, "
                f"experts= and examples=, {self.source}, got {other.source}"
            )


def _budget(max_bytes: ByteSize | None) -> int | None:
    return None if max_bytes is None else parse_bytes(max_bytes, name="max_bytes")


def jacobian(
    objective: Callable[..., Any],
    params: ArrayTree,
    batch: Any,
    *,
    rows: RowKind = "outputs",
    layers: str | None = None,
    state: ArrayTree | None = None,
    experts: str | None = None,
    examples: Word | None = None,
) -> Jacobian:
    r"""The Jacobian $J$ of a model on one batch, as an operator that is never formed.

    ``J.gram()`` is $J J^\top$ (see :func:`gram`), ``J.gram(other)`` the same with the rows of
    another batch, ``J.squared_norms()`` its diagonal, ``J.vjp(x)`` is $J^\top x$ in one backward
    pass, and ``print(J.plan())`` shows how each layer is computed. With them, a damped
    least-squares step is $J^\top (J J^\top + \lambda)^{-1} r$.

    Args:
        objective: As for :func:`gram`.
        params: As for :func:`gram`.
        batch: As for :func:`gram`.
        rows: As for :func:`gram`.
        layers: As for :func:`gram`.
        state: As for :func:`gram`.
        experts: As for :func:`gram`.
        examples: As for :func:`gram`.

    Returns:
        A :class:`Jacobian`.

    Raises:
        ValueError: ``rows`` is unknown, or the batch does not fit. What :func:`gram` raises besides
            is raised by the methods.
        TypeError: as for :func:`gram`.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> objective = jk.Objective(lambda p, x: x @ p["w"], jk.Gaussian())
        >>> params, batch = {"w": jnp.zeros((3, 1))}, (jnp.eye(2, 3), jnp.ones((2, 1)))
        >>> J = jk.jacobian(objective, params, batch)
        >>> step = J.vjp(jnp.linalg.solve(J.gram(), batch[1].ravel()))
        >>> print(step["w"].ravel())
        [1. 1. 0.]
    """
    one_of("rows", rows, get_args(RowKind))
    check_word(examples)
    check_arrays("params", params)
    source = RowSource(objective, rows, layers, experts, examples)
    if not isinstance(objective, Objective):
        check_function("objective", objective, "loss(params, batch), or a jk.Objective")
        if state is not None:
            raise ValueError("state= needs a jk.Objective, not a scalar loss")
        check_arrays("batch", batch)
        return Jacobian(params, batch, state, source)
    batch, program = objective.batch(batch), source.program()
    # Targets and mask are checked here, where they may have values; for shapes a plan checks them.
    traced = program.traced(ModelCall(params, batch, state=state))
    shapes = (isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(batch[1:]))
    if not any(shapes):
        objective.check(program.output_shapes(traced), batch.targets, batch.mask)
    return Jacobian(params, batch, state, source)


def gram(
    objective: Callable[..., Any],
    params: ArrayTree,
    batch: Any,
    other: Any = None,
    *,
    rows: RowKind = "outputs",
    diagonal: bool = False,
    layers: str | None = None,
    state: ArrayTree | None = None,
    experts: str | None = None,
    examples: Word | None = None,
    max_bytes: ByteSize | None = None,
) -> Float[Array, "..."]:
    r"""The Gram matrix $K = J J^\top$ of per-example gradients: the empirical tangent kernel.

    $K_{ij}$ is the inner product of the gradients of rows $i$ and $j$ with respect to all
    parameters. The gradients are not formed where that is cheaper: a layer with input rows $a$ and
    output cotangents $g$ at positions $s, t$ adds

    $$ K_{nm} \leftarrow K_{nm} + \sum_{s,t} (a_{ns}^\top a_{mt}) \, (g_{ns}^\top g_{mt}) , $$

    which takes about $2 N^2 S^2 (\text{in} + \text{out})$ operations, where gradients of single
    rows take $2 N^2 \, \text{in} \cdot \text{out}$. Each layer is computed the cheaper way;
    ``print(jk.jacobian(...).plan())`` shows which. Inside a ``custom_vjp`` rows are those of the
    function's ordinary derivative, as for factors.

    Args:
        objective: A model and its likelihood, or a scalar loss that marks its outputs.
        params: Parameters.
        batch: ``(inputs, targets)`` or ``(inputs, targets, mask)``; for a scalar loss whatever it
            takes. A masked row is zero.
        other: Another such batch: $K$ then has its rows as columns.
        rows: What the rows of $J$ are gradients of. ``"outputs"``: every number of the outputs, in
            the order of ``outputs.ravel()``, so that the rows of an example stand together;
            several outputs or marks follow one another. ``"residuals"``: the same for
            ``jk.Gaussian()`` outputs, times $\sqrt{w v / T}$ with the weight $w$ of an output or
            mark, the weight $v$ of a term and the number of terms $T$, so that the loss is half
            the squared norm of the residuals, and $J^\top J$ its Gauss-Newton matrix.
            ``"losses"``: the sum of each example's loss terms, one row for each example; for an
            ``Objective`` alone.
        diagonal: Return the diagonal alone, the squared norms of the rows' gradients.
        layers: Full-match pattern of layer names; other parameters count as fixed.
        state: What a call of the model takes besides its inputs (batch statistics).
        experts: As for the factors.
        examples: ``"apart"`` declares that no example's output depends on another example, where
            the program does not prove it; see :func:`value_grad_and_factors`.
        max_bytes: Most bytes of the result and of what is gathered for it, a number or ``"4GB"``,
            without the model's own passes; unlimited by default. It is checked before anything is
            computed.

    Returns:
        ``(rows, rows)``, ``(rows, rows of other)``, or ``(rows,)`` with ``diagonal``; float32,
        or float64 if parameters or outputs are. Equal rows make $K$ singular.

    Raises:
        CoupledExamplesError: an example's output depends on other examples, for example through
            batch statistics outside of evaluation mode.
        MemoryBudgetError: it does not fit into ``max_bytes``; the message says how much it takes.
        UncoveredParameterError: a complex parameter, or a layer that leads to no mark.
        UnknownLayerError: ``layers`` matches nothing.
        ValueError: a batch that does not fit, ``"residuals"`` of a likelihood without residuals,
            ``"losses"`` of a scalar loss, ``other`` together with ``diagonal``, or ``layers`` that
            leave out another reading of the same elements of a parameter.
        TypeError: a scalar loss without marks.

    Memory:
        See ``num_bytes`` of the plan, and for each layer 32 MiB, or the pairs of one example with
        all others. Parameters that no layer covers take a second pass, in which each example runs
        alone; where it cannot, each row takes a backward pass of its own.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> objective = jk.Objective(lambda p, x: x @ p["w"] + p["b"], jk.Gaussian())
        >>> params = {"w": jnp.zeros((3, 1)), "b": jnp.zeros(1)}
        >>> print(jk.gram(objective, params, (jnp.eye(3), jnp.zeros((3, 1)))))
        [[2. 1. 1.]
         [1. 2. 1.]
         [1. 1. 2.]]

    References:
        Roman Novak, Jascha Sohl-Dickstein and Samuel Schoenholz, "Fast Finite Width Neural Tangent
        Kernel", 2022.
        Xuechen Li et al., "Large Language Models Can Be Strong Differentially Private Learners",
        2022.
    """
    options = {"rows": rows, "layers": layers, "state": state, "experts": experts}
    one = jacobian(objective, params, batch, examples=examples, **options)
    if not diagonal:
        two = None
        if other is not None:
            two = jacobian(objective, params, other, examples=examples, **options)
        return one.gram(two, max_bytes=max_bytes)
    if other is not None:
        raise ValueError("diagonal=True: the rows of two batches have no diagonal; leave out other")
    return one.squared_norms(max_bytes=max_bytes)
