"""Commands: parse, call, and turn errors into one line that says what to do."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

from jaxkfac import __version__

_EXTRA_OF = {
    "tyro": "cli",
    "rich": "cli",
    "orbax": "cli",
    "matplotlib": "cli",
    "safetensors": "pretrained",
    "tokenizers": "pretrained",
    "jinja2": "pretrained",
    "gguf": "pretrained",
}

_DESCRIPTION = """Curvature and K-FAC for JAX training scripts.

Start with `jaxkfac train --preset digits`, then open runs/digits/report.html;
`jaxkfac analyze runs/digits` shows spectra and capacity of the factors in its checkpoint.
`jaxkfac finetune` teaches a pretrained language model with an LS-LoRA adapter.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Words after the program's name; by default those of this process.

    Returns:
        The exit code: 0, 2 for an error that was explained, 130 after Ctrl-C.
    """
    # Read when JAX first calls LAPACK. With more threads the last bits of a decomposition
    # depend on the machine, and small ones were up to 20 times slower on two busy cores.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    words = list(sys.argv[1:] if argv is None else argv)
    if words in (["--version"], ["-V"]):
        print(f"jaxkfac {__version__}")
        return 0
    try:
        return _dispatch(words)
    except ModuleNotFoundError as error:
        extra = _EXTRA_OF.get((error.name or "").split(".")[0])
        if "--debug" in words:
            raise
        if "pip install" in str(error):
            return _fail(str(error))
        if extra is None:
            raise
        return _fail(f'{error.name} is not installed: pip install "jaxkfac[{extra}]"')


def _dispatch(words: list[str]) -> int:
    import tyro

    from jaxkfac._errors import JaxkfacError
    from jaxkfac.cli._doctor import DoctorArguments
    from jaxkfac.cli._models import ModelsArguments
    from jaxkfac.cli._options import AdapterArguments, AnalyzeArguments, TrainArguments
    from jaxkfac.cli._plan import PlanArguments
    from jaxkfac.cli.finetune._options import FinetuneArguments

    def named(arguments: Any, name: str) -> Any:
        return Annotated[arguments, tyro.conf.subcommand(name, prefix_name=False)]

    commands = (
        named(TrainArguments, "train")
        | named(FinetuneArguments, "finetune")
        | named(AnalyzeArguments, "analyze")
        | named(AdapterArguments, "adapter")
        | named(PlanArguments, "plan")
        | named(ModelsArguments, "models")
        | named(DoctorArguments, "doctor")
    )
    try:
        arguments = tyro.cli(
            commands,
            prog="jaxkfac",
            description=_DESCRIPTION,
            args=words or ["--help"],
            config=(tyro.conf.FlagCreatePairsOff,),
        )
        if isinstance(arguments, TrainArguments | FinetuneArguments):
            _run_resumable(arguments, words)
        elif isinstance(arguments, AnalyzeArguments):
            from jaxkfac.cli._analyze import run_analyze

            run_analyze(arguments)
        elif isinstance(arguments, AdapterArguments):
            from jaxkfac.cli._adapter import run_adapter_inspect

            run_adapter_inspect(arguments.folder, name=arguments.name, as_json=arguments.json)
        elif isinstance(arguments, PlanArguments):
            from jaxkfac.cli._plan import run_plan

            run_plan(arguments)
        elif isinstance(arguments, ModelsArguments):
            from jaxkfac.cli._models import run_models

            run_models(arguments)
        else:
            from jaxkfac.cli._doctor import run_doctor

            run_doctor(arguments)
    except KeyboardInterrupt:
        return 130
    except (JaxkfacError, ValueError, OSError) as error:
        if "--debug" in words:
            raise
        return _fail(str(error))
    return 0


def _run_resumable(arguments: Any, words: list[str]) -> None:
    """A run that checkpoints; after a Ctrl-C it says how to go on."""
    from jaxkfac.cli._interrupts import say_interrupted
    from jaxkfac.cli._options import TrainArguments

    try:
        if isinstance(arguments, TrainArguments):
            from jaxkfac.cli._train import run_train

            run_train(arguments)
        else:
            from jaxkfac.cli.finetune._run import run_finetune

            run_finetune(arguments)
    except KeyboardInterrupt:
        say_interrupted(words)
        raise


def _fail(message: str) -> int:
    print(f"jaxkfac: {message}", file=sys.stderr)
    return 2
