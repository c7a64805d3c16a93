"""Attach adapters to a function: the same program, with a branch at every adapted product."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Integer, Key, UInt32

from jaxkfac._arguments import ArrayTree, check_arrays, check_function, leaves_by_path, with_leaves
from jaxkfac._errors import UnknownLayerError, instance_of, nearest
from jaxkfac.factors import takes_key
from jaxkfac.interception import Handler, Layer, Site, TraceCache, Traced, trace
from jaxkfac.interception.values import Slot, decoded_shapes, encoded_paths
from jaxkfac.lslora._bank import Bank
from jaxkfac.lslora._branch import BranchOptions, HandlerSums, SlotAdapter, adapted_product
from jaxkfac.lslora._config import Adapter, Adapters, Config, EmbeddingAdapter, only_adapters
from jaxkfac.lslora._modules import separated, tied_again, tied_value, ties_of, turned
from jaxkfac.lslora._nonlinearity import find_nonlinearity

# Folded into the caller's key, so that the model's own dropout draws other numbers.
DROPOUT = 0x15_10_4A


class Adapted:
    """The result of :func:`attach`: ``adapted(params, adapters, inputs, key=, adapter=)``.

    Attributes:
        config: The settings.
    """

    def __init__(
        self, apply_fn: Callable[..., Any], config: Config, *, forward_mode: bool = False
    ) -> None:
        self.config = config
        self._apply, self._forward_mode = apply_fn, forward_mode
        self._traces: TraceCache[Traced] = TraceCache()

    def __call__(
        self,
        params: ArrayTree,
        adapters: Adapters | Bank,
        inputs: ArrayTree,
        key: Key[Array, ""] | None = None,
        adapter: int
        | Integer[Array, ""]
        | Integer[Array, " n"]
        | Integer[np.ndarray, "..."]
        | None = None,
    ) -> Any:
        """Outputs of the adapted model.

        Args:
            params: The base model; kernels may be NF4. It is frozen: its gradient is zero.
            adapters: From :func:`init`, or a bank of several; ``{}`` is the base model alone.
            inputs: Inputs of the model.
            key: Key for the adapters' dropout, and for the model's if it takes one. Without a key
                the adapters apply no dropout.
            adapter: With a bank: the index of a slot, or one index per example, as data. -1 is the
                base model. An index beyond the bank raises, or gives NaN if it is traced.

        Raises:
            UnknownLayerError: adapters for layers that the model does not have.
            LostRowsError: one adapter per example, at a layer whose rows cannot be assigned to
                examples.
            UncoveredParameterError: a parameter in NF4 is read by something other than the product
                of a dense layer, or is a stack that cannot be sliced without decoding it.
            ValueError: leaves that do not fit the layer, or an index that does not fit the batch.
        """
        return self.run(params, adapters, inputs, key, adapter)

    def run(
        self,
        params: ArrayTree,
        adapters: Adapters | Bank,
        inputs: ArrayTree,
        key: Key[Array, ""] | None = None,
        adapter: Any = None,
        *,
        handler: Callable[[Mapping[str, BranchOptions]], Handler] | None = None,
        extra: Mapping[str, Any] | None = None,
        freeze: bool = True,
    ) -> Any:
        """Call with another handler, whose slots hold ``extra`` in addition to the adapters.

        With ``freeze=False`` the result has derivatives with respect to the base model too.
        """
        bank, rows, saved = isinstance(adapters, Bank), None, {}
        scaled = isinstance(adapters, Bank) and adapters.scaled
        if isinstance(adapters, Bank):
            if self.config.phi is not None:
                adapters.check_nonlinearity(self.config.nonlinearity)
            own_adapters, rows = adapters.chosen(adapter)
        elif adapter is not None:
            raise ValueError("adapter=: these adapters are not a bank; see jk.lslora.stack")
        else:
            own_adapters = only_adapters(adapters)
            saved = {name: x for name, x in adapters.items() if name not in own_adapters}
        params = self.separated(params, [*own_adapters, *saved])
        params = jax.lax.stop_gradient(params) if freeze else params
        settings = {name: name for name in own_adapters}
        if self.config.ensure_weight_tying:
            for path, shared in ties_of(self._apply).items():
                if shared in saved:
                    saved = {path: tied_value(path, saved[shared])} | saved
                if shared in own_adapters:
                    own_adapters = {path: turned(own_adapters[shared])} | own_adapters
                    settings.setdefault(path, shared)
        _check_saved(params, saved)
        params = with_leaves(params, saved)
        traced = self.traced(params, inputs, key, tuple(sorted(own_adapters)))
        if rows is not None and rows.shape[0] != traced.num_examples:
            raise ValueError(
                f"adapter= has {rows.shape[0]} indices, and the outputs have "
                f"{traced.num_examples} examples on their first axis"
            )
        options, slots = {}, {}
        for number, (name, leaves) in enumerate(sorted(own_adapters.items())):
            layer = traced.table[name]
            leaves = check_leaves(leaves, layer, self.config, banked=rows is not None)
            options[name] = self._options(
                traced, layer, leaves, key, scaled=scaled, bank=bank, settings=settings[name]
            )
            index = None if rows is None else jnp.broadcast_to(rows, (*layer.stack, *rows.shape))
            drops = key if self.config.dropout else None
            keys = None if drops is None else _keys(drops, number, layer)
            sums = None if extra is None else HandlerSums(extra[name])
            slots[name] = Slot(sums, SlotAdapter(leaves, index, keys))
        return traced.run((handler or adapt)(options), params, slots, inputs, key)

    def separated(self, params: ArrayTree, names: Sequence[str] | None = None) -> ArrayTree:
        """The parameters with one for each tied module, if one of them or their matrix is named.

        Args:
            params: The base model.
            names: Layers with adapters, and parameters that are replaced; ``None`` for all.
        """
        ties = ties_of(self._apply)
        is_named = names is None or not {*ties, *ties.values()}.isdisjoint(names)
        return separated(params, ties) if is_named else params

    def tied_again(self, params: ArrayTree) -> ArrayTree:
        """The parameters without those that ``ensure_weight_tying`` keeps tied."""
        is_tied = self.config.ensure_weight_tying
        return tied_again(params, ties_of(self._apply)) if is_tied else params

    def traced(
        self,
        params: ArrayTree,
        inputs: ArrayTree,
        key: Key[Array, ""] | None,
        names: Sequence[str] | None = None,
    ) -> Traced:
        """The model's trace with the named layers tapped; ``None`` taps all layers."""

        def make() -> Traced:
            return self._trace(params, inputs, key, names)

        check_arrays("params", params)
        check_arrays("inputs", inputs)
        return self._traces.get((params, inputs, key), make, static=names)

    def _trace(
        self,
        params: ArrayTree,
        inputs: ArrayTree,
        key: Key[Array, ""] | None,
        names: Sequence[str] | None,
    ) -> Traced:
        pattern = None if names is None else "|".join(map(re.escape, names))
        try:
            traced = trace(
                self._forward,
                params,
                inputs,
                key,
                layers=pattern if names else None,
                experts=self.config.experts,
                num_outputs=1,
            )
        except UnknownLayerError:
            traced = None
        absent = [n for n in names or () if traced is None or n not in traced.table]
        if traced is None or absent:
            every = self.traced(params, inputs, key).table
            reasons = [f"{path} {why}" for path, why in every.uncovered if path in absent]
            near = f"the nearest names are {nearest(absent[0], every)}"
            raise UnknownLayerError(
                f"adapters of {absent}, and the model has no such layers; "
                + ("; ".join(reasons) or near)
            )
        return traced

    def _forward(self, params: ArrayTree, inputs: ArrayTree, key: Key[Array, ""] | None) -> Any:
        kwargs = {"key": key} if takes_key(self._apply) else {}
        return self._apply(params, inputs, **kwargs)

    def _options(
        self,
        traced: Traced,
        layer: Layer,
        adapter: Adapter,
        key: Key[Array, ""] | None,
        *,
        scaled: bool,
        bank: bool,
        settings: str,
    ) -> BranchOptions:
        """The options of a layer's branch, with the rank and alpha of the layer ``settings``."""
        config = self.config
        if any(u.view.joins or u.view.source.members for u in traced.uses_of(layer)):
            raise ValueError(
                f"layer {layer.name!r}: the program joins its parameter with others in one "
                f"array, and a branch can only be added to a whole product: leave it out of target="
            )
        if (config.phi is None) != adapter.is_linear:
            have = "no coefficients" if adapter.is_linear else "coefficients"
            raise ValueError(
                f"layer {layer.name!r}: the adapter has {have}, and fourier_placement is "
                f"{config.fourier_placement!r}; attach the config that it was made with"
            )
        if not bank:
            check_rank(settings, adapter, config)
        return BranchOptions(
            phi=config.phi,
            placement=config.fourier_placement,
            scaling=1.0 if scaled else config.scaling(settings),
            may_be_linear=bank and not adapter.is_linear,
            forward_mode=self._forward_mode,
            dropout=config.dropout,
            key_impl=None if key is None else jax.random.key_impl(key),
            uses={id(use): i for i, use in enumerate(traced.uses_of(layer))},
            examples=traced.examples,
        )


