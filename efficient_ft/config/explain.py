"""Error messages for invalid settings. Messages state the constraint and suggest the most similar known name."""

from __future__ import annotations

import difflib
import functools
import json
import re
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.errors import PydanticInvalidForJsonSchema

from efficient_ft.config.schema import Config
from efficient_ft.core.errors import SettingError, UserError


def mistake(
    schema: type[BaseModel], plain: Mapping[str, Any], prefix: str, loc: tuple[int | str, ...], kind: str
) -> SettingError:
    """Convert the validation error that pydantic reports at `loc` to a SettingError.

    The error names the innermost key that a user can set.
    """
    whole = json_schema(schema)
    key, value, node = prefix, typing.cast(Any, plain), whole
    for part in loc:
        name = str(part)
        branches = [resolved(one, whole) for one in node.get("anyOf", []) if isinstance(value, Mapping)]
        node = next((one for one in branches if "properties" in one), resolved(node, whole))
        below = node.get("properties")
        if below is None and isinstance(value, Mapping) and isinstance(node.get("additionalProperties"), dict):
            below = dict.fromkeys(value, node["additionalProperties"])  # Users choose these names.
        if below is None or not isinstance(value, Mapping):
            break  # The location is inside the value of a setting (a list, or a branch of a union).
        if name not in below:
            return UnknownSetting(f"{key}.{name}".lstrip("."), value.get(name), below, _leaves(whole, whole))
        key, value, node = f"{key}.{name}".lstrip("."), value.get(name), below[name]
    constraint = _CONSTRAINTS.get(key) or _constraint(resolved(node, whole), whole)
    if kind == "missing" and value is None:  # A list with too few entries also has the kind "missing".
        data = plain.get("data", {}).get("name", "labels") if key == "data.labels.file" else "labels"
        if data != "labels":
            return SettingError(
                "data.labels", "a mapping", f"null with data={data}", "Label files require data=labels."
            )
        return SettingError(key, "nothing", constraint, f"The setting has no default. Pass {key}=VALUE.")
    if "enum" in node:
        return SettingError(key, show(value), node["enum"])
    quoted = isinstance(value, str) and re.search(r"number|integer|true or false", constraint)
    if quoted and re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?|true|false", value, re.IGNORECASE):
        return SettingError(key, f'"{value}"', constraint, f"The quotes make the value a string. Use {key}={value}.")
    return SettingError(key, "an empty string" if value == "" else show(value), constraint)


#: Constraints that are easier to read than those of the JSON schema.
_CONSTRAINTS = {
    "data.labels.file": "one file, or one file for each of the splits train, val and test, such as {train: a.csv,"
    " val: b.csv}",
}
#: Names that other tools use for each setting. If one of these names is used, the error message suggests the setting.
_OTHER_NAMES = {
    "optim.lr": "learning_rate base_lr lr0 initial_lr max_lr",
    "optim.weight_decay": "wd l2 decay",
    "optim.name": "opt optimizer optimiser",
    "optim.schedule": "scheduler sched lr_scheduler lr_schedule lr_scheduler_type",
    "optim.warmup_steps": "warmup num_warmup_steps warmup_epochs warmup_ratio",
    "optim.grad_clip_norm": "clip clip_grad grad_clip gradient_clip_val max_grad_norm",
    "optim.label_smoothing": "smoothing label_smoothing_factor",
    "data.batch_size": "bs batch batches train_batch_size per_device_train_batch_size",
    "data.eval_batch_size": "val_batch_size test_batch_size per_device_eval_batch_size",
    "data.num_workers": "workers dataloader_num_workers",
    "data.root": "path dir data_dir data_path data_root dataset_dir",
    "data.val_fraction": "val_split validation_split val_ratio",
    "data.augment.policy": "aa auto_augment",
    "data.augment.erase_prob": "reprob random_erasing erasing",
    "data.augment.mixup": "mixup_alpha",
    "data.augment.cutmix": "cutmix_alpha",
    "data.augment.mix_prob": "mixup_prob",
    "model.image_size": "imgsz img_size input_size resolution size",
    "model.weights": "checkpoint ckpt pretrained_weights checkpoint_path",
    "model.drop_rate": "dropout drop",
    "model.drop_path_rate": "drop_path stochastic_depth",
    "trainer.epochs": "epoch max_epochs num_epochs n_epochs nepochs num_train_epochs",
    "trainer.max_steps": "steps iterations iters num_steps",
    "trainer.precision": "amp mixed_precision fp16 bf16 dtype",
    "trainer.accelerator": "device",
    "trainer.devices": "gpus num_gpus ngpu",
    "trainer.ema": "model_ema ema_decay model_ema_decay",
    "trainer.patience": "early_stopping early_stopping_patience",
    "trainer.grad_accum_steps": "accumulate_grad_batches gradient_accumulation_steps accum_iter grad_accumulation",
}


def _nearest(setting: str, known: Iterable[str], elsewhere: Iterable[str]) -> str:
    """Return a hint that names the setting most similar to an unknown name, or "" if no setting is similar.

    The names of settings in other tools are also recognized.
    """
    group, _, name = setting.rpartition(".")
    full = {other: target for target, others in _OTHER_NAMES.items() if target in elsewhere for other in others.split()}
    here = dict.fromkeys(known)
    by_name = {**full, **{one.rpartition(".")[2]: one for one in elsewhere}, **here}
    word = name.lower().replace("-", "_")
    close = functools.partial(difflib.get_close_matches, word, n=1)
    exact = [word] if word in by_name else []
    near = next(iter(close(here, cutoff=0.75) or exact or close(by_name)), None)
    target = by_name.get(near) if near else None
    if target and group.startswith("tasks.") and target.startswith("data."):
        target = f"{group}.{target.removeprefix('data.')}"
    return f" Did you mean '{target or near}'?" if near else ""


