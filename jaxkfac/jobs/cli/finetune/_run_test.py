"""Whole runs of a tiny random decoder: what they write, how they stop and go on."""

import functools
import json
import os
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxkfac as jk
from jaxkfac.jobs.cli import _progress, main
from jaxkfac.jobs.cli._checkpoint import load_checkpoint
from jaxkfac.jobs.cli._paths import find_checkpoint
from jaxkfac.jobs.cli.finetune import _loop
from jaxkfac.jobs.cli.finetune import _run as run_module
from jaxkfac.jobs.cli.finetune._exam import DecoderExaminer
from jaxkfac.jobs.cli.finetune._family import dtype_of
from jaxkfac.jobs.cli.finetune._load import load_text
from jaxkfac.jobs.cli.finetune._loop import MicroStep
from jaxkfac.jobs.cli.finetune._watch import Watch
from jaxkfac.jobs.data.text._encode_test import Letters
from jaxkfac.jobs.models import Decoder, DecoderConfig, Pretrained
from jaxkfac.lslora import nf4
from jaxkfac.memory import duplicate_report

CONFIG = DecoderConfig(
    vocabulary=128, width=16, hidden=24, depth=2, num_heads=2, num_kv_heads=1, head_size=8,
    context=128, tied_head=True, eos_ids=(2,),
)  # fmt: skip
TINY = [
    *("--steps", "6", "--batch-size", "4", "--questions", "6", "--adapter.rank", "2"),
    *("--checkpoint-every", "2", "--diagnose-every", "2", "--samples", "2"),
    *("--sample-tokens", "3", "--adamw.learning-rate", "0.02"),
]
pytestmark = pytest.mark.standard_promotion  # optax.adamw needs it


@pytest.fixture(scope="module")
def decoder():
    apply_fn, params = jk.from_nnx(Decoder(CONFIG, rngs=nnx.Rngs(0)))
    return Pretrained(CONFIG, apply_fn, params, Letters(), "models/tiny")


def use(decoder, patch):
    """Have runs load this decoder."""

    def load_model(experiment):
        own = jax.tree.map(jnp.copy, decoder.params)  # casting once deletes what it reads
        return decoder._replace(params=jk.cast_once(own, dtype_of(experiment)))

    patch.setattr(run_module, "load_model", load_model)


@pytest.fixture
def run(decoder, monkeypatch, tmp_path):
    """``run(*words)`` in a folder of its own."""
    use(decoder, monkeypatch)

    def call(*words, output=tmp_path):
        return main(["finetune", *TINY, "--output", str(output), *words])

    return call


def leave_out(patch):
    """Neither page nor curvature, which take longer than such a run; one run has both."""
    patch.setattr(run_module, "finetune_page", lambda **_: "")
    patch.setattr(run_module, "resolve_pattern", lambda *_: None)


@pytest.fixture
def plain(monkeypatch):
    leave_out(monkeypatch)


@pytest.fixture(scope="module")
def finished(decoder, tmp_path_factory):
    """A plain run without questions and samples, to be read or copied."""
    output = tmp_path_factory.mktemp("finished")
    words = (*TINY, "--samples", "0", "--questions", "0")
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        use(decoder, patch)
        leave_out(patch)
        assert main(["finetune", *words, "--output", str(output)]) == 0
    return output


def metrics(folder):
    return json.loads((folder / "metrics.json").read_text())


def records(folder):
    return metrics(folder)["records"]


