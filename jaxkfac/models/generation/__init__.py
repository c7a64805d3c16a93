"""Tokens chosen one after the other, whatever the model: likeliest, drawn, or by beams."""

from jaxkfac.models.generation._beams import EarlyStopping, beam_search
from jaxkfac.models.generation._choice import TokenChoice, choose
from jaxkfac.models.generation._loop import continued, is_in

__all__ = ["EarlyStopping", "TokenChoice", "beam_search", "choose", "continued", "is_in"]
