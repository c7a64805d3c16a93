"""Decompositions in host memory: one after the other, or divided among processes."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array

from jaxkfac._errors import NonFiniteFactorError
from jaxkfac.curvature._layout import EigenBlock
from jaxkfac.curvature._sharding import put_result, result_sharding
from jaxkfac.linalg import HostDType, HostSpectrum, Spectrum, eigh_on_host
from jaxkfac.memory import ProcessGroup, in_equal_shares, whole_here


class DenseMean(NamedTuple):
    """A dense block to decompose, as the mean of its factor."""

    block: EigenBlock
    matrix: Array | np.ndarray


def solve_on_host(means: Sequence[DenseMean], *, vectors: bool, dtype: HostDType) -> list[Spectrum]:
    """The spectra of matrices, where the matrices live.

    Those on devices of several processes are divided among these, one slice of a stack at a time;
    every process calls this with the same ones, in the same order.

    Raises:
        NonFiniteFactorError: naming the layer; in each of the processes.
        ProcessesDisagreeError: another process failed, or has other matrices.
    """
    groups: dict[ProcessGroup, list[int]] = {}
    for i, mean in enumerate(means):
        matrix = mean.matrix
        group = None if isinstance(matrix, np.ndarray) else ProcessGroup.of(matrix.sharding)
        if group is not None:
            groups.setdefault(group, []).append(i)
    solved: dict[int, HostSpectrum] = {}
    for group, numbers in groups.items():
        shared = [means[i] for i in numbers]
        solved |= zip(numbers, _shared(shared, group, dtype), strict=True)
    spectra = []
    for i, mean in enumerate(means):
        name, matrix = mean.block.name, mean.matrix
        found = solved.pop(i, None) or eigh_on_host(matrix, name=name, dtype=dtype)
        where = result_sharding(matrix)
        assert found.vectors is not None
        columns = put_result(found.vectors, where, gives_up=True) if vectors else None
        spectra.append(Spectrum(put_result(found.values, where), columns))
    return spectra


def _shared(
    means: Sequence[DenseMean], group: ProcessGroup, dtype: HostDType
) -> list[HostSpectrum]:
    parts = [(i, at) for i, mean in enumerate(means) for at in np.ndindex(mean.block.source.stack)]
    costs = [means[i].block.size ** 3 for i, _ in parts]
    owners = dict(zip(parts, in_equal_shares(costs, len(group.devices)), strict=True))
    failure, found = None, []
    for i, (block, matrix) in enumerate(means):
        here = np.asarray(whole_here(matrix))
        values, vectors = np.zeros(here.shape[:-1], here.dtype), np.zeros_like(here)
        found.append((values, vectors))
        own = [at for j, at in parts if j == i and owners[j, at] == group.rank]
        for at in own if failure is None else []:
            name = block.name + (f" at stack index {at}" if at else "")
            try:
                values[at], vectors[at] = eigh_on_host(here[at], name=name, dtype=dtype)
            except Exception as error:
                failure = error
                break
    doing = f"the decomposition of {len(means)} factors"
    about = repr((dtype, [(block.place, matrix.shape) for block, matrix in means]))
    of_matrix = isinstance(failure, NonFiniteFactorError)
    group.agree(doing, about, None if of_matrix else failure)
    for text in group.told(str(failure) if of_matrix else ""):
        if text:
            raise NonFiniteFactorError(text)
    return [HostSpectrum(*(group.combined(part) for part in whole)) for whole in found]
