"""New adapters for the layers that a config targets."""

import collections
import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

from jaxkfac._arguments import ArrayTree, leaves_by_path
from jaxkfac._errors import NonFiniteFactorError, UnknownLayerError, instance_of, nearest, one_of
from jaxkfac.blocks import Factors, Place
from jaxkfac.interception import Layer, LayerTable, Site, selector
from jaxkfac.interception.values import decoded_shapes, encoded_paths
from jaxkfac.linalg import statistics_dtype
from jaxkfac.lslora._attach import Adapted, attach, check_order
from jaxkfac.lslora._branch import Branch
from jaxkfac.lslora._config import (
    ALL_LINEAR,
    Adapter,
    Adapters,
    Config,
    EmbeddingAdapter,
    RmsSigma,
    nonlinearities,
    only_adapters,
)
from jaxkfac.lslora._diagnose import measure
from jaxkfac.lslora._modules import Ties, check_turns, ties_of

# ---------------- A from the inputs' covariance (EVA) or from the gradient


Init = Literal["default", "eva", "gradient"]
_NAMES = {"eva": "factors", "gradient": "gradient"}
_ROUNDING = 1e-6  # relative to the largest value: what float32 sums of squares can tell from zero


def check_source(init: Init, factors: Factors | None, gradient: ArrayTree) -> None:
    """Refuse a source that ``init`` does not use, and a missing one.

    Raises:
        ValueError: names the argument.
        TypeError: ``factors`` is no ``Factors``.
    """
    sources = {"factors": factors, "gradient": gradient}
    needed = _NAMES.get(init)
    if needed is not None and sources[needed] is None:
        raise ValueError(f"init={init!r} reads the {needed}: pass {needed}=")
    for name, value in sources.items():
        if value is not None and name != needed:
            raise ValueError(f"{name}=: init={init!r} does not read it")
    if factors is not None:
        instance_of("factors", factors, Factors, "as jk.value_grad_and_factors gives them")


def covariance(factors: Factors, layer: Layer, ties: Ties) -> Any:
    r"""$\sum_n (x_n - \bar x)(x_n - \bar x)^\top$ of a layer's inputs, ``(stack..., in, in)``.

    The mean is known if the factor includes the ones of a bias; otherwise it is taken as zero.
    Factors of the base model have a tied head under the path of the shared matrix.
    """
    name = layer.name if layer.name in factors else ties.get(layer.name, layer.name)
    if name not in factors:
        raise UnknownLayerError(
            f"factors: no layer {layer.name!r}, which gets an adapter; the nearest names are "
            f"{nearest(layer.name, factors)}"
        )
    base_layer = factors.layer(name)
    sums = factors.side(Place("a", base_layer.input)).in_full().data
    xp: Any = jnp if isinstance(sums, Tracer) else np
    if xp is np:
        sums = np.asarray(sums, np.float64)
    if not base_layer.a_dense:
        sums = sums[..., None] * xp.eye(sums.shape[-1], dtype=sums.dtype)
    if factors.has_ones(base_layer.input):
        row, ones = sums[..., :-1, -1], sums[..., -1:, -1]
        mean = row / xp.where(ones > 0, ones, 1)
        sums = sums[..., :-1, :-1] - mean[..., :, None] * row[..., None, :]
    if sums.shape != (expected := (*layer.stack, layer.in_features, layer.in_features)):
        raise ValueError(
            f"factors: A of layer {layer.name!r} has shape {sums.shape}, expected {expected}: they "
            "belong to another model"
        )
    return sums


def gradient_of(gradient: ArrayTree, layer: Layer) -> Any:
    """The gradient of a layer's matrix, ``(stack..., in, out)``."""
    leaves, path = leaves_by_path(gradient), layer.weight.path
    if path not in leaves:
        raise ValueError(
            f"gradient: no leaf {path!r}, which gets an adapter; the nearest paths are "
            f"{nearest(path, leaves)}"
        )
    matrix = layer.weight.read(jnp.asarray(leaves[path]))
    return matrix if isinstance(matrix, Tracer) else np.asarray(matrix, np.float64)


