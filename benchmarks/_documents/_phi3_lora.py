"""Measurements for the audit of a Fourier adapter on Phi-3."""

import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import nn

import jaxkfac as jk
from benchmarks._documents import _layouts as layouts
from benchmarks._documents._bytes import MIB, compiled, storages, tree_bytes
from benchmarks._documents._claim import Context, Measured
from benchmarks._documents._problems import WIDTH, forward, network, parameters
from torch_ref import unfixed
from torch_ref.lslora import Config, adapted_layers, attach

LAYOUT = "phi-3-mini"
ADAPTED = 128  # 32 blocks of 4 projections
JAX_CONFIG = jk.lslora.Config(rank=4, alpha=8.0, target=r".*/kernel")


def adapted(device: str, layers: int = ADAPTED) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers))).to(device)
    attach(model, Config(".*", rank=2))
    return model


def counted(device: str, *, stack: bool) -> Any:
    model = adapted(device)
    return storages(lambda: unfixed.regulariser(model, stack=stack), device)


def synchronisations(context: Context) -> Measured:
    """Numbers that are read from the device, in one call."""
    reads = [counted(context.device, stack=s).calls["_local_scalar_dense"] for s in (False, True)]
    return Measured(*map(float, reads), "reads")


def jax_synchronisations(context: Context) -> Measured:
    """Equations of the program that leave the device."""
    adapters = jax_adapters()
    program = jax.make_jaxpr(jk.lslora.fourier_loss)(adapters)
    leave = [e for e in program.eqns if "callback" in e.primitive.name]
    return Measured(float(len(leave)), unit="reads")


def jax_adapters() -> Any:
    apply_fn = lambda params, x: forward(params, x)
    x = jnp.zeros((2, WIDTH))
    return jk.lslora.init(apply_fn, JAX_CONFIG, parameters(), x, key=jax.random.key(0))


def python_floats(context: Context) -> Measured:
    values = (unfixed.regulariser(adapted(context.device, 4), stack=s) for s in (False, True))
    return Measured(*(float(isinstance(value, float)) for value in values), "floats")


def sends(context: Context) -> Measured:
    """How often the first coefficients are sent, by a call that may send."""
    found = []
    for stack in (False, True):
        model = adapted(context.device)
        with _ToCalls() as to:
            unfixed.regulariser(model, stack=stack)
        found.append(float(to.count))
    return Measured(*found, "calls")


def jax_sends(context: Context) -> Measured:
    program = jax.make_jaxpr(jk.lslora.fourier_loss)(jax_adapters())
    return Measured(
        float(sum(e.primitive.name == "device_put" for e in program.eqns)), unit="calls"
    )


class _ToCalls(torch.overrides.TorchFunctionMode):
    """Counts ``Tensor.to``."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") == "to"
        return func(*args, **(kwargs or {}))


def transfers(context: Context) -> Measured:
    """Copies made by the second forward pass of all adapters, which began elsewhere than ``z``.

    Without a GPU, ``z`` is on PyTorch's ``meta`` device, which has shapes and no memory.
    """
    there = "meta" if context.device == "cpu" else context.device
    z, found = torch.empty(4, 16, device=there), []
    for check in (False, True):
        layers = adapted_layers(adapted("cpu")).values()
        params = [layer.fourier_params["default"] for layer in layers]
        if check:  # what the remedy's first pass does, and may not do to the meta device
            params = [p.to(there) for p in params]
        forward = lambda params=params, check=check: [
            unfixed.nonlinearity(p, z, check=check) for p in params
        ]
        found.append(float(storages(forward, there).calls["_to_copy"]))
    return Measured(*found, "copies")


def checks(context: Context) -> Measured:
    """Calls of ``Tensor.to`` in one forward pass, before and after."""
    return Measured(*(_checks(context.device, check=c) for c in (False, True)), "calls")


def checks_by_rows(context: Context) -> Measured:
    few, many = (_checks(context.device, check=False, rows=rows) for rows in (4, 400))
    return Measured(many - few, unit="calls")


def _checks(device: str, *, check: bool, rows: int = 4) -> float:
    layers = adapted_layers(adapted(device)).values()
    z = torch.randn(rows, 16, device=device)
    with _ToCalls() as to:
        for layer in layers:
            unfixed.nonlinearity(layer.fourier_params["default"], z, check=check)
    return float(to.count)


def diagnostics(context: Context) -> Measured:
    """Peak of a look at every adapter, in MB."""
    model = adapted(context.device)
    looks = (
        storages(lambda g=no_grad: unfixed.diagnose(model, no_grad=g), context.device)
        for no_grad in (False, True)
    )
    return Measured(*(seen.peak * MIB / 10**6 for seen in looks), "MB")


def jax_diagnostics(context: Context) -> Measured:
    made = compiled(jk.lslora.diagnose, jax_adapters())
    return Measured(made * MIB / 10**6, unit="MB")


def held_diagnostics(context: Context) -> Measured:
    model = adapted(context.device)
    looks = (
        storages(lambda g=no_grad: unfixed.diagnose(model, no_grad=g), context.device)
        for no_grad in (False, True)
    )
    return Measured(*(seen.left * MIB for seen in looks), "bytes")


def reentrant(context: Context) -> Measured:
    """Exceptions, without a word on the kind and with one."""
    return _recomputed(context, "exceptions")


def warned(context: Context) -> Measured:
    return _recomputed(context, "warnings")


def _recomputed(context: Context, what: str) -> Measured:
    found = []
    for said in (None, False):
        block, raised = nn.Linear(4, 4).to(context.device), 0
        x = torch.ones(2, 4, device=context.device, requires_grad=True)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            try:
                unfixed.recompute(block, x, use_reentrant=said).sum().backward()
            except Exception:
                raised = 1
        count = sum("use_reentrant" in str(w.message) for w in seen)
        found.append(float(raised if what == "exceptions" else count))
    return Measured(*found, what)


def saving(context: Context) -> Measured:
    """Bytes made where the model is while it is saved."""
    found = []
    for clean in (False, True):
        model = network(context.device)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.safetensors"
            work = lambda m=model, f=file, c=clean: unfixed.save(m, f, empty_cache=c)
            found.append(storages(work, context.device).peak)
    return Measured(*found, "MiB")


def four_bits(context: Context) -> Measured:
    """The model in bfloat16, and with its blocks' kernels in four bits."""
    return Measured(layouts.parameter_gb(LAYOUT), layouts.four_bit_gb(LAYOUT), "GB")


