"""Clipping the eigenvalues of a factor, as its document had it."""

import torch


def clip_and_rebuild(
    matrix: torch.Tensor, max_condition: float, *, rebuild_on_host: bool
) -> torch.Tensor:
    r"""Decompose on the matrix's device, clip, and form $(Q \Lambda) Q^\top$ there or on the CPU.

    Before: ``rebuild_on_host=False``. After: ``True``, which moves $Q$ and $\lambda$ of a CUDA
    matrix to the CPU and empties the cache before the product; a matrix on the CPU takes the same
    way with either. :func:`torch_ref.linalg.stabilize` asks first whether the matrix fits, and
    leaves the result on the CPU.

    Claims: ``clipping/rebuild-on-device``; ``clipping/transpose``, that $Q^\top$ is a copy.

    Args:
        matrix: Symmetric positive semi-definite ``(n, n)``.
        max_condition: $\kappa \ge 1$; eigenvalues below $\lambda_{\max} / \kappa$ are raised to it.
        rebuild_on_host: Where the product is formed.

    Returns:
        ``(n, n)``, on the device and in the dtype of ``matrix``.
    """
    values, vectors = torch.linalg.eigh(matrix.to(torch.promote_types(matrix.dtype, torch.float32)))
    clipped = values.clamp(min=values.max() / max_condition)
    if rebuild_on_host and vectors.is_cuda:
        vectors, clipped = vectors.cpu(), clipped.cpu()
        del values
        torch.cuda.empty_cache()
    scaled = vectors.mul(clipped)
    return scaled.matmul(vectors.t()).to(matrix)
