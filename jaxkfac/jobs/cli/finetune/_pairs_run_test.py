"""Whole runs of a tiny random encoder-decoder: adapters and all parameters, killed and resumed."""

import errno
import json
import re
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxkfac as jk
from jaxkfac.jobs.cli import _checkpoint, main
from jaxkfac.jobs.cli._checkpoint import load_checkpoint
from jaxkfac.jobs.cli.finetune import _encoder_decoder
from jaxkfac.jobs.cli.finetune import _run as run_module
from jaxkfac.jobs.cli.finetune._encoder_decoder import EncoderDecoderFamily
from jaxkfac.jobs.cli.finetune._run_test import press_in
from jaxkfac.jobs.models import (
    EncoderDecoder,
    EncoderDecoderConfig,
    Pretrained,
    byte_tokenizer,
    load_encoder_decoder,
    save_encoder_decoder,
)

CONFIG = EncoderDecoderConfig(
    vocabulary=258, width=16, hidden=64, encoder_depth=1, decoder_depth=2, num_heads=2, head_size=8,
    gated=True, activation="gelu_new", tied_head=False, scaled_head=False, eos_ids=(1,),
)  # fmt: skip
TINY = [
    *("--steps", "6", "--batch-size", "4", "--checkpoint-every", "2", "--samples", "2"),
    *("--sample-tokens", "3", "--generate", "3", "--max-length", "24", "--questions", "0"),
    *("--max-target-length", "16", "--adapter.rank", "2", "--log", "tensorboard"),
    *("--adamw.learning-rate", "0.02", "--kfac.max-dense", "32"),
]
pytestmark = pytest.mark.standard_promotion  # optax.adamw needs it


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint in Hugging Face's layout."""
    folder = tmp_path_factory.mktemp("t5")
    apply_fn, params = jk.from_nnx(EncoderDecoder(CONFIG, rngs=nnx.Rngs(0)))
    save_encoder_decoder(folder, Pretrained(CONFIG, apply_fn, params, byte_tokenizer()))
    return folder


@pytest.fixture
def data(tmp_path):
    """Pairs to learn, some of which are cut, and others to validate with."""
    data = tmp_path / "data"
    data.mkdir()
    lines = [json.dumps({"en": f"number {i}", "de": f"Zahl {i}"}) for i in range(20)]
    long = json.dumps({"en": "long " * 9, "de": "lang " * 9})
    (data / "train.jsonl").write_text("\n".join([*lines, long]))
    (data / "validation.jsonl").write_text("\n".join(lines[:5]))
    return data


@pytest.fixture
def run(folder, data, tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "finetune_page", lambda **_: "")
    monkeypatch.setattr(run_module, "resolve_pattern", lambda *_: None)
    keys = ["--data", str(data), "--source-key", "en", "--target-key", "de"]

    def call(*words, output=tmp_path / "run", model=folder):
        words = ["--model", str(model), *keys, *TINY, "--output", str(output), *words]
        return main(["finetune", *words])

    return call


def metrics(tmp_path):
    return json.loads((tmp_path / "run" / "metrics.json").read_text())


