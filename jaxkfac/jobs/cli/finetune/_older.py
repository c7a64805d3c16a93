"""Runs that older versions began."""

import dataclasses
from pathlib import Path

from jaxkfac.jobs.cli._checkpoint import stored_config
from jaxkfac.jobs.cli.finetune._options import AdafactorOptions, FinetuneArguments

OLDER = {
    "attention": "xla",
    "shuffle_window": 8192,
    "adapter": {
        "nonlinearity": "fourier",
        "split": False,
        "rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "modules_to_save": None,
        "sigma_from_data": None,
        "start": None,
    },
    "source_key": None,
    "target_key": None,
    "prefix": "",
    "train": "adapter",
    "max_target_length": 128,
    "label_smoothing": 0.0,
    "dropout": 0.0,
    "adafactor": dataclasses.asdict(AdafactorOptions()),
}
"""Options that checkpoints of older versions lack, and what those versions did."""


def as_begun(arguments: FinetuneArguments, folder: Path) -> FinetuneArguments:
    """What is asked for, where it goes on with a run of a version that knew no dropout: without.

    By default the rate is the model's own, and those versions did not read it.

    Args:
        arguments: What is asked for.
        folder: Of the checkpoints.

    Raises:
        DamagedFileError: the newest checkpoint cannot be read.
    """
    if not arguments.resume or arguments.experiment.dropout is not None:
        return arguments
    config = stored_config(folder)
    if config is None or "dropout" in config:
        return arguments
    experiment = dataclasses.replace(arguments.experiment, dropout=OLDER["dropout"])
    return dataclasses.replace(arguments, experiment=experiment)
