"""Dense layers with a nonlinearity between them."""

from collections.abc import Callable, Sequence

import jax
from flax import nnx
from jaxtyping import Array, Float


class MLP(nnx.Module):
    """``features[0] -> ... -> features[-1]``; leading axes of the input are batch axes.

    Example:
        >>> model = MLP([64, 32, 10], rngs=nnx.Rngs(0))
        >>> model(jax.numpy.zeros((5, 64))).shape
        (5, 10)
    """

    def __init__(
        self,
        features: Sequence[int],
        *,
        activation: Callable[[Array], Array] = jax.nn.gelu,
        rngs: nnx.Rngs,
    ) -> None:
        if len(features) < 2:
            raise ValueError(f"features needs an input and an output size, not {list(features)}")
        self.activation = activation
        self.layers = nnx.List(
            nnx.Linear(i, o, rngs=rngs) for i, o in zip(features, features[1:], strict=False)
        )

    def __call__(self, x: Float[Array, "*batch inputs"]) -> Float[Array, "*batch outputs"]:
        *hidden, last = self.layers
        for layer in hidden:
            x = self.activation(layer(x))
        return last(x)
