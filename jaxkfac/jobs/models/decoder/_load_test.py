"""A checkpoint arrives whole, or is refused with every name that is wrong."""

import json
import tracemalloc
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import jaxkfac as jk
from jaxkfac.jobs.models import DecoderConfig, decoder_shapes, load_decoder
from jaxkfac.jobs.models.decoder._load import layout
from jaxkfac.lslora import nf4

CONFIG = {
    "model_type": "phi3",
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def tensors_of(config, *, fused):
    """Random tensors in Hugging Face's names."""
    leaves = layout(DecoderConfig.from_hugging_face(config), fused=fused)
    parts = [part for leaf in leaves.values() for slices in leaf.slices for part in slices]
    rng = np.random.default_rng(0)
    return {name: 0.3 * rng.standard_normal(shape, np.float32) for name, shape in parts}


def write(folder, config=CONFIG, *, fused=True, change=None):
    (folder / "config.json").write_text(json.dumps(config))
    tensors = tensors_of(config, fused=fused)
    if change is not None:
        change(tensors)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return tensors


def leaf(params, path):
    for key in path.split("/"):
        params = params[key]
    return np.asarray(params)


@pytest.mark.parametrize("fused", [False, True])
def test_every_tensor_is_where_its_path_says(tmp_path, fused):
    config = CONFIG | {"model_type": "phi3" if fused else "llama"}
    stored = write(tmp_path, config, fused=fused)
    params = load_decoder(tmp_path, dtype=jnp.float32).params
    block, second = "model.layers.1", "model/layers"
    down = leaf(params, f"{second}/mlp/down_proj/kernel")[1]
    np.testing.assert_array_equal(down, stored[f"{block}.mlp.down_proj.weight"].T)
    np.testing.assert_array_equal(
        leaf(params, "model/embed_tokens/embedding"), stored["model.embed_tokens.weight"]
    )
    np.testing.assert_array_equal(leaf(params, "lm_head/kernel"), stored["lm_head.weight"].T)
    qkv = leaf(params, f"{second}/self_attn/qkv_proj/kernel")[1]
    gate_up = leaf(params, f"{second}/mlp/gate_up_proj/kernel")[1]
    if fused:
        np.testing.assert_array_equal(qkv.T, stored[f"{block}.self_attn.qkv_proj.weight"])
    else:
        names = [f"{block}.self_attn.{x}_proj.weight" for x in "qkv"]
        np.testing.assert_array_equal(qkv.T, np.concatenate([stored[n] for n in names]))
        names = [f"{block}.mlp.{x}_proj.weight" for x in ("gate", "up")]
        np.testing.assert_array_equal(gate_up.T, np.concatenate([stored[n] for n in names]))


def test_shards_dtype_and_place(tmp_path):
    stored = write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    names = list(stored)
    shards = {"model-1-of-2.safetensors": names[::2], "model-2-of-2.safetensors": names[1::2]}
    for shard, own in shards.items():
        safetensors.numpy.save_file({n: stored[n] for n in own}, tmp_path / shard)
    index = {n: shard for shard, own in shards.items() for n in own}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    device = jax.devices()[-1]
    where = lambda path, shape: device if path == "lm_head/kernel" else jax.devices()[0]
    params = load_decoder(tmp_path, sharding=where).params
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    assert params["lm_head"]["kernel"].devices() == {device}
    kernel = leaf(params, "model/layers/self_attn/o_proj/kernel")
    expected = stored["model.layers.2.self_attn.o_proj.weight"].T.astype(jnp.bfloat16)
    np.testing.assert_array_equal(kernel[2], expected)


def test_missing_unknown_and_misshapen_tensors_are_all_named(tmp_path):
    def change(tensors):
        del tensors["model.layers.1.mlp.down_proj.weight"]
        del tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.qk_norm.weight"] = np.ones(4, np.float32)
        tensors["model.embed_tokens.weight"] = np.ones((60, 16), np.float32)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)

    write(tmp_path, change=change)
    with pytest.raises(ValueError) as error:
        load_decoder(tmp_path)
    message = str(error.value)
    assert "missing tensors ['model.layers.1.mlp.down_proj.weight', 'model.norm.weight']" in message
    assert "unknown tensors ['model.layers.0.self_attn.qk_norm.weight']" in message
    assert "model.embed_tokens.weight is (60, 16), expected (61, 16)" in message


