"""The configuration of a run: its schema, its check, and the one place that turns it into methods.

`check` turns a plain mapping (what Hydra composed) into a `Config`, or raises a `SettingError` that names the
first mistake by its full dotted key. `build_methods` makes the method objects. `run_folder` names the folder.

Importing this loads no torch: a mistaken command is refused at once.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import typing
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    create_model,
    model_serializer,
)
from pydantic.errors import PydanticInvalidForJsonSchema

from efficient_ft.errors import SettingError, UserError, did_you_mean

if TYPE_CHECKING:
    from efficient_ft.methods.base import Method

Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(min_length=1)]


class _Part(BaseModel):
    # Unknown keys are mistakes; NaN and infinity are never a sensible setting; a key `model_…` is nobody's.
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True, protected_namespaces=())


class ModelConfig(_Part):
    """Which network, from which weights. `name` is a timm name or ``vit_digits``."""

    name: Name
    pretrained: bool = True
    #: Local file (.safetensors, .pth, .npz) in timm's names; used instead of a download.
    weights: str | None = None
    #: Pixels, or [height, width]; null: what the weights were trained at.
    image_size: Count | tuple[Count, Count] | None = None
    drop_path: Fraction = 0.0
    drop: Fraction = 0.0
    #: BatchNorm keeps its running statistics while training.
    frozen_bn: bool = True
    #: A classifier made anew (for other classes, or without weights) starts at zero.
    zero_head: bool = False
    #: The default selection of recipes that bring none of their own.
    select: Name = "last_stage"
    #: Normalisation per channel; null: what the weights were trained with.
    mean: tuple[float, ...] | None = None
    std: tuple[Positive, ...] | None = None
    #: Further arguments of ``timm.create_model``.
    kwargs: dict[str, Any] = Field(default_factory=dict)


class AugmentConfig(_Part):
    """The transform of training images. ``resize_crop``: resize, crop a part of `scale` of the area and bring it to
    the input size, flip. ``none``: what evaluation does."""

    name: Literal["resize_crop", "none"] = "resize_crop"
    #: To what before the crop: the ``input`` size, so many pixels square, or ``none``: the crop is of the whole image.
    resize: Count | Literal["input", "none"] = "input"
    scale: tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0, le=1)]] = (0.08, 1.0)
    flip: bool = True


class DataConfig(_Part):
    """Which images, how they are split, loaded and augmented."""

    name: Literal[
        "folder",
        "digits",
        "cifar10",
        "cifar100",
        "flowers102",
        "food101",
        "pets",
        "aircraft",
        "cars",
        "cub200",
    ]
    root: str = "./data"
    batch_size: Count = 64
    #: null: as `batch_size`.
    eval_batch_size: Count | None = None
    workers: Annotated[int, Field(ge=0)] = 2
    #: Share of the training images held out for validation: stratified, seeded.
    val_fraction: Fraction = 0.1
    #: The split on which the best epoch is chosen; ``test`` only to repeat a paper that did so.
    select_best_on: Literal["val", "test"] = "val"
    on_corrupt: Literal["stop", "skip"] = "stop"
    augment: AugmentConfig = AugmentConfig()
    download: bool = True


class OptimConfig(_Part):
    """Optimizer, learning-rate schedule, loss smoothing and clipping. Warm-up counts optimizer steps."""

    name: Literal["adamw", "sgd", "adam"]
    lr: Positive
    weight_decay: NotNegative = 0.0
    #: SGD only.
    momentum: Fraction = 0.9
    #: Adam and AdamW only.
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    #: The warm-up starts at this share of `lr`.
    warmup_ratio: Annotated[float, Field(ge=0, le=1)] = 0.001
    #: The cosine ends at this share of `lr`.
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.01
    label_smoothing: Fraction = 0.0
    #: Largest norm of the whole gradient; null: no clipping.
    clip: Positive | None = None
    #: The classifier's learning rate is `lr` times this.
    head_lr: Positive = 1.0
    #: Learning rate times this per layer from the head down; null: one rate for all.
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = None


class TrainerConfig(_Part):
    """How long, on what, in which precision."""

    epochs: Count
    #: Optimizer steps after which to stop; -1: after `epochs`.
    max_steps: Annotated[int, Field(ge=-1)] = -1
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    accelerator: Literal["auto", "cpu", "gpu", "mps"] = "auto"
    devices: Count | Literal["auto"] = 1
    #: Batches per optimizer step.
    accumulate: Count = 1
    #: Convolutional maps in channels-last memory; null: on a CPU, where they run faster so.
    channels_last: bool | None = None
    progress: bool = True
    deterministic: bool = False
    #: Evaluate on this many batches only; null: on all.
    limit_eval_batches: Count | None = None


class LoggerConfig(_Part):
    """Where metrics go besides the CSV and JSONL files that are always written."""

    name: Literal["none", "wandb", "tensorboard"] = "none"
    project: Name = "efficient-ft"
    #: null: the run folder's parent.
    group: str | None = None
    mode: Literal["online", "offline"] = "online"


class CostConfig(_Part):
    """The cost report. `compare_full`: probe plain full fine-tuning as well; `steps`: timed steps of each."""

    compare_full: bool = True
    steps: Count = 5


class InsightConfig(_Part):
    """What is recorded of a run besides its metrics, in insight.jsonl: see `training.insight`."""

    #: The first optimizer step and every so many-th after it; 0: none.
    every: Annotated[int, Field(ge=0)] = 0


class Config(_Part):
    """One run. `method` maps a method's name to its settings (the constructor's arguments, and `select`)."""

    model: ModelConfig
    #: With `tasks` the first of these.
    data: DataConfig
    #: Several data sets by name, trained on in turn, one optimizer step each in this order, with a classifier for each.
    tasks: dict[Name, DataConfig] = Field(default_factory=dict)
    method: Annotated[dict[Name, dict[str, Any]], Field(min_length=1)]
    optim: OptimConfig
    trainer: TrainerConfig
    logger: LoggerConfig = LoggerConfig()
    cost: CostConfig = CostConfig()
    insight: InsightConfig = InsightConfig()
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 233
    #: auto: the same command continues an interrupted run and shows a finished one; never: start anew.
    resume: Literal["auto", "never"] = "auto"
    #: A run folder to evaluate, without training.
    evaluate: str | None = None
    #: Print the cost and stop.
    cost_only: bool = False
    #: glibc keeps freed memory (Linux).
    keep_allocator: bool = True

    @model_serializer(mode="wrap")
    def _written_out(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A run of one data set says nothing of tasks."""
        plain: dict[str, Any] = write(self)
        if not self.tasks:
            plain.pop("tasks", None)
        return plain


