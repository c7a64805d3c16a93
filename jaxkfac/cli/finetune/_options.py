"""What ``jaxkfac finetune`` accepts. Nothing heavy is imported here, so that help is quick."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jaxkfac.cli._optimizers import AdamwOptions, Fisher, KfacOptions, Optimizer

LogTo = Literal["tensorboard", "wandb", "trackio"]


@dataclasses.dataclass(frozen=True)
class AdapterOptions:
    """The LS-LoRA adapter; see `jaxkfac.lslora.Config`."""

    target: str = r".*_proj/kernel"
    """Full-match pattern of the layers that are adapted, or "all-linear"."""
    exclude: str | None = None
    """Full-match pattern of layers that are left out."""
    rank: int = 8
    """Width of the bottleneck."""
    alpha: float = 16.0
    """The branch is multiplied by alpha / rank."""
    fourier_placement: Literal["output", "bottleneck", "none"] = "output"
    """Where the nonlinearity is; none is plain LoRA."""
    nonlinearity: str = "fourier"
    """Its name; or module:object of one of your own, which is imported and registered."""
    init_sigma: float = 1.0
    """First width of the nonlinearity."""
    reg_weight: float = 0.01
    """Of the distance of the coefficients from their first values."""
    dropout: float = 0.0
    """Of the branch's inputs."""
    dialect: Literal["lslora", "peft"] = "lslora"
    """Which `peft_type` the saved adapter states; plain LoRA is always peft."""
    split: bool = False
    """Save it as adapters of q, k, v and of gate, up, which Llama's PyTorch model keeps apart."""


@dataclasses.dataclass(frozen=True)
class AdapterAdamwOptions(AdamwOptions):
    """AdamW on the adapter."""

    b1: float = 0.9
    """Decay of the average of gradients."""


@dataclasses.dataclass(frozen=True)
class AdapterKfacOptions(KfacOptions):
    """K-FAC on A and B of the adapter; AdamW on coefficients and sigma."""

    max_dense: int = 640
    """A larger side of a layer is kept as a diagonal."""
    fisher: Fisher = "mc"
    """Labels of the factors: sampled from the model, or the given ones."""


@dataclasses.dataclass(frozen=True)
class Finetuning:
    """Everything that decides the result of a run; stored in its checkpoints."""

    model: str = "smollm2"
    """smollm2 (135 million parameters, downloaded once), or a folder in Hugging Face's layout."""
    data: str = "elements"
    """elements (embedded facts), a JSONL file, or a folder with train.jsonl, validation.jsonl."""
    questions: str | None = None
    """Multiple choice to be examined with: a file in OpenBookQA's format; or as many of the
    embedded ones as this number says (40 with the embedded data, none with other)."""
    style: Literal["chat", "plain"] = "chat"
    """Questions as turns of a chat, or as "Answer:" behind the question."""
    system: str | None = None
    """What the system says first in embedded records and in questions."""
    seed: int = 0
    """Of the adapter, the order, the dropout, the sampled labels and the embedded questions."""
    steps: int = 40
    """Parameter updates."""
    epochs: int | None = None
    """Passes over the records, instead of steps. The last update may be of fewer micro-batches;
    records that fill no micro-batch of batch_size rows are left out of their pass."""
    batch_size: int = 8
    """Rows of a micro-batch."""
    gradient_accumulation_steps: int = 1
    """Micro-batches per update; weighted by their learnt tokens."""
    batching: Literal["pad", "pack"] = "pad"
    """A record in each row, padded to the longest; or rows of max_length with many."""
    num_lengths: int = 1
    """With pad: row lengths that a program is compiled for; more waste less on padding."""
    max_length: int = 512
    """Tokens of a record; the end of a longer one is cut, which is counted and said."""
    loss_on: Literal["assistant", "all"] = "assistant"
    """Which tokens are learnt."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the base model: bfloat16 on accelerators, float32 on a CPU, which emulates the other."""
    quantize: str | None = None
    """Full-match pattern of kernels that are kept as NF4, or "all"."""
    attention: Literal["xla", "cudnn"] = "xla"
    """xla runs anywhere; cudnn is flash attention, on NVIDIA GPUs, with --dtype bfloat16."""
    remat: bool = True
    """Recompute each block's activations in the backward pass."""
    optimizer: Optimizer = "adamw"
    """What trains the adapter."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls after its warmup."""
    warmup: float = 0.1
    """Part of the updates in which it rises."""
    clip_norm: float | None = 1.0
    """Gradients longer than this are scaled down to it."""
    adapter: AdapterOptions = AdapterOptions()
    adamw: AdapterAdamwOptions = AdapterAdamwOptions(2e-3, b2=0.99, weight_decay=0.0)
    kfac: AdapterKfacOptions = AdapterKfacOptions(
        learning_rate=1e-3, damping=1e-4, damping_mode="pi", norm_constraint=1e-3
    )

    def __post_init__(self) -> None:
        counts = ("steps", "epochs", "batch_size", "gradient_accumulation_steps", "num_lengths")
        for name in counts:
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.max_length < 2:
            raise ValueError(f"max_length must be at least 2, not {self.max_length}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, not {self.seed}")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup must lie in [0, 1), not {self.warmup}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm must be positive, not {self.clip_norm}")


