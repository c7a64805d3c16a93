"""The problem to train: the model, its tokens, and the optimizer."""

import dataclasses
import importlib
import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Key

import jaxkfac as jk
from jaxkfac._arguments import ArrayTree, leaves_by_path
from jaxkfac._errors import UnknownLayerError, nearest
from jaxkfac.files import checksum_of
from jaxkfac.jobs.cli._checkpoint import as_config
from jaxkfac.jobs.cli._devices import ONE_DEVICE, RunDevices
from jaxkfac.jobs.cli._problem import warmup_schedule
from jaxkfac.jobs.cli.finetune._family import Family, Text
from jaxkfac.jobs.cli.finetune._load import family_of
from jaxkfac.jobs.cli.finetune._options import AdapterOptions, Finetuning
from jaxkfac.jobs.data.stream import BatchStream, Position, Tally, end_tokens_text
from jaxkfac.jobs.models import Pretrained
from jaxkfac.linalg import statistics_dtype
from jaxkfac.lslora import Adapters, Config, RmsSigma
from jaxkfac.memory import bytes_text

# ---------------- label smoothing that leaves the Fisher that of the model


Outputs = Array | jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class SmoothedCategorical(jk.Categorical):
    r"""Cross entropy with $(1 - \epsilon)$ at the target and $\epsilon / K$ at all K classes.

    Sampled labels follow the model's own distribution and are not smoothed. :meth:`sample` encodes
    class k as $-1 - k$, and ``terms`` is then the plain cross entropy.

    Args:
        smoothing: $\epsilon$ in [0, 1).
    """

    smoothing: float = 0.0

    def check(self, outputs: Outputs, targets: Any, mask: Any = None) -> None:
        super().check(outputs, _classes(targets), mask)

    def terms(self, outputs: Float[Array, "*terms c"], targets: Any) -> Float[Array, "*terms"]:
        plain = super().terms(outputs, _classes(targets))
        wide = outputs.astype(statistics_dtype(outputs.dtype))
        uniform = jax.nn.logsumexp(wide, -1) - wide.mean(-1)
        share = jnp.where(targets < 0, 0.0, self.smoothing).astype(plain.dtype)
        return plain + share * (uniform.astype(plain.dtype) - plain)

    def sample(self, key: Key[Array, ""], outputs: Float[Array, "*terms c"]) -> Array:
        return -1 - super().sample(key, outputs)


def _classes(targets: Any) -> Array:
    return jnp.where(targets < 0, -1 - targets, targets)


# ---------------- the problem


