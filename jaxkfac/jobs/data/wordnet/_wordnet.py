"""WordNet's words and glosses, embedded: pairs that an encoder-decoder can learn from scratch."""

import lzma
import zlib
from importlib import resources
from typing import NamedTuple

from jaxkfac.files import check_sha256
from jaxkfac.jobs.data.pairs import Pair

WORDNET_SHA256 = "46aa2087887c918784751660ff062b1308ee0fa62b226b0f208604f251330285"
"""Digest of the embedded file."""

KINDS = ("noun", "verb", "adj", "adv")
_HELD_OUT = 25  # one word in this many is held out


class WordGloss(NamedTuple):
    """A word in one of its senses.

    Attributes:
        word: Lower-case letters.
        kind: One of ``KINDS``.
        gloss: Its definition, 12 to 60 characters.
    """

    word: str
    kind: str
    gloss: str


def load_wordnet() -> tuple[WordGloss, ...]:
    """All embedded entries, ordered by kind and word.

    Returns:
        Entries with distinct glosses; ``jaxkfac/jobs/data/wordnet.txt`` names source and licence.

    Raises:
        ValueError: the embedded file does not have the digest ``WORDNET_SHA256``.

    Example:
        >>> next(entry for entry in load_wordnet() if entry.word == "tadpole")
        WordGloss(word='tadpole', kind='noun', gloss='a larval frog or toad')
    """
    content = resources.files("jaxkfac.jobs.data").joinpath("wordnet.tsv.xz").read_bytes()
    check_sha256(content, WORDNET_SHA256, "jaxkfac/jobs/data/wordnet.tsv.xz")
    lines = lzma.decompress(content).decode("ascii").split("\n")
    return tuple(WordGloss(*line.split("\t")) for line in lines)


def wordnet_pairs() -> tuple[list[Pair], list[Pair]]:
    """Words as sources and glosses as targets, for training and validation.

    Returns:
        ``(train, validation)``: all senses of one word in 25 are held out, so no word or gloss is
        in both.

    Example:
        >>> train, validation = wordnet_pairs()
        >>> train[0].source.endswith("(noun)")
        True
    """
    train, validation = [], []
    for word, kind, gloss in load_wordnet():
        held_out = zlib.crc32(word.encode()) % _HELD_OUT == 0
        (validation if held_out else train).append(Pair(f"{word} ({kind})", gloss))
    return train, validation
