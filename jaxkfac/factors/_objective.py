"""An objective: a model's apply function and a likelihood, and the batches that it takes."""

import dataclasses
import functools
import inspect
import itertools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Key, PyTree

from jaxkfac._arguments import ArrayTree, check_function
from jaxkfac._errors import one_of
from jaxkfac.factors._likelihoods import Categorical, Likelihood
from jaxkfac.factors._loss_terms import Head, LossTerms, Normalize, shares, times
from jaxkfac.factors._model_call import (
    Batch,
    CheckedBatch,
    as_batch,
    form_of,
    parameters_of,
    returned,
    takes_key,
)
from jaxkfac.interception import LayerTable, Traced, check_likelihood, trace
from jaxkfac.linalg import statistics_dtype

# ---------------- compiled programs of an objective


Program = TypeVar("Program")

MOST = 64  # kinds of programs for one objective; jax.jit adds one compilation per set of shapes


class KeptPrograms:
    """Compiled programs by what they depend on besides shapes; the ``MOST`` most recently used.

    Each objective holds its own programs; there is no table in this module. So the programs, and
    whatever their functions closed over, are freed with the objective. A program must not close
    over an array of a single call, which would stay alive as long.
    """

    def __init__(self) -> None:
        self._programs: OrderedDict[Hashable, Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self._programs)

    def get(self, key: Hashable, make: Callable[[], Program]) -> Program:
        """The program for this key; ``make`` builds it if there is none yet."""
        if key not in self._programs:
            self._programs[key] = make()
        self._programs.move_to_end(key)
        while len(self._programs) > MOST:
            self._programs.popitem(last=False)
        return self._programs[key]


