"""What the page takes from each record: a function for each, and its line in ``SECTIONS``."""

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks._numbers._row import Goal, Row, Section
from benchmarks._numbers._uses import USES
from benchmarks.mutants import killed_by

PROGRAMS = {
    "dense": "8 dense layers of 512, 4096 rows",
    "scanned": "4 scanned, rematted blocks, d 256, hidden 512, 4 × 256 tokens",
    "scanned_long": "the same, 1 × 1024 tokens",
    "scanned_short": "the same, 8 × 128 tokens",
    "scanned_wide": "4 × 256 tokens, hidden 1024",
}


def _times(value: float) -> str:
    return f"{value:.2f} ×"


def _factors(record: Any) -> Iterator[Row]:
    bounds = {"dense": 1.45, "scanned": 1.20, "scanned_wide": 1.40}
    for key, program in PROGRAMS.items():
        here = record[key]
        ratio, bound = here["time_ratio"], bounds.get(key)
        yield Row(f"time, {program}", _times(ratio), "1", bound and Goal(ratio, bound))
    if peer := record.get("curvlinops"):
        beside = f"curvlinops {_times(peer['gradient_and_factors_ratio'])}, of PyTorch's gradient"
        what = "time, 8 dense layers of 512, gradient and factors"
        yield Row(what, _times(record["dense"]["time_ratio"]), beside)
    for key, program in PROGRAMS.items():
        here, gradient = record[key]["temp_mib"], record[key]["gradient_temp_mib"]
        yield Row(f"temporaries, {program}", f"{here:.0f} MiB", f"{gradient:.0f} MiB")
    for key in ("dense", "scanned_wide"):
        here, goal = record[key], key == "scanned_wide"
        rows, mean, between = here["subsample_0.25"], here["every_4"], here["between"]
        of = PROGRAMS[key]
        yield Row(f"time, `subsample=0.25`, {of}", _times(rows), "1", goal and Goal(rows, 1.17))
        yield Row(f"time, `every=4`, mean, {of}", _times(mean), "1", goal and Goal(mean, 1.15))
        yield Row(f"time of a step that skips, {of}", _times(between), "1", Goal(between, 1.03))
    wall, cpu = (record["dense"][f"compile_{x}ratio"] for x in ("", "cpu_"))
    yield Row("compiling for the CPU, dense, in CPU seconds", _times(cpu), "1", Goal(cpu, 2))
    yield Row("the same, in wall time of two cores", _times(wall), "1")


def _tracing(record: Any) -> Iterator[Row]:
    here = record["decoder"]
    ratio, shapes = here["statistics_ratio"], here["factor_shapes_s"] + here["find_layers_s"]
    gradient = f"{here['gradient_s']:.2f} s"
    yield Row("statistics", f"{here['statistics_s']:.2f} s", gradient, Goal(ratio, 1.8, unit=" ×"))
    goal = Goal(here["sampled_ratio"], 1.8, unit=" ×")
    yield Row("statistics, sampled labels", f"{here['sampled_s']:.2f} s", gradient, goal)
    yield Row("floor of statistics", f"{here['floor_ratio']:.2f} × the gradient")
    yield Row("floor of sampled ones", f"{here['sampled_floor_ratio']:.2f} × the gradient")
    what = "`factor_shapes`, layers found included"
    yield Row(what, f"{shapes:.3f} s", "", Goal(shapes, 0.5, unit=" s"))


def _ekfac(record: Any) -> Iterator[Row]:
    for key in ("dense", "scanned", "scanned_short", "scanned_wide"):
        here = record[key]
        yield Row(f"time, {PROGRAMS[key]}", _times(here["time_ratio"]), "1")
    for key in ("dense", "scanned"):
        here = record[key]
        gradient = f"{here['gradient_temp_mib']:.0f} MiB"
        yield Row(f"temporaries, {PROGRAMS[key]}", f"{here['temp_mib']:.0f} MiB", gradient)


