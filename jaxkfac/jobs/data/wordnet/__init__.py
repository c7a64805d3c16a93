"""WordNet's words and glosses, embedded: text pairs to learn from scratch."""

from jaxkfac.jobs.data.wordnet._wordnet import (
    KINDS,
    WORDNET_SHA256,
    WordGloss,
    load_wordnet,
    wordnet_pairs,
)

__all__ = ["KINDS", "WORDNET_SHA256", "WordGloss", "load_wordnet", "wordnet_pairs"]
