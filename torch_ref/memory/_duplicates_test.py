"""Second copies are found, and only they."""

import copy

import pytest
import torch
from torch import nn

from torch_ref.memory import find_duplicates, live_tensors


def test_copies_are_found_across_dtypes_and_shared_memory_is_none():
    weight = torch.arange(12.0)
    tensors = {
        "model": weight,
        "view of it": weight[:],
        "bfloat16": weight.bfloat16(),
        "clone": weight.clone(),
        "another": weight + 1,
        "too small": weight[:2].clone(),
    }
    (found,) = find_duplicates(tensors, min_bytes=20)
    assert found.names == ("model", "bfloat16", "clone")
    assert found.wasted_bytes == 48 + 48  # all but the smallest


@pytest.mark.parametrize("value", [0.0, torch.inf, torch.nan])
def test_constants_are_no_copies(value):
    tensors = {"bias": torch.full((8,), value), "other": torch.full((8,), value)}
    assert find_duplicates(tensors, min_bytes=1) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copy_that_holds_a_nan_and_infinities_is_found(dtype):
    weight = torch.tensor([1.0, torch.nan, torch.inf, -torch.inf])
    tensors = {"model": weight, "copy": weight.to(dtype, copy=True)}
    assert len(find_duplicates(tensors, min_bytes=1)) == 1
    tensors["copy"][1] = 2.0  # a NaN equals nothing else
    assert find_duplicates(tensors, min_bytes=1) == []


def test_tensors_of_another_meaning_are_no_copies():
    z = torch.tensor([-1.5, 1.0, 3.7])
    whole = torch.tensor([1, 0, 256])
    pairs = [(z > 0, z.relu()), (z.to(torch.int8), z), (whole > 0, whole)]
    pairs += [(whole.to(torch.int8), whole)]  # where 256 becomes 0
    for first, second in pairs:
        assert find_duplicates({"first": first, "second": second}, min_bytes=1) == []
    assert len(find_duplicates({"ids": whole, "copy": whole.clone()}, min_bytes=1)) == 1


def test_small_tensors_are_not_looked_at():
    tensors = {"a": torch.arange(4.0), "b": torch.arange(4.0)}
    assert find_duplicates(tensors, min_bytes=17) == []
    assert len(find_duplicates(tensors, min_bytes=16)) == 1


@pytest.mark.usefixtures("few_objects")
def test_forgotten_copy_of_a_model_is_found_among_live_tensors():
    torch.manual_seed(0)
    model = nn.Linear(61, 67, bias=False)
    forgotten = copy.deepcopy(model)

    def live():
        return {n: t for n, t in live_tensors().items() if tuple(t.shape) == (67, 61)}

    (found,) = find_duplicates(live(), min_bytes=1)
    assert found.wasted_bytes == 61 * 67 * 4
    del forgotten, found
    assert find_duplicates(live(), min_bytes=1) == []
