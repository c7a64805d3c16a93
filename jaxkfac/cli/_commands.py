"""The commands by name; what they accept and do is imported when one is called."""

import importlib
from typing import Any, NamedTuple


class Command(NamedTuple):
    """A command.

    Attributes:
        name: As it is called.
        summary: Its line in the help; the first line of what it accepts, too.
        arguments: ``"module:class"`` of what it accepts.
        run: ``"module:function"`` that takes them.
        default: ``"module:function"`` of the words of the command line: what the arguments are
            where the words do not say it; ``None``: as their class has them.
        compiles: Whether the programs that it compiles are kept for the next time.
    """

    name: str
    summary: str
    arguments: str
    run: str
    default: str | None = None
    compiles: bool = False


COMMANDS = (
    Command(
        "train",
        "Train on real data with K-FAC, and the same model with AdamW beside it.",
        "jaxkfac.cli._options:TrainArguments",
        "jaxkfac.cli._train:run_train",
        compiles=True,
    ),
    Command(
        "finetune",
        "Teach a pretrained decoder or encoder-decoder, and examine it before and after.",
        "jaxkfac.cli.finetune._options:FinetuneArguments",
        "jaxkfac.cli.finetune._run:run_finetune",
        "jaxkfac.cli.finetune._presets:default_arguments",
        compiles=True,
    ),
    Command(
        "influence",
        "Score training texts by how much training on each lowers the loss of a query.",
        "jaxkfac.cli.influence._options:InfluenceArguments",
        "jaxkfac.cli.influence._run:run_influence",
        compiles=True,
    ),
    Command(
        "analyze",
        "Show spectra and capacity of a pretrained model, or of the factors of a checkpoint.",
        "jaxkfac.cli._options:AnalyzeArguments",
        "jaxkfac.cli._analyze:run_analyze",
        compiles=True,
    ),
    Command(
        "adapter",
        "Look at LS-LoRA adapters on disk.",
        "jaxkfac.cli._options:AdapterArguments",
        "jaxkfac.cli._adapter:run_adapter",
    ),
    Command(
        "plan",
        "Plan the memory of a training from shapes: nothing is allocated, no device is asked.",
        "jaxkfac.cli._plan:PlanArguments",
        "jaxkfac.cli._plan:run_plan",
    ),
    Command(
        "models",
        "Show the pretrained weights that are known, where they are kept and how large they are.",
        "jaxkfac.cli._models:ModelsArguments",
        "jaxkfac.cli._models:run_models",
    ),
    Command(
        "doctor",
        "Show devices, allocator, precision, attention, memory, threads and versions.",
        "jaxkfac.cli._doctor:DoctorArguments",
        "jaxkfac.cli._doctor:run_doctor",
    ),
)


def imported(where: str) -> Any:
    """The object at ``"module:name"``."""
    module, name = where.split(":")
    return getattr(importlib.import_module(module), name)
