"""Find tensors that are held twice: a model that was cast and its old copy, say."""

import gc
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import torch


class Duplicate(NamedTuple):
    """One set of values in several places.

    Attributes:
        names: Of the tensors that hold these values, each in memory of its own.
        wasted_bytes: What all copies but the smallest occupy.
    """

    names: tuple[str, ...]
    wasted_bytes: int


def find_duplicates(
    tensors: Mapping[str, torch.Tensor], *, min_bytes: int = 1 << 20
) -> list[Duplicate]:
    """Tensors with equal values in different memory, on whatever devices.

    A float32 copy of a bfloat16 tensor, and the other way round, are duplicates: values are
    compared in the coarser of both dtypes, and NaN equals NaN. Of other dtypes only the same
    one is compared: a mask is no copy of the numbers it is equal to. Tensors that share memory
    are one. A tensor whose entries are all equal (a fresh bias, the scale of a normalisation)
    says nothing.

    Args:
        tensors: By name, of one model or of several holders together. :func:`live_tensors`
            gives everything there is.
        min_bytes: Smaller tensors are not looked at, in bytes.

    Returns:
        The duplicates, the largest waste first.

    Memory:
        A copy on the CPU of each pair of tensors of one shape, while it is compared.
    """
    by_shape = defaultdict(list)
    seen = set()
    for name, tensor in tensors.items():
        place = (str(tensor.device), tensor.data_ptr(), tensor.shape)
        if _bytes(tensor) >= min_bytes and place not in seen and not tensor.is_meta:
            seen.add(place)
            by_shape[tensor.shape].append((name, tensor.detach()))
    found = []
    for same_shape in by_shape.values():
        while same_shape:
            (name, first), *rest = same_shape
            equal = [(n, t) for n, t in rest if _equal(first, t)]
            same_shape = [(n, t) for n, t in rest if not any(n == m for m, _ in equal)]
            if equal and not _equal(first, first.flatten()[0].expand_as(first)):
                sizes = sorted(_bytes(t) for _, t in [(name, first), *equal])
                found.append(Duplicate((name, *(n for n, _ in equal)), sum(sizes[1:])))
    return sorted(found, key=lambda d: -d.wasted_bytes)


def live_tensors() -> dict[str, torch.Tensor]:
    """Every tensor that Python's garbage collector knows, for :func:`find_duplicates`."""
    gc.collect()
    # The type is asked, not isinstance: that would wake lazy and deprecated proxy objects.
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    return {
        f"live {i}: {tuple(x.shape)} {x.dtype}": x
        for i, x in enumerate(tensors)
        if x.layout == torch.strided
    }


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    dtypes = first.dtype, second.dtype
    if dtypes[0] != dtypes[1] and not all(d.is_floating_point for d in dtypes):
        return False
    dtype = min(dtypes, key=lambda d: d.itemsize)
    one, other = first.cpu().to(dtype), second.cpu().to(dtype)
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