class FinetuneProblem(NamedTuple):
    """Everything that training and its evaluations read, before any training.

    The trained parameters are called adapters even when they are all parameters; the base model
    then has none.

    Attributes:
        family: Kind of the model.
        pretrained: The base model and its tokenizer.
        config: Settings of the adapter; ``None`` where all parameters are trained.
        adapted: ``adapted(params, adapters, inputs, key)``.
        initial: ``initial() -> adapters``; training donates them. Adapters are float32, with the
            same values at each call; all parameters are handed out only once.
        adapters: Shapes of the adapters.
        rows: Shapes of ``(inputs, targets, mask)`` of the longest rows.
        devices: Devices of the arrays.
        text: The texts, with the questions.
        train: Training batches.
        validation: Validation batches, or ``None``.
        encoded: The training text in tokens, and how much was cut; ``None`` for streamed files.
        reference: Names of baseline models and their loss on the validation text.
    """

    family: Family
    pretrained: Any
    config: Config | None
    adapted: Callable[..., Any]
    initial: Callable[[], Adapters]
    adapters: Adapters
    rows: Any
    devices: RunDevices = ONE_DEVICE
    text: Text = Text((), ())
    train: Any = None
    validation: Any = None
    encoded: Any = None
    reference: Mapping[str, float] = MappingProxyType({})

    @property
    def params(self) -> ArrayTree:
        return self.pretrained.params

    @property
    def tokenizer(self) -> Any:
        return self.pretrained.tokenizer

    @property
    def data_crc(self) -> str:
        """CRC-32 of the tokens of all training and validation examples.

        For streamed files it is taken over the files' bytes and the first batch.
        """
        examples = [] if self.validation is None else self.validation.examples
        first: list[bytes] = []
        if isinstance(self.train, BatchStream):
            first = [self.train.rows.checksum().encode()]
            first += [array.tobytes() for array in self.train.first()]
        else:
            examples = [*self.encoded.examples, *examples]
        arrays = (x for tokens in examples for x in (np.int64(len(tokens[0])), *tokens))
        return checksum_of(itertools.chain(first, (array.tobytes() for array in arrays)))

    @property
    def vocabulary(self) -> int:
        """Number of tokens that the model has."""
        return self.pretrained.config.vocabulary

    def described(self, position: Position | None = None) -> str:
        """A line about the data: all of it, or what has been read of streamed files so far."""
        if not isinstance(self.train, BatchStream):
            return str(self.encoded)
        if position is not None:
            return str(Tally(**position["tally"]))
        rows, count = self.train.rows, len(self.train.rows.files)
        files = "a file" if count == 1 else f"{count} files"
        first = self.train.first_tally
        ends = end_tokens_text(first.appended, first.unlearned)  # said before training begins
        return f"{bytes_text(rows.nbytes)} in {files}, read as training needs it{ends}"

    def learnt(self, position: Position) -> int:
        """Tokens in the loss: in the data, or read so far from streamed files."""
        if isinstance(self.train, BatchStream):
            return position["tally"]["learnt"]
        return self.encoded.num_learnt

    def weights(self, adapters: ArrayTree) -> Any:
        """The model with these adapters, and the keyword arguments to call it, for generation."""
        if self.config is None:
            return self.pretrained._replace(params=adapters), {}
        return self.pretrained, {"adapted": self.adapted, "adapters": adapters}

    def drops(self, experiment: Finetuning) -> bool:
        """Whether training applies dropout, to the adapters' inputs or in the model."""
        adapter_rate = 0.0 if self.config is None else self.config.dropout
        return adapter_rate > 0 or self.family.dropout(experiment, self.pretrained.config) > 0


def build_problem(
    experiment: Finetuning,
    pretrained: Pretrained,
    text: Text,
    devices: RunDevices = ONE_DEVICE,
) -> FinetuneProblem:
    """Tokens and fresh adapters; the model's memory is reused.

    Raises:
        UnknownLayerError: the adapter's target matches no layer.
        ValueError: ``max_length`` exceeds the model's context, nothing to learn fits, or the
            tokenizer has tokens that the model does not have.
    """
    family = family_of(experiment)
    tokens = family.tokens(experiment, pretrained, text)
    return shaped_problem(experiment, pretrained, tokens.train, devices)._replace(
        text=text, **tokens._asdict()
    )


def shaped_problem(
    experiment: Finetuning,
    pretrained: Pretrained,
    batches: Any = None,
    devices: RunDevices = ONE_DEVICE,
) -> FinetuneProblem:
    """A problem without text, except for the longest rows of ``batches``."""
    family = family_of(experiment)
    rows = jax.eval_shape(lambda: family.rows(experiment, batches))
    if experiment.train == "all":
        trained = _all_parameters(pretrained)
    else:
        trained = _adapters(experiment, pretrained, rows, devices, batches)
    return FinetuneProblem(family, *trained, rows=rows, devices=devices, train=batches)


class _Trained(NamedTuple):
    """The fields of a problem that depend on what is trained."""

    pretrained: Pretrained
    config: Config | None
    adapted: Callable[..., Any]
    initial: Callable[[], Adapters]
    adapters: Adapters


def _all_parameters(pretrained: Pretrained) -> _Trained:
    apply_fn, params_once = pretrained.apply_fn, [pretrained.params]

    def adapted(
        params: ArrayTree, adapters: ArrayTree, inputs: ArrayTree, key: Array | None = None
    ) -> Any:
        return apply_fn(adapters, inputs, key=key)

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params_once[0])
    return _Trained(pretrained._replace(params={}), None, adapted, params_once.pop, shapes)


