"""Lessons of this project, in none of the documents: what does save memory."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks._documents._bytes import MIB, of_program, storages, tree_bytes
from benchmarks._documents._claim import Measured
from benchmarks._documents._few_shot import step_program
from benchmarks._documents._kfac_7b import collecting, jax_retained
from benchmarks._documents._phi3_lora import adapted
from benchmarks._documents._problems import LOSS, ROWS, batch, network
from torch_ref import unfixed
from torch_ref.accumulation import accumulated_training
from torch_ref.factors import collect_factors
from torch_ref.lslora import diagnose
from torch_ref.memory import cast_once, save_after_cleanup

PARTS = 16  # that a batch is cut into
LOOKS = 100  # in a log of diagnostics


class Lesson(NamedTuple):
    """One lesson.

    Attributes:
        text: What is compared.
        torch: Peaks before and after.
        jax: Likewise, or why there is no such thing.
    """

    text: str
    torch: Callable[[str], Measured]
    jax: Callable[[], Measured] | str

    def to_dict(self, device: str) -> dict[str, Any]:
        """What is measured, as plain numbers and words."""
        jax = self.jax if isinstance(self.jax, str) else self.jax()._asdict()
        return {"text": self.text, "torch": self.torch(device)._asdict(), "jax": jax}


def _peaks(device: str, *work: Callable[[], Any]) -> Measured:
    return Measured(*(storages(one, device).peak for one in work), "MiB")


def formed_in_the_hook(device: str) -> Measured:
    model, data = network(device), batch(device)
    return _peaks(
        device, collecting(device, retain_graph=True), lambda: collect_factors(model, LOSS, data)
    )


def one_batch_cut(device: str) -> Measured:
    """Of a batch sixteen times as large as elsewhere, whole and in parts."""
    x, y = batch(device, rows=PARTS * ROWS)
    parts = list(zip(x.chunk(PARTS), y.chunk(PARTS), strict=True))

    def training(step: Callable[..., Any]) -> Callable[[], Any]:
        model = network(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return lambda: step(model, optimizer)

    accumulated = lambda *what: list(accumulated_training(*what, LOSS, parts, every=PARTS))
    whole = lambda *what: unfixed.full_batch_step(*what, LOSS, parts)
    return _peaks(device, training(whole), training(accumulated))


def jax_one_batch_cut() -> Measured:
    sizes = []
    for every, rows in ((1, PARTS * ROWS), (PARTS, ROWS)):
        program, arguments = step_program(every, rows=rows)
        sizes.append(of_program(program) + tree_bytes(arguments) / MIB)
    return Measured(*sizes, "MiB")


def copied(device: str) -> Measured:
    model = network(device).bfloat16()
    return _peaks(
        device,
        lambda: unfixed.copy_model(model, torch.bfloat16, device),
        lambda: cast_once(model, torch.bfloat16),
    )


def cloned(device: str) -> Measured:
    model = network(device)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        return _peaks(
            device,
            lambda: unfixed.save_clones(model, file),
            lambda: save_after_cleanup(model, file),
        )


def kept_graphs(device: str) -> Measured:
    model = adapted(device, 32)
    return _peaks(
        device,
        lambda: [unfixed.diagnose_with_graph(model) for _ in range(LOOKS)],
        lambda: [diagnose(model) for _ in range(LOOKS)],
    )


LESSONS = (
    Lesson(
        "Keeping every layer's input and gradient to the end of the pass is compared with "
        "forming factors inside the hook; with tanh.",
        formed_in_the_hook,
        lambda: jax_retained(gelu=False),
    ),
    Lesson(
        f"One batch whole, against the same batch cut in {PARTS}.", one_batch_cut, jax_one_batch_cut
    ),
    Lesson(
        "A deep copy of a model that needs neither cast nor move is compared with a cast that "
        "checks first.",
        copied,
        "`cast_once` returns what it was given",
    ),
    Lesson(
        "Cloning every tensor before it is written is compared with cloning none.",
        cloned,
        "one leaf at a time is read back",
    ),
    Lesson(
        f"{LOOKS} looks at an adapter kept as tensors with their graphs, against numbers.",
        kept_graphs,
        "does not arise: an array holds no graph",
    ),
)
