"""The program that a setting leads to: other dtypes, a part of the batch, remat, adapters."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from jaxkfac import lslora
from jaxkfac._errors import JaxkfacError
from jaxkfac.factors import FactorCollector, Factors, Objective, value_grad_and_factors
from jaxkfac.factors._objective import takes_key
from jaxkfac.factors._passes import Pass
from jaxkfac.interception._layer import Layer
from jaxkfac.interception._windows import Window
from jaxkfac.planning._levers import Setting, UnavailableError
from jaxkfac.planning._remat import remat_scans, scans_to_remat
from jaxkfac.planning._shapes import as_float16, in_half, micro_batch, nbytes


@dataclasses.dataclass(frozen=True, eq=False)
class Variant:
    """A program for one set of shapes, what it trains, and what it does not.

    Attributes:
        objective: ``objective(trained, batch[, key])``.
        trained: Shapes of what has a gradient: the parameters, or adapters.
        batch: Shapes; beside adapters the frozen base is among the inputs.
        frozen: Shapes of the base beside adapters, ``None`` without.
        adapted: The layers of the base that have an adapter.
        options: For ``value_grad_and_factors``.
        has_aux: Whether the objective returns ``(value, aux)``.
    """

    objective: Any
    trained: PyTree
    batch: Any
    frozen: PyTree
    adapted: tuple[Layer, ...]
    options: Mapping[str, Any]
    has_aux: bool

    @functools.cached_property
    def gradient_temporaries(self) -> int:
        """Bytes beside arguments and results of value and gradient."""
        step = jax.value_and_grad(self.objective, has_aux=self.has_aux, allow_int=True)
        return self._temporaries(step, self.keys)

    @functools.cached_property
    def factor_temporaries(self) -> int:
        """Bytes beside arguments and results of value, gradient and all factors.

        A few per cent more than the gradient's where activations rule; but 28 GB instead of
        14 in a rematted 7B decoder, where triangles of large factors are put together.
        """
        return self._temporaries(self.collector, (_key(),))

    def pass_temporaries(self, one: Pass) -> int:
        """Bytes beside arguments and results of the gradient and one pass's factors."""
        rows = {name: part.rows for name, part in one.parts.items() if part.rows is not None}

        def run(trained: PyTree, batch: Any, key: Any, at: Any) -> Any:
            windows = {name: Window(at, count) for name, count in rows.items()}
            call = self.collector.checked(batch, key)
            return self.collector.gather(trained, call, parts=dict(one.parts), windows=windows)

        return self._temporaries(run, (_key(), jax.ShapeDtypeStruct((), np.int32)))

    def _temporaries(self, step: Callable[..., Any], keys: tuple[Any, ...]) -> int:
        """What XLA allocates for a program.

        It computes bfloat16 on the CPU in float32, and keeps both: 158 GB for a program that
        takes 130 in float32 and 87 in float16. So on the CPU the bytes are those of float16,
        where the program takes that.
        """
        args = (self.trained, self.batch)
        if jax.default_backend() == "cpu" and (halves := as_float16(args)) != args:
            with contextlib.suppress(TypeError, ValueError):
                return _compiled_temporaries(step, *halves, *keys)
        return _compiled_temporaries(step, *args, *keys)

    @property
    def keys(self) -> tuple[Any, ...]:
        """The key that the objective takes, if it does."""
        keyed = takes_key(getattr(self.objective, "apply_fn", self.objective))
        return (_key(),) * keyed

    @functools.cached_property
    def collector(self) -> FactorCollector:
        """What would gather the factors."""
        collector = value_grad_and_factors(self.objective, **self.options)
        assert isinstance(collector, FactorCollector)  # the budget is the planner's own
        return collector

    @functools.cached_property
    def factors(self) -> Factors:
        """Shapes of all factors."""
        return jax.eval_shape(self.collector, self.trained, self.batch, _key()).factors


