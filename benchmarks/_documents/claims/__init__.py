"""The claims of the five documents, one file each."""

from benchmarks._documents._claim import Claim
from benchmarks._documents.claims import _clipping, _few_shot, _flan_t5_xl, _kfac_7b, _phi3_lora

CLAIMS: tuple[Claim, ...] = (
    *_kfac_7b.CLAIMS,
    *_clipping.CLAIMS,
    *_flan_t5_xl.CLAIMS,
    *_few_shot.CLAIMS,
    *_phi3_lora.CLAIMS,
)

__all__ = ["CLAIMS"]
