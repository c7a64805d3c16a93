"""A claim of a document, what is measured for it, and how the two become a row."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from benchmarks._documents._rules import OnGPU, Rule, Verdict

Framework = Literal["torch", "jax"]


class Measured(NamedTuple):
    """One quantity.

    Attributes:
        before: With the fault, or of the thing as it is where there is no remedy.
        after: With the document's own remedy.
        unit: Of both.
    """

    before: float
    after: float | None = None
    unit: str = ""


class Context(NamedTuple):
    """What a measurement may depend on.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        rows: Of the claims that were judged before, by name.
    """

    device: str
    rows: Mapping[str, "Row"] = {}


@dataclasses.dataclass(frozen=True)
class Claim:
    """One claim, or one figure, of a document.

    Attributes:
        name: ``document/what``.
        text: The claim in our words, with its figure.
        rule: Decides from PyTorch's measurement.
        expected: The verdict that the reason explains.
        reason: One sentence.
        torch: Measures in PyTorch, or works the figure out; ``None`` where only a GPU can.
        jax: Measures the JAX counterpart, or says why there is none.
        alone: Measured in a process of its own: resident memory, time, what runs once.
        needs: Names of claims whose rows it reads.
    """

    name: str
    text: str
    rule: Rule
    expected: Verdict
    reason: str
    torch: Callable[[Context], Measured]
    jax: Callable[[Context], Measured] | str
    alone: bool = False
    needs: tuple[str, ...] = ()

    def measure(self, framework: Framework, context: Context) -> Measured | None:
        """In this process or, where the claim asks for it, in a fresh one."""
        work = self.torch if framework == "torch" else self.jax
        if isinstance(work, str):
            return None
        if framework == "torch" and isinstance(self.rule, OnGPU) and context.device == "cpu":
            return None
        return _in_fresh_process(self.name, framework, context) if self.alone else work(context)


@dataclasses.dataclass(frozen=True)
class Row:
    """A claim that has been judged.

    Attributes:
        name: Of the claim.
        text: Likewise.
        torch: Before and after in PyTorch; ``None`` where a GPU is needed.
        jax: Before and after in JAX, or why there is no such thing.
        verdict: By the rule.
        reason: Why it is so.
        rule: In words.
    """

    name: str
    text: str
    torch: Measured | None
    jax: Measured | str
    verdict: Verdict
    reason: str
    rule: str

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and words."""
        plain = dataclasses.asdict(self)
        for side in ("torch", "jax"):
            value = getattr(self, side)
            plain[side] = value._asdict() if isinstance(value, Measured) else value
        return plain


def judge(claim: Claim, torch: Measured | None, jax: Measured | None) -> Row:
    """The row of a claim whose measurements are these."""
    verdict = "needs a GPU" if torch is None else claim.rule.verdict(torch)
    reason = claim.reason
    explained = claim.expected in (verdict, "needs a GPU")
    if not explained and verdict != "needs a GPU":
        reason = f"Otherwise than expected; “{claim.expected}” was explained so: {reason}"
    if verdict == "needs a GPU":
        reason += f" `python -m benchmarks.documents --device cuda --claims {claim.name}` decides."
    if not isinstance(claim.jax, str):
        shown: Measured | str = "not measured" if jax is None else jax
    else:
        shown = claim.jax
    return Row(claim.name, claim.text, torch, shown, verdict, reason, str(claim.rule))


def figure(value: Callable[[], float], unit: str = "GB") -> Callable[[Context], Measured]:
    """A number that follows from a layout or from a plan."""
    return lambda context: Measured(value(), unit=unit)


def _in_fresh_process(name: str, framework: Framework, context: Context) -> Measured:
    env = {
        **os.environ,
        # Freed arrays go back to the system at once; without it glibc keeps some of them.
        "MALLOC_MMAP_THRESHOLD_": "1048576",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    if context.device == "cpu":
        env["JAX_PLATFORMS"] = "cpu"
    words = ["--measure", name, framework, "--device", context.device]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.documents", *words],
        env=env,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{framework} of {name} failed:\n{done.stderr[-2000:]}")
    return Measured(*json.loads(done.stdout.splitlines()[-1]))