@pytest.mark.exhaustive
def test_an_adapter_of_a_folder_is_trained_and_saved_for_its_kind(run, folder, tmp_path, capsys):
    assert run("--evaluate-every", "3") == 0
    found = metrics(tmp_path)
    kept, held = found["records"], found["records"]["exams"]
    assert [exam["step"] for exam in held] == [0, 3, 6]
    assert held[-1]["loss"] < held[0]["loss"]
    assert all(set(exam["scores"]) == {"exact match"} for exam in held)
    assert [s["step"] for s in kept["samples"]] == [0, 0, 3, 3, 6, 6]
    first = kept["samples"][0]
    assert (first["prompt"], first["target"]) == ("number 0", "Zahl 0")
    assert found["config"]["adapter"]["target"] == r".*Attention/[qv]/kernel"
    assert not [row for row in found["coverage"] if row["reason"]]
    adapters, config = jk.lslora.load(tmp_path / "run" / "adapter")
    assert config.target == r".*Attention/[qv]/kernel"
    assert len(adapters) == 2 + 4  # q and v of the encoder, and of both attentions of the decoder
    record = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert record["task_type"] == "SEQ_2_SEQ_LM"
    assert record["base_model_name_or_path"] == str(folder)
    shown = capsys.readouterr()
    assert "that of a bigram model" in shown.out and "exact match" in shown.out
    assert "1 cut" in shown.out.replace("\n", " ")


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "words",
    [
        ("--optimizer", "adafactor", "--label-smoothing", "0.1"),
        ("--optimizer", "kfac", "--label-smoothing", "0.1"),
        ("--gradient-accumulation-steps", "2"),
        ("--dtype", "bfloat16"),
        ("--num-lengths", "2", "--num-beams", "2"),
    ],
    ids=lambda words: words[1],
)
def test_all_parameters_are_trained_and_the_model_is_read_again(words, run, tmp_path, capsys):
    assert run("--train", "all", *words) == 0
    assert re.search(r"about .* left \(.* s an update, \d updates?\)", capsys.readouterr().err)
    held = metrics(tmp_path)["records"]["exams"]
    assert held[-1]["loss"] < held[0]["loss"]
    again = tmp_path / "again"
    model = tmp_path / "run" / "model"
    assert run("--train", "all", *words, "--steps", "1", output=again, model=model) == 0
    kept = json.loads((again / "metrics.json").read_text())["records"]
    assert kept["exams"][0]["loss"] == pytest.approx(held[-1]["loss"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        pytest.param((), marks=pytest.mark.exhaustive),
        pytest.param(("--train", "all", "--optimizer", "kfac"), marks=pytest.mark.exhaustive),
        pytest.param(("--train", "all", "--dropout", "0.2"), marks=pytest.mark.exhaustive),
    ],
    ids=["adapter", "kfac", "dropout"],
)
def test_a_run_resumed_after_ctrl_c_gives_the_bits_of_an_uninterrupted_one(
    words, run, tmp_path, monkeypatch
):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(*words, output=whole) == 0
    with monkeypatch.context() as patch:
        press_in(patch, update=3)
        assert run(*words, output=parts) == 130
    if words:  # the checkpoint has them all

        def load(self, experiment):
            raise AssertionError("weights were read")

        monkeypatch.setattr(EncoderDecoderFamily, "load", load)
    assert run(*words, "--resume", output=parts) == 0
    a, b = (load_checkpoint(path / "checkpoints") for path in (whole, parts))
    assert a.step == b.step == 6 and a.leaves.keys() == b.leaves.keys()
    for path in a.leaves:
        np.testing.assert_array_equal(a.leaves[path], b.leaves[path], err_msg=path)
    for name in ("losses", "tokens", "exams", "samples"):
        assert a.records[name] == b.records[name], name


@pytest.mark.exhaustive
@pytest.mark.parametrize("train", [pytest.param("adapter", marks=pytest.mark.exhaustive), "all"])
def test_the_report_has_curvature_scores_and_wanted_targets(train, run, tmp_path, monkeypatch):
    monkeypatch.undo()
    assert run("--train", train, "--steps", "2") == 0
    page = (tmp_path / "run" / "report.html").read_text()
    what = {"adapter": "the adapter", "all": "the model"}[train]
    for word in ("Validation", "that of a bigram model", "wanted", f"Capacity of {what}"):
        assert word in page
    assert metrics(tmp_path)["spectra"]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_base_in_four_bits_is_trained_on(run, tmp_path):
    assert run("--quantize", ".*/wo/kernel") == 0
    losses = metrics(tmp_path)["records"]["losses"]
    assert np.mean(losses[-2:]) < np.mean(losses[:2])


@pytest.mark.exhaustive  # _encoder_decoder_test.py has the loss of padded pairs
def test_the_first_loss_is_that_of_the_model_on_the_first_batch(run, folder, tmp_path):
    assert run("--steps", "1", "--samples", "0", "--generate", "0") == 0
    model = load_encoder_decoder(folder, dtype=jnp.float32)
    source, target = (model.tokenizer.encode(text) for text in ("number 0", "Zahl 0"))
    found = metrics(tmp_path)["records"]["exams"][0]["loss"]
    expected = [_loss(model, f"number {i}", f"Zahl {i}") for i in range(5)]
    assert found == pytest.approx(np.concatenate(expected).mean(), rel=1e-5)
    assert len(source) == 9 and len(target) == 7


