"""The stages of one model's analysis, in order."""

import contextlib
import ctypes
import dataclasses
import gc
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkfac as jk
from jaxkfac._arguments import ArrayTree
from jaxkfac.files import checksum_of
from jaxkfac.jobs.cli._checkpoint import as_config
from jaxkfac.jobs.cli._interrupts import interrupts_deferred
from jaxkfac.jobs.cli._options import AnalyzeArguments, ModelAnalysis
from jaxkfac.jobs.cli._paths import is_named
from jaxkfac.jobs.cli._progress import phase, progress, said_if_slow, timed
from jaxkfac.jobs.cli.analysis._decompose import (
    Chosen,
    ExactSpectrum,
    decompose,
    eigenbases,
    lanczos,
)
from jaxkfac.jobs.cli.analysis._files import Folder, groups_of
from jaxkfac.jobs.cli.analysis._gather import gather
from jaxkfac.jobs.cli.analysis._plan import check_stages, disk_bytes, fit, plan_rows, room_of
from jaxkfac.jobs.cli.analysis._program import AnalyzedModel
from jaxkfac.jobs.cli.analysis._texts import (
    Analyzed,
    Texts,
    analyzed,
    batches_of,
    on_device,
    read_texts,
)
from jaxkfac.jobs.models.pretrained import KNOWN, cached_file
from jaxkfac.jobs.report import CoverageRow, MemoryRow, coverage_rows
from jaxkfac.memory import bytes_text, parse_bytes

# ---------------- the C library's allocator


_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD
_BYTES = 1 << 20


def give_blocks_back() -> None:
    """Make glibc return every freed block of a mebibyte or more to the system.

    By default it learns to keep ever larger blocks, up to 32 MiB, and the peak would be that of all
    stages together. Does nothing on other systems.
    """
    _call("mallopt", _MMAP_THRESHOLD, _BYTES)


def give_heap_back() -> None:
    """Make glibc return the free part of its heap; compiling leaves a gigabyte of small blocks."""
    gc.collect()
    _call("malloc_trim", 0)


def _call(name: str, *arguments: int) -> None:
    if sys.platform.startswith("linux"):
        function = getattr(ctypes.CDLL(None), name, None)
        if function is not None:
            function(*arguments)


# ---------------- the stages


_MAX_CONDITION = 1e6
_BLOCK = 1 << 20  # bytes of a file to read at once
# Options that may change on --resume, because existing results stay valid.
_MAY_CHANGE = ("decompose", "lanczos", "lanczos_steps")


class Prepared(NamedTuple):
    """A model that is planned and ready to be loaded.

    Attributes:
        what: The model.
        texts: The texts in its tokens.
        analysis: Programs and passes.
        chosen: The blocks to decompose.
        folder: Folder of all files.
        begun_with: The options that the analysis was begun with.
        rows: Plan of the memory.
        disk: Bytes needed on disk.
        coverage: Which parameters the factors cover.
    """

    what: Analyzed
    texts: Texts
    analysis: AnalyzedModel
    chosen: Chosen
    folder: Folder
    begun_with: Mapping[str, Any]
    rows: list[MemoryRow]
    disk: int
    coverage: list[CoverageRow]


class Found(NamedTuple):
    """Results of the analysis of one model.

    Attributes:
        bases: Eigenvalues without eigenvectors.
        loss: Mean loss, nats a token.
        exact: Spectrum of the exact Fisher, if requested.
    """

    bases: jk.Eigenbases
    loss: float
    exact: ExactSpectrum | None


def prepare(arguments: AnalyzeArguments, model: str, path: Path, *, exact: bool = True) -> Prepared:
    """Read the texts, compile the programs, and plan; loads no parameters.

    Args:
        arguments: Arguments of the command.
        model: The analyzed model or the one to compare with.
        path: Folder for its files.
        exact: Whether to include the exact Fisher, where the options request it.

    Raises:
        FileNotFoundError: the model has no weights.
        ValueError: the options do not go with the model, or the budget is too small.
        OSError: the disk has too little room.
    """
    options = arguments.model if exact else dataclasses.replace(arguments.model, lanczos=0)
    what = analyzed(model, options, arguments.base)
    with phase("reading the texts"):
        text = read_texts(what, arguments)
    with phase("planning"), said_if_slow("analyze: compiling the programs of the plan"):
        shapes = what.shapes()
        texts = batches_of(what, shapes, text, options.batch_size)
        like = [
            jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), x)
            for x in (texts.batches[0], texts.exist[0])
        ]
        number = len(texts.batches)
        analysis = AnalyzedModel(options, shapes.apply_fn, shapes.params, *like, batches=number)
        chosen = Chosen(groups_of(analysis.layers), options.decompose)
        folder = Folder(path)
        options_now = {
            "model": model,
            "weights": [] if arguments.plan else _weights(what),
            "options": {k: v for k, v in as_config(options).items() if k not in _MAY_CHANGE},
            "texts": texts.crc,
        }
        begun_with = options_now
        if not arguments.plan:
            begun_with = folder.begin(options_now, resume=arguments.resume)
        device_bytes = arguments.device_bytes
        room = room_of(
            None if device_bytes is None else int(parse_bytes(device_bytes, name="--device-bytes"))
        )
        if "max_factor_bytes" in begun_with:
            gathers = not folder.has("gathered.json")
            largest = analysis.use(begun_with["max_factor_bytes"], every=gathers)
            rows = plan_rows(analysis, chosen, largest)
            if device_bytes is not None and room < begun_with["room"]:
                check_stages(rows, room, gathers=gathers)
        else:
            rows = fit(analysis, chosen, room, every=not arguments.plan)
        needed = disk_bytes(analysis, analysis.shapes)
        if not arguments.plan and "max_factor_bytes" not in begun_with:
            _check_disk(path, needed - (folder.nbytes if arguments.overwrite else 0))
            begun_with = begun_with | {"max_factor_bytes": analysis.max_factor_bytes, "room": room}
    sizes = analysis.sizes
    coverage = coverage_rows(analysis.table, sizes)
    return Prepared(what, texts, analysis, chosen, folder, begun_with, rows, needed, coverage)


