"""Muon of optax: matrices by orthogonalised momentum, everything else by Adam."""

import optax

from benchmarks.optimizers._method import Method, first_order

MUON = Method(
    name="muon",
    title="Muon",
    settings=tuple({"learning_rate": rate} for rate in (3e-3, 1e-2, 3e-2, 1e-1)),
    run=first_order(lambda setting: optax.contrib.muon(setting["learning_rate"])),
)