@pytest.mark.slow
def test_a_run_writes_report_metrics_adapter_events_and_checkpoints(run, tmp_path, capsys):
    assert run() == 0
    found = metrics(tmp_path)
    kept = found["records"]
    assert len(kept["losses"]) == len(kept["tokens"]) == len(kept["seconds"]) == 6
    assert kept["examples"] == [4] * 6
    speed = found["samples_per_second"]
    assert speed == pytest.approx(24 / sum(kept["seconds"]))
    assert 0 < found["host_memory"]["resident"] <= found["host_memory"]["peak"]
    assert found["config"]["attention"] == "xla"
    assert kept["losses"][-1] < kept["losses"][0]
    assert [exam["step"] for exam in kept["exams"]] == [0, 6]
    assert all(len(exam["correct"]["pmi"]) == 6 for exam in kept["exams"])
    for low, value, high in (
        (x[1], x[0], x[2]) for e in kept["exams"] for x in e["accuracy"].values()
    ):
        assert 0 <= low <= value <= high <= 1
    assert [x["step"] for x in kept["fourier"]] == [0, 2, 4, 6]
    start = kept["fourier"][0]["layers"]["model/layers/self_attn/qkv_proj/kernel"]
    assert start["coefficients"] == [[0.0, 1.0, 0.0, 0.0]] * 2 and start["deviation"] == [0.0] * 2
    assert set(found["comparison"]) == {"sum", "per_token", "per_byte", "pmi"}
    assert [s["step"] for s in kept["samples"]] == [0, 0, 6, 6]
    assert found["spectra"] and found["capacity"]["layers"]
    assert not [row for row in found["coverage"] if row["reason"]]
    parts = {row["name"].split("/")[-1] for row in found["coverage"]}
    assert parts == {"a", "b", "coefficients", "sigma"}
    page = (tmp_path / "report.html").read_text()
    for word in ("Nonlinearity of the adapter", "McNemar", "Capacity", "Coverage", "tokens/s"):
        assert word in page
    assert f">{speed:,.1f}<" in page and "Main memory: resident" in page
    assert find_checkpoint(tmp_path / "checkpoints").name == "6"
    assert list((tmp_path / "tensorboard").glob("events*"))
    record = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert record["task_type"] == "CAUSAL_LM" and record["base_model_name_or_path"] == "models/tiny"
    adapters, config = jk.lslora.load(tmp_path / "adapter")
    assert config.rank == 2 and len(adapters) == 4
    shown = capsys.readouterr()
    assert "accuracy, pmi" in shown.out and "tokens/s" in shown.err
    assert "records" in shown.err and "learnt" in shown.err
    assert shown.err.count(" s an update, 2 updates)") == 1  # four of six have been measured


@pytest.mark.slow
def test_the_first_loss_is_that_of_the_base_model(finished, decoder):
    problem_batch = _first_batch(decoder)
    logits = decoder.apply_fn(decoder.params, jnp.asarray(problem_batch.ids))
    logs = np.asarray(jax.nn.log_softmax(logits))
    picked = np.take_along_axis(logs, problem_batch.targets[..., None], -1)[..., 0]
    expected = -picked[problem_batch.mask].mean()
    assert records(finished)["losses"][0] == pytest.approx(expected, rel=1e-5)


def _first_batch(decoder):
    from jaxkfac.jobs.cli.finetune._options import Finetuning
    from jaxkfac.jobs.data.text import TokenBatches, encode_records

    experiment = Finetuning(batch_size=4)
    text = load_text(experiment)
    encoded = encode_records(text.train, decoder.tokenizer, max_length=128)
    return TokenBatches.padded(encoded.examples, batch_size=4, pad_id=0, seed=0).at(0)


def assert_same_end(one, other):
    a, b = load_checkpoint(one / "checkpoints"), load_checkpoint(other / "checkpoints")
    assert a.step == b.step == 6
    assert a.leaves.keys() == b.leaves.keys()
    for path in a.leaves:
        np.testing.assert_array_equal(a.leaves[path], b.leaves[path], err_msg=path)
    for name in ("losses", "penalties", "tokens", "exams", "fourier", "samples"):
        assert a.records[name] == b.records[name], name


@pytest.mark.exhaustive  # _train_test has Ctrl-C in the slow suite, _killed_test a finetuning
@pytest.mark.parametrize(
    "words",
    [
        ("--gradient-accumulation-steps", "2", "--adapter.dropout", "0.1"),
        (),
        (
            *("--optimizer", "kfac", "--batching", "pack", "--max-length", "128"),
            *("--questions", "0", "--samples", "0"),
        ),
    ],
    ids=["accumulated-dropout", "adamw", "kfac-packed"],
)
def test_a_run_resumed_after_ctrl_c_gives_the_bits_of_an_uninterrupted_one(
    words, run, plain, tmp_path, monkeypatch, capsys
):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(*words, output=whole) == 0
    with monkeypatch.context() as patch:
        press_in(patch, update=3)
        assert run(*words, "--log-every", "3", output=parts) == 130
    assert find_checkpoint(parts / "checkpoints").name == "3"
    said = capsys.readouterr().err
    assert "finishing the update, then stopping" in said
    assert "continue with: jaxkfac finetune" in said
    assert run(*words, "--resume", "--log-every", "1", output=parts) == 0
    assert_same_end(whole, parts)


