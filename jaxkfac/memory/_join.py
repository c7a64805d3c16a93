"""Joining the processes of a run: what a script calls first, and the command line too."""

import os
import warnings
from typing import Any

import jax

# A process that fails alone leaves after the first, and the others notice after the second.
SHUTDOWN_SECONDS, HEARTBEAT_SECONDS = 30, 60


def join_processes(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    **options: Any,
) -> None:
    """Join the other processes of a run, as ``jaxkfac train --coordinator`` does.

    This is ``jax.distributed.initialize`` with three differences. A process that fails waits 30
    seconds for the others, where JAX's own limit is 300. A process that has been killed is missed
    after 60 seconds, where JAX's own limit is 100. JAX's preemption notifier is off, which
    takes SIGTERM away from Python: a scheduler's SIGTERM then does what the script says, and
    ends it where it says nothing. Call it before anything else of JAX's.

    Args:
        coordinator_address: ``HOST:PORT`` of process 0; without it JAX asks the cluster.
        num_processes: How many there are.
        process_id: Which one this is, from 0.
        **options: Further ones of ``jax.distributed.initialize``, which go before these.

    Raises:
        RuntimeError: JAX has looked for its devices already.
        ValueError: there is no address, and no cluster that JAX knows.

    Warns:
        UserWarning: in process 0, where the processes are on CPUs and ``PJRT_NPROC`` is not 1.
    """
    initialize_distributed(
        coordinator_address=coordinator_address,
        num_processes=num_processes,
        process_id=process_id,
        **options,
    )
    if jax.process_index() == 0 and (note := note_on_cpus(jax.devices()[0].platform)):
        warnings.warn(note, stacklevel=2)


def initialize_distributed(**options: Any) -> None:
    """``jax.distributed.initialize`` with shorter limits, and SIGTERM left to Python."""
    jax.config.update("jax_enable_preemption_service", False)
    limits: dict[str, Any] = {
        "shutdown_timeout_seconds": SHUTDOWN_SECONDS,
        "heartbeat_timeout_seconds": HEARTBEAT_SECONDS,
    }
    jax.distributed.initialize(**(limits | options))


def note_on_cpus(platform: str) -> str:
    """What to do about gloo's aborts between processes on CPUs, or nothing."""
    if platform != "cpu" or os.environ.get("PJRT_NPROC") == "1":
        return ""
    return (
        "processes on CPUs exchange through gloo; if it ends one with 'collective mismatch', set "
        "PJRT_NPROC=1 in the environment of each process, or start one with many devices"
    )