def _adapters(
    experiment: Finetuning,
    pretrained: Pretrained,
    rows: ArrayTree,
    devices: RunDevices,
    batches: Any,
) -> _Trained:
    family = family_of(experiment)
    config, apply_fn = adapter_config(experiment, family), pretrained.apply_fn
    start, loaded = experiment.adapter.start, None
    if start is not None:
        loaded, config = started(experiment, pretrained)
    if devices.mesh is not None:
        pretrained = pretrained._replace(params=devices.put_base(pretrained.params))

    def fresh(config: Config, inputs: ArrayTree) -> Adapters:
        adapters = jk.lslora.init(
            apply_fn,
            config,
            pretrained.params,
            inputs,
            key=jax.random.key(experiment.seed),
            dtype=jnp.float32,  # for every base: an update is smaller than bfloat16's step
        )
        return {name: _donatable(x) for name, x in adapters.items()}

    def initial() -> Adapters:
        if start is not None:
            return started(experiment, pretrained)[0]
        inputs = rows[0]
        if isinstance(config.init_sigma, RmsSigma):
            inputs = devices.replicated(family.batch(batches.first())[0])
        return fresh(config, inputs)

    if loaded is None:
        shaped = dataclasses.replace(config, init_sigma=1.0)  # shapes have no values to measure
        shapes = jax.eval_shape(lambda: fresh(shaped, rows[0]))
    else:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), loaded)
        loaded = None  # read again when training begins
    if start is None:
        _check_patterns(experiment.adapter, shapes, leaves_by_path(pretrained.params))

    return _Trained(pretrained, config, jk.lslora.attach(apply_fn, config), initial, shapes)


def _check_patterns(
    chosen: AdapterOptions, adapters: Iterable[str], parameters: Iterable[str]
) -> None:
    """Refuse patterns that match nothing: a mistyped one would be ignored.

    Raises:
        UnknownLayerError: names the option and the nearest names.
    """
    parents = {path.rpartition("/")[0] for path in parameters}  # of a kernel in four bits
    for name, patterns, names in (
        ("exclude", [chosen.exclude] if chosen.exclude else [], {*parameters, *parents, *adapters}),
        ("rank-pattern", chosen.rank_pattern, {*adapters}),
        ("alpha-pattern", chosen.alpha_pattern, {*adapters}),
    ):
        for pattern in patterns:
            if not any(re.fullmatch(pattern, path) for path in names):
                raise UnknownLayerError(
                    f"--adapter.{name} {pattern} matches no layer in full; the nearest names are "
                    f"{nearest(pattern, sorted(names))}"
                )


def _donatable(x: ArrayTree) -> Any:
    """An adapter unchanged; a copy of a parameter trained in full, because training donates it."""
    if isinstance(x, jk.lslora.Adapter):
        return x
    return jnp.copy(x) if isinstance(x, jax.Array) else jnp.zeros(x.shape, x.dtype)


def adapter_config(experiment: Finetuning, family: Family) -> Config:
    """Settings of the adapter.

    Raises:
        ValueError: the nonlinearity is unknown, or cannot be imported.
    """
    chosen, names = experiment.adapter, (field.name for field in dataclasses.fields(Config))
    settings = {name: getattr(chosen, name) for name in names if hasattr(chosen, name)}
    settings["target"] = family.target if chosen.target is None else chosen.target
    if chosen.sigma_from_data is not None:
        settings["init_sigma"] = RmsSigma(chosen.sigma_from_data)
    settings["nonlinearity"] = _registered(chosen.nonlinearity)
    return Config(**settings)


