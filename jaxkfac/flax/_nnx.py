"""Flax NNX models as pure functions of their parameters and of the state that a call changes."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from jaxtyping import Array, Key

from jaxkfac._arguments import ArrayTree, check_function, leaves_by_path
from jaxkfac._errors import named
from jaxkfac._interpreter import Interpreter, live_inputs
from jaxkfac._jaxpr_compat import (
    Eqn,
    Jaxpr,
    VarOrLiteral,
    bodies_of,
    call_kind,
    num_selectors,
    scan_counts,
)

# ---------------- results of a program that are unchanged operands, or depend on an operand
#
# NNX's loops and rematerialized functions return every variable of a module, written or not, and
# its recurrent cells draw keys for zeros. Only the program shows what was changed or used.


class _Sources(Interpreter[int | None]):
    """For each value of a program, the operand that it is, or ``None``.

    Operands are followed through calls, scan (a carry that no iteration writes, a scanned operand
    that is stacked again) and cond. Any other equation may have changed what it returns.
    """

    def constant(self, operand: VarOrLiteral, value: Any) -> None:
        return None

    def equation(
        self, eqn: Eqn, ins: list[int | None], position: int, within: Any
    ) -> list[int | None]:
        if call_kind(eqn) in (None, "while", "shard_map"):
            return [None] * len(eqn.outvars)
        operands = ins[num_selectors(eqn) :]
        ways = zip(*(passed_through(*body) for body in bodies_of(eqn)), strict=True)
        sources = [way[0] if len(set(way)) == 1 else None for way in ways]
        constants, carries = scan_counts(eqn)
        return [
            None if i is None or not _same_place(k, i, constants, carries) else operands[i]
            for k, i in enumerate(sources)
        ]


def passed_through(jaxpr: Jaxpr, consts: Sequence[Any]) -> list[int | None]:
    """For each result of a program, the operand that it is, or ``None``."""
    return _Sources().run(jaxpr, consts, range(len(jaxpr.invars)))


def _same_place(out: int, operand: int, constants: int, carries: int) -> bool:
    """Whether a result of a scan's body returns the operand in the form in which it came."""
    if out < carries:
        return operand == constants + out
    return operand >= constants + carries


# ---------------- apply functions


Path = tuple[Any, ...]


