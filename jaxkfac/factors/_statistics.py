"""Which statistics of each layer are gathered, and how they become ``Factors``."""

import collections
import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

from jaxkfac._jaxpr_compat import call_kind, cast_varying, equation_signature
from jaxkfac._mapped_axes import sum_of_varying, sum_over_devices
from jaxkfac.blocks import BiasMode, Factors, Place, Side, Sides
from jaxkfac.factors._diagonal_pass import gradient_block, input_means, outer_products
from jaxkfac.interception import Layer, LayerVjp, Site, Traced, Use, kind_named
from jaxkfac.interception.values import Atoms, Slot
from jaxkfac.kinds import (
    EVERY_ROW,
    ElementGradients,
    ElementSquares,
    Elementwise,
    InputMoments,
    InputRows,
    Moment,
    Products,
    SideSums,
    TwoSided,
    example_counts,
    example_sums,
    output_moments,
    packs,
)
from jaxkfac.linalg import (
    PANELS_FROM,
    panel_shapes,
    statistics_dtype,
    unpack_panels,
)

Sharing = Literal["expand", "reduce"]
Scales = Literal["auto", "diagonal", "exact_diagonal", "full_block"]
Zeros = Callable[[tuple[int, ...]], Array]  # of the dtype of a layer's statistics


@dataclasses.dataclass(frozen=True)
class PassPart:
    """What one pass gathers from a layer.

    Attributes:
        inputs: Whether it gathers the input side, if the layer stores one.
        outputs: Whether it gathers the output side, or the diagonal.
        rows: How many iterations of the scan along the leading stacked axis; ``None`` for all.
    """

    inputs: bool = True
    outputs: bool = True
    rows: int | None = None


