"""Paths of the command line: folders for results, and checkpoints."""

from pathlib import Path

# ---------------- folders for results


def check_folder(output: Path) -> None:
    """Refuse an ``--output`` that cannot be a folder.

    Raises:
        NotADirectoryError: ``output`` is a file, or lies below one.
    """
    existing = next(path for path in (output, *output.parents) if path.exists())
    if not existing.is_dir():
        raise NotADirectoryError(
            f"--output {output}: {existing} is a file, and no folder can be there"
        )


# ---------------- checkpoints of `jaxkfac train`


def find_checkpoint(path: Path) -> Path | None:
    """The checkpoint that ``path`` denotes, or ``None``; damage shows only on reading."""
    if path.name.isdigit() and path.is_file():
        return path
    if steps := numbered_files(path):
        return steps[-1]
    below = (path / name for name in ("kfac", "adamw"))
    return next(
        (checkpoint for p in below if p.is_dir() and (checkpoint := find_checkpoint(p))), None
    )


def numbered_files(folder: Path) -> list[Path]:
    """The checkpoints in a folder, including other entries whose name is a number."""
    numbered = sorted((p for p in folder.glob("*") if p.name.isdigit()), key=lambda p: int(p.name))
    return numbered if any(path.is_file() for path in numbered) else []


def no_checkpoint(path: Path) -> FileNotFoundError:
    """The error that says what is at ``path`` instead of a checkpoint."""
    expected = (
        "expected what `jaxkfac train` has written, such as runs/digits or runs/digits/kfac/1320"
    )
    if path.is_file():
        return FileNotFoundError(
            f"no checkpoint at {path}, which is a file: {expected}; "
            "or a pretrained model: a folder with config.json, a .gguf file or smollm2, with the "
            "texts as --data"
        )
    if not path.exists():
        return FileNotFoundError(f"no checkpoint at {path}, which does not exist; {expected}")
    entries = ", ".join(sorted(p.name for p in path.iterdir())) or "nothing"
    return FileNotFoundError(f"no checkpoint at {path}, which holds {entries}; {expected}")
