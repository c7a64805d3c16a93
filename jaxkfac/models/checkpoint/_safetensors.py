"""Tensors of a Hugging Face folder, read one at a time."""

import math
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxkfac.memory import stored_tensors

_FLOATS = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)


class SafetensorsSource:
    """A ``Source`` over ``model.safetensors``, or over shards and their index.

    Headers are checked when it is built; a damaged file is refused there.
    """

    def __init__(self, folder: Path) -> None:
        self._tensors = {tensor.name: tensor for tensor in stored_tensors(folder)}
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        other = {n: str(t.dtype) for n, t in self._tensors.items() if t.dtype not in _FLOATS}
        if other:
            raise ValueError(
                f"{folder}: expected floating tensors, got {other}; a checkpoint that is "
                "quantised already is not read: take the original and pass quantize="
            )

    def read(self, name: str) -> np.ndarray:
        """One tensor, as it is stored."""
        tensor = self._tensors[name]
        count = math.prod(tensor.shape)
        flat = np.fromfile(
            tensor.file, np.uint8, count * tensor.dtype.itemsize, offset=tensor.start
        )
        if flat.size != count * tensor.dtype.itemsize:
            raise ValueError(
                f"{tensor.file} ended inside tensor {name!r}: it has been changed while it was read"
            )
        return flat.view(tensor.dtype).reshape(tensor.shape)