@pytest.mark.exhaustive
def test_a_logging_interval_is_read_once_and_the_next_batch_is_there_before(
    run, plain, tmp_path, monkeypatch, reads
):
    words = ("--steps", "13", "--log-every", "4", "--checkpoint-every", "50", "--samples", "0")
    words += ("--questions", "0", "--gradient-accumulation-steps", "2")
    before, prepared, ahead = {}, [], {}
    original, prepare = Watch.look, _loop.prepare

    def look(self, step, adapters):
        before[step], ahead[step] = len(reads), prepared[-1]
        return original(self, step, adapters)

    def noted(problem, number, batches):
        prepared.append(number)
        return prepare(problem, number, batches)

    monkeypatch.setattr(Watch, "look", look)
    monkeypatch.setattr(_loop, "prepare", noted)
    assert run(*words) == 0
    found = [before[step + 1] - before[step] for step in range(1, 13)]
    assert found == [1 if step % 4 == 0 else 0 for step in range(1, 13)]
    assert prepared == list(range(26))
    assert ahead == {step: min(2 * step, 25) for step in range(1, 14)}
    assert len(records(tmp_path)["losses"]) == 13
    assert [x["step"] for x in records(tmp_path)["fourier"]] == [0, 2, 4, 6, 8, 10, 12, 13]


@pytest.mark.exhaustive
def test_the_state_is_donated_to_the_step(run, plain, monkeypatch):
    found = []
    original = MicroStep.program

    def program(self, params, adapters, optimizer, *rest):
        compiled = original(self, params, adapters, optimizer, *rest)
        state = sum(x.nbytes for x in jax.tree.leaves((adapters, optimizer)))
        found.append((compiled.memory_analysis().alias_size_in_bytes, state))
        return compiled

    monkeypatch.setattr(MicroStep, "program", program)
    assert run("--steps", "2", "--samples", "0", "--questions", "0") == 0
    assert len(found) == 2 and all(aliased >= state for aliased, state in found)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_second_copy_of_the_model_is_an_error(run, plain, monkeypatch, capsys):
    few = functools.partial(duplicate_report, min_bytes=4096)
    monkeypatch.setattr(_progress, "duplicate_report", few)
    words = ("--steps", "1", "--samples", "0", "--questions", "0")
    assert run(*words) == 0
    kept = []
    whole = run_module.load_model

    def load_model(experiment):
        found = whole(experiment)
        kept.append(jax.tree.map(jnp.copy, found.params))
        return found

    monkeypatch.setattr(run_module, "load_model", load_model)
    assert run(*words, "--overwrite") == 2
    message = capsys.readouterr().err
    assert "params/model/embed_tokens/embedding = float32[128, 16] on" in message
    assert "8 KiB too much" in message


def press_in(monkeypatch, *, update, times=1):
    """Ctrl-C while an update is under way, when its arrays have been donated already."""
    original = Watch.look

    def look(self, step, adapters):
        if step == update:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
        return original(self, step, adapters)

    monkeypatch.setattr(Watch, "look", look)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_an_update_that_a_second_ctrl_c_breaks_off_leaves_the_checkpoint_before(
    run, plain, tmp_path, monkeypatch, capsys
):
    press_in(monkeypatch, update=4, times=2)
    assert run("--questions", "0", "--samples", "0") == 130
    assert "the last checkpoint counts; it is from update 2" in capsys.readouterr().err
    assert len(load_checkpoint(tmp_path / "checkpoints").records["losses"]) == 2


