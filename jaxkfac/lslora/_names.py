"""Names of layers here, and of modules in a PyTorch model's files."""

import re
from collections.abc import Callable

# From a layer's name and the index of one slice of its stack to a module's name.
ModuleNames = Callable[[str, tuple[int, ...]], str]

_LEAVES = ("kernel", "weight", "w", "embedding", "scale", "bias")
_STACKS = ("layers", "blocks", "layer", "block", "h")  # what Hugging Face numbers
_COLLECTION = "params"  # Linen's


def module_name(layer: str, index: tuple[int, ...]) -> str:
    """The default mapping.

    The last component is left out if it is a parameter's usual name, Linen's ``params`` always.
    The first index, of a scan, goes behind the last ``layers`` or ``blocks`` that has no number
    yet (else behind the first component); a further one behind ``experts``, else to the end.
    ``path[i]`` is read as the index of a stack.

    Raises:
        ValueError: a second block of one parameter, which has no module of its own.

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
    parts = re.sub(r"\[\d+\]", "", layer).split("/")
    if len(parts) > 1 and parts[0] == _COLLECTION:
        parts = parts[1:]
    if len(parts) > 1 and parts[-1] in _LEAVES:
        parts = parts[:-1]
    if index:
        behind = (*parts[1:], "")
        stacks = [
            i
            for i, (part, next_part) in enumerate(zip(parts, behind, strict=True))
            if part in _STACKS and not next_part.isdecimal()
        ]
        at = (stacks[-1] if stacks else 0) + 1
        parts[at:at] = [str(index[0])]
    for i in index[1:]:
        at = parts.index("experts") + 1 if "experts" in parts else len(parts)
        parts[at:at] = [str(i)]
    return ".".join(parts)


def layer_name(module: str, scanned: str) -> tuple[str, int | None]:
    """The default mapping backwards: a layer of kernels, and the index of the slice.

    Args:
        module: Of a PyTorch model.
        scanned: The component behind which a number counts the slices of one stack.

    Example:
        >>> layer_name("model.layers.3.attn.q_proj", "layers"), layer_name("head", "layers")
        (('model/layers/attn/q_proj/kernel', 3), ('head/kernel', None))
    """
    parts, index = module.split("."), None
    for at in range(1, len(parts)):
        if parts[at - 1] == scanned and parts[at].isdecimal():
            index = int(parts.pop(at))
            break
    return "/".join([*parts, "kernel"]), index


def whole_name(path: str) -> tuple[str, bool]:
    """Key of a parameter that is saved whole, and whether a matrix is transposed there."""
    module, _, leaf = path.rpartition("/")
    kind = {"kernel": "weight", "scale": "weight", "embedding": "weight"}.get(leaf, leaf)
    head = module_name(module, ()) if module not in ("", _COLLECTION) else ""
    return f"{head}.{kind}" if head else kind, leaf == "kernel"
