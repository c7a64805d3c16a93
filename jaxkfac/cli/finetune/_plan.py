"""`--plan`: what a run needs, before anything is loaded."""

import jax.numpy as jnp
from rich.console import Console

from jaxkfac.cli._out_of_memory import free_room
from jaxkfac.cli._remedies import remedy
from jaxkfac.cli.finetune._bytes import planned_shapes
from jaxkfac.cli.finetune._family import dtype_of
from jaxkfac.cli.finetune._options import FinetuneArguments
from jaxkfac.memory import bytes_text, parse_bytes
from jaxkfac.report import terminal_table


def print_plan(arguments: FinetuneArguments) -> None:
    """Print the bytes of a run by row, and whether they fit, or by which options they would.

    Raises:
        ValueError: ``device_bytes`` cannot be read.
    """
    room = free_room()
    if arguments.device_bytes is not None:
        room = int(parse_bytes(arguments.device_bytes, name="--device-bytes"))
    shapes = planned_shapes()
    need, experiment = shapes.need(arguments), arguments.experiment
    rows = [[name, bytes_text(nbytes)] for name, nbytes in need.rows.items() if nbytes]
    rows.append(["sum", bytes_text(need.total)])
    said = (
        f"{experiment.model}: {experiment.batch_size} × {experiment.gradient_accumulation_steps} "
        f"rows an update, {experiment.optimizer}, {jnp.dtype(dtype_of(experiment)).name}"
    )
    console = Console()
    console.print(said, soft_wrap=True, highlight=False)
    console.print(terminal_table("Plan", ["", "bytes"], rows))
    fits = need.total <= room
    words = f"It fits {bytes_text(room)}." if fits else remedy(arguments, shapes, room)
    console.print(words, soft_wrap=True, highlight=False)
