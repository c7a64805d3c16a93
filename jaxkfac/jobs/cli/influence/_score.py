"""Factors, bases and scores of a run; each is read from its file if the file exists."""

import contextlib
import dataclasses
import operator
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import jaxkfac as jk
from jaxkfac._arguments import ArrayTree
from jaxkfac._errors import UnknownLayerError
from jaxkfac.blocks import PLAIN_TERMS, Factors, LongSum
from jaxkfac.curvature.per_example import Queries
from jaxkfac.jobs.cli._progress import announced, phase, progress, said_if_slow
from jaxkfac.jobs.cli.influence._options import InfluenceArguments
from jaxkfac.jobs.cli.influence._stages import Stages
from jaxkfac.jobs.cli.influence._texts import NumberedText, ScoredTexts, TextReader
from jaxkfac.memory import MemoryBudgetError, parse_bytes
from jaxkfac.uses import scores_of_batches

# ---------------- sums over batches with a relative error of at most 1e-5


class HostSum:
    """A running sum of arrays in host memory; ``sum + new`` adds in place.

    Args:
        first: The first term.
        wide: Whether to accumulate in float64.
    """

    def __init__(self, first: Factors, *, wide: bool) -> None:
        self._sum = jax.tree.map(lambda x: np.array(x, np.float64 if wide else x.dtype), first)
        self._dtypes = jax.tree.map(lambda x: x.dtype, first)

    def __add__(self, new: Factors) -> "HostSum":
        jax.tree.map(lambda total, x: np.add(total, x, out=total), self._sum, new)
        return self

    @property
    def total(self) -> Any:
        """The sum, in the dtypes of its terms."""
        return jax.tree.map(lambda x, dtype: x.astype(dtype, copy=False), self._sum, self._dtypes)


def summed_from(first: Factors, number: int, *, on_host: bool) -> Factors | LongSum | HostSum:
    """Start a sum of factors.

    Args:
        first: Factors of the first batch.
        number: Number of batches. Up to 256 batches are added in a plain sum, which is accurate
            enough and takes half of the bytes.
        on_host: Whether factors are NumPy arrays.
    """
    if on_host:
        return HostSum(first, wide=number > PLAIN_TERMS)
    return first if number <= PLAIN_TERMS else LongSum.zeros(first) + first


def total_of(summed: Factors | LongSum | HostSum) -> Factors:
    """The value of a sum that :func:`summed_from` has started."""
    return summed if isinstance(summed, Factors) else summed.total


# ---------------- stages of a run


_SECONDS = 30.0  # between two saves of the scores


class Scoring(NamedTuple):
    """The model, its texts, and the options of the scoring.

    Attributes:
        arguments: Arguments of the command.
        family: Kind of the model.
        pretrained: The model.
        reader: Reader of its texts.
        train: Training texts.
        queries: Queries.
        params_crc: CRC-32 of the model's parameters.
    """

    arguments: InfluenceArguments
    family: Any
    pretrained: Any
    reader: TextReader
    train: ScoredTexts
    queries: ScoredTexts
    params_crc: str

    @property
    def objective(self) -> jk.Objective:
        """The objective whose influence is measured."""
        return jk.Objective(self.pretrained.apply_fn, jk.Categorical())

    @property
    def max_bytes(self) -> int | None:
        """Budget in bytes, or ``None``."""
        budget = self.arguments.memory
        return None if budget is None else int(parse_bytes(budget, name="--memory"))

    def config_of_bases(self) -> dict[str, Any]:
        """Every option that decides factors and bases."""
        crcs = {"params_crc32": self.params_crc, "train_crc32": self.train.crc}
        return self.arguments.options_of_bases() | crcs

    def config(self) -> dict[str, Any]:
        """Every option that decides the scores."""
        return self.config_of_bases() | self.arguments.options() | {"query_crc32": self.queries.crc}

    def batches(
        self, texts: Sequence[NumberedText], *, start: int = 0, fill: bool = True
    ) -> Iterator[Any]:
        """``(inputs, targets, mask)`` of the texts from ``start`` on, in order."""
        for batch in self.reader.batches(texts, start=start, fill=fill):
            yield self.family.batch(batch)

    def statistics(self) -> Any:
        """The function that collects factors."""
        arguments = self.arguments
        return jk.value_grad_and_factors(
            self.objective,
            fisher=arguments.fisher,
            layers=self.reader.layers if arguments.layers is None else arguments.layers,
            uncovered="ignore",
            max_dense=arguments.max_dense,
            max_factor_bytes=self.max_bytes,
        )

    def chosen(self) -> list[NumberedText]:
        """The texts to collect factors from."""
        texts, number = self.train.texts, self.arguments.factors_from
        if number is None or number >= len(texts):
            return texts
        order = np.random.Generator(np.random.Philox(self.arguments.seed)).permutation(len(texts))
        return [texts[i] for i in sorted(order[:number])]


