"""The chemical elements, embedded: facts that a language model can be taught and asked."""

import csv
import hashlib
from importlib import resources
from typing import NamedTuple

ELEMENTS_SHA256 = "300f6826084160244df36b746737e2325de9146a86e65100e9e34495dae38903"
"""Digest of the embedded file."""


class Element(NamedTuple):
    """A row of the periodic table.

    Attributes:
        number: Atomic number, protons.
        symbol: One or two letters.
        name: As IUPAC spells it, lower case.
        group: 1 to 18; ``None`` for lanthanides and actinides.
        period: 1 to 7.
        state: At room temperature: ``"solid"``, ``"liquid"``, ``"gas"`` or ``"unknown"``.
        category: Such as ``"noble gas"``; ``"unknown"`` for the heaviest ones.
    """

    number: int
    symbol: str
    name: str
    group: int | None
    period: int
    state: str
    category: str


def load_elements() -> tuple[Element, ...]:
    """All 118 elements, in the order of their numbers.

    Returns:
        118 rows; ``jaxkfac/data/elements.txt`` says what they rest on.

    Raises:
        ValueError: the embedded file does not have the digest ``ELEMENTS_SHA256``.

    Example:
        >>> load_elements()[25].symbol
        'Fe'
    """
    content = resources.files("jaxkfac.data").joinpath("elements.csv").read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != ELEMENTS_SHA256:
        raise ValueError(
            f"jaxkfac/data/elements.csv is damaged: sha256 {digest}, expected {ELEMENTS_SHA256}; "
            "reinstall jaxkfac"
        )
    return tuple(_element(row) for row in csv.DictReader(content.decode("ascii").splitlines()))


def _element(row: dict[str, str]) -> Element:
    return Element(
        number=int(row["number"]),
        symbol=row["symbol"],
        name=row["name"],
        group=int(row["group"]) if row["group"] else None,
        period=int(row["period"]),
        state=row["state"],
        category=row["category"],
    )