# Options that checkpoints of older versions lack, and what those versions did.
OLDER = {"attention": "xla", "adapter": {"nonlinearity": "fourier", "split": False}}


@dataclasses.dataclass(frozen=True)
class FinetuneArguments:
    """Teach a pretrained decoder with an LS-LoRA adapter, and examine it before and after.

    By default SmolLM2-135M learns facts about the chemical elements, in about three minutes
    on two cores. The output folder receives report.html (loss, nonlinearity of the adapter over
    time, its curvature, accuracy with intervals), metrics.json, the adapter in PEFT's layout,
    TensorBoard's event files and checkpoints. Ctrl-C ends the update under way and keeps it;
    --resume goes on as if nothing had happened. A second Ctrl-C stops at once, and the last
    checkpoint counts.

    For example, your own records with K-FAC:
    `jaxkfac finetune --data chats.jsonl --epochs 2 --optimizer kfac --output runs/chats`
    """

    experiment: Annotated[Finetuning, tyro.conf.arg(name="")] = Finetuning()
    output: Path = Path("runs/finetune")
    """Folder for everything that is written."""
    resume: bool = False
    """Go on from the newest checkpoint, if there is one."""
    overwrite: bool = False
    """Replace the run in the output folder."""
    checkpoint_every: int = 20
    """Updates between two checkpoints."""
    devices: str = "1"
    """How many devices, or all. A run may go on with others than it was begun with."""
    mesh: str | None = None
    """data=4,model=2: rows of a batch over four, the base's matrices over two; by default all for
    data, and the base over these."""
    coordinator: str | None = None
    """HOST:PORT of process 0, in every process of one run; auto asks SLURM, Open MPI or the TPU
    pod. All of them see the output folder; process 0 writes to it."""
    processes: int | None = None
    """With --coordinator: how many processes."""
    process: int | None = None
    """With --coordinator: which of them this is, from 0."""
    log_every: int = 10
    """Updates between two readings of losses from the device; an evaluation and a checkpoint
    read them, too."""
    evaluate_every: int | None = None
    """Updates between two evaluations; by default only before and after."""
    diagnose_every: int = 5
    """Updates between two looks at the adapter's nonlinearity."""
    samples: int = 4
    """Prompts that are answered before and after: the first that fit the context."""
    sample_tokens: int = 12
    """Tokens of an answer, at most."""
    curvature: str | None = "auto"
    """Full-match pattern of the adapter's layers whose spectra and capacity are reported, such as
    ".*o_proj/kernel/[ab]"; auto takes the smallest adapter's, None none."""
    log: tuple[LogTo, ...] = ("tensorboard",)
    """Where numbers go while it runs, beside the output folder."""
    json: bool = False
    """Print the summary as JSON instead of a table."""
    debug: bool = False
    """Show the full traceback of an error."""