def attach(apply_fn: Callable[..., Any], config: Config, *, forward_mode: bool = False) -> Adapted:
    r"""Add the branch to the model at every layer that has an adapter.

    The program is run again with the branch at the product itself, inside its scan, remat or
    jit. Layers are found as by :func:`jaxkfac.find_layers`. A constant that multiplies the kernel
    scales only the base product. A tied parameter is adapted in the orientation that the layer's
    name states, in every use with that orientation; a head that ``load_decoder`` ties is the layer
    ``lm_head/kernel``. An embedding's branch looks up rows of A. It has no dropout, as in PEFT.

    Curvature of the adapters needs nothing new: in
    ``jk.Objective(lambda adapters, inputs: adapted(params, adapters, inputs), ...)`` every A and
    B is a dense layer and $\sigma$ a scale. Coefficients are read inside a custom derivative, which
    no layer rule looks into; they are reported as uncovered, which raises by default. Pass
    ``uncovered="diagonal"``, which takes a second pass over them, or ``"ignore"``. Under
    ``jax.jit`` build the objective inside the jitted function, with ``params`` as an argument of
    it, since constants of a jitted function are copied into the program.

    Kernels of the base may be NF4 (:mod:`jaxkfac.lslora.nf4`). A product then decodes only its own
    slice and keeps the codes for its backward pass, so a stack never exists in full precision.
    Outputs equal those of the decoded base, up to rounding in the base's dtype.

    Args:
        apply_fn: ``apply_fn(params, inputs) -> outputs``; it may have a ``key=`` argument, which
            may be ``None``. It comes before ``config`` here, and after it in :func:`init`.
        config: Settings of the adapters.
        forward_mode: Leave the derivative of $\varphi$ to JAX, so that ``jax.jvp`` and the
            matrix-free operators work. It keeps more for the backward pass, and ``find_layers``
            then sees the coefficients as scales and biases.

    Returns:
        An :class:`Adapted`: ``adapted(params, adapters, inputs, key=None, adapter=None)``.

    Memory:
        For each adapted product, $\hat x$ (``out`` or ``rank`` values a row) and ``rank`` values a
        row; with a base in NF4, also one decoded kernel at a time.

    Raises:
        TypeError: the two arguments are in the wrong order, or ``apply_fn`` is a model.

    Example:
        >>> import jax, jax.numpy as jnp, jaxkfac.lslora as lslora
        >>> def apply_fn(params, x):
        ...     return x @ params["kernel"]
        >>> params, x = {"kernel": jnp.ones((3, 2))}, jnp.ones((5, 3))
        >>> config = lslora.Config(rank=1, target="kernel")
        >>> adapters = lslora.init(apply_fn, config, params, x, key=jax.random.key(0))
        >>> adapted = lslora.attach(apply_fn, config)
        >>> bool((adapted(params, adapters, x) == apply_fn(params, x)).all())
        True
    """
    check_order("attach(apply_fn, config)", apply_fn, config)
    return Adapted(apply_fn, config, forward_mode=forward_mode)


