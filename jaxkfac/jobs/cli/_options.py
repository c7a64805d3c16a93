"""Options of `train` and `analyze`. Imports nothing slow, for quick help."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from jaxkfac.jobs.cli._paths import (
    check_folder,
    check_records,
    check_weights,
    find_checkpoint,
    model_source,
    no_checkpoint,
)

# ---------------- options of the optimizers


Fisher = Literal["empirical", "mc"]
DampingMode = Literal["exact", "factored", "pi"]
Optimizer = Literal["kfac", "adamw"]
_LABELS: dict[Fisher, str] = {"mc": "labels sampled from the model", "empirical": "given labels"}


def check_least(options: Any, least: int, *names: str) -> None:
    """Raise an error for options below ``least``; ``None`` passes."""
    for name in names:
        if (value := getattr(options, name)) is not None and not value >= least:
            bound = f"be at least {least}" if least else "not be negative"
            raise ValueError(f"{name} must {bound}, not {value}")


def labels_sentence(fisher: Fisher) -> str:
    """The sentence of a report that says which labels K-FAC's factors use."""
    return f"K-FAC's factors use {_LABELS[fisher]}."


def check_optimizers(experiment: Any, names: Sequence[str]) -> None:
    """Refuse rates and decays that no optimizer can mean.

    Raises:
        ValueError: names the option.
    """
    for name in names:
        options = getattr(experiment, name)
        for field in dataclasses.fields(options):
            value, option = getattr(options, field.name), f"{name}.{field.name}"
            if field.name in ("learning_rate", "weight_decay") and not value >= 0:
                raise ValueError(f"{option} must not be negative, not {value}")
            if field.name in ("b1", "b2") and not 0 <= value < 1:
                raise ValueError(f"{option} must lie in [0, 1), not {value}")


@dataclasses.dataclass(frozen=True)
class KfacOptions:
    """Options of `jaxkfac.kfac`, and a learning rate."""

    learning_rate: float
    """Peak learning rate."""
    damping: float = 0.1
    """Added to the curvature of the mean loss, in units of its squared gradient."""
    damping_mode: DampingMode = "exact"
    """exact adds the damping to each product of eigenvalues; factored adds its square root to both
    factors; pi also balances the two."""
    decay: float = 0.95
    """Decay of the running average of the factors, per update."""
    refresh_every: int = 10
    """Updates between two eigendecompositions."""
    momentum: float = 0.9
    """Momentum of the preconditioned gradient."""
    norm_constraint: float | None = 1e-2
    """Bound on a step's squared length in the Fisher metric, before momentum."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    max_condition: float = 1e6
    """Condition number to clip at: smaller eigenvalues are raised to the largest divided by
    this."""

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for `jaxkfac.kfac`, without the learning rate, which is a schedule."""
        names = {field.name for field in dataclasses.fields(KfacOptions)} - {"learning_rate"}
        return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True)
class AdamwOptions:
    """Options of `optax.adamw`."""

    learning_rate: float
    """Peak learning rate."""
    b2: float
    """Decay of the average of squared gradients."""
    weight_decay: float
    """Decoupled weight decay."""


# ---------------- the commands


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """The vision transformer (16 patches of 2 x 2 pixels)."""

    width: int = 64
    """Width of the residual stream; a multiple of the number of heads."""
    depth: int = 2
    """Number of scanned, rematted blocks."""
    num_heads: int = 4
    """Attention heads."""
    hidden: int = 128
    """Hidden size of each block's two dense layers."""
    patch_size: int = 2
    """Height and width of a patch, pixels."""