def factor_shapes(scoring: Scoring) -> jk.Factors:
    """Shapes of the factors.

    Raises:
        UnknownLayerError: ``--layers`` matches no layer.
    """
    first = next(scoring.batches(scoring.chosen(), fill=False))
    return scoring.statistics().factor_shapes(scoring.pretrained.params, first)


def decomposed(scoring: Scoring, stages: Stages, like: jk.Factors) -> jk.Eigenbases:
    """The bases, from their file or from factors with the shapes of ``like``."""
    config, params = scoring.config_of_bases(), scoring.pretrained.params
    first = next(scoring.batches(scoring.chosen(), fill=False))

    def make() -> jk.Eigenbases:
        factors = [stages.tree("factors", config, like, lambda: _collected(scoring))]
        doing = "decomposing the factors"
        with phase(doing), said_if_slow(f"influence: {doing}"):
            bases = _decomposed_in_turn(factors)
        return _measured(scoring, bases) if scoring.arguments.ekfac else bases

    def shaped(factors: jk.Factors) -> jk.Eigenbases:
        bases = jk.eigendecompose(factors)
        if not scoring.arguments.ekfac:
            return bases
        correct = jk.correct_eigenvalues(scoring.objective, bases, fisher=scoring.arguments.fisher)
        return correct(params, first, jax.random.key(0))

    return stages.tree("bases", config, jax.eval_shape(shaped, like), make)


def _decomposed_in_turn(only: list[jk.Factors]) -> jk.Eigenbases:
    """Decompose the layers of one input after the other, freeing their factors.

    Otherwise the sums, means and bases of the whole model would be in memory together. The factors
    come in a list, which is emptied, so that no caller keeps them.
    """
    factors = only.pop()
    groups: dict[str, list[Any]] = {}
    for layer in factors.layers:
        groups.setdefault(layer.name if layer.is_diagonal else layer.input, []).append(layer)
    all_layers, sides, spectra = factors.layers, factors.sides, {}
    empty = factors.with_sides({})
    del factors
    for layers in groups.values():
        keys = {key for layer in layers for key in (layer.input, layer.name)}
        some = {place: sides.pop(place) for place in list(sides) if place.key in keys}
        part = empty.with_sides(some, layers=tuple(layers))
        del some
        bases = jk.eigendecompose(part, placement="host")
        spectra |= bases.sides
        del part
    return bases.with_sides(spectra, layers=all_layers)


