"""Parameters that are stored in another form than an array, and decoded only inside a product.

The traced function sees a parameter with the decoded shape. In its place the rewriter carries a
`DeferredParameter`: the encoded arrays, and the views that the program has applied so far. Nothing
is decoded until a product of a dense layer reads it, and the residuals that this product stores for
its backward pass are the encoded arrays.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Shaped

from jaxkfac import _jaxpr_compat
from jaxkfac._arguments import ArrayTree, path_of
from jaxkfac._errors import UncoveredParameterError
from jaxkfac._jaxpr_compat import Eqn


class EncodedParameter:
    """A parameter in an encoded form: a pytree whose arrays all begin with the stacked axes.

    A ``lax.scan``, or an index, can therefore take slices of it without decoding.

    Attributes:
        stack: Shape of the stacked axes.
        shape: Shape of the parameter, with the stacked axes first.
        dtype: Dtype of the parameter.
    """

    stack: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: jnp.dtype

    def decode(self) -> Shaped[Array, "..."]:
        """The parameter as an array."""
        raise NotImplementedError


def is_encoded(x: object) -> TypeGuard[EncodedParameter]:
    return isinstance(x, EncodedParameter)


def decoded_shapes(tree: ArrayTree) -> ArrayTree:
    """The tree with a ``jax.ShapeDtypeStruct`` in place of each encoded parameter."""

    def shape(x: object) -> object:
        return jax.ShapeDtypeStruct(x.shape, x.dtype) if is_encoded(x) else x

    return jax.tree.map(shape, tree, is_leaf=is_encoded)


def encoded_paths(tree: ArrayTree) -> frozenset[str]:
    """Paths of the encoded parameters."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_encoded)
    return frozenset(path_of(path) for path, leaf in leaves if is_encoded(leaf))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeferredParameter:
    """An encoded parameter seen through views.

    Attributes:
        encoded: The parameter.
        operands: For each view, its other operands. Their leading axes are those of ``encoded``.
        path: The parameter's path.
        lead: Number of stacked axes that no view has touched. They lead every array here, and the
            views are functions of one slice along them.
        views: The views.
        touched_by: The first view that touched a stacked axis, for messages.
    """

    encoded: EncodedParameter
    operands: tuple[tuple[Any, ...], ...]  # arrays, or what a tree transformation puts there
    path: str = dataclasses.field(metadata={"static": True})
    lead: int = dataclasses.field(metadata={"static": True})
    views: tuple["_View", ...] = dataclasses.field(metadata={"static": True})
    touched_by: str = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, encoded: EncodedParameter, path: str) -> "DeferredParameter":
        return cls(encoded, (), path, len(encoded.stack), (), "")

    def decode(self) -> Shaped[Array, "..."]:
        """The array that the program sees."""
        x = self.encoded.decode()
        for view, operands in zip(self.views, self.operands, strict=True):
            # Views are functions of one slice, so they are mapped over the stacked axes that are
            # still there.
            x = _over(view, self.lead)(x, *operands)
        return x

    def scanned(self) -> "DeferredParameter":
        """The parameter in one iteration of ``lax.scan``, which slices the arrays.

        Raises:
            UncoveredParameterError: a view before the scan has moved its leading axis.
        """
        if self.lead == 0:
            raise self._unsliced("a scan")
        return dataclasses.replace(self, lead=self.lead - 1)

    def through(self, eqn: Eqn, position: int, values: Sequence[Any]) -> list["DeferredParameter"]:
        """The parameter behind a view, one for each result."""
        name = eqn.primitive.name
        if name in ("slice", "dynamic_slice") and self.encoded.stack:
            if self.lead == 0:
                raise self._unsliced(f"`{name}`")
            if (cut := _cut(eqn, values)) is not None:
                return [self._map_leading(cut)]
        if name == "squeeze" and eqn.params["dimensions"] == (0,) and self.lead:
            return [dataclasses.replace(self._map_leading(lambda a: a[0]), lead=self.lead - 1)]
        lead = min(self.lead, _untouched(eqn, position))
        # Earlier views were functions of smaller slices; under a view that touches an axis they are
        # mapped over it.
        before = tuple(_over(view, self.lead - lead) for view in self.views)
        shape = self.encoded.stack[:lead]
        # A scan slices every array of the parameter, so each operand gets the stacked axes too.
        operands = tuple(
            jnp.broadcast_to(jnp.asarray(v, a.aval.dtype), (*shape, *jnp.shape(v)))
            for i, (v, a) in enumerate(zip(values, eqn.invars, strict=True))
            if i != position
        )
        touched = self.touched_by or (_described(eqn) if lead < self.lead else "")
        return [
            dataclasses.replace(
                self,
                operands=(*self.operands, operands),
                lead=lead,
                views=(*before, _on_slices(eqn, position, lead, k)),
                touched_by=touched,
            )
            for k in range(len(eqn.outvars))
        ]

    def _map_leading(self, fn: "_Slicing") -> "DeferredParameter":
        """Apply a function of the leading axis to every array."""
        encoded, operands = jax.tree.map(fn, (self.encoded, self.operands))
        return dataclasses.replace(self, encoded=encoded, operands=operands)

    def _unsliced(self, what: str) -> UncoveredParameterError:
        kind = type(self.encoded).__name__
        why = (
            f"{self.touched_by} came before and does not commute with slicing: move it behind "
            f"{what}, or keep this parameter in full precision"
            if self.touched_by
            else "it was encoded without a stacked axis: name it when it is encoded (stack=)"
        )
        return UncoveredParameterError(
            f"parameter {self.path!r} is held as {kind}, and {what} takes slices of it: {why}"
        )


