"""``adapter_config.json``: a config in PEFT's words."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxkfac.lslora._config import Config, RmsSigma

Dialect = Literal["lslora", "peft"]

OWN = "jaxkfac"  # what PEFT has no word for; other readers pass it over
_FOURIER = ("fourier_placement", "init_sigma", "fourier_reg_weight")
_OWN_FIELDS = ("target", "exclude", "rank_pattern", "alpha_pattern", "modules_to_save", "experts")
_OWN_FIELDS += ("init_sigma", "reg_weight")
_REQUIRED = ("r", "lora_alpha", "target_modules", "lora_dropout")
# Settings of PEFT's that change what an adapter computes, or what is in its file.
_UNSUPPORTED = (
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "layer_replication",
    "target_parameters",
    "alora_invocation_tokens",
    "trainable_token_indices",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "velora_config",
)


def to_record(
    config: Config,
    modules: Mapping[str, Sequence[str]],
    whole: Sequence[str],
    dialect: Dialect,
) -> dict[str, Any]:
    """The file's content.

    Args:
        config: The settings.
        modules: For each layer the modules that its slices are.
        whole: Modules that are saved whole.
        dialect: ``"lslora"`` or ``"peft"``.
    """
    linear = config.fourier_placement == "none"
    if linear and dialect == "lslora":
        raise ValueError(
            "dialect='lslora' has no word for plain LoRA (fourier_placement='none'); save it "
            "with dialect='peft', as stock PEFT does"
        )
    sigma = config.init_sigma
    names = {module: layer for layer, each in modules.items() for module in each}
    ranks = {m: config.rank_of(n) for m, n in names.items()}
    alphas = {m: config.alpha_of(n) for m, n in names.items()}
    record: dict[str, Any] = {
        "peft_type": "LSLORA" if dialect == "lslora" else "LORA",
        "task_type": None,
        "r": config.rank,
        "lora_alpha": config.alpha,
        # Exactly these modules: a list would also match others that end in one of them.
        "target_modules": "|".join(map(re.escape, names)),
        "lora_dropout": config.dropout,
        "use_rslora": config.rslora,
        "rank_pattern": {re.escape(m): r for m, r in ranks.items() if r != config.rank},
        "alpha_pattern": {re.escape(m): a for m, a in alphas.items() if a != config.alpha},
        "modules_to_save": list(whole) or None,
        "bias": "none",
        OWN: {
            "target": config.target if isinstance(config.target, str) else list(config.target),
            "exclude": config.exclude,
            "rank_pattern": dict(config.rank_pattern),
            "alpha_pattern": dict(config.alpha_pattern),
            "modules_to_save": config.modules_to_save,
            "experts": config.experts,
            "init_sigma": list(sigma) if isinstance(sigma, RmsSigma) else sigma,
            "reg_weight": config.reg_weight,
        },
    }
    if not linear:
        record["fourier_placement"] = config.fourier_placement
        # A reader that cannot measure starts another layer at 1.
        record["init_sigma"] = 1.0 if isinstance(sigma, RmsSigma) else sigma
        record["fourier_reg_weight"] = config.reg_weight
    return record


def check_record(record: Any, where: str) -> None:
    """Refuse a record that is not a LoRA or LS-LoRA adapter's, or that does not say all.

    Raises:
        ValueError: naming the file, and every setting that is missing or not supported.
    """
    kind = record.get("peft_type") if isinstance(record, dict) else None
    if kind not in ("LSLORA", "LORA"):
        raise ValueError(f"{where}: expected peft_type 'LSLORA' or 'LORA', got {kind!r}")
    required = (*_REQUIRED, *([] if is_linear(record) else _FOURIER))
    missing = [key for key in required if key not in record]
    if (own := record.get(OWN)) is not None:
        held = own if isinstance(own, dict) else ()
        missing += [f"{OWN}.{key}" for key in _OWN_FIELDS if key not in held]
    if missing:
        raise ValueError(
            f"{where} lacks {missing}; without them it is another model than the one saved"
        )
    wrong = {key: record[key] for key in _UNSUPPORTED if record.get(key)}
    if record.get("bias", "none") != "none":
        wrong["bias"] = record["bias"]
    if wrong:
        raise ValueError(f"{where}: these settings are not supported: {wrong}")


def is_linear(record: Mapping[str, Any]) -> bool:
    """Whether a record is one of plain LoRA."""
    return record["peft_type"] == "LORA" and not any(key in record for key in _FOURIER)


def from_record(
    record: Mapping[str, Any], modules: Mapping[str, Sequence[str]], whole: Sequence[str]
) -> Config:
    """The config of a checked record; PEFT's patterns of modules become patterns of layers.

    Raises:
        ValueError: PEFT gives slices of one layer different ranks or scalings.
    """
    linear, own = is_linear(record), record.get(OWN)
    common = {
        "rank": record["r"],
        "alpha": record["lora_alpha"],
        "rslora": bool(record.get("use_rslora", False)),
        "dropout": record["lora_dropout"],
    }
    if own is not None:
        sigma, target = own["init_sigma"], own["target"]
        return Config(
            **common,
            target=target if isinstance(target, str) else tuple(target),
            exclude=own["exclude"],
            fourier_placement="none" if linear else record["fourier_placement"],
            init_sigma=RmsSigma(*sigma) if isinstance(sigma, list) else sigma,
            reg_weight=own["reg_weight"],
            rank_pattern=own["rank_pattern"],
            alpha_pattern=own["alpha_pattern"],
            modules_to_save=own["modules_to_save"],
            experts=own["experts"],
        )
    fourier = (
        {}
        if linear
        else {
            "init_sigma": record["init_sigma"],
            "reg_weight": record["fourier_reg_weight"],
        }
    )
    return Config(
        **common,
        **fourier,
        target="|".join(map(re.escape, modules)),
        modules_to_save="|".join(map(re.escape, whole)) or None,
        fourier_placement="none" if linear else record["fourier_placement"],
        rank_pattern=_by_layer(record, "rank_pattern", modules),
        alpha_pattern=_by_layer(record, "alpha_pattern", modules),
    )


def _by_layer(
    record: Mapping[str, Any], key: str, modules: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    found = {}
    for pattern, value in (record.get(key) or {}).items():
        for layer, names in modules.items():
            matched = [re.match(rf"(.*\.)?({pattern})$", name) is not None for name in names]
            if any(matched) and not all(matched):
                raise ValueError(
                    f"{key}: {pattern!r} gives only some slices of layer {layer!r} {value}, and "
                    "all slices of a stack have one"
                )
            if any(matched):
                found.setdefault(re.escape(layer), value)
    return found
