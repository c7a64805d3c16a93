"""The interface of a file format, and the formats by suffix."""

import abc
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple


class RowPlace(NamedTuple):
    """Position in a file where the next row starts.

    Attributes:
        offset: In units of the format: bytes of text, or rows.
        number: Number of lines or rows before it.
    """

    offset: int = 0
    number: int = 0


class BadRow(NamedTuple):
    """A row that could not be read.

    Attributes:
        reason: Description of the error.
    """

    reason: str


class Reader(abc.ABC):
    """A file format.

    Attributes:
        suffixes: Suffixes of file names in lower case, such as ``(".jsonl", ".jsonl.gz")``.
        unit: Name of a row in messages.
    """

    suffixes: ClassVar[tuple[str, ...]]
    unit: ClassVar[str] = "row"

    @abc.abstractmethod
    def read(self, path: Path, place: RowPlace) -> Iterator[tuple[RowPlace, Any]]:
        """Rows from ``place`` on, each with the place after it, keeping only a few in memory.

        Args:
            path: The file.
            place: Place of the first row; ``RowPlace()`` is the start of the file.

        Returns:
            ``(place, row)``: the row as JSON values, or a :class:`BadRow`.

        Raises:
            ValueError: the file is damaged, or does not have this format.
        """

    def count(self, path: Path) -> int:
        """Number of rows in the file, including bad ones."""
        return sum(1 for _ in self.read(path, RowPlace()))


DEEPEST = 100  # nesting depth of lists and objects in JSON


def damaged(path: Path, where: str, error: Exception) -> Exception:
    """The exception for a file that cannot be read further; names the file and the place.

    Args:
        path: The file.
        where: Text such as ``" behind row 3"``.
        error: The exception of the package that reads the file.
    """
    if isinstance(error, OSError) and error.errno is not None:  # from the system, names the file
        return error
    (what, *_) = str(error).splitlines() or [type(error).__name__]
    return ValueError(f"{path} is damaged or cut short{where} ({what}): get it again")


def is_too_deep(row: Any, limit: int = DEEPEST) -> bool:
    """Whether lists and dictionaries are nested more deeply, so code that visits them may fail."""
    level = [row]
    for _ in range(limit):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner += value.values()
            elif isinstance(value, list):
                inner += value
        level = [value for value in inner if isinstance(value, dict | list)]
        if not level:
            return False
    return True


TOO_DEEP = BadRow("JSON that is nested too deeply")


_READERS: dict[str, Reader] = {}


def register_reader(reader: type[Reader]) -> type[Reader]:
    """Register a format by its suffixes; use as a decorator."""
    instance = reader()
    _READERS.update(dict.fromkeys(reader.suffixes, instance))
    return reader


def known_suffixes() -> tuple[str, ...]:
    """Suffixes of all formats."""
    return tuple(_READERS)


def reader_of(path: Path) -> Reader | None:
    """The format of a file according to its name, or ``None``."""
    name = path.name.lower()
    return next((r for suffix, r in _READERS.items() if name.endswith(suffix)), None)


# ---------------- the files that a path refers to


_TRAIN = ("train",)
_VALIDATION = ("validation", "valid", "val", "dev", "eval")
_OTHER = ("test",)
# Metadata files of the datasets library, next to its data.
_ABOUT = ("dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json")


class FileSplits(NamedTuple):
    """Files by purpose.

    Attributes:
        train: Training data.
        validation: Validation data; may be empty.
    """

    train: tuple[Path, ...]
    validation: tuple[Path, ...]


def find_files(path: Path | str) -> FileSplits:
    """Find the files of a data set.

    Args:
        path: A file, used for training; or a folder. In a folder the split follows from the first
            word of a file's name, or from the name of a folder in it:
            ``train-00000-of-00002.parquet``, ``data/train.jsonl``,
            ``validation/data-00000-of-00001.arrow``. If no name contains ``train``, all files
            that name no split are used for training.

    Returns:
        The files, in the order of their names.

    Raises:
        FileNotFoundError: there is no such path, or no training data in it; lists the contents
            of the folder.
        ValueError: the suffix of a file does not belong to any format.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name in ("train-1.jsonl", "train-0.jsonl", "dev.jsonl", "README.md"):
        ...         _ = pathlib.Path(folder, name).write_text("{}")
        ...     splits = find_files(folder)
        >>> [file.name for file in splits.train], [file.name for file in splits.validation]
        (['train-0.jsonl', 'train-1.jsonl'], ['dev.jsonl'])
    """
    path = Path(path)
    if not path.is_dir():
        return FileSplits((check_file(path),), ())
    files = [file for file in sorted(path.rglob("*")) if _is_data(file, path)]
    train = _of(files, path, _TRAIN) or [
        file for file in files if not _words(file, path) & {*_VALIDATION, *_OTHER}
    ]
    if not train:
        contents = ", ".join(sorted(p.name for p in path.iterdir())) or "nothing"
        raise FileNotFoundError(
            f"nothing to train on in {path}, which holds {contents}: expected files that end in "
            f"{', '.join(known_suffixes())}"
        )
    return FileSplits(tuple(train), tuple(_of(files, path, _VALIDATION)))


def check_file(path: Path) -> Path:
    """Return the path, if it is a file with a known format.

    Raises:
        FileNotFoundError: there is no file.
        ValueError: its suffix does not belong to any format.
    """
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise FileNotFoundError(f"expected a file of records at {path}, which {what}")
    if reader_of(path) is None:
        raise ValueError(
            f"{path}: the suffix {path.suffix!r} belongs to no format; expected one of "
            f"{', '.join(known_suffixes())}"
        )
    return path


def _is_data(file: Path, folder: Path) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    about = file.name in _ABOUT
    return not (hidden or about) and file.is_file() and reader_of(file) is not None


def _of(files: Iterable[Path], folder: Path, names: tuple[str, ...]) -> list[Path]:
    return [file for file in files if _words(file, folder) & {*names}]


def _words(file: Path, folder: Path) -> set[str]:
    """The folders that contain a file, and the first word of its name."""
    parts = file.relative_to(folder).parts
    first = "".join(x if x.isalnum() else " " for x in parts[-1]).split()
    return {part.lower() for part in (*parts[:-1], *first[:1])}
