"""What each figure of a page is linked to: a record, or a reason why there is none."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks._numbers._figures import Exempt, Linked
from benchmarks._numbers._sections import clock_ratios

MIB = 2**20
SETTING = "a constant of the code, which is no measurement"
ONCE = "measured once by the command beside it; its output is not kept"
DOCUMENTS = "a figure of a document, quoted"
BUDGET = "the time that each run was given"
CONFIDENCE = "the level of an interval"
ASSUMED = "an assumption of benchmarks/devices.py: tests/devices_page_test.py compares the table"


def _errors(record: Any) -> list[float]:
    """How many times each peer's last error is that of jk.spring."""
    ends = {name: errors[-1] for name, (_, errors) in record["curves"].items()}
    ours = ends["jk.spring()"]
    peers = ("SOAP", "L-BFGS", "AdamW")
    return [end / ours for peer in peers for name, end in ends.items() if name.startswith(peer)]


def _spring_step(record: Any) -> list[float]:
    """A step of `jk.spring` without its moves over one of kfac-jax."""
    rows = (record["summary"][method] for method in ("spring", "kfac_jax"))
    ours, theirs = (row["step_cpu_s"] - row["moves_cpu_s"] for row in rows)
    return [ours / theirs]


def _wins_and_losses(record: Any, peer: str) -> list[int]:
    ratios = [ratio for *_, ratio in clock_ratios(record)[peer]]
    return [sum(x < 0.98 for x in ratios), sum(x > 1.02 for x in ratios)]


def _temporaries(*rows: str) -> Callable[[Any], list[float]]:
    """MiB of programs on an H100."""
    return lambda record: [record["rows"][f"h100/{row}"]["temporaries"] / MIB for row in rows]


def _over_gradient(place: str, *pairs: tuple[str, str]) -> Callable[[Any], list[float]]:
    """Temporaries of programs over those of others."""

    def ratios(record: Any) -> list[float]:
        both = (_temporaries(f"{place}/{one}", f"{place}/{two}")(record) for one, two in pairs)
        return [one / two for one, two in both]

    return ratios


def _counted(record: Any) -> list[float]:
    """How far counted totals were from compiled ones, lowest and highest, in per cent."""
    ends: list[float] = []
    for target in ("h100", "cpu"):
        off = [100 * (row["counted"] - 1) for row in record[target].values() if row.get("counted")]
        ends += [-min(off), max(off)]
    return ends


def _influence(record: Any) -> Sequence[Any]:
    return record["wall_seconds"] / 60, record["peak_bytes"] / 1e9


REAL, SMALL = "one device/real", "one device/small/float32"
PARALLEL, SHARDED = "data parallel/small/float32", "fully sharded/small/float32"
EMPIRICAL = ("factors, empirical", "gradient")

