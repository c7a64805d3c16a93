"""What a file format is asked for, and the formats by their suffix."""

import abc
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple


class RowPlace(NamedTuple):
    """Where in a file the next row begins.

    Attributes:
        offset: As the format counts: bytes of text, or rows.
        number: Lines or rows before it.
    """

    offset: int = 0
    number: int = 0


class BadRow(NamedTuple):
    """A row that is none.

    Attributes:
        reason: What is wrong with it.
    """

    reason: str


class Reader(abc.ABC):
    """A file format; one of these for each, in a file of its own.

    Attributes:
        suffixes: Of file names, in small letters, such as ``(".jsonl", ".jsonl.gz")``.
        unit: What its rows are called in messages.
    """

    suffixes: ClassVar[tuple[str, ...]]
    unit: ClassVar[str] = "row"

    @abc.abstractmethod
    def read(self, path: Path, place: RowPlace) -> Iterator[tuple[RowPlace, Any]]:
        """Rows from ``place`` on, each with the place behind it, holding few of them at a time.

        Args:
            path: The file.
            place: Of the first row; ``RowPlace()`` is the beginning.

        Returns:
            ``(place, row)``: what JSON would give for the row, or a :class:`BadRow`.

        Raises:
            ValueError: the file is damaged, or not of this format.
        """

    def count(self, path: Path) -> int:
        """How many rows the file has, bad ones with them."""
        return sum(1 for _ in self.read(path, RowPlace()))


DEEPEST = 100  # lists and objects of JSON in one another


def damaged(path: Path, where: str, error: Exception) -> Exception:
    """What to raise where a file cannot be read on: one sentence with the file and the place.

    Args:
        path: The file.
        where: Words such as ``" behind row 3"``.
        error: Of whatever kind the package that reads it has raised.
    """
    if isinstance(error, OSError) and error.errno is not None:  # of the system, with the file
        return error
    (what, *_) = str(error).splitlines() or [type(error).__name__]
    return ValueError(f"{path} is damaged or cut short{where} ({what}): get it again")


def is_too_deep(row: Any, limit: int = DEEPEST) -> bool:
    """Whether lists and dictionaries are nested deeper, so that what looks into them may fail."""
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
    """Make a format known by its suffixes; to be used as a decorator."""
    found = reader()
    _READERS.update(dict.fromkeys(reader.suffixes, found))
    return reader


def known_suffixes() -> tuple[str, ...]:
    """Suffixes of all formats."""
    return tuple(_READERS)


def reader_of(path: Path) -> Reader | None:
    """The format of a file by its name, or ``None``."""
    name = path.name.lower()
    return next((r for suffix, r in _READERS.items() if name.endswith(suffix)), None)


# ---------------- which files a path stands for


_TRAIN = ("train",)
_VALIDATION = ("validation", "valid", "val", "dev", "eval")
_OTHER = ("test",)
# What the datasets library says of its own files, beside them.
_ABOUT = ("dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json")


class FileSplits(NamedTuple):
    """Files by what they are for.

    Attributes:
        train: To learn.
        validation: To measure with; may be empty.
    """

    train: tuple[Path, ...]
    validation: tuple[Path, ...]


def find_files(path: Path | str) -> FileSplits:
    """The files of a data set.

    Args:
        path: A file, all of it to train on; or a folder. In a folder a split is told by the first
            word of a file's name, or by the name of a folder in it: ``train-00000-of-00002.parquet``,
            ``data/train.jsonl``, ``validation/data-00000-of-00001.arrow``. Where no name says
            ``train``, all files that name no split are to train on.

    Returns:
        The files in the order of their names.

    Raises:
        FileNotFoundError: there is no such path, or nothing to train on in it; what the folder
            holds is said.
        ValueError: a file whose suffix belongs to no format.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name in ("train-1.jsonl", "train-0.jsonl", "dev.jsonl", "README.md"):
        ...         _ = pathlib.Path(folder, name).write_text("{}")
        ...     splits = find_files(folder)
        >>> [file.name for file in splits.train], [file.name for file in splits.validation]
        (['train-0.jsonl', 'train-1.jsonl'], ['dev.jsonl'])
    """  # noqa: E501
    path = Path(path)
    if not path.is_dir():
        return FileSplits((check_file(path),), ())
    found = [file for file in sorted(path.rglob("*")) if _is_data(file, path)]
    train = _of(found, path, _TRAIN) or [
        file for file in found if not _words(file, path) & {*_VALIDATION, *_OTHER}
    ]
    if not train:
        held = ", ".join(sorted(p.name for p in path.iterdir())) or "nothing"
        raise FileNotFoundError(
            f"nothing to train on in {path}, which holds {held}: expected files that end in "
            f"{', '.join(known_suffixes())}"
        )
    return FileSplits(tuple(train), tuple(_of(found, path, _VALIDATION)))


def check_file(path: Path) -> Path:
    """The path, if it is a file of a format that is known.

    Raises:
        FileNotFoundError: there is no file.
        ValueError: its suffix belongs to no format.
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
    """The folders that a file is in, and the first word of its name."""
    parts = file.relative_to(folder).parts
    first = "".join(x if x.isalnum() else " " for x in parts[-1]).split()
    return {part.lower() for part in (*parts[:-1], *first[:1])}