@pytest.mark.slow
def test_a_head_is_tied_where_the_file_holds_none_or_the_embedding_again(tmp_path):
    def again(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    def other(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["lm_head.weight"][-1, -1] += 1

    def alone(tensors):
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    says = {"tie_word_embeddings": True}
    for config, change, tied in (
        (CONFIG | says, None, True),
        (CONFIG | says, again, True),
        (CONFIG | says, other, False),
        (CONFIG | says, alone, True),
        (CONFIG, again, True),
        (CONFIG, other, False),
        (CONFIG | {"model_type": "gemma2"}, other, False),
    ):
        stored = write(tmp_path, config, change=change, fused=config["model_type"] == "phi3")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loaded = load_decoder(tmp_path, dtype=jnp.float32)
            shapes = decoder_shapes(tmp_path, dtype=jnp.float32)
        assert loaded.config.tied_head is tied and ("lm_head" in loaded.params) is not tied
        assert jax.tree.structure(shapes.params) == jax.tree.structure(loaded.params)
        says_so = (change is other) != (config == CONFIG) and change in (again, other)
        told = [str(w.message) for w in caught if "lm_head.weight" in str(w.message)]
        assert bool(told) is says_so, (config, change)
        if not tied:
            head = leaf(loaded.params, "lm_head/kernel")
            np.testing.assert_array_equal(head.T, stored["lm_head.weight"])
    write(tmp_path, change=lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ValueError, match=r"'lm_head.weight'\].*tie_word_embeddings: false"):
        load_decoder(tmp_path)


@pytest.mark.parametrize("stored", ["float32", "float64", "bfloat16", "float16"])
def test_a_base_that_is_not_finite_is_refused_by_the_tensor(tmp_path, stored):
    for value in (np.nan, np.inf, -np.inf):

        def change(tensors, value=value):
            tensors["model.norm.weight"][3] = value
            tensors |= {name: x.astype(jnp.dtype(stored)) for name, x in tensors.items()}

        write(tmp_path, change=change)
        with pytest.raises(ValueError, match=r"'model.norm.weight' holds NaN or infinity"):
            load_decoder(tmp_path, dtype=jnp.float32)


def test_values_beyond_the_dtype_are_refused_by_the_tensor(tmp_path):
    write(tmp_path, change=lambda tensors: tensors["model.norm.weight"].__setitem__(1, -65519))
    assert float(load_decoder(tmp_path, dtype=jnp.float16).params["model"]["norm"]["scale"][1])
    write(tmp_path, change=lambda tensors: tensors["model.norm.weight"].__setitem__(1, -65520))
    with pytest.raises(ValueError, match=r"'model.norm.weight' holds values up to 65520 .*float16"):
        load_decoder(tmp_path, dtype=jnp.float16)
    load_decoder(tmp_path, dtype=jnp.bfloat16)


def test_a_damaged_file_is_refused_before_anything_is_read(tmp_path):
    write(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole[:100], b"", b"\xff" * 64):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="no whole safetensors file"):
            load_decoder(tmp_path)
    file.write_bytes(whole)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is no JSON object"):
        load_decoder(tmp_path)


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_decoder(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"no config.json in .*, which holds \[\]"):
        load_decoder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(FileNotFoundError, match="safetensors"):
        load_decoder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": {}}))
    with pytest.raises(ValueError, match=r"quantised already .* pass quantize=$"):
        load_decoder(tmp_path)
    quantised = CONFIG | {"quantization_config": {"quant_method": "bitsandbytes"}}
    (tmp_path / "config.json").write_text(json.dumps(quantised))
    with pytest.raises(ValueError, match=r"jk.nf4.from_bitsandbytes"):
        load_decoder(tmp_path)


def test_integer_weights_are_refused_by_name(tmp_path):
    change = lambda tensors: tensors.update({"model.norm.weight": np.ones(16, np.int8)})
    write(tmp_path, change=change)
    with pytest.raises(ValueError, match=r"expected floating tensors.*model.norm.weight.*int8"):
        load_decoder(tmp_path)


@pytest.mark.slow
def test_loading_takes_the_parameters_and_one_stored_tensor(tmp_path):
    """Tracemalloc sees NumPy's memory, which XLA on the CPU takes over without a copy."""
    config = CONFIG | {
        "vocab_size": 500,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
    }
    stored = write(tmp_path, config)
    load_decoder(tmp_path, dtype=jnp.float32)  # imports and traces are not what is measured
    tracemalloc.start()
    params = load_decoder(tmp_path, dtype=jnp.float32).params
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    total = sum(x.nbytes for x in jax.tree.leaves(params))
    largest = max(x.nbytes for x in stored.values())
    stack = max(x.nbytes for x in jax.tree.leaves(params["model"]["layers"]))
    slack = 2**20  # shapes, names, the function's shapes
    assert total <= peak <= total + largest + slack < total + stack


@pytest.mark.slow
def test_kernels_are_quantised_while_they_are_read(tmp_path):
    config = CONFIG | {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    write(tmp_path, config)
    pattern = r"model/layers/.*/kernel"
    decoder = load_decoder(tmp_path, dtype=jnp.float32, quantize=pattern)
    plain = load_decoder(tmp_path, dtype=jnp.float32).params
    expected = nf4.quantize(plain, pattern, stack=1)
    jax.tree.map(np.testing.assert_array_equal, decoder.params, expected)
    adapted = jk.lslora.attach(decoder.apply_fn, jk.lslora.Config(rank=1, target=pattern))
    ids = jnp.arange(8).reshape(2, 4)
    ours = jax.jit(lambda p: adapted(p, {}, ids))(decoder.params)
    theirs = jax.jit(decoder.apply_fn)(nf4.dequantize(decoder.params), ids)
    np.testing.assert_allclose(ours, theirs, atol=1e-4 * float(jnp.abs(theirs).max()), rtol=0)
    with pytest.raises(jk.UnknownLayerError, match="matches no stacked kernel"):
        load_decoder(tmp_path, quantize="model/layers/.*/kernels")
    write(tmp_path, CONFIG)
    with pytest.raises(ValueError, match=r"'model/layers/self_attn/qkv_proj/kernel'"):
        load_decoder(tmp_path, quantize=pattern)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "gemma2", "gemma3_text"])