def check(plain: Mapping[str, Any]) -> Config:
    """The configuration `plain` stands for.

    Raises:
        SettingError: for the first mistake: the full key, its value, what is allowed, and the nearest known name.
            Method names and settings are checked by `build_methods`, which knows the constructors.
    """
    if not isinstance(plain.get("method", {}), Mapping):
        raise SettingError("method", _show(plain["method"]), "a mapping from a method's name to its settings")
    plain = _without_missing(plain)
    # A YAML that says nothing but its package composes to null.
    plain = {**plain, "method": {k: {} if v is None else v for k, v in plain.get("method", {}).items()}}
    plain = {**plain, "tasks": {} if plain.get("tasks") is None else plain["tasks"]}
    if isinstance(plain["tasks"], Mapping) and all(isinstance(one, Mapping) for one in plain["tasks"].values()):
        plain["data"] = next(iter(plain["tasks"].values()), plain.get("data"))
    config = _validate(Config, plain, "")
    _check_together(config)
    return config


def _without_missing(value: Any) -> Any:
    """Without the entries that YAML marks as still to be given (``???``)."""
    if not isinstance(value, Mapping):
        return value
    return {key: _without_missing(below) for key, below in value.items() if below != "???"}


def _check_together(config: Config) -> None:
    """What no single value shows: settings that exclude each other, or mean nothing here."""
    model, data, optim, trainer = config.model, config.data, config.optim, config.trainer
    if config.evaluate is not None and config.cost_only:
        raise SettingError("cost_only", True, "false together with evaluate=RUN", "Ask for one of the two.")
    if (model.mean is None) != (model.std is None):
        missing = "model.std" if model.std is None else "model.mean"
        raise SettingError(missing, "null", "a list of numbers, one per channel, since the other one is given")
    if model.mean is not None and model.std is not None and len(model.mean) != len(model.std):
        raise SettingError("model.std", list(model.std), f"as many numbers as model.mean has ({len(model.mean)})")
    if model.name in ("vit_digits", "vit_micro") and model.pretrained and model.weights is None:
        raise SettingError(
            "model.pretrained", True, f"false: {model.name} has no published weights", "Or give model.weights=FILE."
        )
    for key, one in {f"tasks.{name}": one for name, one in config.tasks.items()}.items() or [("data", data)]:
        _check_data(key, one)
    if config.tasks:
        _check_tasks(config.tasks)
    for setting, owners in (("momentum", ("sgd",)), ("betas", ("adamw", "adam"))):
        # The default itself is harmless, and stands in every configuration that was written out.
        if getattr(optim, setting) != OptimConfig.model_fields[setting].default and optim.name not in owners:
            raise SettingError(
                f"optim.{setting}",
                _show(getattr(optim, setting)),
                f"nothing with optim={optim.name}",
                f"It belongs to optim={' or optim='.join(owners)}.",
            )
    if trainer.max_steps == 0:
        raise SettingError("trainer.max_steps", 0, "-1 (no limit) or a whole number of at least 1")
    if trainer.precision == "fp16" and trainer.accelerator == "cpu":
        raise SettingError("trainer.precision", "fp16", "fp32 or bf16 on the CPU")


