"""The chemical elements, embedded: facts to teach a language model and to ask it about."""

from jaxkfac.jobs.data.elements._elements import (
    ELEMENTS_SHA256,
    Element,
    element_questions,
    element_records,
    load_elements,
)

__all__ = [
    "ELEMENTS_SHA256",
    "Element",
    "element_questions",
    "element_records",
    "load_elements",
]
