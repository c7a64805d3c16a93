"""A folder in Hugging Face's layout: config, weights and tokenizer."""

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Array, Key

from jaxkfac._arguments import ArrayTree, leaves_by_path
from jaxkfac.files import whole_file, write_text
from jaxkfac.flax import NnxApply
from jaxkfac.jobs.models.checkpoint._fill import Leaf
from jaxkfac.jobs.models.checkpoint._tokenizer import Tokenizer, read_json
from jaxkfac.memory import stored_tensors

# ---------------- a loaded model


class TiedApply:
    """``apply_fn`` of a model whose modules share a matrix, unless the parameters separate them.

    Adapters add a parameter for each module (a head is the embedding transposed), so that one can
    be adapted or trained in full without the others, as in PEFT. Everything else sees one matrix.

    Args:
        tied: The function for parameters with one matrix.
        separate: Returns the function for parameters with all; called when it is needed.
        ties: ``{path of a parameter that is added: path of the shared one}``.

    Attributes:
        state: ``None``: a call changes no state.
        ties: As given.
    """

    state = None

    def __init__(
        self, tied: NnxApply, separate: Callable[[], NnxApply], ties: Mapping[str, str]
    ) -> None:
        self.ties = dict(ties)
        self._tied, self._separate = tied, functools.cache(separate)

    def __call__(
        self,
        params: ArrayTree,
        *inputs: Any,
        key: Key[Array, ""] | None = None,
        state: ArrayTree | None = None,
    ) -> Any:
        is_separate = any(_has(params, path.split("/")) for path in self.ties)
        apply_fn = self._separate() if is_separate else self._tied
        return apply_fn(params, *inputs, key=key, state=state)


def _has(tree: Any, path: Sequence[str]) -> bool:
    key, *inner = path
    return isinstance(tree, Mapping) and key in tree and (not inner or _has(tree[key], inner))


class Pretrained(NamedTuple):
    """A model with its weights.

    Attributes:
        config: A :class:`DecoderConfig` or an :class:`EncoderDecoderConfig`.
        apply_fn: ``apply_fn(params, inputs) -> logits``; see :class:`Decoder` and
            :class:`EncoderDecoder`.
        params: Nested dictionary; paths are Hugging Face's names, with stacked blocks.
        tokenizer: ``None`` if the checkpoint has none.
        path: The folder it was loaded from, which PyTorch can also read; ``None`` for a GGUF file.
    """

    config: Any
    apply_fn: NnxApply | TiedApply
    params: ArrayTree
    tokenizer: Tokenizer | None
    path: str | None = None


# ---------------- tensors of a Hugging Face folder, read one at a time


_FLOATS = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)


class SafetensorsSource:
    """A ``Source`` for ``model.safetensors``, or for shards and their index.

    The constructor checks the headers and refuses damaged files.
    """

    def __init__(self, folder: Path) -> None:
        self._tensors = {tensor.name: tensor for tensor in stored_tensors(folder)}
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        other_dtypes = {n: str(t.dtype) for n, t in self._tensors.items() if t.dtype not in _FLOATS}
        if other_dtypes:
            raise ValueError(
                f"{folder}: expected floating tensors, got {other_dtypes}; a checkpoint that is "
                "quantised already is not read: take the original and pass quantize="
            )

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """One tensor in the stored dtype, or some of its rows."""
        tensor = self._tensors[name]
        first, last, _ = rows.indices(*tensor.shape[:1] or (1,))
        row = math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
        nbytes = (last - first) * row
        flat = np.fromfile(tensor.file, np.uint8, nbytes, offset=tensor.start + first * row)
        if flat.size != nbytes:
            raise ValueError(
                f"{tensor.file} ended inside tensor {name!r}: it has been changed while it was read"
            )
        shape = (last - first, *tensor.shape[1:]) if tensor.shape else ()
        return flat.view(tensor.dtype).reshape(shape)


