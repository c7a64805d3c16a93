"""Agreement with curvlinops (PyTorch) on a convolutional and an attention model, in float64.

Parameters keep PyTorch's layouts, so that factors are compared entry by entry: the kernel of a
convolution is (out, in, height, width), and its rows are (in, height, width). What differs is
stated here: curvlinops' squared error has no half, so that its gradient is twice ours; under
reduction "mean" its squared error and its binary cross entropy are divided by the number of
outputs C as well, of which it takes a root back.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from curvlinops import EKFACLinearOperator, GGNLinearOperator, KFACLinearOperator
from jax import lax

import jaxkfac as jk
from tests._checks import LIKELIHOODS
from tests._dense import root_fisher
from tests._programs import labels, normal
from tests._taps import PLAIN

# In the default run: a convolution, attention and tokens, every Fisher type and both sharings.
QUICK = {
    ("conv", "expand", "exact"),
    ("conv", "reduce", "mc"),
    ("pooled attention", "expand", "forward"),
    ("pooled attention", "reduce", "empirical"),
    ("attention", "expand", "mc"),
    ("attention", "reduce", "forward"),
}


def every(names, fishers):
    """All combinations with both sharings; what is not in ``QUICK`` is exhaustive."""
    return pytest.mark.parametrize(
        "name, sharing, fisher",
        [
            pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.exhaustive])
            for case in itertools.product(names, ("expand", "reduce"), fishers)
        ],
    )


LOSSES = {
    "categorical": torch.nn.CrossEntropyLoss,
    "bernoulli": torch.nn.BCEWithLogitsLoss,
    "gaussian": torch.nn.MSELoss,
}
TYPES = {"exact": "type-2", "empirical": "empirical", "mc": "mc", "forward": "forward-only"}
CLASSES = 3


class ConvNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 0))
        self.second = torch.nn.Conv2d(3, 4, 2, dilation=(1, 2), bias=False)
        self.head = torch.nn.Linear(4, CLASSES)

    def forward(self, x):
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.head(x.mean(dim=(2, 3)))


def conv_net(p, x, tap):
    def layer(x, p, strides, padding, dilation):
        return lax.conv_general_dilated(
            x, p["weight"], strides, padding, rhs_dilation=dilation,
            dimension_numbers=("NCHW", "OIHW", "NCHW"),
        )  # fmt: skip

    h = layer(x, p["first"], (2, 1), ((1, 1), (0, 0)), (1, 1))
    h = jnp.tanh(h + p["first"]["bias"][:, None, None])
    h = jnp.tanh(layer(h, p["second"], (1, 1), ((0, 0), (0, 0)), (1, 2)))
    return h.mean(axis=(2, 3)) @ p["head"]["weight"].T + p["head"]["bias"]


class Attention(torch.nn.Module):
    """Self-attention over tokens; one output per token, or per example."""

    def __init__(self, pooled):
        super().__init__()
        self.pooled = pooled
        for name in "qkvo":
            setattr(self, name, torch.nn.Linear(4, 4, bias=name == "o"))
        self.head = torch.nn.Linear(4, CLASSES)

    def forward(self, x):
        mix = torch.softmax(self.q(x) @ self.k(x).transpose(1, 2), dim=-1)
        x = torch.tanh(x + self.o(mix @ self.v(x)))
        if self.pooled:
            return self.head(x.mean(dim=1))
        y = self.head(x)
        return y.transpose(1, 2) if self.classes_first else y

    classes_first = True  # as cross entropy wants them


def _attention(pooled):
    def model(p, x, tap):
        q, k, v = (x @ p[name]["weight"].T for name in "qkv")
        mix = jax.nn.softmax(q @ jnp.swapaxes(k, 1, 2), axis=-1)
        x = jnp.tanh(x + ((mix @ v) @ p["o"]["weight"].T + p["o"]["bias"]))
        x = x.mean(axis=1) if pooled else x
        return x @ p["head"]["weight"].T + p["head"]["bias"]

    return model


ATTENTION, POOLED = _attention(False), _attention(True)


def _pair(name, likelihood="categorical", n=3):
    """``(torch model, jax model, params, x, y)`` with the same numbers."""
    if name == "conv":
        net, model, x, terms = ConvNet(), conv_net, normal(1, n, 2, 6, 4, scale=1.0), ()
    else:
        pooled = name == "pooled attention"
        net, model = Attention(pooled), POOLED if pooled else ATTENTION
        x, terms = normal(1, n, 3, 4, scale=1.0), () if pooled else (3,)
        net.classes_first = likelihood == "categorical"
    net = net.double()
    params: dict = {}
    with torch.no_grad():
        for i, (path, value) in enumerate(net.named_parameters()):
            layer, kind = path.split(".")
            new = normal(10 + i, *value.shape)
            value.copy_(torch.from_numpy(np.array(new)))
            params.setdefault(layer, {})[kind] = new
    y = labels(2, len(x), *terms)
    if likelihood != "categorical":
        y = normal(3, len(x), *terms, CLASSES)
        y = (y > 0).astype(x.dtype) if likelihood == "bernoulli" else y
    return net, model, params, x, y


def _torch(x):
    return torch.from_numpy(np.array(x))


def _with_labels(operator, drawn):
    """The operator with its sampler replaced, one row of ``drawn`` after the other."""

    class Injected(operator):
        def draw_label(self, output):
            y = _torch(drawn[self._drawn % len(drawn)])
            self._drawn += 1
            return y.reshape(output.shape) if y.is_floating_point() else y.flatten()

        _drawn = 0

    return Injected


def _operator(operator, net, likelihood, x, y, *, fisher, sharing, bias, drawn=None):
    if drawn is not None:
        operator = _with_labels(operator, drawn)
    return operator(
        net, LOSSES[likelihood](), list(net.parameters()), [(_torch(x), _torch(y))],
        fisher_type=TYPES[fisher], kfac_approx=sharing, check_deterministic=False,
        mc_samples=1 if drawn is None else len(drawn),
        separate_weight_and_bias=bias == "separate",
    )  # fmt: skip


def _ratio(likelihood, fisher):
    """Their G over ours."""
    if fisher == "forward" or likelihood == "categorical":
        return 1.0
    if likelihood == "bernoulli":
        return 1 / CLASSES
    return (2 if fisher == "exact" else 4) / CLASSES


def _compare(name, likelihood, fisher, sharing, bias, ours=None):
    net, model, params, x, y = _pair(name, likelihood)
    drawn = None
    if fisher == "mc":
        drawn = labels(8, 2, *y.shape)
        if likelihood != "categorical":
            drawn = (normal(8, 2, *y.shape) > 0).astype(y.dtype)
    theirs = _operator(
        KFACLinearOperator, net, likelihood, x, y, fisher=fisher, sharing=sharing, bias=bias,
        drawn=drawn,
    )  # fmt: skip
    theirs.compute_kronecker_factors()
    theirs = theirs.state_dict()
    objective = jk.Objective(lambda p, x: model(p, x, PLAIN), LIKELIHOODS[likelihood]())
    stats = jk.value_grad_and_factors(objective, fisher=ours or fisher, sharing=sharing, bias=bias)
    factors = jax.jit(stats)(params, (x, y), **({} if drawn is None else {"labels": drawn}))[2]
    assert {f"{layer}/weight" for layer in params} == set(factors)
    for layer in params:
        found = factors[f"{layer}/weight"]
        a = theirs["input_covariances"][layer].numpy()
        g = theirs["gradient_covariances"][layer].numpy() / _ratio(likelihood, fisher)
        np.testing.assert_allclose(found.a, a, rtol=1e-10, atol=1e-14, err_msg=layer)
        np.testing.assert_allclose(found.g, g, rtol=1e-10, atol=1e-14, err_msg=layer)


@pytest.mark.slow
@pytest.mark.sampled(2)
@every(["conv", "pooled attention"], list(TYPES))
def test_factors_agree_where_each_example_has_one_term(x64, name, sharing, fisher):
    _compare(name, "categorical", fisher, sharing, "joint")


@pytest.mark.default(1, slow=0)
@every(["attention"], ["empirical", "mc", "forward"])
def test_factors_agree_where_each_token_has_a_term(x64, name, sharing, fisher):
    """Not for type 2, which shares one backward pass between tokens."""
    _compare(name, "categorical", fisher, sharing, "separate")


@pytest.mark.exhaustive
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_type_2_with_tokens_that_mix_is_the_shortcut_and_not_the_exact_fisher(x64, sharing):
    short = "exact_if_terms_do_not_mix"
    _compare("attention", "categorical", "exact", sharing, "joint", ours=short)
    with pytest.raises(AssertionError, match="Mismatch"):
        _compare("attention", "categorical", "exact", sharing, "joint")


@pytest.mark.exhaustive
@pytest.mark.parametrize("fisher", ["exact", "empirical", "mc"])
@pytest.mark.parametrize("likelihood", ["bernoulli", "gaussian"])
@pytest.mark.parametrize("name", ["conv", "pooled attention"])
def test_other_losses_agree_up_to_their_constants(x64, name, likelihood, fisher):
    _compare(name, likelihood, fisher, "expand", "joint")


@pytest.mark.exhaustive
def test_the_dense_fisher_of_these_tests_is_the_ggn_where_tokens_mix(x64):
    """What the exact Fisher is held to elsewhere, against their matrix-free operator."""
    net, model, params, x, y = _pair("attention")
    data = [(_torch(x), _torch(y))]
    operator = GGNLinearOperator(net, torch.nn.CrossEntropyLoss(), list(net.parameters()), data)
    size = sum(p.numel() for p in net.parameters())
    theirs = (operator @ torch.eye(size, dtype=torch.float64)).numpy()
    root = root_fisher(model, params, (x, y))
    paths = [name.replace(".", "/") for name, _ in net.named_parameters()]
    flat = np.concatenate([root[path].reshape(len(root[path]), -1) for path in paths], axis=1)
    np.testing.assert_allclose(flat.T @ flat, theirs, rtol=1e-9, atol=1e-14)


# ---------------------------------------------------------------------- EKFAC


def _dense(basis, values):
    """Q diag(values) Qᵀ in PyTorch's order, (out, in)."""
    turn = np.kron(np.asarray(basis.g_vectors), np.asarray(basis.a_vectors))
    return turn @ np.diag(np.asarray(values).T.reshape(-1)) @ turn.T


