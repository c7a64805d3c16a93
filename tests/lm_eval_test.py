"""A tiny checkpoint under lm-eval: what its own model says of it in PyTorch, ours says too."""

import types

import numpy as np
import pytest
import tokenizers

from jaxkfac.models import load_decoder
from tests._transformers import torch, transformers

pytest.importorskip("lm_eval", reason="pip install jaxkfac[eval]")
pytestmark = pytest.mark.standard_promotion
WORDS = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(40))]
TEXT = " ".join(f"w{i * i % 40}" for i in range(75))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Ours, and lm-eval's for Hugging Face, of one folder."""
    import jax.numpy as jnp
    from lm_eval.models.huggingface import HFLM

    from jaxkfac.jobs.models.evaluation import lm_eval_model

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        pad_token="</s>",
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    theirs = HFLM(
        pretrained=str(folder), tokenizer=tokenizer, device="cpu", dtype="float32", batch_size=2
    )
    decoder = load_decoder(folder, dtype=jnp.float32, remat=False)
    return lm_eval_model(decoder, batch_size=3), theirs


def asked(*arguments):
    return [types.SimpleNamespace(args=args) for args in arguments]


def test_likelihoods_equal_those_of_hugging_faces_model(models):
    pairs = asked(
        ("w1 w2 w3", " w4 w5"), ("", "w7 w8"), ("w1 w2 ", "w3"), (TEXT, " w9"), ("", "<s> w3"),
        ("w5", " w6 w7 w8 w9"),
    )  # fmt: skip
    ours, theirs = (model.loglikelihood(pairs) for model in models)
    np.testing.assert_allclose(*([x for x, _ in found] for found in (ours, theirs)), atol=1e-4)
    assert [x for _, x in ours] == [x for _, x in theirs]


def test_rolling_likelihoods_equal_those_of_hugging_faces_model(models):
    texts = asked((TEXT,), ("w3",), (" ".join(TEXT.split()[:31]),), (TEXT[:97],))
    ours, theirs = (model.loglikelihood_rolling(texts) for model in models)
    np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=1e-6)


def test_answers_equal_those_of_hugging_faces_model(models):
    kwargs = {"until": ["w0 "], "max_gen_toks": 8, "do_sample": False}
    texts = asked(*((t, kwargs) for t in ("w1 w2", "w9 w8 w7 w6", TEXT)))
    ours, theirs = (model.generate_until(texts) for model in models)
    assert [x.strip() for x in ours] == [x.strip() for x in theirs] and len(set(ours)) > 1


def test_the_harness_runs_a_task(models, tmp_path):
    import json

    import lm_eval

    rows = [{"q": f"w{i} w{i + 1}", "c": ["w3", "w4", "w5"], "a": i % 3} for i in range(6)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = {
        "task": "tiny",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "data.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "{{c}}",
        "doc_to_target": "{{a}}",
        "metric_list": [{"metric": "acc"}],
    }
    found = [
        lm_eval.simple_evaluate(model=model, tasks=[dict(task)], bootstrap_iters=0)
        for model in models
    ]
    ours, theirs = (result["results"]["tiny"]["acc,none"] for result in found)
    assert ours == theirs
