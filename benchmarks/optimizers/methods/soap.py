"""SOAP, from its paper; sides over 512 are left to Adam in half of the grid.

On the CPU the eigenvectors of larger ones cost more than all of a short training.
"""

from benchmarks.optimizers._method import Method, first_order
from benchmarks.optimizers._soap import soap

SOAP = Method(
    name="soap",
    title="SOAP",
    settings=tuple(
        {"learning_rate": rate, "largest": largest}
        for largest in (512, 10_000)
        for rate in (1e-3, 3e-3)
    ),
    run=first_order(lambda setting: soap(**setting)),
)
