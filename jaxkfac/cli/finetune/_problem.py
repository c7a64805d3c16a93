"""What is trained: the adapted model, its tokens, and the optimizer."""

import importlib
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxkfac as jk
from jaxkfac.cli._devices import ONE_DEVICE, RunDevices
from jaxkfac.cli._schedules import warmup_schedule
from jaxkfac.cli.finetune._load import Text
from jaxkfac.cli.finetune._options import Finetuning
from jaxkfac.data.text import Encoded, TokenBatch, TokenBatches, encode_records
from jaxkfac.lslora import Adapted, Adapters, Config
from jaxkfac.models import Tokens

PyTree = Any


class FinetuneProblem(NamedTuple):
    """Everything that training and its evaluations read, before anything has been trained.

    Attributes:
        pretrained: The base model and its tokenizer.
        text: Questions, among others.
        config: Of the adapter.
        adapted: ``adapted(params, adapters, inputs, key)``.
        initial: ``initial() -> adapters``, float32, the same values each time. Training takes
            their memory over.
        adapters: Their shapes.
        train: Batches to learn.
        validation: To measure with, or ``None``.
        encoded: The records in tokens, and how many were cut.
        devices: Where all of it lies.
    """

    pretrained: Any
    text: Text
    config: Config
    adapted: Adapted
    initial: Callable[[], Adapters]
    adapters: Adapters
    train: TokenBatches
    validation: TokenBatches | None
    encoded: Encoded
    devices: RunDevices = ONE_DEVICE

    @property
    def params(self) -> PyTree:
        return self.pretrained.params

    @property
    def tokenizer(self) -> Any:
        return self.pretrained.tokenizer

    @property
    def data_crc(self) -> str:
        """CRC-32 of every example's ids and marks, those to learn and those to measure with."""
        held = [] if self.validation is None else [e for row in self.validation.rows for e in row]
        found = 0
        for example in [*self.encoded.examples, *held]:
            for part in (np.int64(len(example.ids)), example.ids, example.learnt):
                found = zlib.crc32(part.tobytes(), found)
        return f"{found:08x}"

    @property
    def context(self) -> int:
        """Most tokens that the model reads."""
        return self.pretrained.config.longest


def build_problem(
    experiment: Finetuning, pretrained: Any, text: Text, devices: RunDevices = ONE_DEVICE
) -> FinetuneProblem:
    """Tokens and fresh adapters; the model's memory is taken over.

    Raises:
        UnknownLayerError: the adapter's target matches no layer.
        ValueError: ``max_length`` is beyond the model's context, nothing to learn fits, or the
            tokenizer has tokens that the model has not.
    """
    if devices.mesh is not None:
        pretrained = pretrained._replace(params=devices.put_base(pretrained.params))
    context, tokenizer = pretrained.config.longest, pretrained.tokenizer
    if experiment.data == "elements":  # short, whatever the model is
        longest = min(experiment.max_length, context)
    elif experiment.max_length > context:
        raise ValueError(
            f"max_length {experiment.max_length} is longer than the model's context, {context} "
            "tokens: lower --max-length"
        )
    else:
        longest = experiment.max_length
    options = {"max_length": longest, "loss_on": experiment.loss_on}
    encoded = encode_records(text.train, tokenizer, **options)
    _check_ids(encoded, pretrained.config.vocabulary)
    train = _batches(experiment, encoded, tokenizer.pad_id, longest)
    validation = None
    if text.validation:
        held = encode_records(text.validation, tokenizer, **options)
        _check_ids(held, pretrained.config.vocabulary)
        size = min(experiment.batch_size, len(held.examples))
        validation = TokenBatches.padded(held.examples, batch_size=size, pad_id=tokenizer.pad_id)
    config = adapter_config(experiment)
    inputs, _, _ = as_batch(train.at(0))

    def initial() -> Adapters:
        return jk.lslora.init(
            config,
            pretrained.apply_fn,
            pretrained.params,
            inputs,
            key=jax.random.key(experiment.seed),
            dtype=jnp.float32,  # whatever the base is: an update is smaller than bfloat16's step
        )

    adapted, shapes = jk.lslora.attach(pretrained.apply_fn, config), jax.eval_shape(initial)
    return FinetuneProblem(
        pretrained, text, config, adapted, initial, shapes, train, validation, encoded, devices
    )


def _check_ids(encoded: Encoded, vocabulary: int) -> None:
    most = max(int(example.ids.max()) for example in encoded.examples)
    if most >= vocabulary:
        raise ValueError(
            f"the tokenizer gives id {most}, and the model has {vocabulary} tokens: they are not "
            "of one checkpoint; put the model's own tokenizer beside it"
        )


