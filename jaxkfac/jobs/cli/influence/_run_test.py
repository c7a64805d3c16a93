"""Whole runs of a tiny random decoder and encoder-decoder: what they write, how they go on."""

import itertools
import json
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxkfac as jk
from jaxkfac.jobs.cli import main
from jaxkfac.jobs.cli.finetune._pairs_run_test import CONFIG as PAIRS
from jaxkfac.jobs.cli.finetune._run_test import CONFIG
from jaxkfac.jobs.cli.influence import _run as run_module
from jaxkfac.jobs.cli.influence import _score
from jaxkfac.jobs.data.text._encode_test import Letters
from jaxkfac.jobs.models import (
    Decoder,
    EncoderDecoder,
    Pretrained,
    Tokens,
    byte_tokenizer,
    save_encoder_decoder,
)
from jaxkfac.uses._store_writer import StoreWriter

WORDS = "iron gold tin lead zinc neon argon radon boron carbon".split()
TEXTS = [{"text": f"{word} is {'a noble gas' if 'on' in word else 'a metal'}"} for word in WORDS]
LONG = {"text": "long " * 30}
QUERIES = [{"text": "silver is a metal"}, {"prompt": "xenon ", "completion": "is a noble gas"}]
TINY = ("--batch-size", "4", "--top", "2", "--max-length", "32", "--factors-from", "6")


def decoder():
    apply_fn, params = jk.from_nnx(Decoder(CONFIG, rngs=nnx.Rngs(0)))
    return Pretrained(CONFIG, apply_fn, params, Letters(), "models/tiny")


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "load_model", lambda _: decoder())
    train = write(tmp_path / "train.jsonl", [*TEXTS, LONG])
    queries = write(tmp_path / "queries.jsonl", QUERIES)

    def call(*words, output=tmp_path / "run", train=train, queries=queries):
        files = ["--train", train, "--queries", queries, "--output", str(output)]
        return main(["influence", *files, *TINY, *words])

    return call


def found(output):
    return json.loads((output / "influence.json").read_text()), np.load(output / "scores.npy")