@dataclasses.dataclass(frozen=True)
class Objective(LossTerms):
    r"""Mean negative log-likelihood of a model, or the sum of several.

    Args:
        apply_fn: ``apply_fn(params, inputs) -> outputs``, or with a ``key=`` argument for
            dropout, or with a ``state=`` argument for what a call changes (batch statistics):
            then it returns ``(outputs, changed)``. Inputs that are exactly a ``tuple`` are
            unpacked into positional arguments if the function takes that many; a NamedTuple or
            any other tree is passed as one argument. The first axis of the outputs is the
            example, the last axis holds the outputs of one term: ``(N, classes)``,
            ``(N, tokens, vocabulary)``; for ``Bernoulli()`` and ``Gaussian()`` also ``(N,)``, one
            number for each example.
        likelihood: ``Categorical()``, ``Bernoulli()`` or ``Gaussian()``; or a dictionary or tuple
            of them. Outputs, targets and mask then have that form; a mask entry may be ``None``
            if every term counts. The loss is the sum of the means.
        has_aux: Whether ``apply_fn`` returns ``(outputs, aux)``; with a state,
            ``((outputs, aux), changed)``.
        normalize: Where the batch's mask holds weights $w$ of loss terms $l$: ``"weight"`` for the
            mean $\sum w l / \sum w$; ``"count"`` divides by the number of terms whose weight is
            not 0, for rows that were drawn with unequal probabilities and weighted by their
            inverses. That number then also counts the terms of factors.
        weight: Positive number that multiplies the loss, and with it the gradient and the Fisher;
            or one for each likelihood, in their form. ``mean((f - y)**2)`` over $d$ outputs is
            ``Gaussian()`` with weight $2/d$.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> objective = jk.Objective(lambda p, x: x @ p, jk.Gaussian())
        >>> batch = jnp.asarray([[1.0, 1.0], [2.0, 2.0]]), jnp.zeros((2, 1))
        >>> float(objective(jnp.ones((2, 1)), batch))
        5.0
        >>> float(objective(jnp.ones((2, 1)), (*batch, jnp.asarray([3.0, 1.0]))))
        3.5
        >>> mean_of_squares = jk.Objective(lambda p, x: x @ p, jk.Gaussian(), weight=2.0)
        >>> float(mean_of_squares(jnp.ones((2, 1)), batch))
        10.0
    """

    apply_fn: Callable[..., Any]
    likelihood: Any
    has_aux: bool = False
    normalize: Normalize = "weight"
    weight: Any = 1.0

    def __post_init__(self) -> None:
        one_of("normalize", self.normalize, get_args(Normalize))
        check_function("apply_fn", self.apply_fn)
        _check_haiku(self.apply_fn)
        if isinstance(self.apply_fn, Objective):
            raise TypeError("apply_fn: expected apply_fn(params, inputs), got an Objective already")
        for at, likelihood in jax.tree_util.tree_leaves_with_path(self.likelihood):
            check_likelihood(f"likelihood{jax.tree_util.keystr(at)}", likelihood)
        if not self._likelihoods:
            raise TypeError(
                f"likelihood: expected jk.Categorical(), jk.Bernoulli(), jk.Gaussian(), or a "
                f"dictionary or tuple of them, got {self.likelihood!r}"
            )
        for weight in self._weights:
            _check_weight(weight)

    def __hash__(self) -> int:
        # Written out, because a dictionary of likelihoods has no hash.
        static = *self._likelihoods, *self._weights, self._form, self.has_aux, self.normalize
        return hash((self.apply_fn, *static))

    def __getstate__(self) -> dict[str, Any]:
        # Compiled programs are neither pickled nor copied with the fields.
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @functools.cached_property
    def programs(self) -> KeptPrograms:
        """The compiled programs of this objective; they are freed with it."""
        return KeptPrograms()

    @property
    def num_outputs(self) -> int:
        """How many outputs have a likelihood."""
        return len(self._likelihoods)

    @property
    def _likelihoods(self) -> list[Likelihood]:
        return jax.tree.leaves(self.likelihood)

    @property
    def _weights(self) -> list[Any]:
        """A weight for each likelihood."""
        if jax.tree_util.treedef_is_leaf(jax.tree.structure(self.weight)):
            return [self.weight] * len(self._likelihoods)
        return self.parts(self.weight, "weight")

    @property
    def _form(self) -> Any:
        return jax.tree.structure(self.likelihood)

    def parts(self, tree: PyTree, what: str) -> list[Any]:
        """The entries of a tree, one for each likelihood, in their order.

        Raises:
            ValueError: ``tree`` is not of the likelihoods' form.
        """
        try:
            # An entry may itself be a tree (labels of a likelihood of your own), so the tree is
            # taken apart only as far as the likelihoods go.
            return self._form.flatten_up_to(tree)
        except (ValueError, TypeError):
            raise ValueError(
                f"{what}: expected {_sketch(self.likelihood)}, the form of the likelihoods, "
                f"got {form_of(tree)}{_difference(self.likelihood, tree)}"
            ) from None

    def tree(self, entries: Sequence[Any]) -> PyTree:
        return jax.tree.unflatten(self._form, list(entries))

    def heads(
        self, outputs: ArrayTree, targets: ArrayTree = None, mask: ArrayTree = None
    ) -> list[Head]:
        names = [
            jax.tree_util.keystr(at)
            for at, _ in jax.tree_util.tree_leaves_with_path(self.likelihood)
        ]
        none = [None] * len(names)
        return [
            Head(
                *head,
                name=f"output {name}" if name else "batch",
                normalize=self.normalize,
                scale=float(weight),
            )
            for *head, name, weight in zip(
                self._likelihoods,
                self.parts(outputs, "apply_fn: outputs"),
                none if targets is None else self.parts(targets, "batch: targets"),
                none if mask is None else self.parts(mask, "batch: the mask"),
                [1.0] * len(names),
                names,
                self._weights,
                strict=True,
            )
        ]

    def batch(self, batch: ArrayTree) -> Batch:
        """Check a batch's form, and mask or weight its terms as the targets themselves say.

        A batch that it has returned before is returned unchanged.

        Raises:
            ValueError: see ``as_batch``; or targets or a mask do not have the likelihoods' form.
        """
        if isinstance(batch, CheckedBatch):
            return batch
        out = as_batch(batch)
        targets = self.parts(out.targets, "batch: targets")
        masks = [None] * len(targets)
        if out.mask is not None:
            masks = self.parts(out.mask, "batch: the mask")
        joined = [
            _joined(mask, getattr(likelihood, "kept", _nothing)(y))
            for likelihood, y, mask in zip(self._likelihoods, targets, masks, strict=True)
        ]
        # A batch without a mask keeps `None`: with a tree of `None` in its place it would have
        # another structure, and so another compiled program.
        changed = any(new is not old for new, old in zip(joined, masks, strict=True))
        return CheckedBatch(*(as_batch((*out[:2], self.tree(joined))) if changed else out))

    def in_batch(
        self,
        cotangents: ArrayTree,
        mask: ArrayTree,
        batch: Batch,
        names: tuple[str, ...] = (),
    ) -> ArrayTree:
        """Rescale the cotangents of a single example to its share of the whole batch's loss.

        Args:
            cotangents: Cotangents of the outputs for the example alone.
            mask: The example's mask.
            batch: The batch, or this device's part of it.
            names: Mapped axes whose devices hold the rest of the batch.
        """
        if self.num_outputs == 1:
            return cotangents
        example_heads = self.heads(cotangents, None, mask)
        n = batch.num_examples
        shapes = [
            jax.ShapeDtypeStruct((n, *h.outputs.shape[1:]), h.outputs.dtype) for h in example_heads
        ]
        terms = self.of_batch(self.tree(shapes), batch, names)
        batch_heads = terms.heads(self.tree(shapes), None, batch.mask)
        # A cotangent of the example alone is s sqrt(w_m / (t_m t)) with t_m of its t terms in
        # output m. Times sqrt((t_m / t) / (T_m / T)) it is s sqrt(w_m T / T_m) / t, so that t
        # times it, squared and averaged over the batch's T terms, weighs s s^T by w_m / T_m.
        scaled = []
        for head, x, y in zip(
            example_heads, shares(example_heads), shares(batch_heads), strict=True
        ):
            # An output without terms in the batch has none in this example either.
            of = jnp.where(y > 0, y, jnp.ones_like(y))
            scaled.append(times(head.outputs, jnp.sqrt(x / of)))
        return self.tree(scaled)

    def outputs(
        self,
        params: ArrayTree,
        inputs: ArrayTree,
        key: Key[Array, ""] | None = None,
        state: ArrayTree | None = None,
    ) -> tuple[ArrayTree, Any]:
        """The outputs, and the rest of what a call returns; see ``returned``."""
        args = arguments(self.apply_fn, params, inputs, key, state)
        outputs, beside = returned("apply_fn", self.apply_fn, args, key, state, self.has_aux)
        for head in self.heads(outputs):
            _check_outputs(head)
        return outputs, beside

    def watched(self) -> "Objective":
        """The same loss, with ``(aux, looks_like_probabilities)`` as auxiliary output.

        The second says, for traced outputs too, whether outputs of a likelihood that expects logits
        could be probabilities.
        """

        @functools.wraps(self.apply_fn)
        def apply_fn(*args: Any, **kwargs: Any) -> Any:
            result, changes = self.apply_fn(*args, **kwargs), kwargs.get("state") is not None
            if changes and not _is_pair(result):
                return result  # refused by name, as without the watch
            out, changed = result if changes else (result, None)
            if self.has_aux and not _is_pair(out):
                return result
            outputs, aux = out if self.has_aux else (out, None)
            watched = outputs, (aux, self.returns_probabilities(outputs))
            return (watched, changed) if changes else watched

        return dataclasses.replace(self, apply_fn=apply_fn, has_aux=True)

    def probabilities(self, outputs: ArrayTree) -> dict[str, str]:
        """By name, the outputs that look like probabilities where logits belong, with the remedy.

        Outputs without values here (traced, or on other processes) are left out.
        """
        heads = self.heads(outputs)
        return {head.name: text for head in heads if (text := _if_probabilities(head))}

    def returns_probabilities(self, outputs: ArrayTree) -> Bool[Array, ""]:
        """Whether any outputs look like probabilities where logits belong; also under ``jit``."""
        tests = [
            jnp.asarray(test(head.outputs))
            for head in self.heads(outputs)
            if (test := getattr(head.likelihood, "are_probabilities", None)) is not None
        ]
        return jnp.stack([jnp.zeros((), bool), *tests]).any()

    @functools.cached_property
    def _calls_with_values(self) -> "itertools.count[int]":
        return itertools.count()

    def traced(
        self,
        params: ArrayTree,
        inputs: ArrayTree,
        key: Key[Array | jax.ShapeDtypeStruct, ""] | None = None,
        state: ArrayTree | None = None,
        **finding: Any,
    ) -> Traced:
        """The model, traced with its outputs known to be those of examples; see ``trace``."""
        traced = trace(
            self.outputs,
            *(params, inputs, key, state),
            num_outputs=self.num_outputs,
            state=state,
            **finding,
        )
        traced.join_examples()
        return traced

    def layer_table(
        self,
        params: ArrayTree,
        batch: ArrayTree,
        key: Key[Array | jax.ShapeDtypeStruct, ""] | None = None,
        state: ArrayTree | None = None,
        **finding: Any,
    ) -> LayerTable:
        """The layers of the model for such a batch; for ``find_layers``."""
        inputs = self.batch(batch).inputs
        traced = self.traced(params, inputs, key, state, **finding)
        return traced.with_second_pass(outputs=True).table

    def __call__(
        self,
        params: ArrayTree,
        batch: ArrayTree,
        key: Key[Array, ""] | None = None,
        state: ArrayTree | None = None,
    ) -> Any:
        """The loss of the batch.

        Returns ``(loss, aux)`` with ``has_aux``, ``(loss, changed)`` with a state, and
        ``(loss, (aux, changed))`` with both. The first call outside ``jit`` warns if the outputs
        are the probabilities of ``Categorical()`` instead of logits.
        """
        inputs, targets, mask = self.batch(batch)
        outputs, beside = self.outputs(params, inputs, key, state)
        # Only once, because reading the outputs waits for the device. Logits of Bernoulli() may
        # all lie in [0, 1]; check_coverage, which moves the parameters, tells them apart.
        if all(map(_has_values, jax.tree.leaves(outputs))) and not next(self._calls_with_values):
            for head in self.heads(outputs):
                if isinstance(head.likelihood, Categorical) and (text := _if_probabilities(head)):
                    warnings.warn(text, stacklevel=2)
        value, _ = self.loss(outputs, targets, mask)
        return (value, beside) if self.has_aux or state is not None else value