def _gram(record: Any) -> Iterator[Row]:
    programs = {
        "perceptron": ("perceptron 64-256-256-10, 256 rows", 0.03),
        "attention": ("block of width 192, 48 sequences of 8", 0.15),
        "attention_long": ("block of width 64, 64 sequences of 32", None),
    }
    for key, (title, bound) in programs.items():
        here = record[key]
        for what, unit, ratio in (("time", "ms", "time"), ("temporaries", "MiB", "bytes")):
            keys = ("gram", "gradients") if unit == "ms" else ("gram_temp", "gradients_temp")
            mine, theirs = (f"{here[f'{k}_{unit.lower()}']:.3g} {unit}" for k in keys)
            goal = bound and Goal(here[f"{ratio}_ratio"], bound, unit=" ×")
            yield Row(f"{what}, {title}", mine, theirs, goal)


def _decomposition(record: Any) -> Iterator[Row]:
    for key, here in record.items():
        if isinstance(here, dict):
            what = f"{here['matrices']} matrices, {key.replace('_', ' ')}"
            lapack = f"{here['lapack_s']:.2f} s"
            yield Row(what, f"{here['eigendecompose_s']:.2f} s", lapack)


def _host(record: Any) -> Iterator[Row]:
    here = record["time"]
    push = here["push_and_average_over_gradient"]
    share = Goal(100 * push, 5, unit=" %")
    yield Row("push and average, of a gradient's time", f"{100 * push:.1f} %", "", share)
    if "packed_push_and_average_over_gradient" in here:
        packed = 100 * here["packed_push_and_average_over_gradient"]
        goal = Goal(packed, 5, unit=" %")
        yield Row("push and average of packed factors", f"{packed:.1f} %", "", goal)
    waiting, noise = here["waiting_step_ratio"], here["waiting_noise"]
    yield Row(
        "a step beside a decomposition that has been slowed down",
        f"{waiting:.2f} ± {noise:.2f} ×",
        "1, a step without one",
    )
    busy = _times(here["busy_step_ratio"])
    yield Row("a step while a decomposition shares the CPU", busy, "1, a step without one")
    peak, bound = record["memory"]["peak_mib"], record["memory"]["bound_mib"]
    yield Row("peak of main memory", f"{peak:.0f} MiB", f"{bound:.0f} MiB, the stated bound")


def _bases(record: Any) -> Iterator[Row]:
    for name, here in record["rows"].items():
        kept = f"{here['bases_on_device_mib']:.2f} MiB on the device"
        yield Row(name, f"{kept}, {here['cpu_seconds']:.3f} CPU s, off by {here['off_by']:.1e}")


def _steps(record: Any) -> Iterator[Row]:
    fixed, beside = record["fixed, fixed"], record["fixed, adaptive"]
    adaptive = record["adaptive, adaptive"]
    for what, here, bound in (
        ("a step, both with fixed settings", fixed, 1.0),
        ("a step, ours fixed, theirs adaptive", beside, 0.85),
        ("a step, both adaptive", adaptive, None),
    ):
        ours, theirs = f"{here['ours_step_ms']:.0f} ms", f"{here['peer_step_ms']:.0f} ms"
        yield Row(what, ours, theirs, bound and Goal(here["step_ratio"], bound, unit=" ×"))
    for what, here in (("fixed", fixed), ("adaptive", adaptive)):
        ours, theirs = f"{here['first_step_s']:.1f} s", f"{here['peer_first_step_s']:.1f} s"
        goal = Goal(here["first_step_ratio"], 0.8, unit=" ×")
        yield Row(f"the first step, compiled, both {what}", ours, theirs, goal)
    for what, here in (("fixed", fixed), ("adaptive", adaptive)):
        ours, theirs = here["losses"][-1], here["peer_losses"][-1]
        yield Row(f"loss after {here['steps']} steps, both {what}", f"{ours:g}", f"{theirs:g}")
    ratio = record["preconditioning"]["preconditioning_ratio"]
    two = f"{record['preconditioning']['two_products_ms']:.0f} ms"
    four = f"{record['preconditioning']['four_products_ms']:.0f} ms with four products"
    yield Row("preconditioning with two products", two, four, Goal(ratio, 0.65, unit=" ×"))
    cpu = record["update of 48 layers, exact"]["compile_cpu_s"]
    yield Row("compiling an update of 48 layers", f"{cpu:.1f} CPU s", "", Goal(cpu, 6, unit=" s"))


