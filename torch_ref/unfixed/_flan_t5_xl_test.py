"""Casting and moving again costs nothing, with and without the remedy."""

import pytest
import torch
from torch import nn

from torch_ref import unfixed
from torch_ref.memory import load_once, save_after_cleanup, track_storages

WIDTH, BLOCKS = 24, 3
PARAMETERS = BLOCKS * (WIDTH * WIDTH + WIDTH)


def build():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)])


def places(model):
    return [p.data_ptr() for p in model.parameters()]


@pytest.mark.parametrize("check", [False, True])
def test_second_cast_and_second_move_make_nothing(check):
    model = build().bfloat16()
    before = places(model)
    with track_storages() as made:
        again = unfixed.cast_again(model, torch.bfloat16, check=check)
        again = unfixed.move_again(again, "cpu", check=check)
    assert again is model
    assert places(again) == before
    assert made.peak_bytes == 0
    assert not made.calls


@pytest.mark.parametrize("check", [False, True])
def test_model_that_is_elsewhere_is_moved(check):
    model = build()
    assert unfixed.move_again(model, "meta", check=check) is model
    assert model[0].weight.is_meta


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize("check", [False, True])
def test_cast_holds_one_bfloat16_copy_and_frees_float32_parameter_by_parameter(check):
    model = build()
    with track_storages() as made:
        unfixed.cast_again(model, torch.bfloat16, check=check)
    assert made.peak_bytes == made.live_bytes == 2 * PARAMETERS
    with track_storages() as made:
        model = build()
        made.reset_peak()
        unfixed.cast_again(model, torch.bfloat16, check=check)
    # With the float32 parameters counted too: only the first weight is there twice.
    assert made.peak_bytes == 4 * PARAMETERS + 2 * WIDTH * WIDTH
    assert made.live_bytes == 2 * PARAMETERS


def test_model_kept_by_another_name_is_the_same_model():
    model = build()
    old = model
    new = unfixed.cast_again(model, torch.bfloat16, check=True)
    assert old is new
    assert old[0].weight.dtype == torch.bfloat16  # no float32 model is left to be deleted


def test_loaded_model_is_that_of_the_fix(tmp_path):
    file = tmp_path / "model.safetensors"
    save_after_cleanup(build(), file)
    expected = load_once(build, file, dtype=torch.bfloat16)
    for in_dtype in (False, True):
        with track_storages() as made:
            model = unfixed.load(build, file, dtype=torch.bfloat16, in_dtype=in_dtype)
        for name, tensor in expected.state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor)
        # The float32 file as read, beside the model as built.
        assert made.peak_bytes == (4 + (2 if in_dtype else 4)) * PARAMETERS
        assert made.calls["_to_copy"] == (0 if in_dtype else 2 * BLOCKS)
        assert torch.get_default_dtype() == torch.float32