def arguments(
    apply_fn: Callable[..., Any],
    params: ArrayTree,
    inputs: ArrayTree,
    key: Any = None,
    state: ArrayTree | None = None,
) -> tuple[Any, ...]:
    """The positional arguments of ``apply_fn``.

    Inputs that are exactly a ``tuple`` are unpacked, unless the function does not take that many:
    ``fn(params, inputs)`` gets the tuple itself.
    """
    if type(inputs) is not tuple:
        return params, inputs
    kwargs = {"key": key} if takes_key(apply_fn) else {}
    kwargs |= {} if state is None else {"state": state}
    try:
        # The call itself is not tried: a TypeError inside the model would look like one about its
        # arguments.
        inspect.signature(apply_fn).bind(params, *inputs, **kwargs)
    except (TypeError, ValueError):  # too many or too few, or no signature to inspect
        return params, inputs
    return params, *inputs


def _check_weight(weight: Any) -> None:
    """Refuse a weight of an objective that is no positive number."""
    number = isinstance(weight, int | float | np.number) and not isinstance(weight, bool)
    if not number or not 0 < weight < float("inf"):
        raise ValueError(
            f"weight={weight!r}: expected a positive Python number, or one for each likelihood in "
            "their form; weights of single terms stand in the place of the batch's mask"
        )


