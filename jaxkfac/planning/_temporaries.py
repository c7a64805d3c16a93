"""What a program needs beside its arguments and results: from shapes, or from a compiler."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from jaxkfac._errors import CompilerError
from jaxkfac.memory import divided_shardings
from jaxkfac.planning._compilers import TargetName, compiled_bytes, target_of
from jaxkfac.planning._liveness import live_bytes
from jaxkfac.planning._placement import mesh_here, mesh_of, on_devices
from jaxkfac.planning._program_work import collective_bytes

_FAST: Any = {
    "xla_backend_optimization_level": 0
}  # of LLVM, which has no part in what is allocated


class Needs(NamedTuple):
    """What a program needs beside its arguments and results.

    Attributes:
        temporaries: Bytes.
        collectives: Bytes of what collectives return, by kind; empty unless it was compiled for
            several devices.
    """

    temporaries: int
    collectives: Mapping[str, int] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Temporaries:
    """Who says it.

    Attributes:
        target: Of whose programs; ``None`` is this process's own device.
        python: An interpreter that has the target's compiler.
        compiled: Whether the compiler is asked; else the bytes follow from the equations.
        timeout: Most seconds for a compiler in a child process.
        factor: By what counted bytes are multiplied.
    """

    target: TargetName | None = None
    python: str | Path = sys.executable
    compiled: bool = False
    timeout: float | None = None
    factor: float = 1.0

    def __post_init__(self) -> None:
        if self.target is not None:
            target_of(self.target)

    @property
    def title(self) -> str:
        """The device in words."""
        if self.target is not None:
            return target_of(self.target).title
        return "this CPU" if self.platform == "cpu" else jax.devices()[0].device_kind

    @property
    def platform(self) -> str:
        """JAX's name for the platform that is planned for."""
        return _own_platform() if self.target is None else target_of(self.target).platform

    def __call__(
        self,
        step: Callable[..., Any],
        *args: Any,
        donate_argnums: Sequence[int] = (),
        in_turn: bool = False,
        traced: Any = None,
        only: int | None = None,
    ) -> Needs:
        """What ``step`` needs on shapes; results are divided over a mesh of theirs.

        The last three are those of ``live_bytes``; a compiler does not need them.

        Raises:
            CompilerNotFoundError: the target's compiler is not installed; what to install.
            CompilerError: the compiler fails, or runs out of time.
        """
        if not self.compiled:
            how = {"donate_argnums": donate_argnums, "in_turn": in_turn}
            how |= {"traced": traced, "only": only}
            counted = live_bytes(step, *args, platform=self.platform, **how)
            return Needs(round(self.factor * counted))
        return self._ask(step, *args, donate_argnums=donate_argnums)

    def _ask(self, step: Callable[..., Any], *args: Any, donate_argnums: Sequence[int]) -> Needs:
        mesh = mesh_of(args)
        if not self._is_here(1 if mesh is None else mesh.size):
            found = compiled_bytes(
                *(step, *args),
                donate_argnums=donate_argnums,
                out_shardings=_shardings_of_results(step, args),
                target=self.target or "cpu",
                python=self.python,
                timeout=self.timeout,
            )
            return Needs(found.temporaries, found.collectives)
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh_here(mesh)):
            args = args if mesh is None else on_devices(args, mesh_here(mesh))
            # As a list: JAX would fill classes of results with shardings.
            places = jax.tree.leaves(_shardings_of_results(step, args)) or None
            flat = lambda *args: jax.tree.leaves(step(*args))
            run = jax.jit(flat, donate_argnums=donate_argnums, out_shardings=places)
            return self._compiled(run.lower(*args), several=mesh is not None)

    def _is_here(self, devices: int) -> bool:
        """Whether this process compiles for so many devices, or a child process does.

        Raises:
            CompilerError: no process can.
        """
        own = self.platform == _own_platform() and self.target in (None, "cpu")
        if own and len(jax.devices()) < devices and self.platform != "cpu":
            raise CompilerError(
                f'this process has {len(jax.devices())} of {devices} devices: compiler="h100" '
                "compiles without any"
            )
        return own and len(jax.devices()) >= devices

    def _compiled(self, lowered: Any, *, several: bool) -> Needs:
        options = _FAST if self.platform == "cpu" else None
        try:
            compiled = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            raise CompilerError(f"compiling for {self.title}: {error}".splitlines()[0]) from error
        analysis = compiled.memory_analysis()
        assert analysis is not None  # the compilers of CPUs, GPUs and TPUs have one
        sent = collective_bytes(compiled.as_text()) if several else {}
        return Needs(int(analysis.temp_size_in_bytes), sent)


def _shardings_of_results(step: Callable[..., Any], args: Any) -> Any:
    """Those that are planned, ``None`` on one device."""
    mesh = mesh_of(args)
    if mesh is None:
        return None
    with jax.sharding.use_abstract_mesh(mesh):
        results = jax.eval_shape(step, *args)
    first = jax.tree.leaves(args)[0].sharding.mesh
    return divided_shardings(results, first, first.axis_names)


# How far totals from counted temporaries have been off, scratch aside, and from those calibrated
# by a compilation of the training as it stands: the most in `python -m benchmarks.plan`. What
# equations do not say: on a CPU kernels take constants as whole arrays (44 MiB of the 142 of the
# training of adapters); on a GPU long products are split into partial sums, as autotuning decides,
# and what a branch leaves as it was is copied (30 % of a step of K-FAC that is staggered).
_WITHIN = {"cpu": 0.35, "cuda": 0.31}
_CALIBRATED_WITHIN = {"cpu": 0.22, "cuda": 0.15}
_UNKNOWN = 0.5  # a platform that nobody has measured


def within(platform: str, *, calibrated: bool) -> float:
    """What share of a total its estimate may be off by."""
    return (_CALIBRATED_WITHIN if calibrated else _WITHIN).get(platform, _UNKNOWN)


def _own_platform() -> str:
    backend = jax.default_backend()
    return backend if backend != "gpu" else "cuda"
