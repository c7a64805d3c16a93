"""``adapter_config.json``: an adapter's settings in PEFT's terms."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxkfac.lslora._config import Config, RmsSigma
from jaxkfac.lslora._nonlinearity import FOURIER, Nonlinearity, find_nonlinearity

# ---------------- PEFT's settings: those that change the model, and the modules they target


REQUIRED = ("r", "lora_alpha", "target_modules", "lora_dropout")
# Replaces `init_lora_weights` in files of a nonlinear adapter. PEFT does not know this value, says
# so and stops; otherwise it would drop the nonlinearity and load the rest.
NEEDS_PLUG_IN = "nonlinear, so PEFT needs torch_ref.lslora.peft_plugin of jaxkfac[peft]"

# The initialization matters only if it changed the base model's weights too.
_OWN_BEGINNINGS = ("gaussian", "eva", "orthogonal", "mica")
_READ = (
    *REQUIRED,
    "peft_type",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "modules_to_save",
    "ensure_weight_tying",
    "bias",
    "init_lora_weights",
)
# Origin of the adapter, and options that only matter for initialization, training or merging.
_WITHOUT_EFFECT = (
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "runtime_config",
    "fan_in_fan_out",
    "megatron_core",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "qalora_group_size",
)


def unsupported(record: Mapping[str, Any], own_keys: tuple[str, ...]) -> dict[str, Any]:
    """The settings that describe a model other than (LS-)LoRA, or that are unknown here.

    An unknown setting counts if its value is truthy: a newer PEFT may compute something else.

    Args:
        record: Content of ``adapter_config.json``.
        own_keys: Additional keys, which PEFT does not have.
    """
    known_keys = {*_READ, *_WITHOUT_EFFECT, *own_keys}
    wrong = {key: value for key, value in record.items() if key not in known_keys and value}
    if record.get("bias", "none") != "none":
        wrong["bias"] = record["bias"]
    start = record.get("init_lora_weights", True)
    named = isinstance(start, str) and start.lower() in (*_OWN_BEGINNINGS, NEEDS_PLUG_IN.lower())
    if not (start is None or isinstance(start, bool) or named):
        wrong["init_lora_weights"] = start
    return wrong


_ALL_LINEAR = "all-linear"
_ENDS = ("embed_tokens", "shared", "lm_head")  # not linear, or the output layer


def is_target(record: Mapping[str, Any], module: str, *, stored: bool = False) -> bool:
    """Whether PEFT adapts a module of this name, if it is linear or an embedding.

    Args:
        record: Content of ``adapter_config.json``.
        module: Name of the module.
        stored: Whether the file adapts the module. ``"all-linear"`` stands for those of the file,
            and leaves out embeddings and the head otherwise.
    """
    excluded, targets = record.get("exclude_modules"), record["target_modules"]
    if excluded and _named(excluded, module):
        return False
    if is_saved_whole(record, module):
        return False
    if not targets:
        return True  # there is no restriction
    if is_all_linear(record):
        return stored or module.rpartition(".")[2] not in _ENDS
    if isinstance(targets, str) or not _named(targets, module):
        return _named(targets, module)
    chosen = record.get("layers_to_transform")
    if chosen is None or chosen == []:
        return True
    number = _layer_number(record, module)
    return number is not None and number in ([chosen] if isinstance(chosen, int) else chosen)


def is_all_linear(record: Mapping[str, Any]) -> bool:
    """Whether the settings say ``"all-linear"`` instead of names."""
    targets = record["target_modules"]
    return isinstance(targets, str) and targets.lower() == _ALL_LINEAR


def is_saved_whole(record: Mapping[str, Any], name: str) -> bool:
    """Whether PEFT trains and saves a module in full, by its name or by that of a submodule."""
    saved = record.get("modules_to_save") or ()
    return any(re.match(rf"(^|.*\.){module}($|\..*)", name) for module in saved)


def pattern_value(record: Mapping[str, Any], key: str, module: str, default: Any) -> Any:
    """The value of ``rank_pattern`` or ``alpha_pattern`` for a module; the first match counts."""
    matches = (
        value
        for pattern, value in (record.get(key) or {}).items()
        if re.match(rf"(.*\.)?({pattern})$", module)
    )
    return next(matches, default)


def _named(patterns: str | list[str], module: str) -> bool:
    if isinstance(patterns, str):
        return re.fullmatch(patterns, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in patterns)


def _layer_number(record: Mapping[str, Any], module: str) -> int | None:
    """The first number in a module's name, or the one after one of ``layers_pattern``."""
    patterns = record.get("layers_pattern")
    if not patterns:
        matches = [re.match(r".*?\.[^.]*\.(\d+)\.", module)]
    else:
        patterns = [patterns] if isinstance(patterns, str) else patterns
        matches = [re.match(rf"(?:^|.*?\.){p}\.(\d+)\.", module) for p in patterns]
    return next((int(match[1]) for match in matches if match), None)


# ---------------- writing and reading the record


Dialect = Literal["lslora", "peft"]