def _if_probabilities(head: Head) -> str:
    """What is wrong with outputs that look like probabilities; empty if they do not."""
    likelihood = head.likelihood
    if not (hasattr(likelihood, "are_probabilities") and _has_values(head.outputs)):
        return ""
    if not likelihood.are_probabilities(head.outputs):
        return ""
    where = "" if head.name == "batch" else f" ({head.name})"
    return (
        f"apply_fn{where} returns probabilities, and {type(likelihood).__name__}() expects logits: "
        f"return the values before the {likelihood.link}"
    )


def _is_pair(x: Any) -> bool:
    return isinstance(x, tuple) and len(x) == 2


def _has_values(x: Any) -> bool:
    return not isinstance(x, Tracer) and getattr(x, "is_fully_addressable", True)


def _nothing(targets: Any) -> None:
    return None


def _joined(mask: Any, by_targets: Any) -> Any:
    """The mask that both keep, or the product of weights; ``None`` for all."""
    if by_targets is None or mask is None:
        return mask if by_targets is None else by_targets
    # ``check`` refuses a mask of another shape.
    if mask.shape != by_targets.shape:
        return mask
    if isinstance(mask, jax.ShapeDtypeStruct) or isinstance(by_targets, jax.ShapeDtypeStruct):
        return by_targets if mask.dtype == jnp.bool_ else mask
    if mask.dtype == by_targets.dtype == jnp.bool_:
        return mask & by_targets
    dtypes = [x.dtype for x in (mask, by_targets) if x.dtype != jnp.bool_]
    one, other = (jnp.asarray(x).astype(statistics_dtype(*dtypes)) for x in (mask, by_targets))
    # A weight of 0 leaves the term out, whatever the other weight is.
    return jnp.where((one == 0) | (other == 0), jnp.zeros_like(one), one * other)


