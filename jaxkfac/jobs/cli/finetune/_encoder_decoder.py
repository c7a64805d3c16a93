"""Fine-tuning of an encoder-decoder: pairs of texts."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkfac._arguments import ArrayTree
from jaxkfac.flax import from_nnx
from jaxkfac.jobs.cli._paths import is_named
from jaxkfac.jobs.cli.finetune._exam import PairExaminer
from jaxkfac.jobs.cli.finetune._family import (
    EncodedText,
    Family,
    Text,
    check_ids,
    dtype_of,
    held_rows,
)
from jaxkfac.jobs.cli.finetune._options import Finetuning
from jaxkfac.jobs.data.pairs import (
    EncodedPairs,
    Pair,
    PairBatch,
    PairBatches,
    bigram_loss,
    encode_pairs,
    pair_files,
    pair_stream,
)
from jaxkfac.jobs.data.readers import FileRows
from jaxkfac.jobs.data.wordnet import wordnet_pairs
from jaxkfac.jobs.models import (
    EncoderDecoder,
    EncoderDecoderConfig,
    Pairs,
    Pretrained,
    byte_tokenizer,
    encoder_decoder_shapes,
    load_encoder_decoder,
    save_encoder_decoder,
    shaped_encoder_decoder,
)

_SHAPES = {"gated": True, "activation": "gelu_new", "tied_head": False, "scaled_head": False}
_BYTES = EncoderDecoderConfig(
    vocabulary=258, width=128, hidden=256, encoder_depth=1, decoder_depth=3, num_heads=4,
    head_size=32, eos_ids=(1,), **_SHAPES,
)  # fmt: skip
_FLAN_T5_XL = EncoderDecoderConfig(
    vocabulary=32128, width=2048, hidden=5120, encoder_depth=24, decoder_depth=24, num_heads=32,
    head_size=64, eos_ids=(1,), dropout=0.1, **_SHAPES,
)  # fmt: skip
ENCODER_DECODERS = {"t5-bytes": _BYTES, "flan-t5-xl": _FLAN_T5_XL}
"""Encoder-decoders that can be named instead of a folder."""


class EncoderDecoderFamily(Family):
    """Encoder-decoders in T5's layout."""

    target = r".*Attention/[qv]/kernel"
    kernels = r"(encoder|decoder)/block/.*/kernel"
    task_type = "SEQ_2_SEQ_LM"
    num_lengths = 4

    def check(self, experiment: Finetuning) -> None:
        _check(experiment)
        if experiment.data == "elements":
            raise ValueError(
                f"--data elements are conversations, and {experiment.model} is an encoder-decoder: "
                "give --data wordnet, or a file or folder of pairs"
            )

    def load(self, experiment: Finetuning) -> Any:
        named = experiment.model if is_named(experiment.model) else None
        if named == "flan-t5-xl":
            raise ValueError(
                "flan-t5-xl is known by its sizes, for --plan: to train it, give --model the "
                "folder of the checkpoint google/flan-t5-xl"
            )
        if named == "t5-bytes":
            return _untrained(experiment)
        return load_encoder_decoder(experiment.model, **self._options(experiment))

    def shapes(self, experiment: Finetuning) -> Any:
        options = self._options(experiment)
        if not is_named(experiment.model):
            return encoder_decoder_shapes(experiment.model, **options)
        shaped = shaped_encoder_decoder(ENCODER_DECODERS[experiment.model], **options)
        is_bytes = experiment.model == "t5-bytes"
        return shaped._replace(tokenizer=byte_tokenizer() if is_bytes else None)

    def save(self, folder: Path, pretrained: Pretrained) -> None:
        save_encoder_decoder(folder, pretrained)

    def text(self, experiment: Finetuning, *, strict: bool = False) -> Text:
        self.check(experiment)
        prefix = experiment.prefix
        if experiment.data == "wordnet":
            learnt, held_out = (
                [Pair(prefix + pair.source, pair.target) for pair in pairs]
                for pairs in wordnet_pairs()
            )
            return Text(learnt, held_out)
        keys = {"source": experiment.source_key, "target": experiment.target_key}
        train, validation = pair_files(experiment.data, prefix=prefix, strict=strict, **keys)
        train.peek()
        validation_rows = held_rows(validation)
        return Text(train, validation_rows.good, bad=validation_rows.bad)

    def tokens(self, experiment: Finetuning, pretrained: Any, text: Text) -> EncodedText:
        tokenizer, config = pretrained.tokenizer, pretrained.config
        ends = {"pad_id": config.pad_id, "start_id": config.start_id}

        def encoded_of(pairs: Sequence[Pair]) -> EncodedPairs:
            encoded = _encoded(experiment, tokenizer, pairs)
            sides = (ids for example in encoded.examples for ids in example)
            check_ids(max(int(ids.max()) for ids in sides), config.vocabulary)
            return encoded

        chosen = {"batch_size": experiment.batch_size, "seed": experiment.seed, **ends}
        validation, reference = None, {}
        if isinstance(text.train, FileRows):
            encoded = None
            train = pair_stream(
                text.train,
                tokenizer,
                max_source_length=experiment.max_length,
                max_target_length=experiment.max_target_length,
                num_lengths=experiment.num_lengths or self.num_lengths,
                window=experiment.shuffle_window,
                **chosen,
            )
            train.first()  # reports errors in the data at once
        else:
            encoded = encoded_of(text.train)
            train = PairBatches.padded(
                encoded.examples, num_lengths=experiment.num_lengths or 1, **chosen
            )
        if text.validation:
            validation_examples = encoded_of(text.validation).examples
            size = min(experiment.batch_size, len(validation_examples))
            validation = PairBatches.padded(validation_examples, batch_size=size, **ends)
            train_pairs = text.train  # for files, the pairs of the first window
            if isinstance(train_pairs, FileRows):
                train_pairs = train_pairs.peek(experiment.shuffle_window)
            examples = (encoded or encoded_of(train_pairs)).examples
            targets = ([e.target for e in side] for side in (examples, validation_examples))
            reference["bigram"] = bigram_loss(*targets, vocabulary=config.vocabulary)
        return EncodedText(encoded, train, validation, reference)

    def sources(
        self, experiment: Finetuning, tokenizer: Any, pairs: Sequence[Pair]
    ) -> list[list[int]]:
        """Ids of the sources, cut like those that are trained on."""
        return [e.source.tolist() for e in _encoded(experiment, tokenizer, pairs).examples]

    def rows(self, experiment: Finetuning, batches: Any) -> Any:
        lengths = experiment.max_length, experiment.max_target_length
        if batches is not None:
            lengths = batches.source_lengths[-1], batches.lengths[-1]
        source, target = ((experiment.batch_size, length) for length in lengths)
        ids = jnp.zeros(target, jnp.int32)
        inputs = Pairs(jnp.zeros(source, jnp.int32), jnp.zeros(source, bool), ids)
        return inputs, ids, jnp.zeros(target, bool)

    def batch(
        self, batch: PairBatch, asarray: Callable[[Any], Any] = jnp.asarray
    ) -> tuple[Pairs, Any, Any]:
        source, source_mask, decoder_inputs, targets, mask = map(asarray, batch)
        return Pairs(source, source_mask, decoder_inputs), targets, mask

    def exist(self, batch: ArrayTree) -> jax.Array:
        return batch[2]  # for the target; the model derives the source's from its mask

    def dropout(self, experiment: Finetuning, config: EncoderDecoderConfig) -> float | int:
        return config.dropout if experiment.dropout is None else experiment.dropout

    def examiner(self, problem: Any, arguments: Any) -> PairExaminer:
        return PairExaminer(problem, arguments)

    def _options(self, experiment: Finetuning) -> dict[str, Any]:
        _check(experiment)
        return {
            "dtype": dtype_of(experiment),
            "dropout": experiment.dropout,
            "remat": experiment.remat,
            "quantize": self.quantized(experiment),
        }


