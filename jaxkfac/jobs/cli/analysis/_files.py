"""Files of an analysis: sums of factors, eigenvalues, Lanczos vectors, and its options."""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxkfac._errors import CheckpointMismatchError
from jaxkfac.files import PARTIAL, Archive, read_json, write_archive, write_json
from jaxkfac.interception import Layer, ParameterMatrix
from jaxkfac.jobs.cli._checkpoint import option_differences
from jaxkfac.linalg import packed_shape, unpack

# ---------------- units of storage: parts of the factors, and groups of layers


_WRITTEN = {"a": "a_sums", "g": "g_sums", "diagonals": "diagonals"}  # names in files


class Part(NamedTuple):
    """A side of :class:`~jaxkfac.Factors`, or one block of a stacked one.

    Attributes:
        table: The table of its place.
        key: Key in it.
        block: Index along the leading stacked axis; ``None`` without such an axis.
    """

    table: str
    key: str
    block: int | None

    def __str__(self) -> str:
        side = {"a": "A", "g": "G", "diagonals": "the diagonal"}[self.table]
        return f"{side} of {self.key}" + ("" if self.block is None else f"[{self.block}]")

    @property
    def written(self) -> list[Any]:
        """As files name it."""
        return [_WRITTEN[self.table], self.key, self.block]

    @classmethod
    def read(cls, table: str, key: str, block: int | None) -> "Part":
        """The inverse of :attr:`written`."""
        return cls(next(name for name, file in _WRITTEN.items() if file == table), key, block)


class Group(NamedTuple):
    """Layers that are decomposed together, because they share an input or a parameter.

    Attributes:
        layers: The layers, with all their stacked axes.
        blocks: Indices of the leading stacked axis; ``(None,)`` without one.
    """

    layers: tuple[Layer, ...]
    blocks: tuple[int | None, ...]

    def name(self, block: int | None) -> str:
        """Name of a block in messages and files."""
        return self.layers[0].name + ("" if block is None else f"[{block}]")

    def names(self, block: int | None) -> list[str]:
        """All names by which ``--decompose`` may select a block."""
        layer_names = [layer.name for layer in self.layers]
        return layer_names + ([] if block is None else [f"{name}[{block}]" for name in layer_names])

    def parts(self, block: int | None) -> Iterator[Part]:
        """The arrays of a block, without repetition."""
        unique_parts: dict[Part, None] = {}
        for layer in self.layers:
            if layer.is_diagonal:
                unique_parts[Part("diagonals", layer.name, None)] = None
                continue
            unique_parts[Part("a", layer.input, block)] = None
            unique_parts[Part("g", layer.name, block)] = None
        yield from unique_parts

    def of_block(self, block: int | None) -> tuple[Layer, ...]:
        """The layers restricted to one block, with its number in their names."""
        if block is None:
            return self.layers
        return tuple(_one_block(layer, block) for layer in self.layers)


def groups_of(layers: Sequence[Layer]) -> list[Group]:
    """Put every layer into one group; keeps the order of the layers."""
    parents = {layer.name: layer.name for layer in layers}

    def root(name: str) -> str:
        while parents[name] != name:
            name = parents[name]
        return name

    weights: dict[str, str] = {}
    for layer in layers:
        parents[root(layer.name)] = root(layer.input)
        first = weights.setdefault(f"{layer.weight.path}{layer.weight.index}", layer.name)
        parents[root(layer.name)] = root(first)
    layers_by_root: dict[str, list[Layer]] = {}
    for layer in layers:
        layers_by_root.setdefault(root(layer.name), []).append(layer)
    return [
        Group(tuple(group_layers), _blocks(group_layers))
        for group_layers in layers_by_root.values()
    ]


def _blocks(layers: Sequence[Layer]) -> tuple[int | None, ...]:
    stacks = {layer.stack for layer in layers}
    if len(stacks) == 1 and (stack := stacks.pop()) and not any(x.is_diagonal for x in layers):
        return tuple(range(stack[0]))
    return (None,)


def _one_block(layer: Layer, block: int) -> Layer:
    return dataclasses.replace(
        layer,
        name=f"{layer.name}[{block}]",
        input=f"{layer.input}[{block}]",
        stack=layer.stack[1:],
        weight=_matrix(layer.weight, block),
        bias=None if layer.bias is None else _matrix(layer.bias, block),
    )