@pytest.mark.slow
def test_a_run_scores_as_the_library_does_and_shows_the_first_and_the_last(run, tmp_path, capsys):
    assert run("--fisher", "empirical", "--query-rank", "None", "--factors-from", "11") == 0
    record, scores = found(tmp_path / "run")
    model, letters = decoder(), Letters()
    objective = jk.Objective(model.apply_fn, jk.Categorical())

    def batch(rows):
        ids = [[*map(ord, row.get("prompt", "")), *map(ord, row.get("completion", row.get("text"))),
                letters.eos_ids[0]][:32] for row in rows]  # fmt: skip
        prompts = np.asarray([len(row.get("prompt", "")) for row in rows])[:, None]
        length = max(map(len, ids))
        whole = np.asarray([x + [0] * (length - len(x)) for x in ids])
        there = np.asarray([[1] * len(x) + [0] * (length - len(x)) for x in ids])
        at = np.arange(length - 1) + 1
        mask = (there[:, 1:] > 0) & (at >= np.maximum(prompts, 1))
        exist = there[:, 1:]
        tokens = Tokens(*(jnp.asarray(x) for x in (whole[:, :-1], exist * (at - 1), exist)))
        return tokens, jnp.asarray(whole[:, 1:]), jnp.asarray(mask)

    train = batch([*TEXTS, LONG])
    stats = jax.jit(jk.value_grad_and_factors(objective, uncovered="ignore"))
    bases = jk.eigendecompose(stats(model.params, train, positions=train[0].segments > 0)[2])
    expected = jk.influence(objective, model.params, bases, batch(QUERIES), train)
    np.testing.assert_allclose(scores, expected, rtol=0, atol=2e-3 * np.abs(expected).max())
    for query, row in zip(record["queries"], scores, strict=True):
        order = np.argsort(-row, kind="stable")
        assert [x["row"] - 1 for x in query["helpful"]] == order[:2].tolist()
        assert [x["row"] - 1 for x in query["harmful"]] == order[::-1][:2].tolist()
        for text in (*query["helpful"], *query["harmful"]):
            parts = sum(part for _, part in text["tokens"])
            assert parts == pytest.approx(
                text["score"], rel=1e-2, abs=1e-3 * float(np.abs(row).max())
            )
    assert record["train"]["cut"] == 1
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Most helpful" in page and "rgba(" in page and "xenon" in page
    shown = capsys.readouterr()
    assert "Query 2" in shown.out and "11 texts, 1 of them cut" in shown.err.replace("\n", "")


@pytest.mark.exhaustive
def test_a_run_resumed_after_ctrl_c_gives_the_bits_of_an_uninterrupted_one(
    run, tmp_path, monkeypatch
):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    with monkeypatch.context() as patch:
        patch.setattr(_score, "_SECONDS", 0.0)  # stored after every batch
        assert run("--ekfac", output=whole) == 0
    write_stage, score, writes = _score.Stages.write, _score.scores_of_batches, []

    def noted(self, stage, config, arrays):
        writes.append((stage, arrays["scores"].shape if stage == "scores" else None))
        write_stage(self, stage, config, arrays)

    def stopped(*args, **options):
        yield from itertools.islice(score(*args, **options), 2)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_score.Stages, "write", noted)
        patch.setattr(_score, "scores_of_batches", stopped)
        assert run("--ekfac", output=parts) == 130
    assert writes == [("factors", None), ("bases", None), ("scores", (2, 8))]
    assert not (parts / "scores.npy").exists()
    monkeypatch.setattr(_score, "_collected", None)  # nothing is made anew
    assert run("--ekfac", "--resume", output=parts) == 0
    assert (whole / "scores.npy").read_bytes() == (parts / "scores.npy").read_bytes()
    assert found(whole)[0]["queries"] == found(parts)[0]["queries"]
    assert run("--resume", "--damping", "0.5", output=parts) == 2


@pytest.mark.exhaustive
def test_a_store_stopped_while_it_is_written_is_gone_on_with_to_the_same_bytes(
    run, tmp_path, monkeypatch
):
    words = ("--layers", "model/layers/mlp/gate_up_proj/kernel", "--store-rank", "2", "--top", "1")
    write_batch, written = StoreWriter._of, []

    def stopped(self, some):
        written.append(some)
        if len(written) == 2:
            raise KeyboardInterrupt
        return write_batch(self, some)

    part, parts = ("--store", str(tmp_path / "part")), tmp_path / "parts"
    with monkeypatch.context() as patch:
        patch.setattr(StoreWriter, "_of", stopped)
        assert run(*part, *words, output=parts) == 130
    assert sorted(x.name for x in tmp_path.glob("part*")) == ["part.partial", "parts"]
    assert run(*part, *words, "--resume", output=parts) == 0
    assert run("--store", str(tmp_path / "whole"), *words, "--bases", str(parts)) == 0
    stores = [
        {x.name: x.read_bytes() for x in (tmp_path / name).iterdir()} for name in ("part", "whole")
    ]
    assert stores[0] == stores[1] and len(stores[0]) == 5  # three batches, sums and a journal
    scores = [(tmp_path / name / "scores.npy").read_bytes() for name in ("parts", "run")]
    assert scores[0] == scores[1]


