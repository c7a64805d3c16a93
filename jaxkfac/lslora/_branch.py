"""The low-rank branch at one product, for any order of its operands and axes."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxkfac._errors import LostRowsError
from jaxkfac._jaxpr_compat import cast_varying
from jaxkfac.interception import Lookup, Site, Use
from jaxkfac.interception.values import Atoms, DeferredParameter, Statistic, entry, statistic
from jaxkfac.linalg import statistics_dtype
from jaxkfac.lslora._config import OWN_AXES, Adapter, EmbeddingAdapter, Placement
from jaxkfac.lslora._nonlinearity import Nonlinearity, activation, width

# ---------------- what the slot of a layer holds


class SlotAdapter(NamedTuple):
    """The constants of the slot of a layer with an adapter.

    The branch is added to the product, so a constant that scales the kernel does not scale it.

    Attributes:
        adapter: The adapter.
        index: Each example's slot of a bank, behind the layer's stack; ``None`` without a bank.
        key: Key data for dropout, or ``None``.
    """

    adapter: Any
    index: Any
    key: Any


@statistic
class HandlerSums(Statistic):
    """Sums that a handler measures besides, a tree."""

    sums: Any = entry(0)


# ---------------- the axes of a product, and the two low-rank products along them


Operand = Array | np.ndarray  # a tracer or a constant


@dataclasses.dataclass(frozen=True)
class ProductAxes:
    """How the axes of a product correspond to those of an adapter.

    Inner values are ``(stack..., examples..., other rows..., features...)``; example axes exist
    only if adapters differ by example.

    Attributes:
        site: The product.
        use: The use of the parameter.
        shape: Shape of the data operand with its row axes split into atoms.
        contract: Contracted axes of this shape.
        shared: Axes of this shape shared with the parameter.
        examples: Axes of this shape that run over examples.
        other_rows: Remaining row axes of this shape.
    """

    site: Site
    use: Use
    shape: tuple[int, ...]
    contract: tuple[int, ...]
    shared: tuple[int, ...]
    examples: tuple[int, ...]
    other_rows: tuple[int, ...]

    @classmethod
    def of(
        cls, site: Site, use: Use, x: Operand, index: Operand | None, examples: Atoms
    ) -> "ProductAxes":
        if use.detail.row_batch:
            path = use.view.source.path
            raise ValueError(
                f"layer {path!r} is broadcast along rows (a cond under vmap, which runs "
                "all branches): adapters have no rule for it; leave it out of target="
            )
        contract, shared = site.eqn.params["dimension_numbers"]
        contract, shared = contract[1 - use.at.operand], shared[1 - use.at.operand]
        rows = [d for d in range(x.ndim) if d not in {*contract, *shared}]
        example_atoms = site.table.atoms(examples) if index is not None else ()
        shape: list[int] = []
        at: dict[int, int] = {}
        example_axes: dict[int, int] = {}
        other_rows: list[int] = []
        for d, size in enumerate(x.shape):
            at[d] = len(shape)
            atoms = site.table.atoms(use.axes.rows[rows.index(d)]) if d in rows else ()
            sizes = [site.table.size(a) for a in atoms]
            if index is None or math.prod(sizes) != size:  # keep the axis: a feature, or a shard
                atoms, sizes = (), [size]
            for i, atom_size in enumerate(sizes):
                if atoms and atoms[i] in example_atoms:
                    if atoms[i] in example_axes:
                        raise _lost(site, use, "its rows run over pairs of examples")
                    example_axes[atoms[i]] = len(shape)
                elif d in rows:
                    other_rows.append(len(shape))
                shape.append(atom_size)
        single = index is not None and index.shape[-1] == 1  # an example axis of one has no atoms
        if len(example_axes) != len(example_atoms) or (
            index is not None and not example_atoms and not single
        ):
            raise _lost(site, use, "its rows do not run along the examples")
        return cls(
            site,
            use,
            tuple(shape),
            tuple(at[d] for d in contract),
            tuple(at[d] for d in shared),
            tuple(example_axes[a] for a in example_atoms),
            tuple(other_rows),
        )

    @property
    def lead(self) -> int:
        """Number of stacked and example axes."""
        return len(self.shared) + self.use.axes.free_stack + len(self.examples)

    def pick(self, adapter: Adapter, index: Operand | None) -> Adapter:
        """Each example's adapter from a bank, zero for -1; without an index the adapter itself."""
        stack = [self.shape[d] for d in self.shared]
        if self.use.axes.free_stack:
            stack = [self.site.eqn.invars[self.use.at.operand].aval.shape[self._free[0]]]

        def one(name: str, leaf: Operand) -> Array:
            inner = OWN_AXES[name]
            if index is None:
                return jnp.asarray(leaf).reshape((*stack, *leaf.shape[leaf.ndim - inner :]))
            leaf = leaf.reshape(*stack, *leaf.shape[leaf.ndim - inner - 1 :])
            rows = index.reshape(-1, index.shape[-1])[0]
            rows = rows.reshape([self.shape[d] for d in self.examples])
            out = jnp.take(leaf, jnp.maximum(rows, 0), axis=len(stack), mode="fill")
            # Every leaf, since zero times the NaN of a diverged adapter in the slot would be NaN.
            on = (rows >= 0).reshape(*rows.shape, *[1] * inner)
            return jnp.where(on, out, jnp.zeros((), out.dtype))

        leaves = {n: x for n, x in adapter._asdict().items() if x is not None}
        return adapter._replace(**{n: one(n, leaf) for n, leaf in leaves.items()})

    @property
    def _free(self) -> list[int]:
        contract, shared = self.site.eqn.params["dimension_numbers"]
        mine = {*contract[self.use.at.operand], *shared[self.use.at.operand]}
        ndim = self.site.eqn.invars[self.use.at.operand].aval.ndim
        return [d for d in range(ndim) if d not in mine]

    def down(self, x: Operand, a: Array, options: dict[str, Any]) -> Array:
        """Compute ``x A`` as ``(stack..., examples..., other rows..., rank)``."""
        a = _unflattened(self.site, self.use, a, a.ndim - 2, self.use.axes.inputs)
        n = len(self.contract)
        stack = a.ndim - 1 - n - len(self.examples)
        batch = [*range(len(self.shared)), *range(stack, stack + len(self.examples))]
        first = stack + len(self.examples)
        inputs = tuple(range(first, first + n))
        if first == 0:
            a, inputs = _rank_first(a), tuple(range(1, 1 + n))
        out = jax.lax.dot_general(
            x.reshape(self.shape),
            a,
            ((self.contract, inputs), ((*self.shared, *self.examples), tuple(batch))),
            **options,
        )
        # A free stack is a free axis of A, so dot_general puts it after the rows.
        return jnp.moveaxis(out, -2, 0) if self.use.axes.free_stack else out

    def up(self, h: Array, b: Array, options: dict[str, Any]) -> Array:
        """Compute ``h B`` as ``(stack..., examples..., other rows..., outputs...)``."""
        b = _unflattened(self.site, self.use, b, b.ndim - 1, self._outputs)
        lead = tuple(range(self.lead))
        return jax.lax.dot_general(h, b, (((h.ndim - 1,), (self.lead,)), (lead, lead)), **options)

    @property
    def _outputs(self) -> tuple[Atoms, ...]:
        return self.use.axes.outputs[1:] if self.use.axes.free_stack else self.use.axes.outputs

    def as_product(self, out: Array) -> Array:
        """Move stack, examples, other rows and outputs to where the product has them."""
        stack = list(range(len(self.shared) + self.use.axes.free_stack))
        where = [*self.examples, *self.other_rows]
        rows = [len(stack) + where.index(d) for d in sorted(where)]
        outputs = list(range(len(stack) + len(where), out.ndim))
        free = [stack.pop(), *outputs] if self.use.axes.free_stack else outputs
        order = [*stack, *rows, *free] if self.use.at.operand == 1 else [*stack, *free, *rows]
        if order != sorted(order):
            out = out.transpose(order)
        return out.reshape(self.site.eqn.outvars[0].aval.shape)


