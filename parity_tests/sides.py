"""Both sides of one problem in one dtype on one device; what is computed once is kept."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

import jaxkfac as jk
import torch_ref.curvature
import torch_ref.factors
from parity_tests.layout import Twin, nested
from parity_tests.models import PROBLEMS
from parity_tests.precision import TORCH_DTYPE, torch_device
from parity_tests.problem import Data, Option

SAMPLES = 2  # of labels, for the sampled Fisher


class Collected(NamedTuple):
    """What jaxkfac gives for one batch."""

    value: Any
    grads: Any
    factors: dict[Option, jk.Factors]
    mc: jk.Factors
    exact: jk.Factors | None


class Sides:
    """One problem on both sides.

    Methods named ``our_...`` ask jaxkfac, the others torch_ref. Everything must be called
    inside :func:`parity_tests.precision.precision`.
    """

    def __init__(self, problem: str, dtype: str, device: str):
        self.problem = PROBLEMS[problem]
        self.dtype, self.device = dtype, torch_device(device)
        self._kept: dict[Any, Any] = {}
        weights = self.problem.weights()
        self.model = self.problem.reference().to(self.device, TORCH_DTYPE[dtype])
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(torch.from_numpy(weights[name]))
        self.params = jax.tree.map(self._ours, self.problem.parameters(weights))
        likelihood = self.problem.likelihood
        self.likelihood = getattr(torch_ref.factors, likelihood)()
        self.loss = torch_ref.factors.fisher_loss(self.likelihood)
        self.objective = jk.Objective(self.problem.apply(), getattr(jk, likelihood)())

    def kept(self, key: Any, make: Any) -> Any:
        """``make()``, once for each key."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    # ---------------------------------------------------------------- data

    def data(self, seed: int = 0) -> Data:
        return self.kept(("data", seed), lambda: self.problem.data(seed))

    def batch(self, seed: int = 0) -> tuple:
        """For PyTorch: ``(inputs, targets)`` or ``(inputs, targets, mask)``."""
        data = self.data(seed)
        inputs = data.inputs
        if isinstance(inputs, dict):
            inputs = {name: self.tensor(x) for name, x in inputs.items()}
        else:
            inputs = self.tensor(inputs)
        batch = inputs, self.tensor(data.targets)
        return batch if data.mask is None else (*batch, self.tensor(data.mask))

    def our_batch(self, seed: int = 0) -> tuple:
        """The same numbers for jaxkfac."""
        data = self.data(seed)
        batch = jax.tree.map(self._ours, (data.ours, data.targets))
        return batch if data.mask is None else (*batch, jnp.asarray(data.mask))

    def our_positions(self, seed: int = 0) -> Any:
        positions = None if self.problem.marks else self.data(seed).positions
        return None if positions is None else jnp.asarray(positions)

    def tensor(self, x: np.ndarray) -> torch.Tensor:
        """On the device; floating numbers in this problem's dtype."""
        tensor = torch.from_numpy(np.ascontiguousarray(x)).to(self.device)
        return tensor.to(TORCH_DTYPE[self.dtype]) if tensor.is_floating_point() else tensor

    @property
    def tensor_dtype(self) -> torch.dtype:
        return TORCH_DTYPE[self.dtype]

    def _ours(self, x: np.ndarray) -> jax.Array:
        return jnp.asarray(x, self.dtype) if x.dtype.kind == "f" else jnp.asarray(x)

    def labels(self, seed: int = 0) -> np.ndarray:
        """``(samples, *targets)``, drawn by PyTorch from the model's outputs."""

        def draw() -> np.ndarray:
            generator = torch.Generator(self.device).manual_seed(3)
            outputs = self.outputs(seed)
            drawn = [self.likelihood.sample(outputs, generator) for _ in range(SAMPLES)]
            return torch.stack(drawn).cpu().numpy()

        return self.kept(("labels", seed), draw)

    def outputs(self, seed: int = 0) -> torch.Tensor:
        inputs = self.batch(seed)[0]
        with torch.no_grad():
            return self.model(**inputs) if isinstance(inputs, dict) else self.model(inputs)

    # ---------------------------------------------------------------- factors and gradients

    def ours(self, seed: int = 0) -> Collected:
        """Value, gradient and every kind of factors, from one compiled program."""
        return self.kept(
            ("ours", seed),
            lambda: self._program(
                self.params,
                self.our_batch(seed),
                self.our_positions(seed),
                self._ours(self.labels(seed)),
            ),
        )

    @functools.cached_property
    def _program(self) -> Any:
        def collector(**options: Any) -> Any:
            return jk.value_grad_and_factors(self.objective, **options)

        collectors: dict[Option, Any] = {
            (sharing, bias): collector(sharing=sharing, bias=bias)
            for sharing, bias in self.problem.options
        }
        small = self.problem.likelihood == "Categorical" and not self.problem.marks

        def run(params: Any, batch: Any, positions: Any, labels: Any) -> Collected:
            found = {o: c(params, batch, positions=positions) for o, c in collectors.items()}
            mc = collector(fisher="mc")(params, batch, positions=positions, labels=labels)
            exact = None
            if small:
                exact = collector(fisher="exact")(params, batch, positions=positions).factors
            value, grads, _ = found[self.problem.options[0]]
            return Collected(value, grads, {o: f.factors for o, f in found.items()}, mc[2], exact)

        return jax.jit(run)

    def our_sampled(self, labels: np.ndarray) -> jk.Factors:
        """The sampled Fisher of jaxkfac from given labels ``(samples, *targets)``."""
        collect = jax.jit(jk.value_grad_and_factors(self.objective, fisher="mc"))
        batch, positions = self.our_batch(), self.our_positions()
        return collect(self.params, batch, positions=positions, labels=self._ours(labels)).factors

    def factors(self, option: Option = ("expand", "joint"), seed: int = 0) -> dict[str, Any]:
        """On the documents' scale."""
        return self.kept(
            ("factors", option, seed), lambda: self.collect(self.batch(seed), option, seed)
        )

    def collect(self, batch: Any, option: Option, seed: int = 0, loss: Any = None) -> Any:
        """torch_ref's factors of any batch that has the positions of ``seed``."""
        positions, (sharing, bias) = self.data(seed).positions, option
        return torch_ref.factors.collect_factors(
            self.model,
            loss or self.loss,
            batch,
            sharing=sharing,
            bias=bias,
            mask=None if positions is None else self.tensor(positions),
            gram_dtype=torch.float32 if self.dtype == "bfloat16" else None,
        )

    def sum_factors(self, option: Option = ("expand", "joint"), seed: int = 0) -> dict[str, Any]:
        """On jaxkfac's scale."""
        terms = self.data(seed).loss_terms
        return torch_ref.factors.to_sum_scale(self.factors(option, seed), loss_terms=terms)

    def value(self, seed: int = 0) -> torch.Tensor:
        return self.loss(self.model, self.batch(seed)).detach()

    def gradients(self, bias: Any = "joint", seed: int = 0) -> dict[str, Any]:
        """torch_ref's gradient matrices of the mean loss."""

        def compute() -> dict[str, Any]:
            self.model.zero_grad()
            self.loss(self.model, self.batch(seed)).backward()
            names = [module for twin in self.problem.twins for module in twin.modules]
            found = torch_ref.factors.read_gradients(self.model, dict.fromkeys(names), bias=bias)
            for name in (name for names in self.problem.beside.values() for name in names):
                grad = self.model.get_parameter(name).grad
                found[name] = torch_ref.factors.LayerGradient(grad)
            self.model.zero_grad()
            return found

        return self.kept(("gradients", bias, seed), compute)

    # ---------------------------------------------------------------- eigenbases

    def our_bases(
        self,
        option: Option = ("expand", "joint"),
        max_condition: float = math.inf,
        floor: float = 0.0,
        seed: int = 0,
    ) -> jk.Eigenbases:
        return self.kept(
            ("our bases", option, max_condition, floor, seed),
            lambda: jk.eigendecompose(
                self.ours(seed).factors[option], max_condition=max_condition, floor=floor
            ),
        )

    def bases(
        self,
        option: Option = ("expand", "joint"),
        max_condition: float = math.inf,
        floor: float = 0.0,
        seed: int = 0,
    ) -> dict[str, torch_ref.curvature.LayerBasis]:
        """Of the factors on jaxkfac's scale."""
        return self.kept(
            ("bases", option, max_condition, floor, seed),
            lambda: torch_ref.curvature.decompose_factors(
                self.sum_factors(option, seed),
                max_condition=max_condition,
                damping=floor,
                device=self.device,
            ),
        )

    # ---------------------------------------------------------------- between the two

    def name(self, twin: Twin) -> str:
        """The name of a layer in jaxkfac; a tied table has one for each way it is read."""
        kind = {"tied head": "dense"}.get(twin.kind, twin.kind)
        layers = self.ours().factors[self.problem.options[0]].layers
        return next(x.name for x in layers if x.weight.path == twin.kernel and x.kind == kind)

    def tree(self, gradients: Any) -> dict[str, Any]:
        """A gradient of torch_ref as a tree of jaxkfac, in NumPy."""
        leaves = {path: x for t in self.problem.twins for path, x in t.leaves(gradients).items()}
        rest = {name: np.asarray(x.weight.detach().cpu()) for name, x in gradients.items()}
        return nested(leaves | self.problem.leaves_beside(rest))


class Workshop:
    """The sides of every problem, made when first asked for."""

    def __init__(self) -> None:
        self._sides: dict[Any, Sides] = {}

    def sides(self, problem: str, dtype: str, device: str, *, tf32: bool = False) -> Sides:
        key = problem, dtype, device, tf32
        if key not in self._sides:
            self._sides[key] = Sides(problem, dtype, device)
        return self._sides[key]