@pytest.mark.exhaustive
@pytest.mark.parametrize("fisher", ["exact", "empirical", "mc"])
@pytest.mark.parametrize("sharing, bias", [("expand", "joint"), ("reduce", "separate")])
@pytest.mark.parametrize("name", ["conv", "pooled attention"])
def test_ekfac_agrees(x64, name, sharing, fisher, bias):
    """Their operator as a matrix against our bases: eigenvectors have no sign to compare.

    With more examples than inputs, and windows whose offsets see different sums, so that no
    eigenvalue is repeated (zero would be).
    """
    net, model, params, x, y = _pair(name, n={"conv": 14, "pooled attention": 6}[name])
    drawn = labels(8, 2, *y.shape) if fisher == "mc" else None
    operator = _operator(
        EKFACLinearOperator, net, "categorical", x, y, fisher=fisher, sharing=sharing, bias=bias,
        drawn=drawn,
    )  # fmt: skip
    size = sum(p.numel() for p in net.parameters())
    theirs = (operator @ torch.eye(size, dtype=torch.float64)).numpy()
    objective = jk.Objective(lambda p, x: model(p, x, PLAIN), jk.Categorical())
    call = {} if drawn is None else {"labels": drawn}
    stats = jk.value_grad_and_factors(objective, fisher=fisher, sharing=sharing, bias=bias)
    factors = jax.jit(stats)(params, (x, y), **call)[2]
    bases = jk.eigendecompose(factors, max_condition=float("inf"))
    corrected = jax.jit(jk.correct_eigenvalues(objective, bases, fisher=fisher))(
        params, (x, y), **call
    )
    places, start = {}, 0
    for path, p in net.named_parameters():
        places[path] = np.arange(start, start + p.numel())
        start += p.numel()
    for layer in params:
        if layer == "k" and sharing == "reduce":
            continue  # softmax ignores a shift of all keys: their summed gradient is zero, so G is
        basis = corrected[f"{layer}/weight"]
        block = _dense(basis, basis.raw_values)
        weight, lone = places[f"{layer}.weight"], places.get(f"{layer}.bias")
        if bias == "joint" and lone is not None:  # their rows are (out, in + 1)
            out = len(lone)
            index = np.concatenate([weight.reshape(out, -1), lone[:, None]], axis=1).reshape(-1)
        else:
            index = weight
        np.testing.assert_allclose(
            block, theirs[np.ix_(index, index)], rtol=1e-8, atol=1e-12, err_msg=layer
        )
        if bias == "separate" and lone is not None:
            q = np.asarray(basis.g_vectors)
            block = q @ np.diag(basis.bias_raw_values) @ q.T
            np.testing.assert_allclose(
                block, theirs[np.ix_(lone, lone)], rtol=1e-8, atol=1e-12, err_msg=layer
            )
