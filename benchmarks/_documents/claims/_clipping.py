"""What the document on clipped eigenvalues claims."""

from benchmarks._documents._claim import Claim, Figure, Holds, Measured
from benchmarks._documents._clipping import (
    LARGE,
    jax_places,
    jax_rebuilt,
    jax_repeated,
    jax_seconds_on_the_host,
    jax_transposed,
    jax_whole,
    layers_left_out,
    more_milliseconds,
    over_layers,
    places,
    processors,
    rebuilt,
    repeated,
    scaled,
    seconds_on_the_host,
    transposed,
    whole,
)
from benchmarks._documents._kfac_7b import ORIGIN_OF_43_GB
from benchmarks._documents._rules import Agrees, Lies, Occurs, Removed

CLAIMS = (
    Claim(
        "clipping/rebuild-on-device",
        "Putting (Q λ) Qᵀ together on the host takes its temporaries off the device.",
        Removed(),
        "true",
        "Bytes beside the result: the scaled vectors are made on the host. The result comes back "
        "to the device, as the document says, and the host has a copy of the vectors besides.",
        rebuilt,
        jax_rebuilt,
    ),
    Claim(
        "clipping/matrix-64mb",
        "A float32 matrix of 4096 × 4096 takes 64 MB.",
        Lies(64, 64),
        "true",
        "Exactly 64 MiB.",
        Figure(lambda: LARGE, "MiB"),
        "the same arithmetic",
    ),
    Claim(
        "clipping/transpose",
        "The transposed vectors are another 64 MB.",
        Occurs(),
        "false",
        "A transposed matrix is a view of the same storage, and the product reads it so.",
        transposed,
        jax_transposed,
    ),
    Claim(
        "clipping/scaled-64mb",
        "The scaled vectors are another 64 MB.",
        Lies(64, 64),
        "true",
        "They are a matrix of their own.",
        scaled,
        "XLA may scale inside the product; see the row on the rebuild",
    ),
    Claim(
        "clipping/layer-200mb",
        "One layer takes 200 MB in all.",
        Lies(200, 200),
        "true",
        "Vectors, scaled vectors and the result: the sum is right, though two of its four parts "
        "are not.",
        whole,
        jax_whole,
    ),
    Claim(
        "clipping/sum-43gb",
        "Over many layers this adds up to an allocation of 43 GB.",
        Lies(8, 8),
        "false",
        "The number is the peak over eight layers, in units of one layer's peak. Each layer's "
        "temporaries are freed before the next one's are made, and one allocation is one tensor "
        "anyway.",
        lambda context: Measured((m := over_layers(context)).after / m.before, unit="times one"),
        "does not arise: one layer at a time is what `eigendecompose` dispatches",
        remark=ORIGIN_OF_43_GB,
    ),
    Claim(
        "clipping/same-matrix",
        "Where the product runs does not change the matrix, up to rounding.",
        Agrees(1e-6),
        "true",
        "Relative difference in float32 from NumPy's product on the host.",
        places,
        jax_places,
    ),
    Claim(
        "clipping/host-15ms",
        "On the host a matrix of 4096 rows is put together in 10 to 15 ms.",
        Lies(10, 15),
        "not decidable",
        "The product takes 2 n³ operations. Measured on two cores of our own.",
        seconds_on_the_host,
        jax_seconds_on_the_host,
        alone=True,
        holds=lambda context: Holds(processors(10, 15)),
    ),
    Claim(
        "clipping/more-10ms",
        "The host costs 5 to 10 ms more than the GPU's 5 ms for each large layer.",
        Lies(5, 10),
        "not decidable",
        "This is the row above minus the 5 ms. The vectors' way to the host and the matrix's "
        "way back, "
        "64 MiB each, are not in it.",
        more_milliseconds,
        "the row above",
        alone=True,
        holds=lambda context: Holds(processors(10, 15)),
    ),
    Claim(
        "clipping/slower-20",
        "The rebuild becomes 10 to 20 % slower.",
        Lies(10, 20),
        "false",
        "The document itself gives 5 ms on the device and at best 10 ms on the host, which is "
        "100 % slower.",
        Figure(lambda: 100 * (10 - 5) / 5, "%"),
        "the same arithmetic",
    ),
    Claim(
        "clipping/every-layer",
        "Every layer is clipped; none is left out.",
        Lies(0, 0),
        "true",
        "Counted are factors of the network whose eigenvalues are still below the bound.",
        layers_left_out,
        "every layer of the table has bases; what has none is an error",
    ),
    Claim(
        "clipping/deterministic",
        "The result is the same in every run.",
        Lies(0, 0),
        "true",
        "No entries differ, on one machine with one number of threads.",
        repeated,
        jax_repeated,
    ),
)