Operand = ArrayLike | DeferredParameter
_View = Callable[..., Array]  # a function of the parameter and the view's other operands
_Slicing = Callable[[Array], Array]
_Key = TypeVar("_Key")


def bind(eqn: Eqn) -> Callable[..., Any]:
    """A function of all operands of an equation, which decodes a deferred one.

    The decoded array is formed where it is read and must not become a residual. The derivative is
    the same product of a tangent, and its checkpoint recomputes the array from the encoded ones. A
    checkpoint around the product itself would do the same, but it would hide the product from the
    checkpoint policy of the program.
    """

    def run(*operands: Any) -> Any:
        position = next(
            (i for i, v in enumerate(operands) if isinstance(v, DeferredParameter)), None
        )
        if position is None:
            return _jaxpr_compat.bind(eqn)(*operands)
        other_operands = [v for i, v in enumerate(operands) if i != position]

        def decoded(deferred: DeferredParameter, *other_operands: ArrayLike) -> Any:
            values = [*other_operands[:position], deferred.decode(), *other_operands[position:]]
            return _jaxpr_compat.bind(eqn)(*values)

        product = jax.custom_jvp(decoded)

        @product.defjvp
        def _(primals: tuple, tangents: tuple) -> tuple:
            # The product is linear in the other operand, so its tangent is the same product; the
            # encoded parameter has no tangent.
            return decoded(*primals), jax.checkpoint(decoded)(primals[0], *tangents[1:])

        return product(operands[position], *other_operands)

    return run


def bind_view(eqn: Eqn, values: Sequence[Operand], run: Callable[..., Any]) -> list[Any]:
    """The results of a view, computed by ``run``; nothing is computed for a deferred operand."""
    deferred = [(i, v) for i, v in enumerate(values) if isinstance(v, DeferredParameter)]
    if not deferred:
        out = run(*values)
        return list(out) if eqn.primitive.multiple_results else [out]
    if eqn.primitive.name == "optimization_barrier":
        arrays = [v for v in values if not isinstance(v, DeferredParameter)]
        # A deferred parameter goes around the barrier: forming it here would be what the barrier
        # exists to delay.
        after_barrier = iter(jax.lax.optimization_barrier(arrays))
        return [v if isinstance(v, DeferredParameter) else next(after_barrier) for v in values]
    position, parameter = deferred[0]
    return list(parameter.through(eqn, position, values))


