"""Pairs as tokens, as rows and as batches, and what they are measured by."""

import numpy as np
import pytest

from jaxkfac.jobs.data.pairs import (
    Pair,
    PairBatches,
    PairExample,
    bigram_loss,
    encode_pair,
    encode_pairs,
    exact_match,
    pair_batch,
    rouge_l,
)


class Letters:
    """Ids are characters; 1 ends a text where it is asked for."""

    eos_ids, pad_id = (1,), 0

    def __init__(self, *, ends=True):
        self.ends = ends

    def encode(self, text, **_):
        return [ord(c) for c in text] + [1] * self.ends

    def decode(self, ids):
        return "".join(map(chr, ids))

    def chat(self, messages, **_):
        return []


def ids(text):
    return [ord(c) for c in text]


@pytest.mark.parametrize("ends", [True, False])
def test_a_target_ends_and_a_source_that_is_cut_ends_as_it_did(ends):
    lengths = {"max_source_length": 3, "max_target_length": 3}
    short, *cut = encode_pair(Pair("a", "bc"), Letters(ends=ends), **lengths)
    assert short.source.tolist() == [*ids("a"), *[1] * ends]
    assert short.target.tolist() == [*ids("bc"), 1] and cut == [False, False]
    long, *cut = encode_pair(Pair("abcd", "efgh"), Letters(ends=ends), **lengths)
    assert long.source.tolist() == ([*ids("ab"), 1] if ends else ids("abc"))
    assert long.target.tolist() == ids("efg") and cut == [True, True]


def test_what_is_cut_is_counted_and_said():
    pairs = [Pair("abcdef", "x"), Pair("a", "bcdefg"), Pair("a", "b")]
    found = encode_pairs(pairs, Letters(), max_source_length=4, max_target_length=4)
    assert (found.cut_sources, found.cut_targets, found.num_learnt) == (1, 1, 2 + 4 + 2)
    assert str(found).endswith("1 sources and 1 targets cut")
    with pytest.raises(ValueError, match="max_target_length=1: expected at least 2"):
        encode_pairs(pairs, Letters(), max_source_length=4, max_target_length=1)
    with pytest.raises(ValueError, match="pair 2: the source '' has no tokens"):
        encode_pairs(
            [pairs[0], Pair("", "x")],
            Letters(ends=False),
            max_source_length=4,
            max_target_length=4,
        )


def test_the_decoder_reads_the_target_one_token_late_and_nothing_behind_it():
    examples = [
        PairExample(np.array([5, 6, 1]), np.array([7, 1])),
        PairExample(np.array([8, 1]), np.array([9, 9, 9, 1])),
        PairExample(np.array([8, 1]), np.zeros(0, np.int32)),
    ]
    batch = pair_batch(examples, source_length=3, target_length=4, pad_id=0, start_id=3)
    assert batch.source.tolist() == [[5, 6, 1], [8, 1, 0], [8, 1, 0]]
    assert batch.source_mask.tolist() == [[True] * 3, *[[True, True, False]] * 2]
    assert batch.decoder_inputs.tolist() == [[3, 7, 0, 0], [3, 9, 9, 9], [3, 0, 0, 0]]
    assert batch.targets.tolist() == [[7, 1, 0, 0], [9, 9, 9, 1], [0] * 4]
    assert batch.mask.sum(1).tolist() == [2, 4, 0]
    assert (batch.num_tokens, batch.num_examples, batch.num_terms) == (7 + 6, 2, 6)
    with pytest.raises(ValueError, match="a source has 3 tokens, and its row 2"):
        pair_batch(examples, source_length=2, target_length=4, pad_id=0, start_id=0)


def test_an_epoch_reads_each_pair_once_in_the_shortest_rows_that_fit():
    lengths = np.arange(1, 13)
    examples = [PairExample(np.full(n, n), np.full(2 * n, n)) for n in lengths]
    batches = PairBatches.padded(examples, batch_size=2, pad_id=0, start_id=0, num_lengths=2)
    assert (batches.source_lengths, batches.lengths) == ((8, 16), (16, 24))
    epoch = [batches.at(step) for step in range(batches.per_epoch)]
    assert sorted(int(row[0]) for batch in epoch for row in batch.source) == lengths.tolist()
    for batch in epoch:
        longest = int(batch.source.max())
        assert batch.source.shape[1] == (8 if longest <= 8 else 16)
        assert batch.targets.shape[1] == (16 if longest <= 8 else 24)
    again = PairBatches.padded(examples, batch_size=2, pad_id=0, start_id=0, num_lengths=2)
    np.testing.assert_array_equal(again.at(100).source, batches.at(100).source)


def test_an_evaluation_reads_every_pair_once_and_learns_nothing_of_what_fills_it():
    examples = [PairExample(np.full(2, n), np.full(n, n)) for n in range(1, 6)]
    batches = list(PairBatches.padded(examples, batch_size=3, pad_id=0, start_id=0).in_order())
    assert [batch.num_terms for batch in batches] == [1 + 2 + 3, 4 + 5]
    assert [batch.num_examples for batch in batches] == [3, 2]


def test_bigram_loss_is_that_of_counts_written_out():
    train = [np.array([2, 3, 1]), np.array([2, 2, 1]), np.zeros(0, np.int64)]
    held_out = [np.array([2, 3, 3])]
    unigram = np.array([0, 2, 3, 1]) + 1.0
    unigram /= unigram.sum()
    # (count of the pair, count of the token before it); the start is before both targets
    pairs = [((2, 2), 2), ((1, 3), 3), ((0, 1), 3)]
    expected = [-np.log((n + 4 * unigram[j]) / (total + 4)) for (n, total), j in pairs]
    found = bigram_loss(train, held_out, vocabulary=4)
    assert found == pytest.approx(np.mean(expected), rel=1e-12)
    with pytest.raises(ValueError, match="at least one token"):
        bigram_loss(train, [], vocabulary=4)
    with pytest.raises(ValueError, match=r"ids run from 1 to 3, not in \[0, 3\)"):
        bigram_loss(train, held_out, vocabulary=3)


def test_its_probabilities_of_all_tokens_sum_to_one():
    train = [np.array([2, 3, 1]), np.array([0, 2])]
    for first in range(4):
        # the loss of a pair, less that of its first token alone, is that of the second
        alone = bigram_loss(train, [np.array([first])], vocabulary=4)
        both = [2 * bigram_loss(train, [np.array([first, j])], vocabulary=4) for j in range(4)]
        assert np.exp(alone - np.array(both)).sum() == pytest.approx(1, rel=1e-12)


def test_rouge_l_is_the_packages():
    pytest.importorskip("rouge_score")
    found = rouge_l(["the cat sat", "x"], ["the cat was sitting", "a dog"])
    # two words of three and of four in common; none
    assert found == pytest.approx((2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4)) / 2)


def test_as_many_answers_as_targets_are_scored():
    assert exact_match(["a b", "c", "D"], [" a b\n", "d", "d"]) == pytest.approx(1 / 3)
    for score in (exact_match, rouge_l):
        with pytest.raises(ValueError, match="1 answers and 2 targets"):
            score(["a"], ["a", "b"])