OWN = "jaxkfac"  # key of the settings that PEFT does not have; other readers ignore it
_OWN_FIELDS = ("target", "exclude", "rank_pattern", "alpha_pattern", "modules_to_save", "experts")
_OWN_FIELDS += ("init_sigma", "reg_weight")
_OWN_OPTIONS = ("nonlinearity", "checksums")
# The settings that are numbers, and their types.
_NUMBERS = {"r": ("a whole number", int), "lora_alpha": ("a number", (int, float))}
_NUMBERS |= {"lora_dropout": ("a number", (int, float))}
_PATTERNS = {"rank_pattern": "r", "alpha_pattern": "lora_alpha"}


def to_record(
    config: Config,
    modules: Mapping[str, Sequence[str]],
    full_modules: Sequence[str],
    dialect: Dialect,
    base_model: str | None,
    task_type: str | None,
) -> dict[str, Any]:
    """The content of the file.

    Args:
        config: Settings of the adapter.
        modules: For each layer, the modules of its slices.
        full_modules: Modules that are saved in full.
        dialect: ``"lslora"`` or ``"peft"``.
        base_model: Where PEFT finds the base model.
        task_type: PEFT's name for the task.
    """
    phi = config.phi
    if phi is None and dialect == "lslora":
        raise ValueError(
            "dialect='lslora' has no word for plain LoRA (fourier_placement='none'); save it "
            "with dialect='peft', as stock PEFT does"
        )
    sigma = config.init_sigma
    names = {module: layer for layer, module_names in modules.items() for module in module_names}
    ranks = {m: config.rank_of(n) for m, n in names.items()}
    alphas = {m: config.alpha_of(n) for m, n in names.items()}
    record: dict[str, Any] = {
        "peft_type": "LSLORA" if dialect == "lslora" else "LORA",
        "task_type": task_type,
        "base_model_name_or_path": base_model,
        "r": config.rank,
        "lora_alpha": config.alpha,
        # A pattern of exactly these modules: a list would also match longer names with their ends.
        "target_modules": "|".join(_pattern_of(name, config) for name in names),
        "lora_dropout": config.dropout,
        "use_rslora": config.rslora,
        # Without ^, PEFT matches the ends of names.
        "rank_pattern": {f"^{re.escape(m)}": r for m, r in ranks.items() if r != config.rank},
        "alpha_pattern": {f"^{re.escape(m)}": a for m, a in alphas.items() if a != config.alpha},
        "modules_to_save": list(full_modules) or None,
        "ensure_weight_tying": config.ensure_weight_tying,
        "bias": "none",
        OWN: {
            "target": config.target if isinstance(config.target, str) else list(config.target),
            **{name: _plain(getattr(config, name)) for name in _OWN_NAMES},
            "init_sigma": list(sigma) if isinstance(sigma, RmsSigma) else sigma,
            "reg_weight": config.reg_weight,
        },
    }
    if config.nonlinearity != FOURIER.name:  # files leave out the default
        record[OWN]["nonlinearity"] = config.nonlinearity
    if phi is not None:
        # A reader that cannot measure starts a new layer at 1.
        first = 1.0 if isinstance(sigma, RmsSigma) else sigma
        values = (config.fourier_placement, first, config.reg_weight)
        record |= zip(phi.settings, values, strict=True)
        if dialect == "peft":
            record["init_lora_weights"] = NEEDS_PLUG_IN
    return record


# Settings that a file of this library keeps under their own names.
_OWN_NAMES = ("exclude", "rank_pattern", "alpha_pattern", "modules_to_save", "experts")


def _plain(setting: Any) -> Any:
    return dict(setting) if isinstance(setting, Mapping) else setting


def _pattern_of(module: str, config: Config) -> str:
    """The pattern that PEFT matches with a module."""
    prefix, dot, name = module.rpartition(".")
    if config.ensure_weight_tying and name in _ENDS:  # PEFT looks for the last component alone
        return f"(?:{re.escape(prefix + dot)})?{re.escape(name)}"
    return re.escape(module)


def completed(record: Any, assume: Mapping[str, Any] | None) -> Any:
    """Add the settings that the caller must supply to a record.

    Files of the original LS-LoRA do not state the placement, since it has only one.

    Raises:
        ValueError: this library wrote the file, which then states all settings.
    """
    if not isinstance(record, dict):
        return record
    if assume and OWN in record:
        raise ValueError(
            f"assume={dict(assume)}: this folder was written here and says all of its settings; "
            "change the config that load returns"
        )
    original = record.get("peft_type") == "LSLORA" and OWN not in record
    first = {FOURIER.settings[0]: "output"} if original else {}
    return first | record | dict(assume or {})


