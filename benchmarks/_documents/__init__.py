"""The claims of the five documents, one file each, and the rules by which they are judged."""

from benchmarks._documents import _clipping, _few_shot, _flan_t5_xl, _kfac_7b, _phi3_lora
from benchmarks._documents._claim import Claim, Context, Measured, Row, judge
from benchmarks._documents._rules import Verdict

CLAIMS: tuple[Claim, ...] = (
    *_kfac_7b.CLAIMS,
    *_clipping.CLAIMS,
    *_flan_t5_xl.CLAIMS,
    *_few_shot.CLAIMS,
    *_phi3_lora.CLAIMS,
)

__all__ = ["CLAIMS", "Claim", "Context", "Measured", "Row", "Verdict", "judge"]
