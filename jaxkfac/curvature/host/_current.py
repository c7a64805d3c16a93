"""The bases in use, and how new ones take their place."""

import warnings
from typing import Any

from jaxkfac._errors import NonFiniteFactorError
from jaxkfac.curvature._eigenbases import Eigenbases
from jaxkfac.curvature._home import NOWHERE, Home, bring_home
from jaxkfac.curvature.host._layout import Layout, Place
from jaxkfac.linalg import HostSpectrum, Spectrum

_TABLES = ("a", "a_without_ones", "g")


class Current:
    """The spectra in use.

    Args:
        max_condition: For reading the bases.
        floor: For reading the bases.
        keep_previous: How many refreshes in a row a spectrum may be kept because its
            decomposition failed.

    Attributes:
        tables: ``{place: spectrum, or the mean of a diagonal}``.
        kept: ``{block name: refreshes in a row that it was kept for}``.
    """

    def __init__(self, max_condition: float, floor: float, keep_previous: int) -> None:
        self._max_condition, self._floor = max_condition, floor
        self._keep_previous = keep_previous
        self.tables: dict[Place, Any] = {}
        self.kept: dict[str, int] = {}
        self._bases: Eigenbases | None = None

    def bases(self, layout: Layout) -> Eigenbases:
        """The bases; the same object until the next hand-over."""
        if self._bases is None:
            tables: dict[str, dict[str, Any]] = {t: {} for t in (*_TABLES, "diagonals")}
            for place in layout.blocks:
                tables[place.table][place.key] = self.tables[place]
            self._bases = Eigenbases(
                a=tables["a"],
                a_without_ones=tables["a_without_ones"],
                g=tables["g"],
                diagonals=tables["diagonals"],
                layers=layout.layers,
                bias=layout.bias,
                max_condition=self._max_condition,
                floor=self._floor,
            )
        return self._bases

    def take(self, bases: Eigenbases) -> None:
        """Use ``bases`` as they are."""
        self._bases = bases
        for table in _TABLES:
            for key, spectrum in getattr(bases, table).items():
                self.tables[Place(table, key)] = spectrum
        for key, diagonal in bases.diagonals.items():
            self.tables[Place("diagonals", key)] = diagonal

    def hand_over(
        self,
        results: dict[Place, HostSpectrum],
        failures: dict[Place, NonFiniteFactorError],
        homes: dict[Place, Home],
        layout: Layout,
    ) -> None:
        """Replace spectra one by one, dropping each old one before its successor arrives.

        Both dictionaries are emptied. What the caller still holds of the old bases lives on.

        Raises:
            NonFiniteFactorError: a decomposition failed, and there is nothing to keep or it
                has been kept for too long.
        """
        for place, error in list(failures.items()):
            self._keep(place, error, layout.blocks[place].name)
            del failures[place]
        self._bases = None
        for place in list(results):
            block = layout.blocks[place]
            home = homes.get(block.source.place, NOWHERE)
            self.tables.pop(place, None)
            values, vectors = results[place]
            if place.table == "diagonals":
                self.tables[place] = bring_home(values, home)
            else:
                columns = None if vectors is None else bring_home(vectors, home)
                self.tables[place] = Spectrum(bring_home(values, home), columns)
            del results[place], values, vectors
            self.kept.pop(block.name, None)

    def _keep(self, place: Place, error: NonFiniteFactorError, name: str) -> None:
        count = self.kept.get(name, 0) + 1
        if place not in self.tables or count > self._keep_previous:
            raise error
        self.kept[name] = count
        warnings.warn(
            f"{error}. The previous basis of {name} is kept, refresh {count} of at most "
            f"{self._keep_previous}",
            RuntimeWarning,
            stacklevel=5,  # whoever called the service
        )
