"""What ``jaxkfac finetune`` accepts. Nothing heavy is imported here, so that help is quick."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

import tyro

from jaxkfac.jobs.cli._options import AdamwOptions, Fisher, KfacOptions, Optimizer

LogTo = Literal["tensorboard", "wandb", "trackio"]
Trained = Literal["adapter", "all"]
Preset = Literal["elements", "wordnet-t5", "flan-t5-xl"]


@dataclasses.dataclass(frozen=True)
class AdapterOptions:
    """The LS-LoRA adapter; see `jaxkfac.lslora.Config`."""

    target: str | None = None
    """Full-match pattern of the layers that are adapted, or "all-linear"; by default the
    projections of a decoder, and q and v of an encoder-decoder's attention."""
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
    rslora: bool = False
    """Multiply the branch by alpha / sqrt(rank) instead."""
    rank_pattern: dict[str, int] = dataclasses.field(default_factory=dict, hash=False)
    """Other ranks: full-match pattern of layers, rank, pattern, rank; the first match counts."""
    alpha_pattern: dict[str, float] = dataclasses.field(default_factory=dict, hash=False)
    """Other alphas, likewise."""
    modules_to_save: str | None = None
    """Full-match pattern of parameters that are trained whole and saved beside the adapter, such as
    ".*layernorm/scale"; the base keeps its own copy."""
    sigma_from_data: float | None = None
    """First width as this many times the root mean square of the branch over the first batch, in
    place of init_sigma."""
    start: str | None = None
    """Folder of a saved adapter to go on from. Its layers, rank, alpha and modules_to_save count;
    plain LoRA receives a nonlinearity of width init_sigma, which is close to linear where
    that is several times what the branch gives."""
    split: bool = False
    """Save it as adapters of q, k, v and of gate, up, which Llama's PyTorch model keeps apart."""


@dataclasses.dataclass(frozen=True)
class AdapterAdamwOptions(AdamwOptions):
    """AdamW on the adapter."""

    b1: float = 0.9
    """Decay of the average of gradients."""


@dataclasses.dataclass(frozen=True)
class AdapterKfacOptions(KfacOptions):
    """K-FAC on A and B of the adapter, whose factors are of labels sampled from the model; AdamW
    on coefficients and sigma.
    """

    max_dense: int = 640
    """A larger side of a layer is kept as a diagonal."""
    fisher: Fisher = "mc"
    """Labels of the factors: sampled from the model, or the given ones."""


