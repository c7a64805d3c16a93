"""How large the programs are."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Size:
    """Of every program.

    Attributes:
        width: Of a dense layer, in and out; number of classes.
        depth: Dense layers of the network whose steps and factors are measured.
        rows: Of its batch.
        micro_batches: Into which accumulation cuts them.
        model_width: Of a dense layer of the model that is loaded, cast and saved.
        model_depth: Its layers.
        factor: Rows of the factor that is sent to the host.
        matrix: Rows of the factor that is decomposed.
        adapted: Layers with adapters.
        steps: Calls of the regulariser, and entries of the log.
    """

    width: int
    depth: int
    rows: int
    micro_batches: int
    model_width: int
    model_depth: int
    factor: int
    matrix: int
    adapted: int
    steps: int


SIZES = {
    "full": Size(256, 12, 8192, 16, 1280, 16, 6144, 1024, 32, 100),
    "small": Size(128, 6, 4096, 8, 512, 8, 1024, 256, 8, 10),
}
