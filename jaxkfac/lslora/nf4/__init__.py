"""NF4: kernels in four bits, decoded one layer at a time inside the step.

``quantize`` a base model (or ``quantize_slices`` a stack while it is read from a file), attach
adapters as usual: ``jk.lslora.attach`` and ``jk.find_layers`` accept such trees.
"""

from jaxkfac.lslora.nf4._quantize import dequantize, quantize, quantize_slices
from jaxkfac.lslora.nf4._tensor import NF4, Nested, from_bitsandbytes, to_bitsandbytes

__all__ = [
    "NF4",
    "Nested",
    "dequantize",
    "from_bitsandbytes",
    "quantize",
    "quantize_slices",
    "to_bitsandbytes",
]
