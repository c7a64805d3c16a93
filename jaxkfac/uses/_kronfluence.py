"""Eigenbases from the factors that kronfluence has written."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxkfac._errors import UnknownLayerError, at_least_one, nearest
from jaxkfac.blocks import Corrections, Factors, Origin
from jaxkfac.curvature import Eigenbases
from jaxkfac.linalg.spectral import Spectrum, eigh_checked
from jaxkfac.memory import load_safetensors

_SIDES = ("activation", "gradient")
_LAMBDA = ("lambda_matrix", "num_lambda_processed")

Tensors = Mapping[str, jax.Array]


def load_kronfluence(
    folder: str | Path,
    like: Factors,
    *,
    terms_per_example: int,
    names: Mapping[str, str] | None = None,
) -> Eigenbases:
    """Load what kronfluence 1.0 has written as eigenbases, to continue its run here.

    Its eigenvectors are used; if it has not computed them, its covariances are decomposed. If
    ``lambda_matrix.safetensors`` exists, its measured eigenvalues are used too. Scores of this
    library are ``terms_per_example`` times kronfluence's, because kronfluence uses the Fisher of
    the sum over an example's terms, and this library uses that of their mean.

    Convolutions are refused: PyTorch orders a window as ``(C_in, kh, kw)``, and a kernel here has
    rows ``(kh, kw, C_in)``, so the eigenvectors would belong to other inputs.

    Args:
        folder: ``factors_NAME``, which contains the ``.safetensors`` files. Aggregate files of
            partitions in kronfluence first.
        like: Factors of the model, or their shapes (``stats.factor_shapes``).
        terms_per_example: Loss terms of each example: 1, or the tokens of a text.
        names: ``{layer name: kronfluence module name}``, for the layers to load. By default the
            module name comes from the kernel's path, ``a.b`` from ``a/b/kernel``, and diagonal
            layers are left out.

    Returns:
        The bases, unclipped (``max_condition`` is infinite). Their ``origin`` has the Fisher type
        if ``factor_arguments.json`` exists, and no likelihood, which the files do not name.

    Raises:
        FileNotFoundError: a file does not exist.
        UnknownLayerError: ``names`` has a layer that the model lacks, or a module that the files
            lack; the nearest names are given.
        ValueError: a matrix of another shape than the layer's, a layer of several slices, or a
            convolution.
        ModuleNotFoundError: the extra ``pretrained`` is not installed.

    Example:
        ``bases = jaxkfac.uses.load_kronfluence("run/factors_ekfac", like, terms_per_example=1)``
    """
    at_least_one(terms_per_example=terms_per_example)
    if names is None:
        dense = [layer for layer in like.layers if not layer.is_diagonal]
        names = {x.name: x.weight.path.removesuffix("/kernel").replace("/", ".") for x in dense}
    for layer in map(like.layer, names):
        if layer.is_convolution:
            raise ValueError(
                f"layer {layer.name!r} is a convolution, whose inputs kronfluence has in another "
                "order, (C_in, kh, kw) in place of (kh, kw, C_in): leave it out of names="
            )
    # Each kronfluence module has its own eigenvectors, even if layers share an input here.
    layers = tuple(dataclasses.replace(like.layer(name), input=name) for name in names)
    dtype = next(side.data.dtype for place, side in like.sides.items() if place.table == "g")
    folder = Path(folder)
    a, g = {}, {}
    for side, table in zip(_SIDES, (a, g), strict=True):
        read = _decomposed if (folder / f"{side}_eigenvectors.safetensors").is_file() else _solved
        spectra = read(folder, side, dtype)
        for layer in layers:
            if layer.stack:
                raise ValueError(f"layer {layer.name!r} has several slices; kronfluence's have one")
            ones = like.bias == "joint" and layer.bias is not None
            size = layer.in_features + ones if side == "activation" else layer.out_features
            values, vectors = (_of_module(x, names[layer.name]) for x in spectra)
            _check_shape(names[layer.name], vectors, (size, size))
            table[layer.name] = Spectrum(values, vectors)
    clipping: Any = {"max_condition": float("inf"), "floor": 0.0}
    bases = Eigenbases(a, {}, g, {}, layers, like.bias, **clipping, origin=_origin(folder))
    if not (folder / f"{_LAMBDA[0]}.safetensors").is_file():
        return bases
    sums, numbers = (load_safetensors(folder / f"{x}.safetensors", dtype=dtype) for x in _LAMBDA)
    total, number = {}, jnp.zeros(())
    for layer in layers:
        squares, number = (_of_module(x, names[layer.name]) for x in (sums, numbers))
        sides = len(g[layer.name].values), len(a[layer.name].values)
        _check_shape(names[layer.name], squares, sides)
        total[layer.name] = squares.T / jnp.square(bases.block_root(layer))
    terms = (number.reshape(()) * terms_per_example).astype(dtype)
    return dataclasses.replace(bases, corrections=Corrections(total, {}, terms))


def _origin(folder: Path) -> Origin | None:
    path = folder / "factor_arguments.json"
    arguments = json.loads(path.read_text()) if path.is_file() else {}
    if "use_empirical_fisher" not in arguments:
        return None
    return Origin("empirical" if arguments["use_empirical_fisher"] else "mc")


def _decomposed(folder: Path, side: str, dtype: DTypeLike) -> tuple[Tensors, Tensors]:
    """Eigenvalues and eigenvectors by module."""
    values, vectors = (f"{side}_{kind}.safetensors" for kind in ("eigenvalues", "eigenvectors"))
    return (
        load_safetensors(folder / values, dtype=dtype),
        load_safetensors(folder / vectors, dtype=dtype),
    )


def _solved(folder: Path, side: str, dtype: DTypeLike) -> tuple[Tensors, Tensors]:
    sums = load_safetensors(folder / f"{side}_covariance.safetensors", dtype=dtype)
    counts = load_safetensors(folder / f"num_{side}_covariance_processed.safetensors")
    solved = {name: eigh_checked(x / counts[name].astype(dtype)) for name, x in sums.items()}
    return (
        {name: spectrum.values for name, spectrum in solved.items()},
        {name: jnp.asarray(spectrum.vectors) for name, spectrum in solved.items()},
    )


def _of_module(tensors: Tensors, module: str) -> jax.Array:
    if module not in tensors:
        raise UnknownLayerError(
            f"the files have no module {module!r}; the nearest names are {nearest(module, tensors)}"
        )
    return tensors[module]


def _check_shape(module: str, tensor: jax.Array, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ValueError(f"module {module!r}: expected a tensor {shape}, got {tensor.shape}")
