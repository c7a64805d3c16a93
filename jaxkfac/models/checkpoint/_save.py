"""A folder in Hugging Face's layout, written tensor by tensor."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import PyTree

from jaxkfac.files import whole_file, write_text
from jaxkfac.interception import leaves_by_path
from jaxkfac.models.checkpoint._leaf import Leaf
from jaxkfac.models.checkpoint._tokenizer import Tokenizer

_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def save_folder(
    folder: Path | str,
    params: PyTree,
    leaves: Mapping[str, Leaf],
    config: Mapping[str, Any],
    tokenizer: Tokenizer | None,
) -> None:
    """Write ``config.json``, ``model.safetensors`` and what the tokenizer has.

    Args:
        folder: Made if it is missing.
        params: Nested dictionary, floating.
        leaves: Which stored tensors make up each parameter.
        config: What ``config.json`` shall hold.
        tokenizer: Or ``None``.

    Raises:
        ValueError: parameters that are not those of ``leaves``, or quantised ones.
        OSError: a file could not be written; an older one is as it was.

    Memory:
        One stored tensor in main memory.
    """
    folder, found = Path(folder), leaves_by_path(params)
    shapes = {path: tuple(getattr(x, "shape", ())) for path, x in found.items()}
    expected = {path: leaf.shape for path, leaf in leaves.items()}
    if shapes != expected:
        wrong = sorted(path for path in shapes | expected if shapes.get(path) != expected.get(path))
        raise ValueError(f"params are not those that the config describes: {wrong[:8]}")
    folder.mkdir(parents=True, exist_ok=True)
    header, start = dict[str, Any](), 0
    for path, leaf in leaves.items():
        dtype = np.dtype(found[path].dtype)
        for part in (part for parts in leaf.slices for part in parts):
            stop = start + int(np.prod(part.shape)) * dtype.itemsize
            header[part.name] = {
                "dtype": _DTYPES[dtype.name],
                "shape": list(part.shape),
                "data_offsets": [start, stop],
            }
            start = stop
    head = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    head += b" " * (-len(head) % 8)  # tensors begin at a multiple of eight bytes
    target = folder / "model.safetensors"
    with whole_file(target, "the model's weights", nbytes=8 + len(head) + start) as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for path, leaf in leaves.items():
            for tensor in _tensors(leaf, found[path]):
                file.write(np.ascontiguousarray(tensor).tobytes())
    if tokenizer is not None:
        tokenizer.save(folder)
    text = json.dumps(config, indent=1)
    write_text(folder / "config.json", text, "the model's config")


def _tensors(leaf: Leaf, value: Any) -> Iterator[np.ndarray]:
    """The stored tensors of a parameter, (out, in) if they are matrices."""
    for number, parts in enumerate(leaf.slices):
        whole = np.asarray(value[number] if leaf.stacked else value)
        whole, start = whole.T if leaf.transposed else whole, 0
        for part in parts:
            yield whole[start : start + part.shape[0]]
            start += part.shape[0]
