"""What the optimizers are compared on. Peers read it in their environments: no import of ours."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

Arrays = dict[str, np.ndarray]


class Mark(Protocol):
    """Names outputs inside a loss: ``kind`` is "bernoulli", "categorical" or "gaussian"."""

    def __call__(self, kind: str, outputs: Any, targets: Any, weight: float = 1.0) -> Any:
        """The outputs, of whose -log p(target) the loss holds ``weight`` times the mean."""
        ...


def unmarked(kind: str, outputs: Any, targets: Any, weight: float = 1.0) -> Any:
    """For an optimizer that sees gradients alone."""
    return outputs


class Problem(NamedTuple):
    """A loss, its data, and how well its parameters do on data that no optimizer has seen.

    Attributes:
        name: On the command line and in the record.
        title: On the page.
        measure: What ``validate`` returns; less is better.
        fisher: Fisher type of K-FAC's factors, "mc" or "exact".
        data: Everything, as NumPy arrays; it runs in our environment alone.
        initial: ``initial(seed)``, the parameters, of NumPy arrays.
        batch: ``batch(data, seed, step)``, of NumPy arrays.
        loss: ``loss(params, batch, mark)``, a scalar.
        validate: ``validate(params, data)``, a scalar, to be compiled.
        steps: After which optimizers are compared at equal steps. Where K-FAC has been compared at
            equal time before, it is what each of its kinds took within that time (71 of the
            decoder's, 57 of the ResNet's, 103 of the autoencoder's; of Burgers' 1,024 and Poisson's
            582 the round numbers beside them), so that the first comparisons can be read beside it.
        costly: Whether a run at equal steps takes so long that peers are given the setting that
            seed 0 chose at equal time, in place of a choice among all of theirs.
        budget: CPU seconds after which they are compared at equal time; 0 where they are not.
    """

    name: str
    title: str
    measure: str
    fisher: str
    data: Callable[[], Arrays]
    initial: Callable[[int], Any]
    batch: Callable[[Arrays, int, int], Any]
    loss: Callable[[Any, Any, Mark], Any]
    validate: Callable[[Any, Any], Any]
    steps: int = 100
    costly: bool = False
    budget: float = 0.0


def rows(examples: int, size: int, seed: int, step: int) -> np.ndarray:
    """Which examples a step sees: every epoch in an order of its own, its rest left out."""
    epoch, place = divmod(step, examples // size)
    order = np.random.default_rng((seed, epoch)).permutation(examples)
    return order[place * size : (place + 1) * size]


def glorot(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Uniform, of the variance 2 / (inputs + outputs) over the last two axes."""
    receptive = int(np.prod(shape[:-2]))
    limit = np.sqrt(6 / (receptive * (shape[-2] + shape[-1])))
    return rng.uniform(-limit, limit, shape).astype(np.float32)


def dense_layers(seed: int, sizes: tuple[int, ...]) -> list[dict[str, np.ndarray]]:
    """Glorot's kernels, and biases of zero."""
    rng = np.random.default_rng(seed)
    shapes = zip(sizes, sizes[1:], strict=False)
    return [{"w": glorot(rng, n, m), "b": np.zeros(m, np.float32)} for n, m in shapes]
