"""Compiled programs, kept between processes unless somebody has said where, or not at all.

JAX writes an entry in place, and never again: one that a kill has cut off would be read, and fail,
for ever. So each process has a folder of its own, with links to what others have compiled, and
what it adds is linked back when it ends. A link appears at once and whole.
"""

import contextlib
import os
import platform
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ENTRY = "*-cache"  # JAX's own name
_OWN = ".process-"
_MOST_BYTES = 2 << 30
_ABANDONED = 7 * 24 * 3600  # seconds without an entry, after which a process has been killed


@contextlib.contextmanager
def compilation_cache(kept: Path) -> Iterator[None]:
    """Read programs from ``kept`` and add those that are compiled in the block.

    Nothing is changed where JAX has been given a folder (``JAX_COMPILATION_CACHE_DIR``) or been
    told to keep none (``JAX_ENABLE_COMPILATION_CACHE=false``). Without a folder that can be
    written programs are compiled anew, which is said.

    Args:
        kept: Folder of this machine's programs; others' code does not run on it. Nobody else
            may write to it: what it holds is executed.
    """
    import jax

    config: Any = jax.config
    if config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:
        yield
        return
    try:
        kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        _clear(kept)
        own = Path(tempfile.mkdtemp(prefix=_OWN, dir=kept))
    except OSError as error:
        reason = f"{error.strerror}: {kept}"
        print(f"compiled programs are not kept ({reason})", file=sys.stderr, flush=True)
        yield
        return
    with contextlib.suppress(OSError):
        for entry in kept.glob(_ENTRY):
            _link(entry, own / entry.name)
    config.update("jax_compilation_cache_dir", str(own))
    # Its folder would be a part of every key.
    config.update("jax_persistent_cache_enable_xla_caches", "none")
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    try:
        yield
    except BaseException:  # which may have come while an entry was written
        with contextlib.suppress(OSError):
            newest = max(own.glob(_ENTRY), key=lambda x: x.stat().st_mtime_ns, default=None)
            if newest is not None:
                newest.unlink()
        raise
    finally:
        with contextlib.suppress(OSError):
            for entry in own.glob(_ENTRY):
                _link(entry, kept / entry.name)
        shutil.rmtree(own, ignore_errors=True)


def programs_folder(cache: Path) -> Path:
    """Where ``cache`` has the programs of this machine, by what its processor can do."""
    features = platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = next((x for x in lines if x.startswith(("flags", "Features"))), features)
    return cache / "programs" / f"{platform.machine()}-{zlib.crc32(features.encode()):08x}"


def _link(entry: Path, target: Path) -> None:
    """Another name of a file; a program that cannot be kept is compiled again."""
    try:
        os.link(entry, target)
    except (FileExistsError, FileNotFoundError):  # another process has made it, or removed it
        return
    except OSError:  # a file system without links
        if not target.exists():
            _copy(entry, target)


def _copy(entry: Path, target: Path) -> None:
    """The same of a file system without links: at once and whole, or not at all."""
    partial = target.with_name(f".{os.getpid()}-{target.name}")
    try:
        shutil.copyfile(entry, partial)
        partial.replace(target)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _clear(kept: Path) -> None:
    """Remove what killed processes have left, and the longest unread beyond ``_MOST_BYTES``."""
    found = []
    for path in (*kept.glob(f"{_OWN}*"), *kept.glob(_ENTRY)):
        with contextlib.suppress(FileNotFoundError):
            stat = path.stat()
            if path.name.startswith(_OWN):
                if time.time() - stat.st_mtime > _ABANDONED:
                    shutil.rmtree(path, ignore_errors=True)
            else:
                found.append((max(stat.st_atime, stat.st_mtime), stat.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= _MOST_BYTES:
            return
        path.unlink(missing_ok=True)
        total -= size
