"""Options of ``jaxkfac influence``. Imports nothing slow, for quick help."""

import dataclasses
from pathlib import Path
from typing import Literal

import tyro

from jaxkfac.jobs.cli._options import Fisher, check_least
from jaxkfac.jobs.cli._paths import check_file, check_folder, check_weights


@dataclasses.dataclass(frozen=True)
class InfluenceArguments:
    """Score training texts by how much training on each lowers the loss of a query.

    The command collects factors of the model's curvature from training texts, decomposes them,
    preconditions the queries' gradients with them, and scores each training text in one backward
    pass for all queries. The output folder receives report.html (the most and the least
    helpful texts for each query, with tokens shaded by their share), influence.json,
    scores.npy, and intermediate results. --resume continues a run that was stopped or killed
    and gives the result of an uninterrupted one.

    Examples: factors from 100 of the texts:
    `jaxkfac influence --train texts.jsonl --queries questions.jsonl --factors-from 100`
    and your own model, in a folder that `jaxkfac finetune` takes:
    `jaxkfac influence models/mine --train chats.jsonl --queries answers.jsonl --top 10`
    """

    train: Path
    """Training texts: a file of rows that `jaxkfac finetune --data` takes. For an
    encoder-decoder, pairs."""
    queries: Path
    """Queries: a file of such rows. The query is the part of a row that training would include
    in the loss."""
    model: tyro.conf.Positional[str] = "smollm2"
    """smollm2 (135 million parameters, downloaded once); or a folder in Hugging Face's layout with
    a decoder or an encoder-decoder of T5's layout."""
    factors_from: int | None = None
    """Number of training texts to collect factors from, chosen by the seed; by default all."""
    fisher: Fisher = "mc"
    """Labels of the factors: mc samples them from the model, empirical takes those of the data."""
    ekfac: bool = False
    """Measure the eigenvalues in the eigenbases, in a second pass over the factors' texts."""
    layers: str | None = None
    """Full-match pattern of the layers that count; by default all, except an encoder-decoder's
    relative positions, which all examples share."""
    max_dense: int = 16384
    """Largest side of a layer with a full factor; a larger side has a diagonal."""
    damping: float | Literal["heuristic"] = "heuristic"
    """Added to the curvature of the mean loss, in units of its squared gradient; heuristic takes a
    tenth of each block's mean eigenvalue."""
    query_rank: int | None = 64
    """Rank of the approximation of each layer's block of a query; None keeps the block exact. The
    report shows the error."""
    top: int = 5
    """Number of most helpful, and of least helpful, texts to show for each query."""
    batch_size: int = 8
    """Texts per batch."""
    max_length: int = 512
    """Longest text, or source of a pair, in tokens; longer ones are cut at the end, and the
    command reports how many."""
    max_target_length: int = 128
    """Longest target of a pair, in tokens; longer ones are cut at the end."""
    loss_on: Literal["assistant", "all"] = "assistant"
    """Tokens in the loss: answers of the assistant, or all; plain text always counts in full, pairs
    by their targets."""
    source_key: str | None = None
    """For pairs: key of the source; by default as in `jaxkfac finetune`."""
    target_key: str | None = None
    """For pairs: key of the target."""
    prefix: str = ""
    """For pairs: prefix of every source, such as "summarize: "."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the model; auto is bfloat16 on accelerators and float32 on a CPU, which would
    emulate bfloat16."""
    memory: str | None = None
    """Bytes of device memory for factors while they are collected, and for queries, such as 4GB; by
    default no bound."""
    gguf_pre: str | None = None
    """For a .gguf file: the rule that splits a text into words, as in `jaxkfac finetune`."""
    seed: int = 0
    """Seed for the choice of the factors' texts and for sampled labels."""
    bases: Path | None = None
    """Output folder of another run whose bases to use; the model, the training texts and the
    options of the factors must match."""
    store: Path | None = None
    """Folder for the training texts' gradients, in bfloat16; the command first prints its size.
    Each text takes as many numbers as the layers have parameters. Where the folder already holds
    them, scoring needs no backward pass over the training texts, whatever the queries are."""
    store_rank: int | None = None
    """Rank at which --store stores each layer's gradient of a text, where that is smaller; by
    default it stores every number."""
    output: Path = Path("runs/influence")
    """Folder for all results."""
    resume: bool = False
    """Continue the run in the output folder."""
    overwrite: bool = False
    """Replace the run in the output folder."""
    json: bool = False
    """Print the summary as JSON instead of tables."""
    debug: bool = False
    """Show the full traceback of an error."""

    def check(self) -> None:
        """Refuse values out of range, and paths at which nothing can be read or written.

        Raises:
            ValueError: names the option.
            OSError: names the path.
        """
        counts = ("factors_from", "max_dense", "query_rank", "store_rank", "top", "batch_size")
        check_least(self, 1, *counts)
        check_least(self, 2, "max_length", "max_target_length")
        check_least(self, 0, "seed", *([] if isinstance(self.damping, str) else ["damping"]))
        if self.store_rank is not None and self.store is None:
            raise ValueError("store_rank goes with --store")
        check_weights(self.model)
        check_file("--train", self.train)
        check_file("--queries", self.queries)
        if self.bases is not None and not (self.bases / "stages" / "bases").is_file():
            raise FileNotFoundError(f"--bases {self.bases} holds no run with bases")
        check_folder(self.output)
        if self.store is not None:
            check_folder(self.store, "--store")

    def options_of_bases(self) -> dict[str, object]:
        """Plain values of the options that, with model and texts, determine factors and bases."""
        names = ("model", "factors_from", "fisher", "ekfac", "layers", "max_dense", "batch_size",
                 "max_length", "max_target_length", "loss_on", "prefix", "dtype",
                 "seed")  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def options(self) -> dict[str, object]:
        """Options that decide the scores."""
        of_scores = {"damping": self.damping, "query_rank": self.query_rank}
        of_scores |= {} if self.store is None else {"store": True}  # its scores are rounded
        of_scores |= {} if self.store_rank is None else {"store_rank": self.store_rank}
        return self.options_of_bases() | of_scores
