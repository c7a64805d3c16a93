"""The best evaluation is what is saved, and a run stops when there is no better one."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxkfac as jk
from jaxkfac.files import Archive
from jaxkfac.jobs.cli import main
from jaxkfac.jobs.cli._checkpoint import load_checkpoint
from jaxkfac.jobs.cli._paths import find_checkpoint
from jaxkfac.jobs.cli.finetune import _run as run_module
from jaxkfac.jobs.cli.finetune._exam import DecoderExaminer
from jaxkfac.jobs.cli.finetune._watch import BestKept
from jaxkfac.jobs.data.text._encode_test import Letters
from jaxkfac.jobs.models import Decoder, DecoderConfig, Pretrained
from jaxkfac.jobs.report import ExamRecord, FinetuneRecords

CONFIG = DecoderConfig(
    vocabulary=128, width=16, hidden=24, depth=2, num_heads=2, num_kv_heads=1, head_size=8,
    context=128, eos_ids=(2,),
)  # fmt: skip
CHAT = '{"messages": [{"role": "user", "content": "%s"}, {"role": "assistant", "content": "%s"}]}'
WORDS = [
    *("--steps", "6", "--batch-size", "4", "--adapter.rank", "2", "--max-length", "40"),
    *("--questions", "0", "--samples", "0", "--checkpoint-every", "2", "--log"),
    *("--adamw.learning-rate", "0.02"),
]
EVERY = ("--evaluate-every", "1")
pytestmark = pytest.mark.standard_promotion  # optax.adamw needs it


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    lines = [CHAT % (f"what is {i}", f"it is {i}") for i in range(12)]
    (folder / "train.jsonl").write_text("\n".join(lines))
    (folder / "validation.jsonl").write_text("\n".join(lines[:4]))
    return folder


@pytest.fixture
def run(monkeypatch, data, tmp_path):
    """``run(*words, output=)``, without page and curvature."""
    apply_fn, params = jk.from_nnx(Decoder(CONFIG, remat=False, rngs=nnx.Rngs(0)))

    def load_model(experiment):
        own = jax.tree.map(jnp.copy, params)
        return Pretrained(CONFIG, apply_fn, own, Letters())

    monkeypatch.setattr(run_module, "load_model", load_model)
    monkeypatch.setattr(run_module, "finetune_page", lambda **options: options["lead"])
    monkeypatch.setattr(run_module, "resolve_pattern", lambda *_: None)

    def call(*words, output=tmp_path / "run"):
        return main(["finetune", *WORDS, "--data", str(data), "--output", str(output), *words])

    return call


def pretend(monkeypatch, losses):
    """Have the held-out loss of each update be this; the first is of no update."""
    original = DecoderExaminer.exam

    def exam(self, step, adapters):
        return original(self, step, adapters)._replace(loss=losses[step])

    monkeypatch.setattr(DecoderExaminer, "exam", exam)


def saved(output):
    adapters, _ = jk.lslora.load(output / "adapter")
    return {f"{name}/b": np.asarray(x.b) for name, x in adapters.items()}


def assert_of_update(output, step, whole):
    """What is saved is what the checkpoint of that update holds."""
    held = load_checkpoint(whole / "checkpoints" / str(step)).leaves
    for name, value in saved(output).items():
        np.testing.assert_array_equal(value, held[f"params/{name}"], err_msg=name)


def metrics(output):
    return json.loads((output / "metrics.json").read_text())


@pytest.mark.exhaustive
def test_the_best_of_the_evaluations_is_saved_and_named(run, monkeypatch, tmp_path, capsys):
    """Update 0 does not count, and the first of two equal ones does."""
    pretend(monkeypatch, [0.5, 3.0, 2.0, 2.5, 2.0, 2.2, 2.6])
    output = tmp_path / "run"
    assert run(*EVERY) == 0
    assert metrics(output)["best"] == {"step": 2, "loss": 2.0}
    assert "saved: update 2, with validation loss 2.0000, of 6" in capsys.readouterr().out
    assert "What is saved is the adapter of update 2" in (output / "report.html").read_text()
    assert [path.name for path in (output / "checkpoints" / "best").iterdir()] == ["2"]
    assert run(*EVERY, "--steps", "2", "--schedule", "constant", output=tmp_path / "x") == 0
    short = ("--steps", "6", "--schedule", "constant")
    assert run(*EVERY, *short, output=tmp_path / "y") == 0
    assert_of_update(tmp_path / "y", 2, tmp_path / "x")


@pytest.mark.exhaustive
def test_what_the_best_state_replaces_is_deleted_before_it_is_read(run, monkeypatch):
    """Else all parameters would be in memory twice."""
    held, alive = [], []
    restored, read = BestKept.restored, Archive.read

    def noted(self, state):
        held.extend(jax.tree.leaves(state.adapters))
        return restored(self, state)

    def reading(self, name):
        alive.extend(x for x in held if not x.is_deleted())
        return read(self, name)

    pretend(monkeypatch, [0.5, 3.0, 2.0, 2.5, 2.0, 2.2, 2.6])
    monkeypatch.setattr(BestKept, "restored", noted)
    monkeypatch.setattr(Archive, "read", reading)
    assert run(*EVERY) == 0
    assert held and not alive


@pytest.mark.exhaustive
def test_without_evaluate_every_the_last_update_is_saved(run, monkeypatch, tmp_path):
    pretend(monkeypatch, [0.5] + [9.0] * 6)
    assert run() == 0
    assert metrics(tmp_path / "run")["best"] is None
    assert_of_update(tmp_path / "run", 6, tmp_path / "run")


@pytest.mark.exhaustive
def test_a_run_stops_after_as_many_evaluations_as_patience_says(run, monkeypatch, tmp_path):
    pretend(monkeypatch, [9.0, 3.0, 2.0, 2.5, 2.0, 1.0, 1.0])
    output = tmp_path / "run"
    assert run(*EVERY, "--patience", "2") == 0
    found = metrics(output)
    assert len(found["records"]["losses"]) == 4 and found["best"]["step"] == 2
    assert find_checkpoint(output / "checkpoints").name == "4"
    assert run(*EVERY, "--patience", "2", "--resume") == 0  # and has nothing left to do
    assert len(metrics(output)["records"]["losses"]) == 4
    assert run(*EVERY, "--resume") == 0
    assert len(metrics(output)["records"]["losses"]) == 6
    assert metrics(output)["best"]["step"] == 5


@pytest.mark.exhaustive  # _killed_test.py kills a run, and tests beside this one keep the best
@pytest.mark.parametrize("killed", [2, 4])
def test_a_run_resumed_saves_the_best_of_an_uninterrupted_one(run, killed, monkeypatch, tmp_path):
    """Killed behind the best evaluation, whose file is there, and before it."""
    losses = [9.0, 3.0, 2.5, 2.0, 2.2, 2.2, 2.6]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    pretend(monkeypatch, losses)
    assert run(*EVERY, output=whole) == 0

    class Killed(BaseException):
        """Of no kind that the command knows."""

    def exam(self, step, adapters):
        if step > killed:
            raise Killed
        return ExamRecord(step, losses[step], {}, {})

    with monkeypatch.context() as patch:
        patch.setattr(DecoderExaminer, "exam", exam)
        with pytest.raises(Killed):
            run(*EVERY, output=parts)
    assert find_checkpoint(parts / "checkpoints").name == str(killed)
    assert run(*EVERY, "--resume", output=parts) == 0
    assert metrics(parts)["best"] == metrics(whole)["best"] == {"step": 3, "loss": 2.0}
    for name, value in saved(whole).items():
        np.testing.assert_array_equal(saved(parts)[name], value)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--patience", "2"), "give --evaluate-every with it"),
        ((*EVERY, "--patience", "0"), "patience must be at least 1"),
        (
            (*EVERY, "--patience", "1", "--data", "elements", "--max-length", "100"),
            "records to validate with",
        ),
    ],
)
def test_patience_without_what_it_counts_is_refused(words, message, run, capsys):
    assert run(*words) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_evaluations_that_are_not_finite_or_of_no_update_are_never_the_best():
    exams = [ExamRecord(step, loss, {}, {}) for step, loss in enumerate((0.1, None, 2.0, 1.0))]
    nan = ExamRecord(4, float("nan"), {}, {})
    assert FinetuneRecords(exams=[*exams, nan]).best == exams[3]
    assert FinetuneRecords(exams=exams[:2]).best is None
