"""What the jobs are given: weights by name, data, and in what sizes."""

from typing import Any, Literal, NamedTuple, get_args

import numpy as np

Kind = Literal["linear", "perceptron", "resnet", "transformer"]
IMAGE = 8, 8, 3
FIXED = ("table", "places", ".mean", ".variance", ".scale", ".shift")


class Problem(NamedTuple):
    """A model and its data.

    Attributes:
        kind: Of the model.
        width: Of its layers.
        examples: To train on: to score, or to fit a posterior to.
        queries: To score them for, or to predict.
        batch_size: Examples at a time.
        depth: Blocks.
        length: Tokens of a row.
        vocabulary: Tokens there are.
        heads: Of attention.
        classes: That a target may be; of ``"linear"`` the numbers that one is.
    """

    kind: Kind
    width: int
    examples: int
    queries: int
    batch_size: int
    depth: int = 2
    length: int = 16
    vocabulary: int = 24
    heads: int = 2
    classes: int = 10

    def arrays(self, dtype: str) -> dict[str, np.ndarray]:
        """Weights by name, of matrices ``(in, out)``, of convolutions HWIO, and data."""
        assert self.kind in get_args(Kind), self.kind
        rng, n = np.random.default_rng(0), self.examples + self.queries
        model = _Weights(rng)
        inputs, targets = getattr(model, self.kind)(self, n)
        found: dict[str, Any] = model.found
        found |= {"inputs": inputs[: self.examples], "targets": targets[: self.examples]}
        found |= {"q_inputs": inputs[self.examples :], "q_targets": targets[self.examples :]}
        return {k: np.asarray(v, dtype if v.dtype.kind == "f" else None) for k, v in found.items()}


class _Weights:
    """Weights as they are drawn; each model's method returns its inputs and targets."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng, self.found = rng, {}

    def dense(self, name: str, rows: int, columns: int, *, bias: bool = True) -> None:
        self.found[f"{name}.w"] = self.rng.normal(size=(rows, columns)) / rows**0.5
        if bias:
            self.found[f"{name}.b"] = 0.1 * self.rng.normal(size=columns)

    def convolution(self, name: str, side: int, n_in: int, n_out: int) -> None:
        """A kernel, and the batch norm behind it."""
        kernel = self.rng.normal(size=(side, side, n_in, n_out)) / (side**2 * n_in) ** 0.5
        self.found[f"{name}.w"] = kernel
        for part, middle in (("mean", 0.0), ("variance", 1.0), ("scale", 1.0), ("shift", 0.0)):
            self.found[f"{name}.{part}"] = middle + 0.2 * self.rng.random(n_out)

    def linear(self, problem: Problem, n: int) -> tuple[Any, Any]:
        self.dense("head", problem.width, problem.classes)
        x = self.rng.normal(size=(n, problem.width))
        return x, x @ self.found["head.w"] + self.rng.normal(size=(n, problem.classes))

    def perceptron(self, problem: Problem, n: int) -> tuple[Any, Any]:
        width = problem.width
        sizes = (width // 2, width, width, problem.classes)
        for i, sides in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
            self.dense(f"layers.{i}", *sides)
        return self.rng.normal(size=(n, sizes[0])), self.rng.integers(0, problem.classes, n)

    def resnet(self, problem: Problem, n: int) -> tuple[Any, Any]:
        width = problem.width
        self.convolution("stem", 3, IMAGE[-1], width)
        for i in range(problem.depth):
            n_in, n_out = width * (1 if i == 0 else 2 ** (i - 1)), width * 2**i
            self.convolution(f"blocks.{i}.one", 3, n_in, n_out)
            self.convolution(f"blocks.{i}.two", 3, n_out, n_out)
            if i:
                self.convolution(f"blocks.{i}.skip", 1, n_in, n_out)
        self.dense("head", width * 2 ** (problem.depth - 1), problem.classes)
        return self.rng.normal(size=(n, *IMAGE)), self.rng.integers(0, problem.classes, n)

    def transformer(self, problem: Problem, n: int) -> tuple[Any, Any]:
        width = problem.width
        self.found["table"] = self.rng.normal(size=(problem.vocabulary, width))
        self.found["places"] = 0.5 * self.rng.normal(size=(problem.length, width))
        for i in range(problem.depth):
            self.dense(f"blocks.{i}.qkv", width, 3 * width)
            self.dense(f"blocks.{i}.out", width, width)
            self.dense(f"blocks.{i}.up", width, 4 * width)
            self.dense(f"blocks.{i}.down", 4 * width, width)
        self.dense("head", width, problem.vocabulary, bias=False)
        ids = self.rng.integers(0, problem.vocabulary, (n, problem.length + 1))
        return ids[:, :-1], ids[:, 1:]


INFLUENCE_EQUAL = {
    "perceptron": Problem("perceptron", 16, 200, 3, 50),
    "resnet": Problem("resnet", 4, 64, 3, 16),
    "transformer": Problem("transformer", 8, 64, 3, 16, length=6, vocabulary=11),
}
INFLUENCE_TIMED = {
    "perceptron": Problem("perceptron", 256, 2000, 50, 100),
    "resnet": Problem("resnet", 16, 2000, 50, 50, depth=3),
    "transformer": Problem("transformer", 128, 2000, 20, 25, depth=4, length=64, vocabulary=512,
                           heads=4),
}  # fmt: skip
LAPLACE_EQUAL = Problem("perceptron", 16, 200, 20, 50)
LAPLACE_TIMED = Problem("perceptron", 256, 2000, 1000, 100)
FULL_EQUAL = Problem("linear", 6, 50, 10, 50, classes=3)
FULL_TIMED = Problem("perceptron", 24, 200, 100, 100)
