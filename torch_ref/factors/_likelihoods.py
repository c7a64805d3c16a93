"""Losses for the empirical and the sampled Fisher: negative log-likelihoods and their samples."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import nn


class Likelihood(Protocol):
    """What the outputs of a model say about targets."""

    def terms(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Negative log-likelihood of each term, ``(N, R...)``."""
        ...

    def sample(self, outputs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Targets drawn from the model, independent per term."""
        ...


class Categorical:
    """Classes; outputs are logits ``(N, R..., C)``, targets integers ``(N, R...)``."""

    def terms(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        log_p = outputs.log_softmax(-1)
        return -log_p.gather(-1, targets[..., None]).squeeze(-1)

    def sample(self, outputs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        p = outputs.softmax(-1).flatten(0, -2)
        return torch.multinomial(p, 1, generator=generator).reshape(outputs.shape[:-1])


class Gaussian:
    """Half the squared distance, summed over the last axis; both are ``(N, R..., C)``."""

    def terms(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - targets).square().sum(-1) / 2

    def sample(self, outputs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        noise = torch.empty_like(outputs).normal_(generator=generator)
        return outputs + noise


class Bernoulli:
    """Independent yes and no, summed over the last axis; outputs are logits ``(N, R..., C)``."""

    def terms(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none").sum(-1)

    def sample(self, outputs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return torch.bernoulli(outputs.sigmoid(), generator=generator)


def fisher_loss(
    likelihood: Likelihood,
    *,
    fisher: Literal["empirical", "sampled"] = "empirical",
    seed: int = 0,
    root: bool = False,
) -> Callable[[nn.Module, Any], torch.Tensor]:
    r"""The mean negative log-likelihood of given targets, or of targets that the model samples.

    Args:
        likelihood: :class:`Categorical`, :class:`Gaussian` or :class:`Bernoulli`.
        fisher: ``"empirical"``: given targets. ``"sampled"``: targets drawn from the outputs of
            the same forward pass; given ones are ignored.
        seed: Of the samples. Equal outputs give equal samples in every call.
        root: Multiply a term by the square root of its weight and still divide by the sum of the
            weights: the outer products of such gradients are the Fisher of the weighted mean.

    Returns:
        ``loss(model, batch)`` with ``batch`` either ``(inputs, targets)`` or
        ``(inputs, targets, mask)``, the mask nonzero where a loss term counts; a floating mask
        holds the terms' weights. Mappings of inputs are given as keywords; of an output with
        ``logits`` these are taken. Targets of masked terms may be anything (-100, NaN); a mask
        that keeps no term gives 0.
    """

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, targets, *masks = batch
        outputs = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
        outputs = getattr(outputs, "logits", outputs)
        if fisher == "sampled":
            generator = torch.Generator(outputs.device).manual_seed(seed)
            targets = likelihood.sample(outputs.detach(), generator)
        if not masks:
            return likelihood.terms(outputs, targets).mean()
        kept = masks[0].bool()
        axes = targets.ndim - kept.ndim  # beyond one entry per term
        targets = targets.masked_fill(~kept.reshape(*kept.shape, *[1] * axes), 0)
        terms = likelihood.terms(outputs, targets).masked_fill(~kept, 0)
        if not masks[0].is_floating_point():
            return terms.sum() / kept.sum().clamp(min=1)
        weights, total = masks[0].to(terms.dtype), masks[0].sum().to(terms.dtype)
        terms = terms * (weights.sqrt() if root else weights)
        return terms.sum() / total.where(total != 0, torch.ones_like(total))

    return loss
