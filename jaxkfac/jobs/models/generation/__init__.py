"""Token by token generation for any model: most likely, sampled, or with beams."""

from jaxkfac.jobs.models.generation._generation import (
    EarlyStopping,
    TokenChoice,
    beam_search,
    check_temperature,
    choose,
    continued,
    end_ids,
    generated_ids,
    ids_of,
    padded_length,
    require_cache,
)

__all__ = [
    "EarlyStopping",
    "TokenChoice",
    "beam_search",
    "check_temperature",
    "choose",
    "continued",
    "end_ids",
    "generated_ids",
    "ids_of",
    "padded_length",
    "require_cache",
]
