"""Files of the commands train, finetune, analyze and influence, each at its smallest size.

A run writes reports too, which nothing reads again; of its output only what is read is kept.
"""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from jaxkfac.jobs.cli import main
from jaxkfac.jobs.cli._analyze import restore
from jaxkfac.jobs.cli._checkpoint import load_checkpoint
from jaxkfac.jobs.cli.analysis.conftest import CONFIG, write_model, write_texts
from tests.written._kind import Kind
from tests.written._net import Readings, of_factors, of_tree, under

_MODEL = CONFIG | {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
_WORDS = {
    "train": [
        *("--optimizer", "kfac", "--epochs", "2", "--checkpoint-every", "1"),
        *("--model.width", "4", "--model.hidden", "4", "--model.depth", "2"),
        *("--model.num-heads", "2", "--model.patch-size", "4"),
        *("--batch-size", "200", "--gradient-accumulation-steps", "2"),
    ],
    "finetune": [
        *("--model", "model", "--data", "rows", "--loss-on", "all", "--dtype", "float32"),
        *("--steps", "2", "--batch-size", "4", "--max-length", "32", "--optimizer", "kfac"),
        *("--adapter.rank", "2", "--adapter.target", ".*(q_proj|down_proj).*"),
        *("--samples", "0", "--checkpoint-every", "1", "--evaluate-every", "1", "--log"),
    ],
    "analyze": [
        *("model", "--data", "texts.jsonl", "--max-length", "16", "--batch-size", "4"),
        *("--max-dense", "64", "--lanczos", "1", "--lanczos-steps", "3", "--keep-factors"),
    ],
    "influence": [
        *("model", "--train", "texts.jsonl", "--queries", "queries.jsonl", "--max-length", "16"),
        *("--batch-size", "4", "--top", "2", "--query-rank", "None", "--dtype", "float32"),
        *("--layers", ".*down_proj.*", "--damping", "0.1"),
    ],
}  # fmt: skip


@contextlib.contextmanager
def _inputs() -> Iterator[Path]:
    """A working folder with a model and texts, which commands name by relative paths."""
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        folder = Path(name)
        write_model(folder / "model", config=_MODEL)
        write_texts(folder / "texts.jsonl")
        write_texts(folder / "queries.jsonl", 2)
        (folder / "rows").mkdir()
        write_texts(folder / "rows" / "train.jsonl", 8)
        write_texts(folder / "rows" / "validation.jsonl", 2)
        yield folder


def _ran(command: str, *words: str) -> Path:
    """The output of a command, run in this folder."""
    with jax.numpy_dtype_promotion("standard"):  # optax needs it
        code = main([command, *_WORDS[command], "--output", "run", *words])
    assert code == 0, f"{command} ended with {code}"
    return Path("run")


def _resumed(command: str, saved: Path, leave_out: Sequence[str] = ()) -> Path:
    """The output of a run that continues from saved files, without some of them."""
    shutil.copytree(saved, "run")
    for name in leave_out:
        path = Path("run") / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return _ran(command, "--resume")


def _kind(
    command: str,
    kept: Callable[[Path], Sequence[Path]],
    readings: Callable[[Path], Readings],
    go_on: Callable[[Path], Readings],
) -> Kind:
    def write(folder: Path) -> Path:
        with _inputs():
            output = _ran(command)
            for path in kept(output):
                target = folder / path.relative_to(output)
                target.parent.mkdir(parents=True, exist_ok=True)
                (shutil.copytree if path.is_dir() else shutil.copy)(path, target)
        return folder

    def used(folder: Path) -> Readings:
        with _inputs():
            return go_on(folder.resolve())

    return Kind(write, lambda folder: folder.resolve(), readings, used)


# ---------------- training


def _first_checkpoint(folder: Path) -> list[Path]:
    """The older of two checkpoints, from which the run can go on."""
    return [
        min((path for path in folder.iterdir() if path.name.isdigit()), key=lambda x: int(x.name))
    ]


def _of_train(folder: Path) -> Readings:
    checkpoint = load_checkpoint(folder / "kfac")
    restored = restore(checkpoint)
    found = of_factors(restored.factors) | of_tree(restored.params, "params")
    found["losses"] = np.asarray(checkpoint.records["losses"])
    return found | {"step": np.asarray(checkpoint.step)}


def _trained_on(folder: Path) -> Readings:
    output = _resumed("train", folder)
    return {k: v for k, v in _of_train(output).items() if v.size < 1000}


def _of_finetune(folder: Path) -> Readings:
    checkpoint = load_checkpoint(folder / "checkpoints")
    found = {k: v for k, v in checkpoint.leaves.items() if k.startswith("params")}
    found["losses"] = np.asarray(checkpoint.records["losses"])
    return found | {"step": np.asarray(checkpoint.step)}


def _tuned_on(folder: Path) -> Readings:
    return _of_finetune(_resumed("finetune", folder))


# ---------------- analyses and influence


def _spectra(output: Path) -> Readings:
    record = json.loads((output / "metrics.json").read_text())
    return {
        f"{x['layer']} {x['side']} {x['slice']}": np.asarray(x["raw"]) for x in record["spectra"]
    }


def _of_analysis(folder: Path) -> Readings:
    """What the command shows if there is nothing left to compute."""
    with _inputs():
        output = _resumed("analyze", folder)
        record = json.loads((output / "metrics.json").read_text())
        exact = record["exact"]
        return (
            _spectra(output)
            | {"loss": np.asarray(record["texts"]["loss"])}
            | under(
                "exact",
                {k: np.asarray(v) for k, v in exact.items() if isinstance(v, int | float | list)},
            )
        )


def _decomposed_again(folder: Path) -> Readings:
    """Eigenvalues of the factors in the folder."""
    done = [f"spectra/{path.name}" for path in (folder / "spectra").iterdir()]
    return _spectra(_resumed("analyze", folder, done))


def _of_influence(folder: Path) -> Readings:
    with _inputs():
        output = _resumed("influence", folder, ["scores.npy"])
        return {"stored": np.load(folder / "scores.npy"), "shown": np.load(output / "scores.npy")}


def _scored_again(folder: Path) -> Readings:
    """Scores with the bases in the folder, and with bases of the factors in the folder."""
    found = {}
    for name, left_out in (("bases", ["scores"]), ("factors", ["scores", "bases"])):
        output = _resumed("influence", folder, [f"stages/{x}" for x in left_out])
        found[name] = np.load(output / "scores.npy")
        shutil.rmtree(output)
    return found


RUNS = {
    "train": _kind("train", lambda x: _first_checkpoint(x / "kfac"), _of_train, _trained_on),
    "finetune": _kind(
        "finetune",
        lambda x: [
            *_first_checkpoint(x / "checkpoints"),
            x / "checkpoints" / "best" / "1",
            x / "adapter",
        ],
        _of_finetune,
        _tuned_on,
    ),
    "analysis": _kind(
        "analyze",
        lambda x: [
            path for path in x.iterdir() if path.name not in ("metrics.json", "report.html")
        ],
        _of_analysis,
        _decomposed_again,
    ),
    "influence": _kind(
        "influence", lambda x: [x / "stages", x / "scores.npy"], _of_influence, _scored_again
    ),
}
