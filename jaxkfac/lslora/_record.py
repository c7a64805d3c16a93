"""``adapter_config.json``: a config in PEFT's words."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxkfac.lslora._config import Config, RmsSigma
from jaxkfac.lslora._fourier import FOURIER
from jaxkfac.lslora._nonlinearity import Nonlinearity
from jaxkfac.lslora._registry import find_nonlinearity

Dialect = Literal["lslora", "peft"]

OWN = "jaxkfac"  # what PEFT has no word for; other readers pass it over
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
    phi = config.phi
    if phi is None and dialect == "lslora":
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
    if config.nonlinearity != FOURIER.name:  # of which files say nothing
        record[OWN]["nonlinearity"] = config.nonlinearity
    if phi is not None:
        # A reader that cannot measure starts another layer at 1.
        first = 1.0 if isinstance(sigma, RmsSigma) else sigma
        values = (config.fourier_placement, first, config.reg_weight)
        record |= zip(phi.settings, values, strict=True)
    return record


def check_record(record: Any, where: str) -> None:
    """Refuse a record that is not a LoRA or LS-LoRA adapter's, or that does not say all.

    Raises:
        ValueError: naming the file, and every setting that is missing or not supported, or a
            nonlinearity that is not known.
    """
    kind = record.get("peft_type") if isinstance(record, dict) else None
    if kind not in ("LSLORA", "LORA"):
        raise ValueError(f"{where}: expected peft_type 'LSLORA' or 'LORA', got {kind!r}")
    try:
        phi = nonlinearity_of(record)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    required = (*_REQUIRED, *([] if phi is None else phi.settings))
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


def nonlinearity_of(record: Mapping[str, Any]) -> Nonlinearity | None:
    """The nonlinearity of a record; ``None`` if it is one of plain LoRA.

    Raises:
        ValueError: it is not known; with the names that are.
    """
    phi = find_nonlinearity(_name(record))
    linear = record["peft_type"] == "LORA" and not any(key in record for key in phi.settings)
    return None if linear else phi


def _name(record: Mapping[str, Any]) -> str:
    own = record.get(OWN)
    return str(own.get("nonlinearity", FOURIER.name)) if isinstance(own, dict) else FOURIER.name


def from_record(
    record: Mapping[str, Any], modules: Mapping[str, Sequence[str]], whole: Sequence[str]
) -> Config:
    """The config of a checked record; PEFT's patterns of modules become patterns of layers.

    Raises:
        ValueError: PEFT gives slices of one layer different ranks or scalings.
    """
    phi, own = nonlinearity_of(record), record.get(OWN)
    common = {
        "rank": record["r"],
        "alpha": record["lora_alpha"],
        "rslora": bool(record.get("use_rslora", False)),
        "dropout": record["lora_dropout"],
        "nonlinearity": _name(record),
    }
    placement, init_sigma, reg_weight = "none", Config.init_sigma, Config.reg_weight
    if phi is not None:
        placement, init_sigma, reg_weight = (record[key] for key in phi.settings)
    if own is not None:
        sigma, target = own["init_sigma"], own["target"]
        return Config(
            **common,
            target=target if isinstance(target, str) else tuple(target),
            exclude=own["exclude"],
            fourier_placement=placement,
            init_sigma=RmsSigma(*sigma) if isinstance(sigma, list) else sigma,
            reg_weight=own["reg_weight"],
            rank_pattern=own["rank_pattern"],
            alpha_pattern=own["alpha_pattern"],
            modules_to_save=own["modules_to_save"],
            experts=own["experts"],
        )
    return Config(
        **common,
        fourier_placement=placement,
        init_sigma=init_sigma,
        reg_weight=reg_weight,
        target="|".join(map(re.escape, modules)),
        modules_to_save="|".join(map(re.escape, whole)) or None,
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
