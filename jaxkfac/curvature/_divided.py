"""Matrices divided among the devices of a mesh axis, each solved by one of them, in the graph."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jaxkfac._errors import nearest
from jaxkfac.linalg import in_sequence
from jaxkfac.memory import in_equal_shares

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
