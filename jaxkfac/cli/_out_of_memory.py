"""The answer to a command that ran out of memory: where, how much, and what would fit."""

import gc
import sys
import traceback
from typing import Any

from jaxkfac.cli._phases import phases_of

EXIT_CODE = 3

# The rest is for fragments. On the CPU a program's temporaries can still be mapped while those of
# the next are asked for: 1.94 GiB of them failed with 3.03 GiB free.
_OF_A_DEVICE, _OF_MAIN_MEMORY = 0.9, 0.5

GENERAL = (
    "In general: smaller micro-batches with more of them an update (--batch-size, "
    "--gradient-accumulation-steps), shorter rows, a smaller model, or nothing else on the device."
)


def answer(error: BaseException, arguments: Any) -> int:
    """Explain on standard error; the exit code.

    What happened is said first, and only then the run's arrays are let go and a plan is made,
    from shapes: should that fail, the first half stands.

    Args:
        error: One for which ``jk.memory.is_out_of_memory`` is true.
        arguments: What the command was called with; ``None`` before they were read.
    """
    from jaxkfac.memory import TROUBLESHOOTING_PAGE, what_was_short

    doing = phases_of(error)
    where = f"while {doing}: " if doing else ""
    _say(f"jaxkfac: {where}{what_was_short(error)}.")
    _let_go(error)
    del error
    try:
        advice = _advice(arguments)
    except Exception as reason:  # an answer without a plan is better than a second error
        advice = f"It could not be planned ({type(reason).__name__}). {GENERAL}"
    _say(f"{advice}\nMore: {TROUBLESHOOTING_PAGE}; --debug shows where it happened.")
    return EXIT_CODE


def _advice(arguments: Any) -> str:
    from jaxkfac.cli._options import AnalyzeArguments, TrainArguments
    from jaxkfac.cli._remedies import remedy
    from jaxkfac.cli.finetune._options import FinetuneArguments

    if isinstance(arguments, TrainArguments):
        from jaxkfac.cli._train_bytes import train_shapes

        return remedy(arguments, train_shapes(arguments), free_room())
    if isinstance(arguments, FinetuneArguments):
        from jaxkfac.cli.finetune._bytes import finetune_shapes

        return remedy(arguments, finetune_shapes(arguments), free_room())
    if isinstance(arguments, AnalyzeArguments) and arguments.is_pretrained:
        return (
            "A smaller --device-bytes asks for more passes; --batch-size, --max-length and "
            "--max-dense make each smaller. What is done is kept: --resume goes on."
        )
    return "Look for other processes with `jaxkfac doctor`."


def _let_go(error: BaseException) -> None:
    """The arrays that the frames of an error, and of those it came from, still hold."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link.__traceback__, link = None, link.__cause__ or link.__context__
    gc.collect()


def free_room() -> int:
    """Bytes that a plan may count on: of the first device, or of main memory."""
    import jax

    from jaxkfac.memory import free_bytes, free_host_bytes

    free = free_bytes(jax.local_devices()[0])
    if free is not None:
        return int(free * _OF_A_DEVICE)
    free = free_host_bytes()
    if free is None:
        raise NotImplementedError("the system does not say what is free")
    return int(free * _OF_MAIN_MEMORY)


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
