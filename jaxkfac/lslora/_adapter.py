"""One layer's adapter."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxtyping import Array, Float

from jaxkfac._display import array_text, short_repr, table_html

# How many axes of its own each leaf of an adapter has, after the stack.
OWN_AXES = {"a": 2, "b": 2, "coefficients": 1, "sigma": 0}


class Adapter(NamedTuple):
    r"""The trained leaves of one layer's branch.

    Leading axes are the layer's stack: scanned slices, then experts. In a :class:`Bank` one
    more axis, the bank's slots, follows them.

    Attributes:
        a: $A$, what maps the layer's inputs to the bottleneck.
        b: $B$, what maps the bottleneck to the layer's outputs.
        coefficients: Of the nonlinearity, for each slice, float32: $c_0 \ldots c_3$ of the Fourier
            one; ``None`` for plain LoRA.
        sigma: $\sigma$ of each slice, float32; ``None`` for plain LoRA. Infinite in a bank,
            where the slot holds plain LoRA.
    """

    a: Float[Array, "*stack in r"]
    b: Float[Array, "*stack r out"]
    coefficients: Float[Array, "*stack k"] | None
    sigma: Float[Array, "*stack"] | None

    __repr__ = short_repr

    def _repr_html_(self) -> str:
        rows = [(name, array_text(x)) for name, x in self._asdict().items()]
        return table_html("Adapter", ("leaf", "array"), rows, words=(0, 1))

    @property
    def is_linear(self) -> bool:
        """Whether this is plain LoRA."""
        return self.coefficients is None


# {layer: Adapter}, and {path: array} for the parameters of ``modules_to_save``.
Adapters = Mapping[str, Any]


def only_adapters(adapters: Adapters) -> dict[str, Adapter]:
    """The adapters of a tree, without the parameters that are trained whole.

    Raises:
        TypeError: it is no tree of adapters, but a bank or nothing.
    """
    if not isinstance(adapters, Mapping):
        raise TypeError(
            "adapters: expected {layer: Adapter}, as jk.lslora.init returns it, got "
            f"{type(adapters).__name__} (the base model alone: {{}}; one adapter out of a bank: "
            "bank.get(name, config))"
        )
    return {name: x for name, x in adapters.items() if isinstance(x, Adapter)}


def nonlinearities(adapters: Adapters) -> dict[str, tuple[Array, Array]]:
    """``(coefficients, sigma)`` of every adapter that has them."""
    return {
        name: (x.coefficients, x.sigma)
        for name, x in only_adapters(adapters).items()
        if x.coefficients is not None and x.sigma is not None
    }