def check_order(call: str, apply_fn: object, config: object) -> None:
    """Refuse a function where the settings belong, and the reverse.

    Raises:
        TypeError: names what came, and how the call is written.
    """
    if isinstance(apply_fn, Config):
        raise TypeError(f"apply_fn: expected a function, got Config; write jk.lslora.{call}")
    check_function("apply_fn", apply_fn)
    instance_of("config", config, Config, f"as in jk.lslora.{call}")


def adapt(options: Mapping[str, BranchOptions]) -> Handler:
    """A handler that adds the branch of each layer."""

    def handler(site: Site, operands: list[Any]) -> Any:
        return adapted_product(site, operands, options[str(site.uses[0].layer)])

    return handler


def _check_saved(params: ArrayTree, saved: Mapping[str, Any]) -> None:
    leaves = leaves_by_path(decoded_shapes(params))
    for path, x in saved.items():
        if path in encoded_paths(params):
            raise ValueError(
                f"the adapters hold a whole parameter {path!r}, which is quantised in params: "
                "dequantise it there, so that it can be replaced"
            )
        if path not in leaves:
            raise UnknownLayerError(
                f"the adapters hold a whole parameter {path!r}, which the model does not have; "
                f"the nearest are {nearest(path, leaves)}"
            )
        if tuple(leaves[path].shape) != tuple(x.shape):
            raise ValueError(
                f"parameter {path!r}: expected shape {tuple(leaves[path].shape)}, got "
                f"{tuple(x.shape)}"
            )