README = (
    Linked(
        "README.md",
        "error {:.0f} × below SOAP's after {:g} CPU s",
        "poisson/poisson.json",
        lambda record: [_errors(record)[0], record["seconds"]],
    ),
    Exempt("README.md", "SOAP ended 6.8 and 19 times above `code`", ONCE),
    Linked(
        "README.md",
        "{:.0f} ± {:.0f} millihartree above the exact energy, kfac-jax {:.0f} ± {:.0f} |",
        "atoms-cpu.json",
        lambda record: [
            1e3 * record["summary"][method][name]
            for method in ("spring", "kfac_jax")
            for name in ("last 50", "error of last 50")
        ],
    ),
    Linked("README.md", "takes {:.1f} times kfac-jax's time", "atoms-cpu.json", _spring_step),
    Linked(
        "docs/atoms.md",
        "at {:.1f} times kfac-jax's time per step.",
        "atoms-cpu.json",
        _spring_step,
    ),
    Linked(
        "README.md",
        "CPU seconds: {} wins, {} losses |",
        "clock-cpu.json",
        lambda record: _wins_and_losses(record, "adamw"),
    ),
    Exempt("docs/kfe_adam.md", "the ResNet, by 1.4 %", ONCE),
    Exempt("docs/kfe_adam.md", "on the diffusion 4.5 times", ONCE),
)
PAGE = "docs/accelerators.md"
ACCELERATORS = (
    Exempt(PAGE, "as many at once as 2³¹ − 1 bytes hold", SETTING),
    Exempt(PAGE, "takes more than 300 CPU seconds to compile", SETTING),
    Linked(
        PAGE,
        "they cost {:.2f} times the gradient in float32 and {:.2f} times in bfloat16.",
        "accelerators.json",
        lambda record: [
            _over_gradient(
                f"{REAL}/{dtype}", ("library's decoder, factors", "library's decoder, gradient")
            )(record)[0]
            for dtype in ("float32", "bfloat16")
        ],
    ),
    Linked(
        PAGE,
        "the ratio is {:.2f}, {:.1f} MiB beside {:.1f}:",
        "accelerators.json",
        lambda record: [
            *_over_gradient(SMALL, EMPIRICAL)(record),
            *_temporaries(*(f"{SMALL}/{name}" for name in EMPIRICAL))(record),
        ],
    ),
    Exempt(PAGE, "the head's 256 MiB matrix", "8192² numbers of 4 bytes"),
    Linked(
        PAGE,
        "**Decomposition** needs {:.0f} MiB of temporaries beside {:.0f} MiB of factors.",
        "accelerators.json",
        lambda record: [
            *_temporaries(f"{REAL}/float32/decomposition")(record),
            record["rows"][f"h100/{REAL}/float32/decomposition"]["arguments"] / MIB,
        ],
    ),
    Linked(
        PAGE,
        "the 24 matrices need {:.1f} GiB of scratch.",
        "accelerators.json",
        lambda record: [record["rows"][f"h100/{REAL}/float32/decomposition"]["scratch"] / 2**30],
    ),
    Linked(
        PAGE,
        "Their {:.1f} MiB join the parameters' {:.1f} in the all-reduces",
        "accelerators.json",
        lambda record: [
            (_reduced(record, "factors, empirical") - _reduced(record, "gradient")) / MIB,
            _reduced(record, "gradient") / MIB,
        ],
    ),
    Linked(
        PAGE,
        "temporaries are {:.1f} times the gradient's, {:.1f} MiB beside {:.1f}",
        "accelerators.json",
        lambda record: [
            *_over_gradient(PARALLEL, EMPIRICAL)(record),
            *_temporaries(*(f"{PARALLEL}/{name}" for name in EMPIRICAL))(record),
        ],
    ),
    Linked(
        PAGE,
        "a K-FAC step takes and returns {:.1f} MiB on each device",
        "accelerators.json",
        lambda record: [record["rows"][f"h100/{SHARDED}/K-FAC step"]["arguments"] / MIB],
    ),
    Linked(
        PAGE,
        "It gathers {:.0f} MiB on the way; the gradient alone gathers {:.1f}.",
        "accelerators.json",
        lambda record: [
            record["rows"][f"h100/{SHARDED}/{name}"]["collectives"]["all-gather"]["bytes"] / MIB
            for name in ("K-FAC step", "gradient")
        ],
    ),
)


def _reduced(record: Any, name: str) -> float:
    return record["rows"][f"h100/{PARALLEL}/{name}"]["collectives"]["all-reduce"]["bytes"]