def started(experiment: Finetuning, pretrained: Pretrained) -> tuple[Adapters, Config]:
    """The saved adapter that a run starts from, in float32, and its settings.

    Raises:
        CheckpointMismatchError: the adapter belongs to another model.
        ValueError: its nonlinearity, or the place of it, differs from the options; or the options
            ask to measure its width.
    """
    chosen = experiment.adapter
    if chosen.sigma_from_data is not None:
        raise ValueError(
            f"--adapter.sigma-from-data is for a new adapter, and {chosen.start} is a saved one: "
            "give --adapter.init-sigma"
        )
    adapters, config = jk.lslora.load(str(chosen.start), model=pretrained)
    wanted_placement, had = chosen.fourier_placement, config.fourier_placement
    if had == "none" and wanted_placement != "none":
        adapters, config = jk.lslora.as_fourier(
            adapters, config, sigma=chosen.init_sigma, fourier_placement=wanted_placement
        )
    elif had != wanted_placement:
        raise ValueError(
            f"--adapter.start {chosen.start} has fourier_placement {had!r}, and "
            f"--adapter.fourier-placement is {wanted_placement!r}: they are different models"
        )
    wanted_name = _registered(chosen.nonlinearity)
    if wanted_name not in (AdapterOptions.nonlinearity, config.nonlinearity):
        raise ValueError(
            f"--adapter.start {chosen.start} has the nonlinearity {config.nonlinearity!r}, and "
            f"--adapter.nonlinearity is {wanted_name!r}: leave it out, or begin anew"
        )
    options = {"reg_weight": chosen.reg_weight, "dropout": chosen.dropout}
    wide = {
        name: jax.tree.map(lambda x: x.astype(jnp.float32), adapter)
        if isinstance(adapter, jk.lslora.Adapter)
        else adapter
        for name, adapter in adapters.items()
    }
    return wide, dataclasses.replace(config, **options)


def _registered(nonlinearity: str) -> str:
    """Name of a nonlinearity, which may be ``package.module:CUBIC`` and then is imported."""
    module, colon, name = nonlinearity.partition(":")
    if not colon:
        return nonlinearity
    try:
        nonlinearity_object = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--adapter.nonlinearity {nonlinearity}: {error}") from error
    if not isinstance(nonlinearity_object, jk.lslora.Nonlinearity):
        raise ValueError(
            f"--adapter.nonlinearity {nonlinearity}: expected an object of a subclass of "
            f"jaxkfac.lslora.Nonlinearity, got {type(nonlinearity_object).__name__}"
        )
    jk.lslora.register(nonlinearity_object)
    return nonlinearity_object.name


def objective_of(
    experiment: Finetuning, problem: FinetuneProblem, params: ArrayTree, *, drops: bool = True
) -> jk.Objective:
    """Mean negative log-likelihood as a function of the adapters.

    With a key it applies dropout as in training, unless ``drops=False``. Inside a compiled
    function,
    ``params`` must be an argument of that function: constants would be copied into the program.
    """

    def apply(adapters: Adapters, inputs: ArrayTree, key: Array | None = None) -> jax.Array:
        return problem.adapted(params, adapters, inputs, key=key if drops else None)

    return jk.Objective(apply, likelihood_of(experiment))


def likelihood_of(experiment: Finetuning) -> jk.Categorical:
    """The likelihood of the run's tokens, smoothed or not."""
    smoothing = experiment.label_smoothing
    return SmoothedCategorical(smoothing=smoothing) if smoothing else jk.Categorical()


def collection_of(experiment: Finetuning) -> dict[str, Any]:
    """Arguments of :func:`jaxkfac.value_grad_and_factors` for K-FAC."""
    return {
        "fisher": experiment.kfac.fisher,
        # AdamW trains the adapter's coefficients and sigma
        "layers": None if experiment.train == "all" else r".*/(a|b)",
        "uncovered": "ignore",
        "max_dense": experiment.kfac.max_dense,
    }


def collector(experiment: Finetuning, objective: jk.Objective) -> Any:
    """``collect(adapters, batch, key, positions) -> (value, grads, factors)`` for K-FAC."""
    return jk.value_grad_and_factors(objective, **collection_of(experiment))


