"""Layers, and the table of the layers of a function."""

import dataclasses
import functools
import itertools
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from jaxtyping import Array, Shaped

from jaxkfac._errors import UncoveredParameterError, UnknownLayerError, nearest
from jaxkfac._text import ruled, table_html
from jaxkfac.interception._kind import kind_named
from jaxkfac.interception.values._index import Index, index_name, slices

# ---------------- layers: a parameter read as a (stack of) matrix, and how data meets it


@dataclasses.dataclass(frozen=True)
class ParameterMatrix:
    """A parameter, or one indexed slice of it, read as ``(stack..., in, out)``.

    Attributes:
        path: Path of the parameter in the parameter tree.
        index: Static index into the leading axes, numbers and ranges; ``()`` for the whole
            parameter.
        atoms: Shape of the indexed parameter with its axes split as finely as the
            program splits them; ``math.prod(atoms)`` is its size.
        stack: Positions in ``atoms`` of the stacked axes (scan, experts), in the order
            in which the program consumes them.
        inputs: Positions of the contracted axes, ascending.
        outputs: Positions of the free axes, ascending.
    """

    path: str
    index: Index
    atoms: tuple[int, ...]
    stack: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def _sizes(self, positions: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.atoms[p] for p in positions)

    @functools.cached_property
    def at(self) -> tuple[int | slice, ...]:
        """The index in the form that arrays take."""
        return slices(self.index)

    @functools.cached_property
    def stack_shape(self) -> tuple[int, ...]:
        return self._sizes(self.stack)

    @functools.cached_property
    def in_features(self) -> int:
        return math.prod(self._sizes(self.inputs))

    @functools.cached_property
    def out_features(self) -> int:
        return math.prod(self._sizes(self.outputs))

    @functools.cached_property
    def size(self) -> int:
        return math.prod(self.atoms)

    def is_transpose_of(self, matrix: "ParameterMatrix") -> bool:
        """Whether it is the same part of the parameter, with inputs and outputs exchanged."""
        turned = dataclasses.replace(matrix, inputs=matrix.outputs, outputs=matrix.inputs)
        return self == turned and self.inputs != self.outputs

    def read(self, leaf: Shaped[Array, "..."]) -> Shaped[Array, "*stack in out"]:
        """The matrix ``(stack..., in, out)`` in a leaf shaped like the parameter.

        Raises:
            ValueError: the leaf has another shape.
        """
        order = (*self.stack, *self.inputs, *self.outputs)
        indexed = leaf[self.at]
        self.check(indexed.shape)
        # Axes are split into atoms before they are put in order: an axis of the parameter may hold
        # a stack, inputs and outputs at once (a fused projection), and only its atoms can be moved
        # apart.
        matrix = indexed.reshape(self.atoms).transpose(order)
        return matrix.reshape(*self.stack_shape, self.in_features, self.out_features)

    def check(self, shape: tuple[int, ...]) -> None:
        """Refuse a shape whose axes do not split into ``atoms``.

        Raises:
            ValueError: the axes do not split so; the message names the parameter and both shapes.
        """
        # Equal sizes are not enough: an array (6, 4) reshapes to atoms (4, 6) without an error, and
        # holds other elements then. Each axis of the leaf has to end where an atom ends.
        ends = {1, *itertools.accumulate(self.atoms, operator.mul)}
        splits = ends.issuperset(itertools.accumulate(shape, operator.mul))
        if not splits or math.prod(shape) != self.size:
            name = self.path + index_name(self.index)
            raise ValueError(
                f"{name!r} has shape {shape}, which is not the parameter's: its axes are read as "
                f"{self.atoms}"
            )

    def write(
        self, leaf: Shaped[Array, "*shape"], matrix: Shaped[Array, "*stack in out"]
    ) -> Shaped[Array, "*shape"]:
        """``leaf`` with the elements of this matrix replaced; dtype of ``leaf``."""
        order = (*self.stack, *self.inputs, *self.outputs)
        inverse = sorted(range(len(order)), key=order.__getitem__)
        elements = matrix.reshape([self.atoms[p] for p in order]).transpose(inverse)
        if self.index:
            target = leaf[self.at]
            return leaf.at[self.at].set(elements.reshape(target.shape).astype(leaf.dtype))
        return elements.reshape(leaf.shape).astype(leaf.dtype)