@pytest.mark.exhaustive
def test_a_store_gives_the_scores_and_serves_other_queries(run, tmp_path, monkeypatch, capsys):
    words = ("--store", str(tmp_path / "store"), "--query-rank", "None")
    assert run(*words[2:], output=tmp_path / "plain") == 0
    bases = ("--bases", str(tmp_path / "plain"))
    assert run(*words, *bases) == 0
    assert "gradient store in" in capsys.readouterr().err
    expected, scores = (found(tmp_path / name)[1] for name in ("plain", "run"))
    assert scores.shape == expected.shape == (2, 11)
    np.testing.assert_allclose(scores, expected, rtol=0, atol=0.02 * np.abs(expected).max())
    other = write(tmp_path / "other.jsonl", QUERIES[::-1])

    def never(*args, **options):
        raise AssertionError("no gradient of a training text is taken")

    monkeypatch.setattr("jaxkfac.uses._store_writer.StoreWriter._of", never)
    assert run(*words, *bases, output=tmp_path / "other", queries=other) == 0
    np.testing.assert_allclose(found(tmp_path / "other")[1], scores[::-1], rtol=1e-4, atol=1e-4)
    assert run(*words, "--seed", "1", output=tmp_path / "third") == 2
    assert "holds gradients of something else: eigenvectors" in capsys.readouterr().err.replace(
        "\n", " "
    )


@pytest.mark.exhaustive
def test_another_run_takes_the_bases_for_other_queries(run, tmp_path, monkeypatch, capsys):
    assert run() == 0
    scores = found(tmp_path / "run")[1]
    other = write(tmp_path / "other.jsonl", QUERIES[::-1])
    monkeypatch.setattr(_score, "_collected", None)
    words = ("--bases", str(tmp_path / "run"))
    assert run(*words, output=tmp_path / "other", queries=other) == 0
    np.testing.assert_allclose(found(tmp_path / "other")[1], scores[::-1], rtol=1e-4, atol=1e-4)
    assert run(*words, "--seed", "1", output=tmp_path / "third", queries=other) == 2
    assert "option seed: 0 in the checkpoint, 1 requested" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_overwrite_deletes_nothing_that_is_needed_or_before_all_is_checked(run, tmp_path):
    stages = tmp_path / "run" / "stages"

    def held():
        return {path.name: path.read_bytes() for path in stages.iterdir()}

    assert run() == 0
    before = held()
    empty = write(tmp_path / "empty.jsonl", [])
    assert run("--overwrite", train=empty) == 2
    assert run("--overwrite", "--layers", "nothing") == 2
    assert run("--overwrite", "--bases", str(tmp_path / "run"), "--seed", "1") == 2
    assert held() == before
    assert run("--overwrite", "--bases", str(tmp_path / "run"), "--damping", "0.5") == 0
    after = held()
    assert (after["factors"], after["bases"]) == (before["factors"], before["bases"])
    assert after["scores"] != before["scores"]


@pytest.mark.exhaustive
def test_factors_and_queries_within_a_budget_give_the_same_scores(run, tmp_path, capsys):
    assert run("--query-rank", "4") == 0
    assert run("--query-rank", "4", "--memory", "1MB", output=tmp_path / "less") == 0
    scores, less = (found(tmp_path / name)[1] for name in ("run", "less"))
    np.testing.assert_allclose(less, scores, rtol=0, atol=1e-3 * np.abs(scores).max())
    assert run("--memory", "9kB", output=tmp_path / "none") == 2
    assert "--memory 9kB" in capsys.readouterr().err


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "t5"
    folder.mkdir()
    apply_fn, params = jk.from_nnx(EncoderDecoder(PAIRS, rngs=nnx.Rngs(0)))
    save_encoder_decoder(folder, Pretrained(PAIRS, apply_fn, params, byte_tokenizer()))
    return folder


@pytest.mark.exhaustive
def test_an_encoder_decoder_is_scored_on_pairs(folder, tmp_path):
    rows = [{"source": f"number {i}", "target": f"Zahl {i}"} for i in range(6)]
    train = write(tmp_path / "train.jsonl", rows)
    queries = write(tmp_path / "queries.jsonl", rows[2:3])
    output = tmp_path / "run"
    files = ["--train", train, "--queries", queries, "--output", str(output)]
    assert main(["influence", str(folder), *files, *TINY]) == 0
    record, scores = found(output)
    assert scores.shape == (1, 6) and scores.argmax() == 2
    text = record["queries"][0]["helpful"][0]
    assert len(text["tokens"]) == 7 and any(part for _, part in text["tokens"])


