"""Several adapters in one tree, chosen as data."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from jaxkfac._display import array_text
from jaxkfac.lslora._adapter import Adapter, Adapters, only_adapters
from jaxkfac.lslora._config import Config
from jaxkfac.lslora._fourier import FOURIER
from jaxkfac.lslora._registry import find_nonlinearity
from jaxkfac.lslora._slots import (
    check_layers,
    check_names,
    padded,
    pick_slot,
    scaling_of,
    with_slot,
)


@jax.tree_util.register_pytree_with_keys_class
class Bank:
    """Named adapters in slots of one array per leaf, padded to the largest rank.

    A pytree of arrays: replacing, enabling or disabling an adapter changes data and no shape, so
    nothing compiles again. Names live on the host: they are no part of the tree, and a bank that
    comes out of a transformation has none until ``named`` gives them back.

    Attributes:
        adapters: Leaves ``(*stack, slots, ...)``; what lies beyond an adapter's own rank is zero.
        enabled: One number per slot; the base model answers for a slot that is not positive.
        scaled: Whether ``b`` includes each adapter's own scaling.
        nonlinearity: Name of the one that its adapters have, those of plain LoRA left out.
    """

    def __init__(
        self,
        adapters: dict[str, Adapter],
        enabled: Any,
        scaled: bool,
        names: tuple[str | None, ...] | None = None,
        nonlinearity: str = FOURIER.name,
    ) -> None:
        self.adapters, self.enabled, self.scaled = adapters, enabled, scaled
        self.nonlinearity = nonlinearity
        self._names = names

    def tree_flatten_with_keys(self) -> tuple[Any, tuple[bool, str]]:
        """Arrays; names are left behind."""
        key = jax.tree_util.GetAttrKey
        children = ((key("adapters"), self.adapters), (key("enabled"), self.enabled))
        return children, (self.scaled, self.nonlinearity)

    @classmethod
    def tree_unflatten(cls, static: tuple[bool, str], children: Sequence[Any]) -> "Bank":
        """A bank without names."""
        adapters, enabled = children
        scaled, nonlinearity = static
        return cls(adapters, enabled, scaled, nonlinearity=nonlinearity)

    def __len__(self) -> int:
        return self.enabled.shape[0]

    def __repr__(self) -> str:
        """One line: the arrays would fill the screen."""
        names = "" if self._names is None else f": {', '.join(map(str, self._names))}"
        return f"Bank of {array_text(self.enabled)} slots on {len(self.adapters)} layers{names}"

    @property
    def names(self) -> tuple[str | None, ...]:
        """Name of each slot, ``None`` for a free one.

        Raises:
            ValueError: the bank went through a transformation.
        """
        if self._names is None:
            raise ValueError(
                "this bank came out of a transformation and has no names: choose its slots by "
                "number, or give the names back with bank.named(names)"
            )
        return self._names

    def named(self, names: Sequence[str | None]) -> "Bank":
        """The bank with names for its slots."""
        names = tuple(names)
        check_names([n for n in names if n is not None])
        if len(names) != len(self):
            raise ValueError(f"names: expected {len(self)}, one for each slot, got {len(names)}")
        return self._with(names=names)

    def index(self, name: str) -> int:
        """The slot of a name, for ``adapter=``."""
        if name not in self.names:
            known = [n for n in self.names if n is not None]
            raise ValueError(f"no adapter {name!r}; the bank holds {known}")
        return self.names.index(name)

    def get(self, name: str, config: Config | None = None) -> Adapters:
        """One adapter again; at its own rank and scaling if its settings are given.

        Raises:
            ValueError: the bank includes the scalings, and no settings are given.
        """
        slot = self.index(name)
        self._check_config(config)
        found = {}
        for layer, held in self.adapters.items():
            part = pick_slot(held, slot)
            if config is not None:
                rank, scaling = config.rank_of(layer), scaling_of(config, layer)
                part = part._replace(a=part.a[..., :rank], b=part.b[..., :rank, :] / scaling)
                if config.phi is None:
                    part = part._replace(coefficients=None, sigma=None)
            found[layer] = part
        return found

    def set(self, name: str, adapters: Adapters, config: Config | None = None) -> "Bank":
        """The bank with an adapter put in, enabled: in its slot if the name is known.

        Args:
            name: Of the adapter.
            adapters: Of the layers of the bank.
            config: Its settings, exactly if the bank was made with settings.

        Raises:
            ValueError: no free slot, other layers, another nonlinearity, or a rank larger than the
                bank's.
        """
        names = list(self.names)
        if name not in names and None not in names:
            raise ValueError(f"no free slot for {name!r} beside {names}: stack with slots=")
        check_names([name])
        self._check_config(config)
        slot = names.index(name) if name in names else names.index(None)
        check_layers(name, adapters, self.adapters)
        new = {}
        for layer, added in only_adapters(adapters).items():
            held = self.adapters[layer]
            rank = held.a.shape[-1]
            if added.a.shape[-1] > rank:
                raise ValueError(
                    f"adapter {name!r} has rank {added.a.shape[-1]} at {layer!r}, and the bank was "
                    f"made for ranks up to {rank}"
                )
            if held.is_linear and not added.is_linear:
                raise ValueError(f"adapter {name!r} has a nonlinearity; this bank is plain LoRA")
            phi = None if held.is_linear else find_nonlinearity(self.nonlinearity)
            part = padded(added, rank, scaling_of(config, layer), phi, f"adapter {name!r}")
            new[layer] = with_slot(held, slot, part)
        names[slot] = name
        return self._with(new, self.enabled.at[slot].set(1), tuple(names))

    def delete(self, name: str) -> "Bank":
        """The bank with an adapter's slot cleared and free."""
        slot, names = self.index(name), list(self.names)
        names[slot] = None
        cleared = {
            layer: with_slot(held, slot, jax.tree.map(jnp.zeros_like, pick_slot(held, slot)))
            for layer, held in self.adapters.items()
        }
        return self._with(cleared, self.enabled.at[slot].set(0), tuple(names))

    def enable(self, name: str) -> "Bank":
        """The bank with an adapter in use."""
        return self._with(enabled=self.enabled.at[self.index(name)].set(1))

    def disable(self, name: str) -> "Bank":
        """The bank with the base model in an adapter's place; its leaves are kept."""
        return self._with(enabled=self.enabled.at[self.index(name)].set(0))

    def chosen(self, index: Any) -> tuple[dict[str, Adapter], Array | None]:
        """Adapters for the engine: one slot's, or all with the slot of each example.

        Raises:
            ValueError: as :meth:`check_index`.
        """
        self.check_index(index)
        index = jnp.asarray(index)
        off = jnp.take(self.enabled, jnp.maximum(index, 0), mode="fill") <= 0  # NaN beyond the bank
        index = jnp.where(off, -1, index)
        if index.ndim:
            return self.adapters, index
        on, slot = index >= 0, jnp.maximum(index, 0)

        def quiet(x: Any) -> Any:
            return None if x is None else jnp.where(on, x, jnp.zeros((), x.dtype))

        found = {}
        for name, held in self.adapters.items():
            one = pick_slot(held, slot)
            found[name] = one._replace(b=quiet(one.b), coefficients=quiet(one.coefficients))
        return found, None

    def check_index(self, index: Any) -> None:
        """Refuse what does not choose slots; how far a traced index reaches is not known.

        Raises:
            ValueError: no index, an index that is no integer, or one beyond the bank.
        """
        if index is None:
            raise ValueError("adapter=: a bank needs the slot's index, or one for each example")
        if not isinstance(index, Tracer):
            index = np.asarray(index)
        if not jnp.issubdtype(index.dtype, jnp.integer) or index.ndim > 1:
            raise ValueError(
                f"adapter=: expected an integer, or one for each example, got "
                f"{index.dtype}{list(index.shape)}"
            )
        known = isinstance(index, np.ndarray) and index.size > 0
        if known and (index.max() >= len(self) or index.min() < -1):
            raise ValueError(
                f"adapter={index.tolist()}: expected indices from -1 to {len(self) - 1}"
            )

    def check_nonlinearity(self, name: str) -> None:
        """Refuse the name of another nonlinearity than the bank's.

        Raises:
            ValueError: naming both.
        """
        if name != self.nonlinearity:
            raise ValueError(
                f"nonlinearity={name!r}, and the bank was stacked for {self.nonlinearity!r}; "
                "stack(adapters, configs) takes it from the configs"
            )

    def _with(
        self,
        adapters: dict[str, Adapter] | None = None,
        enabled: Any = None,
        names: tuple[str | None, ...] | None = None,
    ) -> "Bank":
        """The bank with these in place of its own."""
        return Bank(
            self.adapters if adapters is None else adapters,
            self.enabled if enabled is None else enabled,
            self.scaled,
            self.names if names is None else names,
            self.nonlinearity,
        )

    def _check_config(self, config: Config | None) -> None:
        if self.scaled != (config is not None):
            said = "with settings: give this adapter's" if self.scaled else "without settings"
            raise ValueError(f"config: the bank was stacked {said}")
        if config is not None and config.phi is not None:
            self.check_nonlinearity(config.nonlinearity)
