"""Every refusal says what is wrong and what to do."""

import collections
import json
import shutil

import numpy as np
import pytest

from jaxkfac.files import _whole
from jaxkfac.jobs.cli.analysis.conftest import CONFIG, write_model


def refused(capsys, code, *words):
    assert code == 2
    said = capsys.readouterr().err
    for word in words:
        assert word in said, said


def test_a_folder_without_weights(analyze, model, tmp_path, capsys):
    folder = shutil.copytree(model, tmp_path / "bare")
    (folder / "model.safetensors").unlink()
    refused(capsys, analyze(folder=folder), "bare", "safetensors")


@pytest.mark.exhaustive
def test_weights_of_another_architecture_are_named(analyze, tmp_path, capsys):
    def change(tensors):
        tensors["transformer.h.0.attn.c_attn.weight"] = tensors.pop("model.norm.weight")

    folder = write_model(tmp_path / "other", change=change)
    refused(
        capsys,
        analyze("--lanczos", "0", folder=folder),
        "missing tensors ['model.norm.weight']",
        "unknown tensors ['transformer.h.0.attn.c_attn.weight']",
    )


def test_a_tokenizer_larger_than_the_embedding(analyze, tmp_path, capsys):
    folder = write_model(tmp_path / "small", config=CONFIG | {"vocab_size": 100})
    refused(capsys, analyze(folder=folder), "a text needs the token", "100 rows")


def test_a_model_without_a_tokenizer(analyze, model, tmp_path, capsys):
    folder = shutil.copytree(model, tmp_path / "silent")
    (folder / "tokenizer.json").unlink()
    refused(capsys, analyze(folder=folder), "no tokenizer: put its tokenizer.json beside it")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "no"),
        ('{"text": ""}', "empty"),
        ('{"words": 1}', "words"),
        ("{", "empty.jsonl:1: not JSON"),
    ],
)
def test_texts_that_are_empty_or_no_texts(analyze, tmp_path, capsys, line, said):
    (tmp_path / "empty.jsonl").write_text(line + "\n")
    refused(capsys, analyze("--data", str(tmp_path / "empty.jsonl")), "empty.jsonl", said)


@pytest.mark.slow
def test_a_budget_too_small_says_the_smallest(analyze, capsys):
    code = analyze("--device-bytes", "10MB")
    refused(capsys, code, "--device-bytes 9.54 MiB: this analysis needs at least")


@pytest.mark.slow
def test_a_disk_without_room_is_refused_before_anything_is_loaded(analyze, monkeypatch, capsys):
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 10, 0))
    refused(capsys, analyze(), "on the disk", "0 B free", "--output")


@pytest.mark.exhaustive
def test_a_disk_that_fills_up_says_how_to_go_on(analyze, monkeypatch, capsys):
    def full(file):
        raise OSError(28, "No space left on device")

    real, calls = _whole._to_disk, []

    def third(file):
        calls.append(file)
        return full(file) if len(calls) == 5 else real(file)

    monkeypatch.setattr(_whole, "_to_disk", third)
    refused(capsys, analyze("--lanczos", "0"), "make room and continue with --resume")


@pytest.mark.exhaustive
@pytest.mark.standard_promotion  # rows of bfloat16 among float32 counts
def test_the_first_layer_whose_inputs_overflow_is_named(analyze, tmp_path, capsys):
    def change(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"] *= np.float32(1e30)
        tensors["model.layers.1.mlp.gate_proj.weight"] *= np.float32(1e30)

    folder = write_model(tmp_path / "loud", change=change)
    said = (
        "the inputs of layer model/layers/mlp/down_proj/kernel[1] are not finite over texts 1 to 4",
        "overflows in bfloat16; --dtype float32 reaches further",
    )
    code = analyze("--lanczos", "0", "--dtype", "bfloat16", folder=folder)
    refused(capsys, code, *said)


@pytest.mark.slow
def test_weights_that_are_not_finite_are_named(analyze, tmp_path, capsys):
    def change(tensors):
        tensors["model.layers.0.self_attn.o_proj.weight"][0, 0] = np.inf

    folder = write_model(tmp_path / "broken", change=change)
    code = analyze("--lanczos", "0", folder=folder)
    said = "'model.layers.0.self_attn.o_proj.weight' holds NaN or infinity"
    refused(capsys, code, said)


@pytest.mark.default(2, slow=1)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--batches", "3"), "--batches cuts the test examples"),
        (("--resume", "--overwrite"), "give one of them"),
        (("--decompose", "nothing"), "matches no layer; the nearest names are"),
        (("--texts", "0"), "texts must be at least 1"),
        (("--lanczos", "9"), "lanczos_steps=8 give as many eigenvalues"),
        (
            ("--lanczos-texts", "5"),
            "--lanczos-texts 5 are more than a batch, 4",
        ),
    ],
)
def test_options_that_do_not_go_together(analyze, capsys, words, said):
    refused(capsys, analyze(*words), said)


@pytest.mark.slow
def test_a_damaged_record_of_what_was_asked(analyze, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "analysis.json").write_text(json.dumps({})[:1])
    refused(capsys, analyze("--resume"), "is damaged", "--overwrite")
