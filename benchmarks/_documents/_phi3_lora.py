"""Claims of the audit of a Fourier adapter on Phi-3."""

import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import nn

import jaxkfac as jk
from benchmarks._documents import _layouts as layouts
from benchmarks._documents._bytes import MIB, compiled, storages, tree_bytes
from benchmarks._documents._claim import Claim, Context, Measured
from benchmarks._documents._problems import WIDTH, forward, network, parameters
from benchmarks._documents._rules import Lies, Occurs, OnGPU, Removed, Saves, Unchanged
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
    return jk.lslora.init(JAX_CONFIG, apply_fn, parameters(), x, key=jax.random.key(0))


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
    """Bytes copied by one forward pass of all adapters, which are where the model is."""
    found = []
    for check in (False, True):
        layers = adapted_layers(adapted(context.device)).values()
        params = [layer.fourier_params["default"] for layer in layers]
        z = torch.randn(4, 16, device=context.device)
        seen = storages(
            lambda params=params, z=z, check=check: [
                unfixed.nonlinearity(p, z, check=check) for p in params
            ],
            context.device,
        )
        found.append(float(seen.calls["_to_copy"]))
    return Measured(*found, "copies")


def checks(context: Context) -> Measured:
    """Calls of ``Tensor.to`` in one forward pass, before and after."""
    found = []
    for check in (False, True):
        layers = adapted_layers(adapted(context.device)).values()
        params = [layer.fourier_params["default"] for layer in layers]
        z = torch.randn(4, 16, device=context.device)
        with _ToCalls() as to:
            for p in params:
                unfixed.nonlinearity(p, z, check=check)
        found.append(float(to.count))
    return Measured(*found, "calls")


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
            layer.fourier_params["default"].weight.add_(0.25)
    values = (unfixed.regulariser(model, stack=stack).item() for stack in (False, True))
    return Measured(*values)


def _share_of_step(context: Context, *, stack: tuple[bool, bool] = (False, True)) -> Measured:
    """Milliseconds of a training step of 32 blocks of 4 adapted projections, 3072 wide."""
    torch.manual_seed(0)
    width, seconds = 3072, []
    layers = (nn.Linear(width, width, bias=False) for _ in range(ADAPTED))
    model = nn.Sequential(*layers).to("cuda", torch.bfloat16).requires_grad_(False)
    attach(model, Config(".*", rank=16))
    x = torch.randn(2048, width, device="cuda", dtype=torch.bfloat16)
    for kind in stack:
        taken = []
        for _ in range(12):
            torch.cuda.synchronize()
            start = time.perf_counter()
            loss = model(x).float().square().mean() + 0.01 * unfixed.regulariser(model, stack=kind)
            loss.backward()
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)
        seconds.append(sorted(taken[2:])[5])
    return Measured(1e3 * seconds[0], 1e3 * seconds[1], "ms a step")


def _target_share(context: Context) -> Measured:
    """A step whose regulariser sends its target for each layer, and one that keeps it there."""
    from torch_ref.lslora import fourier_loss

    before = _share_of_step(context, stack=(True, True)).before
    original = unfixed.regulariser
    try:
        unfixed.regulariser = lambda model, *, stack: fourier_loss(model)
        after = _share_of_step(context, stack=(True, True)).before
    finally:
        unfixed.regulariser = original
    return Measured(before, after, "ms a step")


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


