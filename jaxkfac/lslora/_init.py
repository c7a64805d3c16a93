"""Fresh adapters for the layers that a config names."""

import math
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, PyTree

from jaxkfac._checks import one_of
from jaxkfac._errors import UnknownLayerError, nearest
from jaxkfac.factors import Factors
from jaxkfac.interception import (
    Layer,
    LayerTable,
    decoded_shapes,
    encoded_paths,
    leaves_by_path,
    selector,
)
from jaxkfac.linalg import statistics_dtype
from jaxkfac.lslora._adapter import Adapter, Adapters
from jaxkfac.lslora._attach import attach
from jaxkfac.lslora._config import ALL_LINEAR, Config, RmsSigma
from jaxkfac.lslora._directions import Init, check_source, directions
from jaxkfac.lslora._sigma import measured_sigmas


def init(
    config: Config,
    apply_fn: Callable[..., Any],
    params: PyTree,
    inputs: Any,
    *,
    key: Key[Array, ""],
    dtype: Any = None,
    init: Init = "default",
    factors: Factors | None = None,
    gradient: PyTree = None,
) -> Adapters:
    r"""Adapters that change nothing yet: A uniform in $\pm 1/\sqrt{\text{in}}$, B zero.

    ``init="eva"`` takes the orthonormal directions in which a layer's inputs vary most for A, and
    ``"gradient"`` those from which its gradient is largest, the input side of LoRA-GA. B is zero
    all the same, so that the base stays as it is, and folders are those of any adapter.

    With B = 0 the placement ``"bottleneck"`` has zero gradients for A, $\sigma$ and the
    coefficients at the first step; in ``"output"`` $c_0$ and $c_3$ have equal ones, since
    $\varphi(0) = c_0 + c_3$.

    Args:
        config: The settings.
        apply_fn: As for :func:`attach`.
        params: The base model, any kernels in NF4; shapes suffice, unless $\sigma$ is measured.
        inputs: A batch; shapes suffice, likewise.
        key: For A.
        dtype: Of A and B; that of the layer's parameter by default. Coefficients and $\sigma$
            are float32 at the least.
        init: ``"default"``, ``"eva"`` or ``"gradient"``.
        factors: For ``"eva"``: factors of the base model on the data. Their inputs are centred
            where A has the ones of a bias (``bias="joint"``), as in PEFT; a layer without a bias
            has no mean in its factor, and takes the uncentred second moment.
        gradient: For ``"gradient"``: of the loss in ``params``, a tree like them.

    Returns:
        ``{layer: Adapter}``, and the parameters of ``modules_to_save`` by path.

    Raises:
        UnknownLayerError: the target, or ``modules_to_save``, matches nothing.
        ValueError: the target matches something that cannot be adapted, ``modules_to_save``
            something quantised or a target as well (but with ``"all-linear"``, which leaves it
            out), or the rank is larger than a layer; each named. Or ``init`` lacks its source, the
            source has no such leaf, or has fewer directions than the rank (zeros have none).
        NonFiniteFactorError: factors or a gradient that are not finite.

    Example:
        >>> import jax, jax.numpy as jnp, jaxkfac.lslora as lslora
        >>> adapters = lslora.init(
        ...     lslora.Config(rank=2, target=".*kernel"), lambda p, x: x @ p["kernel"],
        ...     {"kernel": jnp.ones((3, 4))}, jnp.ones((5, 3)), key=jax.random.key(0))
        >>> jax.tree.map(jnp.shape, adapters["kernel"])
        Adapter(a=(3, 2), b=(2, 4), coefficients=(4,), sigma=())

    References:
        Fabian Paischer et al., "One Initialization to Rule them All: Fine-tuning via Explained
        Variance Adaptation", 2024. Shaowen Wang et al., "LoRA-GA: Low-Rank Adaptation with
        Gradient Approximation", 2024.
    """
    one_of("init", init, get_args(Init))
    check_source(init, factors, gradient)
    adapted = attach(apply_fn, config)
    leaves = leaves_by_path(decoded_shapes(params))
    layers = targeted(config, adapted.traced(params, inputs, key).table)
    adapters: dict[str, Any] = {}
    for number, layer in enumerate(layers):
        mine = jax.random.fold_in(key, number)
        own = leaves[layer.weight.path].dtype if dtype is None else dtype
        adapters[layer.name] = _fresh(config, layer, mine, own)
        if init != "default":
            a = directions(init, layer, config.rank_of(layer.name), factors, gradient)
            adapters[layer.name] = adapters[layer.name]._replace(a=a.astype(own))
    if config.modules_to_save is not None:
        whole = selector(config.modules_to_save, list(leaves))
        if quantised := sorted(whole & encoded_paths(params)):
            raise ValueError(
                f"modules_to_save={config.modules_to_save!r} matches {', '.join(quantised)}, which "
                "are quantised and cannot be trained: dequantise them, or leave them out"
            )
        _leave_to_whole(adapters, layers, whole, config)
        adapters |= {path: leaf for path, leaf in leaves.items() if path in whole}
    if isinstance(config.init_sigma, RmsSigma) and config.phi is not None:
        found = measured_sigmas(adapted, params, adapters, inputs, fresh=True)
        for name, rms in found.items():
            adapters[name] = adapters[name]._replace(sigma=config.init_sigma.factor * rms)
    return adapters