def _sketch(tree: PyTree) -> str:
    if isinstance(tree, Likelihood):
        return "an array"
    return str(jax.tree.map(lambda x: type(x).__name__, tree)).replace("'", "")


def _difference(likelihood: PyTree, tree: PyTree) -> str:
    """Say which keys of a dictionary are missing, or which have no likelihood."""
    if not isinstance(likelihood, Mapping) or not isinstance(tree, Mapping):
        return ""
    missing = [repr(key) for key in likelihood if key not in tree]
    more = [repr(key) for key in tree if key not in likelihood]
    if missing:
        return f" without {', '.join(missing)}"
    return f" with {', '.join(more)}, which has no likelihood" if more else ""


def _check_haiku(fn: Callable[..., Any]) -> None:
    """Refuse Haiku's own apply, whose second argument is not the inputs."""
    names = list(parameters_of(fn))
    if names[1:2] == ["rng"]:
        raise TypeError(
            "apply_fn: expected apply_fn(params, inputs), got Haiku's apply(params, rng, inputs); "
            "give hk.without_apply_rng(model).apply, or lambda params, x, key: model.apply(params, "
            "key, x)"
        )
    if names[1:3] == ["state", "rng"]:
        raise TypeError(
            "apply_fn: expected apply_fn(params, inputs, state), got Haiku's apply(params, state, "
            "rng, inputs); give lambda params, x, state, key: model.apply(params, state, key, x)"
        )


def _check_outputs(head: Head) -> None:
    x, where = head.outputs, "" if head.name == "batch" else f" ({head.name})"
    one = getattr(head.likelihood, "one_output", False)
    if not hasattr(x, "ndim") or x.ndim < (1 if one else 2):
        name = type(head.likelihood).__name__
        raise ValueError(
            f"apply_fn{where}: expected one array of outputs (examples, ..., outputs) for {name}, "
            f"got {form_of(x)}{_remedy(x)}"
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"apply_fn{where}: outputs have dtype {x.dtype}, expected floating")


def _remedy(x: object) -> str:
    """What to do if a container came instead of an array."""
    if isinstance(x, tuple | list):
        return (
            ": for values beside the outputs use has_aux=True, for a state that the call "
            "changes a state= argument, for several outputs a tuple of likelihoods"
        )
    if isinstance(x, Mapping):
        return ": several outputs have a dictionary of likelihoods of their form"
    return ""
