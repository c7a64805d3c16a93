"""Runs of a peer in an environment of its own, where there is one."""

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.optimizers._method import Setting
from benchmarks.optimizers._problem import Arrays, Problem

VARIABLE = "KFAC_JAX_PYTHON"  # the Python of an environment with kfac-jax


def in_peer(module: str) -> Callable[..., dict[str, Any]]:
    """Runs of ``benchmarks.optimizers.<module>`` there.

    The process of the last setting is kept, as its programs are: seeds share them.

    Raises:
        RuntimeError: it failed; with the line of its error.
    """
    kept: dict[tuple[Problem, str], _Process] = {}

    def run(
        problem: Problem,
        data: Arrays,
        setting: Setting,
        *,
        seed: int,
        budget: float,
        steps: int = 0,
    ) -> dict[str, Any]:
        key = problem, json.dumps(dict(setting))
        if key not in kept:
            while kept:
                kept.popitem()[1].end()
            kept[key] = _Process(module, problem.name, data, key[1])
        try:
            return kept[key].run(*((seed, budget, steps) if steps else (seed, budget)))
        except RuntimeError:
            kept.pop(key).end()
            raise

    return run


class _Process:
    """One that reads a seed, CPU seconds and steps a line, and answers with a line of JSON.

    It ends with this one: its input does.
    """

    def __init__(self, module: str, name: str, data: Arrays, setting: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        file, self._errors = (Path(self._folder.name, x) for x in ("data.npz", "errors"))
        np.savez(file, **data)  # pyright: ignore[reportArgumentType]
        command = [os.environ[VARIABLE], "-m", f"benchmarks.optimizers.{module}"]
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [*command, name, str(file), setting],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=Path(__file__).parents[2],
                env={**os.environ, "XLA_FLAGS": ""},  # ours may not be known to its XLA
            )

    def run(self, *numbers: float) -> dict[str, Any]:
        """The answer.

        Raises:
            RuntimeError: the process has ended instead.
        """
        words, answers = self._process.stdin, self._process.stdout
        assert words is not None and answers is not None  # they are pipes
        try:
            words.write(" ".join(map(str, numbers)) + "\n")
            words.flush()
        except BrokenPipeError:  # it has ended: there is no answer either
            pass
        if answer := answers.readline():
            return json.loads(answer)
        status = self._process.wait()
        raise RuntimeError(f"status {status}: {error_of(self._errors.read_text())}")

    def end(self) -> None:
        """Let it go."""
        self._process.communicate()
        self._folder.cleanup()


def error_of(text: str) -> str:
    """The last line of a traceback that names an error, else the last line.

    An error without words is told with the line that it was raised from.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    named = [i for i, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)]
    last = (named or [len(lines) - 1])[-1]
    found = lines[last]
    if named and last and ":" not in found:
        found = f"{found}: {lines[last - 1]}"
    return found[:300]