def _unflattened(
    site: Site, use: Use, matrix: Array, position: int, axes: tuple[Atoms, ...]
) -> Array:
    """Split a flat axis, in the parameter's order, into axes in the order of the equation."""
    table, view = site.table, use.view
    own_order = [a for axis in view.source.remaining_axes for a in table.atoms(axis)]
    flat = [a for axis in axes for a in table.atoms(axis)]
    ordered = sorted(flat, key=own_order.index)
    before, after = matrix.shape[:position], matrix.shape[position + 1 :]
    matrix = matrix.reshape(*before, *map(table.size, ordered), *after)
    if ordered != flat:
        middle = [position + ordered.index(a) for a in flat]
        trailing = range(position + len(flat), matrix.ndim)
        matrix = matrix.transpose(*range(position), *middle, *trailing)
    sizes = [math.prod(map(table.size, table.atoms(axis))) for axis in axes]
    return matrix.reshape(*before, *sizes, *after)


def _rank_first(a: Array) -> Array:
    """Transpose ``(in..., rank)`` to ``(rank, in...)``, so that A's gradient is ``dh.T x``.

    On the CPU this is much faster than ``x.T dh``. XLA folds a plain transposition into the product
    and returns to the slow form; it leaves a transposition with a split axis alone.
    """
    *sizes, rank = a.shape
    if len(sizes) == 1:
        split = next((f for f in (8, 4, 2, 3, 5, 7) if sizes[0] % f == 0), 1)
        a = a.reshape(sizes[0] // split, split, rank)
    return jnp.moveaxis(a, -1, 0).reshape(rank, *sizes)


def _lost(site: Site, use: Use, what: str) -> LostRowsError:
    path, primitive = use.view.source.path, site.eqn.primitive.name
    return LostRowsError(
        f"layer {path!r}: example axis lost at `{primitive}`: {what}, and "
        "adapters were given by row. Give one adapter= for the whole batch, or leave this layer "
        "out with exclude=."
    )


# ---------------- a lookup, and the rows of A that it picks


@dataclasses.dataclass(frozen=True)
class LookupAxes:
    """How the rows of a lookup correspond to those of an adapter.

    Inner values are ``(rows..., features...)``; the example axis comes first if adapters differ by
    example.

    Attributes:
        site: The lookup.
        use: The use of the table.
        lookup: The axis of the table along which it picks.
        entries: The row that each index picks; the number of rows where it picks none.
        slots: The slot of a bank for each example, or ``None``.
        example_axis: The axis of ``entries`` that runs over examples; 0 without a bank.
    """

    site: Site
    use: Use
    lookup: Lookup
    entries: Array
    slots: Operand | None
    example_axis: int

    @classmethod
    def of(
        cls,
        site: Site,
        use: Use,
        operands: list[Any],
        index: Operand | None,
        examples: Atoms,
    ) -> "LookupAxes":
        lookup = Lookup.of(site.eqn)
        assert lookup is not None
        entries, at = lookup.entries(site.eqn, operands), 0
        if index is not None:
            index = index.reshape(-1, index.shape[-1])[0]
            rows = [site.table.atoms(axis) for axis in use.axes.rows]
            if site.table.atoms(examples) not in rows:
                raise _lost(site, use, "its rows do not run along the examples")
            at = rows.index(site.table.atoms(examples))
            entries = jnp.moveaxis(entries, at, 0)
        return cls(site, use, lookup, entries, index, at)

    def pick(self, adapter: Adapter, index: Operand | None) -> Adapter:
        """Each example's adapter from a bank; A stays that of all slots until :meth:`down`."""

        def one(name: str, leaf: Operand) -> Array:
            inner = leaf.shape[leaf.ndim - OWN_AXES[name] - (self.slots is not None) :]
            leaf = jnp.asarray(leaf).reshape(inner)
            if self.slots is None or name == "a":
                return leaf
            out = jnp.take(leaf, jnp.maximum(self.slots, 0), axis=0, mode="fill")
            on = (self.slots >= 0).reshape(-1, *[1] * OWN_AXES[name])
            return jnp.where(on, out, jnp.zeros((), out.dtype))

        leaves = {n: x for n, x in adapter._asdict().items() if x is not None}
        return adapter._replace(**{n: one(n, leaf) for n, leaf in leaves.items()})

    def down(self, x: Operand, a: Array, options: dict[str, Any]) -> Array:
        """The rows of A that the indices pick, ``(rows..., rank)``; zero for those that pick none.

        ``x`` are the indices, of which ``entries`` are made.
        """
        if self.slots is None:
            return a.at[self.entries].get(mode="fill", fill_value=0)
        slots = self.slots.reshape(-1, *[1] * (self.entries.ndim - 1))
        # With NaN beyond the bank, as for products; rows of the base model are zero.
        out = a.at[jnp.maximum(slots, 0), self.entries].get(mode="fill", fill_value=0)
        beyond = (slots >= a.shape[0])[..., None]
        out = jnp.where(beyond, jnp.full((), jnp.nan, out.dtype), out)
        return jnp.where((slots >= 0)[..., None], out, jnp.zeros((), out.dtype))

    def up(self, h: Array, b: Array, options: dict[str, Any]) -> Array:
        """Compute ``h B`` as ``(rows..., outputs...)``."""
        b = _unflattened(self.site, self.use, b, b.ndim - 1, self.use.axes.outputs)
        batch = () if self.slots is None else (0,)
        contract = ((h.ndim - 1,), (len(batch),))
        return jax.lax.dot_general(h, b, (contract, (batch, batch)), **options)

    def as_product(self, out: Array) -> Array:
        """Move rows and outputs to where the result of the lookup has them."""
        eqn, rows = self.site.eqn, self.entries.ndim
        out = jnp.moveaxis(out, 0, self.example_axis) if rows else out
        features = list(eqn.params["dimension_numbers"].offset_dims)
        unit_axis = self.lookup.axis_in_result(eqn)
        if unit_axis is not None:
            features.remove(unit_axis)
        shape = eqn.outvars[0].aval.shape
        free = [d for d in range(len(shape)) if d not in features and d != unit_axis]
        places = [*free, *features]
        out = out.transpose(sorted(range(out.ndim), key=places.__getitem__))
        return out.reshape(shape)


# ---------------- the branch


@dataclasses.dataclass(frozen=True)
class BranchOptions:
    """Static options of a branch.

    Attributes:
        phi: The nonlinearity, or ``None``.
        placement: Position of the nonlinearity.
        scaling: Factor of the low-rank product.
        may_be_linear: Whether an infinite sigma means the identity.
        forward_mode: Whether the branch must support ``jvp``.
        dropout: Dropout probability, applied where there is a key.
        key_impl: Implementation of the key whose data is in the slot.
        uses: Number of each use of the layer, so that each use draws its own dropout mask.
        examples: Atoms of the example axis.
    """

    phi: Nonlinearity | None
    placement: Placement
    scaling: float
    may_be_linear: bool = False
    forward_mode: bool = False
    dropout: float = 0.0
    key_impl: Any = None
    uses: dict[int, int] = dataclasses.field(default_factory=dict)
    examples: Atoms = ()


class Branch(NamedTuple):
    r"""The values of one evaluation.

    Attributes:
        inside: ``x A`` as ``(stack..., rows..., rank)``.
        u: $z / (|\sigma| + \epsilon)$, where $z$ is the input of the nonlinearity; same layout.
        added: The branch's output, with the axes of the product.
        width: $|\sigma| + \epsilon$, ready to broadcast; ``None`` without a nonlinearity.
    """

    inside: Array
    u: Array
    added: Array
    width: Array | None

    @property
    def z(self) -> Array:
        """$z$, computed on access."""
        return self.u if self.width is None else _scaled(self.u, self.width)


def adapted_product(
    site: Site, operands: list[Operand | DeferredParameter], options: BranchOptions
) -> Array:
    """The product with the branch added, in the product's dtype."""
    base = site.bind(*operands)
    return add(base, branch(site, operands, options).added)


def add(base: Array, added: Array) -> Array:
    """The sum, computed in the wider of the two dtypes and cast to that of ``base``."""
    wide = statistics_dtype(base.dtype, added.dtype)
    if base.dtype == added.dtype:
        return base + added
    return (base.astype(wide) + added.astype(wide)).astype(base.dtype)


def branch(
    site: Site, operands: list[Operand | DeferredParameter], options: BranchOptions
) -> Branch:
    """The branch at a site with a single use.

    Raises:
        LostRowsError: adapters differ by example, and the rows cannot be assigned to examples.
    """
    use, slot = site.uses[0], site.slots[0]
    x = operands[1 - use.at.operand]
    assert not isinstance(x, DeferredParameter)  # only the parameter may be encoded
    stored, index, key = jax.tree.map(lambda leaf, x=x: cast_varying(leaf, x), slot.constants)
    p, product = site.eqn.params, {}
    if isinstance(stored, EmbeddingAdapter):  # whose inputs, indices, are not dropped
        axes = LookupAxes.of(site, use, operands, index, options.examples)
        dtype = site.eqn.outvars[0].aval.dtype
    else:
        if key is not None:
            x = _dropped(x, key, options, use)
        axes, dtype = ProductAxes.of(site, use, x, index, options.examples), x.dtype
        product = {name: p[name] for name in ("precision", "preferred_element_type")}
    adapter = axes.pick(stored, index)
    inside = axes.down(x, adapter.a.astype(dtype), product)

    def up(h: Array) -> Array:
        return axes.up(h.astype(dtype), adapter.b.astype(dtype), product)

    curve, c, sigma = options.phi, adapter.coefficients, adapter.sigma
    if curve is None or c is None or sigma is None:
        z = up(_scaled(inside, options.scaling))
        return Branch(inside, z, axes.as_product(z), None)
    wide = width(sigma, inside, options.may_be_linear)

    def phi(u: Array) -> Array:
        infinite = sigma if options.may_be_linear else None
        return activation(curve, u, c, infinite, forward_mode=options.forward_mode)

    # Scalars multiply the rank's values, not the outputs, so none costs a pass over the outputs.
    if options.placement == "bottleneck":
        u = _scaled(inside, 1 / wide)
        return Branch(inside, u, axes.as_product(up(_scaled(phi(u), options.scaling))), wide)
    u = up(_scaled(inside, options.scaling / wide))
    return Branch(inside, u, axes.as_product(phi(u)), wide)


def _scaled(h: Array, scale: Array | float) -> Array:
    """The product in float32 or wider, so that it is rounded only once."""
    return h.astype(statistics_dtype(h.dtype)) * scale


def _dropped(x: Operand, key: Array, options: BranchOptions, use: Use) -> Array:
    """Apply inverted dropout; experts in one product share the first expert's key."""
    key = jax.random.wrap_key_data(key.reshape(-1, key.shape[-1])[0], impl=options.key_impl)
    keep = 1 - options.dropout
    mask = jax.random.bernoulli(jax.random.fold_in(key, options.uses[id(use)]), keep, x.shape)
    return jnp.where(mask, x / jnp.asarray(keep, x.dtype), jnp.zeros((), x.dtype))
