"""The commands: train, finetune, analyze, adapter, plan, models, doctor."""

from jaxkfac.jobs.cli._main import main

__all__ = ["main"]