@pytest.mark.exhaustive
def test_an_examination_that_ctrl_c_breaks_off_is_held_after_resuming(
    run, plain, tmp_path, monkeypatch
):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    words = ("--evaluate-every", "3")
    assert run(*words, output=whole) == 0
    original = DecoderExaminer.exam

    def exam(self, step, adapters):
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, step, adapters)

    with monkeypatch.context() as patch:
        patch.setattr(DecoderExaminer, "exam", exam)
        assert run(*words, output=parts) == 130
    assert find_checkpoint(parts / "checkpoints").name == "3"
    assert run(*words, "--resume", output=parts) == 0
    assert_same_end(whole, parts)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "words",
    [
        ("--optimizer", "kfac", "--schedule", "constant"),
        ("--adapter.fourier-placement", "none", "--schedule", "linear", "--adapter.split"),
        ("--adapter.fourier-placement", "bottleneck", "--clip-norm", "None"),
        ("--batching", "pack", "--max-length", "128", "--loss-on", "all"),
        ("--num-lengths", "3", "--style", "plain"),
        ("--dtype", "bfloat16"),
    ],
    ids=lambda words: words[1],
)
def test_the_loss_falls(words, run, plain, tmp_path):
    assert run(*words, "--steps", "8", "--samples", "0", "--questions", "0") == 0
    losses = records(tmp_path)["losses"]
    assert np.mean(losses[-2:]) < np.mean(losses[:2])
    # qkv, o, gate_up, down; or q, k, v, o, gate, up, down
    saved, _ = jk.lslora.load(tmp_path / "adapter")
    assert len(saved) == (7 if "--adapter.split" in words else 4)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_base_in_four_bits_is_trained_on(run, plain, decoder, tmp_path, monkeypatch):
    params = nf4.quantize(decoder.params, layers=".*_proj/kernel", stack=1, block=8)
    small = decoder._replace(params=params)
    monkeypatch.setattr(run_module, "load_model", lambda experiment: small)
    assert run("--steps", "8", "--samples", "1") == 0
    losses = records(tmp_path)["losses"]
    assert np.mean(losses[-2:]) < np.mean(losses[:2])


@pytest.mark.exhaustive
@pytest.mark.slow
def test_two_micro_batches_are_one_update_of_both(run, plain, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    words = ("--steps", "2", "--samples", "0", "--questions", "0", "--clip-norm", "None")
    assert run(*words, "--batch-size", "2", "--gradient-accumulation-steps", "2", output=two) == 0
    assert run(*words, "--batch-size", "4", output=one) == 0
    # The same order of records: an epoch's batches are pieces of one permutation.
    np.testing.assert_allclose(records(one)["losses"], records(two)["losses"], rtol=1e-4)


CHAT = '{"messages": [{"role": "user", "content": "%s"}, {"role": "assistant", "content": "%s"}]}'


@pytest.fixture
def folder(tmp_path):
    """A local data set with its own questions."""
    data = tmp_path / "data"
    data.mkdir()
    lines = [CHAT % (f"what is {i}", f"it is {i}") for i in range(12)]
    (data / "train.jsonl").write_text("\n".join([*lines, CHAT % ("long " * 40, "x")]))
    (data / "validation.jsonl").write_text("\n".join(lines[:5]))
    return data


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_local_folder_is_trained_on_and_what_does_not_fit_is_said(
    run, plain, folder, tmp_path, capsys
):
    words = ("--data", str(folder), "--questions", "0", "--max-length", "60", "--epochs", "2")
    assert run(*words, "--adamw.learning-rate", "0.05", "--evaluate-every", "2") == 0
    kept = records(tmp_path)
    assert len(kept["losses"]) == 2 * (12 // 4)
    assert [exam["step"] for exam in kept["exams"]] == [0, 2, 4, 6]
    losses = [exam["loss"] for exam in kept["exams"]]
    assert losses[-1] < losses[0]
    assert "1 cut, 1 left out" in capsys.readouterr().out.replace("\n", " ")
    found = metrics(tmp_path)
    assert found["comparison"] == {} and found["data"]["rows"] == 13


@pytest.mark.exhaustive
@pytest.mark.slow
def test_epochs_end_with_an_update_of_what_is_left(run, plain, folder, tmp_path):
    """Three micro-batches of four records: an update of two, and one of the third."""
    words = ("--data", str(folder), "--questions", "0", "--samples", "0", "--max-length", "60")
    words += ("--gradient-accumulation-steps", "2", "--epochs", "1")
    assert run(*words) == 0
    kept = records(tmp_path)
    assert len(kept["losses"]) == 2
    lines = (folder / "train.jsonl").read_text().splitlines()[:12]
    learnt = [len(json.loads(line)["messages"][1]["content"]) + 1 for line in lines]
    assert sum(kept["learnt"]) == sum(learnt) and kept["learnt"][1] < kept["learnt"][0]
    moved = load_checkpoint(tmp_path / "checkpoints").leaves
    steps = [int(x) for path, x in moved.items() if path.endswith("gradient_step")]
    assert steps == [2]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_resumed_run_says_that_its_data_have_changed(run, plain, folder, capsys):
    words = ("--data", str(folder), "--questions", "0", "--samples", "0", "--max-length", "60")
    assert run(*words, "--steps", "2") == 0
    file = folder / "train.jsonl"
    file.write_text(file.read_text().replace("it is 3", "it is 4"))
    assert run(*words, "--steps", "2", "--resume") == 2
    assert "the data have changed: CRC-32" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["train", "validation"])
def test_ids_beyond_the_vocabulary_are_named(name, run, folder, capsys):
    with (folder / f"{name}.jsonl").open("a") as file:
        file.write("\n" + CHAT % ("é", "x"))
    assert run("--data", str(folder), "--max-length", "60") == 2
    message = "the tokenizer gives id 233, and the model has 128 tokens"
    assert message in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--adapter.target", ".*q_prj/kernel"), "matches no layer; the nearest names are"),
        (("--curvature", ".*q_prj/kernel"), "matches no layer in full; the nearest names are"),
        (("--data", "nowhere"), "nowhere, which does not exist"),
        (("--data", "{folder}", "--max-length", "4"), "raise max_length"),
        (("--data", "{folder}", "--max-length", "4000"), "longer than the model's context, 128"),
        (
            ("--data", "{folder}", "--max-length", "60", "--batch-size", "99"),
            "batch_size must lie in 1 .. ",
        ),
        (("--questions", "100000"), "count must lie in 1 .. "),
        (("--questions", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--steps", "0"), "steps must be at least 1"),
        (("--warmup", "1"), "warmup"),
        (("--clip-norm", "0"), "clip_norm"),
        (("--evaluate-every", "0"), "evaluate_every"),
        (("--resume", "--overwrite"), "give one of them"),
        (("--adapter.rank", "0"), "rank=0"),
    ],
)
def test_a_wrong_option_is_explained_in_a_line_with_code_2(words, message, run, folder, capsys):
    words = [word.replace("{folder}", str(folder)) for word in words]
    assert run(*words) == 2
    captured = capsys.readouterr()
    assert message in captured.err.replace("\n", " ") and "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "train.jsonl:14: not JSON"),
        (CHAT[:-1], "train.jsonl:14: not JSON"),
        ('{"answer": 1}', "train.jsonl:14: expected the key"),
    ],
)
def test_a_malformed_line_stops_a_strict_run(line, message, run, folder, capsys):
    with (folder / "train.jsonl").open("a") as file:
        file.write("\n" + line)
    assert run("--data", str(folder), "--strict", "--max-length", "60") == 2
    assert message in capsys.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.slow
