"""Where factors are decomposed, how work is divided over devices, and where results go."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxkfac._arguments import ArrayTree
from jaxkfac._errors import NonFiniteFactorError, nearest
from jaxkfac.blocks import EigenBlock
from jaxkfac.linalg.spectral import (
    HostDType,
    HostSpectrum,
    Spectrum,
    eigh_on_host,
    in_sequence,
)
from jaxkfac.memory import ProcessGroup, free_bytes, in_equal_shares, put_leaf, whole_here

# ---------------- memory of a decomposition


Placement = Literal["auto", "device", "host"]

_WORKSPACE_MATRICES = 3  # the matrix that is overwritten, and scratch of two matrices
_LARGEST_CALL = 2**31 - 1  # bytes of matrices in one batched call


def solver_scratch(n: int, number: int, itemsize: int) -> int:
    r"""Bytes of scratch that one call needs to decompose matrices of one size.

    It counts $1 + 6 n + 2 n^2$ elements for each matrix that is decomposed at the same time, beside
    matrices and results. That is LAPACK's documented workspace. cuSOLVER documents no formula and
    reports its workspace at run time; for its batched solver this assumes LAPACK's workspace for as
    many matrices as jaxlib passes at once, which take at most 2**31 - 1 bytes.

    Args:
        n: Rows of a matrix.
        number: Number of matrices; 1 if they are decomposed in turn.
        itemsize: Bytes of an element.

    References:
        LAPACK, ``ssyevd``, ``LWORK`` for ``JOBZ = 'V'``. jaxlib (since 0.7.2),
        ``jaxlib/gpu/solver_kernels_ffi.cc``, ``Syevd64Impl``. NVIDIA, cuSOLVER documentation,
        ``cusolverDnXsyevBatched_bufferSize``.
    """
    at_once = min(number, max(1, _LARGEST_CALL // (n**2 * itemsize)))
    return at_once * (1 + 6 * n + 2 * n**2) * itemsize


def matrices_that_fit(n: int, dtype: DTypeLike, like: Any) -> int | None:
    """How many ``(n, n)`` matrices fit on an array's device while they are decomposed.

    This uses half of the free memory that ``memory_stats`` reports; the other half is for results
    and fragmentation. ``None`` means no known limit (the CPU has no such count). If the devices
    belong to several processes, the smallest of their answers counts.

    Args:
        n: Size of a matrix.
        dtype: The dtype of the matrices.
        like: The array, or a device.
    """
    is_array = isinstance(like, jax.Array)
    free = free_bytes(device_of(like.sharding) if is_array else like)
    if free is None:
        return None
    fit = int(free / 2 // (_WORKSPACE_MATRICES * n**2 * np.dtype(dtype).itemsize))
    # All processes take the smallest number, because they must run the same batches.
    group = ProcessGroup.of(like.sharding) if is_array else None
    return (
        fit if group is None else int(group.gathered(np.array(min(fit, 1 << 30), np.int32)).min())
    )


def device_of(sharding: Sharding) -> Any:
    """The device whose memory is asked: the first that belongs to this process."""
    return next(iter(sharding.addressable_devices), next(iter(sharding.device_set)))


def is_on_host(x: Array) -> bool:
    """Whether ``x`` belongs to an accelerator but is stored in host memory."""
    return "host" in (x.sharding.memory_kind or "") and device_of(x.sharding).platform != "cpu"


# ---------------- sharding of results


class ResultSharding(NamedTuple):
    """Where results of one factor go; it does not hold the factor itself.

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
        """The sharding of results: replicated; ``None`` for uncommitted results."""
        factor = self.factor if self.committed else None
        if isinstance(factor, NamedSharding):
            # Replicated, because every device preconditions its part of the gradient with all
            # eigenvectors.
            return NamedSharding(factor.mesh, PartitionSpec(), memory_kind=factor.memory_kind)
        # Without a mesh there are no axes to replicate over; uncommitted results go where they are
        # used.
        return None if factor is None or len(factor.device_set) > 1 else factor


UNCOMMITTED = ResultSharding(None, False)


def result_sharding(factor: object) -> ResultSharding:
    """Results of a sharded factor are replicated; those of an uncommitted one are uncommitted."""
    if not isinstance(factor, jax.Array):
        return UNCOMMITTED
    return ResultSharding(factor.sharding, factor.committed)


def put_result(result: np.ndarray, like: ResultSharding, *, gives_up: bool = False) -> Array:
    """Put a host result where its factor lives; with ``gives_up`` it may keep the host buffer."""
    return put_leaf(result, like.sharding, gives_up=gives_up)


# ---------------- work divided among the devices of a mesh axis


class MeshAxis(NamedTuple):
    """An axis of a mesh, over whose devices work is divided.

    Attributes:
        mesh: The mesh.
        name: Name of the axis.
    """

    mesh: Mesh | AbstractMesh
    name: str

    @property
    def size(self) -> int:
        """How many devices divide the work."""
        return self.mesh.shape[self.name]

    @staticmethod
    def check(distribute: object) -> None:
        """Refuse a value that names no single axis, when a transformation is built.

        Raises:
            TypeError: it is not a name, an axis or ``None``.
        """
        if not (distribute is None or isinstance(distribute, str | MeshAxis)):
            raise TypeError(
                f"distribute={distribute!r}: expected the name of one mesh axis, as "
                "distribute='data'. To divide over the devices of several, join them into one "
                "axis of the mesh; with one of them, devices along the others do the same work"
            )

    @classmethod
    def of(cls, name: str, *trees: ArrayTree) -> "MeshAxis":
        """The axis of that name, in the mesh set by ``jax.set_mesh`` or the mesh of the arrays.

        Args:
            name: Name of the axis.
            trees: Arrays. Traced arrays show their mesh only if its axes are explicit.

        Raises:
            ValueError: no mesh is known, it has no such axis, or a ``jax.shard_map`` has divided
                it already.
        """
        meshes = [jax.sharding.get_abstract_mesh()]
        meshes += [mesh for x in jax.tree.leaves(trees) if (mesh := _mesh_of(x)) is not None]
        # The mesh in context comes first: it is the one that the compiler uses.
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


