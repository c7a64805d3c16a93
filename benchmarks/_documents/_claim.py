"""A claim of a document, what is measured for it, and how the two become a row."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from benchmarks._documents._rules import OnGPU, Rule, Verdict
from benchmarks._documents._sources import Sources, traced

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


class Holds(NamedTuple):
    """For which values of an input that its document does not state a claim is true.

    Attributes:
        words: A clause that follows "true": ``"for rows of 290 to 340 tokens"``.
        verdict: ``"true"`` or ``"false"`` where all of those values, or none of them, make it so.
    """

    words: str
    verdict: Verdict = "not decidable"


class Context(NamedTuple):
    """What a measurement may depend on.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        rows: Rows of the claims that were judged before, by name.
        lengths: Planned bytes of FLAN-T5-XL's training: ``{tokens: {column: {row: bytes}}}``.
    """

    device: str
    rows: Mapping[str, "Row"] = {}
    lengths: Mapping[int, Mapping[str, Mapping[str, int]]] = {}


@dataclasses.dataclass(frozen=True)
class Figure:
    """What follows from a layout, a plan or the document's own numbers: counted, not measured.

    Attributes:
        value: Works it out without running a program.
        unit: Its unit.
    """

    value: Callable[[], "float | Measured"]
    unit: str = "GB"

    def __call__(self, context: Context) -> Measured:
        value = self.value()
        return value if isinstance(value, Measured) else Measured(value, unit=self.unit)


@dataclasses.dataclass(frozen=True)
class Claim:
    """One claim, or one figure, of a document.

    Attributes:
        name: ``document/what``.
        text: The claim in our words, with its figure.
        rule: Decides from PyTorch's measurement.
        expected: The verdict that the reason explains; ``None`` where the planner decides and the
            reason explains every verdict.
        reason: One sentence.
        torch: Measures in PyTorch, or works the figure out; ``None`` where only a GPU can.
        jax: Measures the JAX counterpart, or says why there is none.
        alone: Measured in a process of its own: resident memory, time, what runs once.
        needs: Names of claims whose rows it reads.
        holds: Where the document leaves an input open: the values for which the claim is true.
            The row's numbers are then those of one such value, which the reason names.
        remark: What this project adds and the document does not say.
    """

    name: str
    text: str
    rule: Rule
    expected: Verdict | None
    reason: str
    torch: Callable[[Context], Measured]
    jax: Callable[[Context], Measured] | str
    alone: bool = False
    needs: tuple[str, ...] = ()
    holds: Callable[[Context], Holds] | None = None
    remark: str = ""

    def counted(self, framework: Framework) -> bool:
        """Whether this side follows by counting, without a measurement."""
        return isinstance(getattr(self, framework), Figure) or bool(self.needs)

    @property
    def measured(self) -> bool:
        """Whether a program runs for some side of it."""
        sides = (self.torch, *([] if isinstance(self.jax, str) else [self.jax]))
        return not (self.needs or all(isinstance(side, Figure) for side in sides))

    def waits(self, context: Context) -> bool:
        """Whether only a GPU can decide it, and this is none."""
        return isinstance(self.rule, OnGPU) and context.device == "cpu"

    def measure(self, framework: Framework, context: Context) -> Measured | None:
        """In this process or, where the claim asks for it, in a fresh one."""
        work = self.torch if framework == "torch" else self.jax
        if isinstance(work, str):
            return None
        if framework == "torch" and self.waits(context):
            return None
        return _in_fresh_process(self.name, framework, context) if self.alone else work(context)

    def measure_traced(
        self, framework: Framework, context: Context, *, trace: bool
    ) -> tuple[Measured | None, Sources | None]:
        """Also what was entered. What runs alone runs once more for that: tracing takes time."""
        work = self.torch if framework == "torch" else self.jax
        waits = framework == "torch" and self.waits(context)
        if isinstance(work, (str, Figure)) or waits or not trace:
            return self.measure(framework, context), None
        if not self.alone:
            return traced(lambda: work(context))
        value = self.measure(framework, context)
        words = ["--measure", self.name, framework, "--device", context.device, "--trace"]
        functions, found = _said_by_a_process(words, context)
        return value, Sources(tuple(functions), found)


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
        holds: For which values of an input that the document leaves open the claim is true.
        remark: What this project adds.
    """

    name: str
    text: str
    torch: Measured | None
    jax: Measured | str
    verdict: Verdict
    reason: str
    rule: str
    holds: str = ""
    remark: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and words."""
        plain = dataclasses.asdict(self)
        for side in ("torch", "jax"):
            value = getattr(self, side)
            plain[side] = value._asdict() if isinstance(value, Measured) else value
        return plain


def judge(
    claim: Claim,
    torch: Measured | None,
    jax: Measured | None,
    context: Context = Context("cpu"),  # noqa: B008  # immutable
) -> Row:
    """The row of a claim whose measurements are these."""
    holds = claim.holds(context) if claim.holds else None
    if holds is not None:
        verdict = holds.verdict
    else:
        verdict = "needs a GPU" if torch is None else claim.rule.verdict(torch)
    reason = claim.reason
    explained = claim.expected in (None, verdict, "needs a GPU")
    if not explained and verdict != "needs a GPU":
        reason = f"Otherwise than expected; “{claim.expected}” was explained so: {reason}"
    if verdict == "needs a GPU":
        reason += f" `python -m benchmarks.documents --device cuda --claims {claim.name}` decides."
    if not isinstance(claim.jax, str):
        shown: Measured | str = "not measured" if jax is None else jax
    else:
        shown = claim.jax
    words = holds.words if holds else ""
    return Row(
        claim.name, claim.text, torch, shown, verdict, reason, str(claim.rule), words, claim.remark
    )


def _in_fresh_process(name: str, framework: Framework, context: Context) -> Measured:
    words = ["--measure", name, framework, "--device", context.device]
    return Measured(*_said_by_a_process(words, context))


def _said_by_a_process(words: list[str], context: Context) -> Any:
    env = {
        **os.environ,
        # Freed arrays go back to the system at once; without it glibc keeps some of them.
        "MALLOC_MMAP_THRESHOLD_": "1048576",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    if context.device == "cpu":
        env["JAX_PLATFORMS"] = "cpu"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.documents", *words],
        env=env,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])
