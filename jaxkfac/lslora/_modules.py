"""Modules of PyTorch models: their names, shared matrices, and fused projections."""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkfac._arguments import ArrayTree, leaves_by_path
from jaxkfac.interception.values import decoded_shapes, encoded_paths
from jaxkfac.linalg import statistics_dtype
from jaxkfac.lslora._config import Adapter, Adapters, Config, only_adapters

# ---------------- names of layers here, and of modules in files


# Maps a layer's name and the index of a slice of its stack to a module's name.
ModuleNames = Callable[[str, tuple[int, ...]], str]

_LEAVES = ("kernel", "weight", "w", "embedding", "scale", "bias")
_STACKS = ("layers", "blocks", "layer", "block", "h")  # components that Hugging Face numbers
_COLLECTION = "params"  # Linen's collection


def module_name(layer: str, index: tuple[int, ...]) -> str:
    """The default name of a module.

    It drops the last component if that is a usual parameter name, and Linen's ``params`` always.
    The first index, of a scan, goes after the last ``layers`` or ``blocks`` without a number
    (else after the first component); further indices go after ``experts``, else to the end.
    ``path[i]`` is read as the index of a stack.

    Raises:
        ValueError: the layer is a second block of one parameter, which is no module.

    Example:
        >>> module_name("params/layers/attn/q_proj/kernel", (3,))
        'layers.3.attn.q_proj'
        >>> module_name("encoder/block/layer/0/SelfAttention/q/kernel", (3,))
        'encoder.block.3.layer.0.SelfAttention.q'
    """
    if "@" in layer:
        raise ValueError(
            f"layer {layer!r} is a second block of its parameter and has no module of its own: "
            "give names=, a function of the layer's name and a slice's index"
        )
    index = (*map(int, re.findall(r"\[(\d+)\]", layer)), *index)
    components = re.sub(r"\[\d+\]", "", layer).split("/")
    if len(components) > 1 and components[0] == _COLLECTION:
        components = components[1:]
    if len(components) > 1 and components[-1] in _LEAVES:
        components = components[:-1]
    if index:
        behind = (*components[1:], "")
        stacks = [
            i
            for i, (component, next_component) in enumerate(zip(components, behind, strict=True))
            if component in _STACKS and not next_component.isdecimal()
        ]
        at = (stacks[-1] if stacks else 0) + 1
        components[at:at] = [str(index[0])]
    for i in index[1:]:
        at = components.index("experts") + 1 if "experts" in components else len(components)
        components[at:at] = [str(i)]
    return ".".join(components)


def layer_name(module: str, scanned: str) -> tuple[str, int | None]:
    """Invert the default name: a layer with a kernel, and the index of the slice.

    Args:
        module: Name of a module in a PyTorch model.
        scanned: The component after which a number is the index of a slice.

    Example:
        >>> layer_name("model.layers.3.attn.q_proj", "layers"), layer_name("head", "layers")
        (('model/layers/attn/q_proj/kernel', 3), ('head/kernel', None))
    """
    components, index = module.split("."), None
    for at in range(1, len(components)):
        if components[at - 1] == scanned and components[at].isdecimal():
            index = int(components.pop(at))
            break
    return "/".join([*components, "kernel"]), index


def whole_name(path: str) -> tuple[str, bool]:
    """Key of a parameter that is saved in full, and whether its matrix is transposed there."""
    module, _, leaf = path.rpartition("/")
    kind = {"kernel": "weight", "scale": "weight", "embedding": "weight"}.get(leaf, leaf)
    head = module_name(module, ()) if module not in ("", _COLLECTION) else ""
    return f"{head}.{kind}" if head else kind, leaf == "kernel"


# ---------------- modules that share a matrix, each with a parameter of its own


# {path of a module's parameter: path of the matrix that it is}; a head's kernel is its transpose
Ties = Mapping[str, str]


def ties_of(apply_fn: object) -> Ties:
    """The parameters that an apply function takes beside the matrix they are tied to."""
    return getattr(apply_fn, "ties", {})


def separated(params: ArrayTree, ties: Ties) -> ArrayTree:
    """The parameters with one for each tied module, all with the values of the shared matrix.

    Nothing changes where they are there already, or the shared matrix is in NF4.
    """
    encoded = encoded_paths(params)
    leaves = leaves_by_path(decoded_shapes(params))
    for path, shared in ties.items():
        is_there = shared in leaves and shared not in encoded and path not in leaves
        if isinstance(params, dict) and is_there:
            params = _with_leaf(params, path.split("/"), tied_value(path, leaves[shared]))
    return params


def tied_again(params: ArrayTree, ties: Ties) -> ArrayTree:
    """The parameters without those that :func:`separated` adds."""
    for path in ties:
        params = _without_leaf(params, path.split("/"))
    return params


