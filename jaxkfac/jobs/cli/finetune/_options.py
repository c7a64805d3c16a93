"""Options of ``jaxkfac finetune``. Imports nothing slow, for quick help."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

import tyro

from jaxkfac.jobs.cli._options import (
    AdamwOptions,
    Fisher,
    KfacOptions,
    Optimizer,
    check_least,
    check_optimizers,
)
from jaxkfac.jobs.cli._paths import (
    PLANNED_NAMES,
    check_file,
    check_folder,
    check_model,
    check_records,
    check_weights,
)

LogTo = Literal["tensorboard", "wandb", "trackio"]
Trained = Literal["adapter", "all"]
Preset = Literal["elements", "wordnet-t5", "flan-t5-xl"]


@dataclasses.dataclass(frozen=True)
class AdapterOptions:
    """The LS-LoRA adapter; see `jaxkfac.lslora.Config`."""

    target: str | None = None
    """Full-match pattern of the layers to adapt, or "all-linear"; by default the projections of a
    decoder, and q and v of an encoder-decoder's attention."""
    exclude: str | None = None
    """Full-match pattern of layers to leave out."""
    rank: int = 8
    """Rank of the adapter."""
    alpha: float = 16.0
    """Scale: the branch is multiplied by alpha / rank."""
    fourier_placement: Literal["output", "bottleneck", "none"] = "output"
    """Position of the nonlinearity; none gives plain LoRA."""
    nonlinearity: str = "fourier"
    """Name of the nonlinearity, or module:object of your own, which is imported and registered."""
    init_sigma: float = 1.0
    """Initial width of the nonlinearity."""
    reg_weight: float = 0.01
    """Weight of the penalty on the coefficients' distance from their initial values."""
    dropout: float = 0.0
    """Dropout rate of the branch's inputs."""
    dialect: Literal["lslora", "peft"] = "lslora"
    """The `peft_type` that the saved adapter states; plain LoRA is always peft."""
    rslora: bool = False
    """Multiply the branch by alpha / sqrt(rank) instead of alpha / rank."""
    rank_pattern: dict[str, int] = dataclasses.field(default_factory=dict, hash=False)
    """Ranks by layer: full-match pattern, rank, pattern, rank; the first match counts."""
    alpha_pattern: dict[str, float] = dataclasses.field(default_factory=dict, hash=False)
    """Alphas by layer: full-match pattern, alpha, pattern, alpha; the first match counts."""
    modules_to_save: str | None = None
    """Full-match pattern of parameters to train in full and save with the adapter, such as
    ".*layernorm/scale"; the base keeps its own copy."""
    ensure_weight_tying: bool = False
    """Keep a head tied to its embedding: one adapter, or one parameter of modules_to_save, for
    both. Otherwise the one that is not adapted keeps the base's matrix."""
    sigma_from_data: float | None = None
    """Set the initial width to this many times the root mean square of the branch over the first
    batch, instead of init_sigma."""
    start: str | None = None
    """Folder of a saved adapter to start from. The run uses its layers, rank, alpha and
    modules_to_save.
    Plain LoRA receives a nonlinearity of width init_sigma, which is close to linear where the width
    is several times the branch's output."""
    split: bool = False
    """Save separate adapters of q, k, v and of gate, up, as Llama's PyTorch model has them."""


@dataclasses.dataclass(frozen=True)
class AdapterAdamwOptions(AdamwOptions):
    """AdamW on the adapter."""

    b1: float = 0.9
    """Decay of the average of gradients."""


@dataclasses.dataclass(frozen=True)
class AdapterKfacOptions(KfacOptions):
    """K-FAC on A and B of the adapter, with factors of labels sampled from the model; AdamW on
    coefficients and sigma.
    """

    max_dense: int = 640
    """Largest side of a layer with a full factor; a larger side has a diagonal."""
    fisher: Fisher = "mc"
    """Labels of the factors: mc samples them from the model, empirical takes those of the data."""


