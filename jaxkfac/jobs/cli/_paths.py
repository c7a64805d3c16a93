"""Paths of the command line: checks that do not wait for JAX."""

import difflib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

# ---------------- folders for results


def check_folder(folder: Path, option: str = "--output") -> None:
    """Refuse a path that cannot be a folder.

    Raises:
        NotADirectoryError: ``folder`` is a file, or lies below one; names the option.
    """
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        raise NotADirectoryError(
            f"{option} {folder}: {existing} is a file, and no folder can be there"
        )


# ---------------- models, texts and programs that must exist


PLANNED_NAMES = ("flan-t5-xl", "llama-1b", "llama-7b", "phi-3-mini")  # their sizes are known
MODEL_NAMES = ("smollm2", "t5-bytes", *PLANNED_NAMES)
DATA_NAMES = ("elements", "wordnet")


def is_named(model: str) -> bool:
    """Whether a model is one of the known names, and not a folder of that name."""
    return model in MODEL_NAMES and not (Path(model) / "config.json").is_file()


def absent(path: Path) -> str:
    """What is at a path instead of the expected file or folder, as the end of a sentence."""
    if path.is_dir():
        return "is a folder"
    return "is a file" if path.exists() else "does not exist"


def check_model(model: str) -> None:
    """Refuse a model that is neither a known name, nor a folder, nor a .gguf file.

    Raises:
        FileNotFoundError: says what is there and which command reads it, or names the nearest.
    """
    path = Path(model)
    is_model = (path / "config.json").is_file() or (path.suffix == ".gguf" and path.is_file())
    if is_model or model in MODEL_NAMES:
        return
    if kind := kind_of(path):
        raise FileNotFoundError(f"no model at {path}, which is {kind}")
    if path.is_dir():
        raise FileNotFoundError(f"no config.json in {path}, which holds {_entries(path)}")
    if path.exists():
        raise FileNotFoundError(f"no model at {path}, which is no folder and no .gguf file")
    raise FileNotFoundError(f"no model at {path}, which does not exist{_nearest(model)}")


def check_weights(model: str) -> None:
    """Refuse what ``check_model`` refuses, and a model without weights.

    Raises:
        FileNotFoundError: says what is there.
    """
    check_model(model)
    if model in PLANNED_NAMES and is_named(model):
        raise FileNotFoundError(
            f"{model} is known by its sizes, for `jaxkfac plan` and `jaxkfac finetune --plan`: "
            "give the folder of a checkpoint"
        )
    folder = Path(model)
    if model not in MODEL_NAMES and folder.is_dir() and not any(folder.glob("*.safetensors")):
        raise FileNotFoundError(f"{folder} has no weights: expected *.safetensors files in it")


def _nearest(name: str, names: Sequence[str] = MODEL_NAMES) -> str:
    """The known names closest to a mistyped one, as the end of a sentence."""
    close = difflib.get_close_matches(name, names, n=3)
    return f"; the nearest names are {', '.join(map(repr, close))}" if close else ""


def _entries(folder: Path) -> str:
    return ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"


def kind_of(path: Path) -> str | None:
    """What the commands of this library wrote at a path, and which of them reads it.

    ``None`` where it is something else.
    """
    if path.is_file():
        if path.name.isdigit():
            return "a checkpoint of a run: `jaxkfac analyze` reads those of `jaxkfac train`"
        is_data = any(suffix in (".jsonl", ".parquet", ".arrow") for suffix in path.suffixes)
        return "a file of texts" if is_data else None
    of_train = next((name for name in ("kfac", "adamw") if numbered_files(path / name)), None)
    saved = next((name for name in ("adapter", "model") if (path / name).is_dir()), None)
    ways = {
        "adapter": "`jaxkfac analyze` and `jaxkfac adapter inspect` read the adapter",
        "model": "`jaxkfac finetune`, `jaxkfac influence` and `jaxkfac analyze` read the model",
    }
    if (path / "influence.json").exists() or (path / "stages").is_dir():
        return "the output folder of `jaxkfac influence`, which reads it with --resume or --bases"
    if (path / "analysis.json").exists():
        return "the output folder of `jaxkfac analyze`, which reads it with --resume"
    if (path / "adapter_config.json").exists():
        return (
            "an adapter: `jaxkfac analyze`, `jaxkfac adapter inspect` and `jaxkfac finetune "
            "--adapter.start` read it"
        )
    if of_train is not None:
        return "the output folder of `jaxkfac train`, which `jaxkfac analyze` reads"
    if saved is not None and (path / "checkpoints").is_dir():
        return f"the output folder of `jaxkfac finetune`: {ways[saved]} in {path / saved}"
    if (path / "checkpoints").is_dir():
        return (
            "the output folder of a `jaxkfac finetune` that has not ended: continue with --resume"
        )
    if numbered_files(path):
        return "a folder of checkpoints: `jaxkfac analyze` reads those of `jaxkfac train`"
    if (path / "config.json").exists():
        return (
            "a pretrained model, which `jaxkfac finetune`, `jaxkfac influence` and `jaxkfac "
            "analyze` read"
        )
    return None