def directions(
    init: Init,
    layer: Layer,
    rank: int,
    factors: Factors | None,
    gradient: ArrayTree,
    ties: Ties,
) -> Float[Array, "*stack in r"]:
    """Orthonormal columns, the strongest first, each with a positive largest entry.

    Raises:
        ValueError: there are fewer directions than the rank; checked if values are concrete.
        NonFiniteFactorError: a value is not finite.
    """
    what = "inputs" if init == "eva" else "gradient"
    if init == "eva":
        assert factors is not None
        matrix = covariance(factors, layer, ties)
    else:
        matrix = gradient_of(gradient, layer)
    traced = isinstance(matrix, Tracer)
    if not traced and not np.isfinite(matrix).all():
        raise NonFiniteFactorError(f"layer {layer.name!r}: the {what} are not finite")
    xp: Any = jnp if traced else np
    columns, values, _ = xp.linalg.svd(matrix, full_matrices=False)
    if not traced:
        number = int((values > _ROUNDING * values.max(-1, keepdims=True)).sum(-1).min())
        if number < rank:
            raise ValueError(
                f"layer {layer.name!r}: the {what} have {number} directions"
                + (" in one of the slices" if layer.stack else "")
                + f", and the rank is {rank}: give more examples, or a lower rank (rank_pattern=)"
            )
    columns = columns[..., :rank]
    largest = xp.take_along_axis(columns, xp.abs(columns).argmax(-2)[..., None, :], -2)
    return jnp.asarray(columns * xp.where(largest < 0, -1, 1))


# ---------------- an initial $\sigma$ from data


def calibrate(
    adapted: Adapted,
    params: ArrayTree,
    adapters: Adapters,
    inputs: ArrayTree,
    *,
    factor: float = 1.0,
) -> Adapters:
    r"""Set $\sigma$ to ``factor`` times the root mean square of $z$ over a batch.

    Args:
        adapted: From :func:`attach`.
        params: The base model.
        adapters: Adapters with B other than zero, or with the placement ``"bottleneck"``.
        inputs: A batch.
        factor: Dimensionless; tanh is 24%, 43% and 76% away from linear at factors 1.75, 1, 1/3.

    Returns:
        The adapters with the new $\sigma$ for each slice.

    Raises:
        ValueError: $z$ is zero on the whole batch or no gradient reaches a layer, so there is
            nothing to measure; $z$ is not finite, or its squares are beyond its dtype; or
            ``factor`` is not positive.
    """
    if not 0 < factor < math.inf:
        raise ValueError(f"factor={factor}: expected a finite number above 0")
    own_adapters, out = only_adapters(adapters), dict(adapters)
    sigmas = measured_sigmas(adapted, params, adapters, inputs, fresh=False)
    for name, adapter in own_adapters.items():
        if name in sigmas:
            out[name] = adapter._replace(sigma=factor * sigmas[name])
    return out


def measured_sigmas(
    adapted: Adapted, params: ArrayTree, adapters: Adapters, inputs: ArrayTree, *, fresh: bool
) -> dict[str, Array]:
    r"""Root mean square of $z$ for each slice of each layer with a nonlinearity.

    A new adapter with placement ``"output"`` has B = 0 and so z = 0. Its value is the root mean
    square of $s\, x A$, which $z$ has once the columns of B have unit length.
    """
    config = adapted.config
    inside = fresh and config.fourier_placement == "output"

    def squares(site: Site, operands: list[Any], branch: Branch) -> dict[str, Array]:
        layer = str(site.uses[0].layer)
        z = branch.inside * config.scaling(layer) if inside else branch.z
        lead = site.slots[0].constants.adapter.sigma.ndim
        axes = tuple(range(lead, z.ndim))
        total = jnp.square(z.astype(statistics_dtype(z.dtype))).sum(axes)
        size = z.size // max(1, total.size)
        return {"squares": total, "count": jnp.full(total.shape, size)}

    nonlinear = nonlinearities(adapters)
    zeros = {n: jnp.zeros(sigma.shape, sigma.dtype) for n, (_, sigma) in nonlinear.items()}
    like = {n: {"squares": z, "count": z} for n, z in zeros.items()}
    sums = measure(adapted, params, adapters, inputs, squares, like)
    out = {}
    for name, sums_of_layer in sums.items():
        out[name] = jnp.sqrt(sums_of_layer["squares"] / sums_of_layer["count"])
        if isinstance(out[name], Tracer):
            continue
        rows, rms = np.asarray(sums_of_layer["count"]), np.asarray(out[name])
        if np.any((rows > 0) & ~np.isfinite(rms)):
            raise ValueError(
                f"layer {name!r}: z, or its mean square, is not finite on this batch, so its sigma "
                "cannot be measured; look at the inputs, or give init_sigma a number"
            )
        if not np.all(rms > 0):
            raise ValueError(
                f"layer {name!r}: z is zero on this batch, or no gradient reaches it, so there "
                "is nothing to measure its sigma from; give init_sigma a number"
            )
    return out