def tied_value(path: str, shared: Any) -> Any:
    """The value of a tied parameter: the shared matrix, transposed for the kernel of a head."""
    if not path.endswith("/kernel"):
        return shared
    if isinstance(shared, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shared.shape[::-1], shared.dtype)
    return shared.T


def check_turns(is_linear: bool) -> None:
    """Refuse to tie an adapter with a nonlinearity, which acts on another side of a transpose.

    Raises:
        ValueError: it has one.
    """
    if not is_linear:
        raise ValueError(
            "ensure_weight_tying: expected plain LoRA, because a nonlinear branch of an embedding "
            "has no transpose for the head: take fourier_placement='none', or leave it out"
        )


def turned(adapter: Adapter) -> Adapter:
    """The adapter of a tied head: the embedding's, transposed."""
    check_turns(adapter.is_linear)
    return Adapter(adapter.b.swapaxes(-1, -2), adapter.a.swapaxes(-1, -2), None, None)


def _with_leaf(tree: Mapping[str, Any], path: Sequence[str], leaf: Any) -> dict[str, Any]:
    key, *inner = path
    value = _with_leaf(tree.get(key, {}), inner, leaf) if inner else leaf
    return {**tree, key: value}


def _without_leaf(tree: Any, path: Sequence[str]) -> Any:
    key, *inner = path
    if not isinstance(tree, dict) or key not in tree:
        return tree
    value = _without_leaf(tree[key], inner) if inner else {}
    return {k: value if k == key else x for k, x in tree.items() if k != key or value != {}}


# ---------------- fused projections and their parts: q, k, v or gate, up in one kernel


# {component of a layer's name: {component of a part's name: outputs}}, in the kernel's order.
Parts = Mapping[str, Mapping[str, int]]


def split(adapters: Adapters, config: Config, parts: Parts) -> tuple[Adapters, Config]:
    r"""Split adapters of fused projections into adapters of their parts, without changing outputs.

    $\varphi(s\,xAB)$ acts on each output separately, and $s\,\varphi(xA)B$ on the bottleneck
    separately. In both cases each part gets its own columns of $B$, and the fused adapter's $A$,
    coefficients and $\sigma$. Models that keep the projections apart can then read the files.
    Dropout, if any, draws a separate mask for each part.

    Args:
        adapters: From :func:`init`; layers with other names stay unchanged.
        config: Their settings.
        parts: ``{"qkv_proj": {"q_proj": 576, "k_proj": 192, "v_proj": 192}}``: the parts of a layer
            with that component in its name, in the order of its outputs.

    Returns:
        ``(adapters, config)``; the config targets every layer by name.

    Raises:
        ValueError: the parts' outputs do not add up to the layer's, or a name exists already.

    Example:
        >>> import jax.numpy as jnp, jaxkfac.lslora as lslora
        >>> fused = {"qkv/kernel": lslora.Adapter(jnp.ones((3, 1)), jnp.ones((1, 6)), None, None)}
        >>> config = lslora.Config(rank=1, fourier_placement="none")
        >>> apart, config = lslora.split(fused, config, {"qkv": {"q": 4, "k": 1, "v": 1}})
        >>> {name: adapter.b.shape for name, adapter in apart.items()}
        {'q/kernel': (1, 4), 'k/kernel': (1, 1), 'v/kernel': (1, 1)}
    """
    out: dict[str, Any] = {}
    ranks, alphas = {}, {}
    for name, adapter in adapters.items():
        fused_name = _component(name, parts) if isinstance(adapter, Adapter) else None
        split_adapters = (
            {name: adapter}
            if fused_name is None
            else _columns(name, adapter, fused_name, parts[fused_name])
        )
        if duplicates := sorted(split_adapters.keys() & out.keys()):
            raise ValueError(
                f"layer {name!r} splits into {duplicates}, which the adapters have already"
            )
        out |= split_adapters
        if isinstance(adapter, Adapter):
            ranks |= dict.fromkeys(split_adapters, config.rank_of(name))
            alphas |= dict.fromkeys(split_adapters, config.alpha_of(name))
    return out, _naming(config, ranks, alphas)


