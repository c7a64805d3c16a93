"""Rows of every layer kind: the gradient is the sum of their outer products."""

import pytest
import torch
from torch import nn

from torch_ref.factors._layers import find_layers, read_gradient, write_gradients
from torch_ref.factors._rows import append_ones, existing_rows, input_rows, output_rows


class Conv1D(nn.Module):
    """What GPT-2 calls so: a linear layer with the kernel stored (in, out)."""

    def __init__(self, nf: int, nx: int):
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x):
        return x @ self.weight + self.bias


CASES = {
    "linear": (lambda: nn.Linear(3, 4), (5, 3)),
    "linear, no bias": (lambda: nn.Linear(3, 4, bias=False), (5, 3)),
    "linear, tokens": (lambda: nn.Linear(3, 4), (2, 5, 3)),
    "linear, two position axes": (lambda: nn.Linear(3, 4), (2, 3, 2, 3)),
    "linear, one row": (lambda: nn.Linear(3, 4), (3,)),
    "transposed linear": (lambda: Conv1D(4, 3), (2, 5, 3)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 2), (2, 3, 6)),
    "conv1d, stride, padding, dilation": (
        lambda: nn.Conv1d(3, 4, 3, stride=2, padding=2, dilation=2),
        (2, 3, 7),
    ),
    "conv1d, groups": (lambda: nn.Conv1d(4, 6, 2, groups=2), (2, 4, 5)),
    "conv2d": (lambda: nn.Conv2d(2, 3, (2, 3)), (2, 2, 5, 4)),
    "conv2d, no batch": (lambda: nn.Conv2d(2, 3, 2), (2, 5, 4)),
    "conv2d, uneven": (
        lambda: nn.Conv2d(2, 3, (3, 2), stride=(1, 2), padding=(2, 1), dilation=(1, 2)),
        (2, 2, 4, 5),
    ),
    "conv2d, same": (lambda: nn.Conv2d(2, 3, (3, 5), padding="same"), (2, 2, 4, 5)),
    "conv2d, same, even": pytest.param(
        lambda: nn.Conv2d(2, 3, (2, 4), padding="same"),
        (2, 2, 4, 5),
        marks=pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel"),
    ),
    "conv2d, valid": (lambda: nn.Conv2d(2, 3, 2, padding="valid"), (2, 2, 4, 5)),
    "conv2d, circular": (
        lambda: nn.Conv2d(2, 3, 3, padding=(2, 1), padding_mode="circular"),
        (2, 2, 4, 5),
    ),
    "conv2d, reflect": (
        lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"),
        (2, 2, 4, 5),
    ),
    "conv2d, depthwise": (lambda: nn.Conv2d(3, 6, 2, groups=3), (2, 3, 4, 4)),
}


def run(module, x):
    """The gradient of an arbitrary loss, and that of the layer's outputs."""
    y = module(x)
    y.retain_grad()
    (y * torch.randn_like(y)).sum().backward()
    return y.grad


@pytest.mark.parametrize("bias", ["joint", "separate"])
@pytest.mark.parametrize(("build", "shape"), CASES.values(), ids=CASES)
def test_gradient_is_the_sum_of_outer_products_of_rows(build, shape, bias):
    torch.manual_seed(0)
    module, x = build().double(), torch.randn(shape, dtype=torch.float64)
    gradient = run(module, x)
    a, g = input_rows(module, x), output_rows(module, gradient)
    if bias == "joint" and getattr(module, "bias", None) is not None:
        a = append_ones(a)
    expected = read_gradient(module, bias=bias)
    a, g = a.flatten(-3, -2), g.flatten(-3, -2)
    torch.testing.assert_close(g.mT @ a, expected.weight, rtol=1e-12, atol=1e-12)
    if expected.bias is not None:
        torch.testing.assert_close(g.sum(-2), expected.bias, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("_transformers")
def test_hugging_face_conv1d_is_known():
    from transformers.pytorch_utils import Conv1D

    module = Conv1D(4, 3)
    x = torch.randn(2, 5, 3)
    gradient = run(module, x)
    g, a = output_rows(module, gradient).flatten(0, 1), input_rows(module, x).flatten(0, 1)
    torch.testing.assert_close(g.mT @ append_ones(a), read_gradient(module, bias="joint").weight)
    assert list(find_layers(nn.Sequential(module))) == ["0"]


def test_embedding_rows_are_tokens_and_their_gradient_has_a_column_per_token():
    module = nn.Embedding(6, 3).double()
    tokens = torch.tensor([[1, 4, 1], [0, 5, 4]])
    gradient = run(module, tokens)
    one_hot = nn.functional.one_hot(input_rows(module, tokens), 6).double().flatten(0, 1)
    g = output_rows(module, gradient).flatten(0, 1)
    torch.testing.assert_close(g.mT @ one_hot, read_gradient(module, bias="joint").weight)


@pytest.mark.parametrize("bias", ["joint", "separate"])
@pytest.mark.parametrize(("build", "shape"), CASES.values(), ids=CASES)
def test_write_gradients_inverts_read_gradient(build, shape, bias):
    model = nn.ModuleDict({"layer": build()})
    run(model["layer"], torch.randn(shape))
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    gradient = read_gradient(model["layer"], bias=bias)
    model.zero_grad()
    write_gradients(model, {"layer": gradient})
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, before[name], rtol=0, atol=0)


MASK = torch.tensor([[1, 0], [0, 0]])


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ((2, 2), [[1, 0], [0, 0]]),
        ((2, 2, 2), [[1, 1, 0, 0], [0, 0, 0, 0]]),  # a further axis: heads, say
        ((2,), [[1], [0]]),  # a head on pooled outputs
    ],
)
def test_mask_follows_the_layers_axes(rows, expected):
    exists = existing_rows(MASK, torch.Size(rows), "layer")
    assert exists.tolist() == [[bool(x) for x in row] for row in expected]


def test_mask_of_another_shape_names_the_layer():
    with pytest.raises(ValueError, match=r"'head'.*\(2, 3\).*\(2, 2\)"):
        existing_rows(MASK, torch.Size((2, 3)), "head")


def test_layers_are_trainable_and_match_whole_names():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 2))
    model[3].weight.requires_grad_(False)
    assert list(find_layers(model)) == ["0", "2"]
    assert list(find_layers(model, "2")) == ["2"]
    with pytest.raises(ValueError, match=r"'x'.*\['0', '2'\]"):
        find_layers(model, "x")


def test_embedding_that_changes_its_gradient_is_refused():
    with pytest.raises(ValueError, match="'0' uses scale_grad_by_freq"):
        find_layers(nn.Sequential(nn.Embedding(3, 2, scale_grad_by_freq=True)))
