import dataclasses
import types

import jax.numpy as jnp
import pytest

from jaxkfac.cli.finetune import _load
from jaxkfac.cli.finetune._load import dtype_of, load_model, load_text
from jaxkfac.cli.finetune._options import Finetuning


def asked(monkeypatch, **changes):
    """What the loader is asked for."""
    calls = []

    def load_decoder(path, **options):
        calls.append((path, options))
        return types.SimpleNamespace(tokenizer="one")

    monkeypatch.setattr(_load, "load_decoder", load_decoder)
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
        monkeypatch.setattr(_load.jax, "default_backend", lambda backend=backend: backend)
        assert dtype_of(Finetuning()) == expected
        assert dtype_of(Finetuning(dtype="float32")) == jnp.float32


def test_flash_attention_is_passed_on_where_it_can_run_and_refused_elsewhere(monkeypatch):
    with pytest.raises(ValueError, match="NVIDIA GPU.*default backend is cpu: take --attention"):
        asked(monkeypatch, attention="cudnn")
    monkeypatch.setattr(_load.jax, "default_backend", lambda: "gpu")
    assert asked(monkeypatch, attention="cudnn")[1]["attention"] == "cudnn"
    with pytest.raises(ValueError, match="--dtype is float32: take --dtype bfloat16"):
        asked(monkeypatch, attention="cudnn", dtype="float32")


def test_a_model_without_a_tokenizer_is_refused(monkeypatch):
    monkeypatch.setattr(
        _load, "load_decoder", lambda *_, **__: types.SimpleNamespace(tokenizer=None)
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