def test_malformed_lines_are_counted_with_their_numbers(run, plain, folder, tmp_path, capsys):
    for name in ("train", "validation"):
        with (folder / f"{name}.jsonl").open("a") as file:
            file.write("\n{\n[]")
    words = ("--data", str(folder), "--max-length", "60", "--questions", "0", "--samples", "0")
    assert run(*words, "--steps", "2") == 0
    found = metrics(tmp_path)["data"]
    assert found["bad"] == 2 and found["rows"] == 15
    assert "train.jsonl:14: not JSON" in found["bad_rows"][0]
    assert "train.jsonl:15: expected an object" in found["bad_rows"][1]
    said = capsys.readouterr()
    assert "2 bad rows left out, the first" in said.out.replace("\n", " ")
    assert "2 bad rows to validate with are left out" in said.err.replace("\n", " ")


FILES = ("--questions", "0", "--samples", "0", "--max-length", "60", "--shuffle-window", "5")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("--steps", "6"), marks=pytest.mark.exhaustive),
        ("--epochs", "2", "--batching", "pack", "--gradient-accumulation-steps", "2",
         "--batch-size", "2"),
    ],
    ids=["padded", "packed"],
)  # fmt: skip
def test_a_run_on_files_goes_on_at_the_exact_record(words, run, plain, folder, tmp_path):
    """Stopped in the middle of a window, of a pass and of an interval of readings."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    words = ("--data", str(folder), *FILES, *words, "--log-every", "4")
    assert run(*words, output=whole) == 0
    middle = sorted((whole / "checkpoints").iterdir(), key=lambda path: int(path.name))[-2]
    (parts / "checkpoints").mkdir(parents=True)
    (parts / "checkpoints" / middle.name).write_bytes(middle.read_bytes())
    assert run(*words, "--resume", output=parts) == 0
    a, b = load_checkpoint(whole / "checkpoints"), load_checkpoint(parts / "checkpoints")
    assert a.position == b.position and a.records["losses"] == b.records["losses"]
    for path in a.leaves:
        np.testing.assert_array_equal(a.leaves[path], b.leaves[path], err_msg=path)


def test_an_unknown_answer_key_is_named(run, folder, capsys):
    question = {"id": "q", "question": {"stem": "s", "choices": [
        {"text": "a", "label": "A"}, {"text": "b", "label": "B"}]}, "answerKey": "Z"}  # fmt: skip
    (folder / "test.jsonl").write_text(json.dumps(question))
    assert run("--data", str(folder), "--questions", str(folder / "test.jsonl")) == 2
    assert "test.jsonl:1: question 'q': the answer key 'Z'" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_a_question_beyond_the_context_is_named(run, plain, folder, capsys):
    question = {"id": "q", "question": {"stem": "s" * 200, "choices": [
        {"text": "a", "label": "A"}, {"text": "b", "label": "B"}]}, "answerKey": "A"}  # fmt: skip
    (folder / "test.jsonl").write_text(json.dumps(question))
    assert run("--data", str(folder), "--questions", str(folder / "test.jsonl"),
               "--max-length", "100") == 2  # fmt: skip
    assert "question 'q' takes" in capsys.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_loss_that_is_not_finite_names_its_step_when_its_interval_ends(
    run, plain, tmp_path, capsys
):
    wild = ("--adamw.learning-rate", "1e30", "--warmup", "0", "--questions", "0")
    assert run(*wild, "--samples", "0", "--checkpoint-every", "4") == 2
    message = capsys.readouterr().err
    assert "the loss of adamw is nan at step 1;" in message and "--adamw.learning-rate" in message
    assert find_checkpoint(tmp_path / "checkpoints") is None


@pytest.mark.exhaustive
def test_an_existing_run_is_kept_unless_overwriting_is_asked_for(
    run, plain, finished, tmp_path, capsys
):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    assert run() == 2
    assert "--resume" in capsys.readouterr().err
    assert run("--resume", "--samples", "0", "--questions", "0", "--json") == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 6
    assert run("--resume", "--adapter.rank", "3", "--questions", "0") == 2
    assert "option adapter.rank: 2 in the checkpoint, 3 requested" in capsys.readouterr().err
    newest = tmp_path / "checkpoints" / "6"
    newest.write_bytes(newest.read_bytes()[:-99])
    assert run("--resume", "--questions", "0") == 2
    message = capsys.readouterr().err.replace("\n", " ")
    assert f"{newest} is no checkpoint, or only a part of one" in message
    assert f"4 is whole: to continue from update 4, delete {newest}" in message


@pytest.mark.exhaustive
@pytest.mark.parametrize("words", [("--devices", "2"), ("--mesh", "model=2")])
@pytest.mark.parametrize("base", ["whole", "nf4"])
def test_two_devices_give_the_run_of_one(run, plain, decoder, tmp_path, monkeypatch, words, base):
    """A base that is sharded, in four bits too, and adapters that are not."""

    def load_model(experiment):
        own = jax.tree.map(jnp.copy, decoder.params)
        if base == "nf4":
            own = nf4.quantize(own, layers=".*_proj/kernel", stack=1, block=8)
        return decoder._replace(params=own)

    monkeypatch.setattr(run_module, "load_model", load_model)
    options = ("--optimizer", "kfac", "--steps", "20", "--samples", "0", "--questions", "0")
    one, two = tmp_path / "one", tmp_path / "two"
    assert run(*options, output=one) == run(*options, *words, output=two) == 0
    a, b = (load_checkpoint(path / "checkpoints") for path in (one, two))
    for path, leaf in a.leaves.items():
        if path.startswith("params/"):
            np.testing.assert_allclose(b.leaves[path], leaf, rtol=0, atol=1e-5, err_msg=path)
    np.testing.assert_allclose(records(two)["losses"], records(one)["losses"], rtol=1e-5)
