"""Episodes: a few images of a few classes to learn from, and others to be asked about."""

import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int

from jaxkfac._errors import at_least_one
from jaxkfac.jobs.data.few_shot._class_images import ClassImages


class Episode(NamedTuple):
    """Some episodes, on the host or on a device.

    Attributes:
        support: ``(episodes, n_way, k_shot, height, width, channels)``, in [-1, 1].
        query: ``(episodes, queries, height, width, channels)``, likewise; class by class, with
            ``queries = n_way * n_query``.
        targets: ``(episodes, queries)``, which of the ``n_way`` classes.
    """

    support: Float[np.ndarray | Array, "episodes n_way k_shot height width channels"]
    query: Float[np.ndarray | Array, "episodes queries height width channels"]
    targets: Int[np.ndarray | Array, "episodes queries"]


@dataclasses.dataclass(frozen=True)
class Episodes:
    """Episodes without end, each a pure function of the seed and of its number.

    So a run resumes from a number alone, and ``n`` micro-batches of one episode are the episodes of
    one batch of ``n``.

    Attributes:
        classes: What is drawn from.
        n_way: Classes of an episode.
        k_shot: Images of each class to learn from.
        n_query: Further images of each class to be asked about.
        seed: Of the episodes.

    Raises:
        ValueError: fewer classes than ``n_way``, or a class of fewer than ``k_shot + n_query``
            images; it is named, with how many it has.

    Example:
        >>> from jaxkfac.jobs.data.few_shot import load_glyphs
        >>> episodes = Episodes(load_glyphs().novel, n_way=5, k_shot=1, n_query=3)
        >>> support, query, targets = episodes.at(0)
        >>> support.shape, query.shape, targets.shape
        ((1, 5, 1, 28, 28, 1), (1, 15, 28, 28, 1), (1, 15))
    """

    classes: ClassImages
    n_way: int = 5
    k_shot: int = 5
    n_query: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        at_least_one(n_way=self.n_way, k_shot=self.k_shot, n_query=self.n_query)
        source, images = self.classes
        if len(images) < self.n_way:
            raise ValueError(f"n_way={self.n_way}: {source} has {len(images)} classes")
        needed = self.k_shot + self.n_query
        few = {name: len(found) for name, found in images.items() if len(found) < needed}
        if few:
            shown = ", ".join(f"{name!r} has {number}" for name, number in sorted(few.items())[:5])
            more = f" and {len(few) - 5} more classes" if len(few) > 5 else ""
            raise ValueError(
                f"{source}: the class {shown}{more}, but an episode needs {needed} images of each "
                f"({self.k_shot} to learn from and {self.n_query} to ask about); lower n_query or "
                "k_shot, or leave the class out"
            )

    def at(self, number: int, count: int = 1) -> Episode:
        """Episodes ``number`` to ``number + count - 1``, the first axis of each array."""
        at_least_one(count=count)
        if number < 0:
            raise ValueError(f"number={number}: expected at least 0")
        drawn = [self._draw(number + i) for i in range(count)]
        support, query = (np.stack(part) for part in zip(*drawn, strict=True))
        targets = np.repeat(np.arange(self.n_way, dtype=np.int32), self.n_query)
        return Episode(support, query, np.tile(targets, (count, 1)))

    def _draw(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.Generator(np.random.Philox(key=[self.seed, number]))
        names = sorted(self.classes.images)
        rows = []
        for i in rng.permutation(len(names))[: self.n_way]:
            images = self.classes.images[names[i]]
            rows.append(images[rng.permutation(len(images))[: self.k_shot + self.n_query]])
        pixels = np.stack(rows).astype(np.float32) / np.float32(127.5) - np.float32(1)
        support, query = np.split(pixels, [self.k_shot], axis=1)
        return support, query.reshape(-1, *query.shape[2:])
