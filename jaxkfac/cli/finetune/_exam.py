"""Examinations: validation loss, what a family of models is asked, and the nonlinearity."""

import abc
import functools
from typing import Any

import jax
import numpy as np

import jaxkfac as jk
from jaxkfac.data.choices import target_log_likelihoods
from jaxkfac.report import ExamRecord, FourierRecord, SampleRecord


class Examiner(abc.ABC):
    """Asks the model the same things at several updates; its programs are compiled once.

    Attributes:
        problem: What is trained.
        arguments: What was asked for.
    """

    def __init__(self, problem: Any, arguments: Any) -> None:
        self.problem, self.arguments = problem, arguments
        config, self._probe = problem.config, None
        if config is not None and config.fourier_placement != "none":
            first = problem.family.batch(problem.train.first())
            self._probe = problem.devices.whole(first[0])

        devices = problem.devices
        compiled = functools.partial(jax.jit, **devices.of_program())

        @compiled
        def each_token(params: Any, adapters: Any, batch: Any) -> jax.Array:
            inputs, targets, _ = batch
            return target_log_likelihoods(problem.adapted(params, adapters, inputs), targets)

        @compiled
        def nonlinearity(params: Any, adapters: Any, inputs: Any) -> Any:
            return jk.lslora.diagnose(adapters, problem.adapted, params, inputs)

        self._each_token, self._nonlinearity = each_token, nonlinearity

    @abc.abstractmethod
    def exam(self, step: int, adapters: Any) -> ExamRecord | None:
        """What is measured, or ``None`` if there is nothing to ask."""

    @abc.abstractmethod
    def samples(self, step: int, adapters: Any, *, count: int) -> list[SampleRecord]:
        """Answers to the first prompts that fit."""

    def nonlinearity(self, adapters: Any) -> Any:
        """Numbers of every slice's nonlinearity, on the device, or ``None`` where there is none."""
        if self._probe is None:
            return None
        settled = self.problem.devices.processes.settled
        return settled(self._nonlinearity(self.problem.params, adapters, self._probe))

    def log_likelihoods(self, adapters: Any, batch: Any) -> np.ndarray:
        """Of every target of a batch on the host."""
        given = self.problem.devices.whole(self.problem.family.batch(batch))
        return np.asarray(self._each_token(self.problem.params, adapters, given))

    def loss(self, adapters: Any) -> float | None:
        """Mean over the learnt tokens of the validation text, nats."""
        if self.problem.validation is None:
            return None
        batches = list(self.problem.validation.in_order())
        found = (self.log_likelihoods(adapters, x)[x.mask].sum(dtype=np.float64) for x in batches)
        return -sum(map(float, found)) / sum(batch.num_terms for batch in batches)


def fourier_record(step: int, found: Any) -> FourierRecord:
    """The record of what :meth:`Examiner.nonlinearity` has found, once it is on the host."""
    layers = {}
    for name, diagnosis in found.items():
        values = diagnosis._asdict()
        coefficients = np.asarray(values.pop("coefficients"))
        slices = coefficients.reshape(-1, coefficients.shape[-1])
        layers[name] = {"coefficients": slices.tolist()} | {
            key: np.asarray(x).reshape(-1).tolist() for key, x in values.items()
        }
    return FourierRecord(step, layers)
