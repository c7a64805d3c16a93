"""One small file of every kind that is written and read again, as version 0.1 wrote it.

The folder ``0.1`` holds for each kind a folder of its files and, in ``KIND.safetensors.xz``, the
numbers that they were written from. A later version of the library must read the same numbers in
these files, and go on from them. ``python -m tests.written FOLDER`` writes all of them anew.

Some things have no file of their own. A Laplace posterior and a bank of adapters are built from
what other files hold (``bases-measured``, ``adapter-of-bank``), a program of ``jax.export`` holds
compiled code rather than numbers of ours, and reports are written for people.
"""

import lzma
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import load, save

from tests.written._folders import FOLDERS
from tests.written._kind import Kind
from tests.written._net import Readings, under
from tests.written._runs import RUNS
from tests.written._states import STATES
from tests.written._structure import structure_of

COMMITTED = Path(__file__).parent / "0.1"
KINDS: dict[str, Kind] = STATES | FOLDERS | RUNS


def write_kind(name: str, folder: Path) -> None:
    """Write one kind below ``folder``, and the numbers that it was written from."""
    own = folder / name
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True)
    written = KINDS[name].write(own)
    try:
        numbers = under("read", plain(KINDS[name].readings(written)))
        numbers |= under("after", plain(KINDS[name].go_on(written)))
    finally:
        close(written)
    (folder / f"{name}.safetensors.xz").write_bytes(lzma.compress(save(numbers), preset=9))


def plain(readings: Readings) -> Readings:
    """Readings for a file: bfloat16 as float32, of large symmetric matrices one triangle."""
    found: Readings = {}
    for name, x in readings.items():
        x = np.asarray(x)
        x = x.astype(np.float32) if x.dtype == ml_dtypes.bfloat16 else x
        if x.ndim == 2 and x.shape[0] == x.shape[1] >= 64 and np.array_equal(x, x.T):
            found[f"{name}, lower triangle"] = x[np.tril_indices(len(x))]
        else:
            found[name] = np.ascontiguousarray(x).reshape(x.shape)
    return found


def expected_of(name: str, folder: Path = COMMITTED) -> tuple[Readings, Readings]:
    """The numbers that a kind was written from, and those of one further use."""
    numbers = load(lzma.decompress((folder / f"{name}.safetensors.xz").read_bytes()))

    def part(start: str) -> Readings:
        return {k.removeprefix(start): x for k, x in numbers.items() if k.startswith(start)}

    return part("read/"), part("after/")


def close(written: object) -> None:
    """End the threads of a service; other objects have none."""
    getattr(written, "close", lambda: None)()


__all__ = [
    "COMMITTED",
    "KINDS",
    "Kind",
    "Readings",
    "close",
    "expected_of",
    "plain",
    "structure_of",
    "write_kind",
]
