"""Commands: parse, call, and turn errors into one line that says what to do."""

import functools
import gc
import importlib
import operator
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

from jaxkfac import __version__

_EXTRA_OF = {
    "tyro": "cli",
    "rich": "cli",
    "orbax": "cli",
    "matplotlib": "cli",
    "grain": "data",
    "pyarrow": "data",
    "safetensors": "pretrained",
    "tokenizers": "pretrained",
    "jinja2": "pretrained",
    "gguf": "pretrained",
}

_DESCRIPTION = """Curvature and K-FAC for JAX training scripts.

Start with `jaxkfac train --preset digits`, then open runs/digits/report.html;
`jaxkfac analyze runs/digits` shows spectra and capacity of the factors in its checkpoint;
`jaxkfac analyze smollm2` those of a pretrained model, under a budget of bytes.
`jaxkfac finetune` teaches a pretrained language model with an LS-LoRA adapter;
`jaxkfac finetune --preset wordnet-t5` trains a T5 from nothing on words and glosses.

Exit codes: 0, 2 for an error that is explained, 3 where memory ran out, 130 after Ctrl-C.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Words after the program's name; by default those of this process.

    Returns:
        The exit code: 0, 2 for an error that was explained, 3 where memory ran out, 130 after
        Ctrl-C.
    """
    # Read when JAX first calls LAPACK. With more threads the last bits of a decomposition
    # depend on the machine, and small ones were up to 20 times slower on two busy cores.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if argv is None:  # a process of its own
        # Modules live as long as it does: looked through at every collection, they took 13 % of
        # the processor time of a plan.
        gc.freeze()
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


class Command(NamedTuple):
    """A command.

    Attributes:
        name: As it is called.
        arguments: What it accepts.
        run: ``"module:function"`` that takes them; imported when the command is called.
        default: What they are where the words of the command line do not say it; ``None``: as
            their class has them.
    """

    name: str
    arguments: type
    run: str
    default: Callable[[Sequence[str]], Any] | None = None


def commands() -> list[Command]:
    """All commands, in the order of the help."""
    from jaxkfac.cli._doctor import DoctorArguments
    from jaxkfac.cli._models import ModelsArguments
    from jaxkfac.cli._options import AdapterArguments, AnalyzeArguments, TrainArguments
    from jaxkfac.cli._plan import PlanArguments
    from jaxkfac.cli.finetune._options import FinetuneArguments
    from jaxkfac.cli.finetune._presets import default_arguments

    return [
        Command("train", TrainArguments, "jaxkfac.cli._train:run_train"),
        Command(
            "finetune",
            FinetuneArguments,
            "jaxkfac.cli.finetune._run:run_finetune",
            default_arguments,
        ),
        Command("analyze", AnalyzeArguments, "jaxkfac.cli._analyze:run_analyze"),
        Command("adapter", AdapterArguments, "jaxkfac.cli._adapter:run_adapter"),
        Command("plan", PlanArguments, "jaxkfac.cli._plan:run_plan"),
        Command("models", ModelsArguments, "jaxkfac.cli._models:run_models"),
        Command("doctor", DoctorArguments, "jaxkfac.cli._doctor:run_doctor"),
    ]


def _dispatch(words: list[str]) -> int:
    from jaxkfac._errors import JaxkfacError
    from jaxkfac.cli._plan import PlanArguments
    from jaxkfac.memory import MemoryBudgetError, is_out_of_memory

    arguments: Any = None
    try:
        arguments = _parse(words)
        _run(arguments)
    except KeyboardInterrupt:
        if hasattr(arguments, "resume") and getattr(arguments, "is_pretrained", True):
            from jaxkfac.cli._interrupts import say_interrupted

            say_interrupted(words)
        return 130
    except Exception as error:
        if "--debug" in words:
            raise
        # That nothing fits is what a plan has found, not what has happened to it.
        found = isinstance(error, MemoryBudgetError) and isinstance(arguments, PlanArguments)
        if is_out_of_memory(error) and not found:
            from jaxkfac.cli._out_of_memory import answer

            return answer(error, arguments)
        if isinstance(error, JaxkfacError | ValueError | OSError):
            return _fail(_words_of(error))
        raise
    return 0


def _parse(words: list[str]) -> Any:
    import tyro

    known: list[Any] = []
    for command in commands():
        options = {} if command.default is None else {"default": command.default(words)}
        named = tyro.conf.subcommand(command.name, prefix_name=False, **options)
        known.append(Annotated[command.arguments, named])
    union: Any = functools.reduce(operator.or_, known)
    return tyro.cli(
        union,
        prog="jaxkfac",
        description=_DESCRIPTION,
        args=words or ["--help"],
        config=(tyro.conf.FlagCreatePairsOff,),
    )


def _run(arguments: Any) -> None:
    (command,) = [known for known in commands() if type(arguments) is known.arguments]
    module, function = command.run.split(":")
    getattr(importlib.import_module(module), function)(arguments)


def _words_of(error: Exception) -> str:
    """What an error says in one line."""
    if not isinstance(error, OSError) or not error.strerror or error.filename:
        return str(error)
    if error.strerror != os.strerror(error.errno or 0):
        return error.strerror  # put into words by this library: no number before them
    from jaxkfac.cli._phases import phases_of

    doing = phases_of(error)
    return f"while {doing}: {error.strerror}" if doing else str(error)


def _fail(message: str) -> int:
    print(f"jaxkfac: {message}", file=sys.stderr)
    return 2
