"""Each documented fault and its documented remedy as they were, for measuring.

Only benchmarks import it. An option set one way gives a document's program before its change, the
other way after it: the numbers are the same, and those of this package. Each docstring names the
claims that the function is for, ``document/claim``. Bytes and operations are counted by
:class:`torch_ref.memory.track_storages`.
"""

from torch_ref.unfixed._clipping import clip_and_rebuild
from torch_ref.unfixed._few_shot import train
from torch_ref.unfixed._flan_t5_xl import cast_again, load, move_again
from torch_ref.unfixed._kfac_7b import collect, host_eigenvalues
from torch_ref.unfixed._lessons import (
    copy_model,
    diagnose_with_graph,
    full_batch_step,
    save_clones,
)
from torch_ref.unfixed._phi3_lora import diagnose, nonlinearity, recompute, regulariser, save

__all__ = [
    "cast_again",
    "clip_and_rebuild",
    "collect",
    "copy_model",
    "diagnose",
    "diagnose_with_graph",
    "full_batch_step",
    "host_eigenvalues",
    "load",
    "move_again",
    "nonlinearity",
    "recompute",
    "regulariser",
    "save",
    "save_clones",
    "train",
]