# ---------------- new adapters


def init(
    apply_fn: Callable[..., Any],
    config: Config,
    params: ArrayTree,
    inputs: ArrayTree,
    *,
    key: Key[Array, ""],
    dtype: DTypeLike | None = None,
    init: Init = "default",
    factors: Factors | None = None,
    gradient: ArrayTree = None,
) -> Adapters:
    r"""Create adapters that change nothing yet: A uniform in $\pm 1/\sqrt{\text{in}}$, B zero.

    An embedding has A = 0 and B standard normal, as in PEFT, whatever ``init`` is.

    ``init="eva"`` sets A to the orthonormal directions in which a layer's inputs vary most;
    ``"gradient"`` sets it to those with the largest gradient, the input side of LoRA-GA. B is zero
    in all cases, so the base model stays unchanged and folders have the usual form.

    With B = 0, the placement ``"bottleneck"`` has zero gradients for A, $\sigma$ and the
    coefficients at the first step. With ``"output"``, $c_0$ and $c_3$ have equal gradients, since
    $\varphi(0) = c_0 + c_3$.

    Args:
        apply_fn: As for :func:`attach`.
        config: Settings of the adapters.
        params: The base model, with any kernels in NF4; shapes suffice unless $\sigma$ is measured.
        inputs: A batch; shapes suffice unless $\sigma$ is measured.
        key: Key for A.
        dtype: Dtype of A and B; by default that of the layer's parameter. Coefficients and $\sigma$
            are float32 or wider.
        init: ``"default"``, ``"eva"`` or ``"gradient"``.
        factors: For ``"eva"``: factors of the base model on the data. Their inputs are centered
            if A includes the ones of a bias (``bias="joint"``), as in PEFT. A layer without a bias
            has no mean in its factor, so its uncentered second moment is used.
        gradient: For ``"gradient"``: the gradient of the loss with respect to ``params``.

    Returns:
        ``{layer: Adapter}``, and the parameters of ``modules_to_save`` by path.

    Raises:
        TypeError: arguments are in the wrong order, or ``apply_fn`` is a model.
        UnknownLayerError: the target, or ``modules_to_save``, matches nothing.
        ValueError: the target matches something that cannot be adapted; ``modules_to_save`` matches
            a parameter that the program ties (see ``ensure_weight_tying``), or something quantized
            or targeted as well (``"all-linear"`` skips it instead); or the rank is larger than a
            layer; each is named. Or the source for ``init`` is missing, lacks a leaf, or has fewer
            directions than the rank (zeros have none).
        NonFiniteFactorError: a factor or the gradient is not finite.

    Example:
        >>> import jax, jax.numpy as jnp, jaxkfac.lslora as lslora
        >>> adapters = lslora.init(
        ...     lambda p, x: x @ p["kernel"], lslora.Config(rank=2, target=".*kernel"),
        ...     {"kernel": jnp.ones((3, 4))}, jnp.ones((5, 3)), key=jax.random.key(0))
        >>> jax.tree.map(jnp.shape, adapters["kernel"])
        Adapter(a=(3, 2), b=(2, 4), coefficients=(4,), sigma=())

    References:
        Fabian Paischer et al., "One Initialization to Rule them All: Fine-tuning via Explained
        Variance Adaptation", 2024. Shaowen Wang et al., "LoRA-GA: Low-Rank Adaptation with
        Gradient Approximation", 2024.
    """
    check_order("init(apply_fn, config, params, inputs, key=key)", apply_fn, config)
    one_of("init", init, get_args(Init))
    check_source(init, factors, gradient)
    adapted = attach(apply_fn, config)
    params, gradient = adapted.separated(params), adapted.separated(gradient)
    leaves = leaves_by_path(decoded_shapes(params))
    table = adapted.traced(params, inputs, key).table
    ties = ties_of(apply_fn) if config.ensure_weight_tying else {}
    layers = _shared_layers(targeted(config, table), table, ties, config)
    adapters: dict[str, Any] = {}
    for number, layer in enumerate(layers):
        mine = jax.random.fold_in(key, number)
        leaf_dtype = leaves[layer.weight.path].dtype if dtype is None else dtype
        adapters[layer.name] = _fresh(config, layer, mine, leaf_dtype)
        if init != "default" and not layer.is_lookup:
            rank = config.rank_of(layer.name)
            a = directions(init, layer, rank, factors, gradient, ties_of(apply_fn))
            adapters[layer.name] = adapters[layer.name]._replace(a=a.astype(leaf_dtype))
    if config.modules_to_save is not None:
        full_paths = selector(config.modules_to_save, list(leaves))
        full_paths = {ties.get(path, path) for path in full_paths}
        _check_read_once(full_paths, table, ties_of(apply_fn), config)
        if quantised := sorted(full_paths & encoded_paths(params)):
            raise ValueError(
                f"modules_to_save={config.modules_to_save!r} matches {', '.join(quantised)}, which "
                "are quantised and cannot be trained: dequantise them, or leave them out"
            )
        _leave_to_whole(adapters, layers, full_paths, config)
        adapters |= {path: leaf for path, leaf in leaves.items() if path in full_paths}
    if isinstance(config.init_sigma, RmsSigma) and config.phi is not None:
        sigmas = measured_sigmas(adapted, params, adapters, inputs, fresh=True)
        for name, rms in sigmas.items():
            adapters[name] = adapters[name]._replace(sigma=config.init_sigma.factor * rms)
    return adapters


