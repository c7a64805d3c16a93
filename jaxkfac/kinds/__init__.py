"""The kinds of layers, one class each: how a use is found, its rows, its squares, its slots."""

from jaxkfac.interception import register_kind
from jaxkfac.kinds._bias import Bias
from jaxkfac.kinds._convolution import Convolution
from jaxkfac.kinds._dense import Dense
from jaxkfac.kinds._elementwise import Elementwise
from jaxkfac.kinds._embedding import Embedding
from jaxkfac.kinds._scale import Scale
from jaxkfac.kinds._two_sided import TwoSided
from jaxkfac.kinds._uncovered import Uncovered

for _kind in (Dense(), Convolution(), Embedding(), Scale(), Bias(), Uncovered()):
    register_kind(_kind)

__all__ = [
    "Bias",
    "Convolution",
    "Dense",
    "Elementwise",
    "Embedding",
    "Scale",
    "TwoSided",
    "Uncovered",
]