def check_record(record: Any, where: str) -> None:
    """Refuse a record that is not of LoRA or LS-LoRA, or that is incomplete.

    Raises:
        ValueError: names the file, and every missing or unsupported setting or an unknown
            nonlinearity.
    """
    kind = record.get("peft_type") if isinstance(record, dict) else None
    if kind not in ("LSLORA", "LORA"):
        raise ValueError(f"{where}: expected peft_type 'LSLORA' or 'LORA', got {kind!r}")
    try:
        phi = nonlinearity_of(record)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    required = (*REQUIRED, *([] if phi is None else phi.settings))
    missing, own_settings = [key for key in required if key not in record], record.get(OWN)
    stored_own = own_settings if isinstance(own_settings, dict) else {}
    if OWN in record:
        missing += [f"{OWN}.{key}" for key in _OWN_FIELDS if key not in stored_own]
    if missing:
        raise ValueError(
            f"{where} lacks {missing}; without them it is another model than the one saved. If "
            "you know what they were, pass assume={...}, by these names"
        )
    _check_numbers(record, where)
    wrong = unsupported(record, (OWN, *([] if phi is None else phi.settings)))
    unknown = stored_own.keys() - {*_OWN_FIELDS, *_OWN_OPTIONS}
    wrong |= {f"{OWN}.{key}": stored_own[key] for key in sorted(unknown)}
    if "init_lora_weights" in wrong:
        raise ValueError(
            f"{where}: init_lora_weights={wrong['init_lora_weights']!r} is not supported: such a "
            "beginning changes the base model too, and the file holds only the adapter of the "
            "changed one. Let PEFT write it for the original: model.save_pretrained(folder, "
            "path_initial_model_for_weight_conversion=...)"
        )
    if wrong:
        raise ValueError(
            f"{where}: these settings are not supported: {wrong}. If one is not known here and "
            "changes nothing of what the adapter computes, pass assume={its name: None}"
        )


def _check_numbers(record: Mapping[str, Any], where: str) -> None:
    """Refuse a setting that is no number: null, or a number in quotes."""
    values = {key: record[key] for key in _NUMBERS}
    kinds = dict(_NUMBERS)
    for key, number in _PATTERNS.items():
        patterns = record.get(key) or {}
        if not isinstance(patterns, Mapping):
            raise ValueError(f"{where}: {key}: expected an object of patterns, got {patterns!r}")
        values |= {f"{key}[{pattern!r}]": value for pattern, value in patterns.items()}
        kinds |= {f"{key}[{pattern!r}]": _NUMBERS[number] for pattern in patterns}
    for key, value in values.items():
        what, types = kinds[key]
        if isinstance(value, bool) or not isinstance(value, types):
            raise ValueError(
                f"{where}: {key}: expected {what}, got {value!r}; write the number that the "
                "adapter was trained with into the file, without quotes"
            )


def nonlinearity_of(record: Mapping[str, Any]) -> Nonlinearity | None:
    """The nonlinearity of a record; ``None`` for plain LoRA.

    Raises:
        ValueError: it is unknown; lists the known names.
    """
    phi = find_nonlinearity(_name(record))
    marked = record.get("init_lora_weights") == NEEDS_PLUG_IN
    linear = record["peft_type"] == "LORA" and not any(key in record for key in phi.settings)
    return None if linear and not marked else phi


def _name(record: Mapping[str, Any]) -> str:
    own_settings = record.get(OWN)
    return (
        str(own_settings.get("nonlinearity", FOURIER.name))
        if isinstance(own_settings, dict)
        else FOURIER.name
    )


def from_record(
    record: Mapping[str, Any], layers: Mapping[str, tuple[int, Any]], full_paths: Sequence[str]
) -> Config:
    """The config of a checked record.

    Args:
        record: Content of the file.
        layers: ``{layer: (rank, alpha)}``, for a file that does not state its layers.
        full_paths: Paths of the parameters saved in full, for such a file.
    """
    phi, own_settings = nonlinearity_of(record), record.get(OWN)
    common = {
        "rank": record["r"],
        "alpha": record["lora_alpha"],
        "rslora": bool(record.get("use_rslora", False)),
        "dropout": record["lora_dropout"],
        "nonlinearity": _name(record),
        "ensure_weight_tying": bool(record.get("ensure_weight_tying", False)),
    }
    placement, init_sigma, reg_weight = "none", Config.init_sigma, Config.reg_weight
    if phi is not None:
        placement, init_sigma, reg_weight = (record[key] for key in phi.settings)
    if own_settings is not None:
        sigma, target = own_settings["init_sigma"], own_settings["target"]
        return Config(
            **common,
            **{name: own_settings[name] for name in _OWN_NAMES},
            target=target if isinstance(target, str) else tuple(target),
            fourier_placement=placement,
            init_sigma=RmsSigma(*sigma) if isinstance(sigma, list) else sigma,
            reg_weight=own_settings["reg_weight"],
        )
    ranks = {n: rank for n, (rank, _) in layers.items() if rank != record["r"]}
    alphas = {n: alpha for n, (_, alpha) in layers.items() if alpha != record["lora_alpha"]}
    return Config(
        **common,
        fourier_placement=placement,
        init_sigma=init_sigma,
        reg_weight=reg_weight,
        target="|".join(map(re.escape, layers)),
        modules_to_save="|".join(map(re.escape, full_paths)) or None,
        rank_pattern={re.escape(n): rank for n, rank in ranks.items()},
        alpha_pattern={re.escape(n): alpha for n, alpha in alphas.items()},
    )
