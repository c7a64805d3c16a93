"""Each lesson is a fault still, in bytes, and gives the numbers of its fix."""

import safetensors.torch
import torch
from torch import nn

from torch_ref import unfixed
from torch_ref.accumulation import accumulated_training
from torch_ref.lslora import Config, attach, diagnose
from torch_ref.memory import cast_once, track_storages

ROWS, WIDTH, BLOCKS = 64, 12, 3
X = torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH).sin()
BYTES = BLOCKS * (WIDTH * WIDTH + WIDTH) * 4


def build():
    torch.manual_seed(0)
    return nn.Sequential(
        *[layer for _ in range(BLOCKS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    )


def test_cutting_one_batch_in_sixteen_saves_its_activations():
    parts = [(part,) for part in X.chunk(16)]

    def loss(model, batch):
        return model(batch[0]).square().mean()

    peaks, models = [], []
    for cut in (False, True):
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with track_storages() as made:
            if cut:
                list(accumulated_training(model, optimizer, loss, parts, every=16))
            else:
                unfixed.full_batch_step(model, optimizer, loss, parts)
        peaks.append(made.peak_bytes)
        models.append(model)
    activations = BLOCKS * ROWS * WIDTH * 4
    # Less a sixteenth, and the gradient that is there while the next part runs.
    assert peaks[0] - peaks[1] >= activations * 15 / 16 - BYTES
    for p, q in zip(models[0].parameters(), models[1].parameters()):
        torch.testing.assert_close(p, q)


def test_deep_copy_is_a_second_model_where_a_cast_makes_none():
    model = build()
    with track_storages() as made:
        copied = unfixed.copy_model(model, torch.float32, "cpu")
    assert made.live_bytes == BYTES
    assert copied[0].weight.data_ptr() != model[0].weight.data_ptr()
    with track_storages() as made:
        assert cast_once(model, torch.float32) == 0
    assert made.peak_bytes == 0


def test_clones_are_a_second_model_while_saving(tmp_path):
    model = build()
    with track_storages() as made:
        unfixed.save_clones(model, tmp_path / "model.safetensors")
    assert made.peak_bytes == BYTES
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert torch.equal(stored["0.weight"], model[0].weight)


def test_log_of_tensors_with_a_graph_grows():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    attach(model, Config(".*", rank=2))
    alive, log = [], []
    with track_storages() as made:
        for _ in range(3):
            log.append(unfixed.diagnose_with_graph(model))
            alive.append(made.live_bytes)
    assert 0 < alive[0] < alive[1] < alive[2]
    for name, numbers in diagnose(model).items():
        for key, tensor in log[0][name].items():
            assert tensor.grad_fn is not None
            torch.testing.assert_close(tensor.item(), getattr(numbers, key))


def test_reentrant_recomputation_also_makes_the_output_that_nothing_needs():
    block, x = nn.Sequential(build(), nn.Linear(WIDTH, WIDTH)), X.clone().requires_grad_()
    products, peaks = [], []
    for use_reentrant in (True, False):
        block.zero_grad(set_to_none=True)
        x.grad = None
        with track_storages() as made:
            unfixed.recompute(block, x, use_reentrant=use_reentrant).sum().backward()
        products.append(made.calls["addmm"])
        peaks.append(made.peak_bytes)
    # Forward runs all; backward all, or all but the last, whose output no gradient needs.
    assert products == [2 * (BLOCKS + 1), 2 * BLOCKS + 1]
    assert peaks[0] - peaks[1] == ROWS * WIDTH * 4