def _shared_layers(
    layers: list[Layer], table: LayerTable, ties: Ties, config: Config
) -> list[Layer]:
    """The layers, with that of the shared matrix in place of those that stay tied to it."""
    names = [ties.get(layer.name, layer.name) for layer in layers]
    check_turns(config.phi is None or set(ties.values()).isdisjoint(names))
    of_path = collections.Counter(layer.weight.path for layer in table.of_parameters)
    if shared := [
        x.name for x in layers if config.ensure_weight_tying and of_path[x.weight.path] > 1
    ]:
        raise ValueError(
            f"ensure_weight_tying: {shared[0]!r} is one of several uses of its parameter, and one "
            "adapter for all of them needs a model of load_decoder; leave it out, or train the "
            "parameter with modules_to_save="
        )
    if unread := [name for name in names if name not in table]:
        members = [path for path, shared in ties.items() if shared == unread[0]]
        raise ValueError(
            f"ensure_weight_tying: one adapter cannot serve {', '.join(members)}, of which more "
            "than one is an embedding; leave it out, or train the matrix with modules_to_save="
        )
    return [table[name] for name in dict.fromkeys(names)]


def _check_read_once(full_paths: set[str], table: LayerTable, ties: Ties, config: Config) -> None:
    """Refuse to train a matrix that several modules share, unless the config keeps it shared."""
    for path in [] if config.ensure_weight_tying else sorted(full_paths):
        names = [layer.name for layer in table.of_parameters if layer.weight.path == path]
        names = names or [member for member, shared in ties.items() if shared == path]
        if len(names) > 1:
            raise ValueError(
                f"modules_to_save={config.modules_to_save!r} matches {path!r}, which is shared: it "
                f"is read as {', '.join(map(repr, names))}; name one of these if the model has it "
                "as a parameter, or pass ensure_weight_tying=True to train it for all of them"
            )


