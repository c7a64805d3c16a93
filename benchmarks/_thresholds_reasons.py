"""Why a condition needs no parity or oracle case on some side: ``{its key: the reason}``."""

REASONS: dict[str, str] = {}