def _keys(key: Key[Array, ""], number: int, layer: Layer) -> UInt32[Array, "..."]:
    """Key data for each slice of a layer; raw data, because slots are stacked and sliced."""
    mine = jax.random.fold_in(jax.random.fold_in(key, DROPOUT), number)
    return jax.random.key_data(jax.random.split(mine, layer.stack) if layer.stack else mine)


def check_rank(layer: str, adapter: Adapter, config: Config, remedy: str = "") -> None:
    """Refuse a config of another rank than the adapter's; ``remedy`` ends the message.

    Raises:
        ValueError: names both.
    """
    rank, expected = adapter.a.shape[-1], config.rank_of(layer)
    if rank != expected:
        raise ValueError(
            f"layer {layer!r}: the adapter has rank {rank}, and the config says {expected}, which "
            f"its scaling is made from{remedy}"
        )


def check_leaves(
    adapter: Adapter, layer: Layer, config: Config, *, banked: bool = False
) -> Adapter:
    """The adapter, after checking that its leaves fit the layer.

    Raises:
        ValueError: names the leaf that does not.
    """
    rank, ndim = adapter.a.shape[-1], len(layer.stack)
    slots = adapter.a.shape[ndim : ndim + 1] if banked else ()
    lead = (*layer.stack, *slots)
    if isinstance(adapter, EmbeddingAdapter) != layer.is_lookup:
        needed = "EmbeddingAdapter" if layer.is_lookup else "Adapter"
        raise ValueError(
            f"layer {layer.name!r}: expected a jk.lslora.{needed} for a layer of kind "
            f"{layer.kind!r}, got {type(adapter).__name__}"
        )
    expected = {
        "a": (*lead, layer.in_features, rank),
        "b": (*lead, rank, layer.out_features),
        "coefficients": (*lead, len(find_nonlinearity(config.nonlinearity).initial)),
        "sigma": lead,
    }
    for leaf_name, leaf in adapter._asdict().items():
        if leaf is not None and tuple(leaf.shape) != expected[leaf_name]:
            raise ValueError(
                f"layer {layer.name!r}: expected {leaf_name} of shape {expected[leaf_name]}, got "
                f"{tuple(leaf.shape)}"
            )
    return adapter
