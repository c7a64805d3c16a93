"""Options of the optimizers. Nothing heavy is imported here, so that help is quick."""

import dataclasses
from typing import Any, Literal

Fisher = Literal["empirical", "mc"]
DampingMode = Literal["exact", "factored", "pi"]
Optimizer = Literal["kfac", "adamw"]
_LABELS: dict[Fisher, str] = {"mc": "labels sampled from the model", "empirical": "given labels"}


def labels_sentence(fisher: Fisher) -> str:
    """Which labels K-FAC's factors are of, as the reports say it."""
    return f"K-FAC's factors use {_LABELS[fisher]}."


@dataclasses.dataclass(frozen=True)
class KfacOptions:
    """What `jaxkfac.kfac` takes, with a learning rate."""

    learning_rate: float
    """Largest learning rate."""
    damping: float = 0.1
    """In units of the squared gradient."""
    damping_mode: DampingMode = "exact"
    """Added to each product of eigenvalues, or its root to both factors; pi balances them."""
    decay: float = 0.95
    """Of the running average of the factors, per update."""
    refresh_every: int = 10
    """Updates between two eigendecompositions."""
    momentum: float = 0.9
    """Of the preconditioned gradient."""
    norm_constraint: float | None = 1e-2
    """Bound on a step's squared length in the Fisher metric, before momentum."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    max_condition: float = 1e6
    """Eigenvalues below the largest divided by this are raised to it."""

    def arguments(self) -> dict[str, Any]:
        """For `jaxkfac.kfac`, whose learning rate is a schedule."""
        names = {field.name for field in dataclasses.fields(KfacOptions)} - {"learning_rate"}
        return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True)
class AdamwOptions:
    """What `optax.adamw` takes."""

    learning_rate: float
    """Largest learning rate."""
    b2: float
    """Decay of the average of squared gradients."""
    weight_decay: float
    """Decoupled weight decay."""