class Variants:
    """The programs of all settings, each built once.

    Args:
        objective: As given.
        params: Shapes.
        batch: Shapes.
        config: Of the adapters.
        options: For ``value_grad_and_factors``.
    """

    def __init__(
        self,
        objective: Callable[..., Any],
        params: PyTree,
        batch: Any,
        config: lslora.Config,
        options: Mapping[str, Any],
    ) -> None:
        self._objective, self._params, self._batch = objective, params, batch
        self._config, self._options = config, dict(options)
        if not isinstance(objective, Objective):
            self._options.setdefault("loss_terms", 1)  # shapes do not depend on it
        self._known: dict[Setting, Variant | UnavailableError] = {}

    def __call__(self, setting: Setting) -> Variant:
        """The program of a setting.

        Raises:
            UnavailableError: the program does not have one of the levers.
        """
        # Where factors and weights are kept is no matter of the program.
        own = Setting(setting.levers & {"bf16", "remat", "adapters"}, setting.steps)
        if own not in self._known:
            try:
                self._known[own] = self._build(own)
            except UnavailableError as reason:
                self._known[own] = reason
        found = self._known[own]
        if isinstance(found, UnavailableError):
            raise found
        return found

    def _build(self, setting: Setting) -> Variant:
        objective, params, batch = self._objective, self._params, self._batch
        if "bf16" in setting:
            params, batch = in_half(params), in_half(batch)
            if nbytes(params) == nbytes(self._params):
                raise UnavailableError("no parameter has more than 16 bits")
        if setting.steps > 1:
            batch = micro_batch(batch, setting.steps)
        if "remat" in setting:
            objective = _rematted(objective, params, batch)
        aux = bool(getattr(objective, "has_aux", self._options.get("has_aux", False)))
        plain = Variant(objective, params, batch, None, (), self._options, aux)
        variant = self._adapted(plain) if "adapters" in setting else plain
        if setting.levers or setting.steps > 1:
            _check_traces(variant)
        return variant

    def _adapted(self, plain: Variant) -> Variant:
        if not isinstance(plain.objective, Objective):
            raise UnavailableError("adapters need a jk.Objective: a scalar loss has no outputs")
        apply_fn, inputs = plain.objective.apply_fn, plain.batch[0]
        adapted = lslora.attach(apply_fn, self._config)
        fresh = functools.partial(lslora.init, self._config, apply_fn)
        try:
            adapters = jax.eval_shape(
                lambda params, inputs, key: fresh(params, inputs, key=key),
                plain.trained,
                inputs,
                _key(),
            )
            layers = adapted.traced(plain.trained, inputs, None).table
        except (JaxkfacError, ValueError, TypeError) as error:
            raise UnavailableError(_first_line(error)) from None

        def run(adapters: Any, base_and_inputs: Any, key: Any = None) -> Any:
            base, inputs = base_and_inputs
            return adapted(base, adapters, inputs, key)

        objective = dataclasses.replace(plain.objective, apply_fn=run)
        batch = ((plain.trained, inputs), *plain.batch[1:])
        # Patterns name the base's layers. Coefficients lie in a derivative of their own.
        own = {k: v for k, v in plain.options.items() if k not in ("layers", "experts")}
        options = {"uncovered": "ignore", **own}
        held = tuple(layers[name] for name in adapters if name in layers)
        return Variant(objective, adapters, batch, plain.trained, held, options, plain.has_aux)


def _compiled_temporaries(step: Callable[..., Any], *args: Any) -> int:
    analysis = jax.jit(step).lower(*args).compile().memory_analysis()
    if analysis is None:
        raise NotImplementedError(
            f"the compiler for {jax.default_backend()} does not say what a program allocates: "
            "plan under JAX_PLATFORMS=cpu"
        )
    return int(analysis.temp_size_in_bytes)


def _rematted(objective: Any, params: PyTree, batch: Any) -> Any:
    wrapped = isinstance(objective, Objective)
    fn, data = (objective.apply_fn, batch[0]) if wrapped else (objective, batch)
    keyed = {"key": _key()} if takes_key(fn) else {}
    try:
        found = scans_to_remat(lambda p, d, kwargs: fn(p, d, **kwargs), params, data, keyed)
    except (JaxkfacError, ValueError, TypeError) as error:
        raise UnavailableError(_first_line(error)) from None
    if not found:
        raise UnavailableError("there is no scan whose body is not rematted already")
    again = remat_scans(fn)
    return dataclasses.replace(objective, apply_fn=again) if wrapped else again


def _check_traces(variant: Variant) -> None:
    """A program that was changed may not run: strict promotion in bfloat16, a fixed batch."""
    try:
        jax.eval_shape(variant.objective, variant.trained, variant.batch, *variant.keys)
    except (JaxkfacError, ValueError, TypeError) as error:
        raise UnavailableError(_first_line(error)) from None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"


def _key() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0))
