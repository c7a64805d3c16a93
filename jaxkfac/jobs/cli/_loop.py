"""The training loop: one compiled scan per epoch, measured between epochs.

An epoch is a pure function of the state, the rows and their numbers. A run that was stopped and
resumed therefore gives the same bits as an uninterrupted one. The host reads each epoch's numbers
once, together with the evaluation.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from jaxkfac._arguments import ArrayTree
from jaxkfac._errors import JaxkfacError
from jaxkfac.jobs.cli._devices import ONE_DEVICE, RunDevices
from jaxkfac.jobs.cli._interrupts import interrupts_deferred
from jaxkfac.jobs.cli._options import Experiment
from jaxkfac.jobs.cli._problem import DigitsProblem, learning_rate
from jaxkfac.jobs.cli._progress import phase
from jaxkfac.jobs.data import Digits, epoch_batches, num_batches, shift_batch
from jaxkfac.jobs.report import EpochRecord, RunRecords

Row = tuple[Int[Array, "*micro batch"], Int[Array, "*micro"]]  # example indices, numbers for keys


class NonFiniteLossError(JaxkfacError, FloatingPointError):
    """The loss of a run became NaN or infinite and did not recover."""


class TrainedState(NamedTuple):
    """State between epochs; the next epoch reuses its arrays' memory. ``records`` only grows."""

    params: ArrayTree
    optimizer: ArrayTree
    step: int
    records: RunRecords


def updates_per_epoch(experiment: Experiment, problem: DigitsProblem) -> int:
    """Updates in one pass over the training data; the incomplete last one is left out."""
    return num_batches(len(problem.train.labels), experiment.examples_per_update)


def total_updates(experiment: Experiment, problem: DigitsProblem) -> int:
    """Updates in the whole run: ``steps``, or whole epochs."""
    return experiment.steps or experiment.epochs * updates_per_epoch(experiment, problem)


def make_epoch(
    experiment: Experiment,
    problem: DigitsProblem,
    tx: optax.GradientTransformationExtraArgs,
    *,
    factors: bool,
) -> Callable[..., tuple[ArrayTree, ArrayTree, Float[Array, "2 updates"]]]:
    """Return ``epoch(params, optimizer_state, rows, numbers, train)``, not yet compiled.

    ``rows`` ``(updates, micro, batch)`` are the indices of the examples; ``numbers``
    ``(updates, micro)`` seed their shifts and sampled labels. For each update the epoch returns the
    loss before the update, averaged over its examples, and the norm of the gradient, averaged over
    its micro-batches.
    """
    seed = jax.random.key(experiment.seed)
    adapts = factors and experiment.kfac.adapts

    def batch_of(row: Row, train: Digits) -> tuple[tuple[Array, Array], Array]:
        indices, number = row
        shift_key, label_key = jax.random.split(jax.random.fold_in(seed, number))
        images = shift_batch(shift_key, train.images[indices], experiment.max_shift)
        return (images, train.labels[indices]), label_key

    def micro_step(
        carry: tuple[ArrayTree, ArrayTree], row: Row, train: Digits, group: ArrayTree = None
    ) -> tuple[tuple[ArrayTree, ArrayTree], tuple[Float[Array, ""], Float[Array, ""]]]:
        params, state = carry
        batch, label_key = batch_of(row, train)
        if factors:
            loss, grads, statistics = problem.statistics(params, batch, key=label_key)
            # An adapting update evaluates the loss on all of its micro-batches.
            model = problem.statistics.adaptation(params, group) if adapts else {}
            updates, state = tx.update(grads, state, params, factors=statistics, **model)
        else:
            loss, grads = jax.value_and_grad(problem.objective)(params, batch)
            updates, state = tx.update(grads, state, params, terms=len(batch[1]))
        return (optax.apply_updates(params, updates), state), (loss, gradient_norm(grads))

    def update(carry: tuple[ArrayTree, ArrayTree], rows: Row, train: Digits) -> Any:
        """All micro-steps of one update; each of them sees the examples of the whole update."""
        batches, _ = jax.vmap(lambda row: batch_of(row, train))(rows)
        group = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batches)
        return jax.lax.scan(lambda carry, row: micro_step(carry, row, train, group), carry, rows)

    def epoch(
        params: ArrayTree, state: ArrayTree, rows: Array, numbers: Array, train: Digits
    ) -> tuple[ArrayTree, ArrayTree, Float[Array, "2 updates"]]:
        if adapts:
            (params, state), measured = jax.lax.scan(
                lambda carry, row: update(carry, row, train), (params, state), (rows, numbers)
            )
            means = [x.mean(axis=1) for x in measured]
            return params, state, jnp.stack([x.astype(means[0].dtype) for x in means])
        flat = (rows.reshape(-1, rows.shape[-1]), numbers.reshape(-1))
        (params, state), measured = jax.lax.scan(
            lambda carry, row: micro_step(carry, row, train), (params, state), flat
        )
        means = [x.reshape(numbers.shape).mean(axis=1) for x in measured]
        return params, state, jnp.stack([x.astype(means[0].dtype) for x in means])

    return epoch


