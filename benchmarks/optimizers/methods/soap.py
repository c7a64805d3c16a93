"""SOAP, from its paper; sides over 512 are left to Adam.

On the CPU the eigenvectors of larger ones cost more than all of a short training: one step of the
autoencoder, with sides of 1000, took 20 s. Only the autoencoder has such sides.
"""

from benchmarks.optimizers._method import Method, constant, first_order
from benchmarks.optimizers._soap import soap

SETTINGS = tuple({"learning_rate": rate, "largest": 512} for rate in (3e-4, 1e-3, 3e-3, 1e-2, 3e-2))

SOAP = Method(
    name="soap",
    title="SOAP",
    settings=SETTINGS,
    run=first_order(lambda setting: soap(**setting)),
    documented=constant([{"learning_rate": 3e-3, "largest": 512}]),  # its authors' README
    choices=SETTINGS + constant(SETTINGS),
)
