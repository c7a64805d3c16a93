"""The model and the text of a run."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxkfac.cli.finetune._options import Finetuning
from jaxkfac.data.choices import Question, read_questions
from jaxkfac.data.elements import element_questions, element_records
from jaxkfac.data.readers import Bad, FileRows
from jaxkfac.data.text import Record, record_files
from jaxkfac.models import decoder_shapes, load_decoder
from jaxkfac.models.pretrained import KNOWN, cached_file

_SYSTEM = "Answer in a word."  # shorter than what SmolLM2's template says by itself
_EMBEDDED_QUESTIONS = 40


class Text(NamedTuple):
    """What is read before any of it is tokens.

    Attributes:
        train: To learn; of files, to be read as they are needed.
        validation: To measure with; may be empty.
        questions: To be examined with; may be empty.
        system: What the system says first in questions; may be empty.
        bad: Rows of the validation files that were left out.
    """

    train: Sequence[Record] | FileRows
    validation: Sequence[Record]
    questions: Sequence[Question]
    system: str
    bad: Sequence[Bad] = ()

    def some(self, count: int) -> list[Record]:
        """Records to validate with, then those to train on: the first of them."""
        train = self.train.peek(count) if isinstance(self.train, FileRows) else self.train
        return list(itertools.islice(itertools.chain(self.validation, train), count))


def load_model(experiment: Finetuning) -> Any:
    """The pretrained decoder: ``.config``, ``.apply_fn``, ``.params``, ``.tokenizer``.

    Raises:
        ValueError: it has no tokenizer, or the attention that was asked for cannot run here.
    """
    options = _options(experiment)
    _check_attention(experiment, options["dtype"])
    if experiment.model == "smollm2":
        pretrained = _smollm2(options)
    else:
        pretrained = load_decoder(experiment.model, **options)
    if pretrained.tokenizer is None:
        raise ValueError(f"{experiment.model} has no tokenizer: put its tokenizer.json beside it")
    return pretrained


def model_shapes(experiment: Finetuning) -> Any:
    """The same with shapes for parameters; nothing is downloaded, and no weights are read.

    Raises:
        FileNotFoundError: the model is not here.
    """
    path: str | Path = experiment.model
    if path == "smollm2":
        (known,) = KNOWN
        path = cached_file(known)
    return decoder_shapes(path, **_options(experiment))


def _options(experiment: Finetuning) -> dict[str, Any]:
    quantize = ".*_proj/kernel" if experiment.quantize == "all" else experiment.quantize
    return {
        "dtype": dtype_of(experiment),
        "remat": experiment.remat,
        "quantize": quantize,
        "attention": experiment.attention,
    }


def _smollm2(options: dict[str, Any]) -> Any:
    from jaxkfac.models import smollm2

    return smollm2(**options)


def dtype_of(experiment: Finetuning) -> Any:
    """The base model's dtype; a CPU computes bfloat16 by way of float32, several times slower."""
    if experiment.dtype == "auto":
        return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    return jnp.dtype(experiment.dtype)


def _check_attention(experiment: Finetuning, dtype: Any) -> None:
    if experiment.attention != "cudnn":
        return
    if jax.default_backend() != "gpu":
        raise ValueError(
            "--attention cudnn needs an NVIDIA GPU, and JAX's default backend is "
            f"{jax.default_backend()}: take --attention xla"
        )
    if jnp.dtype(dtype).itemsize != 2:
        raise ValueError(
            f"--attention cudnn computes in half precision, and --dtype is {jnp.dtype(dtype)}: "
            "take --dtype bfloat16, or --attention xla"
        )


def load_text(experiment: Finetuning, *, strict: bool = False) -> Text:
    """Records and questions, before the model is loaded: what is wrong with them shows at once.

    Args:
        experiment: Which.
        strict: Whether a bad row is an error.
    """
    embedded = experiment.data == "elements"
    system = experiment.system
    if system is None:
        system = _SYSTEM if embedded else ""
    train, validation, bad = element_records(system=system) if embedded else None, [], []
    if train is None:
        train, held = record_files(experiment.data, strict=strict)
        train.peek()
        if held is not None:
            held.peek()
            for _, row in held.read():
                (bad if isinstance(row, Bad) else validation).append(row)
    chosen = experiment.questions
    if chosen is None:
        chosen = str(_EMBEDDED_QUESTIONS) if embedded else "0"
    if chosen.isdigit():
        count = int(chosen)
        questions = element_questions(count, seed=experiment.seed) if count else []
    else:
        questions = read_questions(Path(chosen))
    return Text(train, validation, questions, system, bad)