def _matrix(matrix: ParameterMatrix, block: int) -> ParameterMatrix:
    """The slice of a parameter at one index of its first stacked axis."""
    (axis, *stack), atoms = matrix.stack, list(matrix.atoms)
    del atoms[axis]

    def moved(positions: Sequence[int]) -> tuple[int, ...]:
        return tuple(p - (p > axis) for p in positions)

    moved_axes: Any = {name: moved(getattr(matrix, name)) for name in ("inputs", "outputs")}
    return dataclasses.replace(
        matrix, index=(*matrix.index, block), atoms=tuple(atoms), stack=moved(stack), **moved_axes
    )


# ---------------- the folder


_FORM = "jaxkfac-analysis"
_FOLDERS = ("factors", "spectra", "lanczos")


class StoredSums:
    """Sums and counts of some parts, with symmetric matrices folded to a triangle.

    Attributes:
        arrays: ``{part: sum}``; a matrix is stored as its folded triangle, after the stacked axes
            that remain.
        counts: ``{part: rows}``, the number of rows of inputs.
        sizes: ``{part: n}`` for matrices.
        terms: Number of loss terms in the sums.
        loss: Sum of the loss over these terms.
        batches: Number of batches added.
    """

    def __init__(self) -> None:
        self.arrays: dict[Part, np.ndarray] = {}
        self.counts: dict[Part, np.ndarray] = {}
        self.sizes: dict[Part, int] = {}
        self.terms = self.loss = 0.0
        self.batches = 0

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def in_full(self, part: Part) -> np.ndarray:
        """A sum in the form that :class:`~jaxkfac.Factors` has."""
        array = self.arrays[part]
        if part not in self.sizes:
            return array
        size = self.sizes[part]
        stack = array.shape[:-2]
        flat = array.reshape(math.prod(stack), *packed_shape(size))
        return np.stack([unpack(x, size) for x in flat]).reshape(*stack, size, size)


_CHANGED = {"weights": "the files of the model", "texts": "the texts"}


