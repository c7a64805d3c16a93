"""SOAP, from its paper."""

from benchmarks.optimizers._method import Method, first_order
from benchmarks.optimizers._soap import soap

SOAP = Method(
    name="soap",
    title="SOAP",
    settings=tuple({"learning_rate": rate} for rate in (3e-4, 1e-3, 3e-3, 1e-2)),
    run=first_order(lambda setting: soap(setting["learning_rate"])),
)
