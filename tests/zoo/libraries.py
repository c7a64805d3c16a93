"""Models of libraries that the tests' environment need not have (``pip install -e .[zoo]``)."""

import dataclasses
import importlib
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxkfac as jk
from tests._programs import labels, normal
from tests.zoo import Case, program

FAMILY = "Models of other libraries"


def single(tree: Any) -> Any:
    """Float32, in which these libraries compute."""

    def cast(x: Any) -> Any:
        real = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(jnp.float32) if real else x

    return jax.tree.map(cast, tree)


# ------------------------------------------------------------------ Tunix: language models


class _Reads(nnx.Module):
    """Tokens alone as inputs: positions and the causal mask from their shape."""

    def __init__(self, model: nnx.Module):
        self.model = model

    def __call__(self, tokens):
        n, s = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(s), (n, s))
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((s, s), bool)), (n, s, s))
        return self.model(tokens, positions, None, mask)[0]


def _tunix(family: str, name: str, **options: Any) -> Case:
    module = importlib.import_module(f"tunix.models.{family}.model")
    known = {field.name for field in dataclasses.fields(module.ModelConfig)}
    words = "num_embed" if "num_embed" in known else "vocab_size"
    sizes = {"num_layers": 2, words: 17, "embed_dim": 8, "hidden_dim": 12, "num_heads": 2}
    sizes |= {"head_dim": 4, "num_kv_heads": 1, "rope_theta": 10_000, "norm_eps": 1e-6}
    sizes |= {"param_dtype": jnp.float32}
    sizes = {key: value for key, value in (sizes | options).items() if key in known}
    model = getattr(module, name)(module.ModelConfig(**sizes), rngs=nnx.Rngs(0))
    apply_fn, params = jk.from_nnx(_Reads(model))
    tokens = labels(1, 2, 5, classes=17)
    objective = jk.Objective(apply_fn, jk.Categorical())
    return Case(objective, single(params), (tokens, jnp.roll(tokens, -1, 1)), tolerance=1e-5)


@program("Tunix: Llama 3", family=FAMILY, checked="gradient", needs=("tunix",))
def _llama3():
    return _tunix("llama3", "Llama3")


@program("Tunix: Gemma 3", family=FAMILY, checked="gradient", needs=("tunix",))
def _gemma3():
    return _tunix("gemma3", "Gemma3", sliding_window_size=4)


@program("Tunix: Qwen 2", family=FAMILY, checked="gradient", needs=("tunix",))
def _qwen2():
    return _tunix("qwen2", "Qwen2")


@program("Tunix: Qwen 3", family=FAMILY, checked="gradient", needs=("tunix",))
def _qwen3():
    return _tunix("qwen3", "Qwen3")


@program("Tunix: Qwen 3, mixture of experts", family=FAMILY, checked="gradient", needs=("tunix",))
def _qwen3_experts():
    return _tunix("qwen3", "Qwen3", num_experts=4, num_experts_per_tok=2)


# ------------------------------------------------------------------ jraph: graphs


def _graph(seed: int = 0, nodes: int = 5, edges: int = 7) -> Any:
    import jraph

    draw = np.random.default_rng(seed)
    return jraph.GraphsTuple(
        nodes=np.float32(draw.normal(size=(nodes, 3))),
        edges=np.float32(draw.normal(size=(edges, 2))),
        senders=draw.integers(0, nodes, edges),
        receivers=draw.integers(0, nodes, edges),
        n_node=np.array([nodes]),
        n_edge=np.array([edges]),
        globals=np.float32(draw.normal(size=(1, 2))),
    )


def _on_nodes(net: nn.Module) -> Case:
    graph = _graph()

    def apply_fn(params, nodes):
        return net.apply(params, graph._replace(nodes=nodes)).nodes

    params = single(net.init(jax.random.key(0), graph))
    batch = (jnp.asarray(graph.nodes), labels(1, 5))
    return Case(jk.Objective(apply_fn, jk.Categorical()), params, batch, tolerance=1e-5)


@program("jraph: GraphNetwork", family=FAMILY, checked="gradient", needs=("jraph",))
def _graph_network():
    import jraph

    class Net(nn.Module):
        @nn.compact
        def __call__(self, graph):
            def dense(size):
                return jraph.concatenated_args(nn.Dense(size))

            net = jraph.GraphNetwork(dense(4), dense(3))  # edges, nodes: what the outputs read
            return net(graph)

    return _on_nodes(Net())


@program("jraph: graph convolution", family=FAMILY, checked="gradient", needs=("jraph",))
def _graph_convolution():
    import jraph

    class Net(nn.Module):
        @nn.compact
        def __call__(self, graph):
            return jraph.GraphConvolution(nn.Dense(3), add_self_edges=True)(graph)

    return _on_nodes(Net())