@dataclasses.dataclass(frozen=True)
class AdafactorOptions:
    """Options of `optax.adafactor`."""

    learning_rate: float = 1e-2
    """Peak learning rate, in units of a parameter's root mean square."""
    clipping_threshold: float = 1.0
    """Largest root mean square of an update; larger updates are scaled down to it."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""


@dataclasses.dataclass(frozen=True)
class Finetuning:
    """Every option that decides the result of a run; stored in its checkpoints."""

    model: str = "smollm2"
    """smollm2 (135 million parameters, downloaded once); a folder in Hugging Face's layout with a
    decoder or an encoder-decoder of T5's layout; t5-bytes (a small untrained model that reads
    bytes); or flan-t5-xl, llama-1b, llama-7b or phi-3-mini (sizes only, for --plan)."""
    data: str = "elements"
    """elements (embedded facts), wordnet (embedded words and glosses, for an encoder-decoder); or
    a file, or a folder of files with train and validation in their names: JSON lines (.jsonl,
    .jsonl.gz, .jsonl.zst), .parquet or .arrow. A decoder's files are streamed, whatever their
    size."""
    source_key: str | None = None
    """For pairs: key of the source. By default the first of source, input, prompt, document,
    article, text or question that a row has together with its target."""
    target_key: str | None = None
    """For pairs: key of the target. By default target, output, completion, summary, highlights
    or answer."""
    prefix: str = ""
    """For pairs: prefix of every source, such as "summarize: "."""
    train: Trained = "adapter"
    """Train the adapter, or all parameters (encoder-decoders only)."""
    questions: str | None = None
    """Multiple-choice questions for the evaluations: a file in OpenBookQA's format or the datasets
    library's; or a number of embedded questions (40 with the embedded data, 0 with other data)."""
    style: Literal["chat", "plain"] = "chat"
    """Format of the questions: turns of a chat, or plain text with "Answer:" after the question."""
    system: str | None = None
    """System message of embedded records and of questions."""
    seed: int = 0
    """Seed for the adapter, data order, dropout, sampled labels and embedded questions."""
    steps: int = 40
    """Number of parameter updates."""
    epochs: int | None = None
    """Passes over the records, instead of steps. The last update may have fewer micro-batches;
    records that do not fill a micro-batch of batch_size rows are left out of their pass. Records of
    files are counted, and the number of their rows is estimated from the first
    --shuffle-window of them."""
    batch_size: int = 8
    """Rows of a micro-batch."""
    gradient_accumulation_steps: int = 1
    """Micro-batches per update, weighted by their number of learned tokens."""
    accumulator_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the gradients that are summed over several micro-batches."""
    batching: Literal["pad", "pack"] = "pad"
    """pad puts one record in each row; pack puts several into rows of max_length."""
    num_lengths: int | None = None
    """With pad: number of row lengths, each with its own compiled program; more lengths waste less
    on padding. A batch takes the smallest that fits its longest row. By default 8 for records of
    files, 4 for each side of pairs of files, else 1."""
    shuffle_window: int = 8192
    """Records of files to shuffle among; that many stay in memory. 1 keeps the order of the
    file."""
    max_length: int = 512
    """Longest record, or source of a pair, in tokens; longer ones are cut at the end, and the
    command reports how many."""
    max_target_length: int = 128
    """Longest target of a pair, in tokens; longer ones are cut at the end."""
    loss_on: Literal["assistant", "all"] = "assistant"
    """Tokens in the loss: answers of the assistant, or all; for pairs always the targets."""
    label_smoothing: float = 0.0
    """Fraction of each learned token's probability to spread over all tokens."""
    dropout: float | None = None
    """Dropout rate of an encoder-decoder in training; by default that of its config.json, else
    0.1."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the base model; auto is bfloat16 on accelerators and float32 on a CPU, which would
    emulate bfloat16."""
    gguf_pre: str | None = None
    """For a .gguf file: the rule that splits a text into words, by its name in tokenizer.ggml.pre
    (llama-bpe, qwen2, smollm, gpt-2, tekken, default), where the file names none or another."""
    quantize: str | None = None
    """Full-match pattern of kernels to keep as NF4, or "all"."""
    attention: Literal["xla", "cudnn"] = "xla"
    """xla runs anywhere; cudnn is flash attention, on NVIDIA GPUs, with --dtype bfloat16."""
    remat: bool = True
    """Recompute each block's activations in the backward pass."""
    optimizer: Literal[Optimizer, "adafactor"] = "adamw"
    """Optimizer of the adapter, or of all parameters."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning rate after its warmup."""
    warmup: float = 0.1
    """Fraction of the updates in which the learning rate rises."""
    clip_norm: float | None = 1.0
    """Norm to clip at: longer gradients are scaled down to it."""
    adapter: AdapterOptions = AdapterOptions()
    adamw: AdapterAdamwOptions = AdapterAdamwOptions(2e-3, b2=0.99, weight_decay=0.0)
    kfac: AdapterKfacOptions = AdapterKfacOptions(
        learning_rate=1e-3, damping=1e-4, damping_mode="pi", norm_constraint=1e-3
    )
    adafactor: AdafactorOptions = AdafactorOptions()

    def __post_init__(self) -> None:
        counts = ("steps", "epochs", "batch_size", "gradient_accumulation_steps", "num_lengths",
                  "shuffle_window")  # fmt: skip
        check_least(self, 1, *counts)
        check_least(self, 2, "max_length", "max_target_length")
        check_least(self, 0, "seed")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must lie in [0, 1), not {self.label_smoothing}")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), not {self.dropout}")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup must lie in [0, 1), not {self.warmup}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm must be positive, not {self.clip_norm}")
        check_optimizers(self, ("adamw", "kfac", "adafactor"))


