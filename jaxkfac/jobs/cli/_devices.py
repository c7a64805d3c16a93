"""`--devices` and `--mesh`: the sharding of a run's arrays."""

import contextlib
import math
import re
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jaxkfac._arguments import ArrayTree
from jaxkfac.jobs.cli._processes import ALONE, RunProcesses
from jaxkfac.memory import bytes_text, place_once, put_leaf

PyTree = Any
_AXES = ("data", "model")


class RunDevices(NamedTuple):
    """The devices of a run: rows of a batch are split over ``data``, matrices over ``model``.

    Attributes:
        mesh: Mesh with the axes ``data`` and ``model``; ``None`` is JAX's default device.
        processes: Processes of the run.
    """

    mesh: Mesh | None
    processes: RunProcesses = ALONE

    def set(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which to trace programs."""
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    @property
    def divides(self) -> str | None:
        """Name of the axis over which decompositions are divided, or ``None``."""
        return "data" if self.mesh is not None and self.mesh.shape["data"] > 1 else None

    def shardings(self, tree: PyTree, axis: str = "model") -> PyTree:
        """Shardings of parameters or optimizer state: the last axis of matrices over ``model``."""
        assert self.mesh is not None
        mesh, count = self.mesh, self.mesh.shape[axis]

        def of(x: Array | np.ndarray | jax.ShapeDtypeStruct) -> NamedSharding:
            split = count > 1 and len(x.shape) > 1 and x.shape[-1] % count == 0
            axes = [*[None] * (len(x.shape) - 1), axis] if split else []
            return NamedSharding(mesh, PartitionSpec(*axes))

        return jax.tree.map(of, tree)

    def put_base(self, params: ArrayTree) -> ArrayTree:
        """Shard a frozen model over ``model``, or over ``data`` alone; reuses its memory."""
        if self.mesh is None:
            return params
        axis = "model" if self.mesh.shape["model"] > 1 else "data"
        return place_once(params, self.shardings(params, axis))

    def put(self, tree: ArrayTree) -> ArrayTree:
        """Shard parameters or an optimizer state."""
        if self.mesh is None:
            return tree
        return jax.tree.map(put_leaf, tree, self.shardings(tree))

    def replicated(self, tree: ArrayTree) -> ArrayTree:
        """Replicate data on every device."""
        if self.mesh is None:
            return tree
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        return jax.tree.map(lambda x: put_leaf(x, everywhere), tree)

    def put_batch(self, batch: ArrayTree) -> ArrayTree:
        """Shard a batch of NumPy arrays over ``data``; each process sends its devices' rows."""
        if self.mesh is None:
            return jax.tree.map(jax.numpy.asarray, batch)
        rows = NamedSharding(self.mesh, PartitionSpec("data"))
        return jax.tree.map(lambda x: put_leaf(x, rows), batch)

    def put_rows(self, rows: np.ndarray) -> jax.Array:
        """Shard example indices over ``data``, along the last axis."""
        if self.mesh is None:
            return jax.numpy.asarray(rows)
        spec = PartitionSpec(*[None] * (rows.ndim - 1), "data")
        return put_leaf(rows, NamedSharding(self.mesh, spec))

    def of_program(self, *trees: PyTree) -> dict[str, Any]:
        """Options for ``jax.jit``: states keep their shardings, other results are replicated."""
        if self.mesh is None:
            return {}
        replicated = NamedSharding(self.mesh, PartitionSpec())
        return {"out_shardings": (*map(self.shardings, trees), replicated) if trees else replicated}

    def described(self, state: ArrayTree) -> dict[str, Any]:
        """The mesh, and the bytes of parameters and optimizer state on one device."""
        first = jax.local_devices()[0] if self.mesh is None else self.mesh.local_devices[0]
        nbytes = sum(
            shard.data.nbytes
            for leaf in jax.tree.leaves(state)
            for shard in leaf.addressable_shards
            if shard.device == first
        )
        axes = {"data": 1, "model": 1} if self.mesh is None else dict(self.mesh.shape)
        return {"mesh": axes, "bytes_per_device": nbytes}


ONE_DEVICE = RunDevices(None)


def run_devices(arguments: Any, processes: RunProcesses = ALONE) -> RunDevices:
    """The devices that the options request.

    Args:
        arguments: Arguments of ``train`` or ``finetune``: ``devices`` (``"all"`` or a number),
            ``mesh`` (``"data=4,model=2"``, or either axis alone; ``None`` gives all devices to
            ``data``), and the examples of a micro-batch, which ``data`` must divide.
        processes: Processes of the run. Several processes use all of their devices.

    Raises:
        ValueError: the options do not go together, or ask for too many devices.
    """
    device_count, batch_size = jax.device_count(), arguments.experiment.batch_size
    axes = check_devices(arguments.devices, arguments.mesh, batch_size, available=device_count)
    count = math.prod(axes.values())
    if processes.several and count < device_count:
        raise ValueError(
            f"{count} of the {device_count} devices of all processes were asked for, which leaves "
            "some process without work: take --devices all, or a --mesh of all of them"
        )
    if count == 1:
        return ONE_DEVICE
    kinds = (AxisType.Auto,) * len(_AXES)
    chosen = jax.devices()[:count]
    sizes = tuple(axes[name] for name in _AXES)
    found = jax.make_mesh(sizes, _AXES, axis_types=kinds, devices=chosen)
    return RunDevices(found, processes)


def check_devices(
    devices: str, mesh: str | None, batch_size: int, *, available: int | None = None
) -> dict[str, int]:
    """:func:`axis_sizes` of options that go together.

    Args:
        devices: As for :func:`run_devices`.
        mesh: As for :func:`run_devices`.
        batch_size: Examples of a micro-batch.
        available: Number of devices; ``None`` where they are on another machine.

    Raises:
        ValueError: an option cannot be read, or the options do not go together.
    """
    axes = axis_sizes(devices, mesh)
    count = math.prod(axes.values())
    if mesh is not None and devices not in ("1", "all", str(count)):
        raise ValueError(f"--mesh {mesh} has {count} devices, and --devices asks for {devices}")
    if available is not None and count > available:
        raise ValueError(f"{count} devices were asked for, and JAX finds {available}")
    if batch_size % axes["data"]:
        raise ValueError(
            f"{axes['data']} devices do not divide a batch of {batch_size} examples: choose a "
            f"--batch-size that is a multiple of {axes['data']}, or fewer devices for data"
        )
    return axes


def axis_sizes(devices: str, mesh: str | None) -> dict[str, int]:
    """Number of devices along ``data`` and ``model``; see :func:`run_devices`.

    Raises:
        ValueError: an option cannot be read.
    """
    if devices != "all" and not (devices.isdecimal() and int(devices)):
        raise ValueError(f"--devices must be all or a number of devices, not {devices!r}")
    if mesh is None:
        return {"data": jax.device_count() if devices == "all" else int(devices), "model": 1}
    mentioned: dict[str, int] = {}
    for axis_text in mesh.split(","):
        found = re.fullmatch(r"(data|model)=([1-9]\d*)", axis_text.strip())
        if found is None:
            raise ValueError(
                f"--mesh must be like data=4,model=2, not {mesh!r}: {axis_text!r} is none of it"
            )
        if found[1] in mentioned:
            raise ValueError(f"--mesh {mesh} names {found[1]} twice")
        mentioned[found[1]] = int(found[2])
    return {"data": 1, "model": 1} | mentioned


def devices_line(name: str, speed: float, described: dict[str, Any]) -> str:
    """The result of :meth:`RunDevices.described` and the speed in samples a second, as a line."""
    axes = ", ".join(f"{axis}={count}" for axis, count in described["mesh"].items())
    bytes_each = bytes_text(described["bytes_per_device"])
    return f"{name} over {axes}: {speed:,.1f} samples a second, {bytes_each} on each device"
