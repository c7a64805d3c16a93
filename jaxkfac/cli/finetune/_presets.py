"""Options that go together. Nothing heavy is imported here, so that help is quick."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from jaxkfac.cli.finetune._options import AdapterAdamwOptions, FinetuneArguments, Finetuning

_WORDNET_T5 = FinetuneArguments(
    preset="wordnet-t5",
    experiment=Finetuning(
        model="t5-bytes",
        data="wordnet",
        train="all",
        steps=2000,
        batch_size=16,
        max_length=32,
        max_target_length=64,
        remat=False,
        adamw=AdapterAdamwOptions(2e-3, b2=0.99, weight_decay=0.01),
    ),
    output=Path("runs/wordnet-t5"),
    checkpoint_every=500,
    evaluate_every=500,
    curvature=None,
)
_FLAN_T5_XL = FinetuneArguments(
    preset="flan-t5-xl",
    experiment=Finetuning(
        model="flan-t5-xl",
        data="data",
        train="all",
        steps=1000,
        batch_size=8,
        gradient_accumulation_steps=16,
        num_lengths=4,
        max_length=256,
        max_target_length=256,
        dtype="bfloat16",
        adamw=AdapterAdamwOptions(1e-4, b2=0.999, weight_decay=0.01),
    ),
    output=Path("runs/flan-t5-xl"),
    checkpoint_every=100,
    evaluate_every=200,
    curvature=None,
)

PRESETS: Mapping[str, FinetuneArguments] = MappingProxyType(
    {x.preset: x for x in (FinetuneArguments(), _WORDNET_T5, _FLAN_T5_XL)}
)


def default_arguments(words: Sequence[str]) -> FinetuneArguments:
    """What the options are where ``words`` do not say it; an unknown preset is refused later."""
    named = [
        word.partition("=")[2] or next(iter(words[number + 1 :]), "")
        for number, word in enumerate(words)
        if word.partition("=")[0] == "--preset"
    ]
    return PRESETS.get(named[-1] if named else "", PRESETS["elements"])