@pytest.mark.exhaustive
def test_tokens_are_not_shaded_where_the_layers_are_of_an_encoder(folder, tmp_path):
    rows = [{"source": f"number {i}", "target": f"Zahl {i}"} for i in range(4)]
    train, output = write(tmp_path / "train.jsonl", rows), tmp_path / "run"
    files = ["--train", train, "--queries", train, "--output", str(output)]
    words = ["--layers", r"encoder/.*SelfAttention/q/.*"]
    assert main(["influence", str(folder), *files, *TINY, *words]) == 0
    record, scores = found(output)
    text = record["queries"][0]["helpful"][0]
    assert np.abs(scores).max() > 0 and [part for _, part in text["tokens"]] == [0.0] * 7


@pytest.mark.default(1, slow=2)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--top", "0"), "top must be at least 1, not 0"),
        (("--store-rank", "0"), "store_rank must be at least 1, not 0"),
        (("--store-rank", "2"), "store_rank goes with --store"),
        (("--damping", "-1"), "damping must not be negative"),
        (("--layers", "nothing"), "matches no layer"),
        (("--max-length", "999"), "longer than the model's context, 128 tokens"),
        (("--prefix", "x"), "--prefix is for pairs"),
        (("--bases", "absent"), "--bases absent holds no run with bases"),
        (("--resume", "--overwrite"), "give one of them"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_explained_in_a_line_with_code_2(words, message, run, capsys):
    assert run(*words) == 2
    said = capsys.readouterr().err.replace("\n", " ")
    assert message in said and "Traceback" not in said


def test_texts_that_are_none_are_named(run, tmp_path, capsys):
    empty = write(tmp_path / "empty.jsonl", [])
    blank = write(tmp_path / "blank.jsonl", [QUERIES[0], {"text": ""}])
    late = write(tmp_path / "late.jsonl", [{"prompt": "x" * 40, "completion": "y"}])
    for files, message in (
        ({"train": empty}, "empty.jsonl"),
        ({"queries": empty}, "empty.jsonl"),
        ({"queries": blank}, "blank.jsonl:2"),
        ({"queries": late}, "query 1 has nothing in its loss in the first 32 tokens"),
        ({"train": late}, "nothing of its texts is in the loss"),
        ({"train": str(tmp_path / "no.jsonl")}, "no.jsonl: expected a file at that path"),
    ):
        assert run(**files) == 2
        assert message in capsys.readouterr().err.replace("\n", " ")


PROGRAM = """
import sys
from jaxkfac.jobs.cli import main
from jaxkfac.jobs.cli.influence import _run
from jaxkfac.jobs.cli.influence._run_test import decoder
_run.load_model = lambda _: decoder()
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop", "code"),
    [
        (signal.SIGKILL, -signal.SIGKILL),
        pytest.param(signal.SIGTERM, 128 + signal.SIGTERM, marks=pytest.mark.exhaustive),
        pytest.param(signal.SIGHUP, 128 + signal.SIGHUP, marks=pytest.mark.exhaustive),
    ],
)
def test_a_run_that_was_killed_or_stopped_ends_as_one_that_was_not(run, tmp_path, stop, code):
    assert run() == 0
    files = ["--train", str(tmp_path / "train.jsonl"), "--queries", str(tmp_path / "queries.jsonl")]
    words = ["influence", *files, *TINY, "--output", str(tmp_path / "parts")]
    command = [sys.executable, "-c", PROGRAM, *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (tmp_path / "parts" / "stages" / "bases").exists():
        assert process.poll() is None
    process.send_signal(stop)
    assert process.wait() == code
    subprocess.run([*command, "--resume"], check=True, capture_output=True)
    scores = [(tmp_path / name / "scores.npy").read_bytes() for name in ("run", "parts")]
    assert scores[0] == scores[1]
    shutil.rmtree(tmp_path / "parts")