def _adapters(record: Any) -> Iterator[Row]:
    for size in ("576", "1024", "3072"):
        here = record[size]
        peft = here["torch peft"]["over_base"]
        qwix = here["jax qwix"]["over_base"]
        beside = f"PEFT {peft:.2f} ×, qwix {qwix:.2f} ×"
        yield Row(f"plain LoRA, d {size}", _times(here["jax linear"]["over_base"]), beside)
        for kind, name in (("bottleneck", "the bottleneck"), ("output", "the outputs")):
            ratio = _times(here[f"jax {kind}"]["over_base"])
            yield Row(f"LS-LoRA in {name}, d {size}", ratio)
    for goal in record["goals"]:
        at = f", d {goal['d']}" if goal["d"] else ""
        kept = Goal(goal["measured"], goal["at_most"])
        yield Row(f"{goal['goal']}{at}", f"{goal['measured']:.2f}", "", kept)


def _memory(record: Any) -> Iterator[Row]:
    for name, here in record.items():
        if isinstance(here, dict):
            measured = f"{here['measured_mib']:.0f} MiB measured"
            yield Row(name, f"{here['planned_mib']:.0f} MiB planned", measured)


def _plan(record: Any) -> Iterator[Row]:
    for target, name in (("cpu", "a CPU"), ("h100", "an H100")):
        totals = record[target].values()
        for column, what, bound in (
            ("plan", "with its own compiled programs", 5.0),
            ("counted", "counted from equations alone", None),
        ):
            ratios = [100 * (row[column] - 1) for row in totals if row.get(column)]
            low, high = min(ratios), max(ratios)
            furthest = max(abs(low), abs(high))
            yield Row(
                f"{len(ratios)} trainings for {name}, {what}",
                f"{low:+.1f} % to {high:+.1f} %",
                "",
                bound and Goal(furthest, bound, unit=" %"),
            )


def _accelerators(record: Any) -> Iterator[Row]:
    rows = record["rows"]
    for dtype in ("float32", "bfloat16"):
        at = f"h100/one device/real/{dtype}"
        gradient = rows[f"{at}/gradient"]["temporaries"] / 2**20
        for name in ("factors, empirical", "factors, mc", "EKFAC pass", "K-FAC step"):
            here = rows[f"{at}/{name}"]["temporaries"] / 2**20
            goal = name.startswith("factors") and Goal(here / gradient, 1.05, unit=" ×")
            what = f"temporaries, {name}, {dtype}"
            yield Row(what, f"{here:.0f} MiB", f"{gradient:.0f} MiB", goal)
    for dtype in ("float32", "bfloat16"):
        at = f"h100/one device/others/{dtype}/dense 8 x 512"
        here, gradient = (rows[f"{at}, {x}"]["compile_cpu_s"] for x in ("factors", "gradient"))
        goal = Goal(here / gradient, 2, unit=" ×")
        yield Row(f"compiling, dense, {dtype}", f"{here:.2f} CPU s", f"{gradient:.2f} CPU s", goal)
    update = "h100/one device/others/float32/K-FAC update of 48 layers, exact"
    cpu = rows[update]["compile_cpu_s"]
    yield Row("compiling an update of 48 layers", f"{cpu:.1f} CPU s", "", Goal(cpu, 20, unit=" s"))


def _data(record: Any) -> Iterator[Row]:
    speed, first = record["stream"]["samples_per_second"], record["first_step"]["wall_s"]
    yield Row(
        "samples a second, without training",
        f"{speed:,.0f}",
        "",
        Goal(speed, 2000, at_least=True),
    )
    yield Row("from the command to its end, one step", f"{first:.0f} s", "", Goal(first, 60))
    early, late = record["stream"]["resident_early_mib"], record["stream"]["resident_late_mib"]
    yield Row("main memory after a twentieth, and after all", f"{early:.0f} MiB, {late:.0f} MiB")
    longest, fixed = (record["padding"][x] for x in ("longest_of_batch", "fixed"))
    yield Row(
        "bytes of batches padded to their longest row",
        f"{longest['batch_bytes'] / 1024:.0f} KiB",
        f"{fixed['batch_bytes'] / 1024:.0f} KiB at a fixed length",
    )