def _loss(model, source, target):
    """Of each token of one target, read by itself without padding."""
    source, target = (jnp.asarray([model.tokenizer.encode(text)]) for text in (source, target))
    inputs = jnp.concatenate([jnp.zeros((1, 1), int), target[:, :-1]], 1)
    logits = model.apply_fn(model.params, jk.models.Pairs(source, None, inputs))
    logs = np.asarray(logits - np.log(np.exp(np.asarray(logits)).sum(-1, keepdims=True)))
    return -np.take_along_axis(logs, np.asarray(target)[..., None], -1)[0, :, 0]


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--source-key", "fr"), "jsonl:1: expected the keys 'fr' and 'de'; got ['de', 'en']"),
        (("--batch-size", "40"), "batch_size must lie in 1 .. 21"),
        (("--label-smoothing", "1"), "label_smoothing must lie in [0, 1), not 1"),
        (("--generate", "-1"), "generate must not be negative"),
        (("--batching", "pack"), "--batching pack"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_explained_in_a_line_with_code_2(words, message, run, capsys):
    assert run(*words) == 2
    said = capsys.readouterr().err.replace("\n", " ")
    assert message in said and "Traceback" not in said


@pytest.mark.slow
def test_a_line_that_is_no_pair_is_named(run, data, capsys):
    for number, (line, message) in enumerate(
        [('{"en": "", "de": "x"}', "the source ('en') is empty"), ("{", "not JSON")], start=22
    ):
        with (data / "train.jsonl").open("a") as file:
            file.write(f"\n{line}")
        assert run("--strict") == 2
        assert f"train.jsonl:{number}: {message}" in capsys.readouterr().err.replace("\n", " ")
        (data / "train.jsonl").write_text((data / "train.jsonl").read_text().replace(line, " "))


@pytest.mark.slow
def test_a_folder_that_is_no_whole_model_is_refused_with_its_keys(run, folder, tmp_path, capsys):
    bad = tmp_path / "bad"
    bad.mkdir()
    for file in folder.iterdir():
        (bad / file.name).write_bytes(file.read_bytes())
    config = json.loads((bad / "config.json").read_text())
    for change, message in (
        ({"num_layers": 2}, "missing tensors ['encoder.block.1.layer.0.layer_norm.weight'"),
        ({"model_type": "bart"}, "model_type: expected 't5', got 'bart'"),
        ({"vocab_size": 200}, "shared.weight is (258, 16), expected (200, 16)"),
    ):
        (bad / "config.json").write_text(json.dumps(config | change))
        assert run(model=bad) == 2
        assert message in capsys.readouterr().err.replace("\n", " ")
    (bad / "config.json").write_text(json.dumps(config))
    (bad / "tokenizer.json").unlink()
    assert run(model=bad) == 2
    assert "has no tokenizer: put its tokenizer.json beside it" in capsys.readouterr().err
    (bad / "model.safetensors").unlink()
    assert run(model=bad) == 2
    assert "no *.safetensors in" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_pairs_with_an_empty_side_are_left_out_and_counted(run, data, tmp_path):
    train = data / "train.jsonl"
    train.write_text(train.read_text() + '\n{"en": "one", "de": ""}\n{"en": "", "de": "eins"}')
    assert run("--steps", "1", "--samples", "0", "--generate", "0", "--epochs", "1") == 0
    found = json.dumps(metrics(tmp_path))
    for number, side in ((22, "target ('de')"), (23, "source ('en')")):
        assert f"train.jsonl:{number}: the {side} is empty" in found


@pytest.mark.exhaustive
def test_a_disk_that_fills_up_keeps_the_last_checkpoint_to_go_on_from(
    run, tmp_path, monkeypatch, capsys
):
    words = ("--samples", "0", "--generate", "0")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(*words, output=whole) == 0
    real = _checkpoint.save_checkpoint

    def full(folder, stored):
        if stored.step == 4:
            raise OSError(errno.ENOSPC, f"the checkpoint could not be saved to {folder}")
        return real(folder, stored)

    with monkeypatch.context() as patch:
        patch.setattr(_checkpoint, "save_checkpoint", full)
        assert run(*words, output=parts) == 2
    said = capsys.readouterr().err
    assert "the checkpoint could not be saved to" in said and "Traceback" not in said
    assert load_checkpoint(parts / "checkpoints").step == 2
    assert run(*words, "--resume", output=parts) == 0
    a, b = (load_checkpoint(path / "checkpoints") for path in (whole, parts))
    for path in a.leaves:
        np.testing.assert_array_equal(a.leaves[path], b.leaves[path], err_msg=path)


def test_rouge_is_refused_at_once_where_its_package_is_missing(run, monkeypatch, capsys):
    for name in ("rouge_score", "rouge_score.rouge_scorer"):
        monkeypatch.setitem(sys.modules, name, None)
    assert run("--rouge") == 2
    assert 'pip install "jaxkfac[rouge]"' in capsys.readouterr().err


@pytest.mark.exhaustive
def test_an_untrained_model_learns_the_embedded_words(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(_encoder_decoder, "_BYTES", CONFIG)
    monkeypatch.setitem(_encoder_decoder.ENCODER_DECODERS, "t5-bytes", CONFIG)
    output = str(tmp_path / "run")
    words = ("--steps", "30", "--batch-size", "8", "--generate", "2", "--samples", "1", "--json")
    assert main(["finetune", "--preset", "wordnet-t5", "--output", output, *words]) == 0
    found = json.loads(capsys.readouterr().out)
    losses = list(found["validation_loss"].values())
    assert losses[-1] < losses[0] - 1
    assert found["reference"]["bigram"] == pytest.approx(2.428, abs=1e-3)
    assert load_encoder_decoder(found["model"]).config == CONFIG
