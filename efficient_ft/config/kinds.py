"""The rules of each kind of task: which data sets and networks it takes, and which settings it does not support.

Importing this loads no torch. `training.kinds` holds the objects that train and evaluate. A package adds a kind by an
entry point, which names an object that its module passes to `training.kinds.registry.register`::

    [project.entry-points."efficient_ft.kinds"]
    regression = "image_regression.kind:regression"
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points

from efficient_ft.config.explain import show
from efficient_ft.config.schema import DATA_NAMES, Config, MaskConfig, ModelConfig
from efficient_ft.core.errors import SettingError
from efficient_ft.core.packages import KINDS_GROUP

#: Image classifiers that timm does not have.
OWN_CLASSIFIERS = ("vit_digits", "vit_micro", "proxyless_mobile")


@dataclass(frozen=True)
class KindRules:
    """The rules for a configuration with ``task=NAME``.

    Attributes:
        name: the value of ``task``.
        data: names of its data sets (``data.name``).
        family: the family of its networks, see `config.schema.ModelConfig.family`.
        networks: names of the networks (``model.name``) that the kind adds. Their family has the name of the kind.
        section: the section of ``data`` with the settings of its data sets, ``masks`` or ``text``; empty if there is
            none.
        section_words: the constraint of the section, for messages.
        data_words: for messages: the property of its data sets, and a hint; None for the default kind, for which
            messages name the setting ``task`` instead.
        model_words: the same for its networks.
        augmentation: where the settings of augmentation are, if ``data.augment`` does not apply; empty if it does.
        unsupported: unsupported features, each with a hint for messages: ``tasks`` (several data sets),
            ``cache_features``, ``prefix`` (forms of the frozen prefix), ``tokens`` (methods that drop or merge tokens).
    """

    name: str
    data: tuple[str, ...]
    family: str = "classification"
    networks: tuple[str, ...] = ()
    section: str = ""
    section_words: str = "a mapping"
    data_words: tuple[str, str] | None = None
    model_words: tuple[str, str] | None = None
    augmentation: str = ""
    unsupported: Mapping[str, str | None] = field(default_factory=dict)

    def check(self, config: Config) -> None:
        """Reject settings that this kind does not support.

        Raises:
            SettingError: for the first such setting.
        """
        if config.tasks and "tasks" in self.unsupported:
            raise SettingError("tasks", ", ".join(config.tasks), f"none with task={self.name}")
        self.refuse_unsupported(config, f"with task={self.name}")
        augmentation = config.data.augment.model_dump(exclude_defaults=True)
        if self.augmentation and augmentation:
            setting, value = next(iter(augmentation.items()))
            known = f"left out with task={self.name}"
            raise SettingError(f"data.augment.{setting}", show(value), known, self.augmentation)

    def refuse_unsupported(self, config: Config, where: str) -> None:
        """Reject stored features and forms of the frozen prefix if they are not supported.

        Args:
            config: the configuration of the run.
            where: ends the constraint in the message.
        """
        trainer = config.trainer
        if trainer.cache_features == "on" and "cache_features" in self.unsupported:
            known = f"off or auto {where}"
            raise SettingError("trainer.cache_features", "on", known, self.unsupported["cache_features"])
        if trainer.prefix in ("folded", "bf16") and "prefix" in self.unsupported:
            raise SettingError("trainer.prefix", trainer.prefix, f"fp32 or auto {where}", self.unsupported["prefix"])


class _SegmentationRules(KindRules):
    def check(self, config: Config) -> None:
        super().check(config)
        assert config.data.masks is not None, "a data set without masks is rejected before"
        _check_masks(config.data.name, config.data.masks)


class _TextRules(KindRules):
    def check(self, config: Config) -> None:
        super().check(config)
        text, model = config.data.text, config.model
        assert text is not None, "a data set without texts is rejected before"
        columns = [*text.columns, text.label]
        if len(set(columns)) < len(columns):
            raise SettingError("data.text.columns", text.columns, f"other columns than {text.label}, each once")
        for name, value in (("image_size", model.image_size), ("mean", model.mean), ("std", model.std)):
            if value is not None:
                hint = "The length of texts is model.max_length." if name == "image_size" else "Texts have no colors."
                raise SettingError(f"model.{name}", show(value), "null with task=text", hint)


_MASKS, _TEXTS = ("camvid", "cityscapes", "voc2012_aug", "mask_folder"), ("rte", "text_folder")
_NO_PREFIX: dict[str, str | None] = {"tasks": None, "cache_features": None, "prefix": None}

#: The rules of all kinds that are loaded, by name.
RULES: dict[str, KindRules] = {
    "classification": KindRules("classification", tuple(n for n in DATA_NAMES if n not in (*_MASKS, *_TEXTS))),
    "segmentation": _SegmentationRules(
        "segmentation",
        _MASKS,
        family="segmentation",
        section="masks",
        data_words=("with masks", f"Choose data={', '.join(_MASKS[:-1])} or {_MASKS[-1]}."),
        model_words=(
            "a segmentation network",
            "Choose model=segformer_b0, model=deeplabv3_mobilenetv2, or model=smp with model.encoder=NAME.",
        ),
        augmentation="Masks have data.masks.zoom and data.masks.flip.",
        unsupported={**_NO_PREFIX, "tokens": "Every position of the image needs its features."},
    ),
    "text": _TextRules(
        "text",
        _TEXTS,
        family="text",
        section="text",
        section_words="a mapping with columns and label",
        data_words=("of texts", f"Choose data={' or '.join(_TEXTS)}."),
        model_words=(
            "a text classifier",
            "Choose model=bert_base, distilbert_base, bert_tiny, or model=text with model.name=bert model.weights=DIR.",
        ),
        augmentation="Texts have none.",
        unsupported={**_NO_PREFIX, "tokens": "These methods need tokens on the grid of an image."},
    ),
}

#: Several data sets in turn (``tasks=``), which use the rules of their kind in addition.
SEVERAL = KindRules(
    "several tasks",
    (),
    unsupported={"cache_features": "auto stores none there.", "prefix": "auto is fp32 there."},
)


def rules_of(name: str) -> KindRules:
    """Return the rules of a kind; loads the package that adds it.

    Args:
        name: the value of ``task``.

    Raises:
        SettingError: the kind is unknown.
    """
    if name not in RULES:
        for entry in entry_points(group=KINDS_GROUP, name=name):
            entry.load()  # its module registers the kind
    if name not in RULES:
        raise SettingError("task", name, sorted({*RULES, *(entry.name for entry in entry_points(group=KINDS_GROUP))}))
    return RULES[name]


def check_kind(config: Config) -> None:
    """Reject a network or a data set of another kind, and settings that the kind of the run does not support.

    Raises:
        SettingError: for the first mistake.
    """
    rules, data, model = rules_of(config.task), config.data, config.model
    of_data = _kind_of_data("data.name", data.name)
    for one in config.tasks:
        _kind_of_data(f"tasks.{one}.name", config.tasks[one].name)
    _refuse_section(config, (one for one in RULES.values() if one.section and one is not of_data))
    if model.family != rules.family or model.name in OWN_CLASSIFIERS:
        _refuse_setting_of_other_family(model)
    if rules.data_words is None:
        for of, what in ((of_data.name, f"data={data.name}"), (model.family, f"model.name={model.name}")):
            if of != rules.name:
                raise SettingError("task", rules.name, f"{of} with {what}", f"Add task={of}.")
    elif of_data is not rules:
        words, hint = rules.data_words
        raise SettingError("data.name", data.name, f"a data set {words} with task={rules.name}", hint)
    elif rules.section and getattr(data, rules.section) is None:
        raise SettingError(f"data.{rules.section}", "null", rules.section_words)
    elif model.family != rules.family:
        words, hint = rules.model_words or ("a network of timm", "")
        raise SettingError("model.name", model.name, f"{words} with task={rules.name}", hint or None)
    rules.check(config)
    if config.tasks:
        SEVERAL.refuse_unsupported(config, "with several tasks")


def _kind_of_data(setting: str, name: str) -> KindRules:
    """Return the rules of the kind that a data set belongs to."""
    for rules in RULES.values():
        if name in rules.data:
            return rules
    raise SettingError(setting, name, [one for rules in RULES.values() for one in rules.data])


def _refuse_section(config: Config, others: Iterable[KindRules]) -> None:
    """Reject settings that belong to data sets of `others`."""
    for rules in others:
        settings = getattr(config.data, rules.section)
        if settings is not None:
            first = next(iter(settings.model_fields_set), "")
            raise SettingError(
                f"data.{rules.section}.{first}".rstrip("."),
                show(getattr(settings, first, "{}")),
                f"left out with data={config.data.name}",
                f"It belongs to data sets of {'images with masks' if rules.section == 'masks' else 'texts'}.",
            )


def _refuse_setting_of_other_family(model: ModelConfig) -> None:
    """Reject a setting of text classifiers or segmentation networks for an image classifier."""
    given = {"max_length": model.max_length, "encoder": model.encoder}
    for name, owners in (("max_length", "text classifiers"), ("encoder", "segmentation networks (model=smp)")):
        if given[name] is not None and _is_known_classifier(model.name):
            raise SettingError(
                f"model.{name}",
                given[name],
                f"null with model.name={model.name}",
                f"It belongs to {owners}; leave it out.",
            )


def _is_known_classifier(name: str) -> bool:
    """Return True for the name of an image classifier; loads timm."""
    import timm

    return name in OWN_CLASSIFIERS or timm.is_model(name.partition(".")[0])


def _check_masks(name: str, masks: MaskConfig) -> None:
    for setting in ("classes", "ignored", "values", "colors", "palette", "folder", "image_folder", "suffix"):
        value = getattr(masks, setting)
        if value and value != "auto" and name != "mask_folder":
            known = "left out, since the data set has its own"
            raise SettingError(f"data.masks.{setting}", show(value), known, "Or use data=mask_folder.")
    if masks.colors is not None:
        if masks.values is not None:
            raise SettingError("data.masks.values", show(masks.values), "null with data.masks.colors")
        if masks.palette == "index":
            raise SettingError("data.masks.palette", "index", "auto or color with data.masks.colors")
        for class_name, color in masks.colors.items():
            if isinstance(color, str) and not re.fullmatch(r"#[0-9a-fA-F]{6}", color):
                known = '[red, green, blue] or "#rrggbb"'
                raise SettingError(f"data.masks.colors.{class_name}", color, known)
    low, high = masks.zoom
    if low > high:
        raise SettingError("data.masks.zoom", [low, high], "[smallest, largest]")
