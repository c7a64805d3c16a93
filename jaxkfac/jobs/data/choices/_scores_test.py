"""Batched, padded scores against one call for each choice."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.jobs.data.choices import (
    VARIANTS,
    Question,
    compare,
    read_questions,
    score_choices,
    target_log_likelihoods,
)
from jaxkfac.jobs.data.choices._questions import parse_question
from jaxkfac.jobs.data.choices._scores import wilson_interval
from jaxkfac.jobs.data.text._encode_test import Letters

QUESTIONS = (
    Question("1", "iron is", ("Fe", "tin", "a metal of the earth"), ("A", "B", "C"), 0),
    Question("2", "gold?", ("tin", "é"), ("1", "2"), 1),
    Question("3", "x", ("Fe", "q", "rs", "tuv"), tuple("ABCD"), 2),
)
TABLE = np.random.default_rng(0).normal(size=(256, 256)).astype(np.float32)


def logits(ids):
    """Depends on a token and on all before it, so that a neighbour in the row would show."""
    return np.cumsum(TABLE[ids], axis=-2) / (1 + np.arange(len(ids), dtype=np.float32)[:, None])


def log_likelihoods(batch):
    out = np.zeros((*batch.ids.shape, 256), np.float32)
    for row, segments in enumerate(batch.segments):
        for segment in set(segments[segments > 0]):
            own = segments == segment
            assert batch.positions[row, own].tolist() == list(range(own.sum()))
            out[row, own] = logits(batch.ids[row, own])
    return target_log_likelihoods(jnp.asarray(out), jnp.asarray(batch.targets))


def brute_force(prompt, choice):
    """The chain rule, token by token."""
    total = 0.0
    for i, token in enumerate(choice):
        read = np.array([*prompt, *choice[:i]])
        out = logits(read)[-1].astype(np.float64)
        total += out[token] - np.log(np.exp(out).sum())
    return total


def scores(**options):
    return score_choices(log_likelihoods, Letters(), QUESTIONS, max_length=60, **options)


@pytest.mark.parametrize("style", ["chat", "plain"])
def test_the_scores_are_those_of_one_choice_at_a_time(style):
    found = scores(style=style, batch_size=4)
    letters = Letters()
    for question, sums, bare in zip(QUESTIONS, found.sums, found.bare):
        if style == "chat":
            prompt, alone = (
                letters.chat([{"role": "user", "content": x}], add_generation_prompt=True)
                for x in (question.stem, "Answer:")
            )
            answers = [letters.encode(c) for c in question.choices]
        else:
            prompt, alone = letters.encode(f"{question.stem}\nAnswer:"), letters.encode("Answer:")
            answers = [letters.encode(f" {c}") for c in question.choices]
        np.testing.assert_allclose(sums, [brute_force(prompt, a) for a in answers], rtol=1e-5)
        np.testing.assert_allclose(bare, [brute_force(alone, a) for a in answers], rtol=1e-5)


def test_variants_divide_by_tokens_and_bytes_and_subtract_the_bare_likelihood():
    found = scores()
    sums, bare = found.sums[1], found.bare[1]
    np.testing.assert_allclose(found.of("sum")[1], sums)
    np.testing.assert_allclose(found.of("per_token")[1], sums / [3, 1])
    np.testing.assert_allclose(found.of("per_byte")[1], sums / [3, 2])
    np.testing.assert_allclose(found.of("pmi")[1], sums - bare)


@pytest.mark.slow
def test_the_batch_size_does_not_matter():
    for one, other in zip(scores(batch_size=1).sums, scores(batch_size=100).sums):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_accuracy_counts_the_questions_whose_right_choice_scores_highest():
    found = scores()
    for variant in VARIANTS:
        right = [int(np.argmax(x)) == q.answer for x, q in zip(found.of(variant), QUESTIONS)]
        assert found.correct(variant).tolist() == right
        assert found.accuracy(variant).value == sum(right) / 3


def test_bfloat16_logits_are_normalised_in_float32():
    out = target_log_likelihoods(jnp.zeros((1, 3, 50), jnp.bfloat16), jnp.zeros((1, 3), jnp.int32))
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, -math.log(50), rtol=1e-6)


def test_a_question_longer_than_the_context_is_named():
    with pytest.raises(ValueError, match=r"question '1' takes .* tokens .*at most 12 fit"):
        score_choices(log_likelihoods, Letters(), QUESTIONS, max_length=12)
    with pytest.raises(ValueError, match="no questions"):
        score_choices(log_likelihoods, Letters(), [], max_length=12)


def question(**changes):
    choices = [{"text": "iron", "label": "A"}, {"text": "tin", "label": "B"}]
    return {"id": "7", "question": {"stem": "Fe", "choices": choices}, "answerKey": "A", **changes}


@pytest.mark.parametrize(
    "plain",
    [
        {"question_stem": "Fe", "choices": {"text": ["lead", "iron"], "label": ["A", "B"]},
         "answerKey": "B", "id": "7"},
        {"question": "Fe", "choices": {"text": ["lead", "iron"], "label": ["A", "B"]},
         "answerKey": "B", "id": 7},
        {"question": "Fe", "choices": ["lead", "iron"], "answer": 1, "id": "7"},
        {"question": "Fe", "choices": ["lead", "iron"], "answer": "B", "id": "7"},
    ],
)  # fmt: skip
def test_questions_in_the_forms_of_the_datasets_library(plain):
    assert parse_question(plain) == Question("7", "Fe", ("lead", "iron"), ("A", "B"), 1)


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"question": "Fe", "choices": ["a", "b"], "answer": -1}, "'Fe': the answer key -1"),
        (
            {"question": "Fe", "choices": {"text": ["a", "b"], "label": ["A"]}, "answerKey": "A"},
            "two or more labels, one for each choice",
        ),
        ({"question": "Fe", "choices": {"text": ["a", "b"]}, "answerKey": "A"}, "'label'"),
    ],
)
def test_such_a_question_that_is_none_says_what_is_wrong(plain, message):
    with pytest.raises(ValueError, match=message):
        parse_question(plain)


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        (question(answerKey="E"), r"question '7': the answer key 'E' is none of .*'A', 'B'"),
        ({"id": "7"}, "the key 'question' is missing; expected"),
        (question(question={"stem": "Fe", "choices": [{"text": "a", "label": "A"}]}), "two or"),
        (question(question={"stem": "", "choices": []}), "non-empty"),
        (
            question(question={"stem": "s", "choices": [{"text": "a", "label": "A"}] * 2}),
            "two or more labels",
        ),
        ("words", "string indices must be integers"),
    ],
)
def test_a_bad_question_is_named_with_its_file_and_line(plain, message, tmp_path):
    path = tmp_path / "test.jsonl"
    path.write_text(json.dumps(question()) + "\n" + json.dumps(plain))
    with pytest.raises(ValueError, match=f"test.jsonl:2: .*{message}"):
        read_questions(path)
    assert parse_question(question()).answer == 0


def test_wilsons_interval_is_the_published_one():
    # Newcombe, Two-sided confidence intervals for the single proportion, 1998, table I.
    for right, count, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605)):
        interval = wilson_interval(right, count)
        assert interval.low == pytest.approx(low, abs=5e-5)
        assert interval.high == pytest.approx(high, abs=5e-5)
    assert wilson_interval(0, 5).low == 0.0
    with pytest.raises(ValueError, match="3 of 2"):
        wilson_interval(3, 2)


def test_mcnemars_test_is_the_binomial_tail_of_the_changed_answers():
    before = np.array([True] * 3 + [False] * 9)
    after = np.array([False] + [True] * 11)
    found = compare(before, after)
    tail = sum(math.comb(10, k) for k in (0, 1)) / 2**10
    assert (found.gained, found.lost) == (9, 1)
    assert found.p_value == pytest.approx(2 * tail)
    assert compare(before, before).p_value == 1.0
