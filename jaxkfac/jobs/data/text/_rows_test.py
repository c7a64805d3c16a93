import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkfac.jobs.data.text import Example, TokenBatches, bucket_lengths, pack, token_batch


def example(*ids, learnt=None):
    marks = np.ones(len(ids), bool) if learnt is None else np.asarray(learnt, bool)
    marks[0] = False
    return Example(np.array(ids, np.int32), marks)


def several(count, seed=0):
    rng = np.random.default_rng(seed)
    return [example(*rng.integers(1, 99, rng.integers(2, 12))) for _ in range(count)]


def test_each_target_is_the_next_token_of_its_own_example():
    first, second = example(5, 6, 7, learnt=[0, 0, 1]), example(8, 9)
    batch = token_batch([[first, second], [second]], length=4, pad_id=0)
    assert batch.ids.tolist() == [[5, 6, 8, 0], [8, 0, 0, 0]]
    assert batch.targets.tolist() == [[6, 7, 9, 0], [9, 0, 0, 0]]
    assert batch.mask.tolist() == [[False, True, True, False], [True, False, False, False]]
    assert batch.positions.tolist() == [[0, 1, 0, 0], [0, 0, 0, 0]]
    assert batch.segments.tolist() == [[1, 1, 2, 0], [1, 0, 0, 0]]
    assert (batch.num_tokens, batch.num_terms, batch.num_examples) == (4, 3, 3)


def test_a_row_that_is_too_short_is_refused():
    with pytest.raises(ValueError, match="need 3 tokens, and it has 2"):
        token_batch([[example(1, 2, 3, 4)]], length=2, pad_id=0)


@given(st.lists(st.integers(1, 9), max_size=40), st.integers(9, 20))
def test_packing_keeps_every_example_once_and_no_row_too_long(lengths, capacity):
    rows = pack(lengths, capacity)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= capacity for row in rows)
    # First fit: no two rows could be one.
    sums = sorted(sum(lengths[i] for i in row) for row in rows)
    assert len(sums) < 2 or sums[0] + sums[1] > capacity


def test_an_example_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="takes 5 tokens, and a row has 4"):
        pack([1, 5], 4)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=50), st.integers(1, 5))
def test_bucket_lengths_are_few_and_fit_the_longest(lengths, count):
    found = bucket_lengths(lengths, count)
    assert len(found) <= count and list(found) == sorted(set(found))
    assert found[-1] - 8 < max(lengths) <= found[-1]


@pytest.mark.parametrize("packed", [False, True])
def test_an_epoch_reads_every_row_once_and_a_step_is_a_pure_function(packed):
    examples = several(24)
    if packed:
        batches = TokenBatches.packed(examples, batch_size=2, length=16, pad_id=0, seed=3)
    else:
        batches = TokenBatches.padded(examples, batch_size=2, pad_id=0, seed=3, num_lengths=3)
    epoch = [batches.at(i) for i in range(batches.per_epoch)]
    left_out = len(batches.rows) % 2
    tokens = sum(len(e.ids) - 1 for e in examples)
    assert tokens - 16 * left_out <= sum(b.num_tokens for b in epoch) <= tokens
    assert {b.ids.shape[1] for b in epoch} <= set(batches.lengths)
    step = 5 * batches.per_epoch + 1
    for one, other in zip(batches.at(step), batches.at(step)):
        np.testing.assert_array_equal(one, other)
    order = [b.ids.tolist() for b in epoch]
    assert order != [batches.at(batches.per_epoch + i).ids.tolist() for i in range(len(epoch))]


def test_in_order_gives_every_row_once_and_learns_nothing_from_the_filler():
    examples = several(5)
    batches = list(TokenBatches.padded(examples, batch_size=3, pad_id=0).in_order())
    assert [b.ids.shape[0] for b in batches] == [3, 3]
    assert sum(b.num_terms for b in batches) == sum(int(e.learnt.sum()) for e in examples)
    assert not batches[1].mask[2].any()


def test_fewer_rows_than_a_batch_are_refused():
    with pytest.raises(ValueError, match="batch_size must lie in 1 .. 2"):
        TokenBatches.padded(several(2), batch_size=3, pad_id=0)
