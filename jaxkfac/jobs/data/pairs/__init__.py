"""Pairs of texts for an encoder-decoder: records, tokens, batches and scores."""

from jaxkfac.jobs.data.pairs._batches import PairBatches, PairStream, pair_stream
from jaxkfac.jobs.data.pairs._pairs import (
    PAIR_KEYS,
    EncodedPairs,
    Pair,
    PairBatch,
    PairExample,
    encode_pair,
    encode_pairs,
    pair_batch,
    pair_files,
    parse_pair,
    read_pairs,
)
from jaxkfac.jobs.data.pairs._scores import bigram_loss, exact_match, rouge_l, rouge_package

__all__ = [
    "PAIR_KEYS",
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
    "parse_pair",
    "read_pairs",
    "rouge_l",
    "rouge_package",
]