@dataclasses.dataclass(frozen=True)
class Layer:
    """One block of the curvature: static, hashable, comparable across traces.

    Attributes:
        name: Path of the parameter, ``path[i]`` for an indexed slice, ``path[2:5]`` or
            ``path[:,0:3]`` for a range. If one parameter has several blocks, the names of further
            ones end in ``@`` and a reason. A weight that is computed from parameters has the path
            of the largest of them, and ``@effective``.
        kind: ``dense``, ``conv`` and ``embedding`` have Kronecker factors, as do stacks of
            experts that read sorted rows (``ragged``) or are picked row by row (``gathered``).
            ``scale``, ``bias`` (a bias that belongs to no product) and ``transformed`` (a function
            of the parameter in a product, ``x @ exp(w)``) have a diagonal, or one dense block.
            ``reparameterised`` (a parameter behind a weight that is computed from it) and
            ``diagonal`` (a parameter that no rule covers) have a diagonal, from a second pass.
        weight: The parameter as a matrix.
        bias: The bias that is added to this layer's product and to nothing else, or ``None``. A
            bias that is added to a sum of products (``x @ w + h @ u + b``, a recurrent cell) could
            be the ones column of either product, so it belongs to neither and has its own block;
            ``(x @ w + b) + h @ u`` gives it to ``w``.
        in_features: Size of the input factor, without the ones column of a joint bias.
        out_features: Size of the output factor.
        stack: Shape of the stacked axes: scan iterations, experts.
        uses: Number of equations of the program that read the parameter in this way.
        input: Name of the layer under which the input factor is stored: this layer's, or that of
            the first layer that reads the same variable.
        a_dense: False if the input factor is a diagonal (a vector).
        g_dense: False if the output factor is a diagonal (a vector).
        computed_from: If the weight is no parameter but computed from some (weight norm, a merged
            adapter), their paths. Such a layer has factors, and they precondition nothing.
    """

    name: str
    kind: str
    weight: ParameterMatrix
    bias: ParameterMatrix | None
    in_features: int
    out_features: int
    stack: tuple[int, ...]
    uses: int
    input: str
    a_dense: bool = True
    g_dense: bool = True
    computed_from: tuple[str, ...] = ()

    @functools.cached_property
    def is_diagonal(self) -> bool:
        """Whether the block is a plain diagonal without Kronecker structure."""
        return self.is_elementwise and not self.g_dense

    @property
    def is_dense(self) -> bool:
        """Whether the kind is ``dense``, the kind for NF4 and, beside lookups, for adapters."""
        return self.kind == "dense"

    @property
    def is_lookup(self) -> bool:
        """Whether it looks up rows of a table by indices: an embedding."""
        return self.kind == "embedding"

    @property
    def is_convolution(self) -> bool:
        """Whether the kind is ``conv``, whose rows are patches."""
        return self.kind == "conv"

    @functools.cached_property
    def is_elementwise(self) -> bool:
        """Whether each element of the parameter meets data by itself, without an input side.

        If such a layer has a dense block, the block is stored as G, beside an A of size one.
        """
        return kind_named(self.kind).elementwise

    @property
    def suffix(self) -> str:
        """The end of the name behind the parameter's path; not empty for further blocks."""
        return self.name.removeprefix(self.weight.path)

    @property
    def is_covered(self) -> bool:
        """Whether it is gathered in the gradient's backward pass, and not in a second pass."""
        return kind_named(self.kind).covered

    @property
    def shares_input_with(self) -> str | None:
        """Name of the other layer that stores this layer's input factor, or ``None``."""
        return None if self.input == self.name else self.input

    @property
    def num_parameters(self) -> int:
        """Number of parameter elements in the layer; a computed weight has none of its own."""
        # The parameters behind a computed weight are counted where they are covered themselves.
        if self.computed_from:
            return 0
        return self.weight.size + (self.bias.size if self.bias else 0)


