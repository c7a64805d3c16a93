"""Compiled programs, kept between processes unless JAX's own settings say otherwise.

JAX writes a cache entry in place and never rewrites it, so an entry that was cut off by a kill
would fail to load for ever. Each process therefore has its own folder with links to the entries of
others, and links its new entries back when it ends. A link appears atomically and complete.
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
_PROCESS_PREFIX = ".process-"
_MOST_BYTES = 2 << 30
_ABANDONED = 7 * 24 * 3600  # seconds without a new entry, after which a process counts as killed


@contextlib.contextmanager
def compilation_cache(shared_folder: Path) -> Iterator[None]:
    """Read programs from ``shared_folder`` and add those that the block compiles.

    The block changes nothing where JAX has a cache folder (``JAX_COMPILATION_CACHE_DIR``) or has
    its cache turned off (``JAX_ENABLE_COMPILATION_CACHE=false``). Without a writable folder,
    programs are compiled anew and a message says so.

    Args:
        shared_folder: Folder for the programs of this machine; code for other machines may not run
            here. Nobody else may have write access: the contents are executed.
    """
    import jax

    config: Any = jax.config
    if config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:
        yield
        return
    try:
        shared_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _clear(shared_folder)
        process_folder = Path(tempfile.mkdtemp(prefix=_PROCESS_PREFIX, dir=shared_folder))
    except OSError as error:
        reason = f"{error.strerror}: {shared_folder}"
        print(f"compiled programs are not kept ({reason})", file=sys.stderr, flush=True)
        yield
        return
    with contextlib.suppress(OSError):
        for entry in shared_folder.glob(_ENTRY):
            _link(entry, process_folder / entry.name)
    config.update("jax_compilation_cache_dir", str(process_folder))
    # With XLA's own caches, their folder would be part of every key.
    config.update("jax_persistent_cache_enable_xla_caches", "none")
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    try:
        yield
    except BaseException:  # may have interrupted the writing of an entry
        with contextlib.suppress(OSError):
            newest = max(
                process_folder.glob(_ENTRY), key=lambda x: x.stat().st_mtime_ns, default=None
            )
            if newest is not None:
                newest.unlink()
        raise
    finally:
        with contextlib.suppress(OSError):
            for entry in process_folder.glob(_ENTRY):
                _link(entry, shared_folder / entry.name)
        shutil.rmtree(process_folder, ignore_errors=True)


def programs_folder(cache: Path) -> Path:
    """Folder in ``cache`` for the programs of this machine, named by the processor's features."""
    features = platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = next((x for x in lines if x.startswith(("flags", "Features"))), features)
    return cache / "programs" / f"{platform.machine()}-{zlib.crc32(features.encode()):08x}"


def _link(entry: Path, target: Path) -> None:
    """Create another name for a file; a program that cannot be linked is compiled again."""
    try:
        os.link(entry, target)
    except (FileExistsError, FileNotFoundError):  # another process has made it, or removed it
        return
    except OSError:  # a file system without links
        if not target.exists():
            _copy(entry, target)


def _copy(entry: Path, target: Path) -> None:
    """Copy a file atomically, for file systems without links."""
    partial = target.with_name(f".{os.getpid()}-{target.name}")
    try:
        shutil.copyfile(entry, partial)
        partial.replace(target)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _clear(shared_folder: Path) -> None:
    """Remove what killed processes left, and the least recently read beyond ``_MOST_BYTES``."""
    entries = []
    for path in (*shared_folder.glob(f"{_PROCESS_PREFIX}*"), *shared_folder.glob(_ENTRY)):
        with contextlib.suppress(FileNotFoundError):
            stat = path.stat()
            if path.name.startswith(_PROCESS_PREFIX):
                if time.time() - stat.st_mtime > _ABANDONED:
                    shutil.rmtree(path, ignore_errors=True)
            else:
                entries.append((max(stat.st_atime, stat.st_mtime), stat.st_size, path))
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if total <= _MOST_BYTES:
            return
        path.unlink(missing_ok=True)
        total -= size