# ---------------- reading a folder


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json``, with the end tokens of ``generation_config.json``.

    Raises:
        FileNotFoundError: the folder or its ``config.json`` does not exist.
        ValueError: a file is damaged, or the checkpoint is already quantised.
    """
    if not folder.is_dir():
        what = "is no folder and no .gguf file" if folder.exists() else "does not exist"
        raise FileNotFoundError(f"no model at {folder}, which {what}")
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"no config.json in {folder}, which holds {sorted(x.name for x in folder.iterdir())}"
        )
    config = read_json(folder / "config.json")
    if (generation := folder / "generation_config.json").is_file():
        ends = read_json(generation).get("eos_token_id")  # what answers end with, not only texts
        config |= {} if ends is None else {"eos_token_id": ends}
    if "quantization_config" in config:
        kind = dict(config["quantization_config"] or {}).get("quant_method")
        raise ValueError(
            f"{folder} is quantised already (quantization_config): take the original checkpoint "
            "and pass quantize="
            + ("; jk.nf4.from_bitsandbytes reads single kernels" if kind == "bitsandbytes" else "")
        )
    return config


def open_weights(
    folder: Path, *, vocabulary: int, eos_ids: tuple[int, ...]
) -> tuple[SafetensorsSource, Tokenizer | None]:
    """Tensors and tokenizer of a folder, after its config was read.

    Args:
        folder: Folder of the checkpoint.
        vocabulary: Number of rows of the embedding; the tokenizer may have more tokens, and then
            refuses a text that needs one of them.
        eos_ids: End tokens from the config.

    Raises:
        ValueError: a file is damaged, or holds other tensors than floating ones.
    """
    tokenizer = None
    if (folder / "tokenizer.json").is_file():
        tokenizer = Tokenizer.from_folder(folder, eos_ids=eos_ids).limited(vocabulary)
    return SafetensorsSource(folder), tokenizer


def token_ids(value: Any) -> tuple[int, ...]:
    """A tuple from ``None``, one id or a list of ids."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


# ---------------- write a folder in Hugging Face's layout, tensor by tensor


_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def save_folder(
    folder: Path | str,
    params: ArrayTree,
    leaves: Mapping[str, Leaf],
    config: Mapping[str, Any],
    tokenizer: Tokenizer | None,
) -> None:
    """Write ``config.json``, ``model.safetensors`` and the files of the tokenizer.

    Args:
        folder: Created if it is missing.
        params: Nested dictionary of floating arrays.
        leaves: The stored tensors that form each parameter.
        config: Contents of ``config.json``.
        tokenizer: A tokenizer or ``None``.

    Raises:
        ValueError: parameters do not match ``leaves``, or are quantised.
        OSError: a file could not be written; an existing one is unchanged.

    Memory:
        One stored tensor in main memory.
    """
    folder, leaf_values = Path(folder), leaves_by_path(params)
    shapes = {path: tuple(getattr(x, "shape", ())) for path, x in leaf_values.items()}
    expected = {path: leaf.shape for path, leaf in leaves.items()}
    if shapes != expected:
        wrong = sorted(path for path in shapes | expected if shapes.get(path) != expected.get(path))
        raise ValueError(f"params are not those that the config describes: {wrong[:8]}")
    folder.mkdir(parents=True, exist_ok=True)
    header, start = dict[str, Any](), 0
    for path, leaf in leaves.items():
        dtype = np.dtype(leaf_values[path].dtype)
        for part in (part for parts in leaf.slices for part in parts):
            stop = start + int(np.prod(part.shape)) * dtype.itemsize
            header[part.name] = {
                "dtype": _DTYPES[dtype.name],
                "shape": list(part.shape),
                "data_offsets": [start, stop],
            }
            start = stop
    head = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    head += b" " * (-len(head) % 8)  # tensors start at a multiple of eight bytes
    target = folder / "model.safetensors"
    with whole_file(target, "the model's weights", nbytes=8 + len(head) + start) as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for path, leaf in leaves.items():
            for tensor in _tensors(leaf, leaf_values[path]):
                file.write(np.ascontiguousarray(tensor).tobytes())
    if tokenizer is not None:
        tokenizer.save(folder)
    text = json.dumps(config, indent=1)
    write_text(folder / "config.json", text, "the model's config")


def _tensors(leaf: Leaf, value: Any) -> Iterator[np.ndarray]:
    """The stored tensors of a parameter; matrices are (out, in)."""
    for number, parts in enumerate(leaf.slices):
        matrix = np.asarray(value[number] if leaf.stacked else value)
        matrix, start = matrix.T if leaf.transposed else matrix, 0
        for part in parts:
            yield matrix[start : start + part.shape[0]]
            start += part.shape[0]
