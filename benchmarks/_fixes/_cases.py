"""The documented fixes, what the documents claim of each, and where JAX stands."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Case:
    """One documented fix.

    Attributes:
        name: The function of ``torch_ref.unfixed``, or what is done instead of one.
        fixed: What replaces it.
        claim: What the documents say of the fault.
        about: What the claim is about.
        only_gpu: Why the CPU cannot show it; empty where it can.
        jax: The JAX counterpart that is measured, or why there is none.
    """

    name: str
    fixed: str
    claim: str
    about: Literal["peak", "time", "synchronisations"]
    only_gpu: str
    jax: str


CASES = (
    Case(
        "collect_retaining_graph",
        "torch_ref.factors.collect_factors",
        "K-FAC analysis of a 7B model ran out: the graph was retained, nothing cleaned up",
        "peak",
        "",
        "value_grad_and_factors, against a program that returns all inputs and gradients",
    ),
    Case(
        "collect_on_device",
        "torch_ref.factors.collect_factors",
        "K-FAC analysis of a 7B model ran out: about 30 GB of factors stayed on the GPU",
        "peak",
        "the device's memory is main memory",
        "value_grad_and_factors with max_factor_bytes of one layer, against all factors at once",
    ),
    Case(
        "to_host_converted_first",
        "torch_ref.factors.to_host",
        ".float().cpu() makes a float32 copy on the GPU first: 5 GB",
        "peak",
        "the device's memory is main memory, and both orders make one float32 copy there",
        "np.asarray(x).astype(float32), against np.asarray(x.astype(float32))",
    ),
    Case(
        "stabilize_on_device",
        "torch_ref.linalg.stabilize",
        "decomposing took 43 GB, and putting the clipped matrix together on the GPU ran out",
        "peak",
        "both are in main memory, where the solver's own scratch is the peak of either",
        "eigh_clipped and from_spectrum, against a product with a dense diagonal matrix",
    ),
    Case(
        "full_batch_step",
        "torch_ref.accumulation.accumulated_training",
        "few-shot training with the full batch ran out; with accumulation it fits",
        "peak",
        "",
        "multi_steps, against one step with the full batch",
    ),
    Case(
        "load_then_convert",
        "torch_ref.memory.load_once",
        "FLAN-T5-XL held three copies: loaded, converted, moved",
        "peak",
        "",
        "load_safetensors, against load_file, then astype of the whole tree",
    ),
    Case(
        "cast_and_move_always",
        "torch_ref.memory.cast_once, place_once",
        "converting and moving copies a model that needs neither",
        "peak",
        "",
        "cast_once to bfloat16, against astype of the whole tree in one program",
    ),
    Case(
        "save_without_cleanup",
        "torch_ref.memory.save_after_cleanup",
        "saving ran out: gradients and cache still held",
        "peak",
        "",
        "– does not arise: gradients are values, and gone when the step that made them returns",
    ),
    Case(
        "ReentrantlyRecomputed",
        "torch_ref.memory.Recomputed",
        "reentrant checkpointing holds more memory than the non-reentrant one",
        "peak",
        "",
        "jax.checkpoint in lax.scan, against no recomputation: there is no reentrant kind",
    ),
    Case(
        "TransferringLSLoRALinear",
        "torch_ref.lslora.LSLoRALinear",
        "adapters on the CPU are sent to the GPU in every call, which is slow",
        "time",
        "a transfer is a copy within main memory",
        "– does not arise: adapters are arguments of the program, and nothing moves inside it",
    ),
    Case(
        "fourier_loss_from_host",
        "torch_ref.lslora.fourier_loss",
        "the regulariser makes its target on the CPU in every call, which is slow",
        "time",
        "",
        "– does not arise: the target is a constant of the program",
    ),
    Case(
        "diagnose_with_graph",
        "torch_ref.lslora.diagnose",
        "a log of diagnostics keeps graphs alive, and memory grows",
        "peak",
        "",
        "– does not arise: an array holds no graph",
    ),
    Case(
        "python_float_plus_tensor",
        "a sum that begins with a tensor on the device",
        "a sum that begins with a Python float synchronises with the GPU",
        "synchronisations",
        "there is nothing to wait for; no wait is expected, as a Python float is a kernel argument",
        "– does not arise: a Python float is a constant of the program",
    ),
)
