"""Few-shot models: the library's own against the restatement, two episodes a batch."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

import jaxkfac as jk
from jaxkfac import models
from parity_tests.layout import Twin
from parity_tests.problem import EXPAND, Data, Problem
from torch_ref import models as ref

WAY, SHOT, QUERIES, EPISODES, SIDE, WIDTH = 3, 2, 4, 2, 16, 2
HEADS, SIZE, HIDDEN, DEPTH = 2, 3, 5, 2
FEATURES = 4  # of the cosine transformer: of two, a layer norm leaves signs


def _dense(name: str, module: str, n_in: int, n_out: int, *, bias: bool = True) -> Twin:
    beside = f"{name}/bias" if bias else None
    return Twin(f"{name}/kernel", (module,), "dense", (n_out, n_in), f"{name}/kernel", beside)


def _conv(name: str, size: int, n_in: int, n_out: int) -> Twin:
    path, shape = f"backbone/{name}", (n_out, n_in, size, size)
    kernel, module = f"{path}/kernel", path.replace("/", ".")
    return Twin(kernel, (module,), "conv", shape, kernel)


def _norms(*names: str) -> dict[str, tuple[str, ...]]:
    """Scales and biases, under PyTorch's names of them."""
    kinds = (("scale", "weight"), ("bias", "bias"))
    return {f"{n}/{a}": (f"{n.replace('/', '.')}.{b}",) for n in names for a, b in kinds}


def _episodes(seed: int) -> Data:
    rng = np.random.default_rng([51, seed])
    support = rng.normal(size=(EPISODES, WAY, SHOT, SIDE, SIDE, 1))
    query = rng.normal(size=(EPISODES, QUERIES, SIDE, SIDE, 1))
    first = lambda x: np.moveaxis(x, -1, -3)  # channels, as PyTorch has them
    inputs = {"support": first(support), "query": first(query)}
    return Data(inputs, (support, query), rng.integers(0, WAY, size=(EPISODES, QUERIES)))


def _apply(model: Callable[[nnx.Rngs], nnx.Module]) -> Callable[[], Any]:
    """What a call does to the running statistics is dropped."""

    def make() -> Any:
        apply_fn, _ = jk.from_nnx(model(nnx.Rngs(0)), mutable=())

        def apply(params: Any, *inputs: Any) -> Any:
            with jax.numpy_dtype_promotion("standard"):  # flax's LayerNorm, in float64
                return apply_fn(_numbered(params), *inputs)

        return apply

    return make


def _numbered(tree: Any) -> Any:
    """With the keys of an NNX list as numbers."""
    if not isinstance(tree, dict):
        return tree
    return {int(k) if k.isdigit() else k: _numbered(v) for k, v in tree.items()}


# ---------------------------------------------------------------- prototypes on a residual network


def _residual_twins() -> tuple[Twin, ...]:
    found, inputs = [_conv("stem", 3, 1, WIDTH)], WIDTH
    for i in range(4):
        outputs, at = WIDTH * 2**i, f"blocks/{i}"
        found += [
            _conv(f"{at}/first", 3, inputs, outputs),
            _conv(f"{at}/second", 3, *[outputs] * 2),
        ]
        if i:
            found.append(_conv(f"{at}/shortcut", 1, inputs, outputs))
        inputs = outputs
    return tuple(found)


PROTOTYPES = Problem(
    lambda: ref.PrototypicalNetwork(ref.ResNet((1, 1, 1, 1), 1, WIDTH, large=False)),
    _apply(
        lambda rngs: models.PrototypicalNetwork(
            models.ResNet(10, 1, width=WIDTH, stem="small", rngs=rngs)
        )
    ),
    _residual_twins(),
    _episodes,
    options=EXPAND[:1],
    beside=_norms(
        "backbone/stem_norm",
        *(f"backbone/blocks/{i}/{at}_norm" for i in range(4) for at in ("first", "second")),
        *(f"backbone/blocks/{i}/shortcut_norm" for i in range(1, 4)),
    ),
)


# ---------------------------------------------------------------- cosine transformer on Conv-4


def _cosine(rngs: nnx.Rngs) -> nnx.Module:
    config = models.CosineTransformerConfig(
        WAY, SHOT, depth=DEPTH, num_heads=HEADS, head_size=SIZE, hidden=HIDDEN
    )
    return models.CosineTransformer(
        models.Conv4(SIDE, width=FEATURES, rngs=rngs), config, rngs=rngs
    )


COSINE = Problem(
    lambda: ref.CosineTransformer(
        ref.Conv4(1, FEATURES), FEATURES, n_way=WAY, k_shot=SHOT, depth=DEPTH, heads=HEADS,
        head_size=SIZE, hidden=HIDDEN,
    ),
    _apply(_cosine),
    (
        *(_conv(f"convolutions/{i}", 3, FEATURES if i else 1, FEATURES) for i in range(4)),
        _dense("attention/input", "input", FEATURES, HEADS * SIZE, bias=False),
        _dense("attention/output", "output", HEADS * SIZE, FEATURES),
        _dense("up", "up", FEATURES, HIDDEN),
        _dense("down", "down", HIDDEN, FEATURES),
        _dense("head_input", "head_input", FEATURES, SIZE),
    ),
    _episodes,
    options=EXPAND[:1],
    beside={
        **_norms(*(f"backbone/norms/{i}" for i in range(4)), "norm", "head_norm"),
        "attention/norm/scale": ("attention_norm.weight",),
        "attention/norm/bias": ("attention_norm.bias",),
        "support_weights": ("support_weights",),
        "head/direction": ("direction",),
        "head/norm": ("length",),
    },
)  # fmt: skip