class UnknownSetting(SettingError):
    """Error for a setting that does not exist.

    `known` contains the names of the settings in the same group, and `elsewhere` contains the full names of other
    settings.
    """

    def __init__(self, setting: str, value: object, known: Iterable[str], elsewhere: Iterable[str] = ()):
        group = setting.rpartition(".")[0]
        self.setting, self.value = setting, value
        self.known = sorted(set(known) - (set() if group else REMOVED.keys()))
        text = f"{setting}={show(value)}: there is no such setting"
        text += f". {group or 'A run'} has {', '.join(self.known)}." if self.known else f". {group} has no settings."
        UserError.__init__(self, text + _nearest(setting, self.known, list(elsewhere)))


def json_schema(schema: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON schema of the pydantic model `schema`.

    If JSON cannot express some types, the result contains only the names of the settings.
    """
    try:
        return schema.model_json_schema()
    except PydanticInvalidForJsonSchema:
        return {"properties": {name: {} for name in schema.model_fields}}


def resolved(node: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """Return the definition that a node of the JSON schema `whole` references, or the node itself."""
    reference = node.get("$ref")
    return whole["$defs"][reference.rpartition("/")[2]] if reference else node


@functools.cache
def setting_names() -> tuple[str, ...]:
    """Return the full names of all settings except the settings of methods."""
    whole = json_schema(Config)
    return tuple(_leaves(whole, whole))


def _leaves(node: dict[str, Any], whole: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the full names of all settings below `node`."""
    names: list[str] = []
    for name, below in node.get("properties", {}).items():
        # A section that may be null is one branch of a union.
        options = [resolved(one, whole) for one in below.get("anyOf", [below])]
        sections = [one for one in options if "properties" in one]
        names += [leaf for one in sections for leaf in _leaves(one, whole, f"{prefix}{name}.")] or [prefix + name]
    return names


#: JSON schema keywords for the bounds of numbers, each with the comparison operator that messages show.
_BOUNDS = (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"))


def _constraint(node: dict[str, Any], whole: dict[str, Any]) -> str:
    """Return the constraint of a JSON schema node as text that follows "must be"."""
    if "anyOf" in node:
        branches = [_constraint(resolved(branch, whole), whole) for branch in node["anyOf"]]
        simple = len(branches) == 2 and not any(", " in branch or " or " in branch for branch in branches)
        return " or ".join(branches) if simple else f"{', '.join(branches[:-1])}, or {branches[-1]}"
    if "enum" in node:
        return "one of " + ", ".join(map(show, node["enum"]))
    if "const" in node:
        return show(node["const"])
    bounds = [f"{sign} {show(node[keyword])}" for keyword, sign in _BOUNDS if keyword in node]
    match node.get("type"):
        case "integer" | "number" as kind:
            words = "an integer" if kind == "integer" else "a number"
            return f"{words} {' and '.join(bounds)}" if bounds else words
        case "boolean":
            return "true or false"
        case "null":
            return "null"
        case "string":
            return "a non-empty string" if node.get("minLength") else "a string"
        case "array" if "prefixItems" in node:
            items = [_constraint(resolved(item, whole), whole) for item in node["prefixItems"]]
            each = f"each {items[0]}" if len(set(items)) == 1 else ", ".join(items)
            return f"a list of {len(items)} values, {each}"
        case "array":
            words = "a non-empty list" if node.get("minItems") else "a list"
            return f"{words}, each value {_constraint(resolved(node.get('items', {}), whole), whole)}"
        case "object":
            below = node.get("additionalProperties")
            words = "a non-empty mapping" if node.get("minProperties") else "a mapping"
            # A group is a mapping with fixed names. Other messages list these names.
            inner = resolved(below, whole) if isinstance(below, dict) else {}
            if not inner:
                return words
            keys = " or ".join(resolved(node.get("propertyNames", {}), whole).get("enum", ["names"]))
            each = _constraint(inner, whole)
            plural = "mappings" if f"{each} ".startswith("a mapping ") else f"values, each {each}"
            return f"{words} from {keys} to {plural}"
    return "a value of the type that the constructor declares"


def show(value: Any) -> str:
    """Return `value` in the notation of the command line and YAML."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


_EXPERIMENT = "Define the runs as rows of DIR/experiment/NAME.yaml, and pass -m --config-dir DIR experiment=NAME"
#: Removed settings and their replacements.
REMOVED = {
    "rows": f"{_EXPERIMENT}. To run rows of a published table, use efficient-ft table NAME --run --rows ROW",
    "table": "Use efficient-ft table NAME --run",
}


def refuse_removed(argument: str) -> None:
    """Raise a UserError if a command-line argument uses a removed setting or ``zip(...)``.

    The error message states the replacement.
    """
    key, _, value = argument.partition("=")
    if value.startswith("zip("):
        raise UserError(f"{argument}: zip(...) was removed. {_EXPERIMENT}.")
    name = key.lstrip("+~")
    if name in REMOVED and argument != "rows=null":  # The jobs of an experiment have ``rows=null``.
        raise UserError(f"{argument}: the setting {name} was removed. {REMOVED[name]}.")