def test_every_family_takes_adapters_and_nf4(tmp_path, kind):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "sliding_window": 3}
    write(tmp_path, CONFIG | sizes | {"model_type": kind}, fused=False)
    pattern = r"model/layers/.*/kernel"
    decoder = load_decoder(tmp_path, dtype=jnp.float32, quantize=pattern, remat=False)
    config = jk.lslora.Config(rank=2, target=pattern)
    adapted = jk.lslora.attach(decoder.apply_fn, config)
    ids = jnp.arange(8).reshape(2, 4)
    adapters = jk.lslora.init(decoder.apply_fn, config, decoder.params, ids, key=jax.random.key(0))
    assert len(adapters) == 4
    fresh = jax.jit(adapted)(decoder.params, adapters, ids)
    base = jax.jit(decoder.apply_fn)(nf4.dequantize(decoder.params), ids)
    np.testing.assert_allclose(fresh, base, atol=1e-4 * float(jnp.abs(base).max()), rtol=0)
    grads = jax.jit(jax.grad(lambda x: jnp.square(adapted(decoder.params, x, ids)).mean()))
    for name, gradient in grads(adapters).items():
        assert float(jnp.abs(gradient.b).min(-1).max()) > 0, name


@pytest.mark.parametrize("quantize", [None, ".*/(o_proj|down_proj)/kernel"])
def test_shapes_are_those_of_what_would_be_loaded(tmp_path, quantize):
    write(tmp_path, CONFIG | {"hidden_size": 64, "intermediate_size": 128})
    loaded = load_decoder(tmp_path, quantize=quantize, remat=False)
    (tmp_path / "model.safetensors").write_bytes(
        (tmp_path / "model.safetensors").read_bytes()[:-1] + b"?"
    )  # no weight is read
    shapes = decoder_shapes(tmp_path, quantize=quantize, remat=False)
    expected = jax.eval_shape(lambda: loaded.params)
    with_paths = jax.tree_util.tree_leaves_with_path
    assert with_paths(shapes.params) == with_paths(expected)
    assert shapes.config == loaded.config