@dataclasses.dataclass(frozen=True)
class DigitsKfacOptions(KfacOptions):
    """K-FAC with factors of labels sampled from the model (--fisher). The learning rate warms up,
    then falls along a cosine to zero.
    """

    warmup: float = 0.1
    """Fraction of the updates in which the learning rate rises."""
    quadratic: bool = False
    """Choose learning rate and momentum at each update by the quadratic model of the loss. This
    ignores the options learning-rate, momentum and norm-constraint. The weight decay becomes part
    of the loss and is not multiplied by the learning rate: give a small one."""
    adapt_damping: bool = False
    """Raise and lower the damping by how well the quadratic model predicts the loss."""

    @property
    def adapts(self) -> bool:
        """Whether an update needs the loss of its examples and the curvature of that loss."""
        return self.quadratic or self.adapt_damping

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for `jaxkfac.kfac`, without a learning rate that is a schedule."""
        from jaxkfac.optim import LevenbergMarquardt

        arguments = super().arguments()
        if self.quadratic:
            chosen = {"learning_rate": "quadratic", "momentum": "quadratic"}
            arguments |= chosen | {"norm_constraint": None}
        if self.adapt_damping:
            arguments["damping"] = LevenbergMarquardt(initial=self.damping)
        return arguments


@dataclasses.dataclass(frozen=True)
class DigitsAdamwOptions(AdamwOptions):
    """AdamW, for comparison, with the same shape of schedule."""

    warmup: float = 0.1
    """Fraction of the updates in which the learning rate rises."""
    clip_norm: float = 1.0
    """Norm to clip at: longer gradients are scaled down to it."""


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Every option that decides the result of a run; stored in its checkpoints."""

    seed: int = 0
    """Seed for the initial parameters, data order, shifts and sampled labels."""
    split_seed: int = 0
    """Seed for the split into training, validation and test images; independent of --seed."""
    epochs: int = 60
    """Passes over the training data."""
    steps: int | None = None
    """Number of parameter updates, instead of whole epochs."""
    batch_size: int = 32
    """Examples per micro-batch."""
    gradient_accumulation_steps: int = 2
    """Micro-batches per update; gradients and factor statistics are pooled."""
    max_shift: int = 1
    """Largest shift of a training image, in pixels in each direction."""
    fisher: Fisher = "mc"
    """Labels of the factors: mc samples them from the model, empirical takes those of the data."""
    model: ModelOptions = ModelOptions()
    kfac: DigitsKfacOptions = DigitsKfacOptions(
        learning_rate=5e-4,
        damping=3e-4,
        damping_mode="pi",
        decay=0.98,
        refresh_every=5,
        norm_constraint=2e-5,
        weight_decay=1.0,
    )
    adamw: DigitsAdamwOptions = DigitsAdamwOptions(2e-3, b2=0.99, weight_decay=1e-2)

    def __post_init__(self) -> None:
        check_least(self, 1, "epochs", "steps", "batch_size", "gradient_accumulation_steps")
        check_least(self, 0, "seed", "split_seed", "max_shift")
        for optimizer in (self.kfac, self.adamw):
            if not 0 <= optimizer.warmup < 1:
                raise ValueError(f"warmup must lie in [0, 1), not {optimizer.warmup}")
        check_optimizers(self, ("kfac", "adamw"))

    @property
    def examples_per_update(self) -> int:
        return self.batch_size * self.gradient_accumulation_steps


@dataclasses.dataclass(frozen=True)
class TrainArguments:
    """Train on real data with K-FAC, and the same model with AdamW for comparison.

    Both optimizers see the same examples in the same order. The output folder receives
    report.html (curves, spectra, coverage), metrics.json and a checkpoint of each run.
    Ctrl-C finishes the current epoch and saves it; --resume then gives the same result as an
    uninterrupted run. A second Ctrl-C stops at once and keeps the last checkpoint.

    The log shows accuracy on the validation images, and the report compares the time to 3 % error
    on them. Choose settings by the validation images, not by the test images, whose accuracy is in
    the final table.

    Examples: K-FAC alone with more damping, and adaptive K-FAC over three seeds:
    `jaxkfac train --optimizer kfac --kfac.damping 3e-3 --output runs/damped`,
    `jaxkfac train --kfac.quadratic --kfac.adapt-damping --kfac.damping 0.1
    --kfac.weight-decay 1e-3 --seeds 3`
    """

    experiment: Annotated[Experiment, tyro.conf.arg(name="")] = Experiment()
    preset: Literal["digits"] = "digits"
    """Data and model: handwritten digits, a small vision transformer."""
    optimizer: Literal["kfac", "adamw", "both"] = "both"
    """Optimizer to train with; both trains once with each."""
    output: Path = Path("runs/digits")
    """Folder for checkpoints, metrics.json and report.html."""
    resume: bool = False
    """Continue from the checkpoints in the output folder."""
    overwrite: bool = False
    """Replace the checkpoints in the output folder by a new run."""
    checkpoint_every: int = 10
    """Epochs between two checkpoints; the last epoch always gets one."""
    seeds: int = 1
    """Number of runs, with seeds from --seed on, each in its own subfolder of the output folder."""
    devices: str = "1"
    """Number of devices, or all. --resume may use another number."""
    mesh: str | None = None
    """Device mesh, such as data=4,model=2: splits a batch over four, matrices over two; by default
    all devices split the batch."""
    coordinator: str | None = None
    """HOST:PORT of process 0, for a run in several processes; auto asks SLURM, Open MPI or the TPU
    pod. Every process must see the output folder; process 0 writes to it."""
    processes: int | None = None
    """With --coordinator: number of processes."""
    process: int | None = None
    """With --coordinator: number of this process, from 0."""
    json: bool = False
    """Print the summary as JSON instead of a table."""
    debug: bool = False
    """Show the full traceback of an error."""

    def check(self) -> None:
        """Refuse an output folder that cannot be one."""
        check_folder(self.output)


