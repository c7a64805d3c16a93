"""Checkpoints that people have: heads and configs that disagree, odd files, odd ids."""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tokenizers

import jaxkfac as jk
from jaxkfac import lslora
from jaxkfac.jobs.models.decoder import _gguf_test
from jaxkfac.models import (
    Pairs,
    decoder_shapes,
    generate,
    load_decoder,
    load_encoder_decoder,
    save_encoder_decoder,
)
from tests._transformers import SIZES, torch, transformers

T5 = {"vocab_size": 31, "d_model": 16, "d_kv": 6, "d_ff": 24, "num_layers": 1, "num_heads": 2}
IDS = np.random.default_rng(0).integers(3, 31, (2, 9)).astype(np.int32)
CLOSE = {"atol": 2e-5, "rtol": 0}
TIED, EMBEDDING, HEAD = "tie_word_embeddings", "model.embed_tokens.weight", "lm_head.weight"


def written(folder, kind, **sizes):
    """A folder of transformers with an untied head, and its tensors."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES | sizes, **{TIED: False})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for x in model.parameters():
            x.add_(0.2 * torch.randn(x.shape))
    model.save_pretrained(folder)
    return safetensors.numpy.load_file(folder / "model.safetensors")


def rewritten(folder, tensors, **entries):
    """The folder with other tensors, and other entries of its config (`None` removes one)."""
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | entries
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))


def logits_of(model):
    with torch.no_grad():
        return model.eval()(torch.from_numpy(IDS).long()).logits.numpy()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["llama", *(pytest.param(x, marks=pytest.mark.exhaustive) for x in ("qwen2", "gemma2"))]
)
def test_a_head_beside_a_config_that_says_otherwise(kind, tmp_path):
    stored = written(tmp_path, kind)
    without = {key: x for key, x in stored.items() if key != HEAD}
    only_head = {key: x for key, x in stored.items() if key != EMBEDDING}
    again = without | {HEAD: stored[EMBEDDING]}
    programs = {}
    for tensors, says, tied, told in (
        (stored, True, False, True),
        (stored, None, False, kind == "gemma2"),  # whose default is tied
        (stored, False, False, False),
        (again, True, True, False),
        (again, False, True, True),
        (without, True, True, False),
        (only_head, True, True, False),
    ):
        rewritten(tmp_path, tensors, **{TIED: says})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            decoder = load_decoder(tmp_path, dtype=jnp.float32, remat=False)
            shapes = decoder_shapes(tmp_path, dtype=jnp.float32, remat=False)
        assert told is any(HEAD in str(warning.message) for warning in caught)
        assert decoder.config.tied_head is tied
        plan = lambda params: sum(x.size for x in jax.tree.leaves(params))
        assert plan(shapes.params) == plan(decoder.params)
        apply_fn = programs.setdefault(tied, jax.jit(decoder.apply_fn))
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        expected = logits_of(theirs)
        np.testing.assert_allclose(apply_fn(decoder.params, jnp.asarray(IDS)), expected, **CLOSE)
    rewritten(tmp_path, without, **{TIED: False})
    with pytest.raises(ValueError, match=rf"missing tensors \['{HEAD}'\].*{TIED}: false"):
        load_decoder(tmp_path)


@pytest.mark.slow
def test_a_gguf_file_without_an_output_is_tied_and_one_with_the_same_matrix_too(tmp_path):
    file, config = tmp_path / "model.gguf", _gguf_test.CONFIG
    loaded = {}
    for name, leave_out in (("own", ()), ("none", ("lm_head.weight",))):
        stored = _gguf_test.write(file, leave_out=leave_out)
        loaded[name] = load_decoder(file, dtype=jnp.float32)
        assert loaded[name].config.tied_head is (name == "none")
    ids = jnp.arange(8)[None]
    hidden = {name: decoder.apply_fn(decoder.params, ids) for name, decoder in loaded.items()}
    (back,) = np.linalg.lstsq(stored["lm_head.weight"], np.asarray(hidden["own"][0]).T)[:1]
    expected = (stored["model.embed_tokens.weight"] @ back).T
    np.testing.assert_allclose(hidden["none"][0], expected, atol=1e-3)
    assert config["vocab_size"] == 259


def t5(folder, **entries):
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5 | entries))
    model.save_pretrained(folder)
    return model.eval()


def t5_logits(model):
    with torch.no_grad():
        ids = torch.from_numpy(IDS).long()
        return model(input_ids=ids, decoder_input_ids=ids[:, :4]).logits.numpy()


PAIRS = Pairs(jnp.asarray(IDS), None, jnp.asarray(IDS[:, :4]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["encoder.embed_tokens.weight", "lm_head.weight"])
def test_an_encoder_decoder_without_its_shared_matrix(name, tmp_path):
    model = t5(tmp_path)
    stored = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    rewritten(tmp_path, stored | {name: stored["shared.weight"]})
    stored = stored | {name: stored.pop("shared.weight")}
    rewritten(tmp_path, stored)
    loaded = load_encoder_decoder(tmp_path, dtype=jnp.float32, remat=False)
    np.testing.assert_allclose(loaded.apply_fn(loaded.params, PAIRS), t5_logits(model), **CLOSE)


@pytest.mark.slow
def test_an_adapter_of_a_tied_head_of_an_encoder_decoder_merged_and_saved(tmp_path):
    t5(tmp_path / "base")
    base = load_encoder_decoder(tmp_path / "base", dtype=jnp.float32, remat=False)
    config = lslora.Config(rank=2, target="lm_head/kernel", fourier_placement="none")
    key = jax.random.key(0)
    adapters = lslora.init(base.apply_fn, config, base.params, PAIRS, key=key)
    adapters = jax.tree.map(
        lambda x: x + 0.1 * jnp.cos(jnp.arange(x.size)).reshape(x.shape), adapters
    )
    adapted = lslora.attach(base.apply_fn, config)
    expected = adapted(base.params, adapters, PAIRS)
    merged = base._replace(params=lslora.merge(adapted, base.params, adapters, PAIRS))
    np.testing.assert_allclose(base.apply_fn(merged.params, PAIRS), expected, **CLOSE)
    save_encoder_decoder(tmp_path / "merged", merged)
    again = load_encoder_decoder(tmp_path / "merged", dtype=jnp.float32, remat=False)
    np.testing.assert_allclose(again.apply_fn(again.params, PAIRS), expected, **CLOSE)
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "merged").eval()
    np.testing.assert_allclose(t5_logits(theirs), expected, **CLOSE)


def test_a_stale_index_beside_one_file(tmp_path):
    stored = written(tmp_path, "llama")
    shard = "model-00001-of-00001.safetensors"
    index = {"weight_map": dict.fromkeys(stored, shard)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for shard_is_there in (False, True):
        if shard_is_there:
            other = {name: 2 * x for name, x in stored.items()}
            safetensors.numpy.save_file(other, tmp_path / shard)
        with pytest.warns(UserWarning, match="model.safetensors is read, as transformers does"):
            flat = jk.load_safetensors(tmp_path)
        np.testing.assert_array_equal(flat[HEAD], stored[HEAD])
        with pytest.warns(UserWarning, match="model.safetensors is read"):
            decoder = load_decoder(tmp_path, dtype=jnp.float32)
        np.testing.assert_array_equal(decoder.params["lm_head"]["kernel"].T, stored[HEAD])
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        np.testing.assert_array_equal(theirs.lm_head.weight.detach(), stored[HEAD])
    (tmp_path / "model.safetensors").unlink()
    np.testing.assert_array_equal(jk.load_safetensors(tmp_path)[HEAD], other[HEAD])


def test_weights_beyond_a_narrow_dtype_and_weights_that_are_not_finite(tmp_path):
    stored = written(tmp_path, "llama")
    stored["model.norm.weight"][2] = 70000
    rewritten(tmp_path, stored)
    for call in (load_decoder, jk.load_safetensors):
        with pytest.raises(ValueError, match=r"model.norm.weight.* up to 70000 .*float16"):
            call(tmp_path, dtype=jnp.float16)
        call(tmp_path, dtype=jnp.bfloat16)
    stored["model.norm.weight"][2] = np.nan
    rewritten(tmp_path, stored)
    with pytest.raises(ValueError, match=r"model.norm.weight' holds NaN or infinity"):
        load_decoder(tmp_path)
    assert np.isnan(jk.load_safetensors(tmp_path, dtype=jnp.bfloat16)["model.norm.weight"][2])


def test_ids_that_the_model_does_not_have(tmp_path):
    written(tmp_path, "llama")
    decoder = load_decoder(tmp_path, dtype=jnp.float32, remat=False)
    apply_fn = jax.jit(decoder.apply_fn)
    for wrong in (-1, 31, 2**31 - 1):
        ids = jnp.asarray(IDS).at[1, 4].set(wrong)
        with pytest.raises(ValueError, match=r"ids: expected \[0, 31\), .* got ids from"):
            decoder.apply_fn(decoder.params, ids)
        logits = np.asarray(apply_fn(decoder.params, ids))
        assert np.isfinite(logits[0]).all() and np.isnan(logits[1, 4:]).all()
        with pytest.raises(ValueError, match=r"prompt: expected ids in \[0, 31\)"):
            generate(decoder, ids[1].tolist(), max_new_tokens=1)


@pytest.mark.slow
def test_a_tokenizer_with_more_tokens_than_the_embedding_has_rows(tmp_path):
    written(tmp_path, "llama")
    words = {f"w{i}": i for i in range(31)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<image>", "<audio>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    decoder = load_decoder(tmp_path, dtype=jnp.float32, remat=False)
    assert decoder.tokenizer.encode("w3 w30") == [3, 30]
    assert isinstance(generate(decoder, "w3 w30", max_new_tokens=1), str)
    message = r"needs the token '<audio>' \(id 32\), and the model's embedding has 31 rows"
    for call in (decoder.tokenizer.encode, lambda text: generate(decoder, text)):
        with pytest.raises(ValueError, match=message):
            call("w3 <image> <audio>")
