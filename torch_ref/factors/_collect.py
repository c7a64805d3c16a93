"""Collect factors with hooks, in one backward pass, and leave nothing behind."""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from torch_ref.factors._layers import find_layers
from torch_ref.factors._statistics import Bias, LayerFactors, Sharing, form_factors
from torch_ref.memory import release_cache

Loss = Callable[[nn.Module, Any], torch.Tensor]


def collect_factors(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    layers: str | None = None,
    sharing: Sharing = "expand",
    bias: Bias = "joint",
    mask: torch.Tensor | None = None,
    gram_dtype: torch.dtype | None = None,
    keep: torch.dtype | None = None,
) -> dict[str, LayerFactors]:
    r"""The Kronecker factors of every layer, from one forward and one backward pass.

    When the gradient of a layer's output arrives, both factors of the layer are formed and go
    to the CPU at once; its inputs and its gradient are dropped before the pass goes on. The
    graph is not retained. Hooks are removed, gradients set to ``None`` and the cache emptied
    at the end, also when the pass fails.

    Args:
        model: With trainable layers of :func:`find_layers`; on any device.
        loss: ``loss(model, batch)``, a mean over loss terms; see :func:`fisher_loss`.
        batch: Handed to ``loss``.
        layers: A regular expression over module names, a full match; ``None`` is all.
        sharing: ``"expand"`` or ``"reduce"``; see :func:`form_factors`.
        bias: ``"joint"``: ones are appended last to the inputs. ``"separate"``: the bias has a
            block of its own, G.
        mask: Attention mask ``(N, S)``, nonzero where a position exists.
        gram_dtype: Dtype of rows before they are multiplied; ``None`` is the model's, and then
            a factor of a bfloat16 model is rounded to bfloat16 once.
        keep: Dtype of factors on the CPU; ``None`` is float32, and float64 for float64 models.
            bfloat16 takes half the memory.

    Returns:
        ``{module name: factors}`` on the CPU, on the documents' scale: :class:`LayerFactors`.

    Raises:
        ValueError: a layer that no gradient reached, or that was used twice under
            ``"reduce"``, by name.

    Memory:
        On the device one layer's pair of factors beyond the gradient's own needs.

    Example:
        >>> import torch
        >>> model, x = torch.nn.Linear(2, 1), torch.eye(2)
        >>> factors = collect_factors(model, lambda model, x: model(x).square().mean(), x)
        >>> factors[""].a[-1]
        tensor([0.5000, 0.5000, 1.0000])
    """
    options = {"sharing": sharing, "bias": bias, "mask": mask}
    modules = find_layers(model, layers)
    try:
        return _one_pass(model, loss, batch, modules, gram_dtype=gram_dtype, keep=keep, **options)
    finally:
        release_cache()


def stream_factors(
    model: nn.Module, loss: Loss, batch: Any, *, layers: str | None = None, **options: Any
) -> Iterator[tuple[str, LayerFactors]]:
    """The factors of one layer at a time: a pass for each, and one layer's factors alive.

    The numbers of :func:`collect_factors`, as long as ``loss`` gives the same value in every
    pass: sampled targets need a seed (:func:`fisher_loss`), dropout must be off. The cache is
    emptied once, after the last pass.

    Yields:
        ``(module name, factors)``, in the order of the modules.
    """
    try:
        for name, module in find_layers(model, layers).items():
            yield from _one_pass(model, loss, batch, {name: module}, **options).items()
    finally:
        release_cache()


def _one_pass(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    modules: Mapping[str, nn.Module],
    *,
    sharing: Sharing = "expand",
    bias: Bias = "joint",
    mask: torch.Tensor | None = None,
    gram_dtype: torch.dtype | None = None,
    keep: torch.dtype | None = None,
) -> dict[str, LayerFactors]:
    form = functools.partial(
        form_factors, sharing=sharing, bias=bias, mask=mask, gram_dtype=gram_dtype
    )
    found: dict[str, list[LayerFactors]] = defaultdict(list)
    handles = []
    try:
        for name, module in modules.items():
            hook = functools.partial(_forward_hook, name, found[name], form, keep)
            handles.append(module.register_forward_hook(hook, with_kwargs=True))
        with torch.enable_grad():
            loss(model, batch).backward()
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad(set_to_none=True)
    return {name: _add_uses(name, uses, sharing) for name, uses in found.items()}


def to_host(factor: torch.Tensor, keep: torch.dtype | None) -> torch.Tensor:
    """Move a factor to the CPU first and convert it there.

    The other order makes a float32 copy on the device and sends twice the bytes.
    """
    if keep is None:
        keep = torch.promote_types(factor.dtype, torch.float32)
    return factor.cpu().float() if keep == torch.float32 else factor.cpu().to(keep)


def _forward_hook(name, uses, form, keep, module, args, kwargs, output) -> None:
    if not output.requires_grad:
        return  # inside reentrant checkpointing: the pass that counts is still to come
    held = [(args[0] if args else kwargs["input"]).detach()]

    @torch.no_grad()
    def output_hook(gradient: torch.Tensor) -> None:
        made = form(name, module, held.pop(), gradient)
        uses.append(
            LayerFactors(to_host(made.a, keep), to_host(made.g, keep), made.rows, made.bias)
        )

    # A hook on the output, rather than on the module, ties each input to its own gradient
    # however often and in whatever order the module is called.
    output.register_hook(output_hook)


def _add_uses(name: str, uses: list[LayerFactors], sharing: Sharing) -> LayerFactors:
    if not uses:
        raise ValueError(
            f"layer {name!r} got no gradient: the loss does not depend on it, or its weight is "
            "used without calling the module (as attention does); leave it out with layers="
        )
    if len(uses) == 1:
        return uses[0]
    if sharing == "reduce":
        raise ValueError(
            f"layer {name!r} is used {len(uses)} times, and reduce sums gradients over uses "
            "before they are multiplied, which one hook per use cannot; use sharing='expand'"
        )
    rows = sum(use.rows for use in uses)
    a, g = (sum(getattr(use, side) * (use.rows / rows) for use in uses) for side in ("a", "g"))
    return LayerFactors(a, g, rows, uses[0].bias)
