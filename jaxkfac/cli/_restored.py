"""A checkpoint brought back to life: its problem, parameters and factor averages."""

import dataclasses
from typing import Any, NamedTuple

import jax

import jaxkfac as jk
from jaxkfac.cli._checkpoint import Checkpoint
from jaxkfac.cli._loop import total_updates
from jaxkfac.cli._options import Experiment, older
from jaxkfac.cli._problem import DigitsProblem, build_optimizer, digits_problem
from jaxkfac.cli._run_state import restore_state
from jaxkfac.cli._train import factor_average

PyTree = Any


class Restored(NamedTuple):
    """What an analysis starts from.

    Attributes:
        experiment: What the run was asked to do.
        problem: Data, model and objective.
        params: Parameters at the checkpoint.
        factors: The running average of the factors.
    """

    experiment: Experiment
    problem: DigitsProblem
    params: PyTree
    factors: jk.Factors

    def decompose(self, factors: jk.Factors, max_condition: float | None) -> jk.Eigenbases:
        """Eigenvalues only, clipped at ``max_condition`` or as in the run."""
        kappa = self.experiment.kfac.max_condition if max_condition is None else max_condition
        return jk.eigendecompose(factors, max_condition=kappa, placement="host", vectors=False)


def restore(checkpoint: Checkpoint) -> Restored:
    """Rebuild what a K-FAC checkpoint was written from, and put its values there.

    Raises:
        ValueError: the checkpoint holds no factors, or no update has been made yet.
    """
    if checkpoint.optimizer != "kfac":
        raise ValueError(
            f"this checkpoint is of {checkpoint.optimizer}, which keeps no factors; analyze the "
            "kfac folder beside it"
        )
    if checkpoint.step == 0:
        raise ValueError("this checkpoint is from before the first update: it holds no factors")
    experiment = experiment_from(checkpoint.config)
    problem = digits_problem(experiment)
    tx = build_optimizer("kfac", experiment, problem, total_updates(experiment, problem))
    template = jax.eval_shape(tx.init, problem.shapes)
    params, state = restore_state(checkpoint, problem.shapes, template, checkpoint.config)
    return Restored(experiment, problem, params, factor_average(state))


def experiment_from(config: dict[str, Any]) -> Experiment:
    """The experiment that :func:`as_config` has written down."""
    default = Experiment()
    known = {field.name for field in dataclasses.fields(Experiment)}
    if unknown := config.keys() - known:
        raise ValueError(f"this checkpoint has options of another version: {sorted(unknown)}")
    split = {"split_seed": older(config)["split_seed"]}
    return Experiment(
        **{
            name: dataclasses.replace(getattr(default, name), **x) if isinstance(x, dict) else x
            for name, x in (split | config).items()
        }
    )