def _differences(stored: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Describe what differs between an analysis and the one that would continue it."""
    for name, value in now.items():
        was = stored.get(name)
        if was == value:
            continue
        if name == "options":
            yield from option_differences(was or {}, value)
        else:
            changed = f"{_CHANGED[name]} have changed" if name in _CHANGED else None
            yield changed or f"{name}: {was} in the folder, {value} now"


@dataclasses.dataclass(frozen=True)
class Folder:
    """The output folder of an analysis of one model."""

    path: Path

    @property
    def _options_path(self) -> Path:
        return self.path / "analysis.json"

    def begin(self, options: Mapping[str, Any], *, resume: bool) -> Mapping[str, Any]:
        """Check the options against the folder; return those the analysis was begun with.

        Raises:
            CheckpointMismatchError: the folder holds another analysis.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        for partial in self.path.rglob(f".*{PARTIAL}"):  # left by a killed run
            partial.unlink()
        options = json.loads(json.dumps(options))
        if resume and self._options_path.is_file():
            stored_options = self.read("analysis.json")
            if differences := [*_differences(stored_options, options)]:
                raise CheckpointMismatchError(
                    f"{self.path} holds another analysis:\n  "
                    + "\n  ".join(differences)
                    + "\ngive the options it was begun with, or --overwrite"
                )
            return stored_options
        for name in _FOLDERS:
            (self.path / name).mkdir(exist_ok=True)
        return options

    def note(self, options: Mapping[str, Any]) -> None:
        """Write the options that the run was begun with."""
        self.write("analysis.json", options)

    def read(self, name: str) -> dict[str, Any]:
        """The plain values in a file.

        Raises:
            DamagedFileError: the file is damaged.
        """
        return read_json(self.path / name, _FORM, "start again with --overwrite")

    def write(self, name: str, plain: Mapping[str, Any]) -> None:
        """Write plain values to a file, atomically."""
        write_json(self.path / name, _FORM, plain, f"{name} of the analysis")

    def has(self, name: str) -> bool:
        return (self.path / name).exists()

    # ------------------------------------------------------------ factors

    def save_part(self, part: Part, sums: StoredSums) -> None:
        """Write one part of a finished pass, in float32."""
        about = {"terms": sums.terms, "size": sums.sizes.get(part)}
        arrays = [("sum", sums.arrays[part].astype(np.float32, copy=False))]
        if part in sums.counts:
            arrays.append(("count", sums.counts[part].astype(np.float32, copy=False)))
        self._write(self._of_part(part), about, arrays, f"the factor {part}")

    def load_part(self, part: Part) -> StoredSums:
        """Read one part."""
        sums = StoredSums()
        with Archive(self._of_part(part), _FORM, f"factor {part}") as stored:
            sums.terms = stored.about["terms"]
            if stored.about["size"] is not None:
                sums.sizes[part] = stored.about["size"]
            sums.arrays[part] = stored.read("sum")
            if "count" in stored.names:
                sums.counts[part] = stored.read("count")
        return sums

    def save_sums(self, name: str, sums: StoredSums) -> None:
        """Write the sums of an unfinished pass."""
        about = {
            "parts": [part.written for part in sums.arrays],
            "counted": [part.written for part in sums.counts],
            "sizes": [[part.written, size] for part, size in sums.sizes.items()],
            **{name: getattr(sums, name) for name in ("terms", "loss", "batches")},
        }
        tables = {"sum": sums.arrays, "count": sums.counts}
        arrays = [
            (f"{kind}/{i}", array)
            for kind, table in tables.items()
            for i, array in enumerate(table.values())
        ]
        self._write(self.path / "factors" / name, about, arrays, "the sums of a pass")

    def load_sums(self, name: str) -> StoredSums:
        """Read the sums of a pass; empty for a pass that has not begun."""
        path, sums = self.path / "factors" / name, StoredSums()
        if not path.exists():
            return sums
        with Archive(path, _FORM, "sums of a pass") as stored:
            about = stored.about
            for i, part in enumerate(about["parts"]):
                sums.arrays[Part.read(*part)] = stored.read(f"sum/{i}")
            for i, part in enumerate(about["counted"]):
                sums.counts[Part.read(*part)] = stored.read(f"count/{i}")
            sums.sizes = {Part.read(*part): size for part, size in about["sizes"]}
            sums.terms, sums.loss = about["terms"], about["loss"]
            sums.batches = about["batches"]
        return sums

    def drop_sums(self, name: str) -> None:
        (self.path / "factors" / name).unlink(missing_ok=True)

    @property
    def nbytes(self) -> int:
        """Bytes of the factors, eigenvalues and vectors in the folder."""
        files = [x for name in _FOLDERS for x in (self.path / name).glob("*")]
        return sum(file.stat().st_size for file in files)

    # ------------------------------------------------------------ eigenvalues

    def save_values(self, name: str, values: Mapping[str, np.ndarray]) -> None:
        """Write the eigenvalues of a block of a group."""
        path = self.path / "spectra" / _file_name(name)
        self._write(path, {}, list(values.items()), f"the eigenvalues of {name}")

    def load_values(self, name: str) -> dict[str, np.ndarray]:
        """Read the eigenvalues of a block of a group."""
        path = self.path / "spectra" / _file_name(name)
        with Archive(path, _FORM, f"eigenvalues of {name}") as stored:
            return {key: stored.read(key) for key in stored.names}

    def has_values(self, name: str) -> bool:
        return (self.path / "spectra" / _file_name(name)).is_file()

    # ------------------------------------------------------------ vectors

    def save_vector(self, number: int, vector: np.ndarray) -> None:
        """Write one Lanczos vector."""
        path = self.path / "lanczos" / f"{number}"
        self._write(path, {}, [("vector", vector)], f"vector {number} of Lanczos")

    def load_vector(self, number: int) -> np.ndarray:
        """Read one Lanczos vector."""
        path = self.path / "lanczos" / f"{number}"
        with Archive(path, _FORM, f"vector {number} of Lanczos") as stored:
            return stored.read("vector")

    def _write(self, path: Path, about: dict[str, Any], arrays: Any, what: str) -> None:
        path.parent.mkdir(exist_ok=True)
        nbytes = sum(array.nbytes for _, array in arrays)
        remains = "what is done already stays: make room and continue with --resume"
        write_archive(path, _FORM, about, arrays, what=what, nbytes=nbytes, remains=remains)

    def _of_part(self, part: Part) -> Path:
        table, key, block = part.written
        name = f"{table}-{key}" + ("" if block is None else f"-{block}")
        return self.path / "factors" / _file_name(name)

    def results(self) -> Iterator[Path]:
        """Files that hold options or results."""
        names = ("analysis.json", "metrics.json", "report.html")
        return (self.path / name for name in names if (self.path / name).exists())


def _file_name(name: str) -> str:
    return name.replace("/", ".")
