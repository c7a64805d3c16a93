"""Tokens chosen one after the other, whatever the model: likeliest, drawn, or by beams."""

from jaxkfac.models.generation._beams import EarlyStopping, beam_search
from jaxkfac.models.generation._choice import TokenChoice, choose
from jaxkfac.models.generation._loop import continued, is_in
from jaxkfac.models.generation._request import (
    check_temperature,
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
    "is_in",
    "padded_length",
    "require_cache",
]
