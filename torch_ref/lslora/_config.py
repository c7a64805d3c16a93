"""What an adapter is made from."""

import dataclasses
import math
import re
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Config:
    r"""Settings of one LS-LoRA adapter; all of them are saved with it.

    Attributes:
        target: Regular expression over module names, a full match.
        rank: r, the width of the bottleneck.
        alpha: The branch is scaled by ``alpha / rank``.
        fourier_placement: ``"output"``: $y = W x + \varphi(s B A x)$. ``"bottleneck"``:
            $y = W x + s B \varphi(A x)$. They are different models.
        init_sigma: First value of $\sigma$.
        reg_weight: What the training script multiplies :func:`fourier_loss` with.
        dropout: Probability, of the branch's inputs.
    """

    target: str
    rank: int = 8
    alpha: float = 16.0
    fourier_placement: Literal["output", "bottleneck"] = "output"
    init_sigma: float = 1.0
    reg_weight: float = 0.01
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.fourier_placement not in ("output", "bottleneck"):
            raise ValueError(
                f"fourier_placement is 'output' or 'bottleneck', got {self.fourier_placement!r}"
            )
        if self.rank < 1 or not 0 <= self.dropout < 1:
            raise ValueError(
                f"expected rank >= 1 and dropout in [0, 1), got {self.rank} and {self.dropout}"
            )
        if not math.isfinite(self.init_sigma) or self.init_sigma == 0:
            raise ValueError(f"init_sigma must be finite and not 0, got {self.init_sigma}")
        re.compile(self.target)

    @property
    def scaling(self) -> float:
        """``alpha / rank``."""
        return self.alpha / self.rank

    def to_peft(self, peft_type: Literal["LSLORA", "LORA"]) -> dict[str, Any]:
        """The keys of ``adapter_config.json``."""
        return {
            "peft_type": peft_type,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": self.target,
            "lora_dropout": self.dropout,
            "bias": "none",
            "fourier_placement": self.fourier_placement,
            "init_sigma": self.init_sigma,
            "fourier_reg_weight": self.reg_weight,
        }

    @classmethod
    def from_peft(cls, record: dict[str, Any]) -> "Config":
        """The inverse of :meth:`to_peft`; a list of target suffixes becomes a pattern.

        Raises:
            ValueError: another type, or a key that decides what the adapter computes is missing.
        """
        if record.get("peft_type") not in ("LSLORA", "LORA"):
            raise ValueError(f"expected peft_type LSLORA or LORA, got {record.get('peft_type')!r}")
        missing = cls(target="").to_peft("LSLORA").keys() - record.keys() - {"bias"}
        if missing:
            raise ValueError(
                f"adapter_config.json lacks {sorted(missing)}; without them it is another model "
                "than the one that was saved"
            )
        target = record["target_modules"]
        if not isinstance(target, str):
            target = r"(.*\.)?(" + "|".join(re.escape(t) for t in sorted(target)) + ")"
        return cls(
            target=target,
            rank=record["r"],
            alpha=record["lora_alpha"],
            fourier_placement=record["fourier_placement"],
            init_sigma=record["init_sigma"],
            reg_weight=record["fourier_reg_weight"],
            dropout=record["lora_dropout"],
        )
