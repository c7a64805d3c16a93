"""The entry point: parse a command, call it, and turn errors into one line with a remedy."""

import contextlib
import difflib
import gc
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jaxkfac import __version__

# ---------------- the commands; their modules are imported only when called


class Command(NamedTuple):
    """A command.

    Attributes:
        name: Name on the command line.
        summary: Its line in the help, equal to the first line of its arguments' docstring.
        arguments: ``"module:class"`` of its arguments.
        run: ``"module:function"`` that runs it.
        default: ``"module:function"`` from the words of the command line to the default arguments;
            ``None`` takes the defaults of the class.
        compiles: Whether to keep its compiled programs for the next time.
        shapes: ``"module:function"`` from the arguments to what plans a run's memory; ``None`` if
            there is no such plan.
    """

    name: str
    summary: str
    arguments: str
    run: str
    default: str | None = None
    compiles: bool = False
    shapes: str | None = None


COMMANDS = (
    Command(
        "train",
        "Train on real data with K-FAC, and the same model with AdamW for comparison.",
        "jaxkfac.jobs.cli._options:TrainArguments",
        "jaxkfac.jobs.cli._train:run_train",
        compiles=True,
        shapes="jaxkfac.jobs.cli._out_of_memory:train_shapes",
    ),
    Command(
        "finetune",
        "Teach a pretrained decoder or encoder-decoder, and examine it before and after.",
        "jaxkfac.jobs.cli.finetune._options:FinetuneArguments",
        "jaxkfac.jobs.cli.finetune._run:run_finetune",
        "jaxkfac.jobs.cli.finetune._options:default_arguments",
        compiles=True,
        shapes="jaxkfac.jobs.cli.finetune._plan:finetune_shapes",
    ),
    Command(
        "influence",
        "Score training texts by how much training on each lowers the loss of a query.",
        "jaxkfac.jobs.cli.influence._options:InfluenceArguments",
        "jaxkfac.jobs.cli.influence._run:run_influence",
        compiles=True,
    ),
    Command(
        "analyze",
        "Show spectra and capacity of a pretrained model, or of the factors of a checkpoint.",
        "jaxkfac.jobs.cli._options:AnalyzeArguments",
        "jaxkfac.jobs.cli._analyze:run_analyze",
        compiles=True,
    ),
    Command(
        "adapter",
        "Look at LS-LoRA adapters on disk.",
        "jaxkfac.jobs.cli._inspect_options:AdapterArguments",
        "jaxkfac.jobs.cli._inspect:run_adapter",
    ),
    Command(
        "plan",
        "Plan the memory of a training from shapes: nothing is allocated, no device is asked.",
        "jaxkfac.jobs.cli._plan:PlanArguments",
        "jaxkfac.jobs.cli._plan:run_plan",
    ),
    Command(
        "models",
        "Show the pretrained weights that are known, where they are kept and how large they are.",
        "jaxkfac.jobs.cli._inspect_options:ModelsArguments",
        "jaxkfac.jobs.cli._inspect:run_models",
    ),
    Command(
        "doctor",
        "Show devices, allocator, precision, attention, memory, threads and versions.",
        "jaxkfac.jobs.cli._inspect_options:DoctorArguments",
        "jaxkfac.jobs.cli._inspect:run_doctor",
    ),
)


def imported(where: str) -> Any:
    """Import the object at ``"module:name"``."""
    module, name = where.split(":")
    return getattr(importlib.import_module(module), name)


# ---------------- parsing and errors


_EXTRA_OF = {
    "tyro": "cli",
    "rich": "cli",
    "matplotlib": "cli",
    "grain": "data",
    "pyarrow": "data",
    "safetensors": "pretrained",
    "tokenizers": "pretrained",
    "jinja2": "pretrained",
    "gguf": "pretrained",
}

_DESCRIPTION = """Curvature and K-FAC for JAX training scripts.
"""

_EPILOGUE = """Start with `jaxkfac train --preset digits`, then open runs/digits/report.html;
`jaxkfac analyze runs/digits` shows spectra and capacity of the factors in its checkpoint;
`jaxkfac analyze smollm2` shows those of a pretrained model, under a budget of bytes.
`jaxkfac finetune` teaches a pretrained language model with an LS-LoRA adapter;
`jaxkfac finetune --preset wordnet-t5` trains a T5 from nothing on words and glosses.
`jaxkfac influence` finds the training texts that most influenced an answer.

`jaxkfac COMMAND --help` shows the options of a command. Compiled programs are kept in
~/.cache/jaxkfac: $JAXKFAC_CACHE is another folder, JAX_ENABLE_COMPILATION_CACHE=false keeps none.
Exit codes: 0, 2 for an error that is explained, 3 where memory ran out, 130 after Ctrl-C,
143 after SIGTERM, 129 after SIGHUP.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Words after the program's name; by default those of the process.

    Returns:
        The exit code: 0, 2 for an explained error, 3 for exhausted memory, and 128 plus the
        signal's number after a signal: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP.
    """
    # OpenBLAS reads this when JAX first calls LAPACK. With more threads the last bits of a
    # decomposition depend on the machine, and small ones were up to 20 times slower on two busy
    # cores.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    argv_words = list(sys.argv[1:] if argv is None else argv)
    if argv_words in (["--version"], ["-V"]):
        print(f"jaxkfac {__version__}")
        return 0
    if not argv_words or argv_words in (["--help"], ["-h"]):
        print(_help(), end="")
        return 0
    commands = {command.name: command for command in COMMANDS}
    if argv_words[0] not in commands:
        near = difflib.get_close_matches(argv_words[0], commands, n=1)
        suggestion = f"did you mean {near[0]}? " if near else ""
        return _fail(
            f"there is no command {argv_words[0]!r}: {suggestion}jaxkfac --help shows all of them"
        )
    from jaxkfac.jobs.cli._interrupts import stopping_signals

    try:
        with stopping_signals():
            return _dispatch(commands[argv_words[0]], argv_words)
    except ModuleNotFoundError as error:
        extra = _EXTRA_OF.get((error.name or "").split(".")[0])
        if "--debug" in argv_words:
            raise
        if "pip install" in str(error):
            return _fail(str(error))
        if extra is None:
            raise
        return _fail(f'{error.name} is not installed: pip install "jaxkfac[{extra}]"')


