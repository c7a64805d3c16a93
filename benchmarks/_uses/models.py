"""The models of the problems in JAX, and how a job of ours reads its problem."""

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkfac as jk
from benchmarks._uses.problems import FIXED

DATA = ("inputs", "targets", "q_inputs", "q_targets")


def dense(p: Any, name: str, x: Any) -> Any:
    x = x @ p[f"{name}.w"]
    return x + p[f"{name}.b"] if f"{name}.b" in p else x


def linear(p: Any, x: Any) -> Any:
    return dense(p, "head", x)


def perceptron(p: Any, x: Any) -> Any:
    for i in range(2):
        x = jnp.tanh(dense(p, f"layers.{i}", x))
    return dense(p, "layers.2", x)


def resnet(fixed: Any) -> Any:
    """Batch norms are in evaluation mode, with statistics, scales and shifts that are fixed."""

    def convolved(p: Any, name: str, x: Any, stride: int = 1) -> Any:
        kernel = p[f"{name}.w"]
        sides = [(kernel.shape[0] // 2,) * 2] * 2
        x = jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), sides, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        mean, variance, scale, shift = (fixed[f"{name}.{part}"] for part in _STATISTICS)
        return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * scale + shift

    def apply(p: Any, x: Any) -> Any:
        x = jax.nn.relu(convolved(p, "stem", x))
        for i in range(sum(name.endswith("two.w") for name in p)):
            name, stride = f"blocks.{i}", 2 if i else 1
            y = jax.nn.relu(convolved(p, f"{name}.one", x, stride))
            skipped = convolved(p, f"{name}.skip", x, stride) if i else x
            x = jax.nn.relu(skipped + convolved(p, f"{name}.two", y))
        return dense(p, "head", x.mean((1, 2)))

    return apply


_STATISTICS = ("mean", "variance", "scale", "shift")


def normed(x: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5)


def transformer(heads: int, fixed: Any) -> Any:
    def apply(p: Any, ids: Any) -> Any:
        x = fixed["table"][ids] + fixed["places"]
        for i in range(sum(name.endswith("qkv.w") for name in p)):
            name = f"blocks.{i}"
            rows, length, width = x.shape
            parts = dense(p, f"{name}.qkv", normed(x)).reshape(rows, length, 3, heads, -1)
            q, k, v = jnp.moveaxis(parts, 2, 0)
            logits = jnp.einsum("bthd,bshd->bhts", q, k) / (width // heads) ** 0.5
            seen = jnp.tril(jnp.ones((length, length), bool))
            weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf))  # JAX's own is in float32
            mixed = jnp.einsum("bhts,bshd->bthd", weights, v)
            x = x + dense(p, f"{name}.out", mixed.reshape(rows, length, width))
            x = x + dense(p, f"{name}.down", jax.nn.gelu(dense(p, f"{name}.up", normed(x))))
        return dense(p, "head", normed(x))

    return apply


class Given:
    """What a job is given: ``PROBLEM.npz OUTPUT.npz`` as the words of its command."""

    def __init__(self) -> None:
        problem = dict(np.load(sys.argv[1]))
        self.settings = json.loads(str(problem.pop("settings")))
        if self.settings["dtype"] == "float64":
            jax.config.update("jax_enable_x64", True)
        arrays = {k: jnp.asarray(v) for k, v in problem.items()}
        self.data = {k: arrays.pop(k) for k in DATA}
        self.params = {k: v for k, v in arrays.items() if not k.endswith(FIXED)}
        self.fixed = {k: v for k, v in arrays.items() if k not in self.params}
        self._seconds, self._start = {}, _now()

    @property
    def objective(self) -> jk.Objective:
        kind = self.settings["kind"]
        model = {"linear": linear, "perceptron": perceptron}.get(kind)
        if kind == "resnet":
            model = resnet(self.fixed)
        elif kind == "transformer":
            model = transformer(self.settings["heads"], self.fixed)
        assert model is not None
        return jk.Objective(model, jk.Gaussian() if kind == "linear" else jk.Categorical())

    def batches(self) -> Iterator[tuple[Any, Any]]:
        for i in range(0, len(self.data["inputs"]), size := self.settings["batch_size"]):
            yield self.data["inputs"][i : i + size], self.data["targets"][i : i + size]

    def stage(self, name: str, done: Any) -> None:
        """``done`` is what the stage has computed; the next one begins."""
        jax.block_until_ready(jax.tree.leaves(done))
        now = _now()
        self._seconds[name] = [b - a for a, b in zip(self._start, now, strict=True)]
        self._start = now

    def finish(self, found: dict[str, Any], versions: dict[str, str] | None = None) -> None:
        np.savez(sys.argv[2], **{k: np.asarray(v) for k, v in found.items()})
        said = {"seconds": self._seconds, "versions": versions or {"jax": jax.__version__}}
        print(json.dumps(said))


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()
