"""JSON that holds the checksum of its own text."""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxkfac._errors import DamagedFileError
from jaxkfac.files._whole import write_text

_FORM, _CRC = "format", "crc32"
ZEROS = "0" * 8  # in place of a checksum that is not taken yet


def checksum(data: bytes) -> str:
    """CRC-32 in hexadecimal digits: it sees every error of up to 32 bits in a row."""
    return f"{zlib.crc32(data):08x}"


def sealed(text: str, name: str) -> str:
    """The text of a JSON object whose value of ``name`` is its checksum.

    Args:
        text: With :data:`ZEROS` as that value, of which the checksum is taken.
        name: The key.
    """
    return _with(text, name, ZEROS, checksum(text.encode()))


def is_sealed(text: str, name: str, said: object) -> bool:
    """Whether ``said``, the value of ``name``, is the checksum of the text."""
    return checksum(_with(text, name, str(said), ZEROS).encode()) == said


def _with(text: str, name: str, old: str, new: str) -> str:
    return text.replace(f'"{name}": "{old}"', f'"{name}": "{new}"')


def write_json(path: Path, form: str, plain: Mapping[str, Any], what: str, **words: Any) -> None:
    """Write plain values with a checksum of every byte, whole or not at all.

    Args:
        path: Where the file shall be.
        form: What kind of file it is, for :func:`read_json`.
        plain: Values that survive JSON.
        what: What is written, for errors.
        words: As of :func:`whole_file`.

    Raises:
        OSError: as of :func:`whole_file`.
    """
    text = json.dumps({_FORM: form, **plain, _CRC: ZEROS}, indent=1)
    write_text(path, sealed(text, _CRC), what, **words)


def read_json(path: Path, form: str, remedy: str) -> dict[str, Any]:
    """The values of a file of :func:`write_json`, or of an older one without a checksum.

    Args:
        path: The file.
        form: What kind of file is expected.
        remedy: What to do about a damaged one, for the error.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedFileError: a byte of it is not what was written.
    """
    try:
        text = path.read_bytes().decode()  # read_text would take one end of a line for another
        plain = dict(json.loads(text))
        # A changed byte cannot take away both marks of a file that has a checksum.
        if _FORM in plain or _CRC in plain:
            said = plain.pop(_CRC, None)
            if not is_sealed(text, _CRC, said):
                raise ValueError(f"its checksum is not {said!r}")
            if (found := plain.pop(_FORM)) != form:
                raise ValueError(f"it is {found!r}, expected {form!r}")
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedFileError(f"{path} is damaged ({error}): {remedy}") from error
    return plain
