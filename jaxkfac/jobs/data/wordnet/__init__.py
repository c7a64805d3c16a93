"""WordNet's words and glosses, embedded: text pairs to learn from scratch."""

from jaxkfac.jobs.data.wordnet._wordnet import (
    KINDS,
    WordGloss,
    load_wordnet,
    wordnet_pairs,
)

__all__ = ["KINDS", "WordGloss", "load_wordnet", "wordnet_pairs"]
