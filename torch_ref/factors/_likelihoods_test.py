"""Likelihoods against torch.distributions, and the loss that is their mean."""

import pytest
import torch
from torch import distributions, nn

from torch_ref.factors import Bernoulli, Categorical, Gaussian, fisher_loss

OUTPUTS = torch.linspace(-2, 2, 2 * 3 * 4, dtype=torch.float64).reshape(2, 3, 4)


def test_terms_are_negative_log_probabilities():
    labels = torch.tensor([[0, 1, 3], [2, 2, 0]])
    torch.testing.assert_close(
        Categorical().terms(OUTPUTS, labels),
        -distributions.Categorical(logits=OUTPUTS).log_prob(labels),
    )
    yes = (OUTPUTS.cos() > 0).double()
    torch.testing.assert_close(
        Bernoulli().terms(OUTPUTS, yes),
        -distributions.Bernoulli(logits=OUTPUTS).log_prob(yes).sum(-1),
    )
    normal = distributions.Normal(OUTPUTS, 1.0)
    constant = normal.log_prob(OUTPUTS).sum(-1)  # jaxkfac's Gaussian has none either
    torch.testing.assert_close(
        Gaussian().terms(OUTPUTS, yes), constant - normal.log_prob(yes).sum(-1)
    )


@pytest.mark.parametrize(
    ("likelihood", "mean", "variance"),
    [
        (Gaussian(), 0.5, 1.0),
        (Bernoulli(), torch.sigmoid(torch.tensor(0.5)).item(), 0.235),
    ],
)
def test_samples_have_the_models_moments(likelihood, mean, variance):
    outputs = torch.full((20000, 1), 0.5)
    samples = likelihood.sample(outputs, torch.Generator().manual_seed(0))
    # 20000 samples: four standard errors are 0.03 for the mean, 0.04 for the variance
    assert samples.mean().item() == pytest.approx(mean, abs=0.03)
    assert samples.var().item() == pytest.approx(variance, abs=0.04)


def test_categorical_samples_follow_the_softmax_and_keep_the_shape():
    logits = torch.tensor([0.0, 1.0, 2.0]).expand(100, 200, 3)
    samples = Categorical().sample(logits, torch.Generator().manual_seed(0))
    assert samples.shape == (100, 200)
    frequencies = torch.bincount(samples.flatten()) / samples.numel()
    torch.testing.assert_close(frequencies, logits[0, 0].softmax(0), atol=0.015, rtol=0)


def test_masked_terms_are_in_no_sum_and_no_count():
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    mask = torch.tensor([1, 1, 0, 1])
    loss = fisher_loss(Categorical())
    torch.testing.assert_close(
        loss(nn.Identity(), (x, y, mask)),
        loss(nn.Identity(), (x[mask.bool()], y[mask.bool()])),
    )


@pytest.mark.parametrize(
    ("likelihood", "targets", "garbage"),
    [
        (Categorical(), torch.tensor([[0, 1, 3], [2, 2, 0]]), -100),
        (Gaussian(), OUTPUTS.sin(), torch.nan),
        (Bernoulli(), (OUTPUTS.cos() > 0).double(), torch.nan),
    ],
)
def test_targets_of_masked_terms_may_be_anything(likelihood, targets, garbage):
    mask = torch.tensor([[True, False, True], [False, False, True]])
    unread = targets.clone()
    unread[~mask] = garbage
    found = []
    for y in (targets, unread):
        outputs = OUTPUTS.clone().requires_grad_()
        loss = fisher_loss(likelihood)(nn.Identity(), (outputs, y, mask))
        loss.backward()
        found.append((loss.detach(), outputs.grad))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    assert found[0][1][mask].all() and not found[0][1][~mask].any()
    torch.testing.assert_close(found[0][0], likelihood.terms(OUTPUTS, targets)[mask].mean())


@pytest.mark.parametrize("fisher", ["empirical", "sampled"])
def test_mask_that_keeps_no_term_gives_zero_and_no_gradient(fisher):
    outputs = OUTPUTS.clone().requires_grad_()
    loss = fisher_loss(Categorical(), fisher=fisher)
    value = loss(nn.Identity(), (outputs, torch.full((2, 3), -100), torch.zeros(2, 3)))
    value.backward()
    assert value.item() == 0 and not outputs.grad.any()


@pytest.mark.parametrize("root", [False, True])
def test_a_floating_mask_holds_weights_of_terms(root):
    outputs, y = OUTPUTS.clone(), torch.tensor([[0, 1, 3], [2, 2, -100]])
    weights = torch.tensor([[2.0, 0.5, 1.0], [0.25, 0.0, 0.0]], dtype=OUTPUTS.dtype)
    found = fisher_loss(Categorical(), root=root)(nn.Identity(), (outputs, y, weights))
    terms = Categorical().terms(outputs, y.clamp(min=0))
    torch.testing.assert_close(found, (terms * (weights.sqrt() if root else weights)).sum() / 3.75)
    ones = fisher_loss(Categorical(), root=root)(nn.Identity(), (outputs, y, (y >= 0).double()))
    masked = fisher_loss(Categorical())(nn.Identity(), (outputs, y, y >= 0))
    torch.testing.assert_close(ones, masked)


def test_samples_depend_on_the_seed_alone():
    x, y = torch.zeros(50, 3), torch.zeros(50, dtype=torch.long)

    def value(seed):
        loss = fisher_loss(Gaussian(), fisher="sampled", seed=seed)
        return loss(nn.Identity(), (x, y)).item()

    assert value(0) == value(0) != value(1)


def test_mappings_of_inputs_are_keywords_and_logits_are_taken():
    class Output:
        def __init__(self, logits):
            self.logits = logits

    class Model(nn.Module):
        def forward(self, *, input_ids):
            return Output(input_ids)

    x, y = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    loss = fisher_loss(Categorical())
    assert torch.equal(loss(Model(), ({"input_ids": x}, y)), loss(nn.Identity(), (x, y)))
