"""What ``jaxkfac influence`` accepts. Nothing heavy is imported here, so that help is quick."""

import dataclasses
from pathlib import Path
from typing import Literal

import tyro

from jaxkfac.jobs.cli._options import Fisher


@dataclasses.dataclass(frozen=True)
class InfluenceArguments:
    """Score training texts by how much training on each lowers the loss of a query.

    Factors of the model's curvature are collected from training texts and decomposed; the queries'
    gradients are preconditioned with them, and each training text is scored in one backward pass
    for all queries. The output folder receives report.html (the most helpful and the most harmful
    texts for each query, their tokens shaded by their share), influence.json and scores.npy, and
    the factors, the bases and the scores so far. --resume continues a run that was stopped or
    killed as if nothing had happened.

    For example, with factors from 100 of the texts:
    `jaxkfac influence --train texts.jsonl --queries questions.jsonl --factors-from 100`
    and of a model of your own, in a folder that `jaxkfac finetune` takes:
    `jaxkfac influence models/mine --train chats.jsonl --queries answers.jsonl --top 10`
    """

    train: Path
    """Training texts: a file of rows that `jaxkfac finetune --data` takes. For an
    encoder-decoder, pairs."""
    queries: Path
    """What is asked about: a file of such rows. Of each, the tokens that would be learnt are the
    query."""
    model: tyro.conf.Positional[str] = "smollm2"
    """smollm2 (135 million parameters, downloaded once); or a folder in Hugging Face's layout with
    a decoder, or an encoder-decoder of T5's."""
    factors_from: int | None = None
    """Training texts that the factors are collected from, chosen by the seed; by default all."""
    fisher: Fisher = "mc"
    """Labels of the factors: sampled from the model, or the given ones."""
    ekfac: bool = False
    """Measure the eigenvalues in the eigenbases, in another pass over the factors' texts."""
    layers: str | None = None
    """Full-match pattern of the layers that count; by default all, but for an encoder-decoder's
    relative positions, which no example has to itself."""
    max_dense: int = 16384
    """A larger side of a layer is kept as a diagonal."""
    damping: float | Literal["heuristic"] = "heuristic"
    """Added to the curvature, in units of a squared gradient; heuristic is a tenth of each block's
    mean eigenvalue."""
    query_rank: int | None = 64
    """Each layer's part of a query is held as the nearest matrix of this rank; None holds it
    whole. What is lost by it is said."""
    top: int = 5
    """Texts that are shown for each query, as many that help as that harm."""
    batch_size: int = 8
    """Texts at a time."""
    max_length: int = 512
    """Tokens of a text, or of a source; the end of a longer one is cut, which is counted and
    said."""
    max_target_length: int = 128
    """Of pairs: tokens of a target, likewise."""
    loss_on: Literal["assistant", "all"] = "assistant"
    """Which tokens are in the loss; of plain text all are, and of pairs the targets."""
    source_key: str | None = None
    """Of pairs: the key of the source; by default as `jaxkfac finetune` finds it."""
    target_key: str | None = None
    """Of pairs: the key of the target."""
    prefix: str = ""
    """Of pairs: what every source begins with, such as "summarize: "."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the model: bfloat16 on accelerators, float32 on a CPU, which emulates the other."""
    memory: str | None = None
    """What factors may take on the device while they are collected, and queries when they are
    held, such as 4GB; by default there is no bound."""
    seed: int = 0
    """Of the texts that the factors are from, and of sampled labels."""
    bases: Path | None = None
    """The output folder of another run, whose bases are taken: the model, the training texts and
    the options of the factors must be its own."""
    store: Path | None = None
    """A folder for the training texts' gradients, in bfloat16: as many numbers for each text as
    the layers have parameters, which is printed first. Where it holds them already, no text takes
    a backward pass for its score, whatever the queries are."""
    output: Path = Path("runs/influence")
    """Folder for everything that is written."""
    resume: bool = False
    """Go on from what the output folder holds."""
    overwrite: bool = False
    """Replace the run in the output folder."""
    json: bool = False
    """Print the summary as JSON instead of tables."""
    debug: bool = False
    """Show the full traceback of an error."""

    def check(self) -> None:
        """Refuse values that no run can have.

        Raises:
            ValueError: naming the option.
        """
        for name in ("factors_from", "max_dense", "query_rank", "top", "batch_size"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        for name in ("max_length", "max_target_length"):
            if (value := getattr(self, name)) < 2:
                raise ValueError(f"{name} must be at least 2, not {value}")
        if not isinstance(self.damping, str) and not self.damping >= 0:
            raise ValueError(f"damping must not be negative, not {self.damping}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, not {self.seed}")

    def options_of_bases(self) -> dict[str, object]:
        """What decides factors and bases, beside model and texts, as plain values."""
        names = ("model", "factors_from", "fisher", "ekfac", "layers", "max_dense", "batch_size",
                 "max_length", "max_target_length", "loss_on", "prefix", "dtype",
                 "seed")  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def options(self) -> dict[str, object]:
        """What decides the scores."""
        own = {"damping": self.damping, "query_rank": self.query_rank}
        own |= {} if self.store is None else {"store": True}  # its scores are rounded
        return self.options_of_bases() | own
