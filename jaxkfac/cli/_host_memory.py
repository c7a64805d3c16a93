"""Main memory of a command at its end."""

from jaxkfac.memory import Stage, resident_bytes


def host_memory(stage: Stage) -> dict[str, int | None]:
    """``{"resident": now, "peak": the most since the stage began}``, bytes; ``None``: unknown."""
    now, peak = resident_bytes(), stage.resident_peak
    if now is None or peak is None:
        return {"resident": now, "peak": None}
    return {"resident": now, "peak": max(now, peak.nbytes)}