def options_of(experiment: Finetuning, problem: FinetuneProblem) -> dict[str, Any]:
    """Every option that decides the result, as plain values, with the adapted layers."""
    options = as_config(experiment)
    streamed = isinstance(problem.train, BatchStream)
    default = problem.family.num_lengths if streamed else 1
    options["num_lengths"] = experiment.num_lengths or default
    options["dropout"] = problem.family.dropout(experiment, problem.pretrained.config)
    if problem.config is not None:
        for name in ("target", "rank", "alpha", "rslora"):  # a saved adapter brings its own
            options["adapter"][name] = getattr(problem.config, name)
    return options


def total_updates(experiment: Finetuning, problem: FinetuneProblem) -> int:
    """Updates in the run: ``steps``, or whole epochs, where the last update may be smaller."""
    if experiment.epochs is None:
        return experiment.steps
    micro = experiment.epochs * problem.train.per_epoch
    return -(-micro // experiment.gradient_accumulation_steps)


def micro_batches(experiment: Finetuning, problem: FinetuneProblem, update: int) -> range:
    """Numbers of the micro-batches of an update; the last update of an epoch run may have fewer."""
    size = experiment.gradient_accumulation_steps
    start, stop = update * size, (update + 1) * size
    if experiment.epochs is not None:
        stop = min(stop, experiment.epochs * problem.train.per_epoch)
    return range(start, stop)


def learning_rate(experiment: Finetuning, num_updates: int) -> optax.Schedule:
    """Schedule of the chosen optimizer, by the number of the update."""
    return _schedule(getattr(experiment, experiment.optimizer), experiment, num_updates)


def _schedule(options: Any, experiment: Finetuning, num_updates: int) -> optax.Schedule:
    peak, warmup = options.learning_rate, experiment.warmup
    return warmup_schedule(peak, warmup, num_updates, experiment.schedule)


def build_optimizer(
    experiment: Finetuning, problem: FinetuneProblem, num_updates: int
) -> optax.GradientTransformationExtraArgs:
    """The optimizer of one update, over its micro-batches."""

    def like() -> Any:
        objective = objective_of(experiment, problem, problem.params)
        return collector(experiment, objective).factor_shapes(problem.adapters, problem.rows)

    divides, size = problem.devices.divides, experiment.gradient_accumulation_steps
    tx = one_step_optimizer(experiment, num_updates, like=like, distribute=divides)
    last = len(micro_batches(experiment, problem, num_updates - 1))

    def group(update: ArrayLike) -> Any:
        return jnp.where(update < num_updates - 1, size, last)

    dtype = experiment.accumulator_dtype
    return jk.multi_steps(tx, size if last == size else group, accumulator_dtype=dtype)


def one_step_optimizer(
    experiment: Finetuning,
    num_updates: int,
    *,
    like: Callable[[], Any],
    distribute: str | None = None,
) -> optax.GradientTransformation:
    """AdamW, Adafactor, or K-FAC with AdamW for uncovered parameters; clipped.

    Args:
        experiment: Options of the run.
        num_updates: Number of updates, for the schedule.
        like: Returns the shapes of the factors, for K-FAC.
        distribute: As for :func:`jaxkfac.kfac`.
    """

    def rate(options: Any) -> optax.Schedule:
        return _schedule(options, experiment, num_updates)

    chosen = experiment.adamw
    tx: optax.GradientTransformation = optax.adamw(
        rate(chosen), b1=chosen.b1, b2=chosen.b2, weight_decay=chosen.weight_decay
    )
    if experiment.optimizer == "adafactor":
        factored = experiment.adafactor
        tx = optax.adafactor(
            rate(factored),
            clipping_threshold=factored.clipping_threshold,
            weight_decay_rate=factored.weight_decay or None,
        )
    if experiment.optimizer == "kfac":
        options = experiment.kfac
        tx = jk.kfac(
            rate(options),
            like=like(),
            distribute=distribute,
            **options.arguments(),
            others=tx,
        )
    if experiment.clip_norm is not None:
        tx = optax.chain(optax.clip_by_global_norm(experiment.clip_norm), tx)
    return tx
