"""The options by which a training may fit: one class for each.

A new option is a class registered in ``OPTIONS``, in this file or by a user.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from jaxkfac import lslora
from jaxkfac._arguments import leaves_by_path
from jaxkfac._errors import JaxkfacError
from jaxkfac._interpreter import Replacer, equations_in, run_scan
from jaxkfac._jaxpr_compat import Eqn, body_of, call_kind, is_loop
from jaxkfac.factors import Objective, arguments, takes_key
from jaxkfac.lslora.nf4 import quantize
from jaxkfac.memory import bytes_text
from jaxkfac.planning._option import Choice, HalfBases, HostBases, LowRank, Option
from jaxkfac.planning._program import TrainingProgram, first_line, shape_of_key
from jaxkfac.planning._program_bytes import MemoryRows, MicroBatches, ProgramBytes
from jaxkfac.planning._shapes import (
    UnavailableError,
    in_half,
    micro_batch,
    nbytes,
    nelements,
)

# ---------------- rematerializing the outermost scans of a program


def remat_scans(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Rematerialize the scans of ``fn``: the backward pass recomputes each iteration.

    Scans whose body already contains a checkpoint, and scans inside control flow other than
    ``jit``, stay unchanged.
    """

    @functools.wraps(fn, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))

        def flat(*leaves: Any) -> Any:
            args, kwargs = jax.tree.unflatten(tree, leaves)
            return fn(*args, **kwargs)

        closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*leaves)
        out = _Remat().run(closed.jaxpr, closed.consts, leaves)
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return run


def has_scans_to_remat(fn: Callable[..., Any], *shapes: Any) -> bool:
    """Whether :func:`remat_scans` would change any scan; computes nothing."""
    return any(map(_Remat().touches, jax.make_jaxpr(fn)(*shapes).jaxpr.eqns))


class _Remat(Replacer):
    """Puts a checkpoint around each iteration of a scan whose body has none."""

    def touches(self, eqn: Eqn) -> bool:
        return any(map(_is_plain, equations_in([eqn], _is_jit)))

    def replaced(self, eqn: Eqn, values: list[Any]) -> list[Any]:
        if not _is_plain(eqn):
            return self.run(*body_of(eqn), values)
        body = jex.jaxpr_as_fun(jex.ClosedJaxpr(*body_of(eqn)))
        # Iterations share no subexpressions, so preventing CSE would only cost time.
        return run_scan(eqn, body, values, functools.partial(jax.checkpoint, prevent_cse=False))


def _is_plain(eqn: Eqn) -> bool:
    inner = equations_in(body_of(eqn)[0].eqns, _is_jit) if is_loop(eqn) else ()
    return is_loop(eqn) and all(call_kind(step) != "checkpoint" for step in inner)


def _is_jit(eqn: Eqn) -> bool:
    return call_kind(eqn) == "jit"


# ---------------- the options


# 4 bits per element; an absmax of 8 bits per 64 elements, and a float32 per 256 of those.
NF4_BYTES = 1 / 2 + 1 / 64 + 4 / (64 * 256)


class Accumulation(Option):
    """Micro-batches whose gradients and statistics are summed."""

    name, title, changes_program, sharded = "accumulation", "accum.", True, True

    def program(self, program: TrainingProgram, steps: int) -> TrainingProgram:
        if program.frozen is not None:  # its first axis may be as long as the examples'
            raise UnavailableError("the batch holds frozen parameters, which cannot be divided")
        return dataclasses.replace(program, batch=micro_batch(program.batch, steps))

    def check(self, of: ProgramBytes, choice: Choice) -> None:
        _require_plain_optimizer(of)

    def cost(self, of: ProgramBytes, choice: Choice) -> str:
        steps = choice.steps * of.micro_batches.steps
        return f"{steps} micro-batches a step; the same arithmetic"


class HalfAccumulators(Option):
    """Sums over micro-batches, kept in bfloat16."""

    name, title, needs, sharded = "accumulator", "bf16-acc.", "accumulation", True
    accumulator_dtype = jnp.dtype(jnp.bfloat16)

    def needed(self, micro_batches: MicroBatches) -> str:
        return self.needs if micro_batches.steps == 1 else ""

    def check(self, of: ProgramBytes, choice: Choice) -> None:
        _require_plain_optimizer(of)
        if of.micro_batches.accumulator_dtype == self.accumulator_dtype:
            raise UnavailableError("the accumulators are in bfloat16 already")

    def cost(self, of: ProgramBytes, choice: Choice) -> str:
        return "means of gradients kept in 8 bits of mantissa: 0.4 % over 16 micro-batches"


def _require_plain_optimizer(of: ProgramBytes) -> None:
    if of.optimizer.accumulators:
        raise UnavailableError("the optimizer accumulates: give one micro-batch as batch")


