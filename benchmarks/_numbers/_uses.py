"""What the page takes from the record of influence and Laplace beside their peers."""

from collections.abc import Iterator
from typing import Any

from benchmarks._numbers._row import Goal, Row, Section

TOLERANCE = 1e-9
GOALS = {("kronfluence", "transformer"): (0.33, 0.5), ("laplace", "perceptron"): (0.5, None)}
# Of kronfluence's time, by whether it is the smaller number of examples.
STORE_GOALS = {(False, "cold"): 0.45, (False, "warm"): 0.33, (True, "warm"): 1.3}
STAGE = {"kronfluence": "cpu", "laplace": "predictive", "laplax": "cpu"}
NAMES = {"kronfluence": "kronfluence", "laplace": "laplace-torch", "laplax": "laplax"}


def _uses(record: Any) -> Iterator[Row]:
    for peer, name in NAMES.items():
        for kind, here in _by_kind(peer, record, "equal"):
            for what, far in here.items():
                goal = Goal(far, TOLERANCE)
                yield Row(f"{what}, {kind}, float64", f"off by {far:.1e}", name, goal)
    for peer, name in NAMES.items():
        for kind, here in _by_kind(peer, record, "timed"):
            ours, theirs = here["ours"], here[name]
            time, peak = GOALS.get((peer, kind), (None, None))
            stage = STAGE[peer]
            what = "all stages" if stage == "cpu" else stage
            cpu = [_seconds(said, stage) for said in (ours, theirs)]
            ratio = here["ratios"][stage]
            goal = time and Goal(ratio, time, unit=" ×")
            beside = f"{cpu[1]:.1f} CPU s, {name}"
            yield Row(f"{what}, {kind}, compiling included", f"{cpu[0]:.1f} CPU s", beside, goal)
            sizes = [f"{said['peak_bytes'] / 2**20:.0f} MiB" for said in (ours, theirs)]
            goal = peak and Goal(here["ratios"]["peak"], peak, unit=" ×")
            yield Row(f"peak of the process, {kind}", sizes[0], f"{sizes[1]}, {name}", goal)
    if floor := record.get("kronfluence", {}).get("floor"):
        what = "transformer: the same backward passes and products in plain JAX"
        beside = f"{floor['cpu']:.2f} of kronfluence's"
        yield Row(what, f"{floor['cpu_seconds']:.1f} CPU s", beside)
        what, beside = "transformer: the gradient alone", f"{floor['peak']:.2f} of kronfluence's"
        yield Row(what, f"peak {floor['peak_bytes'] / 2**20:.0f} MiB", beside)
    yield from _of_stores(record.get("kronfluence", {}))


def _of_stores(record: Any) -> Iterator[Row]:
    """Scores from a store of gradients, on the transformer."""
    stores = record.get("store", {})
    for number, found in stores.items():
        is_small = number != max(stores, key=int)
        theirs = f"{_seconds(found['kronfluence'], 'cpu'):.1f} CPU s, kronfluence"
        for name in ("cold", "warm", "warm, in files"):
            cache, _, place = name.partition(", ")
            store = f"a store {place or 'in memory'}"
            what = f"transformer, {number} examples, from {store}, {cache} compile cache"
            ratios, ours = found[name]["ratios"], found[name]["ours"]
            cpu = _seconds(ours, "cpu") - _seconds(ours, "new queries")
            most = STORE_GOALS.get((is_small, cache))
            goal = None if most is None else Goal(ratios["cpu"], most, unit=" ×")
            yield Row(what, f"{cpu:.1f} CPU s", theirs, goal)
        if is_small:
            continue
        new = ratios["new queries"]
        goal = Goal(new, 0.06, unit=" ×")
        seconds = _seconds(ours, "new queries")
        what = f"transformer, {number} examples: as many new queries on the store in files"
        yield Row(what, f"{seconds:.1f} CPU s", f"{cpu:.1f} CPU s, the first run", goal)
        bare = record["floor"]["peak_bytes"]
        goal = Goal(ours["peak_bytes"] / bare, 1.5, unit=" ×")
        what = f"transformer, {number} examples, from a store in files: peak, warm"
        beside = f"{bare / 2**20:.0f} MiB"
        peak = f"{ours['peak_bytes'] / 2**20:.0f} MiB"
        yield Row(what, peak, f"{beside}, the gradient alone", goal)


def _by_kind(peer: str, record: Any, part: str) -> Iterator[tuple[str, Any]]:
    here = record.get(peer, {}).get(part, {})
    if peer == "kronfluence":
        yield from here.items()
    elif here:
        linear = peer == "laplax" and part == "equal"
        yield "linear layer" if linear else "perceptron", here


def _seconds(said: Any, stage: str) -> float:
    cpu = {name: seconds for name, (_, seconds) in said["seconds"].items()}
    return sum(cpu.values()) if stage == "cpu" else cpu[stage]


USES = Section(
    "Influence and Laplace, beside peers",
    "uses",
    "python -m benchmarks.uses --kronfluence ENV/bin/python --laplace ENV/bin/python --laplax "
    "ENV/bin/python --json benchmarks/results/uses.json",
    "Each library runs in a process of its own, with the same weights and data; kronfluence "
    "1.0.1 with its "
    "covariances, eigenvectors, lambdas, pairwise and self scores, laplace-torch 0.3 with "
    "Kronecker factors, laplax 0.0.2 with the full matrix.",
    "the peer",
    _uses,
)
