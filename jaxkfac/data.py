"""Data of the command line and of the examples, by their public name."""

from jaxkfac.jobs.data import *
from jaxkfac.jobs.data import __all__ as __all__