@dataclasses.dataclass(frozen=True)
class ModelAnalysis:
    """Options of the analysis of a pretrained model that decide its result."""

    data: str | None = None
    """Texts: a file or folder as `jaxkfac finetune` takes it; by default the embedded glosses of
    WordNet."""
    texts: int = 64
    """Number of texts; the first ones are used."""
    max_length: int = 128
    """Longest text, or source of a pair, in tokens; longer ones are cut at the end."""
    max_target_length: int = 128
    """Longest target of a pair, in tokens; longer ones are cut at the end."""
    source_key: str | None = None
    """For pairs: key of the source; by default as in `jaxkfac finetune`."""
    target_key: str | None = None
    """For pairs: key of the target."""
    prefix: str = ""
    """For pairs: prefix of every source, such as "summarize: "."""
    batch_size: int = 8
    """Texts per backward pass."""
    fisher: Fisher = "empirical"
    """Labels of the factors: empirical takes those of the data, mc samples them from the model."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the model; auto is bfloat16 on accelerators and float32 on a CPU."""
    gguf_pre: str | None = None
    """For a .gguf file: the rule that splits a text into words, as in `jaxkfac finetune`."""
    max_dense: int = 16384
    """Largest side of a layer with a full factor; a larger side has a diagonal."""
    decompose: str = ".*"
    """Full-match pattern of the layers to decompose; "layer[3]" is a layer's fourth block."""
    decompose_dtype: Literal["float64", "float32"] = "float64"
    """Dtype of the eigendecompositions."""
    lanczos: int = 3
    """Number of eigenvalues of the exact Fisher to compute by Lanczos, the largest; 0 skips it."""
    lanczos_steps: int = 8
    """Steps of Lanczos: products with the exact Fisher, each with a vector as large as the model on
    disk."""
    lanczos_texts: int | None = None
    """Texts for the exact Fisher, from the first batch; by default 4, or a smaller batch."""
    seed: int = 0
    """Seed for sampled labels and for the first vector of Lanczos."""

    def __post_init__(self) -> None:
        check_least(self, 1, "texts", "batch_size", "max_dense", "lanczos_steps", "lanczos_texts")
        check_least(self, 0, "seed", "lanczos")
        check_least(self, 2, "max_length", "max_target_length")
        if self.lanczos and (self.lanczos_texts or 1) > self.batch_size:
            raise ValueError(
                f"--lanczos-texts {self.lanczos_texts} are more than a batch, {self.batch_size}: "
                "raise --batch-size, or lower --lanczos-texts"
            )
        if self.lanczos > self.lanczos_steps:
            raise ValueError(
                f"lanczos_steps={self.lanczos_steps} give as many eigenvalues, and lanczos asks "
                f"for {self.lanczos}"
            )

    @property
    def exact_texts(self) -> int:
        """Texts for the exact Fisher, if there are that many."""
        return min(self.batch_size, 4) if self.lanczos_texts is None else self.lanczos_texts


