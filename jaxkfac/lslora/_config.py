"""Settings and leaves of an adapter."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

from jaxtyping import Array, Float

from jaxkfac._text import array_text, short_repr, table_html
from jaxkfac.lslora._nonlinearity import FOURIER, Nonlinearity, find_nonlinearity

# ---------------- one layer's adapter


# Number of axes of each leaf after the stack axes.
OWN_AXES = {"a": 2, "b": 2, "coefficients": 1, "sigma": 0}


class Adapter(NamedTuple):
    r"""The trained leaves of one layer's branch.

    Leading axes are the layer's stack: scanned slices, then experts. In a :class:`Bank` one
    axis, the bank's slots, follows them.

    Attributes:
        a: $A$, which maps the layer's inputs to the bottleneck.
        b: $B$, which maps the bottleneck to the layer's outputs.
        coefficients: Coefficients of the nonlinearity for each slice, float32: $c_0 \ldots c_3$ for
            the Fourier one; ``None`` for plain LoRA.
        sigma: $\sigma$ of each slice, float32; ``None`` for plain LoRA. In a bank it is infinite
            where the slot holds plain LoRA.
    """

    a: Float[Array, "*stack in r"]
    b: Float[Array, "*stack r out"]
    coefficients: Float[Array, "*stack k"] | None
    sigma: Float[Array, "*stack"] | None

    __repr__ = short_repr

    def _repr_html_(self) -> str:
        rows = [(name, array_text(x)) for name, x in self._asdict().items()]
        return table_html("Adapter", ("leaf", "array"), rows, words=(0, 1))

    @property
    def is_linear(self) -> bool:
        """Whether this is plain LoRA."""
        return self.coefficients is None


class EmbeddingAdapter(Adapter):
    """The leaves of an embedding's branch: a row of ``a`` for each token, times ``b``.

    The same fields as :class:`Adapter`, whose ``a`` is looked up instead of multiplied. PEFT's
    files have other names for them.
    """

    __slots__ = ()


# {layer: Adapter}, with {path: array} for the parameters of ``modules_to_save``.
Adapters = Mapping[str, Any]


def only_adapters(adapters: Adapters) -> dict[str, Adapter]:
    """The adapters of a tree, without the parameters that are trained in full.

    Raises:
        TypeError: the argument is not a tree of adapters, but a bank, for example.
    """
    if not isinstance(adapters, Mapping):
        raise TypeError(
            "adapters: expected {layer: Adapter}, as jk.lslora.init returns it, got "
            f"{type(adapters).__name__} (the base model alone: {{}}; one adapter out of a bank: "
            "bank.get(name, config))"
        )
    return {name: x for name, x in adapters.items() if isinstance(x, Adapter)}


def nonlinearities(adapters: Adapters) -> dict[str, tuple[Array, Array]]:
    """``(coefficients, sigma)`` of every adapter with a nonlinearity."""
    return {
        name: (x.coefficients, x.sigma)
        for name, x in only_adapters(adapters).items()
        if x.coefficients is not None and x.sigma is not None
    }


# ---------------- settings


Placement = Literal["output", "bottleneck", "none"]
Number = float | int  # the runtime type checker does not accept an int as a float
ALL_LINEAR = "all-linear"


class RmsSigma(NamedTuple):
    r"""An initial $\sigma$ measured on data: ``factor`` times the root mean square of $z$.

    Attributes:
        factor: Dimensionless, positive.
    """

    factor: Number = 1.0


@dataclasses.dataclass(frozen=True)
class Config:
    r"""Settings of one LS-LoRA adapter; saved with it.

    With $\hat x = \tanh(z / (|\sigma| + 10^{-6}))$ and
    $\varphi(z) = c_0 + c_1 \hat x + c_2 \sin \pi\hat x + c_3 \cos \pi\hat x$, a layer $W$ becomes

    $$ y = x W + \varphi(s\, x A B) \quad\text{or}\quad y = x W + s\, \varphi(x A) B , $$

    with $s$ = ``alpha / rank``, or ``alpha / sqrt(rank)`` with ``rslora``. The initial coefficients
    $[0, 1, 0, 0]$ make $\varphi$ the tanh, not the identity: it is 24%, 43% and 76% away from
    linear (root mean square over normal z, relative) at std(z)/σ = 0.57, 1 and 3.

    Attributes:
        rank: $r$, the width of the bottleneck.
        alpha: Numerator of the scaling $s$; not 0, because a bank divides by it.
        target: Layers to adapt, dense ones and embeddings: a full-match pattern over layer names
            (paths of kernels; a head that a pretrained model ties is ``lm_head/kernel``), a tuple
            of suffixes of names with or without the last component (``("q_proj", "v_proj")``), or
            ``"all-linear"``, every dense layer.
        exclude: Full-match pattern of layers to leave out, or ``None``.
        fourier_placement: ``"output"`` is the first formula, that of the original; ``"bottleneck"``
            the second, with $\varphi$ on $r$ values instead of ``out``. They are different models.
            ``"none"`` is plain LoRA, with $\varphi$ the identity: no coefficients and no $\sigma$.
        init_sigma: Initial $\sigma$: a number, or ``RmsSigma(factor)`` to measure it.
        reg_weight: Factor by which the training script multiplies ``fourier_loss``.
        rslora: Whether to divide ``alpha`` by the root of the rank.
        dropout: Dropout probability in [0, 1) of the branch's inputs, where a key is given.
        rank_pattern: ``{pattern: rank}``, full matches over layer names; the first match counts.
        alpha_pattern: ``{pattern: alpha}``, matched like ``rank_pattern``.
        modules_to_save: Full-match pattern of parameters to train in full and save with the
            adapter, or ``None``.
        ensure_weight_tying: Whether a head that a pretrained model ties to its embedding stays
            tied: one adapter, or one parameter of ``modules_to_save``, then serves both. Otherwise
            each has its own, and the one that is not adapted keeps the base model's matrix.
        experts: Parameters to read as a stack of experts; see ``find_layers``.
        nonlinearity: Name of $\varphi$: ``"fourier"`` as above, or a registered one, see
            :class:`Nonlinearity`. ``fourier_placement`` and ``init_sigma`` then apply to that one.

    Raises:
        ValueError: a value out of its range, an unknown nonlinearity, or a pattern that is not a
            regular expression.

    Scalars of NumPy or JAX are converted to Python's, so that they can be saved.

    Example:
        >>> import jaxkfac.lslora
        >>> config = jaxkfac.lslora.Config(rank=4, alpha=8.0, alpha_pattern={r".*q/kernel": 32})
        >>> config.scaling("block/q/kernel"), config.scaling("block/v/kernel")
        (8.0, 2.0)
    """

    rank: int = 8
    alpha: Number = 16.0
    target: str | tuple[str, ...] = ALL_LINEAR
    exclude: str | None = None
    fourier_placement: Placement = "output"
    init_sigma: Number | RmsSigma = 1.0
    reg_weight: Number = 0.01
    rslora: bool = False
    dropout: Number = 0.0
    rank_pattern: Mapping[str, int] = dataclasses.field(default_factory=dict)
    alpha_pattern: Mapping[str, Number] = dataclasses.field(default_factory=dict)
    modules_to_save: str | None = None
    experts: str | None = None
    nonlinearity: str = FOURIER.name
    ensure_weight_tying: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _plain(getattr(self, field.name)))
        if self.fourier_placement not in get_args(Placement):
            raise ValueError(
                f"fourier_placement={self.fourier_placement!r}: expected one of "
                f"{get_args(Placement)}"
            )
        find_nonlinearity(self.nonlinearity)
        for rank in (self.rank, *self.rank_pattern.values()):
            if not isinstance(rank, int) or rank < 1:
                raise ValueError(f"rank={rank}: expected at least 1, a whole number")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout}: expected a probability in [0, 1)")
        for alpha in (self.alpha, *self.alpha_pattern.values()):
            if not math.isfinite(alpha) or alpha == 0:
                raise ValueError(f"alpha={alpha}: expected a finite number other than 0")
        if not math.isfinite(self.reg_weight):
            raise ValueError(f"reg_weight={self.reg_weight}: expected a finite number")
        _check_sigma(self.init_sigma)
        if self.target == () or self.target == "":
            raise ValueError("target is empty: name the layers, or say 'all-linear'")
        patterns = (*self.rank_pattern, *self.alpha_pattern)
        for pattern in (self.target, self.exclude, self.modules_to_save, self.experts, *patterns):
            _check_pattern(pattern)

    @property
    def phi(self) -> Nonlinearity | None:
        r"""$\varphi$; ``None`` for plain LoRA."""
        return None if self.fourier_placement == "none" else find_nonlinearity(self.nonlinearity)

    def rank_of(self, layer: str) -> int:
        """The rank at a layer."""
        return _first_match(self.rank_pattern, layer, self.rank)

    def alpha_of(self, layer: str) -> Number:
        """Alpha at a layer."""
        return _first_match(self.alpha_pattern, layer, self.alpha)

    def scaling(self, layer: str) -> float:
        """The scaling $s$ at a layer."""
        rank = self.rank_of(layer)
        return self.alpha_of(layer) / (math.sqrt(rank) if self.rslora else rank)

    def targets(self, layer: str) -> bool:
        """Whether ``target`` matches a layer and ``exclude`` does not."""
        if self.exclude is not None and re.fullmatch(self.exclude, layer):
            return False
        if self.target == ALL_LINEAR:
            return True
        if isinstance(self.target, str):
            return re.fullmatch(self.target, layer) is not None
        module = layer.rpartition("/")[0]
        return any(f"/{n}".endswith(f"/{s}") for s in self.target for n in (layer, module))


def _first_match(patterns: Mapping[str, Any], layer: str, default: Any) -> Any:
    return next((v for p, v in patterns.items() if re.fullmatch(p, layer)), default)


def _plain(value: Any) -> Any:
    """The value with NumPy and JAX scalars converted to Python's, at any depth."""
    if isinstance(value, RmsSigma):
        return RmsSigma(_plain(value.factor))
    if isinstance(value, Mapping):
        return {key: _plain(x) for key, x in value.items()}
    return value.item() if hasattr(value, "item") else value


def _check_sigma(sigma: Number | RmsSigma) -> None:
    number = sigma.factor if isinstance(sigma, RmsSigma) else sigma
    if not math.isfinite(number) or number == 0 or (isinstance(sigma, RmsSigma) and number < 0):
        raise ValueError(
            f"init_sigma={sigma}: expected a finite number other than 0, or RmsSigma(factor) "
            "with a positive factor"
        )


def _check_pattern(pattern: str | tuple[str, ...] | None) -> None:
    if isinstance(pattern, str):
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