def _leave_to_whole(
    adapters: dict[str, Any], layers: list[Layer], full_paths: set[str], config: Config
) -> None:
    """Drop the adapters of parameters trained in full, or refuse both for one parameter."""
    both = [layer.name for layer in layers if layer.weight.path in full_paths]
    if both and config.target != ALL_LINEAR:
        raise ValueError(
            f"target={config.target!r} and modules_to_save={config.modules_to_save!r} both match "
            f"{', '.join(map(repr, both))}: a kernel has an adapter or is trained itself; name it "
            "in exclude=, or leave it out of modules_to_save="
        )
    for name in both:
        del adapters[name]


def targeted(config: Config, table: LayerTable) -> list[Layer]:
    """The layers that a config targets.

    Raises:
        UnknownLayerError: there are none.
        ValueError: the target matches something that cannot be adapted.
    """
    names = [name for name in table if config.targets(name)]
    layers = [table[name] for name in names]
    is_wide = config.target == ALL_LINEAR
    wrong = {
        x.name: f"is of kind {x.kind!r}"
        for x in layers
        if not x.is_dense and (is_wide or not x.is_lookup)
    }
    wrong |= {x.name: "is computed from parameters" for x in layers if x.computed_from}
    layer_paths = {matrix.path for x in table.values() for matrix in (x.weight, x.bias) if matrix}
    if is_wide:
        layers, wrong = [x for x in layers if x.name not in wrong], {}
    else:
        wrong |= {p: r for p, r in table.uncovered if p not in layer_paths and config.targets(p)}
        names += [path for path in wrong if path not in names]
    if not names or (not layers and not wrong):
        raise UnknownLayerError(
            f"target={config.target!r} (exclude={config.exclude!r}) matches no layer; the nearest "
            f"names are {nearest(str(config.target), table)}"
        )
    if wrong:
        rows = "\n".join(f"  {name} {reason}" for name, reason in wrong.items())
        raise ValueError(
            "only dense layers and embeddings can be adapted, and target= also matches\n"
            f"{rows}\nMake the target narrower, or name these in exclude="
        )
    for layer in layers:
        largest = min(layer.in_features, layer.out_features)
        if config.rank_of(layer.name) > largest:
            raise ValueError(
                f"layer {layer.name!r}: rank {config.rank_of(layer.name)} is larger than the layer "
                f"({layer.in_features} inputs, {layer.out_features} outputs): at most {largest}; "
                "see rank_pattern"
            )
    return layers


def _fresh(config: Config, layer: Layer, key: Key[Array, ""], dtype: DTypeLike) -> Adapter:
    rank, bound = config.rank_of(layer.name), 1 / math.sqrt(layer.in_features)
    shape = (*layer.stack, layer.in_features, rank)
    wide = statistics_dtype(dtype)
    b_shape = (*layer.stack, rank, layer.out_features)
    form = EmbeddingAdapter if layer.is_lookup else Adapter
    if layer.is_lookup:  # as in PEFT: with B = 0, only tokens of the batch would ever move A
        a, b = jnp.zeros(shape, dtype), jax.random.normal(key, b_shape, wide).astype(dtype)
    else:
        a = jax.random.uniform(key, shape, wide, -bound, bound).astype(dtype)
        b = jnp.zeros(b_shape, dtype)
    if (phi := config.phi) is None:
        return form(a, b, None, None)
    sigma = 1.0 if isinstance(config.init_sigma, RmsSigma) else config.init_sigma
    return form(
        a,
        b,
        jnp.broadcast_to(jnp.asarray(phi.first(wide)), (*layer.stack, len(phi.initial))),
        jnp.full(layer.stack, sigma, wide),
    )
