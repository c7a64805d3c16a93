"""Language models of other libraries, which the tests' environment need not have: ``make zoo``."""

import dataclasses
import importlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxkfac as jk
from tests._programs import labels
from tests.zoo import Case, program
from tests.zoo._inside import INSIDE, drawn, nnx_linear, tapped, through

FAMILY = "Language models of other libraries"


# ------------------------------------------------------------------ Tunix


class _Reads(nnx.Module):
    """Tokens alone as inputs: positions and the causal mask from their shape."""

    def __init__(self, model: nnx.Module):
        self.model = model

    def __call__(self, tokens):
        n, s = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(s), (n, s))
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((s, s), bool)), (n, s, s))
        return self.model(tokens, positions, None, mask)[0]


def _embedded(inside, theirs, self, ids):
    """Gemma multiplies what it has looked up."""
    table, y = self.input_embedding, theirs(self, ids)
    name, factor = inside.name(table), 1.0
    if "gemma" in type(self).__module__:
        name, factor = f"{name}@embedding", table.shape[1] ** 0.5  # and the table is the head
    return y + factor * inside.tap.embedding(name, ids, jnp.zeros_like(y), size=table.shape[0])


def _unembedded(inside, theirs, self, x):
    return inside.tap.dense(inside.name(self.input_embedding), x, theirs(self, x))


def _normed(inside, theirs, self, x):
    weight = self.w if hasattr(self, "w") else self.scale
    rows = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + getattr(self, "norm_eps", 1e-6))
    y = theirs(self, x)  # heads of queries and keys are features
    return inside.tap.scale(inside.name(weight), rows, y, shape=weight.shape, row_axes=2)


def _einsum(inside, theirs, self, x):
    """With the bias that Qwen 2 adds after; where there are several heads, it is by itself."""
    y, name = theirs(self, x), inside.name(self.w)
    bias = name.removesuffix("proj/w") + "bias"
    several = self.w.shape[1] > 1
    joint = inside.known(bias) and not several
    y = inside.einsum(self.einsum_str, self.w, x, y, bias=joint)
    if inside.known(bias) and several:
        flat = y.reshape(*y.shape[:2], -1)
        y = inside.tap.lone_bias(bias, flat, shape=flat.shape[2:]).reshape(y.shape)
    return y


def _experts(inside, theirs, self, x):
    """Every expert meets every token, zeros where it was not chosen."""
    scores = jax.nn.softmax(self.router(x).astype(jnp.float32), -1)
    weights, chosen = jax.lax.top_k(scores, self.experts_per_tok)
    weights = (weights / weights.sum(-1, keepdims=True)).astype(x.dtype)

    def dense(which, i, x):
        kernel = getattr(self, which)
        return inside.tap.dense(f"{inside.name(kernel)}[{i}]", x, x @ kernel[i])

    out = jnp.zeros_like(x)
    for i in range(self.num_experts):
        rows = x * (chosen == i).any(-1, keepdims=True)
        rows = jax.nn.silu(dense("gate_proj", i, rows)) * dense("up_proj", i, rows)
        share = (weights * (chosen == i)).sum(-1, keepdims=True)
        out = out + share * dense("down_proj", i, rows)
    return out


def _tunix_model(family: str, name: str, **options: Any) -> nnx.Module:
    module = importlib.import_module(f"tunix.models.{family}.model")
    known = {field.name for field in dataclasses.fields(module.ModelConfig)}
    words = "num_embed" if "num_embed" in known else "vocab_size"
    sizes = {"num_layers": 2, words: 17, "embed_dim": 8, "hidden_dim": 12, "num_heads": 2}
    sizes |= {"head_dim": 4, "num_kv_heads": 1, "rope_theta": 10_000, "norm_eps": 1e-6}
    sizes |= {"param_dtype": jnp.float32}
    sizes = {key: value for key, value in (sizes | options).items() if key in known}
    return _Reads(getattr(module, name)(module.ModelConfig(**sizes), rngs=nnx.Rngs(0)))


def _tokens() -> tuple[jax.Array, jax.Array]:
    tokens = labels(1, 2, 5, classes=17)
    return tokens, jnp.roll(tokens, -1, 1)


def _tunix(family: str, name: str, tolerance: float = 1e-6, **options: Any) -> Case:
    module = importlib.import_module(f"tunix.models.{family}.model")
    apply_fn, params = jk.from_nnx(_tunix_model(family, name, **options))
    layers = [
        through(module.Embedder, "encode", _embedded),
        through(module.Embedder, "decode", _unembedded),
        through(module.RMSNorm, "__call__", _normed),
        through(module.Einsum, "__call__", _einsum),
        through(nnx.Linear, "__call__", nnx_linear),
    ]
    if hasattr(module, "MoELayer"):
        layers.append(through(module.MoELayer, "__call__", _experts))
    objective, params = jk.Objective(apply_fn, jk.Categorical()), drawn(params)
    return Case(objective, params, _tokens(), tapped(apply_fn, *layers), tolerance=tolerance)


SINGLE = f"{INSIDE}, to 1e-6: norms and routing are of float32"


@program("Tunix: Llama 3", family=FAMILY, checked=SINGLE, needs=("tunix",))
def _llama3():
    return _tunix("llama3", "Llama3")


