"""Records from files: one JSON object a line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from jaxkfac.data.text._records import Record, parse_record

_Parsed = TypeVar("_Parsed")


def read_records(path: Path | str) -> list[Record]:
    """The records of one JSONL file, in its order; empty lines are passed over.

    Args:
        path: A file of lines that :func:`parse_record` knows.

    Returns:
        At least one record.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is no JSON, no UTF-8 or no record, named with file and line; or
            there is no record at all.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "train.jsonl")
        ...     _ = path.write_text('{"text": "Fe is iron"}')
        ...     read_records(path)
        [Completion(prompt='', completion='Fe is iron')]
    """
    return read_lines(Path(path), parse_record)


def read_folder(path: Path | str) -> tuple[list[Record], list[Record]]:
    """Records to train on and to validate with.

    Args:
        path: A folder with ``train.jsonl`` and, if there is one, ``validation.jsonl``; or a
            single JSONL file, all of it to train on.

    Returns:
        ``(train, validation)``; the second may be empty.

    Raises:
        FileNotFoundError: there is no such path, or no ``train.jsonl`` in it; what the folder
            holds is said.
        ValueError: as in :func:`read_records`.
    """
    train, validation = train_and_validation(Path(path))
    return read_records(train), read_records(validation) if validation else []


def train_and_validation(path: Path) -> tuple[Path, Path | None]:
    """The files of a data set: those of a folder, or a file by itself.

    Raises:
        FileNotFoundError: there is no ``train.jsonl`` in the folder; what it holds is said.
    """
    if not path.is_dir():
        return path, None
    train, validation = path / "train.jsonl", path / "validation.jsonl"
    if not train.is_file():
        held = ", ".join(sorted(p.name for p in path.iterdir())) or "nothing"
        raise FileNotFoundError(f"no train.jsonl in {path}, which holds {held}")
    return train, validation if validation.is_file() else None


def read_lines(path: Path, parse: Callable[[Any], _Parsed]) -> list[_Parsed]:
    """Every line of a JSONL file, parsed; an error says which file and line."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise FileNotFoundError(f"expected a JSONL file at {path}, which {what}")
    found = []
    # Lines end with a line feed: a string may hold other characters that Python splits at.
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            found.append(parse(json.loads(line.decode("utf-8"))))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}:{number}: not UTF-8 ({error.reason})") from error
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}:{number}: not JSON ({error.msg} at column {error.colno}); expected one "
                "whole object on each line"
            ) from error
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
    if not found:
        raise ValueError(f"{path} holds no line")
    return found
