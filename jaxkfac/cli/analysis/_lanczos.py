"""Lanczos whose vectors lie on disk: two of them are in memory, however many there are."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxkfac._errors import NonFiniteFactorError
from jaxkfac.cli.analysis._files import Folder

_CHUNK = 1 << 16
_EPS = float(np.finfo(np.float32).eps)  # of the vectors
_STATE = "lanczos/state.json"


class ExactSpectrum(NamedTuple):
    """The largest eigenvalues of the exact Fisher.

    Attributes:
        eigenvalues: Descending.
        error_bounds: Within this distance of each lies an eigenvalue.
        steps: Products that were made.
    """

    eigenvalues: list[float]
    error_bounds: list[float]
    steps: int


def lanczos(
    product: Callable[[np.ndarray], np.ndarray],
    size: int,
    folder: Folder,
    *,
    count: int,
    steps: int,
    seed: int,
    eps: float,
    advance: Callable[[int, str], None],
) -> ExactSpectrum:
    r"""Lanczos with full reorthogonalisation; a run that goes on makes the products that it lacks.

    After $k$ steps $A Q = Q T + \beta q e_k^\top$: for an eigenpair $T s = \theta s$ an eigenvalue
    of $A$ lies within $\beta |s_k|$ of $\theta$. See :func:`jaxkfac.spectrum`, which keeps the
    vectors on the device.

    Args:
        product: With the operator, of flat float32 vectors.
        size: Their length.
        folder: Where vectors are kept.
        count: How many eigenvalues are returned, at most.
        steps: Products, at most.
        seed: Of the first vector.
        eps: Of the type in which products are made, relative.
        advance: Told how many products are made.

    Raises:
        NonFiniteFactorError: a product is not finite.

    Memory:
        Two vectors beside what the product takes.
    """
    state = {"alphas": [], "betas": []}
    if folder.has(_STATE):
        state = folder.read(_STATE)
    else:
        first = np.random.Generator(np.random.Philox(seed)).standard_normal(size, np.float32)
        first /= np.float32(np.sqrt(_dot(first, first)))
        folder.save_vector(0, first)
        folder.write(_STATE, state)
        del first
    alphas, betas = state["alphas"], state["betas"]
    while len(alphas) < min(steps, size) and not _is_exhausted(alphas, betas, eps):
        done = len(alphas)
        rest = product(folder.load_vector(done))
        if not np.isfinite(_dot(rest, rest)):
            raise NonFiniteFactorError(
                f"product {done + 1} of Lanczos with the exact Fisher is not finite: the model "
                "overflows on the first texts"
            )
        alpha = 0.0
        for again in (False, True):  # the second time takes away what rounding has left
            for number in range(done, -1, -1):
                vector = folder.load_vector(number)
                along = _dot(vector, rest)
                vector *= np.float32(along)
                rest -= vector
                if number == done and not again:
                    alpha = along
        beta = float(np.sqrt(_dot(rest, rest)))
        if beta > 0:
            rest /= np.float32(beta)
        folder.save_vector(done + 1, rest)
        alphas, betas = [*alphas, alpha], [*betas, beta]
        folder.write(_STATE, {"alphas": alphas, "betas": betas})
        del rest
        advance(len(alphas), f"largest {_ritz(alphas, betas, eps)[0][0]:.4g}")
    values, bounds = _ritz(alphas, betas, eps)
    return ExactSpectrum(values[:count], bounds[:count], len(alphas))


def _ritz(alphas: list[float], betas: list[float], eps: float) -> tuple[list[float], list[float]]:
    matrix = np.diag(alphas) + np.diag(betas[:-1], 1) + np.diag(betas[:-1], -1)
    values, vectors = np.linalg.eigh(matrix)
    rounding = 10 * len(alphas) * max(eps, _EPS) * float(np.abs(values).max())
    bounds = betas[-1] * np.abs(vectors[-1]) + rounding
    return values[::-1].tolist(), bounds[::-1].tolist()


def _is_exhausted(alphas: list[float], betas: list[float], eps: float) -> bool:
    """Whether nothing but rounding is left of the Krylov space."""
    if not betas:
        return False
    # The sums of float32 lose more than a step of it, a product's rounding at most about one.
    return betas[-1] <= max(16 * _EPS, eps) * max(map(abs, alphas))


def _dot(one: np.ndarray, other: np.ndarray) -> float:
    """In double precision from piece to piece: one sum of 1e8 terms in float32 loses digits."""
    return sum(
        float(np.dot(one[at : at + _CHUNK], other[at : at + _CHUNK]))
        for at in range(0, len(one), _CHUNK)
    )
