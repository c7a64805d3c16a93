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


def test_constants_are_no_copies():
    assert find_duplicates({"bias": torch.zeros(8), "other": torch.zeros(8)}, min_bytes=1) == []


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
