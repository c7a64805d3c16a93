"""What a training holds on the device and on the host, row by row."""

import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxkfac.interception._paths import leaves_by_path
from jaxkfac.memory import bytes_text
from jaxkfac.optim import multi_steps
from jaxkfac.optim._accumulators import MemoryKind
from jaxkfac.planning._curvature_bytes import CurvatureBytes
from jaxkfac.planning._levers import Lever, Setting, UnavailableError
from jaxkfac.planning._optimizer import optimizer_state
from jaxkfac.planning._shapes import differentiable, nbytes, nelements
from jaxkfac.planning._variant import Variant

# 4 bits an element; per 64 elements an absmax of 8 bits, per 256 of those a float32.
NF4_BYTES = 1 / 2 + 1 / 64 + 4 / (64 * 256)

Compiled = Literal["all", "gradient", "none"]

ESTIMATED = ("activations", "workspace")


class Rows(NamedTuple):
    """Bytes by row."""

    device: dict[str, int]
    host: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Curvature:
    """What is done with factors.

    Attributes:
        vectors: Whether eigenvectors come back to the device, to precondition with.
        in_flight_bytes: Of ``HostCurvature``.
    """

    vectors: bool
    in_flight_bytes: int


@dataclasses.dataclass(frozen=True)
class Accumulation:
    """How micro-batches are accumulated.

    Attributes:
        steps: Of how many micro-batches a step the batch is one.
        dtype: Of :func:`jaxkfac.multi_steps`'s ``accumulator_dtype``.
        memory_kind: Of its ``accumulator_memory_kind``.
    """

    steps: int = 1
    dtype: Any = None
    memory_kind: MemoryKind = "device"