class Host(Option):
    """Averages and decompositions on the host."""

    name, title, takes_factors = "host", "host", True

    def check(self, of: ProgramBytes, choice: Choice) -> None:
        of.require_factors()
        of.require_all_factors()

    def change(self, rows: MemoryRows, of: ProgramBytes, choice: Choice) -> None:
        curvature = of.require_factors()
        # The factors of this step, and those of the last step that are still being moved.
        rows.device["factors"] = curvature.factors + curvature.in_flight
        rows.device["bases"] = curvature.bases if of.wants_vectors else 0
        rows.device["workspace"] = rows.device["eigh scratch"] = 0
        rows.host.update(self._on_host(of, choice))

    def cost(self, of: ProgramBytes, choice: Choice) -> str:
        host_text = bytes_text(sum(self._on_host(of, choice).values()))
        return f"{host_text} of main memory; bases are some steps old"

    def _on_host(self, of: ProgramBytes, choice: Choice) -> dict[str, int]:
        steps = choice.steps * of.micro_batches.steps
        return of.require_factors().on_host(steps, choice.budget)


def _of_one_tuple(apply_fn: Callable[..., Any]) -> Callable[..., Any]:
    """``apply_fn(params, inputs)`` that unpacks a tuple of inputs, as an ``Objective`` does."""

    def run(params: Any, inputs: Any, key: Any = None, **state: Any) -> Any:
        kwargs = state | ({"key": key} if takes_key(apply_fn) else {})
        return apply_fn(*arguments(apply_fn, params, inputs, key), **kwargs)

    return run


class Remat(Option):
    """Recomputed activations of scanned blocks."""

    name, title, changes_program, sharded = "remat", "remat", True, True
    changes_shapes = False

    def program(self, program: TrainingProgram, steps: int) -> TrainingProgram:
        objective = program.objective
        wrapped = isinstance(objective, Objective)
        fn, data = (objective.apply_fn, program.batch[0]) if wrapped else (objective, program.batch)
        run = _of_one_tuple(fn) if wrapped else fn
        extra = {"key": shape_of_key()} if takes_key(fn) else {}
        extra |= {} if program.state is None else {"state": program.state}
        try:
            has_scans = has_scans_to_remat(
                lambda p, d, kw: run(p, d, **kw), program.trained, data, extra
            )
        except (JaxkfacError, ValueError, TypeError) as error:
            raise UnavailableError(first_line(error)) from None
        if not has_scans:
            raise UnavailableError("there is no scan whose body is not rematted already")
        again = remat_scans(fn)
        objective = dataclasses.replace(objective, apply_fn=again) if wrapped else again
        return dataclasses.replace(program, objective=objective)

    def gradients(self, of: ProgramBytes, choice: Choice) -> float:
        return 4 / 3

    def cost(self, of: ProgramBytes, choice: Choice) -> str:
        return "one more forward pass: about 4/3 gradients"


class HalfPrecision(Option):
    """All floating values in bfloat16."""

    name, title, changes_program, shortens, sharded = "bf16", "bf16", True, True, True

    def program(self, program: TrainingProgram, steps: int) -> TrainingProgram:
        trained = in_half(program.trained)
        if nbytes(trained) == nbytes(program.trained):
            raise UnavailableError("no parameter has more than 16 bits")
        return dataclasses.replace(
            program,
            trained=trained,
            batch=in_half(program.batch),
            frozen=in_half(program.frozen),
        )

    def cost(self, of: ProgramBytes, choice: Choice) -> str:
        return "8 bits of mantissa in parameters, gradients and optimizer"


class Budget(Option):
    """Factors gathered in several passes."""

    name, title, takes_factors = "budget", "budget", True

    def check(self, of: ProgramBytes, choice: Choice) -> None:
        of.require_factors()
        of.require_all_factors()
        if Host.name not in choice.options and of.optimizer.averages:
            raise UnavailableError(
                "the optimizer keeps the average of all factors on the device: with host only"
            )

    def temporaries(self, of: ProgramBytes, choice: Choice) -> int | None:
        return of.require_factors().most_pass_temporaries(choice.budget or 0)

    def change(self, rows: MemoryRows, of: ProgramBytes, choice: Choice) -> None:
        held = of.require_factors()
        rows.device["factors"] = held.most_pass_results(choice.budget or 0)
        if Host.name in choice.options:
            return
        rows.host["factors"] = held.factors
        if not of.optimizer.bases:
            rows.device["workspace"] = held.workspace(from_host=True)

    def gradients(self, of: ProgramBytes, choice: Choice) -> float:
        return float(of.require_factors().passes(choice.budget or 0).gradients)

    def cost(self, of: ProgramBytes, choice: Choice) -> str:
        assert choice.budget is not None
        plan = of.require_factors().passes(choice.budget)
        return (
            f"max_factor_bytes={choice.budget}: {len(plan.passes)} passes, "
            f"about {plan.gradients:.3g} gradients a step"
        )


