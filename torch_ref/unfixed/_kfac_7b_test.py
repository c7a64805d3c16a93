"""The factors are those of the fix, and each option changes what its claim is about."""

import itertools

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from torch_ref import unfixed
from torch_ref.factors import Categorical, LayerFactors, collect_factors, fisher_loss
from torch_ref.memory import track_storages
from torch_ref.unfixed import _kfac_7b

ROWS, WIDTH, CLASSES, BLOCKS = 96, 16, 8, 4
FLOAT = 4  # bytes
LOSS = fisher_loss(Categorical())
X = torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH).sin()
Y = torch.arange(ROWS) % CLASSES
BEFORE = {"retain_graph": True, "to_host": False, "cleanup": False}
AFTER = {"retain_graph": False, "to_host": True, "cleanup": True}


def build(nonlinearity=nn.Tanh, blocks=BLOCKS):
    torch.manual_seed(0)
    layers = [layer for _ in range(blocks) for layer in (nn.Linear(WIDTH, WIDTH), nonlinearity())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


@pytest.mark.parametrize("options", list(itertools.product([False, True], repeat=3)))
def test_factors_are_those_of_the_fix(options):
    model = build().double()
    expected = collect_factors(model, LOSS, (X.double(), Y))
    found = unfixed.collect(model, LOSS, (X.double(), Y), **dict(zip(BEFORE, options)))
    assert found.keys() == expected.keys()
    for name, f in expected.items():
        torch.testing.assert_close(found[name].a, f.a, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(found[name].g, f.g, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("nonlinearity", "saved"),
    [
        (nn.Tanh, 0),  # it saves its output, which is the next layer's input: a hook has it too
        (nn.GELU, BLOCKS * ROWS * WIDTH),  # it saves its input, which no hook has
    ],
)
def test_retained_graph_holds_only_what_the_hooks_do_not(monkeypatch, nonlinearity, saved):
    form, alive = _kfac_7b._form, []

    def spy(*args):
        alive.append(made.live_bytes)
        return form(*args)

    monkeypatch.setattr(_kfac_7b, "_form", spy)
    for retain_graph in (True, False):
        with track_storages() as made:
            unfixed.collect(
                build(nonlinearity), LOSS, (X, Y), **BEFORE | {"retain_graph": retain_graph}
            )
    retained, freed = alive[0], alive[BLOCKS + 1]
    logarithms = ROWS * CLASSES  # of the softmax
    assert retained - freed == (saved + logarithms) * FLOAT


def test_pairs_kept_to_the_end_are_most_of_what_the_fix_saves():
    peaks = []
    for collect in (
        lambda model: unfixed.collect(model, LOSS, (X, Y), **BEFORE),
        lambda model: unfixed.collect(model, LOSS, (X, Y), **AFTER),
        lambda model: collect_factors(model, LOSS, (X, Y)),
    ):
        model = build()
        with track_storages() as made:
            collect(model)
        peaks.append(made.peak_bytes)
    before, after, fix = peaks
    assert before - after < after - fix


@pytest.mark.parametrize(("options", "dtype"), [(BEFORE, torch.bfloat16), (AFTER, torch.float32)])
def test_factors_stay_in_the_models_dtype_until_they_are_moved(options, dtype):
    factors = unfixed.collect(build().bfloat16(), LOSS, (X.bfloat16(), Y), **options)
    assert {side.dtype for layer in factors.values() for side in (layer.a, layer.g)} == {dtype}


def test_cleanup_frees_the_gradients_of_the_parameters():
    alive = []
    for cleanup in (False, True):
        model = build()
        with track_storages() as made:
            factors = unfixed.collect(model, LOSS, (X, Y), **BEFORE | {"cleanup": cleanup})
            alive.append(made.live_bytes)
    assert alive[1] == sum(layer.a.nbytes + layer.g.nbytes for layer in factors.values())
    assert alive[0] - alive[1] == sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("fails", [False, True])
def test_cleanup_drops_gradients_also_when_the_pass_fails(fails):
    def loss(model, batch):
        model(batch[0]).sum().backward()
        if fails:
            raise FloatingPointError("no loss today")
        return LOSS(model, batch)

    for options in (BEFORE, AFTER):
        model = build()
        try:
            unfixed.collect(model, loss, (X, Y), **options)
        except FloatingPointError:
            assert fails
        assert (model[0].weight.grad is None) == options["cleanup"]
        assert not model[0]._forward_hooks


def test_cache_is_emptied_at_every_eighth_layer_and_by_cleanup_once_more(monkeypatch):
    form, formed, emptied = _kfac_7b._form, [], []

    def spy(name, *args):
        formed.append(name)
        return form(name, *args)

    monkeypatch.setattr(_kfac_7b, "_form", spy)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(len(formed)))
    unfixed.collect(build(blocks=9), LOSS, (X, Y), **BEFORE)
    assert emptied == [1, 9]
    formed.clear()
    unfixed.collect(build(blocks=9), LOSS, (X, Y), **AFTER)
    assert emptied == [1, 9, 1, 9, 10]


# ------------------------------------------------------------------ eigenvalues


class Calls(TorchFunctionMode):
    """Names of the functions called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def factors_of(n, dtype=torch.bfloat16, device="cpu"):
    rows = torch.linspace(-1, 1, 2 * n * n, device=device).reshape(2 * n, n).cos()
    matrix = (rows.T @ rows / (2 * n)).to(dtype)
    return {"layer": LayerFactors(matrix, matrix.clone(), 2 * n, "none")}


@pytest.mark.parametrize(("move_first", "order"), [(False, "float cpu"), (True, "cpu float")])
def test_order_of_conversion_and_move(move_first, order):
    factors = factors_of(10)
    with Calls() as calls:
        found = unfixed.host_eigenvalues(factors, move_first=move_first)
    assert [n for n in calls.names if n in ("float", "cpu")] == 2 * order.split()
    expected = torch.linalg.eigvalsh(factors["layer"].a.float())
    torch.testing.assert_close(found["layer"][0], expected)


def test_float32_copy_is_twice_the_bfloat16_factor():
    n = 100  # for n = 10,000: 200 MB become 400 MB, and not 400 MB 800 MB
    factor = factors_of(n)["layer"].a
    with track_storages() as made:
        copy = factor.float()
    assert made.peak_bytes == copy.nbytes == 2 * factor.nbytes == 4 * n**2


def test_guard_gives_up_on_all_layers_beyond_half_of_what_is_free():
    factors = factors_of(10) | {"large": factors_of(20)["layer"]}
    guard = {"move_first": True, "required_bytes": lambda n: 3 * n * n * FLOAT}
    required = 3 * 20 * 20 * FLOAT
    assert unfixed.host_eigenvalues(factors, free_bytes=2 * required, **guard).keys() == {
        "layer",
        "large",
    }
    assert unfixed.host_eigenvalues(factors, free_bytes=2 * required - 1, **guard) == {}


@pytest.mark.gpu
def test_conversion_before_the_move_makes_its_copy_on_the_gpu():
    n = 64
    factors = factors_of(n, device="cuda")
    for move_first, expected in ((False, n * n * FLOAT), (True, 0)):
        with track_storages("cuda") as made:
            unfixed.host_eigenvalues(factors, move_first=move_first)
        assert made.peak_bytes == expected


@pytest.mark.gpu
def test_factors_leave_the_gpu_only_after_the_change():
    for options, device in ((BEFORE, "cuda"), (AFTER, "cpu")):
        model = build().cuda()
        factors = unfixed.collect(model, LOSS, (X.cuda(), Y.cuda()), **options)
        assert {layer.a.device.type for layer in factors.values()} == {device}