def _check_data(key: str, data: DataConfig) -> None:
    if data.augment.scale[0] > data.augment.scale[1]:
        raise SettingError(f"{key}.augment.scale", list(data.augment.scale), "[smallest, largest], in that order")
    if data.augment.name == "none" and data.augment.resize != "input":
        raise SettingError(
            f"{key}.augment.resize",
            data.augment.resize,
            f"input with {key}.augment.name=none",
            "Nothing is cropped there.",
        )


def _check_tasks(tasks: Mapping[str, DataConfig]) -> None:
    if len(tasks) == 1:
        raise SettingError("tasks", ", ".join(tasks), "two data sets or more", "For one: tasks=none data=NAME.")
    for name in tasks:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise SettingError("tasks", name, "names of letters, digits, _ and -")
    first, *others = tasks
    for name in others:
        if tasks[name].select_best_on != tasks[first].select_best_on:
            raise SettingError(
                f"tasks.{name}.select_best_on",
                tasks[name].select_best_on,
                f"{tasks[first].select_best_on}, as for {first}: the best epoch is that of the best mean accuracy",
            )


def build_methods(config: Config) -> list[Method]:
    """The methods of a run, the selection among them, in the order in which they are to be applied.

    The only place that makes method objects. A selection named by the user replaces the default one (`select`)
    of the recipes beside it; where none is named and no recipe has one, `requires_grad` is left as it is.

    Raises:
        SettingError: unknown method or setting, or a value that its constructor refuses.
        UserError: selections that exclude each other.
    """
    from efficient_ft.methods import METHODS
    from efficient_ft.methods.base import in_order
    from efficient_ft.models.tasks import Tasks

    if config.tasks:
        Tasks(config.tasks)  # which knows what a network can call them
    for name in config.method:
        if name not in METHODS:
            raise SettingError("method", name, sorted(METHODS))
    if config.model.select != "keep":
        _selection_named("model.select", config.model.select, METHODS)
    for axis, does in (
        ("backprop", "replace the backward pass"),
        ("memory", "decide how activations are kept"),
        ("tokens", "decide which tokens flow on"),
    ):
        rivals = [name for name in config.method if METHODS[name].axis == axis]
        if len(rivals) > 1:
            raise UserError(f"method: {' and '.join(rivals)} both {does}; name one of them.")
    named = [name for name in config.method if METHODS[name].axis == "selection"]
    recipes = [name for name in config.method if name not in named]
    if len(named) > 1:
        raise UserError(
            f"method: {' and '.join(named)} both select what trains; name one of them"
            " (full: everything; with no selection named, the other methods bring their own)."
        )

    settings = {name: dict(config.method[name]) for name in config.method}
    for name, given in settings.items():
        if "seed" in _arguments(METHODS[name]) and given.get("seed") is None:
            given["seed"] = config.seed
    # What a method wants trained, where its constructor leaves the word free for that.
    selects = {
        name: settings[name].pop("select")
        for name in recipes
        if "select" in settings[name] and "select" not in _arguments(METHODS[name])
    }
    methods = [_build(METHODS[name], name, settings[name]) for name in config.method]
    selection = None if named else _default_selection(selects, METHODS)
    if selection is not None:
        methods.append(_build(METHODS[selection], selection, {}))
    return in_order(methods)


def _default_selection(selects: Mapping[str, Any], known: Mapping[str, type]) -> str | None:
    """The one selection that the recipes agree on; null and ``keep`` have no say."""
    wanted: dict[str, str] = {}
    for recipe, select in selects.items():
        if select in (None, "keep"):
            continue
        wanted[recipe] = _selection_named(f"method.{recipe}.select", select, known)
    if len(set(wanted.values())) > 1:
        each = ", ".join(f"method.{recipe}.select={selects[recipe]}" for recipe in wanted)
        raise UserError(
            f"method: {each} disagree about what trains. Name a selection in the list, e.g."
            f" 'method=[{','.join([*selects, 'last_stage'])}]', or set them equal."
        )
    return next(iter(wanted.values()), None)


