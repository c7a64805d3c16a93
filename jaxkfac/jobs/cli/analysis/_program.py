"""Programs of an analysis, compiled from shapes, and passes that fit into a budget."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array

import jaxkfac as jk
from jaxkfac._arguments import ArrayTree, leaves_by_path
from jaxkfac.blocks import PLAIN_TERMS
from jaxkfac.factors import BudgetedCollector, Pass
from jaxkfac.interception import LayerTable
from jaxkfac.jobs.cli._options import ModelAnalysis
from jaxkfac.memory import bytes_text, resident_bytes

# ---------------- bytes of one pass


class PassBytes(NamedTuple):
    """Bytes that one pass needs at once, in addition to the model.

    Attributes:
        temporaries: Temporaries of its program, and its batch.
        factors: Factors that the program returns.
        sums: Sums in main memory, with triangles folded.
    """

    temporaries: int
    factors: int
    sums: int

    @property
    def total(self) -> int:
        return sum(self)


_BETWEEN_PROCESSES = 8 << 20  # what a process takes before it plans differs from run to run


def enough_text(nbytes: int) -> str:
    """A size in whole MiB that suffices for ``nbytes`` in another process too."""
    return f"{math.ceil((nbytes + _BETWEEN_PROCESSES) / 2**20)} MiB"


def check_room(pass_bytes: PassBytes, room: int, held_bytes: int, other_stages: int = 0) -> None:
    """Raise if even the smallest budget does not fit into the room.

    Args:
        pass_bytes: Bytes of a pass under the smallest budget.
        room: Bytes for a pass.
        held_bytes: Other bytes in use.
        other_stages: Bytes that the other stages need, those in use included.
    """
    if pass_bytes.total > room:
        smallest = max(pass_bytes.total + held_bytes, other_stages)
        raise ValueError(
            f"--device-bytes {bytes_text(room + held_bytes)}: this analysis needs at least "
            f"{enough_text(smallest)}; gathering takes "
            f"{bytes_text(held_bytes)} for the model and this process, "
            f"{bytes_text(pass_bytes.temporaries)} for activations and temporaries, "
            f"{bytes_text(pass_bytes.factors + pass_bytes.sums)} for factors; a smaller "
            "--batch-size, --max-length or --max-dense needs less"
        )


def sums_dtype(batches: int) -> np.dtype:
    """Dtype of sums over this many batches; float32 would lose digits over very many."""
    return np.dtype(np.float64 if batches > PLAIN_TERMS else np.float32)


def sums_bytes(factors: int, batches: int = 1) -> int:
    """Bytes of the folded sums of a pass; a block is folded before its full array is freed."""
    return factors // 2 * sums_dtype(batches).itemsize // 4 + factors // 16


def with_sums(one: Pass, batches: int = 1) -> int:
    """Bytes of the factors of a planned pass and of their sums."""
    return one.nbytes + sums_bytes(one.results, batches)


# ---------------- an analyzed model


_TRIES = 6  # largest number of budgets to compile
_HALVINGS = 12
_SPREAD = 1.15  # a pass needed up to 1.14 times the bytes of the pass with the largest factors


class AnalyzedModel:
    """Everything known about an analysis before the model is loaded.

    Args:
        options: Options of the analysis.
        apply_fn: Function of the model.
        params: Shapes of its parameters.
        batch: Shapes of a full batch, ``(inputs, targets, mask)``.
        exist: Shape of the mask of positions that hold a token.
        batches: Number of batches.

    Attributes:
        resident_before: Bytes of main memory of this process before anything was traced.
        table: The layers of the model.
        shapes: Shapes of all factors.
        layers: Layers of the factors.
        stacks: ``{layer: blocks}`` for stacked layers with two factors, and for their inputs.
        collector: Collector under the budget that :meth:`fit` has found.
        max_factor_bytes: Budget of the factors of a pass.
        passes: Passes under that budget.
    """

    def __init__(
        self,
        options: ModelAnalysis,
        apply_fn: Callable[..., Any],
        params: ArrayTree,
        batch: ArrayTree,
        exist: ArrayTree,
        *,
        batches: int = 1,
    ) -> None:
        self.resident_before = resident_bytes() or 0
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
            max_factor_bytes=1,  # placeholder until a budget is found
            uncovered="ignore",
        )
        assert isinstance(collector, BudgetedCollector)
        return collector

    def use(self, max_factor_bytes: int, *, every: bool = True) -> PassBytes:
        """Set the budget and compile its passes; return the bytes of the largest.

        Args:
            max_factor_bytes: The budget.
            every: Whether to compile each pass, or only the one with the largest factors.
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

    def fit(
        self, room: int, *, held_bytes: int, other_stages: int = 0, every: bool = True
    ) -> PassBytes:
        """Find the largest budget of factors with which a pass needs at most ``room`` bytes.

        Compiling takes most of the time. What a pass needs without its factors hardly depends on
        which factors they are, so the programs of one budget predict the needs of others.

        Args:
            room: Bytes for a pass.
            held_bytes: Other bytes in use, for the error message.
            other_stages: Bytes that the other stages need, for the error message.
            every: Whether to compile every pass, for running; for planning only the largest is
                compiled, and the others where they decide whether the budget fits.

        Raises:
            ValueError: the smallest budget does not fit; names the room it needs.
        """
        params, batch, _ = self._shapes
        least, largest = self.collector.budgets(params, batch, self._key_shape)
        pass_bytes = self.use(least, every=False)
        if pass_bytes.total > room:  # another pass may need more than the one with most factors
            check_room(self.use(least), room, held_bytes, other_stages)
        room_for_factors = room - (pass_bytes.total - self._most(least))
        for _ in range(_TRIES):
            budget = self._largest(least, largest, room_for_factors)
            pass_bytes = self._used(budget, room, every=every)
            if pass_bytes.total <= room:
                return pass_bytes
            if budget == least:
                break
            room_for_factors -= pass_bytes.total - room + budget // 64
        pass_bytes = self._used(least, room, every=every)
        check_room(pass_bytes, room, held_bytes, other_stages)
        return pass_bytes

    def _used(self, max_factor_bytes: int, room: int, *, every: bool) -> PassBytes:
        """:meth:`use`, compiling every pass if one other than the largest may exceed the room."""
        pass_bytes = self.use(max_factor_bytes, every=every)
        if every or pass_bytes.total <= room / _SPREAD:
            return pass_bytes
        return self.use(max_factor_bytes)

    def _largest(self, least: int, largest: int, room: int) -> int:
        """The largest budget whose passes have factors of at most ``room`` bytes, or the least."""
        if self._most(largest) <= room:
            return largest
        low, high = least, largest
        for _ in range(_HALVINGS):
            middle = (low + high) // 2
            if self._most(middle) <= room:
                low = middle
            else:
                high = middle
        return low

    def _most(self, max_factor_bytes: int) -> int:
        """Bytes of the factors and sums of the largest pass under a budget."""
        return max(map(self._with_sums, self._planned(max_factor_bytes)))

    def _with_sums(self, one: Pass) -> int:
        return with_sums(one, self.batches)

    def call(self, batch: ArrayTree, exist: ArrayTree, key: Array | None) -> Any:
        """The arguments of a pass program."""
        return self.collector.call(batch, key, exist)

    def key_of(self, index: int) -> Any:
        """The key for a batch's sampled labels."""
        return None if self._key is None else jax.random.fold_in(self._key, index)

    def program(self, number: int, exist: Array | np.ndarray) -> Callable[..., Any]:
        """The program of a pass: the compiled one for full batches."""
        one = self.passes[number]
        if exist.shape == self._shapes[2].shape:
            return self._compiled[_form(one)]
        return self.collector.pass_program(one)

    # ------------------------------------------------------------ the exact operator

    @functools.cached_property
    def product(self) -> Any:
        """``product(params, batch, vector)`` with the exact Fisher; vectors are flat float32."""

        def product(params: ArrayTree, batch: ArrayTree, vector: ArrayTree) -> Any:
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
        """``{parameter: number of elements}``."""
        return {path: x.size for path, x in leaves_by_path(self._shapes[0]).items()}

    @property
    def num_parameters(self) -> int:
        return sum(x.size for x in jax.tree.leaves(self._shapes[0]))

    @property
    def eps(self) -> float:
        """Relative precision of the coarsest parameter dtype, in which products are computed."""
        leaves = jax.tree.leaves(self._shapes[0])
        return max(float(jnp.finfo(x.dtype).eps) for x in leaves if _is_float(x))

    @property
    def param_bytes(self) -> int:
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self._shapes[0]))


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _form(one: Pass) -> Any:
    return tuple(one.parts.items())