def _influence(record: Any) -> Iterator[Row]:
    minutes, peak = record["wall_seconds"] / 60, record["peak_bytes"] / 1e9
    of = f"{record['texts']} texts for {len(record['queries'])} queries"
    yield Row(f"{of}, from nothing", f"{minutes:.1f} minutes", "", Goal(minutes, 40))
    until, before = record["wall_seconds_until"], 0.0
    for stage in ("factors", "bases", "scores"):
        yield Row(f"of these, {stage}", f"{(until[stage] - before) / 60:.1f} minutes")
        before = until[stage]
    yield Row("processor time", f"{record['cpu_seconds']:.0f} s")
    yield Row("peak of main memory", f"{peak:.2f} GB", "", Goal(peak, 6, unit=" GB"))


def _first_steps(record: Any) -> Iterator[Row]:
    titles = {"first_step": "first step", "ten_steps": "first ten steps, every program compiled"}
    for settings in ("fixed, fixed", "default, adaptive", "one damping, adaptive"):
        found = record[settings]
        for key, title in titles.items():
            asked = (settings, key) == ("default, adaptive", "first_step")
            goal = Goal(found[f"{key}_cpu_ratio"], 1.0, unit=" ×") if asked else None
            here, beside = (f"{found[f'{x}{key}_cpu_s']:.1f} CPU s" for x in ("", "peer_"))
            yield Row(f"{title}, {settings.partition(', ')[0]}", here, beside, goal)


def _compile_time(record: Any) -> Iterator[Row]:
    programs = {
        "readme": ("two layers", 2.6 / 0.43),
        "perceptron": ("perceptron", 4.1 / 0.59),
        "convolution": ("convolution", 5.5 / 0.98),
    }
    for key, (title, bound) in programs.items():
        seconds = {
            name: part["trace_cpu_s"] + part["compile_cpu_s"] for name, part in record[key].items()
        }
        least = seconds.pop("AdamW")
        for name, taken in seconds.items():
            goal = Goal(taken / least, round(bound, 1), unit=" ×") if name == "adaptive" else None
            yield Row(f"{title}: {name}", f"{taken:.2f} CPU s", f"{least:.2f} CPU s", goal)


def clock_ratios(record: Any) -> dict[str, list[tuple[str, str, float]]]:
    """For each peer ``(problem, ours, ratio)``; seed 0 has chosen ours, the others count."""
    out: dict[str, list[tuple[str, str, float]]] = {"adamw": [], "soap": [], "muon": []}
    for name, parts in record["problems"].items():
        for peer, ratios in out.items():
            ours = min(("kfac", "kfe_adam"), key=lambda x: parts[x]["within"][peer][0])
            values = parts[ours]["within"][peer], parts[peer]["best"]
            mine, theirs = (statistics.median(x[1:]) for x in values)
            ratios.append((name.replace("_", " "), ours, mine / theirs))
    return out


def _at_equal_steps(record: Any) -> Iterator[Row]:
    """Ours over AdamW, and over the better of SOAP and Muon; seed 0 has chosen everywhere."""
    every = len(record["problems"])
    goals = {("adamw",): ("AdamW", every), ("soap", "muon"): ("the better of SOAP and Muon", 8)}
    for peers, (title, bound) in goals.items():
        ratios = []
        for parts in record["problems"].values():
            ours, theirs = (
                min((parts[name]["at_steps"] for name in names), key=lambda values: values[0])
                for names in (("kfac", "kfe_adam"), peers)
            )
            ratios.append(statistics.median(ours[1:]) / statistics.median(theirs[1:]))
        wins, losses = sum(x < 0.98 for x in ratios), sum(x > 1.02 for x in ratios)
        goal = Goal(wins, bound, at_least=True)
        yield Row(f"wins at equal steps over {title}", f"{wins} of {len(ratios)}, {losses} losses",
                  "", goal)  # fmt: skip