class NnxApply:
    """``apply(params, *inputs, key=None, state=None)``, rebuilt from an NNX model.

    Returns the model's outputs, and with a state the pair ``(outputs, changed)``. The model's other
    variables stay as they were when the model was taken apart, and the model is rebuilt inside the
    trace, so calls have no side effect. A ``key`` seeds every random stream anew, and is passed to
    a model whose own ``__call__`` has a keyword-only argument ``key``.
    Values that the model sows (``nnx.Intermediate``) are left out. Values that it writes into
    parameters (the kernel that ``nnx.SpectralNorm`` has normalized) are dropped if ``mutable=``
    names ``nnx.Param``, because parameters change by their gradient, and raise otherwise.

    Attributes:
        state: The variables that ``mutable=`` names, as they were in the model: a plain dictionary
            of arrays, for the first call. ``None`` without ``mutable=``, and if that names
            parameters alone.

    Raises:
        ValueError: the call changes a variable that ``mutable=`` does not name, or draws random
            numbers without a ``key``; ``params`` or ``state`` are not those of this model.
    """

    def __init__(
        self, model: nnx.Module, mutable: Any, call: Callable[..., Any] | None = None
    ) -> None:
        self._call = call
        self._drops = isinstance(mutable, tuple | list) and not mutable
        self._graph, params, state, self._other_state = nnx.split(
            model, nnx.Param, () if mutable is None else mutable, ...
        )
        # Only the parameters' structure is stored, so no second copy of them is held.
        self._params, self._state = _Form.of("params", params), _Form.of("state", state)
        self.state: ArrayTree | None = nnx.to_pure_dict(state) if self._state.paths else None
        self._mutable = list(mutable) if isinstance(mutable, tuple | list) else [mutable]
        named = nnx.filterlib.to_predicate(() if mutable is None else mutable)
        self._written = {path for path, v in nnx.to_flat_state(params) if named(path, v)}
        self._hands_key = _takes_key(type(model).__call__ if call is None else call)
        variables = [
            v for states in (state, self._other_state) for _, v in nnx.to_flat_state(states)
        ]
        self._streams = sorted({v.tag for v in variables if isinstance(v, nnx.RngKey) and v.tag})
        unknown = self.state is None and not self._written
        if unknown and not self._drops and mutable is not None:
            kinds = sorted({type(v).__name__ for v in (*variables, nnx.Param(0))})
            raise ValueError(
                f"mutable={_names(self._mutable)} names no variable of the model, whose variables "
                f"are {', '.join(kinds)} (parameters change by their gradient)"
            )

    def __call__(
        self,
        params: ArrayTree,
        *inputs: Any,
        key: Key[Array, ""] | None = None,
        state: ArrayTree | None = None,
    ) -> Any:
        if state is not None and self.state is None:
            raise ValueError(
                f"state=: mutable={_names(self._mutable)} names parameters alone; what a call "
                "writes into them is dropped, so leave state= out"
                if self._written
                else "state=: jk.from_nnx split this model without one; name what its call "
                "changes, as in jk.from_nnx(model, mutable=nnx.BatchStat)"
            )
        state = {} if self.state is None else self.state if state is None else state
        states = self._params.filled(params), self._state.filled(state), self._other_state
        call = self._run(states, inputs, key)
        self._check(call, states, inputs, key)
        if self.state is None:
            return call.out
        return call.out, _nested(self.state, call.after)

    def _run(
        self, states: tuple[nnx.State, ...], inputs: tuple[Any, ...], key: Key[Array, ""] | None
    ) -> "_Call":
        # A copy, because a call writes into its variables, and a pure function must leave its
        # arguments alone.
        model = nnx.merge(self._graph, *states, copy=True)
        before, _ = _values(model)
        named_arguments = {}
        if key is not None and self._hands_key:
            key, model_key = jax.random.split(key)  # of the streams, and of the model
            named_arguments = {"key": model_key}
        if key is not None and self._streams:
            keys = jax.random.split(key, len(self._streams))
            nnx.reseed(model, policy="match_shape", **dict(zip(self._streams, keys, strict=True)))
        out = self._outputs(model, inputs, named_arguments)
        return _Call(out, before, *_values(model))

    def _outputs(
        self, model: nnx.Module, inputs: tuple[Any, ...], named_arguments: dict[str, Any]
    ) -> Any:
        """One call of the model, by the caller's function if there is one."""
        run: Any = type(model).__call__ if self._call is None else self._call
        try:
            signature = inspect.signature(run)
        except (TypeError, ValueError):  # the callable is no Python function
            return run(model, *inputs, **named_arguments)
        try:
            signature.bind(model, *inputs, **named_arguments)
        except TypeError as error:
            name = type(model).__name__ if self._call is None else "call"
            raise TypeError(
                f"from_nnx: {name}{signature} does not take {len(inputs)} inputs ({error}): say "
                "how the model is called, as in jk.from_nnx(model, call=lambda model, x, *, key: "
                "model(x, nnx.Rngs(key)))"
            ) from None
        return run(model, *inputs, **named_arguments)

    def _check(
        self,
        call: "_Call",
        states: tuple[nnx.State, ...],
        inputs: tuple[Any, ...],
        key: Key[Array, ""] | None,
    ) -> None:
        """Refuse calls whose changes a pure function would lose silently."""
        suspects = [path for path in call.after if self._is_suspect(call, path, key)]
        if not suspects:
            return
        existing = [path for path in suspects if path in call.before]
        # `nnx.scan` and the like write every variable back, changed or not; only the program shows
        # which changed.
        unwritten, draws = self._traced(existing, states, inputs, key)
        changed = [path for path in suspects if path not in unwritten]
        drawn = [path for path in changed if issubclass(call.kinds[path], nnx.RngState)]
        changed = [path for path in changed if path not in drawn]
        if drawn and draws:
            streams = _joined([path[:-1] for path in drawn])
            raise ValueError(
                f"the model draws random numbers ({streams}) and would draw the same ones at "
                "every call: pass key=, or take it apart in evaluation mode (model.eval())"
            )
        if changed:
            written = [path for path in changed if issubclass(call.kinds[path], nnx.Param)]
            state = [path for path in changed if path not in written]
            existing = [x for x in self._mutable if x is not None]
            kinds = sorted({call.kinds[path] for path in changed}, key=lambda kind: kind.__name__)
            effects = [f"changes {_joined(state)}, which would stay at its first value"] * bool(
                state
            )
            if written:
                effects.append(f"writes into the parameter {_joined(written)}")
            raise ValueError(
                f"a call of the model {' and '.join(effects)}: give jk.from_nnx(model, "
                f"mutable={_names([*existing, *kinds])})"
                + " and carry the state" * bool(state)
                + " (what is written into a parameter is dropped)" * bool(written)
                + ", take the model apart in evaluation mode (model.eval()), or drop the changes "
                "knowingly with mutable=()"
            )

    def _traced(
        self,
        paths: list[Path],
        states: tuple[nnx.State, ...],
        inputs: tuple[Any, ...],
        key: Key[Array, ""] | None,
    ) -> tuple[set[Path], bool]:
        """The variables that a loop returned unchanged, and whether random numbers are used."""

        def ends(*states: nnx.State) -> Any:
            again = self._run(states, inputs, key)
            carried = [again.after[path] for path in self._state.paths]
            return [(again.before[path], again.after[path]) for path in paths], again.out, carried

        closed = jax.make_jaxpr(ends)(*states)
        number = 2 * len(paths)
        sources = iter(passed_through(closed.jaxpr, closed.consts)[:number])
        pairs = zip(paths, sources, sources, strict=True)
        unwritten = {path for path, before, after in pairs if before == after is not None}
        variables = jax.tree.leaves(states, is_leaf=lambda x: isinstance(x, nnx.Variable))
        random = [isinstance(v, nnx.RngState) for v in variables for _ in jax.tree.leaves(v)]
        results = range(number, len(closed.jaxpr.outvars))
        read = live_inputs(closed.jaxpr, results, lambda *_: None)
        return unwritten, any(random[k] for k in read)

    def _is_suspect(self, call: "_Call", path: Path, key: Key[Array, ""] | None) -> bool:
        """Whether a variable that no state carries may have a new value."""
        if path in self._state.paths or path in self._written:
            return False
        if issubclass(call.kinds[path], nnx.RngState):
            drawn = key is None and issubclass(call.kinds[path], nnx.RngCount)
            return drawn and call.after[path] is not call.before.get(path)
        if self._drops or (
            path not in call.before and issubclass(call.kinds[path], nnx.Intermediate)
        ):
            return False
        return call.after[path] is not call.before.get(path)


