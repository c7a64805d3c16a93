"""The state of a service, and how it is saved and restored."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxkfac._errors import NonFiniteFactorError
from jaxkfac.blocks import Factors, Layout, Origin, Place, layout_of
from jaxkfac.curvature._placement import UNCOMMITTED, ResultSharding
from jaxkfac.curvature.host._average import Averages, Running
from jaxkfac.curvature.host._decompose import Decomposer
from jaxkfac.curvature.host._options import HostOptions, Refresh, Schedule, layout_bytes
from jaxkfac.curvature.host._refresh import ActiveBases, Decompositions
from jaxkfac.curvature.host._store import Store
from jaxkfac.curvature.host._threads import Monitor
from jaxkfac.files import Archive, write_archive
from jaxkfac.interception import Layer, ParameterMatrix
from jaxkfac.interception.values import Range
from jaxkfac.linalg.spectral import HostSpectrum, Spectrum
from jaxkfac.memory import whole_here

FORM = "jaxkfac.HostCurvature"

# These describe the machine, not the result, so they are passed again when a service is loaded.
MACHINE = ("workers", "in_flight_bytes", "host_bytes", "disk", "timeout")

_Arrays = list[tuple[str, Any]]


@dataclasses.dataclass
class State:
    """The complete state of a service.

    Until the first refresh a push may bring new layers, because each pass of a collection under
    a byte budget knows only its own. After it, or with ``like``, the layout is ``complete``.
    """

    options: HostOptions
    monitor: Monitor
    schedule: Schedule
    store: Store
    active: ActiveBases
    decomposer: Decomposer
    layout: Layout | None = None
    averages: Averages | None = None
    complete: bool = False
    work: Decompositions | None = None
    pushed_places: set[Place] = dataclasses.field(default_factory=set)
    shardings: dict[Place, ResultSharding] = dataclasses.field(default_factory=dict)
    origin: Origin | None = None  # taken from ``like``, or else from the first push

    def layout_with(self, factors: Factors) -> Layout:
        """The layout after factors are pushed, which may bring new layers."""
        if self.layout is None:
            return layout_of(factors.layers, factors.bias)
        return self.layout.merged(factors, complete=self.complete)

    def check_budget(self, layout: Layout, *, double: bool) -> None:
        """Refuse a layout whose averages do not fit into the budget.

        Args:
            layout: The entries.
            double: Whether any is float64.

        Raises:
            ValueError: they do not fit.
        """
        # Checked once for each layout, and not at each push: it counts the bytes of all layers.
        if layout is not self.layout:
            needed = layout_bytes(layout, self.options, double=double)
            self.store.require(needed.fixed, needed.movable)

    def use_layout(self, layout: Layout, *, double: bool) -> None:
        """Set up the averages of ``layout``; may be called again.

        Raises:
            ValueError: as :meth:`check_budget`.
        """
        self.check_budget(layout, double=double)
        self.layout = layout
        if self.averages is None:
            decay, storage = self.options.decay, self.options.storage
            self.averages = Averages(layout, decay, storage, self.store)
        self.averages.layout = layout

    def about(self, refresh: Refresh) -> str:
        """A description that must be equal in all processes that take part in a refresh."""
        assert self.layout is not None
        # Without what describes the machine: processes may have other numbers of threads and still
        # agree.
        options = {k: v for k, v in vars(self.options).items() if k not in MACHINE}
        blocks = [(block.place, block.source.shape) for block in self.layout.blocks.values()]
        return repr((refresh, sorted(options.items()), blocks))

    def new_work(self, group: int | None) -> Decompositions:
        """The decompositions of a refresh of ``group``.

        Raises:
            ValueError: one of its factors has never been pushed.
        """
        assert self.layout is not None
        stagger = self.options.stagger
        blocks = (
            list(self.layout.blocks.values())
            if group is None
            else self.layout.groups(stagger)[group]
        )
        absent = next((b.source for b in blocks if b.source.place not in self.pushed_places), None)
        if absent is not None:
            raise ValueError(
                f"a refresh needs {absent.name}, which has never been pushed: pushes of one step "
                "may each hold a part of the layers, and together must hold all of them"
            )
        # From now on a layer that has never been pushed would have no basis, so later pushes bring
        # none.
        self.complete = True
        previous = {}
        if self.options.reuse_tolerance is not None:
            for block in blocks:
                if block.source.dense and block.place in self.active.tables:
                    previous[block.place] = self.active.tables[block.place].vectors
        return Decompositions(
            blocks, dict(self.shardings), previous, self.decomposer, self.store, self.monitor
        )


def save_state(state: State, path: Path) -> None:
    """Write the complete state; nothing may be in flight or in work."""
    arrays: _Arrays = []
    about = {
        "options": {k: v for k, v in dataclasses.asdict(state.options).items() if k not in MACHINE},
        "schedule": state.schedule.to_dict(),
        "chosen": state.decomposer.chosen,
        "kept": state.active.kept,
        "rank_errors": state.active.rank_errors,
        "layers": None,
        "origin": None if state.origin is None else state.origin.to_dict(),
    }
    if state.layout is not None and state.averages is not None:
        about["layers"] = [dataclasses.asdict(layer) for layer in state.layout.layers]
        about["bias"], about["complete"] = state.layout.bias, state.complete
        about["left_out"] = state.averages.left_out
        about["averages"] = list(_describe_averages(state.averages, arrays))
    about["bases"] = list(_describe_spectra("bases", state.active.tables, arrays))
    if state.work is not None and state.schedule.pending is not None:
        # A refresh in work is saved with its results; without them the continued run would hand
        # over later, and not be bitwise the same.
        about["results"] = list(_describe_spectra("results", state.work.results, arrays))
        about["failures"] = [[list(p), str(e)] for p, e in state.work.failures.items()]
    # One by one: bases on an accelerator are on the host only while they are written.
    on_host = ((name, np.asarray(whole_here(array))) for name, array in arrays)
    nbytes = sum(array.nbytes for _, array in arrays)
    write_archive(path, FORM, about, on_host, what="the service", nbytes=nbytes)


def restore_state(state: State, saved: Archive) -> None:
    """Restore what :func:`save_state` wrote; options and schedule keep their present values."""
    about = saved.about
    state.decomposer.chosen.update(about["chosen"])
    state.active.kept.update(about["kept"])
    state.active.rank_errors.update(about.get("rank_errors", {}))
    if about.get("origin") is not None:  # absent in files written before this field existed
        state.origin = Origin(**_tuples(about["origin"]))
    if about["layers"] is not None:
        layers = tuple(_layer(values) for values in about["layers"])
        # Before the arrays are read: their budget is checked by the layout.
        double = any(values["dtype"] == "float64" for values in about["averages"])
        state.use_layout(layout_of(layers, about["bias"]), double=double)
        state.complete = about["complete"]
        assert state.averages is not None
        state.averages.left_out.update(about["left_out"])
        for values in about["averages"]:
            _restore_average(state, values, saved)
    for place, values, vectors in _read_spectra("bases", about["bases"], saved):
        on_device = _on_device(values)
        if place.table != "diagonals":
            columns = None
            if vectors is not None:
                columns = state.active.stored(vectors, UNCOMMITTED, place.key, counted=False)
            on_device = Spectrum(on_device, columns)
        state.active.tables[place] = on_device
    if "results" in about:
        state.work = Decompositions([], {}, {}, state.decomposer, state.store, state.monitor)
        for place, values, vectors in _read_spectra("results", about["results"], saved):
            state.work.results[place] = HostSpectrum(values, vectors)
        for place, message in about["failures"]:
            state.work.failures[Place(*place)] = NonFiniteFactorError(message)
        state.work.done = True


def _restore_average(state: State, values: dict[str, Any], saved: Archive) -> None:
    assert state.averages is not None and state.layout is not None
    place = Place(*values["place"])
    name = state.layout.entries[place].name
    read = saved.read(values["sums"])
    sums = state.store.empty(read.shape, read.dtype, f"the average of {name}")
    sums[...] = read
    count, dtype = saved.read(values["count"]), np.dtype(values["dtype"])
    state.averages.hold(place, Running(sums, count, dtype, **values["counters"]))
    state.pushed_places.add(place)


def _describe_averages(averages: Averages, arrays: _Arrays) -> Iterator[dict[str, Any]]:
    for i, (place, running) in enumerate(averages.running.items()):
        names = {"sums": f"averages/{i}/sums", "count": f"averages/{i}/count"}
        arrays += [(names["sums"], running.sums), (names["count"], running.count)]
        counters = ("age", "idle", "num_added", "num_left_out", "weight", "stays_single")
        yield {
            "place": list(place),
            "dtype": running.dtype.name,
            "counters": {name: getattr(running, name) for name in counters},
            **names,
        }


def _describe_spectra(kind: str, spectra: dict[Place, Any], arrays: _Arrays) -> Iterator[Any]:
    # Sorted, because workers and processes finish blocks in any order.
    for i, (place, spectrum) in enumerate(sorted(spectra.items(), key=lambda item: item[0])):
        values, vectors = spectrum if isinstance(spectrum, tuple) else (spectrum, None)
        arrays.append((f"{kind}/{i}/values", values))
        if vectors is not None:
            arrays.append((f"{kind}/{i}/vectors", vectors))
        yield [list(place), vectors is not None]


def _read_spectra(
    kind: str, described: list[Any], saved: Archive
) -> Iterator[tuple[Place, np.ndarray, np.ndarray | None]]:
    for i, (place, has_vectors) in enumerate(described):
        vectors = saved.read(f"{kind}/{i}/vectors") if has_vectors else None
        yield Place(*place), saved.read(f"{kind}/{i}/values"), vectors


def _on_device(host: np.ndarray) -> Any:
    array = jnp.asarray(host)
    # Without x64, JAX silently makes float32 of float64 bases, and the run would not continue bit
    # by bit.
    if array.dtype != host.dtype:
        raise ValueError(
            f"the service was saved with {host.dtype} factors; enable x64 before loading it"
        )
    return array


def _layer(values: dict[str, Any]) -> Layer:
    matrices = {
        name: None if values[name] is None else _matrix(values[name]) for name in ("weight", "bias")
    }
    return Layer(**{**_tuples(values), **matrices})


def _matrix(values: dict[str, Any]) -> ParameterMatrix:
    index = tuple(Range(*at) if isinstance(at, list) else at for at in values["index"])
    return ParameterMatrix(**{**_tuples(values), "index": index})


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
