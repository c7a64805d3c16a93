"""The restatement says what transformers says, with the same names."""

import pytest
import torch

from torch_ref.models import EncoderDecoder, EncoderDecoderSizes


@pytest.mark.usefixtures("_transformers")
@pytest.mark.parametrize("gated", [False, True])
def test_logits_equal_those_of_transformers(gated):
    import transformers

    torch.manual_seed(0)
    sizes = EncoderDecoderSizes(
        vocabulary=23, width=8, hidden=12, depth=2, num_heads=2, head_size=3,
        num_buckets=8, max_distance=12, gated=gated, tied=not gated,
    )  # fmt: skip
    config = transformers.T5Config(
        vocab_size=23, d_model=8, d_ff=12, num_layers=2, num_heads=2, d_kv=3,
        relative_attention_num_buckets=8, relative_attention_max_distance=12,
        feed_forward_proj="gated-gelu" if gated else "relu", tie_word_embeddings=not gated,
        decoder_start_token_id=0,
    )  # fmt: skip
    theirs = transformers.T5ForConditionalGeneration(config).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    ours = EncoderDecoder(sizes).double()
    stored = {n: x for n, x in theirs.state_dict().items() if "embed_tokens" not in n}
    ours.load_state_dict(stored)
    source, target = torch.randint(0, 23, (2, 14)), torch.randint(0, 23, (2, 15))
    mask = torch.arange(14) < torch.tensor([[14], [5]])
    with torch.no_grad():
        expected = theirs(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits
        found = ours(source, mask, target)
    assert expected.std() > 0.2
    # transformers rounds the softmax and the norms' mean squares to float32 whatever the dtype is,
    # which alone is 7 eps of the largest logit with one instruction set, and 4 with others.
    bound = 64 * torch.finfo(torch.float32).eps * float(expected.abs().max())
    torch.testing.assert_close(found, expected, atol=bound, rtol=0)
