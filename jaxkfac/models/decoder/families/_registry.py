"""The model types that are covered."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from jaxkfac.models.decoder.families._gemma2 import gemma2
from jaxkfac.models.decoder.families._gemma3 import gemma3_text
from jaxkfac.models.decoder.families._llama import llama
from jaxkfac.models.decoder.families._mistral import mistral
from jaxkfac.models.decoder.families._phi3 import phi3
from jaxkfac.models.decoder.families._qwen2 import qwen2
from jaxkfac.models.decoder.families._qwen3 import qwen3

# From a ``config.json`` to the options of ``DecoderConfig`` that its type decides. What it does not
# name is read the same way for all.
Reader = Callable[[Mapping[str, Any]], dict[str, Any]]

FAMILIES: Mapping[str, Reader] = MappingProxyType(
    {
        reader.__name__: reader
        for reader in (phi3, llama, mistral, qwen2, qwen3, gemma2, gemma3_text)
    }
)


def model_types() -> str:
    """Their names, for an error."""
    return ", ".join(FAMILIES)
