"""`jaxkfac influence`: factors, bases, queries, scores, and a report of the extreme texts."""

import io
import json
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

import jaxkfac as jk
from jaxkfac._arguments import ArrayTree, leaves_by_path
from jaxkfac.files import checksum_of, whole_file, write_text
from jaxkfac.jobs.cli._checkpoint import check_output
from jaxkfac.jobs.cli._interrupts import nothing_begun
from jaxkfac.jobs.cli._paths import is_named
from jaxkfac.jobs.cli._progress import host_memory, phase, said_if_slow
from jaxkfac.jobs.cli.finetune._encoder_decoder import EncoderDecoderFamily
from jaxkfac.jobs.cli.finetune._load import family_of, load_model
from jaxkfac.jobs.cli.finetune._options import Finetuning
from jaxkfac.jobs.cli.influence._options import InfluenceArguments
from jaxkfac.jobs.cli.influence._score import (
    Scoring,
    by_token,
    decomposed,
    factor_shapes,
    prepared,
    scored,
    stored,
)
from jaxkfac.jobs.cli.influence._stages import STAGES, Stages
from jaxkfac.jobs.cli.influence._texts import PairReader, RecordReader, ScoredTexts
from jaxkfac.jobs.report import QueryRecord, ScoredText, influence_page, influence_table, versions
from jaxkfac.memory import parse_bytes


def run_influence(arguments: InfluenceArguments) -> None:
    """Score, write the results, and print the tables."""
    stages = _stages(arguments)
    with jk.memory.track("run") as measured:
        doing = "loading the model"
        with (
            jk.memory.track("load the model"),
            phase(doing),
            said_if_slow(f"influence: {doing}"),
            nothing_begun(),
        ):
            scoring = _scoring(arguments)
        _say(scoring.train, scoring.queries)
        with jk.memory.track("factors and bases"):
            bases = _bases(scoring, stages)
        with jk.memory.track("gradients of the training texts"):
            store = stored(scoring, bases)
        with jk.memory.track("queries"):
            preconditioned = prepared(scoring, bases)
            del bases  # as large as the factors
        with jk.memory.track("scores"):
            scores = scored(scoring, preconditioned, stages, store)
            _save(arguments.output / "scores.npy", scores)
        doing = "scoring the tokens of the texts that are shown"
        with (
            jk.memory.track("tokens of the texts that are shown"),
            phase("scoring tokens"),
            said_if_slow(f"influence: {doing}"),
        ):
            queries = _records(scoring, preconditioned, scores)
    with phase("writing the report"):
        _write(arguments, scoring, queries, measured)


def _stages(arguments: InfluenceArguments) -> Stages:
    stages = Stages(arguments.output / "stages")
    existing = ", ".join(stage for stage in STAGES if stages.holds(stage))
    check_output(arguments, existing and f"a run (its {existing})")
    return stages


def _bases(scoring: Scoring, stages: Stages) -> jk.Eigenbases:
    """The bases, computed in this run or taken from another; ``--overwrite`` deletes old files.

    It deletes them only after all checks: of the layers for new bases, or of the bases given.
    """
    arguments = scoring.arguments
    if arguments.bases is None:
        with nothing_begun():
            shapes = factor_shapes(scoring)
            if arguments.overwrite:
                stages.remove()
        return decomposed(scoring, stages, shapes)
    with nothing_begun():
        source = Stages(arguments.bases / "stages")
        bases = decomposed(scoring, source, factor_shapes(scoring))
        if arguments.overwrite:
            is_same_run = arguments.bases.resolve() == arguments.output.resolve()
            stages.remove(("scores",) if is_same_run else STAGES)
    return bases


def _scoring(arguments: InfluenceArguments) -> Scoring:
    """Load the model and read the texts.

    Raises:
        ValueError: the folder holds no model that can be scored, or a text is invalid.
    """
    like = Finetuning(
        model=arguments.model,
        max_length=arguments.max_length,
        max_target_length=arguments.max_target_length,
        dtype=arguments.dtype,
        gguf_pre=arguments.gguf_pre,
        dropout=0.0,  # the key is for sampled labels alone
    )
    if arguments.model in ("t5-bytes", "flan-t5-xl") and is_named(arguments.model):
        raise ValueError(
            f"{arguments.model} has no weights that were trained: give the folder of a checkpoint"
        )
    family = family_of(like)
    kind = PairReader if isinstance(family, EncoderDecoderFamily) else RecordReader
    for name in kind.unread:
        if getattr(arguments, name) != getattr(InfluenceArguments, name):
            option = name.replace("_", "-")
            raise ValueError(f"--{option} is for pairs, and {arguments.model} is a decoder")
    if arguments.memory is not None:
        parse_bytes(arguments.memory, name="--memory")
    pretrained = load_model(like)
    reader = kind(arguments, pretrained)
    train, queries = reader.read(arguments.train, "text"), reader.read(arguments.queries, "query")
    return Scoring(arguments, family, pretrained, reader, train, queries, _crc(pretrained.params))


