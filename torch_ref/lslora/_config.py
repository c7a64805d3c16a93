"""What an adapter is made from."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

Value = TypeVar("Value")
FOURIER = ("fourier_placement", "init_sigma", "fourier_reg_weight")
# In place of `init_lora_weights`: PEFT knows no such way to begin and stops; it would load all
# but the nonlinearity.
NEEDS_PLUG_IN = "nonlinear, so PEFT needs torch_ref.lslora.peft_plugin of jaxkfac[peft]"
# Of PEFT's settings those that make another model: whatever is set, and not to nothing.
UNSUPPORTED = ("use_dora", "use_qalora", "lora_bias", "layer_replication", "target_parameters")


@dataclasses.dataclass(frozen=True)
class Config:
    r"""Settings of one LS-LoRA adapter; all of them are saved with it.

    Attributes:
        target: Regular expression over module names, a full match.
        rank: r, the width of the bottleneck.
        alpha: The branch is scaled by s = ``alpha / rank``.
        fourier_placement: ``"output"``: $y = W x + \varphi(s B A x)$. ``"bottleneck"``:
            $y = W x + s B \varphi(A x)$. They are different models. ``"none"`` is plain LoRA,
            $\varphi$ the identity.
        init_sigma: First value of $\sigma$.
        reg_weight: What the training script multiplies :func:`fourier_loss` with.
        dropout: Probability, of the branch's inputs.
        rslora: s = ``alpha / sqrt(rank)`` instead.
        rank_pattern: ``{pattern: rank}`` of single layers, matched as PEFT does: a regular
            expression for the end of a module's name, from a dot on. The first one counts.
        alpha_pattern: ``{pattern: alpha}``, likewise.
    """

    target: str
    rank: int = 8
    alpha: float = 16.0
    fourier_placement: Literal["output", "bottleneck", "none"] = "output"
    init_sigma: float = 1.0
    reg_weight: float = 0.01
    dropout: float = 0.0
    rslora: bool = False
    rank_pattern: Mapping[str, int] = dataclasses.field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.fourier_placement not in ("output", "bottleneck", "none"):
            raise ValueError(
                "fourier_placement is 'output', 'bottleneck' or 'none', got "
                f"{self.fourier_placement!r}"
            )
        ranks = [self.rank, *self.rank_pattern.values()]
        if min(ranks) < 1 or not 0 <= self.dropout < 1:
            raise ValueError(
                f"expected ranks >= 1 and dropout in [0, 1), got {ranks} and {self.dropout}"
            )
        if not math.isfinite(self.init_sigma) or self.init_sigma == 0:
            raise ValueError(f"init_sigma must be finite and not 0, got {self.init_sigma}")
        for pattern in (self.target, *self.rank_pattern, *self.alpha_pattern):
            re.compile(pattern)

    def rank_of(self, layer: str) -> int:
        """The rank at a layer, by the module's name."""
        return _first_match(self.rank_pattern, layer, self.rank)

    @property
    def scaling(self) -> float:
        """The scaling s where no pattern matches."""
        return self._scaling(self.alpha, self.rank)

    def scaling_of(self, layer: str) -> float:
        """The scaling s at a layer, by the module's name."""
        alpha = _first_match(self.alpha_pattern, layer, self.alpha)
        return self._scaling(alpha, self.rank_of(layer))

    def _scaling(self, alpha: float, rank: int) -> float:
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def to_peft(self, peft_type: Literal["LSLORA", "LORA"]) -> dict[str, Any]:
        """The keys of ``adapter_config.json``.

        Raises:
            ValueError: plain LoRA as ``"LSLORA"``, which has no word for it.
        """
        if self.fourier_placement == "none" and peft_type == "LSLORA":
            raise ValueError("plain LoRA (fourier_placement='none') is saved with dialect='peft'")
        record = {
            "peft_type": peft_type,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": self.target,
            "lora_dropout": self.dropout,
            "use_rslora": self.rslora,
            "rank_pattern": dict(self.rank_pattern),
            "alpha_pattern": dict(self.alpha_pattern),
            "bias": "none",
        }
        if self.fourier_placement == "none":
            return record
        own = (self.fourier_placement, self.init_sigma, self.reg_weight)
        if peft_type == "LORA":
            record["init_lora_weights"] = NEEDS_PLUG_IN
        return record | dict(zip(FOURIER, own, strict=True))

    @classmethod
    def from_peft(cls, record: dict[str, Any]) -> "Config":
        """The inverse of :meth:`to_peft`; a list of target suffixes becomes a pattern.

        A record of type LORA without any key of LS-LoRA is plain LoRA.

        Raises:
            ValueError: another type, a key that decides what the adapter computes is missing, or
                one that asks for something else than (LS-)LoRA.
        """
        if record.get("peft_type") not in ("LSLORA", "LORA"):
            raise ValueError(f"expected peft_type LSLORA or LORA, got {record.get('peft_type')!r}")
        plain = record["peft_type"] == "LORA" and not record.keys() & set(FOURIER)
        required = {"r", "lora_alpha", "target_modules", "lora_dropout"}
        missing = (required if plain else required | set(FOURIER)) - record.keys()
        if missing:
            raise ValueError(
                f"adapter_config.json lacks {sorted(missing)}; without them it is another model "
                "than the one that was saved"
            )
        others = {key: record[key] for key in UNSUPPORTED if record.get(key)}
        if record.get("bias", "none") != "none":
            others["bias"] = record["bias"]
        if others:
            raise ValueError(f"adapter_config.json asks for {others}, which is not supported")
        target = record["target_modules"]
        if not isinstance(target, str):
            target = r"(.*\.)?(" + "|".join(re.escape(t) for t in sorted(target)) + ")"
        names = ("fourier_placement", "init_sigma", "reg_weight")
        fourier = {name: record[key] for name, key in zip(names, FOURIER) if not plain}
        return cls(
            target=target,
            rank=record["r"],
            alpha=record["lora_alpha"],
            dropout=record["lora_dropout"],
            rslora=bool(record.get("use_rslora")),
            rank_pattern=record.get("rank_pattern") or {},
            alpha_pattern=record.get("alpha_pattern") or {},
            **(fourier or {"fourier_placement": "none"}),
        )


def _first_match(patterns: Mapping[str, Value], layer: str, default: Value) -> Value:
    found = (v for p, v in patterns.items() if re.fullmatch(rf"(.*\.)?({p})", layer))
    return next(found, default)
