"""AdamW of optax."""

import optax

from benchmarks.optimizers._method import Method, constant, first_order

SETTINGS = tuple({"learning_rate": rate} for rate in (3e-4, 1e-3, 3e-3, 1e-2, 3e-2))

ADAMW = Method(
    name="adamw",
    title="AdamW",
    settings=SETTINGS,
    run=first_order(lambda setting: optax.adamw(setting["learning_rate"])),
    documented=constant([{"learning_rate": 3e-3}]),  # the example of optax.adamw
    choices=SETTINGS + constant(SETTINGS),
)
