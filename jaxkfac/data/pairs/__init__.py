"""Pairs of texts for an encoder-decoder: records, tokens, batches and scores."""

from jaxkfac.data.pairs._batches import PairBatches
from jaxkfac.data.pairs._bigram import bigram_loss
from jaxkfac.data.pairs._encode import EncodedPairs, PairExample, encode_pair, encode_pairs
from jaxkfac.data.pairs._pairs import PAIR_KEYS, Pair, pair_files, parse_pair, read_pairs
from jaxkfac.data.pairs._rows import PairBatch, pair_batch
from jaxkfac.data.pairs._scores import exact_match, rouge_l, rouge_package
from jaxkfac.data.pairs._stream import PairStream, pair_stream

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