class ModelSource(NamedTuple):
    """A pretrained model, and perhaps an adapter of it.

    Attributes:
        model: A known name, a folder or a .gguf file.
        adapter: Folder of the adapter.
    """

    model: str
    adapter: Path | None = None


def model_source(path: Path, base: Path | None = None) -> ModelSource | None:
    """The pretrained model at a path, or ``None`` where there is something else or nothing.

    Args:
        path: A model, the folder of an adapter, or the output folder of `jaxkfac finetune`.
        base: The base model of an adapter; by default the one that its adapter_config.json names.

    Raises:
        FileNotFoundError: the base model of an adapter is not known or not on this machine.
    """
    if not path.is_dir():
        named = str(path) in MODEL_NAMES and not path.exists()
        return ModelSource(str(path)) if named or path.suffix == ".gguf" else None
    if (path / "config.json").exists():
        return ModelSource(str(path))
    config = path / "adapter_config.json"
    if config.exists():
        named_base = base or json.loads(config.read_text()).get("base_model_name_or_path")
        if named_base is None or model_source(Path(named_base)) is None:
            which = "its base model" if named_base is None else f"its base model {named_base}"
            raise FileNotFoundError(
                f"{path} is an adapter, and {which} is not known here: give the model's folder or "
                ".gguf file as --base"
            )
        return ModelSource(str(named_base), path)
    for name in ("adapter", "model"):
        if (path / name).is_dir():
            return model_source(path / name, base)
    return ModelSource(str(path)) if any(path.glob("*.safetensors")) else None


def check_records(data: str) -> None:
    """Refuse data that are neither embedded nor at a path that exists.

    Raises:
        FileNotFoundError: names the path.
    """
    if data not in DATA_NAMES and not Path(data).exists():
        raise FileNotFoundError(
            f"expected a file of records at {data}, which does not exist"
            f"{_nearest(data, DATA_NAMES)}"
        )


def check_file(option: str, path: Path) -> None:
    """Refuse a path without a file.

    Raises:
        FileNotFoundError: names the option and says what is there.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{option} {path}: expected a file at that path, which {absent(path)}"
        )


def check_program(option: str, name: str) -> None:
    """Refuse a program that is neither a path nor on the search path.

    Raises:
        FileNotFoundError: names the option.
    """
    if shutil.which(name) is None:
        raise FileNotFoundError(f"{option} {name}: there is no such program")


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
        "expected what `jaxkfac train` has written, such as runs/digits or runs/digits/kfac/1320, "
        "or the output folder of a `jaxkfac finetune` that has ended"
    )
    kind = kind_of(path)
    if path.is_file():
        return FileNotFoundError(
            f"no checkpoint at {path}, which is {kind or 'a file'}: {expected}; "
            "or a pretrained model: a folder with config.json, a .gguf file or smollm2, with the "
            "texts as --data"
        )
    if not path.exists():
        near = _nearest(str(path))
        return FileNotFoundError(f"no checkpoint at {path}, which does not exist{near}; {expected}")
    if kind is not None:
        return FileNotFoundError(f"no checkpoint at {path}, which is {kind}")
    return FileNotFoundError(f"no checkpoint at {path}, which holds {_entries(path)}; {expected}")