@program("Tunix: Gemma 3", family=FAMILY, checked=INSIDE, needs=("tunix",))
def _gemma3():
    return _tunix("gemma3", "Gemma3", 1e-10, sliding_window_size=4)


@program("Tunix: Qwen 2", family=FAMILY, checked=SINGLE, needs=("tunix",))
def _qwen2():
    return _tunix("qwen2", "Qwen2")


@program("Tunix: Qwen 3", family=FAMILY, checked=SINGLE, needs=("tunix",))
def _qwen3():
    return _tunix("qwen3", "Qwen3")


@program(
    "Tunix: Qwen 3, mixture of experts",
    family=FAMILY,
    checked=f"{SINGLE}; experts written again",
    needs=("tunix",),
)
def _qwen3_experts():
    return _tunix("qwen3", "Qwen3", num_experts=4, num_experts_per_tok=2)


@program(
    "Tunix: Llama 3, adapters of qwix",
    family=FAMILY,
    checked="coverage and gradient; tests/qwix_test.py has the factors of such adapters",
    needs=("tunix", "qwix"),
)
def _adapted_llama3():
    qwix = importlib.import_module("qwix")
    model, batch = _tunix_model("llama3", "Llama3"), _tokens()
    provider = qwix.LoraProvider(module_path=".*(q_proj|kv_proj|up_proj)", rank=2, alpha=4.0)
    model = qwix.apply_lora_to_model(model, provider, batch[0], rngs=nnx.Rngs(1))
    graph, lora, rest = nnx.split(model, nnx.LoRAParam, ...)
    objective = jk.Objective(lambda a, x: nnx.merge(graph, a, rest)(x), jk.Categorical())
    return Case(objective, drawn(lora), batch, tolerance=1e-6)


# ------------------------------------------------------------------ Penzai


def _named_linear(inside, theirs, self, x, **side):
    """Axes that data and kernel share are a stack of layers, of a norm's scale for one."""
    from penzai import pz

    y, w = theirs(self, x, **side), self.weights.value
    inner = [axis for axis in w.named_shape if axis in self.in_axis_names]
    both = [axis for axis in w.named_shape if axis in x.named_shape and axis not in inner]
    outer = [axis for axis in w.named_shape if axis not in (*inner, *both)]
    rows = [axis for axis in x.named_shape if axis not in w.named_shape]
    name, data = inside.name(w.data_array), x.unwrap(*both, *rows, *inner)
    out = y.unwrap(*both, *rows, *outer)
    if not both:
        out = inside.tap.dense(name, data, out, in_axes=len(inner))
    else:
        layers = zip(data[..., None], out[..., None], strict=True)
        layers = [inside.tap.dense(name, x, y, at=(i,)) for i, (x, y) in enumerate(layers)]
        out = jnp.stack(layers)[..., 0]
    return pz.nx.wrap(out).tag(*both, *rows, *outer)


def _looked_up(inside, theirs, self, ids, **side):
    from penzai import pz

    y, table = theirs(self, ids, **side), self.table.embeddings.value
    axes = tuple(ids.named_shape)
    size = table.named_shape[self.table.vocabulary_axis]
    (width,) = (axis for axis in table.named_shape if axis != self.table.vocabulary_axis)
    name = inside.name(table.data_array)
    out = inside.tap.embedding(name, ids.unwrap(*axes), y.unwrap(*axes, width), size=size)
    return pz.nx.wrap(out).tag(*axes, width)


@program("Penzai: Llama", family=FAMILY, checked=INSIDE, needs=("penzai",))
def _penzai_llama():
    from penzai import pz
    from penzai.models.transformer.variants import llamalike_common

    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=1, query_head_multiplier=2, embedding_dim=8, projection_dim=4,
        mlp_hidden_dim=12, num_decoder_blocks=2, vocab_size=17, mlp_variant="swiglu",
        tie_embedder_and_logits=False, rope_wavelength=10_000, rms_norm_eps=1e-6,
        attention_type=llamalike_common.AttentionTypeGlobalCausal(),
        parameter_dtype=jnp.float64, activation_dtype=jnp.float64,
    )  # fmt: skip
    net = llamalike_common.build_llamalike_transformer(config, jax.random.key(0))
    net, variables = pz.unbind_params(net, freeze=True)
    names = {str(variable.label): variable for variable in variables}

    def apply_fn(params, tokens):
        bound = [dataclasses.replace(names[name], value=value) for name, value in params.items()]
        tokens = pz.nx.wrap(tokens).tag("batch", "seq")
        logits = pz.bind_variables(net, bound)(
            tokens,
            token_positions=pz.nx.arange("seq", tokens.named_shape["seq"]),
        )
        return logits.unwrap("batch", "seq", "vocabulary")

    params = drawn({name: variable.value for name, variable in names.items()})
    twin = tapped(
        apply_fn,
        through(pz.nn.Linear, "__call__", _named_linear),
        through(pz.nn.EmbeddingLookup, "__call__", _looked_up),
    )
    tokens = labels(1, 2, 5, classes=17)
    objective = jk.Objective(apply_fn, jk.Categorical())
    return Case(objective, params, (tokens, jnp.roll(tokens, -1, 1)), twin)
