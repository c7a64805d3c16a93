"""What a program needs beside its arguments and results: from shapes, or from a compiler."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxkfac._errors import CompilerError
from jaxkfac.planning._compilers import TargetName, compiled_bytes, target_of
from jaxkfac.planning._liveness import live_bytes
from jaxkfac.planning._shapes import as_float16

_FAST: Any = {
    "xla_backend_optimization_level": 0
}  # of LLVM, which has no part in what is allocated


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
    ) -> int:
        """Bytes of the temporaries of ``step`` on shapes.

        The last three are those of ``live_bytes``; a compiler does not need them.

        XLA computes bfloat16 on the CPU in float32, and keeps both: 158 GB for a program that
        takes 130 in float32 and 87 in float16. So on the CPU the bytes are those of float16,
        where the program takes that.

        Raises:
            CompilerNotFoundError: the target's compiler is not installed; what to install.
            CompilerError: the compiler fails, or runs out of time.
        """
        if not self.compiled:
            how = {"donate_argnums": donate_argnums, "in_turn": in_turn}
            how |= {"traced": traced, "only": only}
            counted = live_bytes(step, *args, platform=self.platform, **how)
            return round(self.factor * counted)
        # Of leaves: factors are compared item by item, and those of shapes have none.
        if self.platform == "cpu" and any(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(args)):
            with contextlib.suppress(TypeError, ValueError):
                return self._ask(step, *as_float16(args), donate_argnums=donate_argnums)
        return self._ask(step, *args, donate_argnums=donate_argnums)

    def _ask(self, step: Callable[..., Any], *args: Any, donate_argnums: Sequence[int]) -> int:
        if self.platform != _own_platform() or self.target not in (None, "cpu"):
            assert self.target is not None
            return compiled_bytes(
                *(step, *args),
                donate_argnums=donate_argnums,
                target=self.target,
                python=self.python,
                timeout=self.timeout,
            ).temporaries
        lowered = jax.jit(step, donate_argnums=donate_argnums).lower(*args)
        options = _FAST if self.platform == "cpu" else None
        try:
            analysis = lowered.compile(compiler_options=options).memory_analysis()
        except jax.errors.JaxRuntimeError as error:
            raise CompilerError(f"compiling for {self.title}: {error}".splitlines()[0]) from error
        assert analysis is not None  # the compilers of CPUs, GPUs and TPUs have one
        return int(analysis.temp_size_in_bytes)


# How far totals from counted temporaries have been off, scratch aside, and from those calibrated
# by a compilation of the training as it stands: the most in `python -m benchmarks.plan`. What
# equations do not say: on a CPU kernels take constants as whole arrays (44 MiB of the 142 of the
# training of adapters); on a GPU long products are split into partial sums, as autotuning decides.
_WITHIN = {"cpu": 0.35, "cuda": 0.15}
_CALIBRATED_WITHIN = {"cpu": 0.22, "cuda": 0.15}
_UNKNOWN = 0.5  # a platform that nobody has measured


def within(platform: str, *, calibrated: bool) -> float:
    """What share of a total its estimate may be off by."""
    return (_CALIBRATED_WITHIN if calibrated else _WITHIN).get(platform, _UNKNOWN)


def _own_platform() -> str:
    backend = jax.default_backend()
    return backend if backend != "gpu" else "cuda"
