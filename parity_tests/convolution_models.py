"""Convolutions: strides, padding, dilation and groups, in one and two dimensions."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from torch import nn

from parity_tests.layout import Twin
from parity_tests.problem import Data, FromNnx, Problem

OUTPUTS = 3


def _conv(name: str, shape: tuple[int, ...], *, bias: bool) -> Twin:
    path = f"{name}/bias" if bias else None
    return Twin(f"{name}/kernel", (name,), "conv", shape, f"{name}/kernel", path)


HEAD = Twin("head/kernel", ("head",), "dense", (OUTPUTS, 4), "head/kernel", "head/bias")


# ---------------------------------------------------------------- images, in Flax NNX


class _Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 0))
        self.second = nn.Conv2d(4, 4, 2, dilation=(1, 2), groups=2, bias=False)
        self.head = nn.Linear(4, OUTPUTS)

    def forward(self, x):
        return self.head(self.second(self.first(x).tanh()).tanh().mean((2, 3)))


class _NnxImages(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Conv(2, 4, (3, 2), strides=(2, 1), padding=((1, 1), (0, 0)), rngs=rngs)
        self.second = nnx.Conv(
            4, 4, (2, 2), padding="VALID", kernel_dilation=(1, 2), feature_group_count=2,
            use_bias=False, rngs=rngs,
        )  # fmt: skip
        self.head = nnx.Linear(4, OUTPUTS, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.tanh(self.second(jnp.tanh(self.first(x)))).mean((1, 2)))


def _images(seed: int) -> Data:
    rng = np.random.default_rng([11, seed])
    x = rng.normal(size=(16, 2, 6, 5))
    return Data(x, x.transpose(0, 2, 3, 1), rng.integers(0, OUTPUTS, size=len(x)))


CONV2D = Problem(
    _Images,
    FromNnx(_NnxImages),
    (_conv("first", (4, 2, 3, 2), bias=True), _conv("second", (4, 2, 2, 2), bias=False), HEAD),
    _images,
)


# ---------------------------------------------------------------- 576 features, beyond 512

CHANNELS, WIDE_OUTPUTS = 64, 3  # a window of 3 by 3 on 64 channels, as in the body of a ResNet
CORNER = 9 * CHANNELS


class _WidePatches(nn.Module):
    """A convolution, and beside it a dense layer that reads one corner of the image."""

    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(CHANNELS, WIDE_OUTPUTS, 3, stride=2, padding=1)
        self.corner = nn.Linear(CORNER, WIDE_OUTPUTS)

    def forward(self, x):
        corner = x[:, :, :3, :3].permute(0, 2, 3, 1).flatten(1)
        return self.body(x).tanh().mean((2, 3)) + self.corner(corner)


def _wide_patches() -> Any:
    def apply(p: Any, x: Any) -> Any:
        y = lax.conv_general_dilated(
            x, p["body"]["kernel"], (2, 2), ((1, 1), (1, 1)),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip
        corner = x[:, :3, :3].reshape(len(x), -1) @ p["corner"]["kernel"] + p["corner"]["bias"]
        return jnp.tanh(y + p["body"]["bias"]).mean((1, 2)) + corner

    return apply


def _many_channels(seed: int) -> Data:
    rng = np.random.default_rng([13, seed])
    x = rng.normal(size=(4, CHANNELS, 6, 6))
    return Data(x, x.transpose(0, 2, 3, 1), rng.integers(0, WIDE_OUTPUTS, size=len(x)))


WIDE_PATCHES = Problem(
    _WidePatches,
    _wide_patches,
    (
        _conv("body", (WIDE_OUTPUTS, CHANNELS, 3, 3), bias=True),
        Twin(
            "corner/kernel",
            ("corner",),
            "dense",
            (WIDE_OUTPUTS, CORNER),
            "corner/kernel",
            "corner/bias",
        ),
    ),
    _many_channels,
    options=(("expand", "joint"),),
)


# ---------------------------------------------------------------- sequences, a term each


class _Sequences(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(3, 4, 3, stride=2, padding=1, bias=False)
        self.second = nn.Conv1d(4, 4, 2, groups=2)
        self.head = nn.Linear(4, OUTPUTS)

    def forward(self, x):
        return self.head(self.second(self.first(x).tanh()).tanh().mT)


def _sequences() -> Any:
    def conv(x: Any, kernel: Any, stride: int, padding: int, groups: int = 1) -> Any:
        return lax.conv_general_dilated(
            x, kernel, (stride,), ((padding, padding),),
            dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=groups,
        )  # fmt: skip

    def apply(p: Any, x: Any) -> Any:
        x = jnp.tanh(conv(x, p["first"]["kernel"], 2, 1))
        x = jnp.tanh(conv(x, p["second"]["kernel"], 1, 0, groups=2) + p["second"]["bias"])
        return x @ p["head"]["kernel"] + p["head"]["bias"]

    return apply


def _signals(seed: int) -> Data:
    rng = np.random.default_rng([12, seed])
    x = rng.normal(size=(12, 3, 8))
    return Data(x, x.transpose(0, 2, 1), rng.integers(0, OUTPUTS, size=(len(x), 3)))


CONV1D = Problem(
    _Sequences,
    _sequences,
    (_conv("first", (4, 3, 3), bias=False), _conv("second", (4, 2, 2), bias=True), HEAD),
    _signals,
)
