"""SmolLM2 from its package: downloaded on first use, so all of this is slow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.jobs.models.checkpoint._tokenizer_test import TRICKY
from jaxkfac.models import generate, smollm2

pytestmark = pytest.mark.slow

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def pretrained(smollm2_file):
    return smollm2(dtype=jnp.float32)


@pytest.fixture(scope="module")
def theirs(smollm2_file):
    """The same file as transformers reads it: its own dequantisation, layout and tokenizer."""
    from tests._transformers import torch, transformers

    file = smollm2_file
    options = {"gguf_file": file.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, dtype=torch.float32, **options
    )
    return torch, model.eval(), transformers.AutoTokenizer.from_pretrained(file.parent, **options)


@pytest.mark.exhaustive
def test_it_knows_the_capital_of_france(pretrained):
    ids = pretrained.tokenizer.chat(FRANCE)
    answer = generate(pretrained, ids, max_new_tokens=24)
    assert answer[-1] in pretrained.tokenizer.eos_ids
    assert "Paris" in pretrained.tokenizer.decode(answer)


@pytest.mark.exhaustive
def test_it_is_the_model_that_transformers_reads(pretrained, theirs):
    torch, model, _ = theirs
    ids = pretrained.tokenizer.chat(FRANCE)
    assert sum(x.size for x in jax.tree.leaves(pretrained.params)) == model.num_parameters()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits.numpy()
        answer = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)
    ours = jax.jit(pretrained.apply_fn)(pretrained.params, jnp.asarray([ids]))
    # 1e-4 of the logits' spread, which is 8: measured 1.0e-4, the rounding of 30 blocks
    np.testing.assert_allclose(np.asarray(ours), expected, atol=8e-4, rtol=0)
    assert generate(pretrained, ids, max_new_tokens=24) == answer[0, len(ids) :].tolist()


@pytest.mark.exhaustive
def test_its_tokenizer_is_the_one_that_transformers_builds(pretrained, theirs):
    tokenizer = theirs[-1]
    for text in [*TRICKY, "<|im_start|>user\nhi<|im_end|>", "1234567890", "x" * 300]:
        ids = pretrained.tokenizer.encode(text)
        assert ids == tokenizer.encode(text)
        assert pretrained.tokenizer.decode(ids, skip_special_tokens=False) == text
    assert pretrained.tokenizer.chat(FRANCE) == tokenizer.apply_chat_template(
        FRANCE, add_generation_prompt=True, return_dict=False
    )