class _Call(NamedTuple):
    """One call: its outputs, and every variable before and after it."""

    out: Any
    before: dict[Path, Any]
    after: dict[Path, Any]
    kinds: dict[Path, type]


class _Form(NamedTuple):
    """The structure of one part of a model, as an ``nnx.State`` and as a plain dictionary."""

    what: str
    paths: frozenset[Path]
    variables: Any
    plain: Any

    @classmethod
    def of(cls, what: str, state: nnx.State) -> "_Form":
        paths = frozenset(path for path, _ in nnx.to_flat_state(state))
        plain = nnx.to_pure_dict(state)
        return cls(what, paths, jax.tree.structure(state), jax.tree.structure(plain))

    def filled(self, values: ArrayTree) -> nnx.State:
        """The part of the model with other values."""
        if isinstance(values, nnx.State):
            # NNX's optimizers and checkpoints hold a `State`.
            values = nnx.to_pure_dict(values)
        if jax.tree.structure(values) != self.plain:
            raise ValueError(f"{self.what}: {self._difference(values)}")
        return jax.tree.unflatten(self.variables, jax.tree.leaves(values))

    def _difference(self, values: ArrayTree) -> str:
        expected = list(leaves_by_path(jax.tree.unflatten(self.plain, [0] * self.plain.num_leaves)))
        if not isinstance(values, dict):
            return f"expected the dictionary that jk.from_nnx returned, got {type(values).__name__}"
        paths = list(leaves_by_path(values))
        more = [path for path in paths if path not in expected]
        less = [path for path in expected if path not in paths]
        kind = "nnx.Param" if self.what == "params" else "mutable="
        if more:
            return f"the model has no {more[0]!r} among what {kind} names; leave it out"
        if less:
            return f"{less[0]!r} is missing"
        return (
            "the paths are those of the model, the containers are not: expected plain dictionaries"
        )


