"""Convolutions of every kind, with taps that say what their rows are."""

import dataclasses

import jax.numpy as jnp
from jax import lax

from tests._cases import Case
from tests._programs import labels, normal, tree
from tests._taps import patches

LAST = {1: ("NHC", "HIO", "NHC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}
FIRST = {1: ("NCH", "OIH", "NCH"), 2: ("NCHW", "OIHW", "NCHW"), 3: ("NCDHW", "OIDHW", "NCDHW")}


@dataclasses.dataclass(frozen=True)
class Convolution:
    """A convolution layer; ``patches`` has the meaning of each number."""

    space: tuple[int, ...]
    window: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    padding: tuple[tuple[int, int], ...] | None = None
    dilation: tuple[int, ...] | None = None
    input_dilation: tuple[int, ...] | None = None
    groups: int = 1
    channels: tuple[int, int] = (2, 4)
    layout: str = "last"
    bias: bool = True

    @property
    def axes(self) -> int:
        return len(self.window)

    def kernel_shape(self) -> tuple[int, ...]:
        i, o = self.channels[0] // self.groups, self.channels[1]
        return (*self.window, i, o) if self.layout == "last" else (o, i, *self.window)

    def input_shape(self, n: int) -> tuple[int, ...]:
        c = self.channels[0]
        return (n, *self.space, c) if self.layout == "last" else (n, c, *self.space)

    def __call__(self, x, kernel, bias=None):
        """Outputs with channels where the layout has them."""
        y = lax.conv_general_dilated(
            x, kernel, self.strides or (1,) * self.axes, self.padding or ((0, 0),) * self.axes,
            lhs_dilation=self.input_dilation, rhs_dilation=self.dilation,
            dimension_numbers=(LAST if self.layout == "last" else FIRST)[self.axes],
            feature_group_count=self.groups,
        )  # fmt: skip
        if bias is None:
            return y
        return y + (bias if self.layout == "last" else bias.reshape(-1, *[1] * self.axes))

    def tapped(self, tap, name, x, y, at=()):
        """The same outputs, channels last, through one tap for each group."""
        if self.layout == "first":
            x, y = jnp.moveaxis(x, 1, -1), jnp.moveaxis(y, 1, -1)
        rows = patches(
            x, self.window, self.strides, self.padding, dilation=self.dilation,
            input_dilation=self.input_dilation,
        )  # fmt: skip
        i, o = (c // self.groups for c in self.channels)
        parts = []
        for g in range(self.groups):
            part = rows[..., g * i : (g + 1) * i]
            if self.layout == "first":  # the parameter has its input channels before the window
                part = jnp.moveaxis(part, -1, 1 + self.axes)
            here = (*at, g) if self.groups > 1 else at
            parts.append(
                tap.dense(
                    name, part, y[..., g * o : (g + 1) * o], at=here, bias=self.bias,
                    in_axes=self.axes + 1,
                )
            )  # fmt: skip
        return jnp.concatenate(parts, axis=-1)

    def model(self, p, x, tap):
        """The layer, its nonlinearity, a mean over space and a dense layer."""
        y = self(x, p["k"], p["b"] if self.bias else None)
        y = jnp.tanh(self.tapped(tap, "k", x, y)).mean(axis=tuple(range(1, 1 + self.axes)))
        return tap.dense("w", y, y @ p["w"])

    def case(self, n: int = 2) -> Case:
        p = tree(81, k=self.kernel_shape(), b=self.channels[1:], w=(self.channels[1], 3))
        if not self.bias:
            del p["b"]
        batch = (normal(1, *self.input_shape(n), scale=1.0), labels(2, n))
        return Case(self.model, self.model, p, batch)


CONVOLUTIONS = {
    "1-D": Convolution((7,), (3,)),
    "1-D, strided and padded": Convolution((7,), (3,), (2,), ((1, 2),)),
    "1-D, dilated, channels first": Convolution((9,), (3,), dilation=(3,), layout="first"),
    "2-D": Convolution((4, 5), (3, 2)),
    "2-D, strided and padded": Convolution((5, 4), (3, 2), (2, 1), ((1, 1), (0, 1))),
    "2-D, dilated": Convolution((6, 5), (2, 3), dilation=(3, 2), padding=((0, 1), (1, 0))),
    "2-D, dilated inputs": Convolution((3, 3), (3, 2), (1, 2), ((1, 1), (1, 0)), (1, 2), (2, 3)),
    "2-D, channels first": Convolution((4, 5), (2, 3), (2, 1), ((1, 0), (0, 1)), layout="first"),
    "2-D, cropped": Convolution((5, 5), (3, 3), padding=((-1, 1), (0, -1))),
    "2-D, one by one": Convolution((3, 3), (1, 1), (2, 2)),
    "3-D": Convolution((3, 4, 3), (2, 2, 3), (1, 2, 1), ((0, 1), (0, 0), (1, 1))),
    "3-D, channels first": Convolution((3, 3, 3), (2, 2, 2), layout="first", bias=False),
    "grouped": Convolution((4, 4), (2, 3), groups=2, channels=(4, 6)),
    "grouped, strided and dilated": Convolution(
        (5, 6), (2, 2), (2, 1), ((1, 0), (0, 1)), (1, 2), groups=2, channels=(4, 4), bias=False
    ),
    "grouped, channels first": Convolution(
        (6,), (3,), (2,), ((1, 1),), groups=3, channels=(6, 3), layout="first"
    ),
    "depthwise": Convolution((4, 4), (2, 2), padding=((1, 0), (0, 0)), groups=3, channels=(3, 3)),
    "depthwise, two outputs each": Convolution((6,), (3,), groups=2, channels=(2, 4)),
    "3-D, grouped": Convolution((2, 3, 3), (2, 2, 1), groups=2, channels=(2, 2)),
}
