"""PEFT's settings: which of them change what saved weights compute, and which modules they name."""

import re
from collections.abc import Mapping
from typing import Any

REQUIRED = ("r", "lora_alpha", "target_modules", "lora_dropout")
# In place of `init_lora_weights` in files of a nonlinear adapter. PEFT knows no such way to begin,
# says so and stops; without it, it would leave out the nonlinearity and load the rest.
NEEDS_PLUG_IN = "nonlinear, so PEFT needs torch_ref.lslora.peft_plugin of jaxkfac[peft]"

# How the weights began matters only where that changed the base model's weights as well.
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
    "bias",
    "init_lora_weights",
)
# Where the adapter comes from, and what only its beginning, its training or merging asks for.
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
    "ensure_weight_tying",
)


def unsupported(record: Mapping[str, Any], own: tuple[str, ...]) -> dict[str, Any]:
    """The settings that make another model than (LS-)LoRA, or that are not known here.

    What is not known counts where it says something: a newer PEFT may compute something else.

    Args:
        record: Of ``adapter_config.json``.
        own: Keys that PEFT does not have.
    """
    known = {*_READ, *_WITHOUT_EFFECT, *own}
    wrong = {key: value for key, value in record.items() if key not in known and value}
    if record.get("bias", "none") != "none":
        wrong["bias"] = record["bias"]
    start = record.get("init_lora_weights", True)
    named = isinstance(start, str) and start.lower() in (*_OWN_BEGINNINGS, NEEDS_PLUG_IN.lower())
    if not (start is None or isinstance(start, bool) or named):
        wrong["init_lora_weights"] = start
    return wrong


def is_target(record: Mapping[str, Any], module: str) -> bool:
    """Whether PEFT adapts a module of this name, if it is linear."""
    excluded, targets = record.get("exclude_modules"), record["target_modules"]
    if excluded and _named(excluded, module):
        return False
    if is_saved_whole(record, module):
        return False
    if not targets:
        return True  # nothing is said
    if isinstance(targets, str) or not _named(targets, module):
        return _named(targets, module)
    chosen = record.get("layers_to_transform")
    if chosen is None or chosen == []:
        return True
    number = _layer_number(record, module)
    return number is not None and number in ([chosen] if isinstance(chosen, int) else chosen)


def is_saved_whole(record: Mapping[str, Any], name: str) -> bool:
    """Whether PEFT trains and saves a module whole, by its name or that of something in it."""
    saved = record.get("modules_to_save") or ()
    return any(re.match(rf"(^|.*\.){module}($|\..*)", name) for module in saved)


def pattern_value(record: Mapping[str, Any], key: str, module: str, default: Any) -> Any:
    """What ``rank_pattern`` or ``alpha_pattern`` says of a module; the first match counts."""
    found = (
        value
        for pattern, value in (record.get(key) or {}).items()
        if re.match(rf"(.*\.)?({pattern})$", module)
    )
    return next(found, default)


def _named(patterns: str | list[str], module: str) -> bool:
    if isinstance(patterns, str):
        return re.fullmatch(patterns, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in patterns)


def _layer_number(record: Mapping[str, Any], module: str) -> int | None:
    """The first number in a module's name, or that behind one of ``layers_pattern``."""
    patterns = record.get("layers_pattern")
    if not patterns:
        matches = [re.match(r".*?\.[^.]*\.(\d+)\.", module)]
    else:
        patterns = [patterns] if isinstance(patterns, str) else patterns
        matches = [re.match(rf"(?:^|.*?\.){p}\.(\d+)\.", module) for p in patterns]
    return next((int(match[1]) for match in matches if match), None)
