"""Make a bank."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxkfac.lslora._adapter import Adapter, Adapters, only_adapters
from jaxkfac.lslora._bank import Bank
from jaxkfac.lslora._config import Config
from jaxkfac.lslora._fourier import FOURIER
from jaxkfac.lslora._registry import find_nonlinearity
from jaxkfac.lslora._slots import check_layers, check_names, each_leaf, padded, scaling_of


def stack(
    adapters: Mapping[str, Adapters],
    configs: Mapping[str, Config] | Config | None = None,
    *,
    slots: int | None = None,
) -> Bank:
    """Put several adapters of one model into a bank.

    Ranks are padded with zeros to the largest, which changes no output. Plain LoRA may stand
    beside adapters with a nonlinearity: its sigma is infinite there.

    Args:
        adapters: ``{name: adapters}``, all with the same layers.
        configs: The settings of each, or of all. Needed where their scalings differ: every
            adapter's own scaling goes into its ``b``. Needed also for another nonlinearity than
            the Fourier one.
        slots: How many adapters the bank can hold; as many as are given by default.

    Returns:
        A :class:`Bank`; the index of a name is its place in ``adapters`` (inside ``jax.jit``,
        which sorts the keys of dictionaries, its place among the sorted names).

    Raises:
        ValueError: names that cannot be used, different layers, too few slots, placements
            or nonlinearities that differ.

    Example:
        >>> import jax, jax.numpy as jnp, jaxkfac.lslora as lslora
        >>> def apply_fn(params, x):
        ...     return x @ params["kernel"]
        >>> params, x = {"kernel": jnp.ones((3, 2))}, jnp.ones((5, 3))
        >>> config = lslora.Config(rank=1, target="kernel")
        >>> first = lslora.init(config, apply_fn, params, x, key=jax.random.key(0))
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
    held: dict[str, Adapter] = {}
    for name, each in adapters.items():
        check_layers(name, each, first)
    for layer in only_adapters(first):
        own = {name: only_adapters(each)[layer] for name, each in adapters.items()}
        rank = max(x.a.shape[-1] for x in own.values())
        linear = all(x.is_linear for x in own.values())
        phi = None if linear else find_nonlinearity(nonlinearity)
        parts = [
            padded(x, rank, scaling_of(every[name], layer), phi, f"adapter {name!r}")
            for name, x in own.items()
        ]
        parts += [jax.tree.map(jnp.zeros_like, parts[0])] * (slots - len(parts))
        held[layer] = each_leaf(lambda axis, *xs: jnp.stack(xs, axis), *parts)
    enabled = jnp.arange(slots) < len(adapters)
    names = (*adapters, *[None] * (slots - len(adapters)))
    return Bank(held, enabled.astype(jnp.float32), configs is not None, names, nonlinearity)