def from_nnx(
    model: nnx.Module, *, mutable: Any = None, call: Callable[..., Any] | None = None
) -> tuple[NnxApply, ArrayTree]:
    """Split an NNX model into an apply function and its parameters.

    Args:
        model: Any ``nnx.Module``.
        mutable: The variables that a call changes, as an NNX filter: ``nnx.BatchStat``, or several
            in a tuple. They are passed as ``state=`` and returned beside the outputs. With ``None``
            a call that changes any raises; with ``()`` the changes are dropped.
        call: ``call(model, *inputs) -> outputs``, how the model is called; ``None`` for
            ``model(*inputs)``. A keyword-only argument ``key`` gets a random key where the apply
            function has one: ``lambda model, x, *, key: model(x, nnx.Rngs(key))`` for a model that
            takes ``rngs``. What it writes into the model is treated like the model's own changes.

    Returns:
        ``(apply_fn, params)``: see ``NnxApply``; ``params`` is a plain dictionary of arrays.
        ``nnx.update(model, params)`` writes trained parameters back, and ``nnx.update(model,
        state)`` the state that the calls changed.

    Raises:
        TypeError: ``model`` is no ``nnx.Module``, or ``call`` no function; and at a call, inputs
            that the model does not take.
        ValueError: ``mutable`` names no variable of the model.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> from flax import nnx
        >>> apply_fn, params = jk.from_nnx(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
        >>> apply_fn(params, jnp.ones((5, 3))).shape, sorted(params)
        ((5, 2), ['bias', 'kernel'])
        >>> norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
        >>> apply_fn, params = jk.from_nnx(norm, mutable=nnx.BatchStat)
        >>> outputs, state = apply_fn(params, jnp.ones((5, 3)), state=apply_fn.state)
        >>> sorted(state)
        ['mean', 'var']
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"from_nnx: expected an nnx.Module, got {named(model)}; other models are apply "
            "functions already: give apply_fn(params, inputs) and its parameters"
        )
    if call is not None:
        check_function("call", call, "call(model, *inputs)")
    apply_fn = NnxApply(model, mutable, call)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return apply_fn, params


def as_state(grads: ArrayTree, model: nnx.Module) -> nnx.State:
    """Convert gradients to the form that ``nnx.Optimizer.update`` takes.

    Args:
        grads: A tree like the parameters that :func:`from_nnx` returned.
        model: The model, whose variables identify the parameters.

    Returns:
        An ``nnx.State`` of ``nnx.Param``.

    Raises:
        ValueError: ``grads`` are not like the model's parameters.

    Example:
        >>> import jax, jax.numpy as jnp, optax, jaxkfac as jk
        >>> from flax import nnx
        >>> model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        >>> apply_fn, params = jk.from_nnx(model)
        >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        >>> grads = jax.grad(lambda p: apply_fn(p, jnp.ones((5, 3))).sum())(params)
        >>> updates = optimizer.update(model, jk.as_state(grads, model))
        >>> print(model.bias[...])
        [-0.5 -0.5]
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(f"as_state: expected the nnx.Module, got {named(model)}")
    return _Form.of("grads", nnx.state(model, nnx.Param)).filled(grads)


def _takes_key(call: Callable[..., Any]) -> bool:
    """Whether a call takes a random key by name; an attention's ``key`` is a tensor instead."""
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError):  # the callable is no Python function
        return False
    named = "key" in parameters and parameters["key"].kind is inspect.Parameter.KEYWORD_ONLY
    return named and not {"query", "value"} & parameters.keys()


def _values(model: nnx.Module) -> tuple[dict[Path, Any], dict[Path, type]]:
    """The value and the type of every variable."""
    variables = dict(nnx.to_flat_state(nnx.state(model)))
    values = {p: v.get_value() if _is_variable(v) else v for p, v in variables.items()}
    return values, {p: type(v) for p, v in variables.items()}


def _is_variable(value: object) -> bool:
    return isinstance(value, nnx.Variable)  # beside them a model may hold bare arrays


def _nested(like: ArrayTree, values: dict[Path, Any], path: Path = ()) -> ArrayTree:
    """A nested dictionary like ``like``, of values by path."""
    if isinstance(like, dict):
        return {k: _nested(v, values, (*path, k)) for k, v in like.items()}
    return values[path]


def _joined(paths: list[Path]) -> str:
    shown = ["/".join(map(str, path)) for path in paths]
    return ", ".join(map(repr, shown[:3])) + (f" and {len(shown) - 3} more" if shown[3:] else "")


def _names(filters: list[Any]) -> str:
    """Filters in the form in which a call writes them."""
    names = [f"nnx.{x.__name__}" if isinstance(x, type) else repr(x) for x in filters]
    return names[0] if len(names) == 1 else f"({', '.join(names)})"
