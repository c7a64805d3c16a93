"""Several processes: each decomposes a share of a refresh, and they exchange the results."""

from collections.abc import Callable, Sequence

import numpy as np

from jaxkfac._errors import NonFiniteFactorError
from jaxkfac.curvature._layout import EigenBlock, Place
from jaxkfac.curvature._sharding import UNCOMMITTED, ResultSharding
from jaxkfac.linalg import HostSpectrum
from jaxkfac.memory import ProcessGroup, in_equal_shares

_Index = tuple[int, ...]


class Shares:
    """Who decomposes what.

    The matrices of factors that lie on devices of several processes are divided among these, one
    slice of a stack at a time, by the cubes of their sizes. Everything else each process does
    itself: diagonals, and factors of its own.

    Args:
        blocks: Of a refresh, in the same order in every process.
        shardings: Where the results go.
    """

    def __init__(
        self, blocks: Sequence[EigenBlock], shardings: dict[Place, ResultSharding]
    ) -> None:
        self._groups: dict[ProcessGroup, list[EigenBlock]] = {}
        self._of: dict[Place, ProcessGroup] = {}
        for block in blocks:
            where = shardings.get(block.source.place, UNCOMMITTED).sharding
            group = ProcessGroup.of(where) if block.source.dense else None
            if group is not None:
                self._groups.setdefault(group, []).append(block)
                self._of[block.place] = group
        self._owners: dict[tuple[Place, _Index], int] = {}
        for group, shared in self._groups.items():
            parts = [(b, index) for b in shared for index in np.ndindex(b.source.stack)]
            owners = in_equal_shares([b.size**3 for b, _ in parts], len(group.devices))
            for (block, index), owner in zip(parts, owners, strict=True):
                self._owners[block.place, index] = owner

    def __bool__(self) -> bool:
        """Whether anything is shared."""
        return bool(self._groups)

    def __contains__(self, block: EigenBlock) -> bool:
        """Whether a block is shared."""
        return block.place in self._of

    def of_this_process(self, block: EigenBlock) -> list[_Index]:
        """The slices of a block that this process decomposes."""
        indices = list(np.ndindex(block.source.stack))
        group = self._of.get(block.place)
        if group is None:
            return indices
        return [index for index in indices if self._owners[block.place, index] == group.rank]

    def exchange(
        self,
        doing: str,
        about: str,
        error: BaseException | None,
        results: dict[Place, HostSpectrum],
        failures: dict[Place, NonFiniteFactorError],
        zeros: Callable[[EigenBlock], HostSpectrum],
    ) -> None:
        """Complete results and failures by those of the other processes.

        Args:
            doing: For errors.
            about: What must be the same in every process.
            error: What this process fails with; nothing is exchanged then.
            results: Whole arrays, zero where they are not of this process.
            failures: A matrix that failed in one process has failed in all.
            zeros: Arrays for a block of which this process has nothing.

        Raises:
            ProcessesDisagreeError: another process failed, or does something else.
            BaseException: ``error``.
        """
        for group, blocks in self._groups.items():
            group.agree(doing, about, error)
            failed = np.array([block.place in failures for block in blocks], np.uint8)
            anywhere = group.gathered(failed).max(0).tolist()
            for block, has_failed in zip(blocks, anywhere, strict=True):
                place = block.place
                if has_failed:
                    results.pop(place, None)
                    texts = group.told(str(failures.get(place, "")))
                    failures[place] = NonFiniteFactorError(next(filter(None, texts)))
                    continue
                whole = results.get(place) or zeros(block)
                for part in whole:
                    if part is not None:
                        part[...] = group.combined(part)
                results[place] = whole
