"""Decoders for the harness lm-eval."""

from jaxkfac.jobs.models.evaluation._lm_eval import Requests, lm_eval_model

__all__ = ["Requests", "lm_eval_model"]