def _collected(scoring: Scoring) -> jk.Factors:
    """Factors of the chosen texts, summed over batches with their counts."""
    texts, arguments, stats = scoring.chosen(), scoring.arguments, scoring.statistics()
    key = jax.random.key(arguments.seed)

    def collect(params: ArrayTree, batch: ArrayTree, key: jax.Array) -> jk.Factors:
        return stats(params, batch, key=key, positions=scoring.family.exist(batch)).factors

    add: Any = operator.add
    on_host = scoring.max_bytes is not None  # budgeted passes compile themselves, return NumPy
    if not on_host:
        collect, add = jax.jit(collect), jax.jit(operator.add, donate_argnums=0)
    total: Any = None
    done, batches = 0, -(-len(texts) // arguments.batch_size)
    doing, announce = "collecting factors", announced("factors")
    with phase(doing), _explained(arguments), progress("factors", len(texts)) as shown:
        for number, batch in enumerate(scoring.batches(texts, fill=False)):
            with announce(batch):
                new = collect(scoring.pretrained.params, batch, jax.random.fold_in(key, number))
            if total is None:
                total = summed_from(new, batches, on_host=on_host)
            else:
                total = add(total, new)
            del new
            jax.block_until_ready(jax.tree.leaves(total))
            done += len(batch[1])
            shown.advance(done, "texts")
    return total_of(total)


@contextlib.contextmanager
def _explained(arguments: InfluenceArguments) -> Iterator[None]:
    """Name the option that set the budget in errors about it."""
    try:
        yield
    except MemoryBudgetError as error:
        if arguments.memory is None:
            raise
        remedy = "allow more, or choose fewer --layers or a smaller --query-rank"
        raise ValueError(f"--memory {arguments.memory}: {error}; {remedy}") from None


def _measured(scoring: Scoring, bases: jk.Eigenbases) -> jk.Eigenbases:
    """The bases with eigenvalues measured on the same texts."""
    correct = jk.correct_eigenvalues(scoring.objective, bases, fisher=scoring.arguments.fisher)
    # Use other sampled labels than the factors did.
    key, run = jax.random.split(jax.random.key(scoring.arguments.seed))[0], jax.jit(correct)
    add: Any = jax.jit(operator.add, donate_argnums=0)
    total, done, texts, announce = None, 0, scoring.chosen(), announced("eigenvalues")
    with phase("measuring eigenvalues"), progress("eigenvalues", len(texts)) as shown:
        for number, batch in enumerate(scoring.batches(texts, fill=False)):
            with announce(batch):
                new = run(scoring.pretrained.params, batch, jax.random.fold_in(key, number))
            # Not the + of the bases: over very many batches float32 would lose digits.
            total = add(LongSum.zeros(new.corrections) if total is None else total, new.corrections)
            done += len(batch[1])
            shown.advance(done, "texts")
    assert total is not None
    return dataclasses.replace(new, corrections=total.total)


def prepared(scoring: Scoring, bases: jk.Eigenbases) -> Queries:
    """The queries, preconditioned."""
    arguments = scoring.arguments
    batches = [*scoring.reader.batches(scoring.queries.texts, fill=False)]
    all_queries = jax.tree.map(lambda *x: np.concatenate(x), *batches)
    doing = "preconditioning the queries"
    with phase(doing), said_if_slow(f"influence: {doing}"), _explained(arguments):
        return jk.prepare_queries(
            scoring.objective,
            scoring.pretrained.params,
            bases,
            scoring.family.batch(all_queries),
            damping=arguments.damping,
            query_rank=arguments.query_rank,
            max_bytes=scoring.max_bytes,
        )


def stored(scoring: Scoring, bases: jk.Eigenbases) -> jk.GradientStore | None:
    """The store of the training texts' gradients, if ``--store`` is given."""
    arguments, texts = scoring.arguments, scoring.train.texts
    if arguments.store is None:
        return None
    with phase("storing gradients"), progress("gradients", len(texts)) as shown:

        def batches() -> Iterator[Any]:
            for done, batch in enumerate(scoring.batches(texts)):
                shown.advance(min(done * arguments.batch_size, len(texts)), "texts")
                yield batch

        params = scoring.pretrained.params
        return jk.gradient_store(
            scoring.objective,
            params,
            bases,
            batches(),
            arguments.store,
            rank=arguments.store_rank,
            num_examples=len(texts),
        )


def scored(
    scoring: Scoring, preconditioned: Queries, stages: Stages, store: jk.GradientStore | None = None
) -> np.ndarray:
    """Scores ``(queries, texts)``; saved from time to time and at the end.

    Each save writes all scores, so saving after every batch would take time quadratic in the texts.
    """
    config, texts = scoring.config(), scoring.train.texts
    all_scores = np.zeros((preconditioned.number, 0), np.float32)
    if stages.holds("scores"):
        all_scores = stages.read("scores", config)["scores"]
    done = stored = all_scores.shape[1]
    batches: Any = scoring.batches(texts, start=done)
    if store is not None and done < len(texts):  # a store is read from its first example on
        batches, all_scores, done, stored = store, all_scores[:, :0], 0, 0
    args = scoring.objective, scoring.pretrained.params, preconditioned
    if done == len(texts):
        return all_scores
    score_blocks, since = [all_scores], time.monotonic()
    with phase("scoring"), progress("scores", len(texts), start=done) as shown:
        try:
            for scores, exist in scores_of_batches(*args, batches):
                score_blocks.append(np.asarray(scores, np.float32)[:, np.asarray(exist)])
                done += score_blocks[-1].shape[1]
                if time.monotonic() - since >= _SECONDS:
                    stages.write("scores", config, {"scores": np.concatenate(score_blocks, 1)})
                    stored, since = done, time.monotonic()
                shown.advance(done, "texts")
        finally:  # also after Ctrl-C
            all_scores = np.concatenate(score_blocks, 1)
            if all_scores.shape[1] > stored:
                stages.write("scores", config, {"scores": all_scores})
    return all_scores


def by_token(
    scoring: Scoring, preconditioned: Queries, texts: Sequence[NumberedText]
) -> np.ndarray:
    """Scores ``(queries, texts, positions)`` of the layers whose rows are token positions.

    Zeros where ``--layers`` excludes all such layers, for example with an encoder's layers alone.
    """
    try:
        score_blocks = [
            np.asarray(scores)
            for scores, _ in scores_of_batches(
                scoring.objective,
                scoring.pretrained.params,
                preconditioned,
                scoring.batches(texts),
                per="token",
                layers=scoring.reader.tokens_of,
            )
        ]
    except UnknownLayerError:
        longest = max(len(scoring.reader.pieces(text)) for text in texts)
        return np.zeros((preconditioned.number, len(texts), longest), np.float32)
    return np.concatenate(score_blocks, 1)[:, : len(texts)]
