"""Where factors are decomposed, how the work is divided, and how results are sharded."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array

from jaxkfac._errors import NonFiniteFactorError, nearest
from jaxkfac.curvature._layout import EigenBlock
from jaxkfac.linalg import HostDType, HostSpectrum, Spectrum, eigh_on_host, in_sequence
from jaxkfac.memory import ProcessGroup, free_bytes, in_equal_shares, put_leaf, whole_here

# ---------------- where a factor is decomposed: on its own device while its workspace fits, else
# on the host


Placement = Literal["auto", "device", "host"]

_WORKSPACE_MATRICES = 3  # the one that is overwritten, and the scratch of one
_LARGEST_CALL = 2**31 - 1  # bytes of matrices


def solver_scratch(n: int, number: int, itemsize: int) -> int:
    r"""Bytes that one call takes beside its matrices and results, to decompose all of one size.

    $1 + 6 n + 2 n^2$ elements for each matrix that is decomposed at the same time: LAPACK's, by
    its documentation. cuSOLVER's says what it takes when it runs, and has no formula in its
    documentation; for its batched solver this is LAPACK's for as many matrices as jaxlib gives
    it at once, which are at most 2**31 - 1 bytes.

    Args:
        n: Rows of a matrix.
        number: Of matrices; 1 where they are decomposed in turn.
        itemsize: Bytes of an element.

    References:
        LAPACK, ``ssyevd``, ``LWORK`` for ``JOBZ = 'V'``. jaxlib (since 0.7.2),
        ``jaxlib/gpu/solver_kernels_ffi.cc``, ``Syevd64Impl``. NVIDIA, cuSOLVER documentation,
        ``cusolverDnXsyevBatched_bufferSize``.
    """
    at_once = min(number, max(1, _LARGEST_CALL // (n**2 * itemsize)))
    return at_once * (1 + 6 * n + 2 * n**2) * itemsize


def matrices_that_fit(n: int, dtype: Any, like: Any) -> int | None:
    """How many ``(n, n)`` matrices can be decomposed at once where an array lies.

    Half of what ``memory_stats`` says is free is used; the rest is left to results and
    fragmentation. ``None`` is no known limit (the CPU keeps no such count). On devices of several
    processes the least of what they find.

    Args:
        n: Size.
        dtype: Of the matrices.
        like: The array, or a device.
    """
    is_array = isinstance(like, jax.Array)
    free = free_bytes(device_of(like.sharding) if is_array else like)
    if free is None:
        return None
    fit = int(free / 2 // (_WORKSPACE_MATRICES * n**2 * np.dtype(dtype).itemsize))
    group = ProcessGroup.of(like.sharding) if is_array else None
    return (
        fit if group is None else int(group.gathered(np.array(min(fit, 1 << 30), np.int32)).min())
    )


def device_of(sharding: Sharding) -> Any:
    """The device to ask about memory: the first that is of this process."""
    return next(iter(sharding.addressable_devices), next(iter(sharding.device_set)))


def is_on_host(x: Any) -> bool:
    """Whether ``x`` belongs to an accelerator but lies in host memory."""
    return "host" in (x.sharding.memory_kind or "") and device_of(x.sharding).platform != "cpu"


# ---------------- the sharding of results: that of the factor they were computed from, replicated


class ResultSharding(NamedTuple):
    """Where results of one factor go, without holding the factor.

    Attributes:
        factor: The factor's sharding, ``None`` for a NumPy array.
        committed: Whether the factor is committed to it.
    """

    factor: Sharding | None
    committed: bool

    @property
    def device(self) -> Any:
        """The (first) device of this process, ``None`` for a NumPy array."""
        return None if self.factor is None else device_of(self.factor)

    @property
    def sharding(self) -> Sharding | None:
        """Where results are committed to: replicated, ``None`` for uncommitted results."""
        factor = self.factor if self.committed else None
        if isinstance(factor, NamedSharding):
            return NamedSharding(factor.mesh, PartitionSpec(), memory_kind=factor.memory_kind)
        return None if factor is None or len(factor.device_set) > 1 else factor


UNCOMMITTED = ResultSharding(None, False)


def result_sharding(factor: Any) -> ResultSharding:
    """Results of a sharded factor are replicated, those of an uncommitted one uncommitted."""
    if not isinstance(factor, jax.Array):
        return UNCOMMITTED
    return ResultSharding(factor.sharding, factor.committed)


def put_result(result: np.ndarray, like: ResultSharding, *, gives_up: bool = False) -> Array:
    """Put a host result where its factor lives, in memory of its own or, given up, in its."""
    return put_leaf(result, like.sharding, gives_up=gives_up)


# ---------------- matrices divided among the devices of a mesh axis, each solved by one of them,
# in the graph


PyTree = Any


class MeshAxis(NamedTuple):
    """An axis of a mesh, over whose devices work is divided.

    Attributes:
        mesh: The mesh.
        name: Of the axis.
    """

    mesh: Mesh | AbstractMesh
    name: str

    @property
    def size(self) -> int:
        """How many devices divide the work."""
        return self.mesh.shape[self.name]

    @staticmethod
    def check(distribute: Any) -> None:
        """Refuse what names no single axis, when a transformation is built.

        Raises:
            TypeError: it is neither a name nor an axis nor ``None``.
        """
        if not (distribute is None or isinstance(distribute, str | MeshAxis)):
            raise TypeError(
                f"distribute={distribute!r}: expected the name of one mesh axis, as "
                "distribute='data'. To divide over the devices of several, join them into one "
                "axis of the mesh; with one of them, devices along the others do the same work"
            )

    @classmethod
    def of(cls, name: str, *trees: PyTree) -> "MeshAxis":
        """The axis of that name in the mesh that ``jax.set_mesh`` has set, or that arrays lie on.

        Args:
            name: Of the axis.
            trees: Arrays. Traced ones say their mesh only where its axes are explicit.

        Raises:
            ValueError: no mesh is known, it has no such axis, or a ``jax.shard_map`` has divided
                it already.
        """
        meshes = [jax.sharding.get_abstract_mesh()]
        meshes += [mesh for x in jax.tree.leaves(trees) if (mesh := _mesh_of(x)) is not None]
        mesh = next((mesh for mesh in meshes if not mesh.empty), None)
        if mesh is None:
            raise ValueError(
                f"distribute={name!r}: no mesh is known here. Call inside `with "
                "jax.set_mesh(mesh):`, or place the parameters with NamedSharding; under jit "
                "arrays say their mesh only where its axes are explicit"
            )
        if name not in mesh.axis_names:
            raise ValueError(
                f"distribute={name!r} names no axis of the mesh, which has "
                f"{nearest(name, list(mesh.axis_names))}"
            )
        if mesh.axis_types[mesh.axis_names.index(name)] == AxisType.Manual:
            raise ValueError(
                f"distribute={name!r}: inside jax.shard_map over {name!r} each device has its own "
                "program already; call the optimizer outside of it"
            )
        return cls(mesh, name)


def _mesh_of(x: Any) -> Mesh | AbstractMesh | None:
    if isinstance(x, jax.Array):
        typed = jax.typeof(x).sharding.mesh
        if not typed.empty:
            return typed
        if not isinstance(x, Tracer) and isinstance(x.sharding, NamedSharding):
            return x.sharding.mesh
    return None


def solve_divided(
    problems: Sequence[tuple[Array, ...]], solve: Callable[..., PyTree], axis: MeshAxis
) -> list[PyTree]:
    """Solve each problem on one device of an axis, and have the results on all of them.

    Slices of stacks are problems of their own. They are divided by the cubes of their sizes, the
    largest first, so that no device has more than its equal share and the largest one. One
    device solves what it has of one size in one call.

    Args:
        problems: Each ``((stack..., n, n), (stack...), ...)``: a matrix and numbers beside it.
        solve: ``solve(matrices, *numbers)``, with one leading axis each, to a tree of arrays
            with that axis.
        axis: Over whose devices.

    Returns:
        The results of the problems, each with its stack's axes.

    Memory:
        Every device has the results of all; their exchange is one sum over devices, of arrays
        that are zero but on one of them.
    """
    stacks = [matrix.shape[:-2] for matrix, *_ in problems]
    flat = [
        tuple(x.reshape(-1, *x.shape[len(stack) :]) for x in problem)
        for problem, stack in zip(problems, stacks, strict=True)
    ]
    units = [(i, j) for i, (matrix, *_) in enumerate(flat) for j in range(len(matrix))]
    cubes = [flat[i][0].shape[-1] ** 3 for i, _ in units]
    owners = in_equal_shares(cubes, axis.size)
    like = [jax.eval_shape(solve, *problem) for problem in flat]

    def of_device(device: int) -> Callable[[list[tuple[Array, ...]]], list[PyTree]]:
        own = [unit for unit, owner in zip(units, owners, strict=True) if owner == device]

        def run(flat: list[tuple[Array, ...]]) -> list[PyTree]:
            out = [jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree) for tree in like]
            after: Array | None = None
            by_size: dict[Any, list[tuple[int, int]]] = defaultdict(list)
            for i, j in own:
                by_size[tuple((x.shape[1:], x.dtype) for x in flat[i])].append((i, j))
            for members in by_size.values():
                columns = zip(*([x[j] for x in flat[i]] for i, j in members), strict=True)
                matrices, *numbers = (jnp.stack(column) for column in columns)
                solved = solve(in_sequence(matrices, after), *numbers)
                after = jax.tree.leaves(solved)[0]
                for row, (i, j) in enumerate(members):
                    out[i] = jax.tree.map(
                        lambda x, new, j=j, row=row: x.at[j].set(new[row]), out[i], solved
                    )
            return out

        return run

    def on_each(flat: list[tuple[Array, ...]]) -> list[PyTree]:
        branches = [of_device(device) for device in range(axis.size)]
        mine = jax.lax.switch(jax.lax.axis_index(axis.name), branches, flat)
        return jax.lax.psum(mine, axis.name)

    everywhere = PartitionSpec()
    kinds = dict(zip(axis.mesh.axis_names, axis.mesh.axis_types, strict=True))
    if kinds[axis.name] == AxisType.Explicit:
        flat = jax.tree.map(lambda x: jax.sharding.reshard(x, everywhere), flat)
    solved = jax.shard_map(
        on_each,
        mesh=axis.mesh,
        in_specs=everywhere,
        out_specs=everywhere,
        axis_names={axis.name},
        check_vma=False,
    )(flat)
    return [
        jax.tree.map(lambda x, stack=stack: x.reshape(*stack, *x.shape[1:]), tree)
        for tree, stack in zip(solved, stacks, strict=True)
    ]


# ---------------- decompositions in host memory: one after the other, or divided among processes


class DenseMean(NamedTuple):
    """A dense block to decompose, as the mean of its factor."""

    block: EigenBlock
    matrix: Array | np.ndarray


def solve_on_host(means: Sequence[DenseMean], *, vectors: bool, dtype: HostDType) -> list[Spectrum]:
    """The spectra of matrices, where the matrices live.

    Those on devices of several processes are divided among these, one slice of a stack at a time;
    every process calls this with the same ones, in the same order.

    Raises:
        NonFiniteFactorError: naming the layer; in each of the processes.
        ProcessesDisagreeError: another process failed, or has other matrices.
    """
    groups: dict[ProcessGroup, list[int]] = {}
    for i, mean in enumerate(means):
        matrix = mean.matrix
        group = None if isinstance(matrix, np.ndarray) else ProcessGroup.of(matrix.sharding)
        if group is not None:
            groups.setdefault(group, []).append(i)
    solved: dict[int, HostSpectrum] = {}
    for group, numbers in groups.items():
        shared = [means[i] for i in numbers]
        solved |= zip(numbers, _shared(shared, group, dtype), strict=True)
    spectra = []
    for i, mean in enumerate(means):
        name, matrix = mean.block.name, mean.matrix
        found = solved.pop(i, None) or eigh_on_host(matrix, name=name, dtype=dtype)
        where = result_sharding(matrix)
        assert found.vectors is not None
        columns = put_result(found.vectors, where, gives_up=True) if vectors else None
        spectra.append(Spectrum(put_result(found.values, where), columns))
    return spectra


def _shared(
    means: Sequence[DenseMean], group: ProcessGroup, dtype: HostDType
) -> list[HostSpectrum]:
    parts = [(i, at) for i, mean in enumerate(means) for at in np.ndindex(mean.block.source.stack)]
    costs = [means[i].block.size ** 3 for i, _ in parts]
    owners = dict(zip(parts, in_equal_shares(costs, len(group.devices)), strict=True))
    failure, found = None, []
    for i, (block, matrix) in enumerate(means):
        here = np.asarray(whole_here(matrix))
        values, vectors = np.zeros(here.shape[:-1], here.dtype), np.zeros_like(here)
        found.append((values, vectors))
        own = [at for j, at in parts if j == i and owners[j, at] == group.rank]
        for at in own if failure is None else []:
            name = block.name + (f" at stack index {at}" if at else "")
            try:
                values[at], vectors[at] = eigh_on_host(here[at], name=name, dtype=dtype)
            except Exception as error:
                failure = error
                break
    doing = f"the decomposition of {len(means)} factors"
    about = repr((dtype, [(block.place, matrix.shape) for block, matrix in means]))
    of_matrix = isinstance(failure, NonFiniteFactorError)
    group.agree(doing, about, None if of_matrix else failure)
    for text in group.told(str(failure) if of_matrix else ""):
        if text:
            raise NonFiniteFactorError(text)
    return [HostSpectrum(*(group.combined(part) for part in whole)) for whole in found]