PAGE = "docs/adaptation.md"
ADAPTATION = (
    Linked(
        PAGE,
        "a step of kfac-jax takes {:.2f} times as long as ours",
        "optimizer_steps-cpu.json",
        lambda record: [1 / record["adaptive, adaptive"]["step_ratio"]],
    ),
    Linked(
        PAGE,
        "ran for {:g} CPU seconds: `code` ends at {:.3f} nats, tuned Muon at {:.3f}, SOAP at "
        "{:.3f} and AdamW at {:.3f}.",
        "clock-cpu.json",
        lambda record: [
            record["equal_time"]["decoder"]["kfe_adam"]["cpu_s"],
            *(
                statistics.median(record["equal_time"]["decoder"][name]["values"][1:])
                for name in ("kfe_adam", "muon", "soap", "adamw")
            ),
        ],
    ),
    Exempt(PAGE, "The tolerance is 1 % plus the parameters' rounding", SETTING),
    Exempt(PAGE, "a bias that has less than 1 % of the update's square", SETTING),
    Exempt(
        PAGE,
        "(24.3 s against 25.2 s)",
        "benchmarks/results/optimizers/README.md has 24.31 against 25.17; "
        "tests/optimizers_benchmark_test.py makes that page from its runs",
    ),
    Exempt(PAGE, "its steps cost 2.4 times as much", "by the runs of the optimizers page"),
    Exempt(
        PAGE,
        "reaches 3 % validation error after 220 updates and tuned AdamW after 924",
        "benchmarks/results/digits.md has it; tests/digits_benchmark_test.py makes that page",
    ),
    Exempt(
        PAGE,
        "It takes 0.86 times AdamW's CPU seconds",
        "benchmarks/results/digits.md has 0.86; tests/digits_benchmark_test.py makes that page",
    ),
)
OTHERS = (
    *(
        Exempt("docs/equations.md", f"| {equation}", BUDGET)
        for equation in (
            "Poisson's equation, 6 s",
            "heat in a square, 8 s",
            "Helmholtz's equation (1, 4), 8 s",
            "Burgers' equation, new points, 8 s",
            "Burgers' equation, fixed points, 12 s",
        )
    ),
    Exempt("docs/adapters.md", "with a 95% interval of -10 to +7 points", CONFIDENCE),
    Exempt("docs/adapters.md", "4.13 bits per element in blocks of 64", "4 + 8/64 + 32/(64 · 256)"),
    Exempt("docs/clusters.md", "- 30 seconds in which a process that fails waits", SETTING),
    Exempt("docs/clusters.md", "- 60 seconds until a killed process is detected", SETTING),
    Exempt("docs/clusters.md", "300 seconds before its time is over", SETTING),
    Exempt(
        "docs/migrating.md",
        "24 % off the GGN in a small model",
        "tests/curvlinops_test.py holds it",
    ),
    Exempt("docs/migrating.md", "factors 51 % off brute force", ONCE),
    Exempt("docs/finetuning.md", "it covers 64 MiB of each file, and at most 1 GiB", SETTING),
    Exempt("docs/devices.md", "Totals are within 5 % of the compiled step's", "held by a test"),
    Exempt("docs/devices.md", "its heartbeat is missing (60 seconds after", SETTING),
    Exempt("docs/devices.md", "end with a message within 120 s", SETTING),
    Exempt("docs/devices.md", "40 % of an H100's dense bfloat16", ASSUMED),
    Exempt("docs/devices.md", "450 GB/s (NVLink), 50 GB/s (400 Gb/s between nodes)", ASSUMED),
    Exempt("docs/devices.md", "On 64 devices they take 13 times as long as the gradient", ASSUMED),
    Exempt("docs/devices.md", "The factors take 64 GB and their bases another 64 GB", ASSUMED),
    Exempt("docs/devices.md", "over the devices (8 GB each of 8)", ASSUMED),
    Exempt("docs/adapters.md", "the documented savings of 75 % and 87.5 %", DOCUMENTS),
    Exempt("docs/clusters.md", "Each of the two takes about 0.6 s of CPU time a GiB", ONCE),
    Linked(
        "docs/influence.md",
        "in {:.0f} minutes on two cores, in {:.1f} GB",
        "influence-cpu.json",
        _influence,
    ),
    Exempt("docs/jobs.md", "first reached 3 % error (5 of 179) on the validation images", SETTING),
    Exempt("docs/jobs.md", "with 95 % intervals", CONFIDENCE),
    Exempt("docs/jobs.md", "cut off at 0 and at 100 % accuracy", "an accuracy is at most 100 %"),
    Exempt("docs/jobs.md", "SmolLM2-135M (93 MB, downloaded on first use)", "the size of a file"),
    Exempt("docs/jobs.md", "for 40 updates took 2 min 56 s on two cores", ONCE),
    Exempt("docs/jobs.md", "went from 35.0 % [22, 50] to 47.5 % [33, 63]", ONCE),
    Linked(
        "docs/laplace.md",
        "in {:.0f} s of CPU time",
        "calibration.json",
        lambda record: [record["cpu_seconds"]],
    ),
    Exempt(
        "docs/loops.md",
        "by 19 times the length of the right update",
        "jaxkfac/optim/_multi_steps_test.py holds 18.9",
    ),
    Exempt("docs/loops.md", "updates smaller than 0.2 % of a parameter", "half of bfloat16's 2⁻⁸"),
    Exempt("docs/losses.md", "After 300 steps (9 s of CPU time, compilation included)", ONCE),
    Exempt("docs/losses.md", "(A by 12 % in a small network)", ONCE),
    Linked(
        "docs/memory.md",
        "a fixed step of the autoencoder of the K-FAC papers takes {:.2f} times as long packed",
        "packed_steps-cpu.json",
        lambda record: [record["packed"]["step_ratio"]],
    ),
    Linked(
        "docs/memory.md",
        "Totals counted this way are {:.0f} % too low to {:.0f} % too high for an H100, and "
        "{:.0f} % too low to {:.0f} % too high for a CPU",
        "plan.json",
        _counted,
    ),
    Linked(
        "docs/memory.md",
        "a step took {:.0f} ms and the decompositions {:.2f} s each time. With `code`, every tenth "
        "step waited for {:.1f} s of them ([record](../benchmarks/results/overlap-gpu.json)). That "
        "is the time of {:.0f} steps.",
        "overlap-gpu.json",
        lambda record: _waited(record),
    ),
    Linked(
        "docs/memory.md",
        "parameters, gradients and momentum alone take {:.0f} GiB.",
        "kfac_bytes.json",
        lambda record: [record["llama-7b"]["exact damping"]["parameters_gradients_momentum"]],
    ),
    Linked(
        "docs/memory.md",
        "kfac-jax 0.0.8 keeps averages and inverses of {:.1f} MiB. `code` with `code` keeps "
        "{:.1f} MiB in full and {:.1f} MiB packed",
        "kfac_bytes.json",
        lambda record: [
            record["autoencoder, beside kfac-jax"][name]
            for name in ("peer_mib", "dense_mib", "packed_mib")
        ],
    ),
    Exempt("docs/memory.md", "fits one device of 80 GB", "the size of a device"),
    Exempt(
        "docs/memory.md",
        "Gradients are then 0.4 % off over 16 micro-batches",
        "jaxkfac/optim/_accumulators_test.py holds it",
    ),
    Exempt("docs/analysis.md", "and allows 320 MiB for it to grow", SETTING),
    Exempt("docs/analysis.md", "and has 8 MiB to spare", SETTING),
    Exempt("docs/analysis.md", "10 MB is refused, and the error names 714 MiB", ONCE),
    Exempt("docs/finetuning.md", "(370 s of CPU time on one core, at most 1.3 GB", ONCE),
    Exempt("docs/finetuning.md", "the documented run (8 rows, 16 times,", DOCUMENTS),
    Exempt("docs/troubleshooting.md", "`code` of 400 layers takes 83 seconds", ONCE),
    Exempt("docs/troubleshooting.md", "JAX takes 75 % of a GPU when it starts", "JAX's default"),
    Exempt("docs/troubleshooting.md", "takes 28 times as long in a loop", ONCE),
    Exempt("docs/troubleshooting.md", "then takes 1.0 times the gradient", ONCE),
)


def _waited(record: Any) -> list[float]:
    """Median step in ms; seconds of a round of decompositions, of waiting for one; in steps."""
    step, rounds = statistics.median(record["step_ms"]), record["steps"] // 10
    waited = statistics.median(sorted(record["step_ms"])[-rounds:]) - step
    return [step, record["overlap"]["decomposing_s"] / rounds, waited / 1e3, waited / step]


QUOTED: tuple[Linked | Exempt, ...] = (*README, *ACCELERATORS, *ADAPTATION, *OTHERS)
