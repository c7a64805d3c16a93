"""AdamW of optax."""

import optax

from benchmarks.optimizers._method import Method, first_order

ADAMW = Method(
    name="adamw",
    title="AdamW",
    settings=tuple({"learning_rate": rate} for rate in (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)),
    run=first_order(lambda setting: optax.adamw(setting["learning_rate"])),
)
