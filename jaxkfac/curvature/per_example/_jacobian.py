"""The Jacobian of outputs or losses as an operator: products with it, and its Gram matrix."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from jaxkfac._arguments import (
    ArrayTree,
    check_arrays,
    check_function,
    is_differentiable,
    leaves_by_path,
    path_of,
)
from jaxkfac._errors import check_key, one_of
from jaxkfac._mapped_axes import AxisName, axis_names, check_mapped
from jaxkfac.curvature.per_example._gram_plan import GramPlan, plan_of
from jaxkfac.curvature.per_example._jacobian_rows import RowKind, RowSource
from jaxkfac.curvature.per_example._row_products import GatheredProducts, RowProducts, sides_of
from jaxkfac.factors import ModelCall, Objective, check_word
from jaxkfac.interception.coupling import Word
from jaxkfac.memory import ByteSize, parse_bytes

# ---------------- compiled products


def _gram(source: RowSource, calls: Sequence[ModelCall], max_bytes: int | None) -> Array:
    return GatheredProducts(source, calls, max_bytes=max_bytes).gram()


def _squared_norms(source: RowSource, calls: Sequence[ModelCall], max_bytes: int | None) -> Array:
    return GatheredProducts(source, calls, max_bytes=max_bytes, diagonal=True).squared_norms()


def _vjp(source: RowSource, calls: Sequence[ModelCall], x: Array) -> dict[str, Array]:
    return RowProducts(source, *calls).vjp(x)


def _jvp(source: RowSource, calls: Sequence[ModelCall], vector: dict[str, Array]) -> Array:
    return RowProducts(source, *calls).jvp(vector)


def _residuals(source: RowSource, calls: Sequence[ModelCall]) -> Array:
    return RowProducts(source, *calls).residuals()


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
        key: The model's key, for dropout, or ``None``.
        source: The objective, and what the rows are; static.
    """

    params: Any
    batch: Any
    state: Any
    key: Any
    source: RowSource = dataclasses.field(metadata={"static": True})

    @property
    def call(self) -> ModelCall:
        """The call of the model or loss at which it is differentiated."""
        return ModelCall(self.params, self.batch, self.key, self.state)

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

    def jvp(self, vector: ArrayTree) -> Float[Array, " rows"]:
        r"""$J v$, one number for each row, in one forward pass; ``J @ v`` is the same.

        Args:
            vector: A tree like the parameters. Entries of parameters that ``layers=`` leaves out
                are ignored.

        Raises:
            ValueError: ``rows="losses"``, or ``vector`` has other leaves.
        """
        ours, theirs = leaves_by_path(self.params), leaves_by_path(vector)
        shapes = [{path: np.shape(x) for path, x in leaves.items()} for leaves in (ours, theirs)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"vector: expected a tree like the parameters, {shapes[0]}, got {shapes[1]}"
            )
        leaves = {path: x for path, x in theirs.items() if is_differentiable(ours[path])}
        return _compiled(_jvp, self.source)([self.call], leaves)

    def __matmul__(self, vector: ArrayTree) -> Float[Array, " rows"]:
        return self.jvp(vector)

    def residuals(self) -> Float[Array, " rows"]:
        r"""The residuals $r$ of ``rows="residuals"``; the loss is $\tfrac12 |r|^2$.

        Their derivative is $J$, and the loss's gradient is $J^\top r$. A masked row is zero.

        Raises:
            ValueError: other rows; a mark in the rule of a custom derivative, or one that depends
                on another; or a loss that depends on parameters past its marks.
        """
        return _compiled(_residuals, self.source)([self.call])

    def plan(self, other: "Jacobian | None" = None, *, diagonal: bool = False) -> GramPlan:
        """How :meth:`gram` or, with ``diagonal``, :meth:`squared_norms` computes each layer.

        Nothing is computed, and shapes suffice for parameters and batch; ``print`` the result for a
        table.

        Args:
            other: As for :meth:`gram`.
            diagonal: Whether the diagonal alone is computed.
        """
        self._check(other)
        sides = sides_of(self.source, [self.call] if other is None else [self.call, other.call])
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
    key: Key[Array, ""] | None = None,
    axis_name: AxisName = None,
) -> Jacobian:
    r"""The Jacobian $J$ of a model on one batch, as an operator that is never formed.

    ``J.gram()`` is $J J^\top$ (see :func:`gram`), ``J.gram(other)`` the same with the rows of
    another batch, ``J.squared_norms()`` its diagonal, ``J @ v`` is $J v$ in one forward pass,
    ``J.vjp(x)`` is $J^\top x$ in one backward pass, and ``print(J.plan())`` shows how each layer is
    computed. With ``rows="residuals"``, ``J.residuals()`` is $r$, and a damped least-squares step
    is $J^\top (J J^\top + \lambda)^{-1} r$; :func:`jaxkfac.spring` is the optimizer.

    Args:
        objective: As for :func:`gram`.
        params: As for :func:`gram`.
        batch: As for :func:`gram`.
        rows: As for :func:`gram`.
        layers: As for :func:`gram`.
        state: As for :func:`gram`.
        experts: As for :func:`gram`.
        examples: As for :func:`gram`.
        key: For a model or loss with a ``key=`` argument, as for dropout.
        axis_name: Mapped axes (``jax.pmap``, ``jax.shard_map``) whose devices hold parts of the
            batch. The rows are then those of all devices, output by output, and equal on each of
            them; ``J.vjp`` sums over devices.

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
        >>> print(step["w"].ravel(), J @ step)
        [1. 1. 0.] [1. 1.]
    """
    one_of("rows", rows, get_args(RowKind))
    check_word(examples)
    check_arrays("params", params)
    axes = axis_names(axis_name) or ()
    check_mapped("jk.jacobian", axes)
    if key is not None:
        check_key(key)
    source = RowSource(objective, rows, layers, experts, examples, axes)
    if not isinstance(objective, Objective):
        check_function("objective", objective, "loss(params, batch), or a jk.Objective")
        if state is not None:
            raise ValueError("state= needs a jk.Objective, not a scalar loss")
        check_arrays("batch", batch)
        return Jacobian(params, batch, state, key, source)
    batch, program = objective.batch(batch), source.program()
    # Targets and mask are checked here, where they may have values; for shapes a plan checks them.
    traced = program.traced(ModelCall(params, batch, key, state))
    shapes = (isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(batch[1:]))
    if not any(shapes):
        objective.check(program.output_shapes(traced), batch.targets, batch.mask)
    return Jacobian(params, batch, state, key, source)


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