CLAIMS = (
    Claim(
        "phi3-lora/sum-synchronises",
        "Adding each layer's term to a Python float waits for the device, every time.",
        Occurs(),
        "false",
        "A float that meets a tensor is an argument of the kernel; nothing is read back.",
        synchronisations,
        jax_synchronisations,
    ),
    Claim(
        "phi3-lora/python-float",
        "The sum divided by the count is a Python float.",
        Occurs(),
        "false",
        "It is a tensor with a graph from the first addition on.",
        python_floats,
        "does not arise: inside a traced function everything is an array",
    ),
    Claim(
        "phi3-lora/step-10",
        "The sum costs 10 to 20 % of a training step.",
        OnGPU(Saves(0.1)),
        "needs a GPU",
        "Nothing waits, so that what can be saved is a few kernels' launches.",
        _share_of_step,
        "does not arise: the regulariser is part of the one program",
    ),
    Claim(
        "phi3-lora/host-target",
        "The target is made on the host and sent for every adapted layer: 128 a step.",
        Lies(128, 128),
        "true",
        "Counted as calls of `.to` with 128 adapted layers; on a GPU each is a copy of 16 bytes.",
        sends,
        jax_sends,
    ),
    Claim(
        "phi3-lora/target-once",
        "The remedy sends the target once.",
        Removed(),
        "false",
        "It makes it once, as the fault did, and keeps `.to` inside the loop.",
        sends,
        "a constant of the program",
    ),
    Claim(
        "phi3-lora/step-2",
        "Sending the target costs 2 to 3 % of a step.",
        OnGPU(Saves(0.02)),
        "needs a GPU",
        "128 copies of 16 bytes, against a buffer that stays on the device.",
        _target_share,
        "does not arise: the target is a constant of the program",
    ),
    Claim(
        "phi3-lora/transfers",
        "Every forward pass transfers coefficients and σ.",
        Occurs(),
        "false",
        "`.to` of the device that a tensor is on returns the tensor.",
        transfers,
        "does not arise: adapters are arguments of the program",
    ),
    Claim(
        "phi3-lora/checks-128",
        "A step makes about 128 such checks for 32 blocks of 4 adapted layers.",
        Lies(128, 128),
        "partly",
        "Two for each adapted layer.",
        checks,
        "does not arise",
    ),
    Claim(
        "phi3-lora/step-5",
        "Without them a step is 5 to 10 % faster.",
        Removed(),
        "false",
        "There is no copy to take away: the same count as in the row on transfers.",
        transfers,
        "does not arise",
    ),
    Claim(
        "phi3-lora/diagnostics-50mb",
        "Diagnostics without no_grad hold 50 to 100 MB.",
        Lies(50, 100),
        "false",
        "Each number is read at once, and its graph goes with it.",
        diagnostics,
        jax_diagnostics,
    ),
    Claim(
        "phi3-lora/diagnostics-held",
        "That memory is held until the script ends.",
        Occurs(),
        "false",
        "Bytes alive when the look is over. Keeping the tensors instead of the numbers does hold "
        "graphs, which is this project's own lesson.",
        held_diagnostics,
        "does not arise: an array holds no graph",
    ),
    Claim(
        "phi3-lora/reentrant-raises",
        "From PyTorch 2.9 on, recomputation that does not say its kind raises.",
        Occurs(),
        "false",
        "It warns, in 2.13 too.",
        reentrant,
        "does not arise: `jax.checkpoint` has one kind",
    ),
    Claim(
        "phi3-lora/reentrant-warns",
        "Saying use_reentrant=False silences the warning.",
        Removed(),
        "true",
        "One warning before, none after.",
        warned,
        "does not arise",
    ),
    Claim(
        "phi3-lora/save-cache",
        "500 MB to 1 GB of fragmented cache is left when the model is saved.",
        OnGPU(Saves(0.05)),
        "needs a GPU",
        "Only a GPU's caching allocator reserves what is free.",
        _reserved_when_saved,
        "does not arise: arrays are freed with their last name",
    ),
    Claim(
        "phi3-lora/save-copies",
        "Saving makes no copy of the model.",
        Unchanged(),
        "true",
        "Nothing is made, with the cache emptied before or not.",
        saving,
        "`jk.lslora.save` holds one host copy of the adapter",
    ),
    Claim(
        "phi3-lora/four-bits",
        "In four bits the model takes 2 GB instead of 7.",
        Saves(5 / 7),
        "true",
        "Kernels of the blocks at 4.13 bits, embedding and head in bfloat16: 2.3 of 7.6 GB.",
        four_bits,
        jax_four_bits,
    ),
    Claim(
        "phi3-lora/same-loss",
        "The remedies change no number.",
        Unchanged(1e-6),
        "true",
        "The mean of a list is the sum divided by the count.",
        unchanged,
        "the regulariser's parity cases",
    ),
    Claim(
        "phi3-lora/total-15",
        "All remedies together make a step 15 to 30 % faster.",
        OnGPU(Saves(0.15)),
        "needs a GPU",
        "The transfers never were; what is left is the regulariser.",
        _share_of_step,
        "does not arise",
    ),
)