@program("jraph: graph attention", family=FAMILY, checked="gradient", needs=("jraph",))
def _graph_attention():
    import jraph

    class Net(nn.Module):
        @nn.compact
        def __call__(self, graph):
            logit = nn.Dense(1)
            net = jraph.GAT(
                nn.Dense(4), lambda s, r, e: logit(jnp.concatenate([s, r], -1)), nn.Dense(3)
            )
            return net(graph._replace(edges=None))

    return _on_nodes(Net())


# ------------------------------------------------------------------ Equinox: fields and memory


def _equinox(model: Any, inputs: jax.Array, outputs: Any) -> Case:
    """A model for one example, and Gaussian targets."""
    import equinox as eqx

    params, rest = eqx.partition(model, eqx.is_inexact_array)

    def apply_fn(params, x):
        return jax.vmap(lambda row: outputs(eqx.combine(params, rest), row))(x)

    shape = jax.eval_shape(apply_fn, params, inputs)
    targets = single(normal(2, *shape.shape))
    return Case(jk.Objective(apply_fn, jk.Gaussian()), params, (inputs, targets), tolerance=1e-5)


@program("pdequinox: UNet", family=FAMILY, checked="gradient", needs=("pdequinox",))
def _unet():
    import pdequinox

    net = pdequinox.arch.ClassicUNet(
        1, 1, 1, hidden_channels=4, num_levels=1, key=jax.random.key(0)
    )
    return _equinox(single(net), single(normal(1, 2, 1, 8)), lambda net, row: net(row))


@program("e3nn: equivariant linear layers", family=FAMILY, checked="gradient", needs=("e3nn_jax",))
def _equivariant():
    import e3nn_jax as e3nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = e3nn.IrrepsArray("2x0e + 1x1o", x)
            x = e3nn.flax.Linear("4x0e + 2x1o")(x)
            x = e3nn.scalar_activation(x, [jax.nn.gelu, None])
            return e3nn.flax.Linear("3x0e")(x).array

    net, x = Net(), single(normal(1, 4, 5))
    params = single(net.init(jax.random.key(0), x))
    return Case(
        jk.Objective(net.apply, jk.Categorical()), params, (x, labels(2, 4)), tolerance=1e-5
    )


def _memax(name: str) -> Case:
    """Two recurrent layers over time, of one sequence at a time."""
    from memax.equinox import train_utils

    net = train_utils.get_residual_memory_model(name, 3, 4, 2, num_layers=1, key=jax.random.key(0))
    starts = jnp.zeros(5, bool)

    def outputs(net, row):
        return net(net.initialize_carry(), (row, starts))[1]

    return _equinox(single(net), single(normal(1, 2, 5, 3)), outputs)


@program("memax: gated recurrent unit", family=FAMILY, checked="gradient", needs=("memax",))
def _memax_gru():
    return _memax("GRU")


@program("memax: linear recurrence", family=FAMILY, checked="gradient", needs=("memax",))
def _memax_linear():
    return _memax("LinearRNN")


@program("memax: gated delta net", family=FAMILY, checked="gradient", needs=("memax",))
def _memax_delta():
    return _memax("GDN")


@program("memax: S6 (Mamba)", family=FAMILY, checked="gradient", needs=("memax",))
def _memax_mamba():
    return _memax("S6")


COMPLEX = {f"layers/0/{name}": "to complex numbers" for name in ("B_re", "B_im", "C_re", "C_im")}
BESIDE = {f"layers/0/{name}_log": "goes through `exp`" for name in ("gamma", "nu", "theta")}


@program(
    "memax: linear recurrent unit, complex",
    family=FAMILY,
    checked="gradient",
    uncovered=COMPLEX | BESIDE,
    needs=("memax",),
)
def _memax_lru():
    return _memax("LRU")


# ------------------------------------------------------------------ Penzai


@program(
    "Penzai: Llama",
    family=FAMILY,
    checked="gradient",
    needs=("penzai",),
)
def _penzai_llama():
    from penzai import pz
    from penzai.models.transformer.variants import llamalike_common

    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=1, query_head_multiplier=2, embedding_dim=8, projection_dim=4,
        mlp_hidden_dim=12, num_decoder_blocks=2, vocab_size=17, mlp_variant="swiglu",
        tie_embedder_and_logits=False, rope_wavelength=10_000, rms_norm_eps=1e-6,
        attention_type=llamalike_common.AttentionTypeGlobalCausal(),
        parameter_dtype=jnp.float32, activation_dtype=jnp.float32,
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

    params = {name: variable.value for name, variable in names.items()}
    tokens = labels(1, 2, 5, classes=17)
    objective = jk.Objective(apply_fn, jk.Categorical())
    return Case(objective, params, (tokens, jnp.roll(tokens, -1, 1)), tolerance=1e-5)
