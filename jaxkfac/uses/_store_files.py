"""The folder of a gradient store: each batch in its own file, and a journal of finished batches.

While it is written, the folder's name ends in ``.partial``; it is renamed after the last batch. A
batch counts once the journal lists it with its checksum, and the journal is written after it.
"""

import dataclasses
import hashlib
import itertools
import os
import shutil
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkfac._arguments import ArrayTree
from jaxkfac._errors import DamagedFileError
from jaxkfac.files import (
    PARTIAL,
    Archive,
    probe_folder,
    read_json,
    whole_file,
    write_archive,
    write_json,
)

_JOURNAL = "store.json"
_FORM = "jaxkfac.gradient_store"
_SUMS = "jaxkfac.gradient_store.sums"
_VERSION = 1
_REMAINS = (
    "what was written before it is kept: make room, and call gradient_store with the same "
    "arguments to go on from there"
)


@dataclasses.dataclass(frozen=True)
class StoredPart:
    """One batch of a store.

    Attributes:
        number: Examples in it.
        crc32: Checksum of its rows.
        data: Digest of the batch that it was computed from.
        exists: Which examples have a loss term that counts, ``"1"`` or ``"0"`` for each.
    """

    number: int
    crc32: int
    data: str
    exists: str


class StoreFolder:
    """Rows of examples in a folder, written batch by batch.

    Args:
        path: Path of the finished store.
        about: Everything that its numbers depend on, as plain values.
        width: Numbers in a row.
        dtype: The dtype of the rows.

    Attributes:
        path: Path of the finished store.
        parts: The batches that are stored.
        is_whole: Whether the store is finished.

    Raises:
        ValueError: there is a store of something else at the path; the difference is named.
        DamagedFileError: its journal is damaged.
        OSError: nothing can be written there.
    """

    def __init__(self, path: Path, about: Mapping[str, Any], width: int, dtype: np.dtype) -> None:
        self.path, self._about = path, dict(about)
        self._width, self._dtype = width, dtype
        self.parts: list[StoredPart] = []
        self._compared: set[int] = set()  # batches whose checksums have been compared
        self.is_whole = path.exists()
        self._folder = path if self.is_whole else path.with_name(path.name + PARTIAL)
        if not self.is_whole and not self._folder.exists():
            probe_folder(self._folder)
            return
        if not (self._folder / _JOURNAL).is_file():
            if self.is_whole:
                raise ValueError(f"{path} is no gradient store: it has no {_JOURNAL}")
            return
        remedy = "remove the folder, and make the store anew"
        plain = read_json(self._folder / _JOURNAL, _FORM, remedy)
        if plain["version"] != _VERSION:
            raise ValueError(f"{path} is of version {plain['version']}, expected {_VERSION}")
        self._check_about(plain["about"])
        self.parts = [StoredPart(**values) for values in plain["parts"]]
        self.check_sizes()

    def _check_about(self, stored: Mapping[str, Any]) -> None:
        different = [
            f"{name} is {stored.get(name)}, expected {self._about.get(name)}"
            for name in {**self._about, **stored}
            if stored.get(name) != self._about.get(name)
        ]
        if different:
            raise ValueError(
                f"{self._folder} holds gradients of something else: {'; '.join(different)}. Give "
                "what they were made with, or choose another path="
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the stored rows."""
        return sum(batch.number for batch in self.parts) * self._width * self._dtype.itemsize

    def append(
        self, rows: np.ndarray, data: str, exists: np.ndarray, sums: Mapping[str, np.ndarray]
    ) -> None:
        """Write one batch, and the sums of all so far; only then does it count.

        Raises:
            OSError: it cannot be written; earlier batches remain.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        index, view = len(self.parts), np.ascontiguousarray(rows).view(np.uint8).data
        options: Any = {"remains": _REMAINS}
        with whole_file(self._rows(index), "gradients", nbytes=view.nbytes, **options) as file:
            file.write(view)
        nbytes = sum(x.nbytes for x in sums.values())
        options |= {"what": "sums of squares", "nbytes": nbytes}
        write_archive(self._sums(index + 1), _SUMS, {}, sums.items(), **options)
        bits = "".join("01"[bool(x)] for x in exists)
        batch = StoredPart(len(rows), zlib.crc32(view), data, bits)
        self._write([*self.parts, batch])
        self.parts.append(batch)
        self._sums(index).unlink(missing_ok=True)

    def _write(self, batches: Sequence[StoredPart]) -> None:
        plain = {
            "version": _VERSION,
            "about": self._about,
            "parts": [dataclasses.asdict(batch) for batch in batches],
        }
        path = self._folder / _JOURNAL
        write_json(path, _FORM, plain, "the journal of a gradient store", remains=_REMAINS)

    def finish(self) -> None:
        """Rename the folder, which marks the store as finished."""
        left_by_kills = [*self._folder.glob(f".*{PARTIAL}"), *self._folder.glob("*.sums")]
        for path in left_by_kills:
            if path != self._sums(len(self.parts)):
                path.unlink()
        os.replace(self._folder, self.path)
        self._folder, self.is_whole = self.path, True

    def sums(self) -> dict[str, np.ndarray]:
        """The sums over all batches.

        Raises:
            FileNotFoundError: their file does not exist.
            DamagedFileError: a byte has changed.
        """
        path = self._sums(len(self.parts))
        if not path.is_file():
            raise DamagedFileError(
                f"{self._folder} has lost {path.name}: remove the folder, and make the store anew"
            )
        with Archive(path, _SUMS, "file of sums") as stored:
            return {name: stored.read(name) for name in stored.names}

    def rows(self, index: int) -> np.ndarray:
        """The rows of one batch, mapped from its file; the checksum is compared the first time.

        Raises:
            DamagedFileError: the file has changed.
        """
        rows = self._mapped(index)
        if index not in self._compared:
            if zlib.crc32(rows.view(np.uint8).data) != self.parts[index].crc32:
                raise DamagedFileError(
                    f"{self._rows(index)} is damaged, its checksum differs: remove "
                    f"{self._folder}, and make the store anew"
                )
            self._compared.add(index)
        return rows

    def _mapped(self, index: int) -> np.ndarray:
        batch, path = self.parts[index], self._rows(index)
        expected = batch.number * self._width * self._dtype.itemsize
        nbytes = path.stat().st_size if path.is_file() else None
        if nbytes != expected:
            problem = (
                "is not there" if nbytes is None else f"has {nbytes} bytes, expected {expected}"
            )
            raise DamagedFileError(
                f"{path} {problem}: remove {self._folder}, and make the store anew"
            )
        shape = batch.number, self._width
        return np.memmap(path, np.uint8, "r").view(self._dtype).reshape(shape)

    def check_sizes(self) -> None:
        """Check that every file exists and has its length.

        Raises:
            DamagedFileError: naming the first file that is missing or has another length.
        """
        for index in range(len(self.parts)):
            self._mapped(index)

    def free_bytes(self) -> int:
        """Free bytes on the disk."""
        existing = next(x for x in (self._folder, *self._folder.parents) if x.exists())
        return shutil.disk_usage(existing).free

    def _rows(self, index: int) -> Path:
        return self._folder / f"{index:06d}.rows"

    def _sums(self, number: int) -> Path:
        return self._folder / f"{number:06d}.sums"


class StoreInMemory:
    """Rows of examples in host memory, with the interface of ``StoreFolder``."""

    is_whole = False

    def __init__(self) -> None:
        self.parts: list[StoredPart] = []
        self._rows: list[np.ndarray] = []
        self._sums: dict[str, np.ndarray] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the stored rows."""
        return sum(x.nbytes for x in self._rows)

    def append(
        self, rows: np.ndarray, data: str, exists: np.ndarray, sums: Mapping[str, np.ndarray]
    ) -> None:
        """Store one batch, and the sums of all so far."""
        bits = "".join("01"[bool(x)] for x in exists)
        self.parts.append(StoredPart(len(rows), 0, data, bits))
        self._rows.append(rows)
        self._sums = dict(sums)

    def finish(self) -> None:
        """Mark the store as finished."""
        self.is_whole = True

    def sums(self) -> dict[str, np.ndarray]:
        """The sums over all batches."""
        return self._sums

    def rows(self, index: int) -> np.ndarray:
        """The rows of one batch."""
        return self._rows[index]


def chunks(number: int, size: int) -> list[slice]:
    """``range(number)`` in slices of at most ``size``.

    Slices of one length share a compiled program, so a divisor of the number is preferred, unless
    it would take more than four times as many calls.
    """
    divisor = max(x for x in range(1, size + 1) if number % x == 0)
    if 4 * divisor >= min(size, number):
        size = divisor
    cuts = [*range(0, number, size), number]
    return [slice(*pair) for pair in itertools.pairwise(cuts)]


def short_hash(data: Any) -> str:
    """Sixteen hexadecimal digits of bytes."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def digest_of(tree: ArrayTree) -> str:
    """A digest of a tree's paths, dtypes, shapes and bytes."""
    digest = hashlib.blake2b(digest_size=8)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.ascontiguousarray(np.asarray(leaf))
        about = jax.tree_util.keystr(path), array.dtype.name, np.shape(leaf)
        digest.update(repr(about).encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
