"""The claims of the five documents, what is measured for them, and the rules that judge them."""

from benchmarks._documents._claim import Claim, Context, Measured, Row, judge
from benchmarks._documents._rules import Verdict
from benchmarks._documents.claims import CLAIMS

__all__ = ["CLAIMS", "Claim", "Context", "Measured", "Row", "Verdict", "judge"]
