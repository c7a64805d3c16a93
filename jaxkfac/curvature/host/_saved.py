"""A service's memory as plain values and arrays, and back."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxkfac._errors import NonFiniteFactorError
from jaxkfac.curvature._home import detached
from jaxkfac.curvature.host._average import Averages, Running
from jaxkfac.curvature.host._files import Saved, write
from jaxkfac.curvature.host._layout import Layout, Place
from jaxkfac.curvature.host._parts import Parts
from jaxkfac.curvature.host._work import Work
from jaxkfac.interception._layer import Layer, ParameterMatrix
from jaxkfac.linalg import HostSpectrum, Spectrum

# Of the machine rather than of the result; they are given anew when a service is loaded.
MACHINE = ("workers", "in_flight_bytes", "host_bytes", "disk", "timeout")

_Arrays = list[tuple[str, Any]]


def save_parts(parts: Parts, path: Path) -> None:
    """Write everything; nothing may be in flight or in work."""
    arrays: _Arrays = []
    about = {
        "options": {k: v for k, v in dataclasses.asdict(parts.options).items() if k not in MACHINE},
        "schedule": parts.schedule.to_dict(),
        "chosen": parts.decomposer.chosen,
        "kept": parts.current.kept,
        "layers": None,
    }
    if parts.layout is not None and parts.averages is not None:
        about["layers"] = [dataclasses.asdict(layer) for layer in parts.layout.layers]
        about["bias"], about["complete"] = parts.layout.bias, parts.complete
        about["left_out"] = parts.averages.left_out
        about["averages"] = list(_describe_averages(parts.averages, arrays))
    about["bases"] = list(_describe_spectra("bases", parts.current.tables, arrays))
    if parts.work is not None:
        about["results"] = list(_describe_spectra("results", parts.work.results, arrays))
        about["failures"] = [[list(p), str(e)] for p, e in parts.work.failures.items()]
    # One by one: bases of an accelerator are on the host only while they are written.
    write(path, about, ((name, np.asarray(detached(array))) for name, array in arrays))


def restore_parts(parts: Parts, saved: Saved) -> None:
    """Take up what :func:`save_parts` wrote; the options and the schedule are there already."""
    about = saved.about
    parts.decomposer.chosen.update(about["chosen"])
    parts.current.kept.update(about["kept"])
    if about["layers"] is not None:
        layers = tuple(_layer(values) for values in about["layers"])
        double = any(values["dtype"] == "float64" for values in about["averages"])
        parts.use_layout(Layout(layers, about["bias"]), double=double)
        parts.complete = about["complete"]
        assert parts.averages is not None
        parts.averages.left_out.update(about["left_out"])
        for values in about["averages"]:
            _restore_average(parts, values, saved)
    for place, values, vectors in _read_spectra("bases", about["bases"], saved):
        on_device = _on_device(values)
        if place.table != "diagonals":
            columns = None if vectors is None else _on_device(vectors)
            on_device = Spectrum(on_device, columns)
        parts.current.tables[place] = on_device
    if "results" in about:
        parts.work = Work([], {}, {}, parts.decomposer, parts.store, parts.monitor)
        for place, values, vectors in _read_spectra("results", about["results"], saved):
            parts.work.results[place] = HostSpectrum(values, vectors)
        for place, message in about["failures"]:
            parts.work.failures[Place(*place)] = NonFiniteFactorError(message)
        parts.work.done = True


def _restore_average(parts: Parts, values: dict[str, Any], saved: Saved) -> None:
    assert parts.averages is not None and parts.layout is not None
    place = Place(*values["place"])
    name = parts.layout.entries[place].name
    read = saved.read(values["sums"])
    sums = parts.store.empty(read.shape, read.dtype, f"the average of {name}")
    sums[...] = read
    parts.averages.running[place] = Running(
        sums, saved.read(values["count"]), np.dtype(values["dtype"]), **values["counters"]
    )
    parts.seen.add(place)


def _describe_averages(averages: Averages, arrays: _Arrays) -> Iterator[dict[str, Any]]:
    for i, (place, running) in enumerate(averages.running.items()):
        names = {"sums": f"averages/{i}/sums", "count": f"averages/{i}/count"}
        arrays += [(names["sums"], running.sums), (names["count"], running.count)]
        counters = ("age", "num_added", "num_left_out")
        yield {
            "place": list(place),
            "dtype": running.dtype.name,
            "counters": {name: getattr(running, name) for name in counters},
            **names,
        }


def _describe_spectra(kind: str, spectra: dict[Place, Any], arrays: _Arrays) -> Iterator[Any]:
    for i, (place, spectrum) in enumerate(spectra.items()):
        values, vectors = spectrum if isinstance(spectrum, tuple) else (spectrum, None)
        arrays.append((f"{kind}/{i}/values", values))
        if vectors is not None:
            arrays.append((f"{kind}/{i}/vectors", vectors))
        yield [list(place), vectors is not None]


def _read_spectra(
    kind: str, described: list[Any], saved: Saved
) -> Iterator[tuple[Place, np.ndarray, np.ndarray | None]]:
    for i, (place, has_vectors) in enumerate(described):
        vectors = saved.read(f"{kind}/{i}/vectors") if has_vectors else None
        yield Place(*place), saved.read(f"{kind}/{i}/values"), vectors


def _on_device(host: np.ndarray) -> Any:
    array = jnp.asarray(host)
    if array.dtype != host.dtype:
        raise ValueError(
            f"the service was saved with {host.dtype} factors; enable x64 before loading it"
        )
    return array


def _layer(values: dict[str, Any]) -> Layer:
    matrices = {
        name: None if values[name] is None else ParameterMatrix(**_tuples(values[name]))
        for name in ("weight", "bias")
    }
    return Layer(**{**_tuples(values), **matrices})


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