def _mesh_of(x: object) -> Mesh | AbstractMesh | None:
    if isinstance(x, jax.Array):
        typed = jax.typeof(x).sharding.mesh
        if not typed.empty:
            return typed
        if not isinstance(x, Tracer) and isinstance(x.sharding, NamedSharding):
            return x.sharding.mesh
    return None


def solve_divided(
    problems: Sequence[tuple[Array, ...]], solve: Callable[..., ArrayTree], axis: MeshAxis
) -> list[ArrayTree]:
    """Solve each problem on one device of an axis, and return the results on all of them.

    Slices of stacks are separate problems. They are divided by the cubes of their sizes, the
    largest first, so that no device has more than an equal share plus the largest problem. A
    device solves its problems of one size in one call.

    Args:
        problems: Each ``((stack..., n, n), (stack...), ...)``: a matrix and numbers beside it.
        solve: ``solve(matrices, *numbers)``, with one leading axis each, returns a tree of arrays
            with that axis.
        axis: The mesh axis whose devices divide the work.

    Returns:
        The results of the problems, with the axes of their stacks.

    Memory:
        Every device has the results of all. They are exchanged as one sum over devices, of arrays
        that are zero except on one of them.
    """
    stacks = [matrix.shape[:-2] for matrix, *_ in problems]
    flat = [
        tuple(x.reshape(-1, *x.shape[len(stack) :]) for x in problem)
        for problem, stack in zip(problems, stacks, strict=True)
    ]
    # Slices and not stacks are divided: one stack of 48 layers would otherwise fall to one device.
    units = [(i, j) for i, (matrix, *_) in enumerate(flat) for j in range(len(matrix))]
    cubes = [flat[i][0].shape[-1] ** 3 for i, _ in units]
    owners = in_equal_shares(cubes, axis.size)
    like = [jax.eval_shape(solve, *problem) for problem in flat]

    def of_device(device: int) -> Callable[[list[tuple[Array, ...]]], list[ArrayTree]]:
        assigned = [unit for unit, owner in zip(units, owners, strict=True) if owner == device]

        def run(flat: list[tuple[Array, ...]]) -> list[ArrayTree]:
            out = [jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree) for tree in like]
            after: Array | None = None
            by_size: dict[Any, list[tuple[int, int]]] = defaultdict(list)
            for i, j in assigned:
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

    def on_each(flat: list[tuple[Array, ...]]) -> list[ArrayTree]:
        # All devices run one program, and each has another list of sizes: a branch for each.
        branches = [of_device(device) for device in range(axis.size)]
        mine = jax.lax.switch(jax.lax.axis_index(axis.name), branches, flat)
        # Each result is zero on all devices but the one that solved it: the sum is a broadcast.
        return jax.lax.psum(mine, axis.name)

    everywhere = PartitionSpec()
    kinds = dict(zip(axis.mesh.axis_names, axis.mesh.axis_types, strict=True))
    if kinds[axis.name] == AxisType.Explicit:
        # On an explicit axis an operand must have the sharding that `in_specs` names.
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


# ---------------- decompositions in host memory


class DenseMean(NamedTuple):
    """A dense block to decompose, as the mean of its factor."""

    block: EigenBlock
    matrix: Array | np.ndarray


def solve_on_host(means: Sequence[DenseMean], *, vectors: bool, dtype: HostDType) -> list[Spectrum]:
    """The spectra of matrices, placed where the matrices live.

    If the devices of a matrix belong to several processes, these divide the work, one slice of a
    stack at a time. Every process calls this with the same matrices, in the same order.

    Raises:
        NonFiniteFactorError: naming the layer; raised in every process.
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
        spectrum = solved.pop(i, None) or eigh_on_host(matrix, name=name, dtype=dtype)
        where = result_sharding(matrix)
        assert spectrum.vectors is not None
        columns = put_result(spectrum.vectors, where, gives_up=True) if vectors else None
        spectra.append(Spectrum(put_result(spectrum.values, where), columns))
    return spectra


def _shared(
    means: Sequence[DenseMean], group: ProcessGroup, dtype: HostDType
) -> list[HostSpectrum]:
    slices = [(i, at) for i, mean in enumerate(means) for at in np.ndindex(mean.block.source.stack)]
    costs = [means[i].block.size ** 3 for i, _ in slices]
    owners = dict(zip(slices, in_equal_shares(costs, len(group.devices)), strict=True))
    failure, results = None, []
    for i, (block, matrix) in enumerate(means):
        local_matrix = np.asarray(whole_here(matrix))
        values, vectors = (
            np.zeros(local_matrix.shape[:-1], local_matrix.dtype),
            np.zeros_like(local_matrix),
        )
        results.append((values, vectors))
        assigned = [at for j, at in slices if j == i and owners[j, at] == group.rank]
        # A process that fails must still reach ``agree``, where the others wait for it.
        for at in assigned if failure is None else []:
            name = block.name + (f" at stack index {at}" if at else "")
            try:
                values[at], vectors[at] = eigh_on_host(local_matrix[at], name=name, dtype=dtype)
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
    return [HostSpectrum(*(group.combined(x) for x in result)) for result in results]