def run_stages(ready: Prepared, arguments: AnalyzeArguments) -> Found:
    """Load, gather, run Lanczos and decompose; results that exist are read instead."""
    folder, analysis, options = ready.folder, ready.analysis, ready.analysis.options
    folder.note(ready.begun_with)
    params: Any = None
    spectrum = _known_spectrum(folder, options) if options.lanczos else None
    exact = options.lanczos > 0 and spectrum is None
    if not folder.has("gathered.json") or exact:
        with jk.memory.track("load"), phase("loading the model"):
            params = ready.what.load().params
    if not folder.has("gathered.json"):
        total = len(analysis.passes) * len(ready.texts.batches)
        with (
            jk.memory.track("gather"),
            phase("gathering the factors"),
            _shown("gather", total) as (advance, stopped),
        ):
            totals = gather(
                analysis,
                params,
                ready.texts,
                folder,
                every=arguments.checkpoint_every,
                advance=advance,
                stopped=stopped,
            )
            folder.write("gathered.json", totals)
    if exact:
        with jk.memory.track("Lanczos"), phase("Lanczos on the exact Fisher"):
            spectrum = _exact(ready, params)
        lanczos_options = [options.lanczos, options.lanczos_steps]
        folder.write("exact.json", {"asked": lanczos_options, "found": spectrum._asdict()})
    del params
    give_heap_back()
    with (
        jk.memory.track("decompose"),
        phase("decomposing the factors"),
        progress("decompose", len(ready.chosen.blocks)) as shown,
    ):
        advance = timed(shown, len(ready.chosen.blocks), "block")
        decompose(ready.chosen, folder, dtype=options.decompose_dtype, advance=advance)
    condition = arguments.max_condition or _MAX_CONDITION
    bases = eigenbases(ready.chosen, folder, max_condition=condition)
    return Found(bases, folder.read("gathered.json")["loss"], spectrum)


def _known_spectrum(folder: Folder, options: ModelAnalysis) -> ExactSpectrum | None:
    """The stored result of Lanczos, if it was run with the same options."""
    if not folder.has("exact.json"):
        return None
    stored = folder.read("exact.json")
    is_same = stored["asked"] == [options.lanczos, options.lanczos_steps]
    return ExactSpectrum(**stored["found"]) if is_same else None


def _exact(ready: Prepared, params: ArrayTree) -> ExactSpectrum:
    analysis, options = ready.analysis, ready.analysis.options
    batch = ready.texts.batches[0]
    texts = min(options.exact_texts, len(ready.texts.exist[0]))
    few = on_device(jax.tree.map(lambda x: x[:texts], batch))
    program = analysis.product

    def product(vector: np.ndarray) -> np.ndarray:
        return np.array(program(params, few, jnp.asarray(vector)))

    with progress("Lanczos", options.lanczos_steps) as shown:
        spectrum = lanczos(
            product,
            analysis.num_parameters,
            ready.folder,
            count=options.lanczos,
            steps=options.lanczos_steps,
            seed=options.seed,
            eps=analysis.eps,
            advance=timed(shown, options.lanczos_steps, "product"),
        )
    return spectrum


@contextlib.contextmanager
def _shown(name: str, total: int) -> Iterator[tuple[Callable[[int, str], None], Any]]:
    doing = "the batch under way is ended and kept"
    with interrupts_deferred(doing) as hold, progress(name, total) as shown:
        yield timed(shown, total, "batch"), lambda: hold.pressed


def _weights(what: Analyzed) -> list[list[Any]]:
    """Names and CRC-32 of the weight files, to detect other weights in the same place."""
    model = what.experiment.model
    path = cached_file(KNOWN[0]) if model == "smollm2" and is_named(model) else Path(model)
    files = [path] * path.is_file()
    if path.is_dir():
        files = sorted([*path.glob("*.safetensors"), *path.glob("config.json")])
    if what.adapter is not None:
        files += sorted([*what.adapter.glob("*.safetensors"), *what.adapter.glob("*.json")])
    return [[file.name, _crc(file)] for file in files]


def _crc(path: Path) -> str:
    with path.open("rb") as file:
        return checksum_of(iter(lambda: file.read(_BLOCK), b""))


def _check_disk(path: Path, needed: int) -> None:
    free = shutil.disk_usage(path).free
    if needed > free:
        raise OSError(
            f"the factors and vectors of this analysis need {bytes_text(needed)} on the disk, and "
            f"{path} has {bytes_text(free)} free: make room, choose another --output, or lower "
            "--max-dense or --lanczos-steps"
        )
