"""Flax NNX models as a pure function of their parameters."""

import jax
from flax import nnx
from jaxtyping import Array, Key, PyTree


class NnxApply:
    """``apply(params, inputs, key=None) -> outputs``, rebuilt from an NNX model.

    Random-number state and batch statistics are held aside as they were when the model was
    taken apart, and are rebuilt inside the trace, so that calls have no side effect. With a
    ``key`` every random stream is reseeded from it; without one, streams start where the
    model's did, each call alike.
    """

    def __init__(self, graph: nnx.GraphDef, rest: nnx.State, streams: tuple[str, ...]) -> None:
        self._graph, self._rest, self._streams = graph, rest, streams

    def __call__(self, params: PyTree, inputs: PyTree, key: Key[Array, ""] | None = None) -> PyTree:
        model = nnx.merge(self._graph, _as_state(params), self._rest, copy=True)
        if key is not None and self._streams:
            keys = jax.random.split(key, len(self._streams))
            nnx.reseed(model, policy="match_shape", **dict(zip(self._streams, keys, strict=True)))
        return model(inputs)


def _as_state(params: PyTree) -> nnx.State:
    return nnx.State(jax.tree.map(lambda x: nnx.Param(x), params))


def from_nnx(model: nnx.Module) -> tuple[NnxApply, PyTree]:
    """Take an NNX model apart into an apply function and its parameters.

    Args:
        model: Any ``nnx.Module`` that is called as ``model(inputs)``.

    Returns:
        ``(apply_fn, params)``: see ``NnxApply``; ``params`` is a plain dictionary of arrays.
        ``nnx.update(model, params)`` puts trained parameters back.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> from flax import nnx
        >>> apply_fn, params = jk.from_nnx(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
        >>> apply_fn(params, jnp.ones((5, 3))).shape, sorted(params)
        ((5, 2), ['bias', 'kernel'])
    """
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    streams = sorted(
        {v.tag for _, v in nnx.to_flat_state(rest) if isinstance(v, nnx.RngKey) and v.tag}
    )
    return NnxApply(graph, rest, tuple(streams)), nnx.to_pure_dict(params)
