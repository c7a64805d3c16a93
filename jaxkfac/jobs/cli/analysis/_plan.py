"""Memory that each stage of an analysis needs, before anything is loaded."""

from collections.abc import Sequence

import jax

from jaxkfac.blocks import Factors
from jaxkfac.jobs.cli._out_of_memory import free_room
from jaxkfac.jobs.cli.analysis._decompose import Chosen
from jaxkfac.jobs.cli.analysis._program import AnalyzedModel, PassBytes, enough_text, sums_dtype
from jaxkfac.jobs.report import MemoryRow
from jaxkfac.memory import bytes_text, resident_bytes

_OF_MATRIX = {"float64": 36, "float32": 16}  # bytes of a decomposition, to be multiplied by n²
_MEAN = 8  # bytes times n²: the sum as read, and its mean
# Main memory that a process takes after it began to plan and that no plan can count: compiled
# programs, threads, pages that the allocator keeps, the report. The analysis of a decoder with
# 2.8 million parameters took 225 MiB, in one run on two busy cores.
_GROWTH = 320 << 20
_FITS = 3  # tries to find passes, since compiling them takes memory itself


def fit(
    analysis: AnalyzedModel, chosen: Chosen, room: int, *, every: bool = True
) -> list[MemoryRow]:
    """Find passes that fit into ``room`` bytes; return the plan of every stage.

    Args:
        analysis: Receives the budget that is found.
        chosen: The blocks to decompose.
        room: Bytes on the device; on a CPU bytes of the whole process.
        every: Whether to compile every pass; see :meth:`AnalyzedModel.fit`.

    Raises:
        ValueError: a stage does not fit; names the smallest number of bytes that suffices.
    """
    rows: list[MemoryRow] = []
    for _ in range(_FITS):
        held_bytes = sum(row.nbytes for row in held_rows(analysis) if row.on_device)
        without_passes = plan_rows(analysis, chosen, PassBytes(0, 0, 0))
        other_stages = max(stage_bytes(without_passes, stage) for stage in ("Lanczos", "decompose"))
        pass_bytes = analysis.fit(
            room - held_bytes, held_bytes=held_bytes, other_stages=other_stages, every=every
        )
        rows = plan_rows(analysis, chosen, pass_bytes)
        if stage_bytes(rows, "gather") <= room:
            break
    check_stages(rows, room, gathers=True)
    return rows


def check_stages(rows: Sequence[MemoryRow], room: int, *, gathers: bool = False) -> None:
    """Raise if a stage does not fit into ``room`` bytes.

    Args:
        rows: The plan of every stage.
        room: Bytes on the device.
        gathers: Whether to check the passes too.

    Raises:
        ValueError: a stage does not fit; names the smallest number of bytes that suffices.
    """
    passes = "give it as much; the passes of an analysis that has begun change with --overwrite"
    for stage, remedy in (
        *([("gather", passes)] if gathers else []),
        ("Lanczos", "lower --lanczos-texts, or leave it out with --lanczos 0"),
        ("decompose", "take --decompose-dtype float32, or a lower --max-dense"),
    ):
        needed = stage_bytes(rows, stage)
        if needed > room:
            raise ValueError(
                f"--device-bytes {bytes_text(room)}: the stage {stage!r} of this analysis needs "
                f"at least {enough_text(needed)}; {remedy}"
            )


def plan_rows(analysis: AnalyzedModel, chosen: Chosen, pass_bytes: PassBytes) -> list[MemoryRow]:
    """The plan of every stage, from the bytes of its largest pass."""
    options, rows_held = analysis.options, held_rows(analysis)
    on_cpu = jax.default_backend() == "cpu"
    count = len(analysis.passes)
    pass_text = "a pass" if count == 1 else f"the largest of {count} passes"
    rows = [
        *rows_held,
        MemoryRow("gather", f"activations and temporaries of {pass_text}", pass_bytes.temporaries),
        MemoryRow("gather", f"factors of {pass_text}", pass_bytes.factors),
        MemoryRow("gather", "their sums, triangles folded", pass_bytes.sums, on_device=on_cpu),
    ]
    if options.lanczos:
        memory = analysis.product.memory_analysis()
        vector = 4 * analysis.num_parameters
        rows += [
            MemoryRow("Lanczos", "a product with the exact Fisher", memory.temp_size_in_bytes),
            MemoryRow("Lanczos", "its vectors in and out", 2 * vector),
            MemoryRow("Lanczos", "a vector from the disk", 2 * vector, on_device=on_cpu),
        ]
    size = chosen.largest()
    share = _OF_MATRIX[options.decompose_dtype] + _MEAN
    rows.append(
        MemoryRow(
            "decompose", f"a matrix of {size} and its workspace", share * size**2, on_device=on_cpu
        )
    )
    return rows


def held_rows(analysis: AnalyzedModel) -> list[MemoryRow]:
    """Memory in use all the time: this process, and the model until its last use.

    What the process takes before a plan is made is part of its growth, so compiling programs for a
    plan does not change the sum of the first two rows.
    """
    on_cpu = jax.default_backend() == "cpu"
    stages = "gather, Lanczos" if analysis.options.lanczos else "gather"
    now = resident_bytes() or 0
    growth = max(0, analysis.resident_before + _GROWTH - now)
    return [
        MemoryRow("always", "Python, JAX and the programs", now, on_device=on_cpu),
        MemoryRow("always", "room for this process to grow", growth, on_device=on_cpu),
        MemoryRow(stages, "the model", analysis.param_bytes),
    ]


def stage_bytes(rows: Sequence[MemoryRow], stage: str, *, on_device: bool = True) -> int:
    """Sum of a stage's rows."""
    return sum(
        row.nbytes
        for row in rows
        if row.on_device == on_device and (row.stage == "always" or stage in row.stage)
    )


def disk_bytes(analysis: AnalyzedModel, shapes: Factors) -> int:
    """Largest number of bytes on disk: folded factors, the sums of a pass, Lanczos vectors.

    At the end of a pass its folded factors exist twice, once in the dtype of the sums.
    """
    elements = sum(x.data.size for place, x in shapes.sides.items() if place.table != "diagonals")
    sums = elements // 2 * (4 + sums_dtype(analysis.batches).itemsize)
    vectors = 0
    if analysis.options.lanczos:
        vectors = 4 * analysis.num_parameters * (analysis.options.lanczos_steps + 2)
    return sums + vectors


def room_of(device_bytes: int | None) -> int:
    """Bytes that the analysis may use."""
    if device_bytes is not None:
        return device_bytes
    return free_room() + (0 if jax.default_backend() != "cpu" else resident_bytes() or 0)