@dataclasses.dataclass(frozen=True)
class Statistics:
    """The statistics of one traced program.

    Each layer is read by *position* (moments are summed in the backward pass; ``_moments``)
    or by *example* (each example's sum is emitted, and moments are formed after it;
    ``_taps``).

    Args:
        traced: The program.
        bias: Whether inputs have a column of ones.
        sharing: How dense layers and convolutions are read; embeddings are always read by
            position.
        scales: How scales and lone biases are read.
        forward: Whether output gradients count as the identity.
        parts: What to gather of which layers; ``None`` for everything.
        row_weights: For some layers, the weight of each use's input rows.
        products: How Gram products are formed. Its key is for products after the backward pass;
            inside the pass each tap receives a key.
        axes: Mapped axes over whose devices sums run.

    Raises:
        ValueError: rows have weights, and the layer is read by example.
    """

    traced: Traced
    bias: BiasMode
    sharing: Sharing = "expand"
    scales: Scales = "diagonal"
    forward: bool = False
    parts: Mapping[str, PassPart] | None = None
    row_weights: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    products: Products = EVERY_ROW
    packed: bool = False
    axes: tuple[str, ...] = ()

    @functools.cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The layers of this pass. In a stacked layer, only the rows of this pass are counted."""
        return tuple(
            layer
            if (rows := self._pass_part(layer).rows) is None
            else dataclasses.replace(layer, stack=(rows, *layer.stack[1:]))
            for layer in self.traced.table.tapped
            if self.parts is None or layer.name in self.parts
        )

    def _pass_part(self, layer: Layer) -> PassPart:
        return PassPart() if self.parts is None else self.parts[layer.name]

    def by_example(self, layer: Layer) -> bool:
        """Whether a layer is read by example."""
        # The mean of one-hot rows is not one-hot: its second moment would be no diagonal.
        if kind_named(layer.kind).reads.tokens:
            return False
        exact_scales = layer.is_elementwise and self._has_exact_scales(layer)
        sums = any(use.elements.whole_examples for use in self.traced.uses_of(layer))
        return exact_scales or sums or self.sharing == "reduce"

    def _has_exact_scales(self, layer: Layer) -> bool:
        """Whether the gradients of a scale or lone bias are summed over each example's positions.

        With ``"auto"`` they are where there are several positions and the example of each is known.
        With one position there is nothing to sum, and no gradient has to wait for its example. With
        a unit G there are no gradients.
        """
        if self.scales != "auto" or self.forward:
            return self.scales in ("exact_diagonal", "full_block")
        uses, examples = self.traced.uses_of(layer), self.traced.examples
        shows_examples = self.traced.out_shapes[0].shape or self.traced.marks
        # A single example has no axis of its own, and all rows are its.
        if not shows_examples or (self.traced.num_examples > 1 and not examples):
            return False
        if not all(_runs_along(use, self.traced, examples) for use in uses):
            return False
        number = self.traced.num_examples * math.prod(self.traced.part_shape(layer.weight))
        sizes = [math.prod(use.at.eqn.outvars[0].aval.shape) for use in uses]
        return len(uses) > 1 or any(use.at.scope.scans for use in uses) or sizes[0] > number

    @property
    def _num_examples(self) -> int:
        """Number of examples over all example axes."""
        return sum(size for _, size in self.traced.example_axes)

    # -- slots ------------------------------------------------------------------------

    def slots(self) -> dict[str, Slot]:
        """Zeros for every layer. Their cotangents are the statistics; their values are unread."""
        zeros_by_type: dict[Any, Array] = {}

        def zeros(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
            """One array for all slots of its shape."""
            if (shape, dtype) not in zeros_by_type:
                zeros_by_type[shape, dtype] = jnp.zeros(shape, dtype)
            return zeros_by_type[shape, dtype]

        return {layer.name: self.slot(layer, zeros) for layer in self.layers}

    def of_examples(self, zeros: Array) -> Array:
        """Zeros that get one entry for each example, which differ between devices as outputs do.

        The cotangents of zeros that are equal on all devices would be summed over them: entries of
        different examples would be added.
        """
        outputs = [v.aval for v in self.traced.closed.jaxpr.outvars]
        return functools.reduce(cast_varying, outputs, zeros)

    def slot(self, layer: Layer, zeros: Callable[..., Array] = jnp.zeros) -> Slot:
        """Zeros for one layer."""
        typed = lambda shape: zeros(shape, self._dtype(layer))
        if layer.is_elementwise:
            return Slot(self._element_sums(layer, typed))
        part = self._pass_part(layer)
        reads = layer.input == layer.name and part.inputs
        outputs = self._output_sums(layer, typed) if part.outputs and not self.forward else None
        sums = SideSums(self._input_sums(layer, typed) if reads else None, outputs)
        if not reads or layer.name not in self.row_weights:
            return Slot(sums)
        if self.by_example(layer):
            raise ValueError(
                f"layer {layer.name!r} is used on rows that lead to different jk.mark_outputs, "
                'which weigh its inputs by position: take sharing="expand", not "reduce"'
            )
        if part.rows is not None:  # slots in a window are read as zeros, without weights
            raise ValueError(
                f"layer {layer.name!r} is used on rows that lead to different "
                "jk.mark_outputs, and max_factor_bytes= would gather some of its iterations "
                "at a time: leave the layer out with layers=, or take a larger budget"
            )
        weights = self.row_weights[layer.name].astype(self._dtype(layer))
        return Slot(sums, jnp.broadcast_to(weights, (*layer.stack, *weights.shape)))

    def _element_sums(self, layer: Layer, zeros: Zeros) -> ElementSquares | ElementGradients:
        shape = self.traced.part_shape(layer.weight)
        # With a unit G the output side is a mean (`_unit_output`), which needs the count.
        if not self.by_example(layer):
            return ElementSquares(zeros(shape) if self.forward else None, zeros(shape))
        if not self.traced.out_shapes[0].shape and not self.traced.marks:
            raise ValueError(
                f"the diagonal of {layer.name!r} is one of whole examples' gradients, and "
                "a scalar loss does not show its examples: give a jk.Objective, mark the "
                "outputs with jk.mark_outputs, or leave the parameter out with layers="
            )
        sums = self.of_examples(zeros((*shape, self.traced.num_examples)))
        return ElementGradients(sums if self.forward else None, sums)

    def _input_sums(self, layer: Layer, zeros: Zeros) -> InputMoments | InputRows:
        stack, size = layer.stack, layer.in_features
        if self.by_example(layer):
            rows = (*stack, self._num_examples)
            return InputRows(self.of_examples(zeros(rows)), self.of_examples(zeros((*rows, size))))
        panels = packs(self.traced.uses_of(layer), "a")
        a = self._moment(stack, size, zeros, dense=layer.a_dense, panels=panels)
        total = zeros((*stack, size)) if self._has_ones(layer) else None
        return InputMoments(a, zeros(stack), total)

    def _output_sums(self, layer: Layer, zeros: Zeros) -> Any:
        stack, size, uses = layer.stack, layer.out_features, self.traced.uses_of(layer)
        if self.by_example(layer):
            return self.of_examples(zeros((*stack, self._num_examples, size)))
        # In a loop the sum is carried in panels, so that no iteration mirrors a triangle.
        panels = packs(uses, "g") and any(u.at.scope.scans for u in uses)
        return self._moment(stack, size, zeros, dense=layer.g_dense, panels=panels)

    def _moment(
        self, stack: tuple[int, ...], size: int, zeros: Zeros, *, dense: bool, panels: bool
    ) -> Moment:
        if not dense:
            return Moment(zeros((*stack, size)), "diagonal")
        full = (*stack, size, size)
        if self.packed and stack:
            # Each iteration folds its own matrix: stacked in full, the matrices of a scan would
            # take twice the bytes of the result, beside the backward pass.
            side = Side(jax.ShapeDtypeStruct(full, jnp.float32), is_matrix=True)
            shape = side.packed().data.shape
            return Moment(zeros(shape), "full" if shape == full else "folded")
        if panels and not stack and size >= PANELS_FROM:
            return Moment(tuple(map(zeros, panel_shapes(size))), "panels")
        return Moment(zeros(full), "full")

    def _dtype(self, layer: Layer) -> Any:
        uses = self.traced.uses_of(layer)
        return statistics_dtype(*[v.aval.dtype for u in uses for v in _floats(u)])

    def _has_ones(self, layer: Layer) -> bool:
        """Whether the input factor stored under ``layer`` has a ones column."""
        return self.bias == "joint" and layer.name in self._inputs_with_bias

    @functools.cached_property
    def _inputs_with_bias(self) -> frozenset[str]:
        return frozenset(x.input for x in self.traced.table.tapped if x.bias is not None)

    def products_of(self, layer: str, key: Key[Array, ""] | None) -> Products:
        """How the Gram products of one layer are formed; each layer draws its own rows."""
        if key is not None:
            # Not ``hash``, which Python salts: all processes must draw the same rows.
            key = jax.random.fold_in(key, zlib.crc32(layer.encode()))
        return self.products._replace(key=key)

    def _after(self, layer: Layer) -> dict[str, Any]:
        """Options of the products that are formed after the backward pass."""
        products = self.products_of(layer.name, self.products.key)
        return {
            "products": products,
            "precision": products.precision_of(self.traced.uses_of(layer)[0].at.eqn),
        }

    # -- in the backward pass ---------------------------------------------------------

    def comes_first(self, use: Use) -> bool:
        """See ``_taps.Emitter``: true if G is large and no loop carries its sum.

        In the body of a loop the matrix would wait for its place in the stack, beside the rest of
        the backward pass, and take as much memory as the cotangent does.
        """
        return self.unpacks(self.traced.table[use.layer or ""])

    def signature(self, site: Site, use: Use) -> Hashable:
        """See ``_taps.Emitter``; axes are compared by where they recur in a use.

        Three kinds of uses have no signature: those in a loop, which is traced once anyway; those
        whose rows are drawn for each layer by itself; and those seen through more than plain views.
        """
        if not self._is_plain(use) or self.row_weights or self.products.fraction < 1:
            return None
        alike = self._signature(use)
        return alike if self._alike[alike] > 1 else None

    def _is_plain(self, use: Use) -> bool:
        view, at = use.view, use.at
        joined = view.joins or view.source.members or view.history.function or view.picked
        joined = joined or self._parts[at.scope] > 1
        return not (at.scope.scans or joined or len(use.layers) > 1 or call_kind(at.eqn))

    @functools.cached_property
    def _parts(self) -> Mapping[Hashable, int]:
        """Number of parameters that are parts of one operand, or of one sum."""
        uses = self.traced.analysis.plan.all_uses()
        seen = (u for u in uses if u.kind.covered and not u.view.source.computed_from)
        return collections.Counter(use.at.scope for use in seen)

    @functools.cached_property
    def _alike(self) -> Mapping[Hashable, int]:
        """Number of uses of each signature."""
        uses = (use for layer in self.layers for use in self.traced.uses_of(layer))
        return collections.Counter(self._signature(use) for use in uses if self._is_plain(use))

    def _signature(self, use: Use) -> Hashable:
        layer, table = self.traced.table[use.layer or ""], self.traced.analysis.table
        numbers: dict[int, int] = {}

        def atoms(axis: Atoms) -> Hashable:
            axis_atoms = table.atoms(axis)
            return tuple((numbers.setdefault(a, len(numbers)), table.size(a)) for a in axis_atoms)

        axes = (
            use.view.source.remaining_axes,
            use.axes.inputs,
            use.axes.outputs,
            use.axes.stack,
            use.axes.rows,
            use.axes.result,
        )
        return (
            equation_signature(use.at.eqn),
            use.kind,
            use.at.operand,
            tuple(tuple(map(atoms, group)) for group in axes),
            atoms(self.traced.examples),
            (use.axes.free_stack, use.kind.signature(use)),
            (layer.kind, layer.stack, layer.g_dense, self.unpacks(layer)),
        )

    def unpacks(self, layer: Layer) -> bool:
        """Whether a wide G is unpacked in the backward pass, so that its slot holds a matrix."""
        uses = self.traced.uses_of(layer)
        large = layer.g_dense and layer.out_features >= PANELS_FROM and packs(uses, "g")
        by_row = not (self.forward or self.by_example(layer))
        return large and by_row and not any(u.at.scope.scans for u in uses)

    def emit(self, vjp: LayerVjp, like: Any) -> Any:
        """See ``_taps.Emitter``."""
        use, cotangent, kind = vjp.use, vjp.cotangent, vjp.use.kind
        if isinstance(kind, Elementwise):
            if self.forward and jnp.iscomplexobj(cotangent):
                raise ValueError(
                    f"layer {use.layer!r}: fisher='forward' has one cotangent of each number, and "
                    "the layer's results are complex: take another Fisher type, or leave the layer "
                    "out with layers="
                )
            if self.forward:
                vjp = dataclasses.replace(vjp, cotangent=jnp.ones_like(cotangent))
            return kind.elements(vjp, like, self.traced.examples)
        assert isinstance(kind, TwoSided)
        inputs, outputs, examples = like.inputs, like.outputs, self.traced.example_axes
        products = self.products_of(use.layer or "", vjp.rows_key)
        if isinstance(inputs, InputMoments):
            inputs = kind.input_moments(vjp.with_input_weights(), inputs, products)
            if vjp.constants is not None:
                inputs = _weighed(inputs, vjp.constants[..., self._number_of(use)])
        elif inputs is not None:
            if vjp.input_weights is not None:
                raise ValueError(
                    f"layer {use.layer!r}: positions= has weights, and the layer is read by "
                    'example, which averages its positions: take sharing="expand", or bool '
                    "positions"
                )
            rows = example_sums(vjp, kind.summed_input_rows(vjp), examples, inputs.rows)
            every, reached = kind.output_rows(vjp.masked_by(None)), kind.reached(vjp)
            inputs = InputRows(example_counts(vjp, every, reached, examples, inputs.numbers), rows)
        if isinstance(outputs, Moment):
            side, panels = kind.output_rows(vjp), self.comes_first(use)
            outputs = output_moments(vjp, side, outputs, products, panels=panels)
        elif outputs is not None:
            outputs = example_sums(vjp, kind.output_rows(vjp), examples, outputs)
        return SideSums(inputs, outputs)

    def _number_of(self, use: Use) -> int:
        """The position of a use among its layer's uses."""
        every = (self.traced.uses_of(x) for x in self.layers if x.name in self.row_weights)
        uses = next(uses for uses in every if any(u.at.eqn is use.at.eqn for u in uses))
        return next(k for k, u in enumerate(uses) if u.at.eqn is use.at.eqn)

    # -- after it ---------------------------------------------------------------------

    def shapes(self, terms: jax.ShapeDtypeStruct) -> Factors:
        """Shapes of the factors, from the layers alone."""
        sides: Sides = {}
        for layer in self.layers:
            gathered, dtype = self._pass_part(layer), self._dtype(layer)

            def add(table: str, size: int, dense: bool, of: Layer = layer, d: Any = dtype) -> None:
                shape = (*of.stack, *[size] * (1 + dense))
                count = jax.ShapeDtypeStruct(of.stack, d) if table == "a" else terms
                sides[Place(table, of.name)] = Side(jax.ShapeDtypeStruct(shape, d), count, dense)

            if gathered.outputs and layer.is_diagonal:
                shape = self.traced.part_shape(layer.weight)
                diagonal = jax.ShapeDtypeStruct(shape, dtype)
                sides[Place("diagonals", layer.name)] = Side(diagonal, terms)
            elif gathered.outputs:
                add("g", layer.out_features, layer.g_dense)
            if layer.is_elementwise:
                if gathered.outputs and not layer.is_diagonal:
                    add("a", 1, False)
            elif layer.input == layer.name and gathered.inputs:
                add("a", layer.in_features + self._has_ones(layer), layer.a_dense)
        return self._made_of(sides, terms)

    def _made_of(self, sides: Sides, terms: Any) -> Factors:
        factors = Factors.of_sides(sides, terms=terms, layers=self.layers, bias=self.bias)
        return factors.packed() if self.packed else factors

    def inputs(self, emitted: Mapping[str, Any]) -> Sides:
        """The input sides; they are equal for every Fisher type."""
        sides: Sides = {}
        for layer in self.layers:
            sums = getattr(emitted[layer.name], "inputs", None)
            if isinstance(sums, InputMoments):
                sums = sum_over_devices(sums, self.axes)
                sides[Place("a", layer.name)] = Side(_with_ones(sums), sums.count)
            elif sums is not None:
                means = input_means(
                    sums,
                    ones=self._has_ones(layer),
                    dense=layer.a_dense,
                    **self._after(layer),
                )
                means = sum_over_devices(sum_of_varying(means), self.axes)
                sides[Place("a", layer.name)] = Side(*means)
        return sides

    def outputs(self, emitted: Mapping[str, Any]) -> dict[str, Any]:
        """Sums of the output sides and diagonals; they add up over vector-Jacobian products.

        They are sums over all devices where JAX tracks them; elsewhere over this device's rows, and
        ``factors`` adds those of the other devices, once for all products.
        """
        return {
            layer.name: self.output(layer, emitted[layer.name])
            for layer in self.layers
            if self._pass_part(layer).outputs
        }

    def output(self, layer: Layer, sums: Any) -> Any:
        """The sum of one layer's output side, or of its diagonal."""
        if self.forward:
            return None
        match sums:
            case ElementGradients(gradient=gradient) if layer.g_dense:
                return sum_of_varying(gradient_block(layer, gradient, **self._after(layer)))
            case ElementGradients(gradient=gradient):
                return sum_of_varying(jnp.square(gradient).sum(-1))
            case ElementSquares(squares=squares):
                return squares
            case SideSums(outputs=Moment() as moment):
                return moment
        rows, dense = sums.outputs, layer.g_dense
        return sum_of_varying(outer_products(rows, dense=dense, **self._after(layer)))

    def factors(
        self,
        emitted: Mapping[str, Any],
        outputs: Mapping[str, Any],
        terms: Float[Array, ""],
        scale: Float[Array, ""],
    ) -> Factors:
        """Build ``Factors`` from one backward pass and the output sides.

        The output sides are multiplied by ``scale``; see ``Linearised.squares_to_sums``.
        """
        sides = self.inputs(emitted)
        for layer in self.layers:
            if not self._pass_part(layer).outputs:
                continue
            if self.forward:
                mean = self._unit_output(layer, emitted[layer.name])
                total = mean * (terms + 0 * scale).astype(mean.dtype)  # NaN where the loss is NaN
            else:
                total = sum_over_devices(outputs[layer.name], self.axes)
                total = jax.tree.map(lambda x: x * scale.astype(x.dtype), total)
                total = _matrices(total) if isinstance(total, Moment) else total
            table = "diagonals" if layer.is_diagonal else "g"
            sides[Place(table, layer.name)] = Side(total, terms)
            if layer.is_elementwise and not layer.is_diagonal:  # a dense block; its A is one
                count = jnp.broadcast_to(terms.astype(total.dtype), layer.stack)
                sides[Place("a", layer.name)] = Side(count[..., None], count)
        return self._made_of(sides, terms)

    def _unit_output(self, layer: Layer, sums: Any) -> Array:
        """The mean output side if gradients with respect to output rows are orthonormal."""
        if not layer.is_elementwise:
            ones = jnp.ones((*layer.stack, layer.out_features), self._dtype(layer))
            return _diagonal_matrix(ones) if layer.g_dense else ones
        if isinstance(sums, ElementSquares):
            sums = sum_over_devices(sums, self.axes)
            return sums.squares / jnp.maximum(sums.count, 1)
        present = sums.counts > 0
        mean = sums.gradient / jnp.where(present, sums.counts, 1)
        totals = jnp.square(mean).sum(-1), present.sum(-1, dtype=mean.dtype)
        squares, number = sum_over_devices(sum_of_varying(totals), self.axes)
        diagonal = squares / jnp.maximum(number, 1)
        if not layer.g_dense:
            return diagonal
        weight = dataclasses.replace(layer.weight, index=())
        return _diagonal_matrix(weight.read(diagonal)[..., 0, :])