def _selection_named(setting: str, select: Any, known: Mapping[str, type]) -> str:
    """The selection that the value `select` of a setting names."""
    # Those that need to be told more (which blocks) cannot be a bare name.
    names = sorted(
        name
        for name, method in known.items()
        if method.axis == "selection"  # type: ignore[attr-defined]
        and all(p.default is not p.empty for p in _arguments(method).values())
    )
    name = "full" if select == "all" else select
    if name not in names:
        allowed = ["all", "keep", *(n for n in names if n != "full")]
        hint = "A selection with settings of its own goes into the list: 'method=[...]'."
        raise SettingError(setting, select, allowed, hint)
    return name


def _arguments(method: type) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(method).parameters)


def _build(method: type, name: str, settings: dict[str, Any]) -> Method:
    """One method from its settings, checked against the names and types of its constructor."""
    hints = typing.get_type_hints(method.__init__, include_extras=True)  # type: ignore[misc]
    fields: dict[str, Any] = {
        argument: (hints.get(argument, Any), ... if p.default is p.empty else p.default)
        for argument, p in _arguments(method).items()
    }
    schema = create_model(name, __config__=ConfigDict(**_Part.model_config, arbitrary_types_allowed=True), **fields)
    checked = _validate(schema, settings, f"method.{name}")
    try:
        return method(**{argument: getattr(checked, argument) for argument in settings})
    except SettingError as error:
        # A constructor knows its settings by their own names only.
        error.setting = f"method.{name}.{error.setting}"
        error.args = (f"method.{name}.{error}",)
        raise


# ---------------------------------------------------------------------- one clear message for a mistake
_Model = typing.TypeVar("_Model", bound=BaseModel)


