"""Which files a path stands for."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from jaxkfac.data.readers._reader import known_suffixes, reader_of

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