def _crc(params: ArrayTree) -> str:
    return checksum_of(
        part
        for path, leaf in leaves_by_path(params).items()
        for part in (path.encode(), np.ascontiguousarray(np.asarray(leaf)).view(np.uint8).data)
    )


def _say(train: ScoredTexts, queries: ScoredTexts) -> None:
    console = Console(stderr=True)
    for name, texts in (("train", train), ("queries", queries)):
        console.print(f"{name}: {texts}", highlight=False, soft_wrap=True)


def _save(path: Path, scores: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.save(buffer, scores)
    with whole_file(path, "the scores", nbytes=buffer.tell()) as file:
        file.write(buffer.getvalue())


def _records(scoring: Scoring, preconditioned: jk.Queries, scores: np.ndarray) -> list[QueryRecord]:
    """For each query, the texts of largest and smallest scores, with scores of their tokens."""
    texts, number = scoring.train.texts, min(scoring.arguments.top, len(scoring.train.texts))
    order = np.argsort(-scores, 1, kind="stable")
    best, worst = order[:, :number], order[:, ::-1][:, :number]
    shown = sorted({*best.ravel().tolist(), *worst.ravel().tolist()})
    token_scores = by_token(scoring, preconditioned, [texts[i] for i in shown])
    place = {index: at for at, index in enumerate(shown)}

    def record(query: int, index: int) -> ScoredText:
        text = texts[index]
        scores_of_tokens = token_scores[query, place[index]].tolist()
        tokens = list(zip(scoring.reader.pieces(text), scores_of_tokens, strict=False))
        return ScoredText(text.row, float(scores[query, index]), scoring.reader.shown(text), tokens)

    lost = np.asarray(preconditioned.errors).max(1)
    return [
        QueryRecord(
            row=query.row,
            text=scoring.reader.shown(query),
            helpful=[record(q, i) for i in best[q].tolist()],
            harmful=[record(q, i) for i in worst[q].tolist()],
            mean=float(scores[q].mean()),
            spread=float(scores[q].std()),
            lost=float(lost[q]),
        )
        for q, query in enumerate(scoring.queries.texts)
    ]


def _write(
    arguments: InfluenceArguments,
    scoring: Scoring,
    queries: list[QueryRecord],
    measured: jk.memory.Stage,
) -> None:
    output, config, software = arguments.output, scoring.config(), versions()
    memory, train = host_memory(measured), scoring.train
    results = {
        "config": config,
        "versions": software,
        "train": {"file": str(arguments.train), "rows": [x.row for x in train.texts],
                  "cut": train.cut, "left_out": train.left_out},
        "queries": [query.to_plain() for query in queries],
        "scores": str(output / "scores.npy"),
        "host_memory": memory,
        "memory": measured.to_dict(),
    }  # fmt: skip
    text = json.dumps(results, indent=1, allow_nan=False)
    write_text(output / "influence.json", text, "the records of the run")
    sizes = [int(x.size) for x in jax.tree.leaves(scoring.pretrained.params)]
    page = influence_page(
        title=f"Influence on {arguments.model}",
        lead=f"{sum(sizes):,} parameters; training texts: {train}; queries: {len(queries)}.",
        queries=queries,
        config=config,
        versions=software,
        stages=measured,
        host_memory=memory,
    )
    write_text(output / "report.html", page, "the report")
    if arguments.json:
        print(json.dumps(results, allow_nan=False))
        return
    console = Console()
    for query in queries:
        console.print(influence_table(query))
    for name in ("scores.npy", "influence.json", "report.html"):
        line = f"{name.partition('.')[0]}: {output / name}"
        console.print(line, soft_wrap=True, highlight=False)
