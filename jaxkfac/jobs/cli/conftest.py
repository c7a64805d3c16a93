"""What the tests of whole runs share."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxkfac as jk
from jaxkfac.jobs.models import (
    EncoderDecoder,
    EncoderDecoderConfig,
    Pretrained,
    byte_tokenizer,
    load_decoder,
    save_encoder_decoder,
)
from jaxkfac.jobs.models.checkpoint._tokenizer_test import TEMPLATE, folder_with
from jaxkfac.jobs.models.decoder import _gguf_test, _load_test


@pytest.fixture
def reads(monkeypatch):
    """Grows by a name with every reading of device arrays; a ``device_get`` of many is one.

    A transfer guard does not see them: on the CPU nothing is transferred.
    """
    found, inside = [], []

    def count(owner, name):
        original = getattr(owner, name)

        def counted(*args, **kwargs):
            is_read = name == "device_get" or isinstance(args[0], jax.Array)
            if inside or not is_read:
                return original(*args, **kwargs)
            found.append(name)
            inside.append(name)
            try:
                return original(*args, **kwargs)
            finally:
                inside.pop()

        monkeypatch.setattr(owner, name, counted)

    for name in ("asarray", "array"):  # they take an array's buffer without asking it
        count(np, name)
    for name in ("array", "float", "int", "bool", "index", "complex"):
        count(type(jnp.zeros(())), f"__{name}__")
    for name in ("item", "tolist"):
        count(type(jnp.zeros(())), name)
    count(jax, "device_get")
    return found


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """Paths of small checkpoints of every layout, and of texts: ``{name: path}``."""
    root = tmp_path_factory.mktemp("small")
    sizes = _gguf_test.CONFIG | {"num_hidden_layers": 2, "max_position_embeddings": 256}
    wide = {"model_type": "phi3", "hidden_size": 64}  # a kernel in four bits has blocks of 64
    for name, changes in {"llama": {}, "other": {}, "phi3": wide}.items():
        folder = root / name
        folder.mkdir()
        change = (lambda tensors: tensors["lm_head.weight"].fill(0.1)) if name == "other" else None
        _load_test.write(folder, sizes | changes, fused=name == "phi3", change=change)
        folder_with(
            folder, chat_template=TEMPLATE, eos_token="<|im_end|>", pad_token="<|im_start|>"
        )
    _gguf_test.write(root / "model.gguf", config=sizes)
    sizes = EncoderDecoderConfig(
        vocabulary=258, width=16, hidden=32, encoder_depth=1, decoder_depth=1, num_heads=2,
        head_size=8, gated=True, activation="gelu_new", tied_head=False, scaled_head=False,
        eos_ids=(1,),
    )  # fmt: skip
    apply_fn, params = jk.from_nnx(EncoderDecoder(sizes, rngs=nnx.Rngs(0)))
    save_encoder_decoder(root / "t5", Pretrained(sizes, apply_fn, params, byte_tokenizer()))
    llama = load_decoder(root / "llama", dtype=jnp.float32)
    config = jk.lslora.Config(rank=2, target=".*o_proj/kernel")
    tokens = jnp.zeros((1, 4), jnp.int32)
    adapters = jk.lslora.init(llama.apply_fn, config, llama.params, tokens, key=jax.random.key(0))
    base = str(root / "llama")
    for name in ("default", "other"):
        jk.lslora.save(root / "adapter", adapters, config, name=name, base_model=base)
    rows = {
        "chats": [{"prompt": f"what is {i}", "completion": f"it is {i}"} for i in range(8)],
        "pairs": [{"en": f"number {i}", "de": f"Zahl {i}"} for i in range(8)],
    }
    for name, lines in rows.items():
        (root / name).mkdir()
        for split in ("train", "validation"):
            text = "\n".join(map(json.dumps, lines))
            (root / name / f"{split}.jsonl").write_text(text)
    texts = [json.dumps({"text": f"{i} is a number"}) for i in range(6)]
    (root / "texts.jsonl").write_text("\n".join(texts))
    choices = [{"text": x, "label": label} for x, label in (("tin", "A"), ("zinc", "B"))]
    question = {"id": "q", "question": {"stem": "Sn", "choices": choices}, "answerKey": "A"}
    (root / "questions.jsonl").write_text(json.dumps(question))
    files = {"gguf": "model.gguf", "texts": "texts.jsonl", "questions": "questions.jsonl"}
    names = ("llama", "other", "phi3", "t5", "adapter", *rows)
    return {name: str(root / name) for name in names} | {
        name: str(root / file) for name, file in files.items()
    }
