"""Texts of an analysis as batches, in their order."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkfac as jk
from jaxkfac._arguments import ArrayTree, with_leaves
from jaxkfac.files import checksum_of
from jaxkfac.jobs.cli._options import AnalyzeArguments, ModelAnalysis
from jaxkfac.jobs.cli._paths import ModelSource, model_source
from jaxkfac.jobs.cli._progress import say
from jaxkfac.jobs.cli.finetune._encoder_decoder import EncoderDecoderFamily
from jaxkfac.jobs.cli.finetune._family import Family, Text
from jaxkfac.jobs.cli.finetune._load import family_of
from jaxkfac.jobs.cli.finetune._options import Finetuning
from jaxkfac.jobs.data.readers import Bad, FileRows
from jaxkfac.jobs.data.text import Completion, Encoded
from jaxkfac.jobs.data.wordnet import wordnet_pairs
from jaxkfac.jobs.models import Pretrained

_GLOSSES = 24  # glosses per embedded text: more than 128 tokens


class Analyzed(NamedTuple):
    """The model to analyze, in the form in which `finetune` loads it.

    Attributes:
        family: Kind of the model.
        experiment: Options by which the model is loaded and the texts are tokenized.
        adapter: Folder of an adapter that is in place during the analysis.
    """

    family: Family
    experiment: Finetuning
    adapter: Path | None = None

    def shapes(self) -> Pretrained:
        """The model with shapes as parameters."""
        return self._adapted(self.family.shapes(self.experiment))

    def load(self) -> Pretrained:
        """The model."""
        return self._adapted(self.family.load(self.experiment))

    def _adapted(self, pretrained: Pretrained) -> Pretrained:
        """The model with its adapter as a part of its function.

        Parameters that the adapter replaces are the model's own afterwards.
        """
        if self.adapter is None:
            return pretrained
        adapters, config = jk.lslora.load(self.adapter, model=pretrained)
        replaced = {path: x for path, x in adapters.items() if isinstance(x, jax.Array)}
        branches = {path: x for path, x in adapters.items() if path not in replaced}
        run = jk.lslora.attach(pretrained.apply_fn, config)

        def apply_fn(params: ArrayTree, inputs: ArrayTree) -> Any:
            return run.run(params, branches, inputs, freeze=False)

        params = with_leaves(pretrained.params, replaced)
        return pretrained._replace(apply_fn=apply_fn, params=params)


class Texts(NamedTuple):
    """The texts to collect the factors over.

    Attributes:
        batches: ``(inputs, targets, mask)`` of NumPy arrays; the last may have fewer rows.
        exist: Mask of the positions that hold a token, for each batch.
        num_texts: Number of texts.
        num_terms: Number of tokens in the loss.
        num_bad: Number of rows left out.
        crc: CRC-32 of all tokens.
    """

    batches: list[Any]
    exist: list[np.ndarray]
    num_texts: int
    num_terms: int
    num_bad: int
    crc: str


def analyzed(name: str, options: ModelAnalysis, base: Path | None = None) -> Analyzed:
    """The model at ``name``, or the adapter there on its ``base``, with the options to load it.

    Raises:
        ValueError: an option is for the other kind of model.
    """
    source = model_source(Path(name), base) or ModelSource(name)
    family = family_of(Finetuning(model=source.model))
    pairs = isinstance(family, EncoderDecoderFamily)
    for name in () if pairs else ("max_target_length", "source_key", "target_key", "prefix"):
        if getattr(options, name) != getattr(ModelAnalysis, name):
            option = name.replace("_", "-")
            raise ValueError(f"--{option} is for pairs, and {source.model} is a decoder")
    experiment = Finetuning(
        model=source.model,
        data=options.data or "wordnet",
        max_length=options.max_length,
        max_target_length=options.max_target_length,
        source_key=options.source_key,
        target_key=options.target_key,
        prefix=options.prefix,
        batch_size=1,
        questions="0",
        dtype=options.dtype,
        gguf_pre=options.gguf_pre,
        dropout=0.0,  # the key is for sampled labels alone
        loss_on="assistant" if pairs else "all",
    )
    return Analyzed(family, experiment, source.adapter)


def read_texts(what: Analyzed, arguments: AnalyzeArguments) -> Text:
    """The first texts, read before the model is loaded.

    Raises:
        ValueError: there are none.
    """
    family, experiment = what.family, what.experiment
    count = arguments.model.texts
    embedded = experiment.data == "wordnet" and not isinstance(family, EncoderDecoderFamily)
    if embedded:
        chosen: Sequence[Any] = _glosses(count)
        return Text(chosen, chosen)
    train = family.text(experiment, strict=arguments.strict).train
    if isinstance(train, FileRows):
        return _first(train, count)
    chosen = train[:count]
    if not chosen:
        raise ValueError(f"--data {experiment.data}: there is no text in it")
    return Text(chosen, chosen)


def _first(rows: FileRows, count: int) -> Text:
    """The first ``count`` good rows, and the bad ones before and among them."""
    rows.peek()  # raises if no row is usable
    good: list[Any] = []
    bad: list[Bad] = []
    for _, row in rows.read():
        if isinstance(row, Bad):
            bad.append(row)
        else:
            good.append(row)
            if len(good) == count:
                break
    return Text(good, good, bad=bad)


def batches_of(what: Analyzed, pretrained: Pretrained, text: Text, batch_size: int) -> Texts:
    """The texts in the model's tokens.

    Raises:
        ValueError: the tokenizer has ids that the model does not have, or nothing can be learned.
    """
    if pretrained.tokenizer is None:
        model = what.experiment.model
        raise ValueError(f"{model} has no tokenizer: put its tokenizer.json beside it")
    tokens = what.family.tokens(what.experiment, pretrained, text)
    if isinstance(tokens.encoded, Encoded) and tokens.encoded.appended:
        say(f"{what.experiment.model}: {tokens.encoded}")
    number = len(tokens.validation.examples)
    encoded = dataclasses.replace(tokens.validation, batch_size=min(batch_size, number))
    # Rows that only fill the last batch hold no text, but their positions would count.
    batches = [what.family.batch(x, np.asarray) for x in encoded.in_order(fill=False)]
    exist = [np.asarray(what.family.exist(on_device(arrays))) for arrays in batches]
    terms = sum(int(batch[2].sum()) for batch in batches)
    crc = checksum_of(leaf.tobytes() for leaf in jax.tree.leaves(batches))
    return Texts(batches, exist, number, terms, len(text.bad), crc)


def on_device(batch: ArrayTree) -> Any:
    """A batch as JAX arrays."""
    return jax.tree.map(jnp.asarray, batch)


def _glosses(count: int) -> list[Completion]:
    """Words with their meanings, several in each text."""
    pairs = wordnet_pairs()[0]
    if count * _GLOSSES > len(pairs):
        raise ValueError(
            f"--texts {count}: the embedded glosses make {len(pairs) // _GLOSSES} texts; give "
            "--data a file of your own"
        )
    step = len(pairs) // count  # spreads the texts over the whole alphabet
    texts = []
    for start in range(0, count * step, step):
        some = pairs[start : start + _GLOSSES]
        texts.append(Completion("", " ".join(f"{x.source}: {x.target}." for x in some)))
    return texts
