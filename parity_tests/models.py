"""Every paired model by name."""

from parity_tests.convolution_models import CONV1D, CONV2D, WIDE_PATCHES
from parity_tests.dense_models import (
    BINARY,
    CLASSIFIER,
    MASKED_REGRESSION,
    PROJECTIONS,
    REGRESSION,
    SCANNED,
    SHARED,
    WIDE,
)
from parity_tests.encoder_decoder_models import GATED, RELU
from parity_tests.few_shot_models import COSINE, PROTOTYPES
from parity_tests.problem import Problem
from parity_tests.recomputed_models import KEPT, RECOMPUTED
from parity_tests.token_models import MARKED, MASKED, TIED, TOKENS

PROBLEMS: dict[str, Problem] = {
    "classifier": CLASSIFIER,
    "regression": REGRESSION,
    "masked regression": MASKED_REGRESSION,
    "binary": BINARY,
    "wide": WIDE,
    "conv1d": CONV1D,
    "conv2d": CONV2D,
    "wide patches": WIDE_PATCHES,
    "tokens": TOKENS,
    "masked tokens": MASKED,
    "marked tokens": MARKED,
    "shared": SHARED,
    "scanned": SCANNED,
    "tied": TIED,
    "projections": PROJECTIONS,
    "blocks": KEPT,
    "recomputed blocks": RECOMPUTED,
    "encoder-decoder": RELU,
    "gated encoder-decoder": GATED,
    "prototypes": PROTOTYPES,
    "cosine transformer": COSINE,
}

# Its normalisations divide by small deviations one after the other: few_shot_test has its cases.
# Patches of 576 features differ from others in A alone: factors_test and averages_test have them.
PLAIN = [name for name in PROBLEMS if name not in ("cosine transformer", "wide patches")]
