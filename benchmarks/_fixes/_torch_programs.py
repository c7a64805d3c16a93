"""Each fault and its fix in PyTorch, on one problem."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks._fixes._sizes import Size
from torch_ref import unfixed
from torch_ref.accumulation import accumulated_training
from torch_ref.factors import Categorical, collect_factors, fisher_loss, to_host
from torch_ref.linalg import stabilize
from torch_ref.lslora import Config, LSLoRALinear, adapted_layers, attach, diagnose, fourier_loss
from torch_ref.memory import Recomputed, cast_once, load_once, place_once, save_after_cleanup

LOSS = fisher_loss(Categorical())
FOLDER = tempfile.TemporaryDirectory()  # of the process: each measurement has its own


class Program(NamedTuple):
    """One problem.

    Attributes:
        prepare: Makes what is there when the measurement begins.
        before: The fault; it is handed what was prepared, and may consume it.
        after: The fix, the same way.
    """

    prepare: Callable[[], Any]
    before: Callable[[Any], Any]
    after: Callable[[Any], Any]


def net(width: int, depth: int, device: str) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(device)


def batch(size: Size, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(size.rows, size.width, device=device)
    return x, torch.arange(size.rows, device=device) % size.width


def factors(collect: Callable[..., Any], size: Size, device: str) -> Program:
    def prepare() -> Any:
        return net(size.width, size.depth, device), batch(size, device)

    return Program(
        prepare,
        lambda state: collect(state[0], LOSS, state[1]),
        lambda state: collect_factors(state[0], LOSS, state[1]),
    )


def sent_factor(size: Size, device: str) -> Program:
    return Program(
        lambda: torch.ones(size.factor, size.factor, dtype=torch.bfloat16, device=device),
        unfixed.to_host_converted_first,
        lambda factor: to_host(factor, None),
    )


def clipping(size: Size, device: str) -> Program:
    def prepare() -> torch.Tensor:
        torch.manual_seed(0)
        rows = torch.randn(2 * size.matrix, size.matrix)
        return rows.mT @ rows / len(rows)

    return Program(
        prepare,
        lambda matrix: unfixed.stabilize_on_device(matrix, 1e3, 1e-6, device=device),
        lambda matrix: stabilize(matrix, 1e3, 1e-6, device=device),
    )


def training_step(size: Size, device: str) -> Program:
    def prepare() -> Any:
        model = net(size.width, size.depth, device)
        parts = (part.chunk(size.micro_batches) for part in batch(size, device))
        return model, torch.optim.SGD(model.parameters(), lr=0.1), list(zip(*parts, strict=True))

    def accumulated(state: Any) -> float:
        model, optimizer, parts = state
        (loss,) = accumulated_training(model, optimizer, LOSS, parts, every=len(parts))
        return loss

    def full(state: Any) -> float:
        model, optimizer, parts = state
        return unfixed.full_batch_step(model, optimizer, LOSS, parts)

    return Program(prepare, full, accumulated)


def large(size: Size, device: str) -> nn.Sequential:
    return net(size.model_width, size.model_depth, device)


def loading(size: Size, device: str) -> Program:
    file = Path(FOLDER.name) / "loaded.safetensors"
    save_after_cleanup(large(size, "cpu"), file)
    build = lambda: large(size, "cpu")  # on the meta device inside load_once
    options = {"dtype": torch.bfloat16, "device": device}

    return Program(
        lambda: None,
        lambda _: unfixed.load_then_convert(build, file, **options),
        lambda _: load_once(_without_values(size), file, **options),
    )


def _without_values(size: Size) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        width = size.model_width
        pairs = [(nn.Linear(width, width), nn.Tanh()) for _ in range(size.model_depth)]
        return nn.Sequential(*[part for pair in pairs for part in pair][:-1])

    return build


def nothing_to_convert(size: Size, device: str) -> Program:
    def after(model: nn.Module) -> nn.Module:
        cast_once(model, torch.float32)
        place_once(model, device)
        return model

    return Program(
        lambda: large(size, device),
        lambda model: unfixed.cast_and_move_always(model, torch.float32, device),
        after,
    )


def saving(size: Size, device: str) -> Program:
    file = Path(FOLDER.name) / "saved.safetensors"

    def prepare() -> nn.Module:
        model = large(size, device)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        return model

    return Program(
        prepare,
        lambda model: unfixed.save_without_cleanup(model, file),
        lambda model: save_after_cleanup(model, file),
    )


def recomputation(size: Size, device: str) -> Program:
    def step(wrapper: type[nn.Module]) -> Callable[[Any], None]:
        def run(state: Any) -> None:
            layers, (x, y) = state
            model = nn.Sequential(*[wrapper(nn.Sequential(*layers[i : i + 4])) for i in starts])
            LOSS(model, (x.requires_grad_(), y)).backward()

        return run

    starts = range(0, 2 * size.depth - 1, 4)  # blocks of two dense layers
    return Program(
        lambda: (net(size.width, size.depth, device), batch(size, device)),
        step(unfixed.ReentrantlyRecomputed),
        step(Recomputed),
    )


def adapter_calls(size: Size, device: str) -> Program:
    def prepare(cls: type[LSLoRALinear], home: str) -> tuple[LSLoRALinear, torch.Tensor]:
        torch.manual_seed(0)
        layer = cls(nn.Linear(size.width, size.width, device=device))
        layer.add_adapter("default", Config(".*"))
        layer.set_active(("default",))
        for part in (layer.lora_A, layer.lora_B, layer.fourier_params):
            part.to(home)
        return layer, torch.randn(16, size.width, device=device)

    @torch.no_grad()
    def run(state: tuple[LSLoRALinear, torch.Tensor]) -> torch.Tensor:
        layer, x = state
        for _ in range(2 * size.steps):
            y = layer(x)
        return y

    return Program(
        lambda: (prepare(unfixed.TransferringLSLoRALinear, "cpu"), prepare(LSLoRALinear, device)),
        lambda both: run(both[0]),
        lambda both: run(both[1]),
    )


def adapted(size: Size, device: str) -> nn.Module:
    model = net(16, size.adapted, device)
    attach(model, Config(".*"))
    with torch.no_grad():
        for layer in adapted_layers(model).values():
            phi: Any = layer.fourier_params["default"]
            phi.weight.add_(0.1)
    return model


def regulariser(size: Size, device: str) -> Program:
    def repeated(loss: Callable[[nn.Module], torch.Tensor]) -> Callable[[nn.Module], Any]:
        def run(model: nn.Module) -> None:
            for _ in range(size.steps):
                loss(model).backward()

        return run

    return Program(
        lambda: adapted(size, device),
        repeated(unfixed.fourier_loss_from_host),
        repeated(fourier_loss),
    )


def log_of_diagnostics(size: Size, device: str) -> Program:
    return Program(
        lambda: adapted(size, device),
        lambda model: [unfixed.diagnose_with_graph(model) for _ in range(size.steps)],
        lambda model: [diagnose(model) for _ in range(size.steps)],
    )


def float_plus_tensor(size: Size, device: str) -> Program:
    def summed(start: Callable[[], Any]) -> Callable[[Any], list[Any]]:
        return lambda terms: [sum(terms, start()) for _ in range(size.steps)]

    return Program(
        lambda: torch.ones(size.adapted, device=device).unbind(),
        summed(lambda: 0.0),
        summed(lambda: torch.zeros((), device=device)),
    )


PROGRAMS: dict[str, Callable[[Size, str], Program]] = {
    "collect_retaining_graph": lambda *where: factors(unfixed.collect_retaining_graph, *where),
    "collect_on_device": lambda *where: factors(unfixed.collect_on_device, *where),
    "to_host_converted_first": sent_factor,
    "stabilize_on_device": clipping,
    "full_batch_step": training_step,
    "load_then_convert": loading,
    "cast_and_move_always": nothing_to_convert,
    "save_without_cleanup": saving,
    "ReentrantlyRecomputed": recomputation,
    "TransferringLSLoRALinear": adapter_calls,
    "fourier_loss_from_host": regulariser,
    "diagnose_with_graph": log_of_diagnostics,
    "python_float_plus_tensor": float_plus_tensor,
}