@dataclasses.dataclass(frozen=True)
class AnalyzeArguments:
    """Show spectra and capacity of a pretrained model, or of the factors of a checkpoint.

    For each layer's A (inputs) and G (output gradients): the largest eigenvalue, the
    condition number before and after clipping, and the entropy rank, exp(entropy) of the
    normalised eigenvalues. For each layer and the whole model: the number of directions that have
    curvature, by several measures; `jaxkfac.curvature.capacity.CapacityRecord` explains each.

    For a pretrained model (a folder, a .gguf file or smollm2) the factors are collected over texts,
    in as many backward passes as --device-bytes requires, and decomposed in main memory, one
    matrix at a time. The command prints the memory it needs before it loads anything. The output
    folder receives report.html, metrics.json and intermediate results: --resume continues after
    Ctrl-C or a crash and ends with the same bits.

    Examples: the small default model in six gigabytes, and one folder compared with another:
    `jaxkfac analyze smollm2 --device-bytes 6GB`
    `jaxkfac analyze models/tuned --compare models/base --data texts.jsonl`
    A checkpoint of `jaxkfac train`: what has changed since update 660, with intervals:
    `jaxkfac analyze runs/digits --compare runs/digits/kfac/660 --batches 6 --report capacity.html`
    """

    checkpoint: tyro.conf.Positional[Path]
    """Folder of a pretrained model, a .gguf file or smollm2; the output folder of
    `jaxkfac finetune`, or an adapter, whose base model is analyzed with the adapter in place; or a
    checkpoint of `jaxkfac train`, a folder of checkpoints (the newest counts), or the output folder
    of a run."""
    model: Annotated[ModelAnalysis, tyro.conf.arg(name="")] = ModelAnalysis()
    base: Path | None = None
    """For an adapter: its base model; by default the one that its adapter_config.json names."""
    max_condition: float | None = None
    """Condition number to clip at; by default 1e6, or the one that the run was trained with."""
    num_examples: float | None = None
    """Number of training examples N; the curvature of the mean loss is multiplied by it. By default
    the number of training examples, or of tokens in the loss."""
    damping: float = 1.0
    """Added to N times the curvature; corresponds to N times the damping of a training run."""
    compare: Path | None = None
    """Checkpoint or model to compare with; shows what has changed from it to this one."""
    batches: int | None = None
    """For a checkpoint: split the test examples into this many batches; show 95 % intervals."""
    plan: bool = False
    """For a model: print the memory the analysis needs, computed from shapes, and stop."""
    device_bytes: str | None = None
    """For a model: bytes of device memory, such as 6GB, for arrays and the temporaries of programs.
    On a CPU: resident memory of the process; the plan counts what it has when it begins, and allows
    320 MiB for it to grow. A budget that is too small is refused with the smallest that suffices.
    By default what is free, less a margin."""
    output: Path = Path("runs/analysis")
    """For a model: folder for all results."""
    resume: bool = False
    """For a model: continue the analysis in the output folder."""
    overwrite: bool = False
    """For a model: replace the analysis in the output folder."""
    strict: bool = False
    """For a model: stop at the first bad row of the texts instead of skipping it."""
    checkpoint_every: int = 8
    """For a model: batches between two saves of a pass."""
    keep_factors: bool = False
    """For a model: keep the factors in the output folder; by default they are deleted once
    decomposed."""
    figures: Path | None = None
    """Folder for spectra.svg, ranks.svg (over depth) and conditions.svg."""
    report: Path | None = None
    """HTML file for all tables and figures; for a model, report.html in the output folder by
    default."""
    tables: bool = False
    """Also print a table of every factor and of every metric."""
    json: bool = False
    """Print every eigenvalue and every metric as JSON instead of tables."""
    debug: bool = False
    """Show the full traceback of an error."""

    @property
    def is_pretrained(self) -> bool:
        """Whether the analysis is of a pretrained model, not of a checkpoint of a run."""
        return model_source(self.checkpoint, self.base) is not None

    def check(self) -> None:
        """Refuse values out of range, and paths at which nothing can be read or written."""
        if self.num_examples is not None and not 1 <= self.num_examples < math.inf:
            raise ValueError(f"num_examples must be at least 1, not {self.num_examples}")
        if not 0 <= self.damping < math.inf:
            raise ValueError(f"damping must be zero or positive, not {self.damping}")
        check_least(self, 1, "max_condition")
        check_least(self, 2, "batches")
        adapters = []
        for path in (self.checkpoint, *([] if self.compare is None else [self.compare])):
            source = model_source(path, self.base) if self.is_pretrained else None
            adapters += [] if source is None else [source.adapter]
            if self.is_pretrained:
                check_weights(str(path) if source is None else source.model)
            elif find_checkpoint(path) is None:
                raise no_checkpoint(path)
        if self.base is not None and not any(adapters):
            raise ValueError(f"--base is for an adapter, and {self.checkpoint} is none")
        if self.is_pretrained:
            check_folder(self.output)
            if self.model.data is not None:
                check_records(self.model.data)
        if self.figures is not None:
            check_folder(self.figures, "--figures")
        if self.report is not None:
            check_folder(self.report.parent, "--report")
