"""Loading of the model and the text of a run."""

from pathlib import Path
from typing import Any

from jaxkfac.jobs.cli._paths import is_named
from jaxkfac.jobs.cli.finetune._decoder import DecoderFamily
from jaxkfac.jobs.cli.finetune._encoder_decoder import ENCODER_DECODERS, EncoderDecoderFamily
from jaxkfac.jobs.cli.finetune._family import Family, Text
from jaxkfac.jobs.cli.finetune._options import Finetuning
from jaxkfac.jobs.models.checkpoint import read_config


def family_of(experiment: Finetuning) -> Family:
    """The kind of the model; for a folder, its ``config.json`` decides.

    Errors in the folder are raised later, where the model is loaded.
    """
    path = Path(experiment.model)
    if is_named(experiment.model):
        return EncoderDecoderFamily() if experiment.model in ENCODER_DECODERS else DecoderFamily()
    if (path / "config.json").is_file():
        config = read_config(path)
        if config.get("is_encoder_decoder") or config.get("model_type") == "t5":
            return EncoderDecoderFamily()
    return DecoderFamily()


def load_model(experiment: Finetuning) -> Any:
    """Load the model: ``.config``, ``.apply_fn``, ``.params``, ``.tokenizer``.

    Raises:
        ValueError: the model has no tokenizer, or an option does not apply to it.
    """
    pretrained = family_of(experiment).load(experiment)
    if pretrained.tokenizer is None:
        raise ValueError(f"{experiment.model} has no tokenizer: put its tokenizer.json beside it")
    return pretrained


def model_shapes(experiment: Finetuning) -> Any:
    """Like :func:`load_model`, with shapes as parameters; downloads nothing, reads no weights.

    Raises:
        FileNotFoundError: the model is not on this machine.
    """
    return family_of(experiment).shapes(experiment)


def load_text(experiment: Finetuning, *, strict: bool = False) -> Text:
    """Read the text before the model is loaded, so that errors in it show at once."""
    return family_of(experiment).text(experiment, strict=strict)
