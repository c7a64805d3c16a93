"""Pairs of texts for an encoder-decoder: records, tokens, batches and scores."""

from jaxkfac.jobs.data.pairs._batches import PairBatches, PairStream, pair_stream
from jaxkfac.jobs.data.pairs._pairs import (
    EncodedPairs,
    Pair,
    PairBatch,
    PairExample,
    encode_pair,
    encode_pairs,
    pair_batch,
    pair_files,
    read_pairs,
)
from jaxkfac.jobs.data.pairs._scores import bigram_loss, exact_match, rouge_l, rouge_package

__all__ = [
    "EncodedPairs",
    "Pair",
    "PairBatch",
    "PairBatches",
    "PairExample",
    "PairStream",
    "bigram_loss",
    "encode_pair",
    "encode_pairs",
    "exact_match",
    "pair_batch",
    "pair_files",
    "pair_stream",
    "read_pairs",
    "rouge_l",
    "rouge_package",
]
