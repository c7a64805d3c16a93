"""One backward pass: value, gradient and factors, of all layers or some parts of them."""

import dataclasses
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from jaxkfac._arguments import (
    ArrayTree,
    leaves_by_path,
    with_leaves,
)
from jaxkfac._mapped_axes import is_mapped
from jaxkfac.blocks import (
    Corrections,
    Factors,
    Origin,
    corrections_of,
    with_origin,
    zeros_like,
)
from jaxkfac.factors._diagonal_pass import (
    check_alone,
    diagonal_layers,
    marked_diagonals,
    per_example_diagonals,
)
from jaxkfac.factors._fisher import Estimator
from jaxkfac.factors._model_call import ModelCall
from jaxkfac.factors._objective import Objective
from jaxkfac.factors._options import GatheringOptions
from jaxkfac.factors._program import Linearised, Program
from jaxkfac.factors._scalar_loss import (
    check_marked,
    check_scalar_loss,
)
from jaxkfac.factors._statistics import PassPart, Statistics
from jaxkfac.interception import (
    Layer,
    Traced,
)
from jaxkfac.interception.values import Window
from jaxkfac.kinds import Products
from jaxkfac.linalg import statistics_dtype
from jaxkfac.linalg.spectral import Spectrum

if TYPE_CHECKING:
    from typing import Self

ROWS_FOLD = 0x726F  # folded into the caller's key for the rows of ``subsample=``


class Call(NamedTuple):
    """The arguments of one call, checked.

    Attributes:
        batch: A ``Batch``, or whatever the scalar loss takes.
        key: The model's own key.
        positions: Which positions exist, or ``None``.
        estimator: The Fisher type, with the call's key and labels.
        state: What a call of the model changes, or ``None``.
        bases: Eigenbases in which gradients are squared, or ``None``.
    """

    batch: Any
    key: Any
    positions: Any
    estimator: Estimator
    state: Any = None
    bases: Any = None

    def of_model(self, params: ArrayTree) -> ModelCall:
        """The model's own arguments."""
        return ModelCall(params, self.batch, self.key, self.state)

    def quiet(self) -> "Call":
        """The call for computing shapes only, without printing what it would cost."""
        return self._replace(estimator=dataclasses.replace(self.estimator, prints=False))


class ValueGradAndFactors(NamedTuple):
    """What one call returns."""

    value: Any
    grads: ArrayTree
    factors: Factors


@runtime_checkable
class Measurable(Protocol):
    """Eigenbases, in which gradients are squared."""

    @property
    def layers(self) -> tuple[Layer, ...]: ...

    def spectra(self, layer: Layer) -> tuple[Spectrum, Spectrum]: ...


