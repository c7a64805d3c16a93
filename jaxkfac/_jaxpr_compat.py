"""The shape of jaxprs across JAX versions: no other file depends on it.

Only ``jax`` and ``jax.extend`` are imported. Tested with jax 0.10.0, 0.10.2 and 0.11.2.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex
from jax.extend.core import Literal
from jax.extend.core.primitives import convert_element_type_p
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, auto_axes, reshard
from jax.typing import ArrayLike

from jaxkfac._arguments import ArrayTree

if TYPE_CHECKING:  # JAX declares an operand's type without the shape that every operand here has
    Eqn = Any
    Var = Any
    VarOrLiteral = Any
    Jaxpr = Any
    ClosedJaxpr = Any
else:
    Eqn, Var = jex.JaxprEqn, jex.Var
    VarOrLiteral = Var | Literal  # JAX's Atom; an atom is part of an axis here
    Jaxpr, ClosedJaxpr = jex.Jaxpr, jex.ClosedJaxpr  # one class since jax 0.11


def is_var(operand: VarOrLiteral) -> bool:
    return not isinstance(operand, Literal)


def open_jaxpr(jaxpr: Jaxpr | ClosedJaxpr) -> tuple[Jaxpr, list[ArrayLike]]:
    """The open jaxpr and its constants, from either form."""
    return (jaxpr.jaxpr, list(jaxpr.consts)) if hasattr(jaxpr, "consts") else (jaxpr, [])


def is_stateful(eqn: Eqn) -> bool:
    """Whether a result depends on more than the operands: on a mutable array, or on the host.

    A collective also has an effect, the name of its mesh axis, but is a function of its operands.
    """
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def is_complex(operand: VarOrLiteral) -> bool:
    """Whether an operand holds complex numbers."""
    dtype = getattr(operand.aval, "dtype", None)
    return dtype is not None and jax.numpy.issubdtype(dtype, jax.numpy.complexfloating)


def is_mutable(operand: VarOrLiteral) -> bool:
    """Whether an operand is a mutable array (``jax.Ref``)."""
    return hasattr(operand.aval, "inner_aval")


LAYER = "layer:"  # how the primitive of a function begins that a user named as one layer


def is_layer(eqn: Eqn) -> bool:
    """Whether an equation is a call of a function that a user named as one layer."""
    return eqn.primitive.name.startswith(LAYER)


def call_kind(eqn: Eqn) -> str | None:
    """The kind of a structured primitive, under a name that does not change between versions.

    A call of a named layer is a jit for all code that does not ask for the name.
    """
    name = eqn.primitive.name
    if name in ("jit", "pjit", "closed_call", "core_call") or name.startswith(LAYER):
        return "jit"
    if name in ("checkpoint", "remat2", "remat"):
        return "checkpoint"
    if name in ("scan", "shard_map", "while", "cond"):
        return name
    if name.startswith(("custom_jvp_call", "custom_vjp_call")):
        return "custom"
    return None


def is_call(eqn: Eqn) -> bool:
    """Whether an equation runs one body once, on its operands."""
    return call_kind(eqn) in ("jit", "checkpoint", "custom", "shard_map")


def is_loop(eqn: Eqn) -> bool:
    """Whether an equation is a scan: it runs its body once for each slice, and carries values."""
    return call_kind(eqn) == "scan"


def body_of(eqn: Eqn) -> tuple[Jaxpr, list[ArrayLike]]:
    """The jaxpr inside a jit, checkpoint, scan, shard_map or custom-derivative equation."""
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in eqn.params:
            return open_jaxpr(eqn.params[key])
    raise KeyError(eqn.primitive.name)


def bodies_of(eqn: Eqn) -> list[tuple[Jaxpr, list[ArrayLike]]]:
    """The jaxprs inside an equation and their constants: of a cond one for each branch.

    A ``while`` has its body first and then its predicate; an equation without a structure that is
    followed has none.
    """
    match call_kind(eqn):
        case None:
            return []
        case "cond":
            return [open_jaxpr(branch) for branch in eqn.params["branches"]]
        case "while":
            return [open_jaxpr(eqn.params[key]) for key in ("body_jaxpr", "cond_jaxpr")]
        case _:
            return [body_of(eqn)]


def num_selectors(eqn: Eqn) -> int:
    """Number of operands in front of those that the bodies get: of a cond its index."""
    return 1 if call_kind(eqn) == "cond" else 0


def jaxprs_in(eqn: Eqn) -> list[Jaxpr]:
    """All jaxprs among the parameters of any equation."""
    values = [v for p in eqn.params.values() for v in (p if isinstance(p, tuple | list) else [p])]
    return [open_jaxpr(v)[0] for v in values if hasattr(v, "eqns") or hasattr(v, "jaxpr")]


def num_iterations(eqn: Eqn) -> int:
    """How often an equation runs its body: the length of a scan; 1 for others."""
    return eqn.params["length"] if is_loop(eqn) else 1


def read_order(eqn: Eqn) -> tuple[int, ...]:
    """The order in which a reshape reads its operand's axes (``vmap`` makes some transpose)."""
    return tuple(eqn.params.get("dimensions") or range(len(eqn.invars[0].aval.shape)))


