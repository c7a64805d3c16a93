"""What a service consists of beside its threads."""

import dataclasses

import jax
import numpy as np

from jaxkfac._errors import nearest
from jaxkfac.curvature._home import Home
from jaxkfac.curvature.host._average import Averages
from jaxkfac.curvature.host._current import Current
from jaxkfac.curvature.host._decompose import Decomposer
from jaxkfac.curvature.host._layout import Layout, Place
from jaxkfac.curvature.host._monitor import Monitor
from jaxkfac.curvature.host._options import Options
from jaxkfac.curvature.host._refresh import Schedule
from jaxkfac.curvature.host._store import Store
from jaxkfac.curvature.host._work import Work
from jaxkfac.factors._factors import Factors


@dataclasses.dataclass
class Parts:
    """Everything a service remembers.

    Until the first refresh a push may bring new layers, because each pass of a collection under
    a byte budget knows only its own; then, or with ``like``, the layout is ``complete``.
    """

    options: Options
    monitor: Monitor
    schedule: Schedule
    store: Store
    current: Current
    decomposer: Decomposer
    layout: Layout | None = None
    averages: Averages | None = None
    complete: bool = False
    work: Work | None = None
    seen: set[Place] = dataclasses.field(default_factory=set)
    homes: dict[Place, Home] = dataclasses.field(default_factory=dict)

    def layout_with(self, factors: Factors) -> Layout:
        """The layout once ``factors`` have been pushed; nothing is changed yet.

        Raises:
            ValueError: they hold other layers than the ones there are.
        """
        if self.layout is None:
            return Layout(factors.layers, factors.bias)
        layout = self.layout.merged(factors)
        if self.complete and layout is not self.layout:
            name = layout.layers[len(self.layout.layers)].name
            known = nearest(name, [layer.name for layer in self.layout.layers])
            raise ValueError(
                f"factors have the layer {name!r}, which was not expected; the nearest are {known}"
            )
        return layout

    def use_layout(self, layout: Layout, *, double: bool) -> None:
        """Make room for the averages of ``layout``, if the budget has it.

        Args:
            layout: The entries.
            double: Whether any is float64.

        Raises:
            ValueError: it has not.
        """
        self.store.require(*_needs(layout, self.options, 8 if double else 4))
        self.layout = layout
        if self.averages is None:
            decay, storage = self.options.decay, self.options.storage
            self.averages = Averages(layout, decay, storage, self.store)
        self.averages.layout = layout

    def new_work(self, group: int | None) -> Work:
        """What a refresh of ``group`` decomposes.

        Raises:
            ValueError: a factor of it has never been pushed.
        """
        assert self.layout is not None
        stagger = self.options.stagger
        blocks = (
            list(self.layout.blocks.values())
            if group is None
            else self.layout.groups(stagger)[group]
        )
        absent = next((b.source for b in blocks if b.source.place not in self.seen), None)
        if absent is not None:
            raise ValueError(
                f"a refresh needs {absent.name}, which has never been pushed: pushes of one step "
                "may each hold a part of the layers, and together must hold all of them"
            )
        self.complete = True
        previous = {}
        if self.options.reuse_tolerance is not None:
            for block in blocks:
                if block.source.dense and block.place in self.current.tables:
                    previous[block.place] = self.current.tables[block.place].vectors
        return Work(blocks, self.homes, previous, self.decomposer, self.store, self.monitor)


def _needs(layout: Layout, options: Options, itemsize: int) -> tuple[int, dict[str, int]]:
    """Bytes that are in memory whatever happens, and bytes that may lie on disk."""
    entries = layout.entries.values()
    whole = {e: itemsize * (2 if e.dense else 1) * e.elements for e in entries}
    largest = max((entry.size for entry in entries if entry.dense), default=0)
    workspace = (4 * options.workers + 1) * itemsize * largest**2
    in_flight = max(options.in_flight_bytes, *whole.values(), 0)
    folded = sum(entry.elements for entry in entries)
    folded *= 2 if options.storage == "bfloat16" else itemsize
    bases = sum(size for entry, size in whole.items() if entry.dense)
    return workspace + min(in_flight, sum(whole.values())), {
        "averages": folded,
        "snapshots": folded,  # the first refresh is of all groups
        "bases in work": bases,
    }


def is_double(factors: Factors) -> bool:
    """Whether any array is float64."""
    return any(x.dtype == np.float64 for x in jax.tree.leaves(factors))
