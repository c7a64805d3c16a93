"""Ten training scripts as other people write them, each trained by one object at its defaults."""

from tests.scripts import (
    autoencoder,
    characters,
    flows,
    graphs,
    images,
    policy,
    sentences,
    spirals,
    stateful,
    text,
)
from tests.scripts._script import SCRIPTS, end

__all__ = [
    "SCRIPTS",
    "autoencoder",
    "characters",
    "end",
    "flows",
    "graphs",
    "images",
    "policy",
    "sentences",
    "spirals",
    "stateful",
    "text",
]
