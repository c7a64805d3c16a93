"""What a program needs beside its arguments and results: from shapes, or from a compiler."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxkfac.planning._compilers import TargetName, compiled_bytes, target_of
from jaxkfac.planning._liveness import live_bytes
from jaxkfac.planning._shapes import as_float16

_FAST: Any = {
    "xla_backend_optimization_level": 0
}  # of LLVM, which has no part in what is allocated


@dataclasses.dataclass(frozen=True)
class Temporaries:
    """Who is asked.

    Attributes:
        target: ``None``: nobody, the bytes follow from the program's equations; else the target
            whose compiler is asked.
        python: An interpreter that has that compiler.
    """

    target: TargetName | None = None
    python: str | Path = sys.executable

    def __post_init__(self) -> None:
        if self.target is not None:
            target_of(self.target)

    @property
    def title(self) -> str:
        """In words."""
        return "no compiler" if self.target is None else target_of(self.target).title

    @property
    def platform(self) -> str:
        """JAX's name for the platform that is planned for."""
        if self.target is None:
            backend = jax.default_backend()
            return backend if backend != "gpu" else "cuda"
        return target_of(self.target).platform

    def __call__(
        self,
        step: Callable[..., Any],
        *args: Any,
        donate_argnums: Sequence[int] = (),
        in_turn: bool = False,
    ) -> int:
        """Bytes of the temporaries of ``step`` on shapes; ``in_turn`` as in ``live_bytes``.

        XLA computes bfloat16 on the CPU in float32, and keeps both: 158 GB for a program that
        takes 130 in float32 and 87 in float16. So on the CPU the bytes are those of float16,
        where the program takes that.

        Raises:
            CompilerNotFoundError: the target's compiler is not installed; what to install.
        """
        if self.target is None:
            how = {"donate_argnums": donate_argnums, "in_turn": in_turn}
            return live_bytes(step, *args, platform=self.platform, **how)
        if self.target == "cpu" and (halves := as_float16(args)) != args:
            with contextlib.suppress(TypeError, ValueError):
                return self._compiled(step, *halves, donate_argnums=donate_argnums)
        return self._compiled(step, *args, donate_argnums=donate_argnums)

    def _compiled(self, step: Callable[..., Any], *args: Any, donate_argnums: Sequence[int]) -> int:
        assert self.target is not None
        if self.target != "cpu" or jax.default_backend() != "cpu":
            options = {"target": self.target, "python": self.python}
            return compiled_bytes(step, *args, donate_argnums=donate_argnums, **options).temporaries
        lowered = jax.jit(step, donate_argnums=donate_argnums).lower(*args)
        analysis = lowered.compile(compiler_options=_FAST).memory_analysis()
        assert analysis is not None  # the CPU's compiler always has one
        return int(analysis.temp_size_in_bytes)