@dataclasses.dataclass(frozen=True)
class AdafactorOptions:
    """What `optax.adafactor` takes."""

    learning_rate: float = 1e-2
    """Largest learning rate, in units of a parameter's root mean square."""
    clipping_threshold: float = 1.0
    """Updates of a larger root mean square are scaled down to it."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""


@dataclasses.dataclass(frozen=True)
class Finetuning:
    """Everything that decides the result of a run; stored in its checkpoints."""

    model: str = "smollm2"
    """smollm2 (135 million parameters, downloaded once); a folder in Hugging Face's layout with a
    decoder, or an encoder-decoder of T5's; t5-bytes (a small one that reads bytes, untrained);
    flan-t5-xl (its sizes alone, for --plan)."""
    data: str = "elements"
    """elements (embedded facts), wordnet (embedded words and glosses, for an encoder-decoder); or
    a file, or a folder of files with train and validation in their names: JSON lines (.jsonl,
    .jsonl.gz, .jsonl.zst), .parquet or .arrow. A decoder's files are read as they are needed,
    whatever their size."""
    source_key: str | None = None
    """Of pairs: the key of the source. By default source, input, prompt, document, article, text
    or question: the first that is there with its target."""
    target_key: str | None = None
    """Of pairs: the key of the target. By default target, output, completion, summary, highlights
    or answer."""
    prefix: str = ""
    """Of pairs: what every source begins with, such as "summarize: "."""
    train: Trained = "adapter"
    """The adapter, or all parameters (of an encoder-decoder)."""
    questions: str | None = None
    """Multiple choice to be examined with: a file in OpenBookQA's format or the datasets
    library's; or as many of the embedded ones as this number says (40 with the embedded data,
    none with other)."""
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
    records that fill no micro-batch of batch_size rows are left out of their pass. Of files, the
    records are counted; the first --shuffle-window of them say how many rows they make."""
    batch_size: int = 8
    """Rows of a micro-batch."""
    gradient_accumulation_steps: int = 1
    """Micro-batches per update; weighted by their learnt tokens."""
    batching: Literal["pad", "pack"] = "pad"
    """A record in each row, padded to the longest; or rows of max_length with many."""
    num_lengths: int | None = None
    """With pad: row lengths that a program is compiled for; more waste less on padding. A batch
    takes the least that fits its longest row; by default 8 for records of files, 4 for each side
    of pairs of files, else 1."""
    shuffle_window: int = 8192
    """Records of files among which the order is random; that many are held. 1 keeps their order."""
    max_length: int = 512
    """Tokens of a record, or of a source; the end of a longer one is cut, which is counted and
    said."""
    max_target_length: int = 128
    """Of pairs: tokens of a target, likewise."""
    loss_on: Literal["assistant", "all"] = "assistant"
    """Which tokens are learnt; of pairs the targets are."""
    label_smoothing: float = 0.0
    """Part of each learnt token's probability that is spread over all tokens."""
    dropout: float | None = None
    """Of an encoder-decoder in training; by default what its config.json says, 0.1 if nothing."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the base model: bfloat16 on accelerators, float32 on a CPU, which emulates the other."""
    quantize: str | None = None
    """Full-match pattern of kernels that are kept as NF4, or "all"."""
    attention: Literal["xla", "cudnn"] = "xla"
    """xla runs anywhere; cudnn is flash attention, on NVIDIA GPUs, with --dtype bfloat16."""
    remat: bool = True
    """Recompute each block's activations in the backward pass."""
    optimizer: Literal[Optimizer, "adafactor"] = "adamw"
    """What trains the adapter, or all parameters."""
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
    adafactor: AdafactorOptions = AdafactorOptions()

    def __post_init__(self) -> None:
        counts = ("steps", "epochs", "batch_size", "gradient_accumulation_steps", "num_lengths",
                  "shuffle_window")  # fmt: skip
        for name in counts:
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        for name in ("max_length", "max_target_length"):
            if (value := getattr(self, name)) < 2:
                raise ValueError(f"{name} must be at least 2, not {value}")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must lie in [0, 1), not {self.label_smoothing}")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), not {self.dropout}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, not {self.seed}")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup must lie in [0, 1), not {self.warmup}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm must be positive, not {self.clip_norm}")