def adapter_config(experiment: Finetuning) -> Config:
    """The adapter's settings.

    Raises:
        ValueError: a nonlinearity that is not known, or not where it was said to be.
    """
    chosen = experiment.adapter
    return Config(
        rank=chosen.rank,
        alpha=chosen.alpha,
        target=chosen.target,
        exclude=chosen.exclude,
        fourier_placement=chosen.fourier_placement,
        init_sigma=chosen.init_sigma,
        reg_weight=chosen.reg_weight,
        dropout=chosen.dropout,
        nonlinearity=_registered(chosen.nonlinearity),
    )


def _registered(nonlinearity: str) -> str:
    """The name of a nonlinearity that may have to be imported, such as ``package.module:CUBIC``."""
    module, colon, name = nonlinearity.partition(":")
    if not colon:
        return nonlinearity
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--adapter.nonlinearity {nonlinearity}: {error}") from error
    if not isinstance(found, jk.lslora.Nonlinearity):
        raise ValueError(
            f"--adapter.nonlinearity {nonlinearity}: expected an object of a subclass of "
            f"jaxkfac.lslora.Nonlinearity, got {type(found).__name__}"
        )
    jk.lslora.register(found)
    return found.name


def as_batch(
    batch: TokenBatch, asarray: Callable[[Any], Any] = jnp.asarray
) -> tuple[Tokens, Any, Any]:
    """``(inputs, targets, mask)`` as an objective takes them, of what ``asarray`` makes."""
    ids, positions, segments, targets, mask = map(asarray, batch)
    return Tokens(ids, positions, segments), targets, mask


def objective_of(problem: FinetuneProblem, params: PyTree) -> jk.Objective:
    """Mean negative log-likelihood as a function of the adapters.

    Inside a compiled function ``params`` must be its argument: what it closes over is copied
    into the program.
    """

    def apply(adapters: Adapters, inputs: Tokens, key: Any = None) -> jax.Array:
        return problem.adapted(params, adapters, inputs, key=key)

    return jk.Objective(apply, jk.Categorical())


def collector(experiment: Finetuning, objective: jk.Objective) -> Any:
    """``collect(adapters, batch, key, positions) -> (value, grads, factors)`` for K-FAC."""
    return jk.value_grad_and_factors(
        objective,
        fisher=experiment.kfac.fisher,
        layers=r".*/(a|b)",  # AdamW has the coefficients and sigma
        uncovered="ignore",
        max_dense=experiment.kfac.max_dense,
    )


def total_updates(experiment: Finetuning, problem: FinetuneProblem) -> int:
    """Updates in the whole run: ``steps``, or whole epochs, the last update of what is left."""
    if experiment.epochs is None:
        return experiment.steps
    micro = experiment.epochs * problem.train.per_epoch
    return -(-micro // experiment.gradient_accumulation_steps)


def micro_batches(experiment: Finetuning, problem: FinetuneProblem, update: int) -> range:
    """Numbers of the micro-batches of an update; the last one of whole epochs may have fewer."""
    size = experiment.gradient_accumulation_steps
    start, stop = update * size, (update + 1) * size
    if experiment.epochs is not None:
        stop = min(stop, experiment.epochs * problem.train.per_epoch)
    return range(start, stop)


def build_optimizer(
    experiment: Finetuning, problem: FinetuneProblem, num_updates: int
) -> optax.GradientTransformationExtraArgs:
    """AdamW, or K-FAC with AdamW for what no factor covers; clipped and accumulated."""

    def rate(peak: float) -> optax.Schedule:
        return warmup_schedule(peak, experiment.warmup, num_updates, experiment.schedule)

    chosen = experiment.adamw
    tx: optax.GradientTransformation = optax.adamw(
        rate(chosen.learning_rate), b1=chosen.b1, b2=chosen.b2, weight_decay=chosen.weight_decay
    )
    if experiment.optimizer == "kfac":
        options = experiment.kfac
        batch = as_batch(problem.train.at(0))
        shapes = collector(experiment, objective_of(problem, problem.params)).factor_shapes
        tx = jk.kfac(
            rate(options.learning_rate),
            like=shapes(problem.adapters, batch),
            distribute=problem.devices.divides,
            **options.arguments(),
            others=tx,
        )
    if experiment.clip_norm is not None:
        tx = optax.chain(optax.clip_by_global_norm(experiment.clip_norm), tx)
    size = experiment.gradient_accumulation_steps
    last = len(micro_batches(experiment, problem, num_updates - 1))
    if last == size:
        return jk.multi_steps(tx, every_k_schedule=size)
    return jk.multi_steps(tx, lambda update: jnp.where(update < num_updates - 1, size, last))


def _batches(experiment: Finetuning, encoded: Encoded, pad_id: int, longest: int) -> TokenBatches:
    options: dict[str, Any] = {
        "batch_size": experiment.batch_size,
        "pad_id": pad_id,
        "seed": experiment.seed,
    }
    if experiment.batching == "pack":
        return TokenBatches.packed(encoded.examples, length=longest, **options)
    return TokenBatches.padded(encoded.examples, num_lengths=experiment.num_lengths, **options)