def jax_four_bits(context: Context) -> Measured:
    """A kernel as it is stored, scaled to the model's number of parameters in blocks."""
    kernel = {"kernel": jnp.ones((1024, 256), jnp.bfloat16)}
    packed = tree_bytes(jk.nf4.quantize(kernel, layers=".*")) / (1024 * 256)
    blocks = sum(n * i * o for n, i, o in layouts.kernels(LAYOUT) if n > 1)
    rest = (layouts.parameters(LAYOUT) - blocks) * 2
    return Measured(layouts.parameter_gb(LAYOUT), (packed * blocks + rest) / 10**9, "GB")


def unchanged(context: Context) -> Measured:
    """The regulariser's value before and after."""
    model = adapted(context.device)
    with torch.no_grad():
        for layer in adapted_layers(model).values():
            weight = layer.fourier_params["default"].weight
            weight.copy_(torch.randn(4, device=context.device))
    values = (unfixed.regulariser(model, stack=stack).item() for stack in (False, True))
    return Measured(*values)


def _step_ms(regulariser: Callable[[nn.Module], Any]) -> float:
    """Of a training step of 32 blocks of 4 adapted projections, 3072 wide, in milliseconds."""
    torch.manual_seed(0)
    width, taken = 3072, []
    layers = (nn.Linear(width, width, bias=False) for _ in range(ADAPTED))
    model = nn.Sequential(*layers).to("cuda", torch.bfloat16).requires_grad_(False)
    attach(model, Config(".*", rank=16))
    x = torch.randn(2048, width, device="cuda", dtype=torch.bfloat16)
    for _ in range(12):
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = model(x).float().square().mean() + 0.01 * regulariser(model)
        loss.backward()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return 1e3 * statistics.median(taken[2:])


def summed(model: nn.Module) -> Any:
    return unfixed.regulariser(model, stack=False)


def stacked(model: nn.Module) -> Any:
    return unfixed.regulariser(model, stack=True)


def steps(*regularisers: Callable[[nn.Module], Any]) -> Callable[[Context], Measured]:
    """A training step with the one and with the other."""
    return lambda context: Measured(*map(_step_ms, regularisers), "ms a step")


def _reserved_when_saved(context: Context) -> Measured:
    sizes = []
    for clean in (False, True):
        torch.cuda.empty_cache()
        model = network("cuda", width=2048)
        model(torch.randn(4096, 2048, device="cuda")).sum().backward()
        with tempfile.TemporaryDirectory() as folder:
            unfixed.save(model, Path(folder) / "model.safetensors", empty_cache=clean)
        sizes.append(torch.cuda.memory_reserved() / MIB)
        del model
    return Measured(*sizes, "MiB reserved")
