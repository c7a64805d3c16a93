"""Fine-tuning of a decoder: records of text, multiple-choice questions."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxkfac._arguments import ArrayTree
from jaxkfac.jobs.cli._paths import is_named
from jaxkfac.jobs.cli.finetune._exam import DecoderExaminer
from jaxkfac.jobs.cli.finetune._family import (
    EncodedText,
    Family,
    Text,
    check_ids,
    dtype_of,
    held_rows,
)
from jaxkfac.jobs.cli.finetune._options import Finetuning
from jaxkfac.jobs.data.choices import read_questions
from jaxkfac.jobs.data.elements import element_questions, element_records
from jaxkfac.jobs.data.readers import FileRows
from jaxkfac.jobs.data.text import (
    Encoded,
    TokenBatch,
    TokenBatches,
    encode_records,
    record_files,
    token_stream,
)
from jaxkfac.jobs.models import (
    DecoderConfig,
    Pretrained,
    Tokens,
    decoder_shapes,
    load_decoder,
    shaped_decoder,
)
from jaxkfac.jobs.models.pretrained import KNOWN, cached_file

_SYSTEM = "Answer in a word."  # shorter than the default of SmolLM2's template
_EMBEDDED_QUESTIONS = 40

DECODERS = {
    "llama-1b": DecoderConfig(
        vocabulary=32000, width=2048, hidden=5632, depth=22, num_heads=32, num_kv_heads=32,
        head_size=64, context=2048,
    ),
    "llama-7b": DecoderConfig(
        vocabulary=32000, width=4096, hidden=11008, depth=32, num_heads=32, num_kv_heads=32,
        head_size=128, context=4096,
    ),
    "phi-3-mini": DecoderConfig(
        vocabulary=32064, width=3072, hidden=8192, depth=32, num_heads=32, num_kv_heads=32,
        head_size=96, context=4096,
    ),
}  # fmt: skip
"""Decoders that are known by their sizes, for ``--plan``."""


class DecoderFamily(Family):
    """Decoders in the layouts of Llama and Phi-3."""

    target = kernels = r".*_proj/kernel"
    task_type = "CAUSAL_LM"
    num_lengths = 8
    unread = ("max_target_length", "generate", "num_beams", "rouge")

    def check(self, experiment: Finetuning) -> None:
        if experiment.train == "all":
            raise ValueError(_ADAPTERS_ONLY)
        if experiment.data == "wordnet":
            raise ValueError(
                "--data wordnet are pairs for an encoder-decoder, and the model is a decoder"
            )
        for name in ("prefix", "source_key", "target_key"):
            if getattr(experiment, name):
                option = name.replace("_", "-")
                raise ValueError(f"--{option} is for pairs, and {experiment.model} is a decoder")
        if experiment.dropout:
            raise ValueError(
                f"--dropout is for encoder-decoders, and {experiment.model} is a decoder, which "
                f"was trained without dropout; --adapter.dropout drops inputs of the adapter"
            )
        if experiment.batching == "pack" and experiment.num_lengths is not None:
            raise ValueError("--num-lengths is for --batching pad: packed rows have one length")
        if experiment.questions is None or experiment.questions.isdigit():
            _embedded_questions(experiment)

    def load(self, experiment: Finetuning) -> Any:
        options = self._options(experiment)
        named = is_named(experiment.model)
        if named and experiment.model in DECODERS:
            raise ValueError(
                f"{experiment.model} is known by its sizes, for --plan: to train it, give --model "
                "the folder of a checkpoint"
            )
        if named and experiment.model == "smollm2":
            _check_no_rule(experiment)
            return _smollm2(options)
        return load_decoder(experiment.model, **options, **_rule(experiment))

    def shapes(self, experiment: Finetuning) -> Any:
        if experiment.train == "all":
            raise ValueError(_ADAPTERS_ONLY)
        path: str | Path = experiment.model
        named = is_named(experiment.model)
        if named and experiment.model in DECODERS:
            _check_no_rule(experiment)
            shapes = shaped_decoder(DECODERS[experiment.model], **self._options(experiment))
        else:
            if named and path == "smollm2":
                _check_no_rule(experiment)
                (weights,) = KNOWN
                path = cached_file(weights)
            shapes = decoder_shapes(path, **self._options(experiment), **_rule(experiment))
        _longest(experiment, shapes)  # a plan refuses what the run refuses
        return shapes

    def save(self, folder: Path, pretrained: Pretrained) -> None:
        raise ValueError(_ADAPTERS_ONLY)

    def text(self, experiment: Finetuning, *, strict: bool = False) -> Text:
        self.check(experiment)
        embedded = experiment.data == "elements"
        system = experiment.system
        if system is None:
            system = _SYSTEM if embedded else ""
        if embedded:
            train, validation = element_records(system=system), None
        else:
            train, validation = record_files(experiment.data, strict=strict)
            train.peek()
        validation_rows = held_rows(validation)
        chosen = experiment.questions
        if chosen is None or chosen.isdigit():
            questions = _embedded_questions(experiment)
        else:
            questions = read_questions(Path(chosen))
        return Text(train, validation_rows.good, questions, system, validation_rows.bad)

    def tokens(self, experiment: Finetuning, pretrained: Any, text: Text) -> EncodedText:
        longest, tokenizer = _longest(experiment, pretrained), pretrained.tokenizer
        pad_id, validation = tokenizer.pad_id, None

        options: dict[str, Any] = {"max_length": longest, "loss_on": experiment.loss_on}

        def encoded_of(records: Any) -> Encoded:
            encoded = encode_records(records, tokenizer, **options)
            check_ids(max(int(e.ids.max()) for e in encoded.examples), pretrained.config.vocabulary)
            return encoded

        if isinstance(text.train, FileRows):
            encoded = None
            train = token_stream(
                text.train,
                tokenizer,
                batch_size=experiment.batch_size,
                batching=experiment.batching,
                num_lengths=experiment.num_lengths or self.num_lengths,
                window=experiment.shuffle_window,
                seed=experiment.seed,
                **options,
            )
            train.first()  # reports errors in the data at once
        else:
            encoded = encoded_of(text.train)
            train = _batches(experiment, encoded, pad_id, longest)
        if text.validation:
            validation_examples = encoded_of(text.validation).examples
            size = min(experiment.batch_size, len(validation_examples))
            validation = TokenBatches.padded(validation_examples, batch_size=size, pad_id=pad_id)
        return EncodedText(encoded, train, validation, {})

    def rows(self, experiment: Finetuning, batches: Any) -> Any:
        length = experiment.max_length if batches is None else batches.lengths[-1]
        shape = (experiment.batch_size, length)
        ids = jnp.zeros(shape, jnp.int32)
        return Tokens(ids, ids, ids), ids, jnp.zeros(shape, bool)

    def batch(
        self, batch: TokenBatch, asarray: Callable[[Any], Any] = jnp.asarray
    ) -> tuple[Tokens, Any, Any]:
        ids, positions, segments, targets, mask = map(asarray, batch)
        return Tokens(ids, positions, segments), targets, mask

    def exist(self, batch: ArrayTree) -> jax.Array:
        return batch[0].segments > 0

    def examiner(self, problem: Any, arguments: Any) -> DecoderExaminer:
        return DecoderExaminer(problem, arguments)

    def _options(self, experiment: Finetuning) -> dict[str, Any]:
        _check_attention(experiment)
        return {
            "dtype": dtype_of(experiment),
            "remat": experiment.remat,
            "quantize": self.quantized(experiment),
            "attention": experiment.attention,
        }


_ADAPTERS_ONLY = "--train all is for encoder-decoders: a decoder is taught by an adapter"


def _smollm2(options: dict[str, Any]) -> Any:
    from jaxkfac.jobs.models import smollm2

    return smollm2(**options)


def _rule(experiment: Finetuning) -> dict[str, Any]:
    return {} if experiment.gguf_pre is None else {"gguf_pre": experiment.gguf_pre}


def _check_no_rule(experiment: Finetuning) -> None:
    if _rule(experiment):
        raise ValueError(f"--gguf-pre is for a .gguf file, and --model is {experiment.model}")


def _longest(experiment: Finetuning, pretrained: Any) -> int:
    """Longest record, in tokens.

    Raises:
        ValueError: it is longer than the model's context.
    """
    context = pretrained.config.longest
    if experiment.data == "elements":  # its records are short, whatever the model is
        return min(experiment.max_length, context)
    if experiment.max_length > context:
        raise ValueError(
            f"max_length {experiment.max_length} is longer than the model's context, "
            f"{context} tokens: lower --max-length"
        )
    return experiment.max_length


def _embedded_questions(experiment: Finetuning) -> list[Any]:
    """The embedded questions that the options ask for.

    Raises:
        ValueError: there are fewer.
    """
    count = _EMBEDDED_QUESTIONS if experiment.data == "elements" else 0
    if experiment.questions is not None:
        count = int(experiment.questions)
    return element_questions(count, seed=experiment.seed) if count else []


def _check_attention(experiment: Finetuning) -> None:
    if experiment.attention != "cudnn":
        return
    dtype = jnp.dtype(dtype_of(experiment))
    if jax.default_backend() != "gpu":
        raise ValueError(
            "--attention cudnn needs an NVIDIA GPU, and JAX's default backend is "
            f"{jax.default_backend()}: take --attention xla"
        )
    if dtype.itemsize != 2:
        raise ValueError(
            f"--attention cudnn computes in half precision, and --dtype is {dtype}: "
            "take --dtype bfloat16, or --attention xla"
        )


def _batches(experiment: Finetuning, encoded: Encoded, pad_id: int, longest: int) -> TokenBatches:
    options: dict[str, Any] = {
        "batch_size": experiment.batch_size,
        "pad_id": pad_id,
        "seed": experiment.seed,
    }
    if experiment.batching == "pack":
        return TokenBatches.packed(encoded.examples, length=longest, **options)
    return TokenBatches.padded(encoded.examples, num_lengths=experiment.num_lengths or 1, **options)
