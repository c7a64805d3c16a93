"""What the commands accept. Nothing heavy is imported here, so that help is quick."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

# ---------------- options of the optimizers. Nothing heavy is imported here, so that help is quick


Fisher = Literal["empirical", "mc"]
DampingMode = Literal["exact", "factored", "pi"]
Optimizer = Literal["kfac", "adamw"]
_LABELS: dict[Fisher, str] = {"mc": "labels sampled from the model", "empirical": "given labels"}


def labels_sentence(fisher: Fisher) -> str:
    """Which labels K-FAC's factors are of, as the reports say it."""
    return f"K-FAC's factors use {_LABELS[fisher]}."


@dataclasses.dataclass(frozen=True)
class KfacOptions:
    """What `jaxkfac.kfac` takes, with a learning rate."""

    learning_rate: float
    """Largest learning rate."""
    damping: float = 0.1
    """In units of the squared gradient."""
    damping_mode: DampingMode = "exact"
    """Added to each product of eigenvalues, or its root to both factors; pi balances them."""
    decay: float = 0.95
    """Of the running average of the factors, per update."""
    refresh_every: int = 10
    """Updates between two eigendecompositions."""
    momentum: float = 0.9
    """Of the preconditioned gradient."""
    norm_constraint: float | None = 1e-2
    """Bound on a step's squared length in the Fisher metric, before momentum."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    max_condition: float = 1e6
    """Eigenvalues below the largest divided by this are raised to it."""

    def arguments(self) -> dict[str, Any]:
        """For `jaxkfac.kfac`, whose learning rate is a schedule."""
        names = {field.name for field in dataclasses.fields(KfacOptions)} - {"learning_rate"}
        return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True)
class AdamwOptions:
    """What `optax.adamw` takes."""

    learning_rate: float
    """Largest learning rate."""
    b2: float
    """Decay of the average of squared gradients."""
    weight_decay: float
    """Decoupled weight decay."""


# ----------------


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """The vision transformer (16 patches of 2 x 2 pixels)."""

    width: int = 64
    """Size of the stream; a multiple of the number of heads."""
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
    """K-FAC, whose factors are of labels sampled from the model (--fisher). The learning rate
    warms up, then falls along a cosine to zero.
    """

    warmup: float = 0.1
    """Part of the updates in which the learning rate rises."""
    quadratic: bool = False
    """Learning rate and momentum are chosen by the quadratic model of the loss, at each update;
    the numbers given for them, and the norm constraint, do not count. The weight decay is of the
    loss then, and no longer times the learning rate: give a small one."""
    adapt_damping: bool = False
    """The damping rises and falls with how well that model predicts the loss."""

    @property
    def adapts(self) -> bool:
        """Whether an update needs the loss of its examples, and the loss's curvature."""
        return self.quadratic or self.adapt_damping

    def arguments(self) -> dict[str, Any]:
        """For `jaxkfac.kfac`, without a learning rate that is a schedule."""
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
    """AdamW, the comparison, with the same shape of schedule."""

    warmup: float = 0.1
    """Part of the updates in which the learning rate rises."""
    clip_norm: float = 1.0
    """Gradients longer than this are scaled down to it."""


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Everything that decides the result of a run; stored in its checkpoints."""

    seed: int = 0
    """Of the initial parameters, the order, the shifts and the sampled labels."""
    split_seed: int = 0
    """Of the split into training, validation and test images, which is the same for every seed."""
    epochs: int = 60
    """Passes over the training data."""
    steps: int | None = None
    """Parameter updates, instead of whole epochs."""
    batch_size: int = 32
    """Examples per micro-batch."""
    gradient_accumulation_steps: int = 2
    """Micro-batches per update; gradients and factor statistics are pooled."""
    max_shift: int = 1
    """Each training image is moved by up to this many pixels both ways."""
    fisher: Fisher = "mc"
    """Labels of the factors: sampled from the model, or the given ones."""
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
        for name in ("epochs", "steps", "batch_size", "gradient_accumulation_steps"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        for name in ("seed", "split_seed", "max_shift"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)}")
        for part in (self.kfac, self.adamw):
            if not 0 <= part.warmup < 1:
                raise ValueError(f"warmup must lie in [0, 1), not {part.warmup}")

    @property
    def examples_per_update(self) -> int:
        return self.batch_size * self.gradient_accumulation_steps


@dataclasses.dataclass(frozen=True)
class TrainArguments:
    """Train on real data with K-FAC, and the same model with AdamW beside it.

    Both optimizers see the same examples in the same order. The output folder receives
    report.html (curves, spectra, coverage), metrics.json and a checkpoint of each run.
    Ctrl-C ends the epoch under way and keeps it; --resume continues as if nothing had happened.
    A second Ctrl-C stops at once, and the last checkpoint counts.

    Both are timed to 3 % error on the validation images. Choose settings by these, too, and not
    by the test images.

    For example, K-FAC alone with more damping, and K-FAC that adapts itself, over three seeds:
    `jaxkfac train --optimizer kfac --kfac.damping 3e-3 --output runs/damped`,
    `jaxkfac train --kfac.quadratic --kfac.adapt-damping --kfac.damping 0.1
    --kfac.weight-decay 1e-3 --seeds 3`
    """

    experiment: Annotated[Experiment, tyro.conf.arg(name="")] = Experiment()
    preset: Literal["digits"] = "digits"
    """Data and model: handwritten digits, a small vision transformer."""
    optimizer: Literal["kfac", "adamw", "both"] = "both"
    """What to train with."""
    output: Path = Path("runs/digits")
    """Folder for checkpoints, metrics.json and report.html."""
    resume: bool = False
    """Continue from the checkpoints in the output folder."""
    overwrite: bool = False
    """Start over although the output folder holds checkpoints; they are removed."""
    checkpoint_every: int = 10
    """Epochs between two checkpoints; the last epoch is always kept."""
    seeds: int = 1
    """Runs, from --seed on, each in a folder of its own below the output folder."""
    devices: str = "1"
    """How many devices, or all. A run may go on with others than it was begun with."""
    mesh: str | None = None
    """data=4,model=2: rows of a batch over four, matrices over two; by default all for data."""
    coordinator: str | None = None
    """HOST:PORT of process 0, in every process of one run; auto asks SLURM, Open MPI or the TPU
    pod. All of them see the output folder; process 0 writes to it."""
    processes: int | None = None
    """With --coordinator: how many processes."""
    process: int | None = None
    """With --coordinator: which of them this is, from 0."""
    json: bool = False
    """Print the summary as JSON instead of a table."""
    debug: bool = False
    """Show the full traceback of an error."""


@dataclasses.dataclass(frozen=True)
class ModelAnalysis:
    """How a pretrained model is analyzed: everything that decides the result."""

    data: str | None = None
    """Texts: a file or folder as `jaxkfac finetune` takes it; by default WordNet's glosses, which
    are embedded."""
    texts: int = 64
    """How many of them: the first."""
    max_length: int = 128
    """Tokens of a text, or of a source; the end of a longer one is cut."""
    max_target_length: int = 128
    """Of pairs: tokens of a target, likewise."""
    batch_size: int = 8
    """Texts of a backward pass."""
    fisher: Fisher = "empirical"
    """Labels of the factors: the given ones, or sampled from the model."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the model: bfloat16 on accelerators, float32 on a CPU."""
    max_dense: int = 16384
    """A larger side of a layer is kept as a diagonal."""
    decompose: str = ".*"
    """Full-match pattern of what is decomposed: a layer, or "layer[3]", its fourth block."""
    decompose_dtype: Literal["float64", "float32"] = "float64"
    """In which matrices are decomposed."""
    lanczos: int = 3
    """Largest eigenvalues of the exact Fisher, by Lanczos; 0 leaves them out."""
    lanczos_steps: int = 8
    """Products with the exact Fisher, and vectors as large as the model that are kept on disk."""
    lanczos_texts: int | None = None
    """Texts of the exact Fisher: the first, of one batch; by default 4, or a smaller batch."""
    seed: int = 0
    """Of sampled labels, and of the first vector of Lanczos."""

    def __post_init__(self) -> None:
        for name in ("texts", "batch_size", "max_dense", "lanczos_steps", "lanczos_texts"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        for name in ("seed", "lanczos"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{name} must not be negative, not {value}")
        for name in ("max_length", "max_target_length"):
            if (value := getattr(self, name)) < 2:
                raise ValueError(f"{name} must be at least 2, not {value}")
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
        """Texts of the exact Fisher, if there are as many."""
        return min(self.batch_size, 4) if self.lanczos_texts is None else self.lanczos_texts


@dataclasses.dataclass(frozen=True)
class AnalyzeArguments:
    """Show spectra and capacity of a pretrained model, or of the factors of a checkpoint.

    For each layer's A (inputs) and G (output gradients): the largest eigenvalue, the
    condition number before and after clipping, and the entropy rank, exp(entropy) of the
    normalised eigenvalues. For each layer and the whole model: how many directions their
    curvature has, by several measures, each explained in `jaxkfac.curvature.CapacityRecord`.

    Of a pretrained model (a folder, a .gguf file or smollm2) the factors are gathered over texts,
    in as many backward passes as --device-bytes asks for, and decomposed in main memory, one
    matrix at a time. What it needs is printed before anything is loaded. The output folder
    receives report.html, metrics.json, and what is done already: --resume goes on after Ctrl-C
    or a crash, and ends with the same bits.

    For example, the small default model in six gigabytes, and a folder against another one:
    `jaxkfac analyze smollm2 --device-bytes 6GB`
    `jaxkfac analyze models/tuned --compare models/base --data texts.jsonl`
    Of a checkpoint of `jaxkfac train`, what has changed since update 660, with intervals:
    `jaxkfac analyze runs/digits --compare runs/digits/kfac/660 --batches 6 --report capacity.html`
    """

    checkpoint: tyro.conf.Positional[Path]
    """A pretrained model's folder, a .gguf file or smollm2; or a checkpoint of `jaxkfac train`, a
    folder of them (the newest counts), or a run's output folder."""
    model: Annotated[ModelAnalysis, tyro.conf.arg(name="")] = ModelAnalysis()
    max_condition: float | None = None
    """Clip at this condition number; by default 1e6, or the one the run was trained with."""
    num_examples: float | None = None
    """N, times which the mean loss's curvature counts; by default the training examples, or the
    tokens in the loss."""
    damping: float = 1.0
    """Added to N times the curvature: N times the damping of a training compares with it."""
    compare: Path | None = None
    """Another checkpoint or model: show what has changed from it to this one."""
    batches: int | None = None
    """Of a checkpoint: cut the held-out examples into so many batches; show 95 % intervals."""
    plan: bool = False
    """Of a model: print what the analysis needs, from shapes, and stop."""
    device_bytes: str | None = None
    """Of a model: what the device can hand out, such as 6GB; on a CPU what the whole process may
    use of main memory. By default what is free, less a margin."""
    output: Path = Path("runs/analysis")
    """Of a model: folder for everything that is written."""
    resume: bool = False
    """Of a model: go on with what the output folder holds."""
    overwrite: bool = False
    """Of a model: replace the analysis in the output folder."""
    strict: bool = False
    """Of a model: stop at the first bad row of the texts, instead of leaving it out."""
    checkpoint_every: int = 8
    """Of a model: batches of a pass between two savings of its sums."""
    keep_factors: bool = False
    """Of a model: leave the factors in the output folder; by default they go once decomposed."""
    figures: Path | None = None
    """Write spectra.svg, ranks.svg (over depth) and conditions.svg to this folder."""
    report: Path | None = None
    """Write all tables and figures to this HTML file; of a model report.html of the output folder
    by default."""
    json: bool = False
    """Print every eigenvalue and every metric as JSON instead of tables."""
    debug: bool = False
    """Show the full traceback of an error."""

    @property
    def is_pretrained(self) -> bool:
        """Whether it is a pretrained model that is analyzed, and no checkpoint of a run."""
        path = self.checkpoint
        if not path.exists():
            return str(path) in ("smollm2", "t5-bytes", "flan-t5-xl")
        if path.is_file():
            return path.suffix == ".gguf"
        return (path / "config.json").exists() or any(path.glob("*.safetensors"))


@dataclasses.dataclass(frozen=True)
class AdapterArguments:
    """Look at LS-LoRA adapters on disk.

    `jaxkfac adapter inspect FOLDER` shows their settings and the coefficients of every layer;
    no model is needed.
    """

    action: tyro.conf.Positional[Literal["inspect"]]
    """What to do: inspect."""
    folder: tyro.conf.Positional[Path]
    """Folder of the adapters."""
    name: str = "default"
    """Name of the adapter."""
    json: bool = False
    """Print JSON instead of a table."""
    debug: bool = False
    """Show the full traceback of an error."""
