"""What each ``model_type`` of a ``config.json`` says of a decoder; a file for each."""

from jaxkfac.models.decoder.families._registry import FAMILIES, Reader, model_types

__all__ = ["FAMILIES", "Reader", "model_types"]