# ---------------- the layer table


EXAMPLES_LOST = "has the example axis lost"
IS_COMPLEX = "is complex"


_HEAD = ("layer", "kind", "in", "out", "stack", "uses", "input of", "bias", "parameters")
_WORDS = (0, 1, 4, 6, 7)


@dataclasses.dataclass(frozen=True, eq=False)
class LayerTable(Mapping[str, Layer]):
    """Layers by name, in program order. ``print(table)`` is the coverage report.

    Attributes:
        layers: The layers.
        uncovered: ``(parameter path, reason)`` of every parameter, or reading of one, that
            is in no layer. Most are errors (see ``raise_uncovered``); a parameter that is
            frozen, never read, held out or left out on request is not.
        notes: ``(parameter path, remark)`` on parameters that are in a layer: also in a
            penalty, several blocks.
        sizes: Number of elements of every parameter.
        problems: The rows of ``uncovered`` that are errors, without those that the caller's pattern
            of layers leaves out.
        meeting: A function that says in a sentence where examples meet, assuming that the outputs'
            leading axis is theirs; empty if they are proved not to meet. Printing the table calls
            it.
    """

    layers: tuple[Layer, ...]
    uncovered: list[tuple[str, str]]
    notes: list[tuple[str, str]]
    sizes: dict[str, int]
    problems: list[tuple[str, str]]
    meeting: Callable[[], str] | None = None

    def __getitem__(self, name: str) -> Layer:
        if name in self._by_name:
            return self._by_name[name]
        raise UnknownLayerError(f"no layer {name!r}; the nearest names are {nearest(name, self)}")

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    @functools.cached_property
    def _by_name(self) -> dict[str, Layer]:
        return {layer.name: layer for layer in self.layers}

    def __iter__(self) -> Iterator[str]:
        return (layer.name for layer in self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    @functools.cached_property
    def of_parameters(self) -> tuple[Layer, ...]:
        """The layers whose weight is a parameter, and not computed from others."""
        return tuple(layer for layer in self.layers if not layer.computed_from)

    @functools.cached_property
    def tapped(self) -> tuple[Layer, ...]:
        """The layers that are gathered in the gradient's backward pass."""
        return tuple(layer for layer in self.layers if layer.is_covered)

    @functools.cached_property
    def second_pass(self) -> tuple[Layer, ...]:
        """The parameters behind computed weights."""
        return tuple(layer for layer in self.layers if not layer.is_covered)

    def without_second_pass(self, reason: str) -> "LayerTable":
        """The table without a second pass: the parameters that need one are not covered."""
        return self.without(self.second_pass, reason)

    def without(self, layers: Sequence[Layer], reason: str) -> "LayerTable":
        """The table without some layers, whose parameters are not covered for that reason."""
        lost = [
            (matrix.path, reason)
            for layer in layers
            for matrix in (layer.weight, layer.bias)
            if matrix is not None
        ]
        left_out = {layer.name for layer in layers}
        return dataclasses.replace(
            self,
            layers=tuple(layer for layer in self.layers if layer.name not in left_out),
            uncovered=[*self.uncovered, *lost],
            problems=[*self.problems, *lost],
        )

    @property
    def num_covered(self) -> int:
        """Number of parameter elements that are in a layer; none is counted twice."""
        slices: dict[str, dict[Index, int]] = {}
        for layer in self.of_parameters:
            for matrix in filter(None, (layer.weight, layer.bias)):
                slices.setdefault(matrix.path, {})[matrix.index] = matrix.size
        return sum(
            # Slices of one parameter may overlap, as a parameter that one use reads in full and
            # another in part does; their sum is then more than the parameter has.
            min(self.sizes[p], sum(sizes_by_index.values()))
            for p, sizes_by_index in slices.items()
        )

    def raise_uncovered(self, *, second_pass: bool = True) -> None:
        """Raise for the parameters that nothing covers.

        Args:
            second_pass: Whether the caller can pass ``uncovered="diagonal"``.

        Raises:
            UncoveredParameterError: with each parameter, the reason, and what to do.
        """
        if self.problems:
            rows = "\n".join(f"  {_shown(path)}: {reason}" for path, reason in self.problems)
            # If examples are coupled, an example alone has another gradient; and the square of a
            # complex gradient is no diagonal.
            none = (EXAMPLES_LOST, IS_COMPLEX)
            open_to_all = not any(x in reason for _, reason in self.problems for x in none)
            diagonal = "'diagonal' (a second pass) or " if second_pass and open_to_all else ""
            raise UncoveredParameterError(
                f"{len(self.problems)} uses of parameters are covered by no layer:\n{rows}\n"
                "Name the layers to keep with layers=, a pattern that these paths do not match, or "
                f"pass uncovered={diagonal}'ignore'."
            )

    def __repr__(self) -> str:
        return f"LayerTable: {self._coverage()}"

    def _repr_html_(self) -> str:
        return table_html("Layers", _HEAD, self._rows(), words=_WORDS, notes=self._notes())

    def __str__(self) -> str:
        rows = self._rows()
        lines = [*ruled(_HEAD, rows, width=None, words=_WORDS), *self._notes()]
        return "\n".join(lines)

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                layer.name,
                layer.kind,
                "-" if layer.is_elementwise else _side(layer.in_features, layer.a_dense),
                _side(layer.out_features, layer.g_dense or layer.is_diagonal),
                "x".join(map(str, layer.stack)) or "-",
                str(layer.uses),
                layer.shares_input_with or "-",
                layer.bias.path.rsplit("/", 1)[-1] if layer.bias else "-",
                f"{layer.num_parameters:,}",
            )
            for layer in self.layers
        ]

    def _coverage(self) -> str:
        total, covered = sum(self.sizes.values()) or 1, self.num_covered
        last = f"{len(self.layers)} layers cover {covered:,} of {total:,} parameters"
        missing = len(self.problems)
        if covered < total or not missing:  # rounded down, so that 100 % means all of them
            last += f" ({1000 * covered // total / 10:.1f}%)"
        if missing:
            last += f"; {missing} reading{'s are' if missing > 1 else ' is'} missing"
        return last

    def _notes(self) -> list[str]:
        lines = [self._coverage()]
        for title, entries in (("not covered", self.uncovered), ("note", self.notes)):
            lines += [f"{title}: {_shown(path)} {reason}" for path, reason in entries]
        if self.meeting is not None and (sentence := self.meeting()):
            lines.append(f"examples: {sentence}")
        if any("~" in c for row in self._rows() for c in row[2:4]):
            lines.append("~: this side is kept as a diagonal")
        return lines


def _shown(path: str) -> str:
    """A path for a message; the path of a lone array of parameters is empty."""
    return path or "(the parameters)"


def _side(size: int, dense: bool) -> str:
    return str(size) if dense else f"~{size}"


def selector(pattern: str | None, names: list[str]) -> set[str]:
    """The names that a pattern matches in full; all of them if it is ``None``.

    Raises:
        UnknownLayerError: the pattern matches nothing, or is no regular expression.
    """
    if pattern is None:
        return set(names)
    try:
        matches = {name for name in names if re.fullmatch(pattern, name)}
    except re.error as error:
        raise UnknownLayerError(
            f"layers={pattern!r} is not a regular expression: {error}"
        ) from None
    if not matches:
        raise UnknownLayerError(
            f"layers={pattern!r} matches no layer in full; the nearest names are "
            f"{nearest(pattern, names)}"
        )
    return matches