@dataclasses.dataclass(frozen=True)
class FinetuneArguments:
    """Teach a pretrained decoder or encoder-decoder, and examine it before and after.

    An LS-LoRA adapter is trained, or with --train all every parameter of an encoder-decoder.
    By default SmolLM2-135M learns facts about the chemical elements, in about three minutes
    on two cores. The output folder receives report.html (loss, nonlinearity of the adapter over
    time, its curvature, accuracy with intervals), metrics.json, the adapter in PEFT's layout or
    the model in Hugging Face's, TensorBoard's event files and checkpoints. Ctrl-C ends the update
    under way and keeps it; --resume goes on as if nothing had happened. A second Ctrl-C stops at
    once, and the last checkpoint counts.

    For example, your own records with K-FAC:
    `jaxkfac finetune --data chats.jsonl --epochs 2 --optimizer kfac --output runs/chats`
    and a T5 from nothing on WordNet's words and glosses, in less than ten minutes:
    `jaxkfac finetune --preset wordnet-t5`
    """

    experiment: Annotated[Finetuning, tyro.conf.arg(name="")] = Finetuning()
    preset: Preset = "elements"
    """What the other options are by default: SmolLM2 and the elements; an untrained T5 and WordNet;
    or FLAN-T5-XL as it is documented, of which --plan shows the memory. --help shows the options
    of the preset that stands beside it."""
    plan: bool = False
    """Print what the run needs, from shapes, and stop: nothing is loaded. Rows are as long as the
    options allow; of a folder its config.json is enough."""
    device_bytes: str | None = None
    """With --plan: what the device can hand out, such as 32GB; by default what is free here."""
    output: Path = Path("runs/finetune")
    """Folder for everything that is written."""
    resume: bool = False
    """Go on from the newest checkpoint, if there is one."""
    overwrite: bool = False
    """Replace the run in the output folder."""
    strict: bool = False
    """Stop at the first bad row of the data, instead of leaving it out and counting it."""
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
    """Updates between two evaluations; by default only before and after. Saved is then what was
    trained at the evaluation of the least validation loss."""
    patience: int | None = None
    """Stop after so many evaluations in a row that were no better."""
    diagnose_every: int = 5
    """Updates between two looks at the adapter's nonlinearity."""
    samples: int = 4
    """Prompts that are answered at each evaluation: the first that fit the context."""
    sample_tokens: int | None = None
    """Tokens of an answer, at most; by default 12, or max_target_length of a target."""
    generate: int = 32
    """Of pairs: how many of those to validate with have their targets generated at each
    evaluation, for exact match and ROUGE-L."""
    num_beams: int = 1
    """Of pairs: beams of that generation; one is greedy."""
    rouge: bool = False
    """Of pairs: ROUGE-L of what is generated; needs pip install "jaxkfac[rouge]"."""
    curvature: str | None = "auto"
    """Full-match pattern of the adapter's layers whose spectra and capacity are reported, such as
    ".*o_proj/kernel/[ab]"; auto takes the smallest adapter's, None none."""
    log: tuple[LogTo, ...] = ("tensorboard",)
    """Where numbers go while it runs, beside the output folder."""
    json: bool = False
    """Print the summary as JSON instead of a table."""
    debug: bool = False
    """Show the full traceback of an error."""


# ---------------- options that go together. Nothing heavy is imported here, so that help is quick


_WORDNET_T5 = FinetuneArguments(
    preset="wordnet-t5",
    experiment=Finetuning(
        model="t5-bytes",
        data="wordnet",
        train="all",
        steps=2000,
        batch_size=16,
        max_length=32,
        max_target_length=64,
        remat=False,
        adamw=AdapterAdamwOptions(2e-3, b2=0.99, weight_decay=0.01),
    ),
    output=Path("runs/wordnet-t5"),
    checkpoint_every=500,
    evaluate_every=500,
    curvature=None,
)
_FLAN_T5_XL = FinetuneArguments(
    preset="flan-t5-xl",
    experiment=Finetuning(
        model="flan-t5-xl",
        data="data",
        train="all",
        steps=1000,
        batch_size=8,
        gradient_accumulation_steps=16,
        num_lengths=4,
        max_length=256,
        max_target_length=256,
        dtype="bfloat16",
        adamw=AdapterAdamwOptions(1e-4, b2=0.999, weight_decay=0.01),
    ),
    output=Path("runs/flan-t5-xl"),
    checkpoint_every=100,
    evaluate_every=200,
    curvature=None,
)

PRESETS: Mapping[str, FinetuneArguments] = MappingProxyType(
    {x.preset: x for x in (FinetuneArguments(), _WORDNET_T5, _FLAN_T5_XL)}
)


def default_arguments(words: Sequence[str]) -> FinetuneArguments:
    """What the options are where ``words`` do not say it; an unknown preset is refused later."""
    named = [
        word.partition("=")[2] or next(iter(words[number + 1 :]), "")
        for number, word in enumerate(words)
        if word.partition("=")[0] == "--preset"
    ]
    return PRESETS.get(named[-1] if named else "", PRESETS["elements"])