def epoch_rows(
    experiment: Experiment, problem: DigitsProblem, first: int, limit: int
) -> tuple[Int[np.ndarray, "updates micro batch"], Int[np.ndarray, "updates micro"]]:
    """Example indices of the updates from ``first`` to the end of its epoch, or to ``limit``."""
    per_epoch, micro = (
        updates_per_epoch(experiment, problem),
        experiment.gradient_accumulation_steps,
    )
    number, offset = divmod(first, per_epoch)
    rows = epoch_batches(
        experiment.seed,
        number,
        num_examples=len(problem.train.labels),
        batch_size=experiment.examples_per_update,
    )[offset : offset + limit - first]
    rows = rows.reshape(len(rows), micro, experiment.batch_size)
    numbers = np.arange(first * micro, (first + len(rows)) * micro, dtype=np.int32)
    return rows, numbers.reshape(len(rows), micro)


def make_evaluation(problem: DigitsProblem) -> Callable[[ArrayTree, Digits], tuple[Array, Array]]:
    """Return the compiled ``evaluate(params, data) -> (mean loss, accuracy)``."""

    @jax.jit
    def evaluate(params: ArrayTree, data: Digits) -> tuple[Array, Array]:
        logits = problem.apply_fn(params, data.images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, data.labels)
        return losses.mean(), jnp.mean(logits.argmax(-1) == data.labels, dtype=jnp.float32)

    return evaluate


def gradient_norm(grads: ArrayTree) -> Float[Array, ""]:
    """Euclidean norm over all parameters, in float32 or wider."""
    squares = [
        jnp.sum(jnp.square(jnp.abs(leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)))))
        for leaf in jax.tree.leaves(grads)
    ]
    wide = jnp.result_type(*squares) if squares else jnp.float32
    return jnp.sqrt(sum((square.astype(wide) for square in squares), start=jnp.zeros((), wide)))


def finite_or_none(values: Sequence[float]) -> list[float | None]:
    """Replace non-finite values by ``None``, since JSON has no NaN; skipped batches have them."""
    return [value if math.isfinite(value) else None for value in values]


def skipped_updates(optimizer_state: ArrayTree) -> Int[Array, ""]:
    """Number of micro-batches and updates that were skipped because something was not finite."""
    leaves = jax.tree_util.tree_leaves_with_path(optimizer_state)
    counts = [leaf for path, leaf in leaves if getattr(path[-1], "name", "") == "skipped"]
    return sum(counts, start=jnp.zeros((), jnp.int32))


def compile_epoch(
    epoch: Callable[..., Any], *arguments: Any, devices: RunDevices = ONE_DEVICE
) -> Any:
    """Compile an epoch that donates parameters and optimizer state."""
    options = devices.of_program(*arguments[:2])
    # Interrupting a trace can crash the process when it exits.
    with interrupts_deferred("compiling"), phase("compiling"):
        lowered = jax.jit(epoch, donate_argnums=(0, 1), **options).lower(*arguments)
        return devices.processes.compiled(lowered)