def _validate(schema: type[_Model], plain: Mapping[str, Any], prefix: str) -> _Model:
    """`plain` as a `schema`; its first mistake as a SettingError, keys below `prefix`.

    Strict, as JSON: no "3" for 3, no true for 1, while a list still serves for a tuple.
    """
    try:
        return schema.model_validate_json(json.dumps(plain, default=str), strict=True)
    except ValidationError as error:
        # A misspelt key often shows as a missing one as well: name the spelling first.
        mistakes = sorted(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
        raise _mistake(schema, plain, prefix, mistakes[0]["loc"], mistakes[0]["type"]) from None


def _mistake(
    schema: type[BaseModel], plain: Mapping[str, Any], prefix: str, loc: tuple[int | str, ...], kind: str
) -> SettingError:
    """The message for the mistake at `loc`: walks down to the deepest key that a user would write."""
    whole = _json_schema(schema)
    key, value, node = prefix, typing.cast(Any, plain), whole
    for part in loc:
        name = str(part)
        node = _resolved(node, whole)
        below = node.get("properties")
        if below is None and isinstance(value, Mapping) and isinstance(node.get("additionalProperties"), dict):
            below = dict.fromkeys(value, node["additionalProperties"])  # names of the user's own
        if below is None or not isinstance(value, Mapping):
            break  # inside one setting's value (a list, or a branch of a union)
        if name not in below:
            return UnknownSetting(f"{key}.{name}".lstrip("."), value.get(name), below, _leaves(whole, whole))
        key, value, node = f"{key}.{name}".lstrip("."), value.get(name), below[name]
    allowed = _allowed(_resolved(node, whole), whole)
    if kind == "missing" and value is None:  # not merely an entry of a list too few
        return SettingError(key, "???", allowed, f"It has no default: give {key}=VALUE.")
    if "enum" in node:
        return SettingError(key, _show(value), node["enum"])
    return SettingError(key, _show(value), allowed)


class UnknownSetting(SettingError):
    """A key that nothing reads.

    Args:
        setting: its full name.
        known: the names that exist beside it.
        elsewhere: full names of settings anywhere, for one that was put into the wrong group.
    """

    def __init__(self, setting: str, value: object, known: Iterable[str], elsewhere: Iterable[str] = ()):
        self.setting, self.value, self.known = setting, value, sorted(known)
        group, _, name = setting.rpartition(".")
        known = self.known
        same_name = [full for full in elsewhere if full.rpartition(".")[2] == name]
        if same_name:
            hint = f" Did you mean '{same_name[0]}'?"
        else:
            hint = did_you_mean(name, known) or did_you_mean(setting, elsewhere)
        text = f"{setting}={_show(value)}: there is no such setting"
        text += f"; {group or 'a run'} has {', '.join(known)}." if known else f"; {group} has none."
        UserError.__init__(self, text + hint)


def _json_schema(schema: type[BaseModel]) -> dict[str, Any]:
    try:
        return schema.model_json_schema()
    except PydanticInvalidForJsonSchema:  # a constructor's type that no YAML can express
        return {"properties": {name: {} for name in schema.model_fields}}


def _resolved(node: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    reference = node.get("$ref")
    return whole["$defs"][reference.rpartition("/")[2]] if reference else node


def setting_names() -> list[str]:
    """Full names of all settings but the methods' own."""
    whole = _json_schema(Config)
    return _leaves(whole, whole)


def _leaves(node: dict[str, Any], whole: dict[str, Any], prefix: str = "") -> list[str]:
    """Full names of all settings below `node`."""
    names: list[str] = []
    for name, below in node.get("properties", {}).items():
        below = _resolved(below, whole)
        names += _leaves(below, whole, f"{prefix}{name}.") if "properties" in below else [prefix + name]
    return names


def _allowed(node: dict[str, Any], whole: dict[str, Any]) -> str:
    """What a JSON schema allows, in words."""
    if "anyOf" in node:
        branches = [_resolved(branch, whole) for branch in node["anyOf"]]
        return " or ".join(_allowed(branch, whole) for branch in branches)
    if "enum" in node:
        return "one of " + ", ".join(map(_show, node["enum"]))
    if "const" in node:
        return _show(node["const"])
    bounds = [
        words.format(_show(node[limit]))
        for limit, words in (
            ("minimum", "of at least {}"),
            ("exclusiveMinimum", "above {}"),
            ("maximum", "of at most {}"),
            ("exclusiveMaximum", "below {}"),
        )
        if limit in node
    ]
    within = " " + " and ".join(bounds) if bounds else ""
    match node.get("type"):
        case "integer":
            return "a whole number" + within
        case "number":
            return "a number" + within
        case "boolean":
            return "true or false"
        case "null":
            return "null"
        case "string":
            return "a text that is not empty" if node.get("minLength") else "a text"
        case "array" if "prefixItems" in node:
            items = [_allowed(_resolved(item, whole), whole) for item in node["prefixItems"]]
            return f"a list of {len(items)}: {', '.join(items)}"
        case "array":
            item = _allowed(_resolved(node.get("items", {}), whole), whole)
            return f"a list, each {item}"
        case "object":
            below = node.get("additionalProperties")
            inner = f" to {_allowed(_resolved(below, whole), whole)}" if isinstance(below, dict) else ""
            return f"a mapping from names{inner}" + (", not empty" if node.get("minProperties") else "")
    return "a value of the type that the constructor names"


def _show(value: Any) -> str:
    """As on the command line and in YAML."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


# ---------------------------------------------------------------------- where a run is kept
#: What changes how a run is shown, logged, measured or fed, not what comes out of it.
_NO_EFFECT: dict[str, Any] = {
    "resume": True,
    "evaluate": True,
    "cost_only": True,
    "cost": True,
    "insight": True,
    "logger": True,
    "keep_allocator": True,
    "trainer": {"progress", "accelerator"},
}


def fingerprint(config: Config) -> str:
    """8 hex digits of all that affects the result of a run: equal for runs that would train the same."""
    what = config.model_dump(mode="json", exclude=_NO_EFFECT)
    what["data"] = _content(config.data)
    if config.tasks:
        # As a list: they take turns in their order.
        what["tasks"] = [[name, _content(data)] for name, data in config.tasks.items()]
        del what["data"]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:8]


def _content(data: DataConfig) -> dict[str, Any]:
    """What of a data set affects a result."""
    what = data.model_dump(mode="json", exclude={"workers", "download", "eval_batch_size"})
    # A known data set is the same wherever it lies; a folder is known by its place alone.
    if data.name == "folder":
        what["root"] = os.path.normpath(data.root)
    else:
        del what["root"]
    return what


def run_folder(config: Config) -> str:
    """``outputs/DATA/MODEL/METHOD+METHOD/FINGERPRINT``, relative, with forward slashes; DATA+DATA with several tasks.

    The same configuration always gives the same folder, which is how the same command finds what it left.
    """
    data: str = config.data.name
    if data == "folder":
        data = os.path.basename(os.path.normpath(config.data.root)) or data
    if config.tasks:
        data = "+".join(config.tasks)
    parts = [data, config.model.name, "+".join(sorted(config.method)), fingerprint(config)]
    return "/".join(["outputs", *(re.sub(r"[^\w.+-]+", "_", part) for part in parts)])
