"""What a scalar loss cannot give, and what one that marks its outputs cannot."""

from jaxkfac.factors._estimator import Estimator
from jaxkfac.factors._statistics import Scales, Sharing
from jaxkfac.interception import Traced


def check_marked(
    traced: Traced, estimator: Estimator, uncovered: str, loss_terms: int | None
) -> None:
    """Refuse options that do not go with marks, and labels that do not fit them."""
    if loss_terms is not None:
        raise ValueError(
            f"loss_terms={loss_terms} beside jk.mark_outputs, which counts its terms: leave one out"
        )
    if uncovered == "diagonal":
        raise ValueError(
            'uncovered="diagonal" runs each example by itself, which a scalar loss does not show: '
            "give a jk.Objective"
        )
    if estimator.labels is not None and len(estimator.labels) != len(traced.marks):
        raise ValueError(
            f"labels: expected a list with (samples, *targets) for each of the {len(traced.marks)} "
            f"marks, got {len(estimator.labels)}"
        )


def check_scalar_loss(
    estimator: Estimator, sharing: Sharing, scales: Scales, uncovered: str, terms: int | None
) -> None:
    """Refuse what needs a model's outputs, which a scalar loss does not show."""
    wrong = {
        "fisher": (estimator.name, estimator.needs_outputs),
        "sharing": (sharing, sharing != "expand"),
        "scales": (scales, scales != "diagonal"),
    }
    for name, (value, refused) in wrong.items():
        if refused:
            raise ValueError(
                f'{name}="{value}" needs the model\'s outputs: give a jk.Objective, not a '
                "scalar loss, or name them inside the loss with jk.mark_outputs"
            )
    if uncovered == "diagonal":
        raise ValueError('uncovered="diagonal" needs a jk.Objective, not a scalar loss')
    if terms is None or terms < 1:
        raise ValueError(
            f"loss_terms={terms}: expected the number of rows that the loss is the mean of, or "
            "jk.mark_outputs inside the loss"
        )