def _leave_to_whole(
    adapters: dict[str, Any], layers: list[Layer], whole: set[str], config: Config
) -> None:
    """Take out the adapters of what is trained as a whole, or refuse both for one parameter."""
    both = [layer.name for layer in layers if layer.weight.path in whole]
    if both and config.target != ALL_LINEAR:
        raise ValueError(
            f"target={config.target!r} and modules_to_save={config.modules_to_save!r} both match "
            f"{', '.join(map(repr, both))}: a kernel has an adapter or is trained itself; name it "
            "in exclude=, or leave it out of modules_to_save="
        )
    for name in both:
        del adapters[name]


def targeted(config: Config, table: LayerTable) -> list[Layer]:
    """The layers that a config adapts.

    Raises:
        UnknownLayerError: none.
        ValueError: the target matches what cannot be adapted.
    """
    names = [name for name in table if config.targets(name)]
    layers = [table[name] for name in names]
    wrong = {x.name: f"is of kind {x.kind!r}" for x in layers if not x.is_dense}
    wrong |= {x.name: "is computed from parameters" for x in layers if x.computed_from}
    held = {part.path for x in table.values() for part in (x.weight, x.bias) if part}
    if config.target == ALL_LINEAR:
        layers, wrong = [x for x in layers if x.name not in wrong], {}
    else:
        wrong |= {p: r for p, r in table.uncovered if p not in held and config.targets(p)}
        names += [path for path in wrong if path not in names]
    if not names or (not layers and not wrong):
        raise UnknownLayerError(
            f"target={config.target!r} (exclude={config.exclude!r}) matches no layer; the nearest "
            f"names are {nearest(str(config.target), table)}"
        )
    if wrong:
        rows = "\n".join(f"  {name} {reason}" for name, reason in wrong.items())
        raise ValueError(
            "only dense layers can be adapted, and target= also matches\n"
            f"{rows}\nMake the target narrower, or name these in exclude="
        )
    for layer in layers:
        largest = min(layer.in_features, layer.out_features)
        if config.rank_of(layer.name) > largest:
            raise ValueError(
                f"layer {layer.name!r}: rank {config.rank_of(layer.name)} is larger than the layer "
                f"({layer.in_features} inputs, {layer.out_features} outputs): at most {largest}; "
                "see rank_pattern"
            )
    return layers


def _fresh(config: Config, layer: Layer, key: Any, dtype: Any) -> Adapter:
    rank, bound = config.rank_of(layer.name), 1 / math.sqrt(layer.in_features)
    shape = (*layer.stack, layer.in_features, rank)
    wide = statistics_dtype(dtype)
    a = jax.random.uniform(key, shape, wide, -bound, bound).astype(dtype)
    b = jnp.zeros((*layer.stack, rank, layer.out_features), dtype)
    if (phi := config.phi) is None:
        return Adapter(a, b, None, None)
    sigma = 1.0 if isinstance(config.init_sigma, RmsSigma) else config.init_sigma
    return Adapter(
        a,
        b,
        jnp.broadcast_to(jnp.asarray(phi.first(wide)), (*layer.stack, len(phi.initial))),
        jnp.full(layer.stack, sigma, wide),
    )
