"""Tiny checkpoints, and texts for them."""

import json

import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxkfac.jobs.cli import main
from jaxkfac.jobs.models.decoder._load_test import tensors_of

SYMBOLS = ["</s>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
CONFIG = {
    "model_type": "llama",
    "vocab_size": len(SYMBOLS),
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}


def write_model(folder, *, scale=1.0, change=None, config=CONFIG):
    """A random decoder in Hugging Face's layout, whose tokens are bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: scale * x for name, x in tensors_of(config, fused=False).items()}
    if change is not None:
        change(tensors)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    vocabulary = {symbol: number for number, symbol in enumerate(SYMBOLS)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    ends = {"eos_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(ends))
    return folder


def write_texts(path, number=6):
    """Texts of different lengths, all of them short."""
    rng = np.random.default_rng(0)
    words = ["iron", "is", "a", "metal", "and", "neon", "none"]
    lines = [" ".join(rng.choice(words, size=2 + n % 4)) for n in range(number)]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts") / "texts.jsonl")


@pytest.fixture
def analyze(model, texts, tmp_path):
    """``analyze(*words)``: the exit code of a small analysis in a folder of its own."""

    def call(*words, folder=model, output=tmp_path / "out"):
        fixed = ("--data", str(texts), "--max-length", "16", "--batch-size", "4")
        return main(["analyze", str(folder), *fixed, "--output", str(output), *words])

    return call