def refuse_deferred(pairs: Iterable[tuple[_Key, Operand]], read_by: Callable[[_Key], str]) -> None:
    """Raise if one of the values is deferred.

    Args:
        pairs: Pairs ``(key, value)`` of the values that are about to be read.
        read_by: Maps a key to a name for the reader of its value.

    Raises:
        UncoveredParameterError: naming the parameter and its reader.
    """
    for key, value in pairs:
        if isinstance(value, DeferredParameter):
            raise UncoveredParameterError(
                f"parameter {value.path!r} is held as {type(value.encoded).__name__}, which only "
                f"the product of a dense layer can read, and is also read by {read_by(key)}: keep "
                "this parameter in full precision"
            )


def _over(fn: _View, axes: int) -> _View:
    for _ in range(axes):
        fn = jax.vmap(fn)
    return fn


def _described(eqn: Eqn) -> str:
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    return f"`{eqn.primitive.name}` {before} -> {after}"


_ELEMENTWISE = frozenset("convert_element_type copy copy_p reduce_precision name neg".split())
_VARYING = frozenset(("pvary", "pcast"))
_ARITHMETIC = frozenset(("mul", "div", "add", "sub", "add_any"))


def _untouched(eqn: Eqn, position: int) -> int:
    """The number of leading axes along which a view is a function of each slice."""
    name, before = eqn.primitive.name, eqn.invars[position].aval.shape
    if name in _ELEMENTWISE | _VARYING:
        return len(before)
    # A scalar is the same for every slice; any other operand may differ between them.
    if name in _ARITHMETIC and eqn.invars[1 - position].aval.shape == ():
        return len(before)
    if name == "transpose":
        return _agreeing(eqn.params["permutation"], range(len(before)))
    if name == "squeeze":
        return min(eqn.params["dimensions"], default=len(before))
    # A row-major reshape leaves leading axes alone as long as their sizes stay the same.
    if name == "reshape" and _jaxpr_compat.read_order(eqn) == tuple(range(len(before))):
        return _agreeing(before, eqn.outvars[0].aval.shape)
    return 0


def _agreeing(a: Iterable[int], b: Iterable[int]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


def _on_slices(eqn: Eqn, position: int, lead: int, result: int) -> _View:
    """A view as a function of one slice along ``lead`` axes."""
    name, p = eqn.primitive.name, eqn.params

    def view(x: Shaped[Array, "..."], *other_operands: ArrayLike) -> Shaped[Array, "..."]:
        if lead and name == "transpose":
            return x.transpose([d - lead for d in p["permutation"][lead:]])
        if lead and name == "squeeze":
            return jax.lax.squeeze(x, [d - lead for d in p["dimensions"]])
        if lead and name == "reshape":
            return x.reshape(eqn.outvars[0].aval.shape[lead:])
        out = _jaxpr_compat.bind(eqn)(*other_operands[:position], x, *other_operands[position:])
        return out[result] if eqn.primitive.multiple_results else out

    return view


def _cut(eqn: Eqn, values: Sequence[Any]) -> _Slicing | None:
    """The slice that an equation takes of the leading axis; ``None`` if it cuts another axis."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if before[1:] != after[1:]:
        return None
    if eqn.primitive.name == "slice":
        p = eqn.params
        stride = p["strides"][0] if p["strides"] else 1
        start, limit = p["start_indices"][0], p["limit_indices"][0]
        return lambda a: jax.lax.slice_in_dim(a, start, limit, stride)
    # The primitive moves a start below zero to zero; the function would count it from the end.
    start = jnp.maximum(values[1], 0)
    return lambda a: jax.lax.dynamic_slice_in_dim(a, start, after[0])
