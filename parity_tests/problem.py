"""What a paired model consists of: one set of NumPy numbers, read by both sides."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from flax import nnx
from torch import nn

import jaxkfac as jk
from parity_tests.layout import Twin, nested

Option = tuple[Literal["expand", "reduce"], Literal["joint", "separate"]]

EVERY: tuple[Option, ...] = (
    ("expand", "joint"),
    ("expand", "separate"),
    ("reduce", "joint"),
    ("reduce", "separate"),
)
# torch_ref has one hook for each use, and so no reduce where a layer is used several times.
EXPAND = EVERY[:2]


class FromNnx(NamedTuple):
    """Builds the apply function of a Flax NNX model."""

    model: Callable[[], nnx.Module]

    def __call__(self) -> Callable[[Any, Any], Any]:
        return jk.from_nnx(self.model())[0]


class Data(NamedTuple):
    """One batch in NumPy.

    Attributes:
        inputs: As PyTorch's model takes them; a mapping is given as keywords.
        ours: As jaxkfac's model takes them.
        targets: Integer classes, or one row for each term; where the mask leaves a term out,
            what no likelihood knows: -100 or NaN.
        mask: Which loss terms count, ``None`` for all.
        positions: Which positions exist, ``None`` for all.
    """

    inputs: Any
    ours: Any
    targets: np.ndarray
    mask: np.ndarray | None = None
    positions: np.ndarray | None = None

    @property
    def loss_terms(self) -> int:
        """Terms that the mean loss is over."""
        if self.mask is not None:
            return int(self.mask.sum())
        return int(np.prod(self.targets.shape[: self.terms_axes]))

    @property
    def terms_axes(self) -> int:
        return self.targets.ndim - (self.targets.dtype.kind == "f")


@dataclasses.dataclass(frozen=True)
class Problem:
    """A model on both sides, and its data.

    Attributes:
        reference: Builds the PyTorch model; its weights are drawn afterwards.
        apply: Builds jaxkfac's ``apply(params, inputs)``.
        twins: The layers on both sides.
        data: From a seed to a batch.
        likelihood: ``"Categorical"``, ``"Gaussian"`` or ``"Bernoulli"``, of both libraries.
        options: Sharing and bias modes that both sides have for this model.
        marks: Whether the model itself marks the positions that exist (``jk.mark_rows``), so
            that ``positions=`` is not given.
        zero_under_reduce: Layers whose G is rounding on both sides under reduce, and is not
            compared: softmax ignores a shift of all keys, so a key's gradients sum to zero over
            positions.
        beside: Parameters of no layer that torch_ref knows (scales, tables of positions):
            jaxkfac's path, and their names in PyTorch; several are stacked.
    """

    reference: Callable[[], nn.Module]
    apply: Callable[[], Callable[[Any, Any], Any]]
    twins: tuple[Twin, ...]
    data: Callable[[int], Data]
    likelihood: Literal["Categorical", "Gaussian", "Bernoulli"] = "Categorical"
    options: tuple[Option, ...] = EVERY
    marks: bool = False
    zero_under_reduce: tuple[str, ...] = ()
    beside: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    @property
    def covers(self) -> tuple[str, ...]:
        """Public names of jaxkfac that whatever is computed of this model goes through."""
        marks = ("mark_rows",) if self.marks else ()
        return (self.likelihood, *marks, *(("from_nnx",) if type(self.apply) is FromNnx else ()))

    def sides_to_compare(self, option: Option = EVERY[0]) -> list[tuple[Twin, str]]:
        """Every layer with ``"A"`` and with ``"G"``."""
        left_out = self.zero_under_reduce if option[0] == "reduce" else ()
        return [(t, s) for t in self.twins for s in "AG" if (t.name, s) not in _g(left_out)]

    def weights(self) -> dict[str, np.ndarray]:
        """PyTorch's parameters by name, drawn in NumPy; no bias is zero."""
        found, rng = {}, np.random.default_rng(7)
        for name, parameter in self.reference().named_parameters():
            fan_in = int(np.prod(parameter.shape[1:])) or 1
            scale = 0.5 if parameter.ndim == 1 else 1.2 / np.sqrt(fan_in)
            found[name] = scale * rng.normal(size=tuple(parameter.shape))
        return found

    def parameters(self, weights: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """The same numbers as jaxkfac's parameters."""
        leaves: dict[str, Any] = {}
        for twin in self.twins:
            if twin.kind != "tied head":  # its table is the embedding's
                kernels = {m: weights[f"{m}.weight"] for m in twin.modules}
                leaves[twin.kernel] = twin.stacked(kernels, twin.to_kernel)
            if twin.bias is not None:
                biases = {m: weights[f"{m}.bias"] for m in twin.modules}
                leaves[twin.bias] = twin.stacked(biases, twin.to_bias)
        return nested(leaves | self.leaves_beside(weights))

    def leaves_beside(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """``{path: leaf}`` of what is ``beside``, from arrays by PyTorch's names."""
        return {
            path: arrays[names[0]] if len(names) == 1 else np.stack([arrays[n] for n in names])
            for path, names in self.beside.items()
        }


def _g(names: tuple[str, ...]) -> set[tuple[str, str]]:
    return {(name, "G") for name in names}
