"""What a layer is: a parameter read as a (stack of) matrix, and how data meets it."""

import dataclasses
import functools
import itertools
import math
import operator

from jaxtyping import Array, Shaped

from jaxkfac.interception._index import Index, index_name, slices
from jaxkfac.interception._kind import kind_named


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
        """The index as arrays take it."""
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

    def is_transpose_of(self, other: "ParameterMatrix") -> bool:
        """Whether it is the same part of a parameter, with inputs and outputs changed round."""
        turned = dataclasses.replace(other, inputs=other.outputs, outputs=other.inputs)
        return self == turned and self.inputs != self.outputs

    def read(self, leaf: Shaped[Array, "..."]) -> Shaped[Array, "*stack in out"]:
        """The matrix ``(stack..., in, out)`` held by a leaf shaped like the parameter.

        Raises:
            ValueError: the leaf has another shape.
        """
        order = (*self.stack, *self.inputs, *self.outputs)
        part = leaf[self.at]
        self.check(part.shape)
        matrix = part.reshape(self.atoms).transpose(order)
        return matrix.reshape(*self.stack_shape, self.in_features, self.out_features)

    def check(self, shape: tuple[int, ...]) -> None:
        """Refuse a shape whose axes do not split into ``atoms``.

        Raises:
            ValueError: naming the parameter and both shapes.
        """
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
        """``leaf`` with the elements this matrix covers replaced; dtype of ``leaf``."""
        order = (*self.stack, *self.inputs, *self.outputs)
        inverse = sorted(range(len(order)), key=order.__getitem__)
        part = matrix.reshape([self.atoms[p] for p in order]).transpose(inverse)
        if self.index:
            target = leaf[self.at]
            return leaf.at[self.at].set(part.reshape(target.shape).astype(leaf.dtype))
        return part.reshape(leaf.shape).astype(leaf.dtype)


@dataclasses.dataclass(frozen=True)
class Layer:
    """One block of the curvature: static, hashable, comparable across traces.

    Attributes:
        name: Path of the parameter, ``path[i]`` for an indexed slice, ``path[2:5]`` or
            ``path[:,0:3]`` for a range; where one parameter has several blocks, the further ones
            end in ``@`` and a reason. A weight that is computed from parameters has the path of
            the largest of them, and ``@effective``.
        kind: ``dense``, ``conv`` and ``embedding`` have Kronecker factors, and so have stacks of
            experts that read sorted rows (``ragged``) or are picked row by row (``gathered``);
            ``scale`` and ``bias`` (a bias that belongs to no product) have a diagonal, or one
            dense block, and so has ``transformed`` (a function of the parameter in a product,
            ``x @ exp(w)``); ``reparameterised`` (a parameter behind a weight that is computed from
            it, by a second pass) and ``diagonal`` (one that no rule covers, likewise) have a
            diagonal.
        weight: The parameter as a matrix.
        bias: The bias added to this layer's product and to nothing else, or ``None``. One that
            is added to a sum of products (``x @ w + h @ u + b``, a recurrent cell) could be the
            ones column of either, so it belongs to neither and has a block of its own;
            ``(x @ w + b) + h @ u`` gives it to ``w``.
        in_features: Size of the input factor, without the ones column of a joint bias.
        out_features: Size of the output factor.
        stack: Shape of the stacked axes: scan iterations, experts.
        uses: How many equations of the program read the parameter this way.
        input: Name of the layer under which the input factor is stored: this one's, or
            that of the first layer that reads the same variable.
        a_dense: False where the input factor is a diagonal (a vector).
        g_dense: False where the output factor is a diagonal (a vector).
        computed_from: Where the weight is no parameter but computed from some (weight norm, a
            merged adapter), their paths: it has factors, and nothing is preconditioned by them.
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
        """Whether it is of the kind ``dense``: what adapters and NF4 are made for."""
        return self.kind == "dense"

    @property
    def is_convolution(self) -> bool:
        """Whether it is of the kind ``conv``, whose rows are patches."""
        return self.kind == "conv"

    @functools.cached_property
    def is_elementwise(self) -> bool:
        """Whether each element of the parameter meets data by itself: it has no input side.

        If it has a dense block all the same, that block is read as G, beside an A of one.
        """
        return kind_named(self.kind).elementwise

    @property
    def suffix(self) -> str:
        """What its name has behind the parameter's; not empty for further blocks of one."""
        return self.name.removeprefix(self.weight.path)

    @property
    def is_covered(self) -> bool:
        """Whether it is gathered in the gradient's backward pass, not by a second one."""
        return kind_named(self.kind).covered

    @property
    def shares_input_with(self) -> str | None:
        """Name of the layer that holds this layer's input factor, if another's."""
        return None if self.input == self.name else self.input

    @property
    def num_parameters(self) -> int:
        """How many it answers for; a computed weight has none of its own."""
        if self.computed_from:
            return 0
        return self.weight.size + (self.bias.size if self.bias else 0)