def reshape_groups(
    before: Sequence[int], after: Sequence[int]
) -> Iterator[tuple[list[int], list[int]]]:
    """The smallest runs of axes before and after a reshape that hold the same entries."""
    i = j = 0
    while i < len(before) or j < len(after):
        start, stop = i, j
        i, j = min(i + 1, len(before)), min(j + 1, len(after))
        while (x := math.prod(before[start:i])) != (y := math.prod(after[stop:j])):
            i, j = (i + 1, j) if x < y else (i, j + 1)
        yield list(range(start, i)), list(range(stop, j))


def evaluate(
    eqns: Sequence[Eqn], invars: Sequence[Var], outvars: Sequence[VarOrLiteral], parent: Jaxpr
) -> Callable[..., list[Any]]:
    """A function of ``invars`` that runs ``eqns`` unchanged, with their context and effects."""
    effects = frozenset().union(*(e.effects for e in eqns))
    piece = parent.replace(
        eqns=list(eqns),
        invars=list(invars),
        outvars=list(outvars),
        constvars=[],
        effects=effects,
        debug_info=parent.debug_info._replace(arg_names=None, result_paths=None),
    )
    return jex.jaxpr_as_fun(jex.ClosedJaxpr(piece, []))


def without_constants(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The program with its constants as further inputs, behind the others."""
    jaxpr, _ = open_jaxpr(closed)
    opened = jaxpr.replace(
        invars=[*jaxpr.invars, *jaxpr.constvars],
        constvars=[],
        debug_info=jaxpr.debug_info._replace(arg_names=None),
    )
    return jex.ClosedJaxpr(opened, [])


def bind(eqn: Eqn) -> Callable[..., Any]:
    """A function of all operands of a first-order equation, with all of its parameters."""

    def run(*operands: Any) -> Any:
        with eqn.ctx.manager:
            return eqn.primitive.bind(*operands, **eqn.params)

    return run


def copy_like(operand: Var) -> Eqn:
    """An equation that copies a value of an operand's shape and dtype."""
    like = jax.ShapeDtypeStruct(operand.aval.shape, operand.aval.dtype)
    (eqn,) = jax.make_jaxpr(jax.numpy.copy)(like).jaxpr.eqns
    return eqn


def equation_signature(eqn: Eqn) -> Hashable:
    """A key for what a first-order equation does, whatever its operands are called.

    An equation whose parameters cannot be hashed equals only itself.
    """
    params = tuple(sorted(eqn.params.items(), key=lambda item: item[0]))
    types = tuple(v.aval for v in (*eqn.invars, *eqn.outvars))
    signature = (eqn.primitive.name, params, types, eqn.ctx)
    try:
        hash(signature)
    except TypeError:
        return id(eqn)
    return signature


def of_operands(eqn: Eqn) -> Callable[..., Any]:
    """A function of all operands of any equation.

    An equation with a custom derivative cannot be bound with its parameters alone. Neither can a
    ``shard_map``, nor the ``closed_call`` that the derivative of a checkpoint leaves.
    """
    bound_otherwise = call_kind(eqn) in ("custom", "shard_map")
    if not bound_otherwise and eqn.primitive.name not in ("closed_call", "core_call"):
        return bind(eqn)
    variables = [i for i, v in enumerate(eqn.invars) if is_var(v)]
    parent, _ = body_of(eqn)
    run = evaluate([eqn], [eqn.invars[i] for i in variables], eqn.outvars, parent)
    return lambda *operands: run(*[operands[i] for i in variables])


def results_of(eqn: Eqn, values: Sequence[Any]) -> list[Any]:
    """The results of any equation on some operands, always as a list."""
    out = of_operands(eqn)(*values)
    return list(out) if eqn.primitive.multiple_results else [out]


def scan_counts(eqn: Eqn) -> tuple[int, int]:
    """Numbers of a scan's constants and carries; the remaining operands are scanned.

    Other equations have none of either.
    """
    p = eqn.params
    if not is_loop(eqn):
        return 0, 0
    if "ft_in" in p:  # jax 0.11
        constants, carry, _ = p["ft_in"].unpack()
        return len(constants), len(carry)
    return p["num_consts"], p["num_carry"]


def scan_like(
    eqn: Eqn, body: Callable[[Any, Any], tuple[Any, Any]], init: ArrayTree, xs: ArrayTree
) -> tuple[Any, Any]:
    """``lax.scan`` with the settings of a scan equation."""
    p = eqn.params
    extra = {"_split_transpose": True} if p.get("_split_transpose") else {}
    return jax.lax.scan(
        body, init, xs, length=p["length"], reverse=p["reverse"], unroll=p["unroll"], **extra
    )


def checkpoint_like(eqn: Eqn, fn: Callable[..., Any]) -> Callable[..., Any]:
    """``jax.checkpoint`` with the policy and ``prevent_cse`` of a checkpoint equation."""
    p = eqn.params
    return jax.checkpoint(fn, policy=p["policy"], prevent_cse=p["prevent_cse"])


def recomputes(eqn: Eqn) -> bool:
    """Whether an equation is the recomputation of a checkpoint in a derivative's backward pass."""
    return call_kind(eqn) == "checkpoint" and eqn.params["differentiated"]


def states_placement(eqn: Eqn) -> bool:
    """Whether a jit equation states shardings or donations."""
    p = eqn.params
    stated = (*p.get("in_shardings", ()), *p.get("out_shardings", ()))
    placed = any(isinstance(s, jax.sharding.Sharding) for s in stated)
    return placed or any(p.get("donated_invars", ()))


def jit_like(eqn: Eqn, fn: Callable[..., Any], num_extra: int) -> Callable[..., Any]:
    """``jax.jit`` with the name, shardings and donation of a jit equation.

    ``fn(values, extras)`` takes the equation's operands first; the extra operands (slots, row
    masks) have no shardings.
    """
    p = eqn.params

    def stated(shardings: Iterable[object]) -> tuple[jax.sharding.Sharding | None, ...]:
        return tuple(s if isinstance(s, jax.sharding.Sharding) else None for s in shardings)

    fn.__name__ = p.get("name", "jit")
    shardings: dict[str, Any] = {}
    if any(s is not None for s in stated(p.get("in_shardings", ()))):
        shardings["in_shardings"] = (*stated(p["in_shardings"]), *[None] * num_extra)
    if any(s is not None for s in stated(p.get("out_shardings", ()))):
        shardings["out_shardings"] = list(stated(p["out_shardings"]))
    donated = tuple(i for i, d in enumerate(p.get("donated_invars", ())) if d)
    return jax.jit(fn, donate_argnums=donated, inline=p.get("inline", False), **shardings)


def shard_map_like(
    eqn: Eqn, fn: Callable[..., Any], extra_specs: tuple[PartitionSpec, ...]
) -> Callable[..., Any]:
    """``jax.shard_map`` with the settings of a shard_map equation."""
    p = eqn.params
    axes = p["newly_manual_axes"] if "newly_manual_axes" in p else p["manual_axes"]
    return jax.shard_map(
        fn,
        mesh=p["mesh"],
        in_specs=(*p["in_specs"], *extra_specs),
        out_specs=list(p["out_specs"]),
        axis_names=set(axes),
        check_vma=p["check_vma"],
    )


def call_like(
    eqn: Eqn, bodies: Sequence[Callable[..., Any]], operands: Sequence[Any], extras: Sequence[Any]
) -> Any:
    """The results of a call or a cond whose bodies are other functions, which get extra operands.

    Extra operands are on every device of a ``shard_map``. One that enters replicated has a
    cotangent that is summed over the devices.
    """
    kind = call_kind(eqn)
    if kind == "cond":
        return jax.lax.switch(operands[0], bodies, *operands[1:], *extras)
    (body,) = bodies
    if kind == "checkpoint":
        run = checkpoint_like(eqn, body)
    elif kind == "shard_map":
        run = shard_map_like(eqn, body, (PartitionSpec(),) * len(extras))
    else:
        run = jit_like(eqn, body, len(extras))
    return run(*operands, *extras)


def varying_axes(x: Any) -> frozenset[str]:
    """Mesh axes over which a value, or a type, inside ``shard_map`` differs between devices."""
    kind = getattr(x if hasattr(x, "manual_axis_type") else jax.typeof(x), "manual_axis_type", None)
    return frozenset(getattr(kind, "varying", ()) or ())


def cast_varying(x: ArrayLike, like: Any) -> Any:
    """``x`` marked as varying over every axis over which ``like`` varies."""
    missing = tuple(sorted(varying_axes(like) - varying_axes(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def automatic(fn: Callable[..., Any], like: ArrayTree) -> Callable[..., Any]:
    """``fn`` run on a mesh whose axes the compiler partitions, whatever their types are.

    On explicit axes every operation with an ambiguous result would have to name its sharding.
    Inside ``automatic`` none has to; the results get the specs of the types ``like``.
    """

    def run(*args: Any) -> Any:
        mesh = _mesh_of(args)
        if not mesh.explicit_axes:
            return fn(*args)
        shardings = jax.tree.map(lambda t: NamedSharding(mesh, t.sharding.spec), like)
        return auto_axes(fn, axes=mesh.explicit_axes, out_sharding=shardings)(*args)

    return run


def replicated(tree: ArrayTree) -> ArrayTree:
    """The tree with every array on every device, if types carry shardings."""
    mesh = _mesh_of(tree)
    return reshard(tree, NamedSharding(mesh, PartitionSpec())) if mesh.explicit_axes else tree


def _mesh_of(tree: ArrayTree) -> AbstractMesh:
    """The mesh in context; without one, the mesh that the types carry."""
    mesh = jax.sharding.get_abstract_mesh()
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(tree)] if mesh.empty else []
    return next((m for m in meshes if not m.empty), mesh)


# ---------------- types of results


def typed_like(x: Any, aval: Any) -> Any:
    """A value as an array with the weak type of ``aval``, if it has its dtype or no fixed one.

    ``jit`` compiles a program anew for a Python number where an array was, and for another weak
    type. Values of other dtypes and of other kinds (keys, references) stay as they are.
    """
    mine = jax.typeof(x)
    dtype, weak = getattr(aval, "dtype", None), getattr(aval, "weak_type", False)
    if dtype is None or getattr(mine, "dtype", None) is None:
        return x
    if jnp.issubdtype(mine.dtype, jax.dtypes.extended) or mine.dtype != dtype:
        return x
    if mine.weak_type != weak:
        return convert_element_type_p.bind(x, new_dtype=dtype, weak_type=weak, sharding=None)
    return x if isinstance(x, jax.Array) else jnp.asarray(x, None if weak else dtype)