def train(
    name: str,
    experiment: Experiment,
    problem: DigitsProblem,
    tx: optax.GradientTransformationExtraArgs,
    state: TrainedState,
    *,
    each_epoch: Callable[[TrainedState], None],
    devices: RunDevices = ONE_DEVICE,
) -> TrainedState:
    """Train from ``state``, whose arrays are donated, to the end of the experiment.

    ``each_epoch`` receives the state after every epoch; the state stays valid until it returns.
    Ctrl-C waits until then, because an interrupted epoch leaves no state.

    Raises:
        NonFiniteLossError: naming the first step whose loss was not finite, if the loss
            has not recovered by the end of its epoch.
    """
    total = total_updates(experiment, problem)
    epoch = make_epoch(experiment, problem, tx, factors=name == "kfac")
    evaluate, compiled = make_evaluation(problem), {}
    rate = learning_rate(name, experiment, total)
    chosen = name == "kfac" and experiment.kfac.quadratic  # the rate is chosen at each update

    def rows_from(step: int) -> tuple[Array, Array]:
        rows, numbers = epoch_rows(experiment, problem, step, total)
        return devices.put_rows(rows), devices.replicated(jnp.asarray(numbers))

    ahead = rows_from(state.step)
    while state.step < total:
        with interrupts_deferred("finishing the epoch"):
            records, updates = state.records, len(ahead[0])
            arguments = (state.params, state.optimizer, *ahead, problem.train)
            if updates not in compiled:
                started = time.perf_counter()
                compiled[updates] = compile_epoch(epoch, *arguments, devices=devices)
                spent = records.compile_seconds + time.perf_counter() - started
                records = records._replace(compile_seconds=spent)
            started = time.perf_counter()
            params, optimizer, measured = compiled[updates](*arguments)
            step = state.step + updates
            if step < total:
                ahead = rows_from(step)  # prepare the next rows while this epoch runs
            jax.block_until_ready(measured)
            seconds = time.perf_counter() - started
            settled = devices.processes.settled
            evaluated = [settled(evaluate(params, x)) for x in problem.data]
            rates = [] if chosen else rate(jnp.arange(state.step, step))
            (losses, norms), rates, evaluated, skipped = jax.device_get(
                (measured, rates, evaluated, skipped_updates(optimizer))
            )
            (train_loss, train_accuracy), validation, (test_loss, test_accuracy) = (
                tuple(map(float, x)) for x in evaluated
            )
            if not (math.isfinite(train_loss) and math.isfinite(losses[-1])):
                message = _explain(name, state.step, losses, int(skipped), experiment)
                raise NonFiniteLossError(message)
            before = records.epochs[-1].seconds if records.epochs else 0.0
            epoch_record = EpochRecord(
                step=step,
                examples=step * experiment.examples_per_update,
                seconds=before + seconds,
                train_loss=train_loss,
                train_accuracy=train_accuracy,
                test_loss=test_loss,
                test_accuracy=test_accuracy,
                validation_loss=validation[0],
                validation_accuracy=validation[1],
            )
            records = records._replace(
                losses=[*records.losses, *(float(x) for x in losses)],
                epochs=[*records.epochs, epoch_record],
                skipped=int(skipped),
                gradient_norms=[*records.gradient_norms, *finite_or_none(norms.tolist())],
                learning_rates=[*records.learning_rates, *map(float, rates)],
            )
            state = TrainedState(params, optimizer, step, records)
            each_epoch(state)
    return state


def _explain(
    name: str, first: int, losses: np.ndarray, skipped: int, experiment: Experiment
) -> str:
    bad = np.flatnonzero(~np.isfinite(losses))
    step = first + int(bad[0]) if len(bad) else first + len(losses)
    value = losses[bad[0]] if len(bad) else "not finite on the whole training set"
    rate = getattr(experiment, name).learning_rate
    less = f"--{name}.learning-rate {rate / 3:.2g}"
    damping = f"--kfac.damping {experiment.kfac.damping * 10:.2g}"
    if name == "kfac":
        less = damping if experiment.kfac.quadratic else f"{less} or {damping}"
    return (
        f"the loss of {name} is {value} at step {step} and did not recover; "
        f"{skipped} non-finite micro-batches or updates were skipped. "
        f"The last checkpoint is from before. Try {less}"
    )
