"""Curvature that lives on the host: streamed averages, decomposed while training goes on."""

from jaxkfac.curvature.host._options import (
    HostBytes,
    HostOptions,
    service_bytes,
    widening_bytes,
)
from jaxkfac.curvature.host._service import HostCurvature

__all__ = ["HostBytes", "HostCurvature", "HostOptions", "service_bytes", "widening_bytes"]
