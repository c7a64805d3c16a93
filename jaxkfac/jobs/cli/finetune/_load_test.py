import dataclasses
import json
import types

import jax.numpy as jnp
import pytest

from jaxkfac.jobs.cli.finetune import _decoder
from jaxkfac.jobs.cli.finetune._decoder import DecoderFamily
from jaxkfac.jobs.cli.finetune._encoder_decoder import EncoderDecoderFamily
from jaxkfac.jobs.cli.finetune._family import dtype_of
from jaxkfac.jobs.cli.finetune._load import family_of, load_model, load_text
from jaxkfac.jobs.cli.finetune._options import AdapterOptions, Finetuning


def asked(monkeypatch, **changes):
    """What the loader is asked for."""
    calls = []

    def load_decoder(path, **options):
        calls.append((path, options))
        return types.SimpleNamespace(tokenizer="one")

    monkeypatch.setattr(_decoder, "load_decoder", load_decoder)
    load_model(Finetuning(model="folder", **changes))
    (call,) = calls
    return call


def test_a_folder_is_loaded_as_asked(monkeypatch):
    path, options = asked(monkeypatch, dtype="bfloat16", remat=False, quantize=".*o_proj/kernel")
    assert path == "folder"
    expected = {"dtype": jnp.bfloat16, "remat": False, "quantize": ".*o_proj/kernel"}
    assert options == expected | {"attention": "xla"}


def test_all_quantizes_every_projection_and_nothing_by_default(monkeypatch):
    assert asked(monkeypatch, quantize="all")[1]["quantize"] == ".*_proj/kernel"
    assert asked(monkeypatch)[1]["quantize"] is None


def test_float32_on_a_cpu_and_bfloat16_on_accelerators_unless_asked(monkeypatch):
    for backend, expected in (("cpu", jnp.float32), ("gpu", jnp.bfloat16)):
        monkeypatch.setattr(_decoder.jax, "default_backend", lambda backend=backend: backend)
        assert dtype_of(Finetuning()) == expected
        assert dtype_of(Finetuning(dtype="float32")) == jnp.float32


def test_flash_attention_is_passed_on_where_it_can_run_and_refused_elsewhere(monkeypatch):
    with pytest.raises(ValueError, match="NVIDIA GPU.*default backend is cpu: take --attention"):
        asked(monkeypatch, attention="cudnn")
    monkeypatch.setattr(_decoder.jax, "default_backend", lambda: "gpu")
    assert asked(monkeypatch, attention="cudnn")[1]["attention"] == "cudnn"
    with pytest.raises(ValueError, match="--dtype is float32: take --dtype bfloat16"):
        asked(monkeypatch, attention="cudnn", dtype="float32")


def test_a_model_without_a_tokenizer_is_refused(monkeypatch):
    monkeypatch.setattr(
        _decoder, "load_decoder", lambda *_, **__: types.SimpleNamespace(tokenizer=None)
    )
    with pytest.raises(ValueError, match="folder has no tokenizer"):
        load_model(Finetuning(model="folder"))


def test_embedded_text_comes_with_its_questions_and_other_text_without(tmp_path):
    embedded = load_text(Finetuning())
    assert len(embedded.train) == 1003 and len(embedded.questions) == 40
    assert embedded.train[0].messages[0].content == embedded.system == "Answer in a word."
    (tmp_path / "train.jsonl").write_text('{"text": "iron"}')
    other = Finetuning(data=str(tmp_path))
    assert load_text(other).questions == [] and load_text(other).system == ""
    more = dataclasses.replace(other, questions="3", system="Speak.")
    assert len(load_text(more).questions) == 3 and load_text(more).system == "Speak."


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "t5"}, EncoderDecoderFamily),
        ({"model_type": "bart", "is_encoder_decoder": True}, EncoderDecoderFamily),
        ({"model_type": "llama"}, DecoderFamily),
        (None, DecoderFamily),
    ],
)
def test_a_folder_is_what_its_config_says(config, expected, tmp_path):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert type(family_of(Finetuning(model=str(tmp_path)))) is expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data": "elements"},
            "conversations, and t5-bytes is .*: give --data wordnet",
        ),
        ({"questions": "8"}, "--questions are multiple choice"),
        ({"attention": "cudnn"}, "--attention cudnn has no relative positions"),
        ({"batching": "pack"}, "--batching pack"),
        ({"loss_on": "all"}, "--loss-on all"),
        ({"system": "Be brief."}, "--system is the first turn"),
        ({"adapter": AdapterOptions(split=True)}, "--adapter.split"),
        ({"train": "all", "quantize": "all"}, "--quantize is for a frozen base"),
        ({"quantize": "all"}, "--quantize is for a pretrained base, and t5-bytes is not"),
    ],
)
def test_options_of_a_decoder_are_refused_with_an_encoder_decoder(changes, message):
    experiment = Finetuning(**{"model": "t5-bytes", "data": "wordnet", **changes})
    with pytest.raises(ValueError, match=message):
        load_text(experiment)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": "all"}, "--train all is for encoder-decoders"),
        ({"data": "wordnet"}, "--data wordnet are pairs for an encoder-decoder"),
        ({"prefix": "summarize: "}, "--prefix is for pairs, and smollm2 is a decoder"),
        ({"source_key": "en"}, "--source-key is for pairs"),
    ],
)
def test_options_of_an_encoder_decoder_are_refused_with_a_decoder(changes, message):
    with pytest.raises(ValueError, match=message):
        load_text(Finetuning(**changes))


def test_a_model_that_is_known_by_its_sizes_is_not_trained():
    with pytest.raises(ValueError, match="--model the folder of the checkpoint google/flan-t5-xl"):
        load_model(Finetuning(model="flan-t5-xl", data="wordnet"))


def test_a_prefix_begins_every_source():
    text = load_text(Finetuning(model="t5-bytes", data="wordnet", prefix="define: "))
    assert all(pair.source.startswith("define: ") for pair in (*text.train, *text.validation))