def _dispatch(command: Command, argv_words: list[str]) -> int:
    arguments: Any = None
    by_program = "jax" in sys.modules  # called from a program, whose settings stay
    try:
        with contextlib.nullcontext() if by_program else _imports():
            arguments = _parse(command, argv_words[1:])
        _check(arguments)
        if by_program:
            imported(command.run)(arguments)
        else:
            _run(command, arguments)
    except KeyboardInterrupt as error:
        from jaxkfac.jobs.cli._interrupts import signal_of

        if hasattr(arguments, "resume") and getattr(arguments, "is_pretrained", True):
            from jaxkfac.jobs.cli._interrupts import say_interrupted

            say_interrupted(argv_words, error)
        return 128 + signal_of(error)
    except Exception as error:
        if "--debug" in argv_words or isinstance(error, ModuleNotFoundError):
            raise
        if "jax" not in sys.modules:  # its import would delay the message by seconds
            if isinstance(error, ValueError | OSError):
                return _fail(_message_of(error))
            raise
        from jaxkfac._errors import JaxkfacError
        from jaxkfac.memory import MemoryBudgetError, is_out_of_memory

        # For a plan, "nothing fits" is its result, not a failure of the command.
        is_plan_result = isinstance(error, MemoryBudgetError) and command.name == "plan"
        if is_out_of_memory(error) and not is_plan_result:
            from jaxkfac.jobs.cli._out_of_memory import answer

            where = command.shapes
            # Called after the error was told: the import of a plan may fail for want of memory.
            shapes_of = None if where is None else lambda given: imported(where)(given)
            return answer(error, arguments, shapes_of)
        if isinstance(error, JaxkfacError | ValueError | OSError):
            return _fail(_message_of(error))
        raise
    return 0


def _parse(command: Command, argv_words: list[str]) -> Any:
    import tyro

    default = {} if command.default is None else {"default": imported(command.default)(argv_words)}
    return tyro.cli(
        imported(command.arguments),
        prog=f"jaxkfac {command.name}",
        args=argv_words,
        config=(tyro.conf.FlagCreatePairsOff,),
        **default,
    )


def _check(arguments: Any) -> None:
    """Refuse a mistyped path before JAX is imported, which takes seconds.

    Processes of one run check together, later, so that each learns of an error of another.
    """
    if hasattr(arguments, "check") and getattr(arguments, "coordinator", None) is None:
        arguments.check()


def _run(command: Command, arguments: Any) -> None:
    if "jax" not in sys.modules:  # the import takes a second or more
        print(f"jaxkfac {command.name}: importing JAX", file=sys.stderr, flush=True)
    from jaxkfac.jobs.cli._interrupts import nothing_begun

    with _imports(), nothing_begun():
        run = imported(command.run)
    with contextlib.ExitStack() as stack:
        if command.compiles:
            from jaxkfac.jobs.cli._compilation_cache import compilation_cache, programs_folder
            from jaxkfac.jobs.models.pretrained import cache_folder

            stack.enter_context(compilation_cache(programs_folder(cache_folder())))
        run(arguments)


@contextlib.contextmanager
def _imports() -> Iterator[None]:
    """Import without garbage collection, and exclude the modules from later collections.

    Modules live as long as the process. Collecting them took 13 % of a plan's processor time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _help() -> str:
    width = max(len(command.name) for command in COMMANDS)
    lines = [f"  {command.name:<{width}}  {command.summary}" for command in COMMANDS]
    listed = "\n".join(lines)
    return f"usage: jaxkfac COMMAND [OPTIONS]\n\n{_DESCRIPTION}\n{listed}\n\n{_EPILOGUE}"


def _message_of(error: Exception) -> str:
    """The message of an error in one line."""
    if not isinstance(error, OSError) or not error.strerror or error.filename:
        return str(error)
    if error.strerror != os.strerror(error.errno or 0):
        return error.strerror  # an explanation by this library, without the number
    from jaxkfac.jobs.cli._progress import phases_of

    doing = phases_of(error)
    return f"while {doing}: {error.strerror}" if doing else str(error)


def _fail(message: str) -> int:
    print(f"jaxkfac: {message}", file=sys.stderr)
    return 2
