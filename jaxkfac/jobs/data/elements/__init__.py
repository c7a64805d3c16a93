"""The chemical elements, embedded: facts to teach a language model, and questions about them."""

from jaxkfac.jobs.data.elements._elements import (
    Element,
    element_questions,
    element_records,
)

__all__ = [
    "Element",
    "element_questions",
    "element_records",
]
