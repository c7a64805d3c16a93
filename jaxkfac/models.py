"""Models of the command line and of the examples, by their public name."""

from jaxkfac.jobs.models import *
from jaxkfac.jobs.models import __all__ as __all__