def fuse(adapters: Adapters, config: Config, parts: Parts) -> tuple[Adapters, Config]:
    r"""Fuse adapters of parts into adapters of the fused projection, without changing outputs.

    Parts that share $A$, coefficients and $\sigma$, as :func:`split` leaves them, become one
    adapter again. Plain LoRA of separately trained parts becomes one adapter whose rank is the sum
    of theirs, with each part's $B$ in its own columns; a part without an adapter gets zeros. If
    their scalings differ, $B$ includes the ratios, in float32 or wider.

    Args:
        adapters: Adapters; layers with other names stay unchanged.
        config: Their settings.
        parts: As for :func:`split`.

    Returns:
        ``(adapters, config)``; the config targets every layer by name.

    Raises:
        ValueError: nonlinear parts that do not share everything, since $\varphi$ has one set of
            coefficients a layer; or numbers of outputs that differ from ``parts``.
    """
    out: dict[str, Any] = {}
    groups: dict[str, dict[str, str]] = {}
    ranks, alphas = {}, {}
    whole_of = {part: fused_name for fused_name, widths_of in parts.items() for part in widths_of}
    for name, adapter in adapters.items():
        part = _component(name, whole_of) if isinstance(adapter, Adapter) else None
        if part is not None:
            groups.setdefault(_renamed(name, part, whole_of[part]), {})[part] = name
            continue
        out[name] = adapter
        if isinstance(adapter, Adapter):
            ranks[name], alphas[name] = config.rank_of(name), config.alpha_of(name)
    own_adapters = only_adapters(adapters)
    for name, members in groups.items():
        if name in out:
            raise ValueError(f"layer {name!r} is there already, beside its parts {members}")
        widths = parts[whole_of[next(iter(members))]]
        part_adapters = {part: own_adapters[layer] for part, layer in members.items()}
        for part, adapter in part_adapters.items():
            if adapter.b.shape[-1] != widths[part]:
                raise ValueError(
                    f"layer {members[part]!r}: expected {widths[part]} outputs of {part!r}, got "
                    f"{adapter.b.shape[-1]}"
                )
        scales = {part: config.scaling(layer) for part, layer in members.items()}
        fused, scaling = _joined(name, part_adapters, widths, scales)
        rank = ranks[name] = fused.a.shape[-1]
        alphas[name] = scaling * (math.sqrt(rank) if config.rslora else rank)
        out[name] = fused
    return out, _naming(config, ranks, alphas)


def _joined(
    name: str,
    part_adapters: dict[str, Adapter],
    widths: Mapping[str, int],
    scales: dict[str, float],
) -> tuple[Adapter, float]:
    """One adapter of all parts, and its scaling."""
    first, scaling = next(iter(part_adapters.values())), next(iter(scales.values()))
    alike = len(set(scales.values())) == 1 and all(
        _shares(first, x) for x in part_adapters.values()
    )
    if alike and part_adapters.keys() == widths.keys():
        return first._replace(
            b=jnp.concatenate([part_adapters[part].b for part in widths], -1)
        ), scaling
    if nonlinear := [part for part, x in part_adapters.items() if not x.is_linear]:
        raise ValueError(
            f"layer {name!r}: {nonlinear} have nonlinearities of their own, and a fused layer has "
            "one set of coefficients: keep the projections apart, or adapt them fused from the "
            "start"
        )
    present = [part for part in widths if part in part_adapters]
    a = jnp.concatenate([part_adapters[part].a for part in present], -1)
    stack, rows = a.shape[:-2], []
    # As where slices are stacked: a product in 16 bits would change the outputs.
    differ = len({scales[part] for part in present}) > 1
    for part in present:
        b = part_adapters[part].b
        if differ:
            b = b.astype(statistics_dtype(b.dtype)) * (scales[part] / scaling)
        before = sum(list(widths.values())[: list(widths).index(part)])
        after = sum(widths.values()) - before - widths[part]
        rows.append(jnp.pad(b, [(0, 0)] * (len(stack) + 1) + [(before, after)]))
    return Adapter(a, jnp.concatenate(rows, -2), None, None), scaling


def _shares(x: Adapter, y: Adapter) -> bool:
    """Whether everything except ``b`` is equal."""
    pairs = [(x.a, y.a), (x.coefficients, y.coefficients), (x.sigma, y.sigma)]
    return all(
        p is q or (p is not None and q is not None and np.array_equal(p, q)) for p, q in pairs
    )


def _columns(
    name: str, adapter: Adapter, fused_name: str, widths: Mapping[str, int]
) -> dict[str, Adapter]:
    outputs = adapter.b.shape[-1]
    if sum(widths.values()) != outputs:
        raise ValueError(
            f"layer {name!r} has {outputs} outputs, and its parts {dict(widths)} have "
            f"{sum(widths.values())}"
        )
    ends = np.cumsum(list(widths.values()))
    columns = zip(widths, ends - list(widths.values()), ends, strict=True)
    return {
        _renamed(name, fused_name, part): adapter._replace(b=adapter.b[..., start:end])
        for part, start, end in columns
    }


def _component(name: str, components: Mapping[str, Any]) -> str | None:
    return next((component for component in name.split("/") if component in components), None)


def _renamed(name: str, old: str, new: str) -> str:
    return "/".join(new if component == old else component for component in name.split("/"))


def _naming(config: Config, ranks: dict[str, int], alphas: dict[str, Any]) -> Config:
    """The config that targets these layers by name, with ranks and alphas where they differ."""
    return dataclasses.replace(
        config,
        target="|".join(map(re.escape, ranks)),
        exclude=None,
        rank_pattern={re.escape(n): r for n, r in ranks.items() if r != config.rank},
        alpha_pattern={re.escape(n): a for n, a in alphas.items() if a != config.alpha},
    )