@dataclasses.dataclass(frozen=True)
class FinetuneArguments:
    """Teach a pretrained decoder or encoder-decoder, and examine it before and after.

    The command trains an LS-LoRA adapter, or with --train all every parameter of an
    encoder-decoder. By default SmolLM2-135M learns facts about the chemical elements, in about
    three minutes on two cores. The output folder receives report.html (loss, nonlinearity of the
    adapter over time, its curvature, accuracy with intervals), metrics.json, the adapter in PEFT's
    layout or the model in Hugging Face's, TensorBoard's event files and checkpoints. Ctrl-C
    finishes the current update and saves it; --resume then gives the same result as an
    uninterrupted run. A second Ctrl-C stops at once and keeps the last checkpoint.

    Examples: your own records with K-FAC:
    `jaxkfac finetune --data chats.jsonl --epochs 2 --optimizer kfac --output runs/chats`
    and a T5 from scratch on WordNet's words and glosses, in less than ten minutes:
    `jaxkfac finetune --preset wordnet-t5`
    """

    experiment: Annotated[Finetuning, tyro.conf.arg(name="")] = Finetuning()
    preset: Preset = "elements"
    """Defaults of the other options: SmolLM2 and the elements; an untrained T5 and WordNet; or
    FLAN-T5-XL as it is documented, for --plan. --help after --preset shows that preset's
    defaults."""
    plan: bool = False
    """Print the memory the run needs, computed from shapes, and stop: nothing is loaded. Rows are
    as long as the options allow; a folder needs only its config.json."""
    device_bytes: str | None = None
    """With --plan: bytes of device memory, such as 32GB; by default what is free here."""
    compiler: Literal["cpu", "h100", "v5e"] | None = None
    """With --plan: the kind of device that is planned for, as for `jaxkfac plan`; by default an
    H100 with --device-bytes, else the device here."""
    output: Path = Path("runs/finetune")
    """Folder for all results."""
    resume: bool = False
    """Continue from the newest checkpoint, if there is one."""
    overwrite: bool = False
    """Replace the run in the output folder."""
    strict: bool = False
    """Stop at the first bad row of the data instead of skipping and counting it."""
    checkpoint_every: int = 20
    """Updates between two checkpoints."""
    devices: str = "1"
    """Number of devices, or all. --resume may use another number."""
    mesh: str | None = None
    """Device mesh, such as data=4,model=2: splits a batch over four, the base's matrices over two;
    by default all devices split the batch, and the base over the same devices."""
    coordinator: str | None = None
    """HOST:PORT of process 0, for a run in several processes; auto asks SLURM, Open MPI or the TPU
    pod. Every process must see the output folder; process 0 writes to it."""
    processes: int | None = None
    """With --coordinator: number of processes."""
    process: int | None = None
    """With --coordinator: number of this process, from 0."""
    log_every: int = 10
    """Updates between two reads of losses from the device; evaluations and checkpoints read them
    too."""
    evaluate_every: int | None = None
    """Updates between two evaluations; by default only before and after training. With this option
    the run saves the state with the least validation loss."""
    patience: int | None = None
    """Stop after this many evaluations in a row without improvement."""
    diagnose_every: int = 5
    """Updates between two measurements of the adapter's nonlinearity."""
    samples: int = 4
    """Number of prompts to answer at each evaluation; the first that fit the context."""
    sample_tokens: int | None = None
    """Longest answer, in tokens; by default 12, or max_target_length for a target."""
    generate: int = 32
    """For pairs: number of validation pairs whose targets are generated at each evaluation, for
    exact match and ROUGE-L."""
    num_beams: int = 1
    """For pairs: beams of that generation; 1 is greedy."""
    rouge: bool = False
    """For pairs: compute ROUGE-L of generated targets; needs pip install "jaxkfac[rouge]"."""
    curvature: str | None = "auto"
    """Full-match pattern of the adapter's layers whose spectra and capacity the report shows, such
    as ".*o_proj/kernel/[ab]"; auto takes the smallest adapter, None takes none."""
    log: tuple[LogTo, ...] = ("tensorboard",)
    """Loggers that receive numbers during the run, in addition to the output folder."""
    json: bool = False
    """Print the summary as JSON instead of a table."""
    debug: bool = False
    """Show the full traceback of an error."""

    def check(self) -> None:
        """Refuse paths at which nothing can be read or written."""
        experiment = self.experiment
        check_model(experiment.model)
        if experiment.model in PLANNED_NAMES and not self.plan:
            check_weights(experiment.model)
        if experiment.adapter.start is not None:
            check_file("--adapter.start", Path(experiment.adapter.start) / "adapter_config.json")
        if self.plan:  # reads nothing else, and writes nothing
            return
        check_folder(self.output)
        check_records(experiment.data)
        if experiment.questions is not None and not experiment.questions.isdigit():
            check_file("--questions", Path(experiment.questions))


# ---------------- presets


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


def default_arguments(argv_words: Sequence[str]) -> FinetuneArguments:
    """The arguments of the preset that the command line names; an unknown name is refused later."""
    named = [
        argument.partition("=")[2] or next(iter(argv_words[number + 1 :]), "")
        for number, argument in enumerate(argv_words)
        if argument.partition("=")[0] == "--preset"
    ]
    return PRESETS.get(named[-1] if named else "", PRESETS["elements"])
