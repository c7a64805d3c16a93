"""The steps that are compiled: one decoder, and everything that the library does with it.

Shapes in names: B sequences, T tokens, D stream, H heads, K head, L blocks.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array
from jax.sharding import AbstractMesh

import jaxkfac as jk
from jaxkfac.factors import Pass, plan_passes, smallest_budget
from jaxkfac.interception.values import Window
from jaxkfac.models import Cached, Decoder, DecoderConfig, Tokens, empty_cache


@dataclasses.dataclass(frozen=True)
class Size:
    """A decoder and its batch."""

    blocks: int
    width: int
    hidden: int
    heads: int
    vocabulary: int
    sequences: int
    tokens: int


SIZES = {
    "real": Size(12, 768, 3072, 12, 8192, 8, 512),
    "small": Size(2, 128, 256, 4, 512, 8, 64),
}
NEW_TOKENS = 32


class Steps:
    """The steps of one size and dtype; each gives a function and the shapes of its arguments."""

    def __init__(self, size: Size, dtype: Any) -> None:
        self.size, self.dtype = size, dtype
        self.params, self.batch = self._params(), (self._ids(), self._ids())
        self.objective = jk.Objective(self._apply, jk.Categorical())
        self.key = jax.eval_shape(lambda: jax.random.key(0))

    def _params(self) -> Any:
        s = self.size
        kernels = dict.fromkeys("qkvo", (s.width, s.width))
        kernels |= {"up": (s.width, s.hidden), "down": (s.hidden, s.width)}
        blocks = {name: self._of(s.blocks, *shape) for name, shape in kernels.items()}
        head = self._of(s.width, s.vocabulary)
        return {"embedding": self._of(s.vocabulary, s.width), "blocks": blocks, "head": head}

    def _of(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, self.dtype)

    def _ids(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.size.sequences, self.size.tokens), jnp.int32)

    def _apply(self, params: Any, ids_BxT: Array) -> Array:
        """Pre-normalised blocks, scanned and rematted; logits in float32."""
        block = jax.checkpoint(functools.partial(_block, heads=self.size.heads))
        x_BxTxD, _ = jax.lax.scan(block, params["embedding"][ids_BxT], params["blocks"])
        return (x_BxTxD @ params["head"]).astype(jnp.float32)

    # -- the steps ----------------------------------------------------------------------

    def gradient(self) -> Any:
        return jax.value_and_grad(self.objective), (self.params, self.batch)

    def factors(self, **options: Any) -> Any:
        return self._collector(**options), (self.params, self.batch, self.key)

    def every_fourth(self) -> Any:
        stats = self._collector(every=4)

        def step(params: Any, batch: Any, number: Array) -> Any:
            return stats(params, batch, step=number)

        return step, (self.params, self.batch, jax.ShapeDtypeStruct((), jnp.int32))

    def _collector(self, **options: Any) -> Any:
        return jk.value_grad_and_factors(self.objective, **options)

    @functools.cached_property
    def like(self) -> Any:
        return self._collector().factor_shapes(self.params, self.batch)

    def _decomposed(self, factors: Any) -> Any:
        return jk.eigendecompose(factors, placement="device")

    @functools.cached_property
    def bases(self) -> Any:
        return jax.eval_shape(self._decomposed, self.like)

    def decomposition(self) -> Any:
        return self._decomposed, (self.like,)

    def ekfac(self) -> Any:
        def step(params: Any, bases: Any, batch: Any, key: Any) -> Any:
            return jk.correct_eigenvalues(self.objective, bases)(params, batch, key)

        return step, (self.params, self.bases, self.batch, self.key)

    def natural_gradient(self) -> Any:
        step = functools.partial(jk.natural_gradient, damping=1e-3)
        return step, (self.params, self.bases)

    def kfac(self, *, divided: bool = False) -> Any:
        """Gradient, factors and the update, which decomposes every ten steps."""
        axis = "data" if divided else None
        tx = jk.kfac(0.1, like=self.like, damping=1e-3, norm_constraint=1e-2, distribute=axis)
        stats = self._collector()
        mesh = AbstractMesh((8,), ("data",)) if divided else jax.sharding.get_abstract_mesh()

        def step(params: Any, state: Any, batch: Any) -> Any:
            value, grads, factors = stats(params, batch)
            with jax.sharding.use_abstract_mesh(mesh):
                updates, state = tx.update(grads, state, params, factors=factors)
            return value, jax.tree.map(jnp.add, params, updates), state

        return step, (self.params, jax.eval_shape(tx.init, self.params), self.batch)

    def training(self, *, packed: bool, collect: int = 1, **options: Any) -> Any:
        """A K-FAC step as a training makes it: parameters and state are donated."""
        stats = self._collector(packed=packed, collect=collect)
        like = stats.factor_shapes(self.params, self.batch)
        tx = jk.kfac(0.1, like=like, damping=1e-3, packed=packed, **options)

        def step(params: Any, state: Any, batch: Any, **number: Any) -> Any:
            value, grads, factors = stats(params, batch, **number)
            updates, state = tx.update(grads, state, params, factors=factors)
            return value, jax.tree.map(jnp.add, params, updates), state

        def in_turns(params: Any, state: Any, batch: Any, number: Array) -> Any:
            return step(params, state, batch, step=number)

        args = self.params, jax.eval_shape(tx.init, self.params), self.batch
        if collect == 1:
            return step, args, (0, 1)
        return in_turns, (*args, jax.ShapeDtypeStruct((), jnp.int32)), (0, 1)

    def optimizer(self, tx: Any) -> Any:
        """A step of ``jk.Optimizer``: parameters and state are donated."""
        opt = jk.Optimizer(self.objective, tx)

        def step(params: Any, state: Any, batch: Any) -> Any:
            params, state, value = opt.step(params, state, batch)
            return value, params, state

        return step, (self.params, jax.eval_shape(opt.init, self.params, self.batch), self.batch)

    def sgd(self) -> Any:
        """A donated step of gradient descent with momentum: the floor of every training."""
        tx = optax.sgd(0.1, momentum=0.9)

        def step(params: Any, state: Any, batch: Any) -> Any:
            value, grads = jax.value_and_grad(self.objective)(params, batch)
            updates, state = tx.update(grads, state, params)
            return value, jax.tree.map(jnp.add, params, updates), state

        state = jax.eval_shape(tx.init, self.params)
        return step, (self.params, state, self.batch), (0, 1)

    def adapters(self, *, quantised: bool = False) -> Any:
        """Gradient of adapters beside a frozen base, and factors of their kernels."""
        config = jk.lslora.Config(rank=8, target=r"blocks/.*")
        adapted = jk.lslora.attach(self._apply, config)
        ids, base = self.batch[0], self.params
        if quantised:
            base = jk.nf4.quantize(base, r"blocks/.*", stack=1)
        init = functools.partial(jk.lslora.init, self._apply, config, base, ids)
        trained = jax.eval_shape(lambda key: init(key=key), self.key)

        def step(trained: Any, base: Any, batch: Any) -> Any:
            objective = jk.Objective(lambda a, x: adapted(base, a, x), jk.Categorical())
            return jk.value_grad_and_factors(objective, uncovered="ignore")(trained, batch)

        return step, (trained, base, self.batch)

    # -- the decoder of the library -----------------------------------------------------

    @functools.cached_property
    def _decoder(self) -> Any:
        s = self.size
        config = DecoderConfig(
            vocabulary=s.vocabulary,
            width=s.width,
            hidden=s.hidden,
            depth=s.blocks,
            num_heads=s.heads,
            num_kv_heads=s.heads,
            head_size=s.width // s.heads,
            context=s.tokens + NEW_TOKENS,
        )
        model = nnx.eval_shape(lambda: Decoder(config, remat=True, rngs=nnx.Rngs(0)))
        apply_fn, params = jk.from_nnx(model)
        return config, apply_fn, jax.tree.map(lambda x: self._of(*x.shape), params)

    def decoder_step(self, *, factors: bool) -> Any:
        _, apply_fn, params = self._decoder
        objective = jk.Objective(apply_fn, jk.Categorical())
        step = jk.value_grad_and_factors(objective) if factors else jax.value_and_grad(objective)
        return step, (params, self.batch)

    def generation(self) -> Any:
        """A prompt of ``tokens``, then ``NEW_TOKENS`` greedy ones from the cache, in a loop."""
        config, apply_fn, params = self._decoder
        rows, places = self.size.sequences, self.size.tokens + NEW_TOKENS

        def step(params: Any, ids: Array) -> Array:
            def one_more(carry: Any, _: None) -> Any:
                ids, cache = carry
                position = jnp.full((rows, 1), cache.filled, jnp.int32)
                logits, cache = apply_fn(params, Cached(Tokens(ids[:, None], position), cache))
                return (jnp.argmax(logits, -1).astype(jnp.int32), cache), ids

            cache = empty_cache(config, rows, places, self.dtype)
            positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
            logits, cache = apply_fn(params, Cached(Tokens(ids, positions), cache))
            first = jnp.argmax(logits, -1).astype(jnp.int32)
            return jax.lax.scan(one_more, (first, cache), length=NEW_TOKENS)[1]

        return step, (params, self.batch[0])

    # -- budgeted passes ----------------------------------------------------------------

    def budgeted(self, which: int) -> Any:
        """The gradient and one pass of factors: a quarter of their bytes, or the largest side."""
        collector = self._collector()
        traced = collector.traced(self.params, collector.checked(self.batch))
        total = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.like))
        statistics = collector.statistics(traced)
        budget = max(total // 4, smallest_budget(statistics))
        one = plan_passes(statistics, budget).passes[which]
        return _one_pass(collector, one), (
            self.params,
            self.batch,
            jax.ShapeDtypeStruct((), jnp.int32),
        )


def _one_pass(collector: Any, one: Pass) -> Callable[..., Any]:
    rows = {name: part.rows for name, part in one.parts.items() if part.rows is not None}

    def step(params: Any, batch: Any, start: Array) -> Any:
        windows = {name: Window(start, count) for name, count in rows.items()}
        call = collector.checked(batch)
        return collector.gather(params, call, parts=dict(one.parts), windows=windows)

    return step


def _block(x_BxTxD: Array, p: Any, *, heads: int) -> tuple[Array, None]:
    B, T, D = x_BxTxD.shape

    def normalised(x: Array) -> Array:
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)

    h = normalised(x_BxTxD)
    q, k, v = ((h @ p[name]).reshape(B, T, heads, D // heads) for name in "qkv")
    scores_BxHxTxT = jnp.einsum("bthk,bshk->bhts", q, k) / (D // heads) ** 0.5
    seen = jnp.tril(jnp.ones((T, T), bool))
    weights = jax.nn.softmax(jnp.where(seen, scores_BxHxTxT, -1e9))
    attended_BxTxD = jnp.einsum("bhts,bshk->bthk", weights, v).reshape(B, T, D)
    x_BxTxD = x_BxTxD + attended_BxTxD @ p["o"]
    return x_BxTxD + jax.nn.silu(normalised(x_BxTxD) @ p["up"]) @ p["down"], None