@dataclasses.dataclass(frozen=True)
class PassCollector:
    """What one backward pass gathers, and how.

    Attributes:
        options: What it was built with.
    """

    _program: Program
    options: GatheringOptions

    @property
    def axes(self) -> tuple[str, ...]:
        """The mapped axes whose devices hold different examples."""
        return self._program.axes

    def on_one_device(self) -> "Self":
        """The collector for shapes, which need no map: outside of one without its axes."""
        if all(map(is_mapped, self._program.axes)):
            return self
        return dataclasses.replace(self, _program=self._program.on_one_device())

    @property
    def has_aux(self) -> bool:
        """Whether a call returns ``(value, aux)``."""
        objective = self._program.objective
        return objective.has_aux if isinstance(objective, Objective) else self.options.has_aux

    @property
    def vjps(self) -> int:
        """How many vector-Jacobian products' output sides are alive besides their sum."""
        return self.options.estimator.concurrent

    def statistics(
        self,
        traced: Traced,
        parts: Mapping[str, PassPart] | None = None,
        rows_key: Key[Array, ""] | None = None,
    ) -> Statistics:
        """The statistics of a traced program, or of some parts of its layers."""
        forward = self.options.estimator.unit_outputs
        products = Products(self.options.subsample or 1.0, self.options.precision, rows_key)
        return Statistics(
            traced,
            self.options.bias,
            self.options.sharing,
            self.options.scales,
            forward,
            parts,
            products=products,
            packed=self.options.packed,
            axes=self._program.axes,
        )

    def traced(self, params: ArrayTree, call: Call) -> Traced:
        """The program for these shapes."""
        return self._program.traced(call.of_model(params))

    def gather(
        self,
        params: ArrayTree,
        call: Call,
        *,
        parts: Mapping[str, PassPart] | None = None,
        windows: Mapping[str, Window] | None = None,
        gradient: bool = True,
    ) -> ValueGradAndFactors:
        """Run one backward pass, for all of the factors or some parts of them.

        Without ``gradient`` the pass differentiates with respect to slots only, and the returned
        gradient is zero.
        """
        objective = self._program.objective
        params = jax.tree.map(jnp.asarray, params)  # a Python number is a parameter too
        traced = self.traced(params, call)
        key = None if self.options.subsample is None else jax.random.fold_in(call.key, ROWS_FOLD)
        if not isinstance(objective, Objective):
            self._check_scalar(traced, call)
        statistics = self.statistics(traced, parts, key)
        if traced.marks:
            weights = self._program.row_weights(traced, call.of_model(params))
            statistics = dataclasses.replace(statistics, row_weights=weights)
        at = self._program.linearise(
            traced,
            statistics,
            call.of_model(params),
            positions=call.positions,
            loss_terms=self.options.loss_terms,
            windows=windows,
            differentiate=gradient,
            rows_key=key,
        )
        outputs = call.estimator.gathered(objective, at, call.batch, statistics.outputs)
        factors = statistics.factors(at.emitted, outputs, at.all_terms, at.squares_to_sums)
        if gradient and (layers := self._second_pass(traced, params)):
            factors = self._with_diagonals(traced, layers, params, call, factors, at)
        factors = self._counted(with_origin(factors, self._origin(traced)), factors.terms)
        if call.bases is not None:
            factors = dataclasses.replace(factors, corrections=self._corrections(params, call))
        return ValueGradAndFactors(self._value(at, call), gradient_tree(params, at.grads), factors)

    def _corrections(self, params: ArrayTree, call: Call) -> Corrections:
        at = call.of_model(params)
        return corrections_of(call.bases, self._program, call.estimator, at, call.positions)

    def without_factors(
        self, params: ArrayTree, call: Call, like: Factors | None = None
    ) -> ValueGradAndFactors:
        """Value and gradient, with factors whose sums and counts are zero.

        Args:
            params: The parameters.
            call: The call.
            like: Types of the factors, if already computed.
        """
        params = jax.tree.map(jnp.asarray, params)
        traced = self.traced(params, call)
        if like is None:
            like = self.types(params, call)
        at = self._program.linearise(
            traced,
            self.statistics(traced, {}),
            call.of_model(params),
            loss_terms=self.options.loss_terms,
        )
        factors = self._counted(zeros_like(like), at.all_terms.astype(like.terms.dtype))
        return ValueGradAndFactors(self._value(at, call), gradient_tree(params, at.grads), factors)

    def _counted(self, factors: Factors, terms: Any) -> Factors:
        """Add the gradient's own count, if ``terms`` may be zero at steps without collection."""
        return (
            factors if self.options.every == 1 else dataclasses.replace(factors, loss_terms=terms)
        )

    def _value(self, at: Linearised, call: Call) -> Any:
        return (at.value, at.aux) if self.has_aux or call.state is not None else at.value

    def _check_scalar(self, traced: Traced, call: Call) -> None:
        """Refuse options that need outputs, if a loss marks none."""
        if traced.marks:
            check_marked(traced, call.estimator, self.options)
            return
        if call.positions is not None or call.estimator.labels is not None:
            raise ValueError(
                "positions= and labels= need an Objective, or jk.mark_outputs inside the loss: a "
                "scalar loss has no outputs"
            )
        check_scalar_loss(self.options, call.estimator)

    def types(self, params: ArrayTree, call: Call) -> Factors:
        """Shapes of the factors of a call; from the layers alone, if one pass covers them."""
        traced, objective = self.traced(params, call), self._program.objective
        if self._second_pass(traced, params) or traced.marks or call.bases is not None:
            return jax.eval_shape(self.on_one_device().gather, params, call.quiet()).factors
        if not isinstance(objective, Objective):
            self._check_scalar(traced, call)
            terms = jax.ShapeDtypeStruct((), statistics_dtype(traced.out_shapes[0].dtype))
        else:
            outputs, (_, targets, mask) = self._program.output_shapes(traced), call.batch
            terms = jax.eval_shape(objective.loss, outputs, targets, mask)[1]
        jax.eval_shape(self.statistics(traced).slots)  # refuses what cannot be gathered
        shapes = with_origin(self.statistics(traced).shapes(terms), self._origin(traced))
        return self._counted(shapes, terms)

    def _origin(self, traced: Traced) -> Origin:
        objective, marks = self._program.objective, [x.likelihood for x in traced.marks]
        has_outputs = isinstance(objective, Objective)
        likelihoods = jax.tree.leaves(objective.likelihood) if has_outputs else marks
        declared, options = self._program.examples, self.options
        name, axes = options.estimator.name, options.axis_names
        return Origin.of(name, likelihoods, declared, axes, options.every)

    def _second_pass(self, traced: Traced, params: ArrayTree) -> list[Layer]:
        """The layers whose diagonals come from gradients of single examples."""
        behind = list(traced.table.second_pass)
        if self.options.uncovered != "diagonal":
            return behind
        return behind + diagonal_layers(traced.table, params)

    def _with_diagonals(
        self,
        traced: Traced,
        layers: list[Layer],
        params: ArrayTree,
        call: Call,
        factors: Factors,
        at: Linearised,
    ) -> Factors:
        if not traced.marks:
            check_alone(self._program, traced, layers)
        number = sum(size for _, size in traced.example_axes)
        if call.estimator.prints:
            cost = f"{number} more gradients" if traced.marks else "about one more gradient"
            print(
                f"jaxkfac: {len(layers)} parameters are covered by a second pass over "
                f"{number} examples, {cost}",
                file=sys.stderr,
            )
        if traced.marks:
            sums = marked_diagonals(
                self._program.objective, traced, at, layers, call.estimator, self._program.axes
            )
        else:
            arguments = call.of_model(params), layers, call.estimator, self._program.axes
            sums = per_example_diagonals(self._program.objective, *arguments)
        return dataclasses.replace(
            factors,
            diagonals={**factors.diagonals, **at.poisoned(sums)},
            layers=(*factors.layers, *layers),
        )


def gradient_tree(params: ArrayTree, grads: dict[str, Array]) -> ArrayTree:
    """The gradient tree; leaves without a gradient get zeros, or stay if they are no numbers."""
    without_gradient = {p: x for p, x in leaves_by_path(params).items() if p not in grads}
    zeros = {
        path: jnp.zeros(jnp.shape(x), x.dtype) if jnp.issubdtype(x.dtype, jnp.number) else x
        for path, x in without_gradient.items()
    }
    return with_leaves(params, zeros | grads)
