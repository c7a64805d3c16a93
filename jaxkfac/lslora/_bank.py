"""Several adapters in one tree, selected by an index that is data."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxkfac._text import array_text
from jaxkfac.linalg import statistics_dtype
from jaxkfac.lslora._config import OWN_AXES, Adapter, Adapters, Config, only_adapters
from jaxkfac.lslora._nonlinearity import FOURIER, Nonlinearity, find_nonlinearity

# ---------------- slots: an extra axis after the stack in every leaf of an adapter


def check_names(names: Sequence[str]) -> None:
    """Refuse names that cannot be part of a key or a folder.

    Raises:
        ValueError: names the first such name.
    """
    for name in names:
        if not name.isidentifier() or name in ("lora", "base_layer"):
            raise ValueError(
                f"adapter name {name!r}: expected an identifier (no path separator, no dot), and "
                "not 'lora' or 'base_layer', which PEFT's own keys contain"
            )


def check_layers(name: str, adapters: Adapters, first: Mapping[str, Any]) -> None:
    if full_parameters := sorted(adapters.keys() - only_adapters(adapters).keys()):
        raise ValueError(
            f"adapter {name!r} holds whole parameters, which a bank cannot: {full_parameters}"
        )
    if different := sorted(adapters.keys() ^ first.keys()):
        raise ValueError(
            f"adapter {name!r} and the others of the bank adapt different layers: {different}"
        )


def scaling_of(config: Config | None, layer: str) -> float:
    return 1.0 if config is None else config.scaling(layer)


def check_settings(name: str, layer: str, adapter: Adapter, config: Config | None) -> None:
    """Refuse settings that an adapter was not made with.

    Plain LoRA passes with the settings of a nonlinear adapter, since one config may be given for
    all adapters of a bank.

    Raises:
        ValueError: the rank differs, from which the scaling is made; or the settings are those of
            plain LoRA, and the adapter has coefficients.
    """
    if config is None:
        return
    rank, expected = adapter.a.shape[-1], config.rank_of(layer)
    if rank != expected:
        raise ValueError(
            f"adapter {name!r} has rank {rank} at {layer!r}, and its config says {expected}, which "
            "its scaling is made from: give the config that it was made with"
        )
    if config.phi is None and not adapter.is_linear:
        raise ValueError(
            f"adapter {name!r} has coefficients at {layer!r}, and its config has "
            "fourier_placement='none': give the config that it was made with"
        )


def each_leaf(fn: Callable[..., Any], *adapters: Adapter) -> Adapter:
    """Apply ``fn(negative slot axis, leaf of each adapter)`` to every leaf."""
    new = {}
    for leaf_name, num_axes in OWN_AXES.items():
        leaves = [getattr(adapter, leaf_name) for adapter in adapters]
        new[leaf_name] = None if leaves[0] is None else fn(leaves[0].ndim - num_axes, *leaves)
    return type(adapters[0])(**new)


def pick_slot(bank_leaves: Adapter, slot: ArrayLike) -> Adapter:
    """The adapter in one slot; NaN if a traced index is beyond the bank."""
    return each_leaf(lambda axis, x: jnp.take(x, slot, axis=axis - 1, mode="fill"), bank_leaves)


def with_slot(bank_leaves: Adapter, slot: int, adapter: Adapter) -> Adapter:
    def write(axis: int, x: Any, y: Any) -> Any:
        return jnp.asarray(x).at[(slice(None),) * (axis - 1) + (slot,)].set(y.astype(x.dtype))

    return each_leaf(write, bank_leaves, adapter)


def padded(
    adapter: Adapter, rank: int, scaling: float, phi: Nonlinearity | None, where: str
) -> Adapter:
    """An adapter padded to a larger rank, with its scaling multiplied into ``b``.

    ``phi`` is the nonlinearity of the bank, if it has one.
    """
    extra = rank - adapter.a.shape[-1]
    lead = [(0, 0)] * (adapter.a.ndim - 2)
    out = adapter._replace(
        a=jnp.pad(adapter.a, [*lead, (0, 0), (0, extra)]),
        b=jnp.pad(adapter.b, [*lead, (0, extra), (0, 0)]) * scaling,
    )
    if adapter.coefficients is not None and phi is not None:
        phi.check(adapter.coefficients.shape, where)
    if phi is None or not adapter.is_linear:
        return out
    stack, wide = adapter.a.shape[:-2], statistics_dtype(adapter.a.dtype)
    return out._replace(
        coefficients=jnp.broadcast_to(jnp.asarray(phi.first(wide)), (*stack, len(phi.initial))),
        sigma=jnp.full(stack, jnp.inf, wide),
    )


# ---------------- a bank


@jax.tree_util.register_pytree_with_keys_class
class Bank:
    r"""Named adapters in slots, with one array per leaf, padded to the largest rank.

    A bank is a pytree of arrays. Replacing, enabling or disabling an adapter changes data but no
    shape, so nothing is compiled again. Names live on the host and are not part of the tree: a bank
    that comes out of a transformation has none until ``named`` sets them again.

    Attributes:
        adapters: Leaves ``(*stack, slots, ...)``; entries beyond an adapter's own rank start at
            zero. They stay zero in training, except for ``b`` with the placement
            ``"bottleneck"``, once $\varphi(0)$ is not zero.
        enabled: One number per slot; a slot that is not positive means the base model.
        scaled: Whether ``b`` includes each adapter's scaling.
        nonlinearity: Name of the adapters' nonlinearity; plain LoRA is exempt.
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
        """The arrays; names are dropped."""
        key = jax.tree_util.GetAttrKey
        children = ((key("adapters"), self.adapters), (key("enabled"), self.enabled))
        return children, (self.scaled, self.nonlinearity)

    @classmethod
    def tree_unflatten(cls, static: tuple[bool, str], children: Sequence[Any]) -> "Bank":
        """Build a bank without names."""
        adapters, enabled = children
        scaled, nonlinearity = static
        return cls(adapters, enabled, scaled, nonlinearity=nonlinearity)

    def __len__(self) -> int:
        return self.enabled.shape[0]

    def __repr__(self) -> str:
        """One line without the arrays."""
        names = "" if self._names is None else f": {', '.join(map(str, self._names))}"
        return f"Bank of {array_text(self.enabled)} slots on {len(self.adapters)} layers{names}"

    @property
    def names(self) -> tuple[str | None, ...]:
        """Name of each slot; ``None`` for a free slot.

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
        """Return the bank with names for its slots."""
        names = tuple(names)
        given = [n for n in names if n is not None]
        check_names(given)
        if repeated := sorted({n for n in given if given.count(n) > 1}):
            raise ValueError(f"names: {repeated} occur more than once, and a name means one slot")
        if len(names) != len(self):
            raise ValueError(f"names: expected {len(self)}, one for each slot, got {len(names)}")
        return self._with(names=names)

    def index(self, name: str) -> int:
        """The slot of a name, for ``adapter=``."""
        if name not in self.names:
            names = [n for n in self.names if n is not None]
            raise ValueError(f"no adapter {name!r}; the bank holds {names}")
        return self.names.index(name)

    def get(self, name: str, config: Config | None = None) -> Adapters:
        """Return one adapter; with ``config``, at its own rank and scaling.

        Plain LoRA comes without the coefficients that it has beside nonlinear adapters.

        Raises:
            ValueError: the bank includes the scalings, and ``config`` is not given; or ``config``
                is not the adapter's: entries beyond its rank are not zero, or one of the two is
                plain LoRA. Values are checked unless they are traced.
        """
        slot = self.index(name)
        self._check_config(config)
        return {
            layer: _own_form(pick_slot(bank_leaves, slot), config, name, layer)
            for layer, bank_leaves in self.adapters.items()
        }

    def set(self, name: str, adapters: Adapters, config: Config | None = None) -> "Bank":
        """Put an adapter into the bank, enabled: into its slot if the name exists, else a free one.

        Args:
            name: Name of the adapter.
            adapters: Adapters for the layers of the bank, whose dtypes they take.
            config: Their settings; required exactly if the bank was made with settings.

        Raises:
            ValueError: there is no free slot; or the adapters have other layers, other shapes,
                another nonlinearity, or a rank larger than the bank's; or ``config`` has another
                rank.
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
            bank_leaves = self.adapters[layer]
            rank = bank_leaves.a.shape[-1]
            if added.a.shape[-1] > rank:
                raise ValueError(
                    f"adapter {name!r} has rank {added.a.shape[-1]} at {layer!r}, and the bank was "
                    f"made for ranks up to {rank}"
                )
            if bank_leaves.is_linear and not added.is_linear:
                raise ValueError(f"adapter {name!r} has a nonlinearity; this bank is plain LoRA")
            check_settings(name, layer, added, config)
            phi = None if bank_leaves.is_linear else find_nonlinearity(self.nonlinearity)
            new_slot = padded(added, rank, scaling_of(config, layer), phi, f"adapter {name!r}")
            _check_fits(name, layer, new_slot, jax.eval_shape(pick_slot, bank_leaves, slot))
            new[layer] = with_slot(bank_leaves, slot, new_slot)
        names[slot] = name
        return self._with(new, self._enabled_at(slot, 1), tuple(names))

    def delete(self, name: str) -> "Bank":
        """Clear an adapter's slot and free it."""
        slot, names = self.index(name), list(self.names)
        names[slot] = None
        cleared = {
            layer: with_slot(
                bank_leaves, slot, jax.tree.map(jnp.zeros_like, pick_slot(bank_leaves, slot))
            )
            for layer, bank_leaves in self.adapters.items()
        }
        return self._with(cleared, self._enabled_at(slot, 0), tuple(names))

    def enable(self, name: str) -> "Bank":
        """Return the bank with an adapter in use."""
        return self._with(enabled=self._enabled_at(self.index(name), 1))

    def disable(self, name: str) -> "Bank":
        """Return the bank with the base model instead of an adapter, whose leaves are kept."""
        return self._with(enabled=self._enabled_at(self.index(name), 0))

    def chosen(self, index: Any) -> tuple[dict[str, Adapter], Array | None]:
        """Adapters for the engine: of one slot, or of all slots with the slot of each example.

        Raises:
            ValueError: as for :meth:`check_index`.
        """
        self.check_index(index)
        index = jnp.asarray(index)
        if jnp.issubdtype(index.dtype, jnp.unsignedinteger):  # which has no -1
            most = min(len(self), int(jnp.iinfo(index.dtype).max))
            index = jnp.minimum(index, most).astype(jnp.int32)
        off = jnp.take(self.enabled, jnp.maximum(index, 0), mode="fill") <= 0  # NaN beyond the bank
        index = jnp.where(off, -1, index)
        if index.ndim:
            return self.adapters, index
        on, slot = index >= 0, jnp.maximum(index, 0)

        # All leaves, since zero times the NaN of a diverged adapter that is disabled would be NaN.
        adapters = {
            name: jax.tree.map(
                lambda x: jnp.where(on, x, jnp.zeros((), x.dtype)), pick_slot(bank_leaves, slot)
            )
            for name, bank_leaves in self.adapters.items()
        }
        return adapters, None

    def check_index(self, index: Any) -> None:
        """Refuse an index that selects no slots; the value of a traced index is not checked.

        Raises:
            ValueError: the index is missing, not an integer, or beyond the bank.
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
        is_concrete = isinstance(index, np.ndarray) and index.size > 0
        if is_concrete and (index.max() >= len(self) or index.min() < -1):
            raise ValueError(
                f"adapter={index.tolist()}: expected indices from -1 to {len(self) - 1}"
            )

    def check_nonlinearity(self, name: str) -> None:
        """Refuse a nonlinearity other than the bank's.

        Raises:
            ValueError: names both.
        """
        if name != self.nonlinearity:
            raise ValueError(
                f"nonlinearity={name!r}, and the bank was stacked for {self.nonlinearity!r}; "
                "stack(adapters, configs) takes it from the configs"
            )

    def _enabled_at(self, slot: int, value: int) -> Array:
        return jnp.asarray(self.enabled).at[slot].set(value)

    def _with(
        self,
        adapters: dict[str, Adapter] | None = None,
        enabled: Any = None,
        names: tuple[str | None, ...] | None = None,
    ) -> "Bank":
        """A copy of the bank with some attributes replaced."""
        return Bank(
            self.adapters if adapters is None else adapters,
            self.enabled if enabled is None else enabled,
            self.scaled,
            self.names if names is None else names,
            self.nonlinearity,
        )

    def _check_config(self, config: Config | None) -> None:
        if self.scaled != (config is not None):
            expected = "with settings: give this adapter's" if self.scaled else "without settings"
            raise ValueError(f"config: the bank was stacked {expected}")
        if config is not None and config.phi is not None:
            self.check_nonlinearity(config.nonlinearity)


def _check_fits(name: str, layer: str, adapter: Adapter, slot: Adapter) -> None:
    """Refuse leaves that a write into a slot would broadcast."""
    for leaf_name, expected in slot._asdict().items():
        leaf = getattr(adapter, leaf_name)
        if leaf is not None and leaf.shape != expected.shape:
            raise ValueError(
                f"adapter {name!r}: expected {leaf_name} of shape {expected.shape} at {layer!r}, "
                f"as in the bank, got {leaf.shape}"
            )


def _own_form(adapter: Adapter, config: Config | None, name: str, layer: str) -> Adapter:
    """The adapter of a slot as it was before it was padded."""
    values = [x for x in adapter if x is not None]
    known = not any(isinstance(x, Tracer) for x in values)
    is_plain = adapter.sigma is None or (known and bool(np.isinf(np.asarray(adapter.sigma)).all()))
    if config is None:
        return adapter._replace(coefficients=None, sigma=None) if is_plain else adapter
    if known and is_plain != (config.phi is None):
        have = "plain LoRA" if is_plain else "a nonlinearity"
        raise ValueError(
            f"adapter {name!r} has {have} at {layer!r}, and config has fourier_placement="
            f"{config.fourier_placement!r}: give the config that it was made with"
        )
    rank, scaling = config.rank_of(layer), scaling_of(config, layer)
    beyond = adapter.a[..., rank:], adapter.b[..., rank:, :]
    if rank > adapter.a.shape[-1] or (known and any(np.asarray(x).any() for x in beyond)):
        raise ValueError(
            f"adapter {name!r}: config says rank {rank} at {layer!r}, and the bank, made for ranks "
            f"up to {adapter.a.shape[-1]}, holds values beyond it or no such rank: give the config "
            "that it was made with. Training a bank with fourier_placement='bottleneck' also "
            "changes them, where phi(0) is not 0; such an adapter keeps the bank's rank"
        )
    adapter = adapter._replace(a=adapter.a[..., :rank], b=adapter.b[..., :rank, :] / scaling)
    return adapter._replace(coefficients=None, sigma=None) if config.phi is None else adapter


# ---------------- making a bank


def stack(
    adapters: Mapping[str, Adapters],
    configs: Mapping[str, Config] | Config | None = None,
    *,
    slots: int | None = None,
) -> Bank:
    """Put several adapters of one model into a bank.

    Ranks are padded with zeros to the largest, which changes no output. Plain LoRA may share a bank
    with nonlinear adapters: its sigma is infinite there.

    Args:
        adapters: ``{name: adapters}``, all with the same layers.
        configs: Settings of each adapter, or one for all. They are required if the scalings
            differ, because each adapter's scaling is multiplied into its ``b`` (and rounded to
            the dtype of ``b``), and for a nonlinearity other than the Fourier one.
        slots: Number of slots; by default the number of adapters.

    Returns:
        A :class:`Bank`. The index of a name is its place in ``adapters``; inside ``jax.jit``,
        which sorts dictionary keys, it is its place among the sorted names.

    Raises:
        ValueError: names that cannot be used, different layers, too few slots, placements or
            nonlinearities that differ, or settings of another rank than the adapter's.

    Example:
        >>> import jax, jax.numpy as jnp, jaxkfac.lslora as lslora
        >>> def apply_fn(params, x):
        ...     return x @ params["kernel"]
        >>> params, x = {"kernel": jnp.ones((3, 2))}, jnp.ones((5, 3))
        >>> config = lslora.Config(rank=1, target="kernel")
        >>> first = lslora.init(apply_fn, config, params, x, key=jax.random.key(0))
        >>> bank = lslora.stack({"a": first, "b": first}, config)
        >>> adapted = lslora.attach(apply_fn, config)
        >>> adapted(params, bank, x, adapter=jnp.array([0, 1, -1, 0, 1])).shape
        (5, 2)
    """
    if not adapters:
        raise ValueError("stack: no adapters")
    check_names(list(adapters))
    slots = len(adapters) if slots is None else slots
    if slots < len(adapters):
        raise ValueError(f"slots={slots}: there are {len(adapters)} adapters")
    every: Mapping[str, Config | None]
    every = configs if isinstance(configs, Mapping) else dict.fromkeys(adapters, configs)
    if missing := adapters.keys() - every.keys():
        raise ValueError(f"configs: none for {sorted(missing)}")
    nonlinear = [c for c in every.values() if c is not None and c.phi is not None]
    placements = {c.fourier_placement for c in nonlinear}
    if len(placements) > 1:
        raise ValueError(f"one bank holds one fourier_placement, got {sorted(placements)}")
    kinds = {c.nonlinearity for c in nonlinear} or {FOURIER.name}
    if len(kinds) > 1:
        raise ValueError(f"one bank holds one nonlinearity, got {sorted(kinds)}")
    (nonlinearity,) = kinds
    first = next(iter(adapters.values()))
    bank_leaves: dict[str, Adapter] = {}
    for name, one_adapter in adapters.items():
        check_layers(name, one_adapter, first)
    for layer in only_adapters(first):
        layer_adapters = {
            name: only_adapters(one_adapter)[layer] for name, one_adapter in adapters.items()
        }
        for name, x in layer_adapters.items():
            check_settings(name, layer, x, every[name])
        rank = max(x.a.shape[-1] for x in layer_adapters.values())
        linear = all(x.is_linear for x in layer_adapters.values())
        phi = None if linear else find_nonlinearity(nonlinearity)
        slot_adapters = [
            padded(x, rank, scaling_of(every[name], layer), phi, f"adapter {name!r}")
            for name, x in layer_adapters.items()
        ]
        slot_adapters += [jax.tree.map(jnp.zeros_like, slot_adapters[0])] * (
            slots - len(slot_adapters)
        )
        bank_leaves[layer] = each_leaf(lambda axis, *xs: jnp.stack(xs, axis), *slot_adapters)
    enabled = jnp.arange(slots) < len(adapters)
    names = (*adapters, *[None] * (slots - len(adapters)))
    return Bank(bank_leaves, enabled.astype(jnp.float32), configs is not None, names, nonlinearity)