def _diagonal_matrix(values: Float[Array, "*stack n"]) -> Float[Array, "*stack n n"]:
    return values[..., None] * jnp.eye(values.shape[-1], dtype=values.dtype)


def _weighed(moments: InputMoments, weight: Float[Array, "*stack"]) -> InputMoments:
    """Multiply sums over rows by the weight of these rows."""
    return jax.tree.map(
        lambda x: x * jnp.expand_dims(weight, range(weight.ndim, x.ndim)).astype(x.dtype), moments
    )


def _floats(use: Use) -> list[Any]:
    variables = (*use.at.eqn.invars, *use.at.eqn.outvars)
    return [v for v in variables if jnp.issubdtype(v.aval.dtype, jnp.inexact)]


def _packed_with_ones(a: Array, total: Array, count: Array) -> Array:
    """Folded matrices with the ones column; one of a stack at a time exists in full."""
    flat = lambda x, axes: x.reshape(-1, *x.shape[x.ndim - axes :])

    def one(slices: tuple[Array, Array, Array]) -> Array:
        a, total, count = slices
        full = Side(a, is_matrix=True).in_full().data
        return Side(unpack_panels((full,), (total, count)), is_matrix=True).packed().data

    out = jax.lax.map(one, (flat(a, 2), flat(total, 1), flat(count, 0)))
    return out.reshape(*count.shape, *out.shape[1:])


def _matrices(moment: Moment) -> Array:
    """The matrices or diagonals of a moment."""
    return unpack_panels(moment.data) if moment.form == "panels" else moment.data


def _with_ones(sums: InputMoments) -> Array:
    """The sum over input rows, with the ones column last if its sum was gathered."""
    (a, form), total, count = (sums.a.data, sums.a.form), sums.sum, sums.count
    if total is None:
        return _matrices(sums.a)
    if form == "folded":
        return _packed_with_ones(a, total, count)
    # On a diagonal side the column of ones adds its own square alone, whose sum is the count.
    if form == "diagonal":
        return jnp.concatenate([a, count[..., None]], -1)
    return unpack_panels(a if form == "panels" else (a,), (total, count))


def _runs_along(use: Use, traced: Traced, examples: Atoms) -> bool:
    """Whether each row of an elementwise use belongs to one known example."""
    table, shape = traced.analysis.table, use.at.eqn.outvars[0].aval.shape
    atoms = []
    for axis, size in zip(use.axes.result, shape, strict=True):
        axis_atoms = table.atoms(axis)
        if math.prod(table.size(a) for a in axis_atoms) == size:
            atoms += axis_atoms
    return all(atoms.count(a) == 1 for a in table.atoms(examples))
