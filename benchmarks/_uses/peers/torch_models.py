"""The models of the problems in PyTorch, for peers in environments of their own."""

import json
import sys
import time
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import gelu, layer_norm, relu, scaled_dot_product_attention

DATA = ("inputs", "targets", "q_inputs", "q_targets")


class Linear(nn.Module):
    def __init__(self, weights: dict[str, Any]) -> None:
        super().__init__()
        self.head = linear(weights, "head")

    def forward(self, x):
        return self.head(x)


class Perceptron(nn.Module):
    def __init__(self, weights: dict[str, Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear(weights, f"layers.{i}") for i in range(3))

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)


class Residual(nn.Module):
    def __init__(self, weights: dict[str, Any], name: str, stride: int) -> None:
        super().__init__()
        for part, step in (("one", stride), ("two", 1), ("skip", stride)):
            if f"{name}.{part}.w" in weights:
                setattr(self, part, convolution(weights, f"{name}.{part}", step))
                setattr(self, f"norm_{part}", batch_norm(weights, f"{name}.{part}"))

    def forward(self, x):
        y = relu(self.norm_one(self.one(x)))
        skipped = self.norm_skip(self.skip(x)) if hasattr(self, "skip") else x
        return relu(skipped + self.norm_two(self.two(y)))


class ResNet(nn.Module):
    def __init__(self, weights: dict[str, Any]) -> None:
        super().__init__()
        self.stem = convolution(weights, "stem", 1)
        self.norm = batch_norm(weights, "stem")
        depth = sum(name.endswith("two.w") for name in weights)
        each = (Residual(weights, f"blocks.{i}", 2 if i else 1) for i in range(depth))
        self.blocks = nn.ModuleList(each)
        self.head = linear(weights, "head")
        self.eval()

    def forward(self, x):
        x = relu(self.norm(self.stem(x.permute(0, 3, 1, 2))))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Block(nn.Module):
    def __init__(self, weights: dict[str, Any], name: str, heads: int) -> None:
        super().__init__()
        for part in ("qkv", "out", "up", "down"):
            setattr(self, part, linear(weights, f"{name}.{part}"))
        self.heads = heads

    def forward(self, x):
        rows, length, width = x.shape
        parts = self.qkv(normed(x)).reshape(rows, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(gelu(self.up(normed(x)), approximate="tanh"))


class Transformer(nn.Module):
    def __init__(self, weights: dict[str, Any], heads: int) -> None:
        super().__init__()
        self.register_buffer("table", tensor(weights["table"]))
        self.register_buffer("places", tensor(weights["places"]))
        depth = sum(name.endswith("qkv.w") for name in weights)
        self.blocks = nn.ModuleList(Block(weights, f"blocks.{i}", heads) for i in range(depth))
        self.head = linear(weights, "head")

    def forward(self, ids):
        x = self.table[ids] + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(normed(x))


def normed(x):
    return layer_norm(x, x.shape[-1:])


def tensor(x):
    return torch.tensor(np.asarray(x))


def filled(layer: nn.Module, **values: Any) -> Any:
    with torch.no_grad():
        for name, value in values.items():
            getattr(layer, name).copy_(tensor(value))
    return layer


def linear(weights: dict[str, Any], name: str) -> nn.Linear:
    kernel, bias = weights[f"{name}.w"], weights.get(f"{name}.b")
    layer = nn.Linear(*kernel.shape, bias=bias is not None, dtype=tensor(kernel).dtype)
    return filled(layer, weight=kernel.T, **({} if bias is None else {"bias": bias}))


def convolution(weights: dict[str, Any], name: str, stride: int) -> nn.Conv2d:
    kernel = weights[f"{name}.w"].transpose(3, 2, 0, 1)
    n_out, n_in, side, _ = kernel.shape
    layer = nn.Conv2d(n_in, n_out, side, stride, side // 2, bias=False, dtype=tensor(kernel).dtype)
    return filled(layer, weight=kernel)


def batch_norm(weights: dict[str, Any], name: str) -> nn.BatchNorm2d:
    mean, variance, scale, shift = (
        weights[f"{name}.{part}"] for part in ("mean", "variance", "scale", "shift")
    )
    layer = nn.BatchNorm2d(len(mean), dtype=tensor(mean).dtype)
    return filled(layer, running_mean=mean, running_var=variance, weight=scale, bias=shift)


MODELS = {"linear": Linear, "perceptron": Perceptron, "resnet": ResNet, "transformer": Transformer}


class Given:
    """What a job is given: ``PROBLEM.npz OUTPUT.npz`` as the words of its command."""

    def __init__(self) -> None:
        problem = dict(np.load(sys.argv[1]))
        self.settings = json.loads(str(problem.pop("settings")))
        self.data = {k: tensor(problem.pop(k)) for k in DATA}
        kind = self.settings["kind"]
        heads = (self.settings["heads"],) if kind == "transformer" else ()
        self.model = MODELS[kind](problem, *heads)
        self.seconds: dict[str, list[float]] = {}
        self._start = _now()

    def stage(self, name: str) -> None:
        """The stage is over; the next one begins."""
        now = _now()
        self.seconds[name] = [b - a for a, b in zip(self._start, now, strict=True)]
        self._start = now

    def finish(self, found: dict[str, Any], versions: dict[str, str]) -> None:
        np.savez(sys.argv[2], **{k: np.asarray(v) for k, v in found.items()})
        print(json.dumps({"seconds": self.seconds, "versions": versions}))


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()
