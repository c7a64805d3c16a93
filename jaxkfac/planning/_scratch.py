"""Scratch of convolutions: what no compiler sees, from a formula."""

import math
from collections.abc import Iterator
from typing import Any

from jaxkfac.interception import body_of, call_kind


def convolution_scratch(jaxpr: Any) -> int:
    """Bytes of the patches of the largest convolution: what an explicit product would read.

    cuDNN chooses among algorithms when it runs. ``IMPLICIT_GEMM`` takes nothing,
    ``IMPLICIT_PRECOMP_GEMM`` some indices, and ``GEMM`` the matrix of its input's patches,
    ``outputs * window * input features`` elements. For those by Fourier and Winograd transforms
    no size is stated.

    References:
        NVIDIA, cuDNN documentation, ``cudnnConvolutionFwdAlgo_t``.
    """
    return max(map(_patch_bytes, _convolutions(jaxpr)), default=0)


def _convolutions(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "conv_general_dilated":
            yield eqn
        elif call_kind(eqn) in ("jit", "checkpoint", "custom", "scan", "shard_map"):
            yield from _convolutions(body_of(eqn)[0])


def _patch_bytes(eqn: Any) -> int:
    numbers, kernel, out = eqn.params["dimension_numbers"], eqn.invars[1].aval, eqn.outvars[0].aval
    window = math.prod(kernel.shape) // kernel.shape[numbers.rhs_spec[0]]
    positions = math.prod(out.shape) // out.shape[numbers.out_spec[1]]
    return positions * window * out.dtype.itemsize
