"""Measurements for the clipped eigenvalues and the matrix that is put together from them."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import torch

from benchmarks._documents._bytes import MIB, compiled, storages
from benchmarks._documents._claim import Context, Measured
from benchmarks._documents._kfac_7b import collecting
from jaxkfac.linalg.spectral import eigh_clipped, from_spectrum
from torch_ref import unfixed
from torch_ref.linalg import decompose, rebuild

SIDE = 1024
DOCUMENTED = 4096  # rows of the document's example
LARGE = 4 * DOCUMENTED**2 / MIB  # one matrix of them in float32, MiB


def decomposed(device: str, side: int = SIDE) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues and orthogonal vectors; no solver is needed for that."""
    torch.manual_seed(0)
    values = torch.rand(side, device=device) + 0.1
    rows = torch.linalg.qr(torch.randn(side, 64, device=device)).Q
    return values, torch.eye(side, device=device) - 2 * rows @ rows.mT


def rebuilt(context: Context) -> Measured:
    """Bytes beside the result: of the product on the device, of a result that is sent to it."""
    values, vectors = decomposed(context.device)
    made = storages(lambda: rebuild(values, vectors), context.device)
    host = rebuild(values.cpu(), vectors.cpu())
    sent = storages(lambda: torch.empty_like(host, device=context.device).copy_(host))
    return Measured(made.peak - made.left, sent.peak - sent.left, "MiB")


def jax_rebuilt(context: Context) -> Measured:
    """Temporaries of the program; NumPy's product has none on the device."""
    made = compiled(from_spectrum, jnp.ones(SIDE), jnp.eye(SIDE), outputs=False)
    return Measured(made, 0.0, "MiB")


def transposed(context: Context) -> Measured:
    _, vectors = decomposed(context.device)
    made = storages(vectors.t, context.device).peak
    return Measured(made * (DOCUMENTED / SIDE) ** 2, unit="MiB")


def jax_transposed(context: Context) -> Measured:
    """Temporaries of a product with the transposed matrix."""
    x = jnp.eye(SIDE)
    made = compiled(lambda a: a @ a.T, x, outputs=False)
    return Measured(made * (DOCUMENTED / SIDE) ** 2, unit="MiB")


def scaled(context: Context) -> Measured:
    values, vectors = decomposed(context.device)
    made = storages(lambda: vectors * values.unsqueeze(0), context.device).peak
    return Measured(made * (DOCUMENTED / SIDE) ** 2, unit="MiB")


def whole(context: Context) -> Measured:
    """Vectors, scaled vectors and the result."""
    values, vectors = decomposed(context.device)
    made = storages(lambda: rebuild(values, vectors), context.device).peak
    return Measured(made * (DOCUMENTED / SIDE) ** 2 + LARGE, unit="MiB")


def jax_whole(context: Context) -> Measured:
    made = compiled(from_spectrum, jnp.ones(SIDE), jnp.eye(SIDE))
    return Measured(made * (DOCUMENTED / SIDE) ** 2 + LARGE, unit="MiB")


def over_layers(context: Context) -> Measured:
    """Peak of one layer, and of eight in a row that are each dropped when used."""
    values, vectors = decomposed(context.device)

    def layers(count: int) -> None:
        for _ in range(count):
            rebuild(values, vectors)

    one, eight = (storages(lambda n=n: layers(n), context.device).peak for n in (1, 8))
    return Measured(one, eight, "MiB")


def places(context: Context) -> Measured:
    """The matrix put together by NumPy's product on the host, and by PyTorch's on the device."""
    spectrum = (x.to(context.device) for x in decomposed("cpu", 256))  # devices draw differently
    return Measured(_difference(rebuild(*spectrum).cpu().numpy()))


def jax_places(context: Context) -> Measured:
    values, vectors = (jnp.asarray(x.numpy()) for x in decomposed("cpu", 256))
    return Measured(_difference(np.asarray(from_spectrum(values, vectors))))


def _difference(found: np.ndarray) -> float:
    """Relative, from NumPy's product."""
    values, vectors = (x.numpy() for x in decomposed("cpu", 256))
    host = (vectors * values) @ vectors.T
    return float(np.linalg.norm(found - host) / np.linalg.norm(host))


def seconds_on_the_host(context: Context) -> Measured:
    values, vectors = decomposed("cpu", DOCUMENTED)
    rebuild(values, vectors)
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        rebuild(values, vectors)
        taken.append(time.perf_counter() - start)
    return Measured(1e3 * sorted(taken)[1], unit="ms")


def jax_seconds_on_the_host(context: Context) -> Measured:
    program = jax.jit(from_spectrum)
    values, vectors = (jnp.asarray(x.numpy()) for x in decomposed("cpu", DOCUMENTED))
    program(values, vectors).block_until_ready()
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        program(values, vectors).block_until_ready()
        taken.append(time.perf_counter() - start)
    return Measured(1e3 * sorted(taken)[1], unit="ms")


def more_milliseconds(context: Context) -> Measured:
    """On the host, less the document's 5 ms on its GPU."""
    return Measured(seconds_on_the_host(context).before - 5, unit="ms")


def processors(shortest: float, longest: float) -> str:
    """Speeds at which the host puts the matrix together in so many milliseconds."""
    operations = 2 * DOCUMENTED**3
    low, high = (operations / (1e-3 * ms) / 1e12 for ms in (longest, shortest))
    return f"for a host that multiplies float32 matrices at {low:.1f} to {high:.1f} TFLOP/s"


def layers_left_out(context: Context) -> Measured:
    """Layers that are not clipped, over all sizes of a network; a size beyond the device's too."""
    factors = collecting("cpu", retain_graph=False)()
    spectra = [
        decompose(x, max_condition=1e3, damping=0.0) for f in factors.values() for x in (f.a, f.g)
    ]
    clipped = sum(bool((s.values.min() * 1.001e3 >= s.values.max()).item()) for s in spectra)
    return Measured(float(2 * len(factors) - clipped), unit="factors")


def repeated(context: Context) -> Measured:
    """Entries that differ between two runs."""
    matrix = rebuild(*decomposed(context.device, 256))
    runs = [unfixed.clip_and_rebuild(matrix, 1e3, rebuild_on_host=True) for _ in range(2)]
    return Measured(float((runs[0] != runs[1]).sum()), unit="entries")


def jax_repeated(context: Context) -> Measured:
    matrix = jnp.asarray(rebuild(*decomposed("cpu", 256)).numpy())

    def clipped() -> jax.Array:
        found = eigh_clipped(matrix, max_condition=1e3)
        return from_spectrum(found.values, found.vectors)

    runs = [clipped() for _ in range(2)]
    return Measured(float((runs[0] != runs[1]).sum()), unit="entries")
