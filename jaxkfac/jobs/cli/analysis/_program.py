"""The programs of an analysis, compiled from shapes, and passes that fit into a budget."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import jaxkfac as jk
from jaxkfac.factors import PLAIN_TERMS, BudgetedCollector, Pass
from jaxkfac.interception import LayerTable, leaves_by_path
from jaxkfac.jobs.cli._options import ModelAnalysis
from jaxkfac.memory import bytes_text

# ---------------- bytes of one pass of an analysis: of its program, its factors and their sums


class PassBytes(NamedTuple):
    """What one pass holds at once, beside the model.

    Attributes:
        temporaries: Of its program, with its batch.
        factors: That the program returns.
        sums: In main memory, triangles folded.
    """

    temporaries: int
    factors: int
    sums: int

    @property
    def total(self) -> int:
        return sum(self)


def check_room(found: PassBytes, room: int, held: int) -> None:
    """Refuse a room that the least budget does not fit into."""
    if found.total > room:
        raise ValueError(
            f"--device-bytes {bytes_text(room + held)}: the smallest with which this analysis "
            f"can do is {bytes_text(found.total + held)}: {bytes_text(held)} for the model "
            f"and this process, {bytes_text(found.temporaries)} for activations and "
            f"temporaries, {bytes_text(found.factors + found.sums)} for factors; a "
            "smaller --batch-size, --max-length or --max-dense needs less"
        )


def sums_dtype(batches: int) -> np.dtype:
    """That of sums of so many batches; of very many a float32 would lose digits."""
    return np.dtype(np.float64 if batches > PLAIN_TERMS else np.float32)


def sums_bytes(factors: int, batches: int = 1) -> int:
    """Of what a pass returns, triangles folded; one block is folded before its array is let go."""
    return factors // 2 * sums_dtype(batches).itemsize // 4 + factors // 16


def with_sums(one: Pass, batches: int = 1) -> int:
    """Of the factors of a pass and their sums, as it was planned."""
    return one.nbytes + sums_bytes(one.results, batches)


# ----------------


PyTree = Any
_TRIES = 6  # of budgets that are compiled
_HALVINGS = 12
_SPREAD = 1.15  # a pass took up to 1.14 of the bytes of that whose factors take most


class AnalyzedModel:
    """Everything that is known of an analysis before the model is loaded.

    Args:
        options: How the model is analyzed.
        apply_fn: Of the model.
        params: Shapes of its parameters.
        batch: Shapes of a whole batch, ``(inputs, targets, mask)``.
        exist: Shape of which positions exist.
        batches: How many there are.

    Attributes:
        table: The layers.
        shapes: Of all factors.
        layers: Theirs.
        stacks: ``{layer: blocks}`` of stacked layers with two factors, and of their inputs.
        collector: Under the budget of a pass's factors, once :meth:`fit` has found it.
        max_factor_bytes: That budget.
        passes: Under it.
    """

    def __init__(
        self,
        options: ModelAnalysis,
        apply_fn: Any,
        params: PyTree,
        batch: PyTree,
        exist: Any,
        *,
        batches: int = 1,
    ) -> None:
        self.options, self.objective = options, jk.Objective(apply_fn, jk.Categorical())
        self._shapes, self.batches = (params, batch, exist), batches
        self.table: LayerTable = jk.find_layers(self.objective, params, batch)
        self._key = jax.random.key(options.seed) if options.fisher == "mc" else None
        self.max_factor_bytes = 0
        self.passes: tuple[Pass, ...] = ()
        self.collector = self._collector()
        self._compiled: dict[Any, Any] = {}
        self.shapes = self.collector.factor_shapes(params, batch, self._key_shape)
        self.layers = layers = self.shapes.layers
        stacked = {x.name: x.stack[0] for x in layers if x.stack and not x.is_diagonal}
        self.stacks = stacked | {x.input: stacked[x.name] for x in layers if x.name in stacked}

    @property
    def _key_shape(self) -> Any:
        return None if self._key is None else jax.eval_shape(lambda: jax.random.key(0))

    def _collector(self) -> BudgetedCollector:
        collector = jk.value_grad_and_factors(
            self.objective,
            fisher=self.options.fisher,
            max_dense=self.options.max_dense,
            max_factor_bytes=1,  # until one has been found
            uncovered="ignore",
        )
        assert isinstance(collector, BudgetedCollector)
        return collector

    def use(self, max_factor_bytes: int, *, every: bool = True) -> PassBytes:
        """Take this budget, and compile its passes; the bytes of the largest.

        Args:
            max_factor_bytes: The budget.
            every: Whether each is compiled, or that alone whose factors take most.
        """
        self.max_factor_bytes = max_factor_bytes
        self.collector = self.collector.under(max_factor_bytes)
        self.passes = self._planned(max_factor_bytes)
        chosen = self.passes if every else [max(self.passes, key=self._with_sums)]
        forms = {_form(one): one for one in chosen}
        self._compiled = {
            form: self._compiled.get(form) or self._compile(one) for form, one in forms.items()
        }
        return max((self._bytes_of(x) for x in self._compiled.values()), key=lambda x: x.total)

    def _planned(self, max_factor_bytes: int) -> tuple[Pass, ...]:
        params, batch, _ = self._shapes
        return self.collector.under(max_factor_bytes).plan(params, batch, self._key_shape).passes

    def _compile(self, one: Pass) -> Any:
        params, batch, exist = self._shapes
        call = jax.eval_shape(self.collector.call, batch, self._key_shape, exist)
        start = jax.ShapeDtypeStruct((), np.int32)
        return self.collector.pass_program(one).lower(params, call, start).compile()

    def _bytes_of(self, compiled: Any) -> PassBytes:
        memory = compiled.memory_analysis()
        inputs = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self._shapes[1:]))
        out = memory.output_size_in_bytes
        return PassBytes(memory.temp_size_in_bytes + inputs, out, sums_bytes(out, self.batches))

    def fit(self, room: int, *, held: int, every: bool = True) -> PassBytes:
        """The largest budget of factors with which a pass takes at most ``room`` bytes.

        Compiling is most of the time. What a pass takes beside its factors hardly depends on
        which they are, so the programs of one budget tell what others need.

        Args:
            room: For a pass.
            held: What is there beside it, for the error.
            every: Whether every pass is compiled, to be run; or, to plan, the largest alone, and
                the others where they decide whether the budget fits.

        Raises:
            ValueError: the smallest does not fit, with what would.
        """
        params, batch, _ = self._shapes
        least, whole = self.collector.budgets(params, batch, self._key_shape)
        found = self.use(least, every=False)
        check_room(found, room, held)
        left = room - (found.total - self._most(least))
        for _ in range(_TRIES):
            budget = self._largest(least, whole, left)
            found = self._used(budget, room, every=every)
            if found.total <= room:
                return found
            if budget == least:
                break
            left -= found.total - room + budget // 64
        found = self._used(least, room, every=every)
        check_room(found, room, held)
        return found

    def _used(self, max_factor_bytes: int, room: int, *, every: bool) -> PassBytes:
        """:meth:`use`, with every pass also where another than the largest may exceed the room."""
        found = self.use(max_factor_bytes, every=every)
        if every or found.total <= room / _SPREAD:
            return found
        return self.use(max_factor_bytes)

    def _largest(self, least: int, whole: int, room: int) -> int:
        """A budget whose passes have factors of ``room`` bytes at most, or the least."""
        if self._most(whole) <= room:
            return whole
        low, high = least, whole
        for _ in range(_HALVINGS):
            middle = (low + high) // 2
            if self._most(middle) <= room:
                low = middle
            else:
                high = middle
        return low

    def _most(self, max_factor_bytes: int) -> int:
        """Bytes of the factors of the largest pass under a budget, with their sums."""
        return max(map(self._with_sums, self._planned(max_factor_bytes)))

    def _with_sums(self, one: Pass) -> int:
        return with_sums(one, self.batches)

    def call(self, batch: Any, exist: Any, key: Any) -> Any:
        """The arguments of a program."""
        return self.collector.call(batch, key, exist)

    def key_of(self, index: int) -> Any:
        """The key of a batch's sampled labels."""
        return None if self._key is None else jax.random.fold_in(self._key, index)

    def program(self, number: int, exist: Any) -> Callable[..., Any]:
        """What runs a pass: compiled beforehand for whole batches."""
        one = self.passes[number]
        if exist.shape == self._shapes[2].shape:
            return self._compiled[_form(one)]
        return self.collector.pass_program(one)

    # ------------------------------------------------------------ the exact operator

    @functools.cached_property
    def product(self) -> Any:
        """``product(params, batch, vector)`` with the exact Fisher; vectors are flat float32."""

        def product(params: PyTree, batch: Any, vector: Any) -> Any:
            operator = jk.operators.fisher(self.objective, params, batch)
            like = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
            unflatten = ravel_pytree(like)[1]
            tree = jax.tree.map(lambda v, p: v.astype(p.dtype), unflatten(vector), params)
            out = operator @ tree
            out = jax.tree.map(lambda x: x.astype(jnp.float32), out)
            return ravel_pytree(out)[0]

        params, batch, _ = self._shapes
        texts = min(self.options.exact_texts, jax.tree.leaves(batch)[0].shape[0])
        few = jax.tree.map(lambda x: jax.ShapeDtypeStruct((texts, *x.shape[1:]), x.dtype), batch)
        vector = jax.ShapeDtypeStruct((self.num_parameters,), jnp.float32)
        return jax.jit(product).lower(params, few, vector).compile()

    @property
    def sizes(self) -> dict[str, int]:
        """``{parameter: how many numbers}``."""
        return {path: x.size for path, x in leaves_by_path(self._shapes[0]).items()}

    @property
    def num_parameters(self) -> int:
        return sum(x.size for x in jax.tree.leaves(self._shapes[0]))

    @property
    def eps(self) -> float:
        """Of the coarsest type among the parameters, in which products are made."""
        leaves = jax.tree.leaves(self._shapes[0])
        return max(float(jnp.finfo(x.dtype).eps) for x in leaves if _is_float(x))

    @property
    def param_bytes(self) -> int:
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self._shapes[0]))


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _form(one: Pass) -> Any:
    return tuple(one.parts.items())