def _encoded(experiment: Finetuning, tokenizer: Any, pairs: Sequence[Pair]) -> EncodedPairs:
    return encode_pairs(
        pairs,
        tokenizer,
        max_source_length=experiment.max_length,
        max_target_length=experiment.max_target_length,
    )


def _untrained(experiment: Finetuning) -> Pretrained:
    """A small encoder-decoder over bytes, with random parameters from the run's seed."""
    rate = _BYTES.dropout if experiment.dropout is None else experiment.dropout
    rngs = nnx.Rngs(experiment.seed)
    model = EncoderDecoder(_BYTES, dropout=rate, remat=experiment.remat, rngs=rngs)
    apply_fn, params = from_nnx(model)
    params = jax.tree.map(lambda x: x.astype(dtype_of(experiment)), params)
    return Pretrained(_BYTES, apply_fn, params, byte_tokenizer())


def _check(experiment: Finetuning) -> None:
    """Refuse options that only decoders have."""
    wrong = {
        "--questions are multiple choice": experiment.questions not in (None, "0"),
        "--attention cudnn has no relative positions": experiment.attention != "xla",
        "--batching pack puts records behind each other": experiment.batching != "pad",
        "--loss-on all learns prompts": experiment.loss_on != "assistant",
        "--gguf-pre is for a .gguf file": experiment.gguf_pre is not None,
        "--system is the first turn of a conversation": experiment.system is not None,
        "--style is for multiple-choice questions": experiment.style != "chat",
        "--adapter.split takes fused projections apart": experiment.adapter.split,
    }
    for complaint, is_set in wrong.items():
        if is_set:
            raise ValueError(f"{complaint}, and {experiment.model} is an encoder-decoder")
    if experiment.train == "all" and experiment.adapter.start is not None:
        raise ValueError("--adapter.start is for --train adapter: with --train all leave it out")
    if experiment.train == "all" and experiment.quantize is not None:
        raise ValueError("--quantize is for a frozen base: with --train all leave it out")
    is_untrained = experiment.model == "t5-bytes" and is_named(experiment.model)
    if is_untrained and experiment.quantize is not None:
        raise ValueError("--quantize is for a pretrained base, and t5-bytes is not: leave it out")
