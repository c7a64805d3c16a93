"""Build the collector that the options of ``value_grad_and_factors`` describe."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, overload, runtime_checkable

from jaxkfac._arguments import check_function
from jaxkfac._errors import nearest
from jaxkfac.factors._budgeted import BudgetedCollector
from jaxkfac.factors._collect import FactorCollector
from jaxkfac.factors._objective import Objective
from jaxkfac.factors._options import BudgetOptions, CollectOptions
from jaxkfac.factors._program import Program
from jaxkfac.factors._scalar_loss import check_scalar_loss
from jaxkfac.memory import parse_bytes

Plain = ParamSpec("Plain")
Budgeted = ParamSpec("Budgeted")


@runtime_checkable
class CollectorBuilder(Protocol[Plain, Budgeted]):
    """The type of ``value_grad_and_factors``; its options are the fields of two classes."""

    @overload
    def __call__(
        self, objective: Callable[..., Any], *args: Plain.args, **options: Plain.kwargs
    ) -> FactorCollector: ...
    @overload
    def __call__(
        self, objective: Callable[..., Any], *args: Budgeted.args, **options: Budgeted.kwargs
    ) -> BudgetedCollector: ...


def _with_options_of(
    plain: Callable[Plain, CollectOptions], budgeted: Callable[Budgeted, BudgetOptions]
) -> Callable[[Callable[..., Any]], CollectorBuilder[Plain, Budgeted]]:
    """A decorator that gives a function of ``**options`` the signature of the options."""

    def decorated(function: Any) -> CollectorBuilder[Plain, Budgeted]:
        (objective, _) = inspect.signature(function).parameters.values()
        types = inspect.signature(budgeted).parameters
        options = [
            option.replace(annotation=types[name].annotation | None)
            if option.default is None
            else option
            for name, option in inspect.signature(plain).parameters.items()
        ]
        result = FactorCollector | BudgetedCollector
        function.__signature__ = inspect.Signature([objective, *options], return_annotation=result)
        return function

    return decorated


@_with_options_of(CollectOptions, BudgetOptions)
def value_grad_and_factors(objective: Callable[..., Any], **options: Any) -> Any:
    r"""Build a function that returns value, gradient and Kronecker factors.

    With $a$ the input row of a layer and $g$ the gradient of the sum of one example's loss
    terms with respect to its output row, over $N$ examples, $R$ terms and $S$ positions,

    $$A = \tfrac{1}{NS} \sum a a^\top, \qquad G = \tfrac{1}{NR} \sum g g^\top ,$$

    or, with ``sharing="reduce"``, from each example's mean input row and summed $g$:
    $A = \tfrac1N \sum \bar a \bar a^\top$,
    $G = \tfrac{1}{NR} \sum_n (\sum_s g)(\sum_s g)^\top$.

    If examples are coupled (batch statistics), $g$ is the gradient with respect to one row while
    everything else in the batch stays fixed, and an example's gradient is the sum over its rows.

    A weight computed from parameters (weight norm, a merged adapter) has factors under the name of
    the largest of these parameters, with ``@effective`` appended. Each parameter behind it has the
    diagonal $\tfrac{1}{NR} \sum_n \gamma_n^2$, with $\gamma_n$ the gradient of one example, from
    a second pass.

    Args:
        objective: An ``Objective``, or any scalar loss ``fn(params, batch)`` that is a mean
            over rows (then ``fisher="empirical"`` only, with ``loss_terms``).
        fisher: ``"empirical"``: the given targets, with the gradient's own backward pass.
            ``"mc"``: labels sampled from the model, unbiased; takes ``samples`` further VJPs of the
            same linearization. ``"exact"``: the expectation over labels; takes one VJP for each
            loss term of an example and each output column, and is correct where outputs mix tokens.
            If examples are coupled (batch statistics), or may be, each example takes its own VJPs;
            their number is printed. ``"forward"``: G is the identity.
            ``"exact_if_terms_do_not_mix"``: one VJP for each column, shared by all terms. It equals
            ``"exact"`` under expand if no layer mixes the terms of an example, and is biased
            otherwise (refused if examples are coupled). Or an ``Estimator`` of your own, with its
            own samples and chunk.
        sharing: ``"expand"``: every position is a row. ``"reduce"``: every example is one row,
            over all positions, uses and iterations. Embeddings always use expand.
        bias: ``"joint"``: a column of ones is appended to the inputs. ``"separate"``: the bias
            block is G. Both apply to a bias added to one product. A bias added to a sum of
            products, as ``b`` in ``x @ w + h @ u + b``, is a lone bias.
        scales: For normalization scales and lone biases. ``"auto"``: squares of each example's
            gradient where there are several positions and the example of each is known, otherwise
            squares at each position. ``"exact_diagonal"``: squares of each example's gradient under
            either sharing, which is the diagonal of the Fisher itself. ``"diagonal"``: squares of
            the gradient at each position or of each example, as ``sharing`` says.
            ``"full_block"``: the full block
            $\tfrac{1}{NR} \sum_n \gamma_n \gamma_n^\top$ of each example's gradient
            $\gamma_n$, stored as ``g`` with an ``a`` of one.
        layers: Full-match pattern over layer names; ``None`` is all.
        experts: See ``find_layers``.
        uncovered: What to do with parameters that no rule covers: ``"raise"``; a per-example
            ``"diagonal"`` by a second pass, which runs each example alone and is refused if
            examples are coupled; or ``"ignore"``.
        max_dense: A larger side is stored as a diagonal.
        has_aux: Whether a scalar loss returns ``(value, aux)``; an ``Objective`` has its own
            ``has_aux``.
        loss_terms: Number of rows that a scalar loss is the mean of.
        samples: How many labels ``"mc"`` samples for each term.
        chunk: How many vector-Jacobian products of ``"mc"`` and ``"exact"`` run at once.
        max_factor_bytes: Most bytes of factors on the device at once, a number or
            ``"4GB"``. Collection takes as many backward passes as needed, each over some layers and
            some iterations of a scan; every layer is computed, and no parameter is copied. The
            callable compiles its passes itself (do not jit it), prints their number, and returns
            factors in host memory.
        sink: ``(service, step)``: a ``HostCurvature`` that receives each pass's factors, which are
            then not returned; with ``max_factor_bytes`` only.
        subsample: The fraction of rows, in (0, 1], that Gram products are formed from, drawn anew
            for each layer from the call's ``key``. Sums are scaled up to the number of all rows, so
            factors are unbiased; diagonals and counts use all rows and stay exact. Rows that are
            sharded over devices are gathered.
        every: Collect factors at steps that are multiples of this. The call needs ``step=``. At the
            other steps it costs a gradient, and sums and counts are zero. ``update_average``,
            ``kfac``, ``HostCurvature`` and ``multi_steps`` (which then needs ``terms=`` too)
            treat such factors as no new data.
        precision: For Gram products of float32 rows: ``"highest"``, or ``"auto"`` for the
            precision in which the layer's own product runs (TF32, bfloat16 passes). Products of
            bfloat16 rows take one pass, summed in float32. ``python -m benchmarks.precision``
            prints the loss of accuracy: see ``benchmarks/results/precision.md``.
        examples: ``"apart"`` declares that no example's output depends on another example, for
            programs that do not prove it. Then ``"exact"`` shares backward passes among examples,
            and a second pass may run each example alone. It is recorded in ``factors.origin``. It
            does not override a program that shows where examples meet.
            :func:`jaxkfac.check_coverage` tests it.
        packed: Whether to return one triangle of every matrix of size 64 or more
            (``Factors.packed``), half the bytes. The matrices of a scan are packed one by one as
            they are formed. ``factors[name].a`` is a full matrix all the same. Under
            ``max_factor_bytes``, more of them fit into one pass.
        collect: Collect the factors of one of ``collect`` groups at each step, so that a step holds
            a part of the model's factors. The call needs ``step=``, the number of the call, and
            gathers group ``step % collect``. A layer of a scan contributes some of its iterations
            to every group, and one compiled program serves all groups. Other layers are divided
            into groups of about equal bytes if ``step`` is a Python number, static under ``jit``;
            if it is traced, they are gathered at every step. Give the factors to ``kfac`` or
            ``update_average``, where each layer's average decays by its own steps. ``kfac`` makes
            no update until every group has come once.
        axis_name: The mapped axis, or a tuple of axes, over which the batch is divided: the
            ``axis_name`` of a ``jax.pmap``, or a manual axis of a ``jax.shard_map``. Value,
            gradient and factors are then those of the batch of all devices, equal on each of them:
            counts of terms are pooled before anything is divided by them, so that masks and weights
            may differ between devices. The same holds for ``adaptation``. A loss that marks its
            outputs enters with each device's share of all terms, and with ``loss_terms`` equally.
            Auxiliary outputs and a changed state stay each device's own. Optimizers read the axes
            in ``factors.origin``. ``()`` says that you reduce by hand; ``None``, that no axis is
            mapped, or that JAX sums gradients itself (``check_vma=True``).

    Returns:
        A ``FactorCollector``: call it with ``(params, batch, key=None, positions=None)``, and
        with ``step=`` if ``every`` or ``collect`` is above 1. With ``max_factor_bytes``, a
        ``BudgetedCollector``, which is called in the same way.

    Raises:
        TypeError: an option that does not exist, with the nearest names.
        ValueError: a value that an option does not take, or an option that a scalar loss does not
            support; when called, an ``axis_name`` that no map around the call has.
        MemoryBudgetError: when called: one side of one layer, at one iteration, is larger
            than ``max_factor_bytes``.

    Memory:
        The gradient's own, plus the factors. Under a budget, ``max_factor_bytes`` and the rows of
        one layer instead; no activation is kept longer. ``"mc"`` with several samples and
        ``"exact"`` add ``chunk`` times the memory of one backward pass and its output sides.
        Statistics by example hold ``N (in + out)`` elements for each layer; on a mesh with explicit
        axes, on every device.

    Example:
        >>> import jax, jax.numpy as jnp, jaxkfac as jk
        >>> objective = jk.Objective(lambda p, x: x @ p["w"], jk.Gaussian())
        >>> stats = jax.jit(jk.value_grad_and_factors(objective))
        >>> x, y = jnp.eye(3), jnp.zeros((3, 2))
        >>> value, grads, factors = stats({"w": jnp.ones((3, 2))}, (x, y))
        >>> factors["w"].a.shape, factors["w"].g.shape
        ((3, 3), (2, 2))

    References:
        James Martens and Roger Grosse, "Optimizing Neural Networks with Kronecker-factored
        Approximate Curvature", 2015. Runa Eschenhagen et al., "Kronecker-Factored Approximate
        Curvature for Modern Neural Network Architectures", 2023.
    """
    if not isinstance(objective, Objective):
        check_function("objective", objective, "loss(params, batch), or a jk.Objective")
    known = [option.name for option in dataclasses.fields(CollectOptions)]
    for name in options.keys() - {*known}:
        raise TypeError(
            f"value_grad_and_factors has no option {name}=: the nearest are {nearest(name, known)}"
        )
    budget = options.get("max_factor_bytes")
    if budget is None and options.get("sink") is not None:
        raise ValueError(
            "sink= takes the factors of each pass under max_factor_bytes=; without a budget, "
            "push the factors that the function returns"
        )
    checked = (CollectOptions if budget is None else BudgetOptions)(**options)
    if isinstance(objective, Objective):
        if checked.loss_terms is not None:
            raise ValueError("loss_terms: an Objective counts its terms itself")
    elif checked.loss_terms is not None:  # else the first trace shows whether it marks outputs
        check_scalar_loss(checked, checked.estimator)
    finding = {
        "layers": checked.layers,
        "max_dense": checked.max_dense,
        "experts": checked.experts,
        "scale_blocks": checked.scales == "full_block",
    }
    program = Program(
        objective,
        finding,
        cover=checked.uncovered == "raise",
        second_pass=not checked.estimator.unit_outputs,
        has_aux=checked.has_aux,
        examples=checked.examples,
        axes=checked.axis_names or (),
    )
    collector = FactorCollector(program, checked)
    if isinstance(checked, CollectOptions):
        return collector
    nbytes = parse_bytes(checked.max_factor_bytes, name="max_factor_bytes")
    return BudgetedCollector(collector, nbytes, checked.sink)
