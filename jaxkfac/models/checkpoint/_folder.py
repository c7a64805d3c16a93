"""A folder in Hugging Face's layout: its config, its weights, its tokenizer."""

from pathlib import Path
from typing import Any

from jaxkfac.models.checkpoint._json_file import read_json
from jaxkfac.models.checkpoint._safetensors import SafetensorsSource
from jaxkfac.models.checkpoint._tokenizer import Tokenizer


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json``, with the ends of answers that ``generation_config.json`` gives.

    Raises:
        FileNotFoundError: the folder or its ``config.json`` is not there.
        ValueError: a damaged file, or a checkpoint that is quantised already.
    """
    if not folder.is_dir():
        what = "is no folder and no .gguf file" if folder.exists() else "does not exist"
        raise FileNotFoundError(f"no model at {folder}, which {what}")
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"no config.json in {folder}, which holds {sorted(x.name for x in folder.iterdir())}"
        )
    found = read_json(folder / "config.json")
    if (generation := folder / "generation_config.json").is_file():
        ends = read_json(generation).get("eos_token_id")  # what answers end with, not only texts
        found |= {} if ends is None else {"eos_token_id": ends}
    if "quantization_config" in found:
        kind = dict(found["quantization_config"] or {}).get("quant_method")
        raise ValueError(
            f"{folder} is quantised already (quantization_config): take the original checkpoint "
            "and pass quantize="
            + ("; jk.nf4.from_bitsandbytes reads single kernels" if kind == "bitsandbytes" else "")
        )
    return found


def open_weights(
    folder: Path, *, vocabulary: int, eos_ids: tuple[int, ...]
) -> tuple[SafetensorsSource, Tokenizer | None]:
    """Tensors and tokenizer of a folder whose config has been read.

    Args:
        folder: Of the checkpoint.
        vocabulary: Rows of the embedding.
        eos_ids: Of the config.

    Raises:
        ValueError: the tokenizer has ids beyond the embedding.
    """
    tokenizer = None
    if (folder / "tokenizer.json").is_file():
        tokenizer = Tokenizer.from_folder(folder, eos_ids=eos_ids)
        if tokenizer.size > vocabulary:
            raise ValueError(
                f"the tokenizer in {folder} has {tokenizer.size} tokens and the embedding "
                f"{vocabulary} rows: they are not of one model"
            )
    return SafetensorsSource(folder), tokenizer


def token_ids(value: Any) -> tuple[int, ...]:
    """None, one id or a list of them."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
