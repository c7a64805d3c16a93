"""The layer table: what was found in a function, and what was not."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping

from jaxkfac._display import table_html
from jaxkfac._errors import UncoveredParameterError, UnknownLayerError, nearest
from jaxkfac._text import ruled
from jaxkfac.interception._index import Index
from jaxkfac.interception._layer import Layer

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
        problems: The rows of ``uncovered`` that are errors: those that the caller's pattern of
            layers, if there is one, does not leave out.
        meeting: Says where examples meet, if the outputs' leading axis is theirs, in a sentence;
            empty where they are proved not to. It is asked by who prints the table.
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
        """The layers whose weight is a parameter, and not computed from some."""
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
        """The table where there is none: the parameters that need one are not covered."""
        lost = [(layer.weight.path, reason) for layer in self.second_pass]
        return dataclasses.replace(
            self,
            layers=self.tapped,
            uncovered=[*self.uncovered, *lost],
            problems=[*self.problems, *lost],
        )

    @property
    def num_covered(self) -> int:
        """Number of parameter elements that lie in a layer; none is counted twice."""
        slices: dict[str, dict[Index, int]] = {}
        for layer in self.of_parameters:
            for part in filter(None, (layer.weight, layer.bias)):
                slices.setdefault(part.path, {})[part.index] = part.size
        return sum(min(self.sizes[p], sum(held.values())) for p, held in slices.items())

    def raise_uncovered(self, *, second_pass: bool = True) -> None:
        """Raise for the parameters that nothing covers.

        Args:
            second_pass: Whether ``uncovered="diagonal"`` is open to the caller.

        Raises:
            UncoveredParameterError: naming each parameter and the reason, and what to do.
        """
        if self.problems:
            rows = "\n".join(f"  {_shown(path)}: {reason}" for path, reason in self.problems)
            # Where examples are coupled, an example by itself has another gradient; the square of a
            # complex one is no diagonal.
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
        if covered < total or not missing:  # rounded down: 100 % is all of them
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
    """A path in a message: that of a lone array of parameters is empty."""
    return path or "(the parameters)"


def _side(size: int, dense: bool) -> str:
    return str(size) if dense else f"~{size}"


def selector(pattern: str | None, known: list[str]) -> set[str]:
    """The names that a pattern matches in full; all of them for ``None``.

    Raises:
        UnknownLayerError: the pattern matches nothing, or is no regular expression.
    """
    if pattern is None:
        return set(known)
    try:
        found = {name for name in known if re.fullmatch(pattern, name)}
    except re.error as error:
        raise UnknownLayerError(
            f"layers={pattern!r} is not a regular expression: {error}"
        ) from None
    if not found:
        raise UnknownLayerError(
            f"layers={pattern!r} matches no layer in full; the nearest names are "
            f"{nearest(pattern, known)}"
        )
    return found