def _clock(record: Any) -> Iterator[Row]:
    goals = {"adamw": ("AdamW", 7), "soap": ("SOAP", 6), "muon": ("Muon", 6)}
    for peer, found in clock_ratios(record).items():
        title, bound = goals[peer]
        for name, ours, ratio in found:
            yield Row(f"{name}, at {title}'s", f"{ratio:.3f} × ({ours})", "1")
        wins = sum(ratio < 0.98 for *_, ratio in found)
        losses = sum(ratio > 1.02 for *_, ratio in found)
        goal = Goal(wins, bound, at_least=True)
        yield Row(f"wins at {title}'s", f"{wins} of {len(found)}, {losses} losses", "", goal)
    yield from _at_equal_steps(record)
    for name, parts in record.get("equal_time", {}).items():
        medians = {x: statistics.median(part["values"][1:]) for x, part in parts.items()}
        seconds = next(iter(parts.values()))["cpu_s"]
        ours, muon = medians["kfe_adam"], medians["muon"]
        what = f"{name} after {seconds:g} CPU s, jk.kfe_adam(0.01)"
        yield Row(what, f"{ours:.3f} nats", f"{muon:.3f} (Muon)", Goal(ours / muon, 1.0))


def _atoms(record: Any) -> Iterator[Row]:
    rows = record["summary"]
    peer, names = rows["kfac_jax"], {"kfac": "jk.kfac, same numbers", "kfac-adaptive": "jk.kfac()"}
    names |= {"spring": "jk.spring", "kfe_adam": "jk.kfe_adam(1e-2)", "adam": "Adam"}
    of_step = lambda row: 1e3 * (row["step_cpu_s"] - row["moves_cpu_s"])
    bounds = {"kfac": (1.0, 1.0, 1.1), "kfac-adaptive": (None, 1.3, 1.3)}
    for method, name in names.items():
        row = rows[method]
        step, first, peak = bounds.get(method, (None, None, None))
        energies = 1e3 * row["steps 51 to 100"], 1e3 * peer["steps 51 to 100"]
        goal = Goal(energies[0] / energies[1], 0.35) if method == "kfac-adaptive" else None
        shown = (f"{energy:.1f} mHa" for energy in energies)
        yield Row(f"energy above the exact one, steps 51 to 100: {name}", *shown, goal)
        last = (
            f"{1e3 * x['last 50']:.1f} ± {1e3 * x['error of last 50']:.1f} mHa" for x in (row, peer)
        )
        yield Row(f"the last 50 of 400 steps: {name}", *last)
        pairs = (
            ("step without the moves", of_step(row), of_step(peer), "CPU ms", step),
            ("first step", row["first_step_cpu_s"], peer["first_step_cpu_s"], "CPU s", first),
            ("peak of the process", row["peak_mb"], peer["peak_mb"], "MB", peak),
        )
        for what, ours, theirs, unit, bound in pairs:
            goal = Goal(ours / theirs, bound, unit=" ×") if bound else None
            yield Row(f"{what}: {name}", f"{ours:.0f} {unit}", f"{theirs:.0f} {unit}", goal)


def _documents(record: Any) -> Iterator[Row]:
    verdicts = [claim["verdict"] for claim in record["claims"]]
    for verdict in ("true", "partly", "false", "not decidable", "needs a GPU"):
        yield Row(verdict, f"{verdicts.count(verdict)} of {len(verdicts)}")


def _mutants(record: Any) -> Iterator[Row]:
    killed = sum(bool(killed_by(mutant)) for mutant in record["mutants"])
    of = len(record["mutants"])
    goal = Goal(100 * killed / of, 90, at_least=True, unit=" %")
    yield Row("faults of one line that a test catches", f"{killed} of {of}", "", goal)


def _threads(module: str) -> str:
    return f"OPENBLAS_NUM_THREADS=1 python -m benchmarks.{module}"


