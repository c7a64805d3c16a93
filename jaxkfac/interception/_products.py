"""Products seen through views: a bias that is added behind them still belongs to the product."""

from collections.abc import Sequence

from jaxkfac.interception._axes import Atoms
from jaxkfac.interception._compat import Eqn, read_order
from jaxkfac.interception._values import Data, Value

ProductAxes = tuple[Atoms | None, ...]  # as in ``Data.product_axes``

_KEEPS_PRODUCT = frozenset(
    "convert_element_type reshape transpose copy name squeeze broadcast_in_dim "
    "sharding_constraint reshard reduce_precision".split()
)


def without_product(value: Value) -> Value:
    """The value as one that no bias can be joined to."""
    if isinstance(value, Data) and value.product is not None:
        return Data(value.number, value.axes)
    return value


def follow_product(eqn: Eqn, value: Data) -> ProductAxes | None:
    """The product's parameter axes behind a view of the product, or ``None``."""
    name, before = eqn.primitive.name, value.product_axes
    if name not in _KEEPS_PRODUCT:
        return None
    if name == "transpose":
        return tuple(before[d] for d in eqn.params["permutation"])
    if name == "squeeze":
        return tuple(a for d, a in enumerate(before) if d not in eqn.params["dimensions"])
    if name in ("reshape", "broadcast_in_dim"):
        shape, target = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        order = read_order(eqn) if name == "reshape" else range(len(shape))
        axes, sizes = tuple(before[d] for d in order), [shape[d] for d in order]
        return _reshaped_product(axes, sizes, target)
    return before


def _reshaped_product(
    before: ProductAxes, shape: Sequence[int], target: Sequence[int]
) -> ProductAxes | None:
    """Axes kept by a reshape: rows may be regrouped, the parameter's axes may not."""
    out: list[Atoms | None] = []
    i = 0
    while i < len(shape) or len(out) < len(target):
        size = target[len(out)] if len(out) < len(target) else None
        if i < len(shape) and shape[i] == size:
            out.append(before[i])
            i += 1
        elif size == 1:
            out.append(None)
        elif i < len(shape) and shape[i] == 1 and not before[i]:
            i += 1
        else:  # rows regrouped: take axes from both sides until their sizes agree
            if i == len(shape) or size is None:
                return None
            have, want = shape[i], size
            group, i = [before[i]], i + 1
            out.append(None)
            while have != want:
                if have < want:
                    if i == len(shape):
                        return None
                    have, group, i = have * shape[i], [*group, before[i]], i + 1
                else:
                    if len(out) == len(target):
                        return None
                    want *= target[len(out)]
                    out.append(None)
            if any(group):
                return None
    return tuple(out)