class Accounts:
    """The rows of one program under any setting that leads to it.

    Args:
        variant: The program.
        tx: The optimizer of what it trains.
        curvature: ``None`` where no factors are gathered.
        accumulation: Of the training as it stands.
    """

    def __init__(
        self,
        variant: Variant,
        tx: optax.GradientTransformation | None,
        curvature: Curvature | None,
        accumulation: Accumulation,
    ) -> None:
        self._variant, self._curvature = variant, curvature
        self._accumulation = accumulation
        self._accumulators: dict[tuple[bool, bool], int] = {}
        self._optimizer = optimizer_state(tx, variant.trained)
        self._of = None if curvature is None else CurvatureBytes(variant, curvature.in_flight_bytes)

    @property
    def factor_bytes(self) -> int:
        """Of all factors of one step."""
        return 0 if self._of is None else self._of.factors

    @property
    def smallest_budget(self) -> int:
        """The least ``max_factor_bytes``."""
        return 0 if self._of is None else self._of.smallest_budget

    @property
    def largest_budget(self) -> int:
        """The least ``max_factor_bytes`` under which there is one pass."""
        return 0 if self._of is None else self._of.largest_budget

    def rows(self, setting: Setting, budget: int, *, compiled: Compiled = "all") -> Rows:
        """Bytes of every row.

        Args:
            setting: The levers.
            budget: Bytes of factors on the device, where the setting has one.
            compiled: Of which program the activations are: ``"all"``, what is run;
                ``"gradient"``, a lower bound of it that does not depend on the budget;
                ``"none"``, zero without a compilation.

        Raises:
            UnavailableError: a lever needs factors, or another optimizer.
        """
        self._check(setting)
        variant = self._variant
        accumulators = self._accumulator_bytes(setting)
        on_host = self._accumulation.memory_kind == "pinned_host"
        host = {"accumulation": accumulators} if on_host and accumulators else {}
        device = {
            "parameters": nbytes(variant.trained) + self._base_bytes(setting),
            "gradients": nbytes(differentiable(variant.trained)),
            "optimizer": self._optimizer.nbytes,
            "accumulation": self._optimizer.accumulators + (0 if on_host else accumulators),
            "batch": nbytes(variant.batch) - nbytes(variant.frozen),
            "activations": self._activations(setting, budget, compiled),
        }
        if self._of is None:
            return Rows(device, host)
        if "host" in setting:
            host |= self._of.on_host
        elif "budget" in setting:
            host |= {"factors": self._of.factors}
        return Rows({**device, **self._curvature_rows(setting, budget, self._of)}, host)

    def cost(self, lever: Lever, setting: Setting, budget: int | None) -> str:
        """What a lever costs, in words."""
        match lever:
            case "accumulation":
                steps = setting.steps * self._accumulation.steps
                return f"{steps} micro-batches a step; the same arithmetic"
            case "host":
                assert self._of is not None
                held = bytes_text(sum(self._of.on_host.values()))
                return f"{held} of main memory; bases are those of some steps before"
            case "accumulator":
                return "means of gradients kept in 8 bits of mantissa: 0.4 % over 16 micro-batches"
            case "remat":
                return "one more forward pass: about 4/3 gradients"
            case "bf16":
                return "8 bits of mantissa in parameters, gradients and optimizer"
            case "budget":
                assert self._of is not None and budget is not None
                plan = self._of.passes(budget)
                return (
                    f"max_factor_bytes={budget}: {len(plan.passes)} passes, "
                    f"about {plan.gradients:.3g} gradients a step"
                )
            case "adapters":
                count, size = len(self._variant.adapted), nelements(self._variant.trained)
                return f"another model: {size:,} parameters beside {count} frozen kernels"
            case "nf4":
                return f"{8 * NF4_BYTES:.3g} bits a weight; each kernel is dequantised where read"

    def _check(self, setting: Setting) -> None:
        if self._optimizer.accumulators and setting.levers & {"accumulation", "accumulator"}:
            raise UnavailableError("the optimizer accumulates: give one micro-batch as batch")
        if "accumulator" in setting and self._accumulation.dtype == jnp.bfloat16:
            raise UnavailableError("the accumulators are in bfloat16 already")
        if self._of is None and setting.levers & {"host", "budget"}:
            raise UnavailableError("no factors are gathered")
        if "budget" in setting and "host" not in setting and self._optimizer.averages:
            raise UnavailableError(
                "the optimizer keeps the average of all factors on the device: with host only"
            )

    def _activations(self, setting: Setting, budget: int, compiled: Compiled) -> int:
        if compiled == "none":
            return 0
        if self._of is None or compiled == "gradient":
            kept = self._variant.gradient_temporaries
        elif "budget" in setting:
            kept = self._of.first_pass_temporaries(budget)
        else:
            kept = self._variant.factor_temporaries
        return kept + ("nf4" in setting) * self._largest_kernel

    def _accumulator_bytes(self, setting: Setting) -> int:
        """What ``multi_steps`` would allocate."""
        if setting.steps * self._accumulation.steps == 1:
            return 0
        # Where factors leave the device, the micro-batches of a step are added up on the host.
        gathered = self._of is not None and setting.levers.isdisjoint({"host", "budget"})
        known = (gathered, "accumulator" in setting)
        if known not in self._accumulators:
            tx = multi_steps(
                optax.identity(),
                2,
                like=self._variant.factors if gathered else None,
                accumulator_dtype=jnp.bfloat16 if known[1] else self._accumulation.dtype,
                accumulator_memory_kind=self._accumulation.memory_kind,
            )
            state = jax.eval_shape(tx.init, self._variant.trained)
            self._accumulators[known] = nbytes(state.accumulation.acc_grads)
        return self._accumulators[known]

    def _curvature_rows(self, setting: Setting, budget: int, of: CurvatureBytes) -> dict[str, int]:
        assert self._curvature is not None
        in_graph = self._optimizer.bases and "host" not in setting
        vectors = self._curvature.vectors or in_graph
        bases = of.bases if vectors else of.values
        if "budget" in setting:
            held = min(budget, of.factors)
        elif "host" in setting:  # this step's, and those of the last one that are still leaving
            held = of.factors + of.in_flight
        else:
            held = of.factors * (1 + self._optimizer.averages)
        if "host" in setting:
            workspace, bases = 0, bases if vectors else 0
        elif in_graph:  # the new bases beside the old
            workspace = of.workspace(together=True) + bases
        else:
            workspace = of.workspace(from_host="budget" in setting)
        return {"factors": held, "bases": bases, "workspace": workspace}

    def _base_bytes(self, setting: Setting) -> int:
        whole = nbytes(self._variant.frozen)
        if "nf4" not in setting:
            return whole
        for layer in self._variant.adapted:
            size = layer.weight.size
            whole += math.ceil(size * NF4_BYTES) - size * self._itemsize(layer.weight.path)
        return whole

    @property
    def _largest_kernel(self) -> int:
        """The one kernel that is dequantised at a time."""
        sizes = (
            x.in_features * x.out_features * self._itemsize(x.weight.path)
            for x in self._variant.adapted
        )
        return max(sizes, default=0)

    def _itemsize(self, path: str) -> int:
        return self._base_leaves[path].dtype.itemsize

    @functools.cached_property
    def _base_leaves(self) -> dict[str, Any]:
        return leaves_by_path(self._variant.frozen)