SECTIONS = (
    Section(
        "Gradient and all factors",
        "factors-cpu",
        "python -m benchmarks.factors --pairs 21 --curvlinops --json "
        "benchmarks/results/factors-cpu.json",
        "Value, gradient and the factors of every layer in one program, beside value and gradient. "
        "Medians of interleaved pairs; temporaries are the compiler's.",
        "the gradient alone",
        _factors,
    ),
    Section(
        "On an H100, by its compiler",
        "accelerators",
        "make accelerators",
        "Compiled for the device, never run on one: bytes are the compiler's, and there are no "
        "times. 12 blocks of width 768, 8 × 512 tokens.",
        "the gradient alone",
        _accelerators,
    ),
    Section(
        "A step of K-FAC, beside kfac-jax",
        "optimizer_steps-cpu",
        "python -m benchmarks.optimizer_steps --peer ENV/bin/python --json "
        "benchmarks/results/optimizer_steps-cpu.json",
        "The autoencoder of the K-FAC papers on the embedded digits. kfac-jax 0.0.8 runs in an "
        "environment of its own with jax 0.8.1, the newest that it works with, without XNNPACK, "
        "which there reads donated weights. The goals of a step were set before our "
        "optimizer adapted its settings, so our fixed settings are compared with kfac-jax's "
        "adaptive ones. Steps are medians; "
        "a goal is judged by the median of the ratios of neighbouring blocks of steps. Most of "
        "the first step compiles the update: `python -m benchmarks.first_step --part update` says "
        "in how many CPU seconds of both cores, and `--part bare` what its sixteen inverses and "
        "their products alone take, without a check, an average or a refresh.",
        "kfac-jax",
        _steps,
    ),
    Section(
        "First steps of K-FAC, beside kfac-jax's head on the same jax",
        "first_steps-cpu",
        "python -m benchmarks.optimizer_steps --first --peer ENV/bin/python --json "
        "benchmarks/results/first_steps-cpu.json",
        "CPU seconds of all threads, compilation included, on a machine that other work shared. "
        "kfac-jax is its revision babd853 (2026-08-19) with jax 0.10.2. Its adaptive optimizer "
        "compiles a second program at a later step; ours is one program, which holds the trial of "
        "the factors' damping too unless `factor_every=0`.",
        "kfac-jax",
        _first_steps,
    ),
    Section(
        "Tracing and compiling a step",
        "compile_time-cpu",
        _threads("compile_time --json benchmarks/results/compile_time-cpu.json"),
        "CPU seconds of the step of `jk.Optimizer`, each in a process of its own, on a machine "
        "that other work shared. The rows of an adaptive step with a part left out say what that "
        "part adds. The goals are 2.6, 4.1 and 5.5 CPU s on a machine where AdamW's step took "
        "0.43, 0.59 and 0.98.",
        "AdamW's step",
        _compile_time,
    ),
    Section(
        "At the CPU seconds of tuned optimizers",
        "clock-cpu",
        _threads("optimizers._clock --json benchmarks/results/clock-cpu.json"),
        "Held-out value of ours over the peer's, medians of five seeds; less is better. A tuned "
        "peer takes the steps of the comparison at equal steps, and what counts is its best value, "
        "and the best value of ours within the CPU seconds until then. Ours is "
        "`jk.kfac(like=like)` or `jk.kfe_adam(0.01, like=like)`, the second with the empirical "
        "Fisher, which is not the default of `jk.Optimizer`, with factors at refreshes, "
        "whichever is lower on a sixth seed. Within 2 % is a tie. At equal steps the last "
        "value counts. The decoder also ran for 25 CPU seconds, with the setting of Muon that was "
        "best at equal time. Other work ran beside it on another core.",
        "the peer",
        _clock,
    ),
    Section(
        "Beryllium by a wave function, beside kfac-jax",
        "atoms-cpu",
        "OPENBLAS_NUM_THREADS=1 taskset -c 0 python -m benchmarks.atoms --peer ENV/bin/python "
        "--json benchmarks/results/atoms-cpu.json",
        "`examples/atoms.py`: 9,136 parameters, 256 walkers, five seeds, float32. kfac-jax 0.0.8 "
        "runs in an environment of its own with jax 0.8.1, with FermiNet's numbers and momentum 0. "
        "Energies are means over seeds with the standard error, in millihartree; times are CPU "
        "time on one core, compilation in the first step; other work ran on the other core.",
        "kfac-jax",
        _atoms,
    ),
    Section(
        "Adapters, beside PEFT and qwix",
        "adapters-cpu",
        "",
        "A training step with adapters over one without, each in its own framework.",
        "peers",
        _adapters,
    ),
    Section(
        "Measured eigenvalues (EKFAC)",
        "ekfac-cpu",
        "python -m benchmarks.ekfac --pairs 21 --json benchmarks/results/ekfac-cpu.json",
        "The pass that measures every eigenvalue, by itself.",
        "the gradient alone",
        _ekfac,
    ),
    Section(
        "Gram matrices of gradients",
        "gram-cpu",
        "python -m benchmarks.gram --json benchmarks/results/gram-cpu.json",
        "Inner products of the gradients of an output for all pairs of examples, in float32.",
        "`vmap(grad)` and a product",
        _gram,
    ),
    Section(
        "Decomposition, beside LAPACK",
        "decomposition-cpu",
        _threads("decomposition --blocks 12 --pairs 1 --json decomposition.json"),
        "The 120 distinct factors of a 12-block transformer of width 768, and two of each size. "
        "Measured before the host decomposed in float64, which takes longer.",
        "`ssyevd` alone",
        _decomposition,
    ),
    Section(
        "Decomposition on the host while training goes on",
        "host-cpu",
        _threads("host --json benchmarks/results/host-cpu.json"),
        "What `HostCurvature` adds to a step of the scanned transformer, and what it holds.",
        "beside",
        _host,
    ),
    Section(
        "Bases elsewhere, in half, of low rank",
        "bases-cpu",
        "python -m benchmarks.bases --width 512 --depth 4 --json benchmarks/results/bases-cpu.json",
        "One preconditioning. The last number is how far the natural gradient is from that of "
        "whole float32 bases; flat spectra, the worst case of a low rank.",
        "",
        _bases,
    ),
    Section(
        "Tracing",
        "tracing-cpu",
        "python -m benchmarks.tracing --json benchmarks/results/tracing-cpu.json",
        "A decoder of 32 unrolled blocks, 291 layers, without compilation. The floors are the "
        "analysis and JAX's own differentiation of every traced equation, without a factor; "
        "jaxkfac differentiates equal runs of equations once.",
        "the gradient alone",
        _tracing,
    ),
    Section(
        "Planned bytes, beside compiled ones",
        "plan",
        "make plan-record",
        "How far the total of a plan is from that of the compiled training.",
        "",
        _plan,
    ),
    Section(
        "Planned bytes, beside measured ones",
        "memory-cpu",
        "python -m benchmarks.memory --json benchmarks/results/memory-cpu.json",
        "A scanned transformer with Adam and K-FAC; each row in a fresh process.",
        "measured",
        _memory,
    ),
    Section(
        "Records from a file of any size",
        "data-cpu",
        "python -m benchmarks.data --json benchmarks/results/data-cpu.json",
        "Six million chats, 1.8 GB.",
        "beside",
        _data,
    ),
    USES,
    Section(
        "Influence in a language model",
        "influence-cpu",
        "python -m benchmarks.influence --output benchmarks/results/influence-cpu.json",
        "SmolLM2-135M in float32, K-FAC from 100 texts of 64 tokens; the machine did other work "
        "beside it.",
        "",
        _influence,
    ),
    Section(
        "The five documents",
        "documents",
        "python -m benchmarks.documents --write",
        "Claims about memory and time, [judged by stated rules](documents.md).",
        "",
        _documents,
    ),
    Section(
        "Tests",
        "mutants",
        "make mutants",
        "Each fault is tried alone, with the tests of its package.",
        "",
        _mutants,
    ),
    Section(
        "Named faults",
        "faults",
        "make faults",
        "Twelve faults that somebody has named, and twenty drawn from four rooms with seed 40, "
        "against the tests beside the code and parity.",
        "",
        _mutants,
    ),
)