class Adapters(Option):
    """Trained adapters beside a frozen base."""

    name, title, changes_program = "adapters", "adapters", True
    changes_factors = True

    def program(self, program: TrainingProgram, steps: int) -> TrainingProgram:
        if not isinstance(program.objective, Objective):
            raise UnavailableError("adapters need a jk.Objective: a scalar loss has no outputs")
        if program.state is not None:
            raise UnavailableError("adapters are not planned beside a state that calls change")
        if program.frozen is not None:
            raise UnavailableError("there is a frozen base already")
        apply_fn, inputs = program.objective.apply_fn, program.batch[0]
        if type(inputs) is tuple:  # the objective unpacks it
            apply_fn = _of_one_tuple(apply_fn)
        adapted = lslora.attach(apply_fn, program.config)
        fresh = functools.partial(lslora.init, apply_fn, program.config)
        try:
            adapters = jax.eval_shape(
                lambda params, inputs, key: fresh(params, inputs, key=key),
                program.trained,
                inputs,
                shape_of_key(),
            )
            layers = adapted.traced(program.trained, inputs, None).table
        except (JaxkfacError, ValueError, TypeError) as error:
            raise UnavailableError(first_line(error)) from None

        def run(adapters: Any, base: Any, inputs: Any, key: Any = None) -> Any:
            return adapted(base, adapters, inputs, key)

        # Patterns refer to the base's layers. Coefficients lie inside a custom derivative.
        inner_collection = {
            k: v for k, v in program.collection.items() if k not in ("layers", "experts")
        }
        return dataclasses.replace(
            program,
            objective=dataclasses.replace(program.objective, apply_fn=run),
            trained=adapters,
            batch=((program.trained, inputs), *program.batch[1:]),
            frozen=program.trained,
            adapted=tuple(layers[name] for name in adapters if name in layers),
            base_table=layers,
            collection={"uncovered": "ignore", **inner_collection},
        )

    def cost(self, of: ProgramBytes, choice: Choice) -> str:
        count, size = len(of.program.adapted), nelements(of.program.trained)
        return f"another model: {size:,} parameters beside {count} frozen kernels"


class Nf4(Option):
    """Frozen kernels in 4 bits."""

    name, title, needs, changes_program = "nf4", "NF4", "adapters", True
    only_compiled = True  # tracing the decoding in every kernel takes as long as everything else

    def program(self, program: TrainingProgram, steps: int) -> TrainingProgram:
        base, ((_, inputs), *targets) = _in_four_bits(program), program.batch
        return dataclasses.replace(
            program, batch=((base, inputs), *targets), frozen=base, quantised=True
        )

    def check(self, of: ProgramBytes, choice: Choice) -> None:
        if not of.program.quantised:
            _in_four_bits(of.program)

    def change(self, rows: MemoryRows, of: ProgramBytes, choice: Choice) -> None:
        program = of.program
        if program.quantised:
            return
        rows.device["parameters"] += nbytes(_in_four_bits(program)) - nbytes(program.frozen)
        leaves = leaves_by_path(program.frozen)
        decoded = (
            x.in_features * x.out_features * leaves[x.weight.path].dtype.itemsize
            for x in program.adapted
        )
        rows.device["activations"] += max(decoded, default=0)  # one decoded kernel at a time

    def cost(self, of: ProgramBytes, choice: Choice) -> str:
        return f"{8 * NF4_BYTES:.3g} bits a weight; each kernel is decoded when it is read"


def _in_four_bits(program: TrainingProgram) -> Any:
    """Shapes of the base with its adapted kernels in NF4."""
    names = "|".join(re.escape(layer.name) for layer in program.adapted)
    try:
        return quantize(program.frozen, names, table=program.base_table)
    except (JaxkfacError, ValueError, TypeError) as error:
        raise UnavailableError(first_line(error)) from None


# Options in the order of the search, cheapest first: among sets of one size, the one whose most
# expensive option is cheapest wins. Accumulation costs no arithmetic, the host its own time, sums
# in bfloat16 a few roundings, remat a third of a gradient, bfloat16 digits (of eigenvectors fewer
# than of everything), bases on the host a transfer of all of them, a low rank what it drops, a
# budget whole passes; adapters train another model, and NF4 changes that model again.
OPTIONS: dict[str, Option] = {
    option.name: option
    for option in (
        *(Accumulation(), Host(), HalfAccumulators(), Remat(), HalfBases(), HalfPrecision()),
        *(HostBases(), LowRank(), Budget(), Adapters(), Nf4()),
    )
}
OPTION_NAMES = tuple(OPTIONS)


def ordered(names: frozenset[str]) -> list[Option]:
    """The options with these names, cheapest first."""
    return [option for name, option in OPTIONS.items() if name in names]
