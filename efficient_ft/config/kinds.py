"""The rules of each kind of task: the data sets, the networks, and the settings that are not supported.

Importing this module does not import torch. The objects in `training.kinds` implement training and evaluation. To add a
kind, a package passes an object to `training.kinds.registry.register` and declares an entry point for this object::

    [project.entry-points."efficient_ft.kinds"]
    brightness = "image_brightness.kind:brightness"
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points

from efficient_ft.config.augment import refuse_mixing
from efficient_ft.config.explain import show
from efficient_ft.config.schema import DATA_NAMES, Config, MaskConfig, ModelConfig
from efficient_ft.core.errors import SettingError
from efficient_ft.core.packages import KINDS_GROUP

#: Image classifiers that this package adds to timm.
OWN_CLASSIFIERS = ("vit_digits", "vit_micro", "proxyless_mobile")


@dataclass(frozen=True)
class KindRules:
    """The rules for a configuration with ``task=NAME``.

    Attributes:
        name: Value of ``task``.
        data: Names of the data sets for this kind of task (``data.name``).
        family: Family of the networks for this kind of task. See `config.schema.ModelConfig.family`.
        section: Section of ``data`` with the settings of the data sets (``masks`` or ``text``), or "" if there is none.
        section_words: Description of a valid section, used in messages.
        data_words: Property of the data sets and a hint for messages, or None for the default kind, whose messages name
            the setting ``task`` instead.
        model_words: Property of the networks and a hint for messages.
        augmentation: Sentence that names the augmentation settings of the kind, or "" if ``data.augment`` applies.
        mixes: True if each target is one class index, so that MixUp and CutMix can mix the targets of a batch.
        unsupported: Maps each unsupported feature to a hint for the message, or to None. The keys are ``tasks``
            (several data sets), ``cache_features``, ``prefix`` (faster computation of the frozen prefix), ``compile``
            (``trainer.compile``), ``tokens`` (methods that drop or merge tokens) and ``export`` (``efficient-ft
            export``).
        settings: Sections of the configuration that only this kind uses.
        networks: Names of the networks (``model.name``) that the kind adds. The family of these networks is the name of
            the kind.
    """

    name: str
    data: tuple[str, ...]
    family: str = "classification"
    section: str = ""
    section_words: str = "a mapping"
    data_words: tuple[str, str] | None = None
    model_words: tuple[str, str] | None = None
    augmentation: str = ""
    mixes: bool = False
    unsupported: Mapping[str, str | None] = field(default_factory=dict)
    networks: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()

    def check(self, config: Config) -> None:
        """Raise a SettingError for the first setting that this kind does not support."""
        if config.tasks and "tasks" in self.unsupported:
            raise SettingError("tasks", ", ".join(config.tasks), f"none with task={self.name}")
        self.refuse_unsupported(config, f"with task={self.name}")
        augmentation = config.data.augment.model_dump(exclude_defaults=True)
        if self.augmentation and augmentation:
            setting, value = next(iter(augmentation.items()))
            known = f"left out with task={self.name}"
            raise SettingError(f"data.augment.{setting}", show(value), known, self.augmentation)
        parts = {f"tasks.{name}": one for name, one in config.tasks.items()} or {"data": config.data}
        for key, data in ({} if self.mixes else parts).items():
            why = "MixUp and CutMix require one class per image."
            refuse_mixing(key, data.augment, f"with task={self.name}", why)

    def refuse_unsupported(self, config: Config, where: str) -> None:
        """Raise a SettingError if the kind does not support stored features, the prefix or compilation.

        `where` is the condition (for example, "with task=segmentation") that the error message adds after the allowed
        values.
        """
        trainer = config.trainer
        if trainer.cache_features == "on" and "cache_features" in self.unsupported:
            known = f"off or auto {where}"
            raise SettingError("trainer.cache_features", "on", known, self.unsupported["cache_features"])
        if trainer.prefix in ("folded", "bf16") and "prefix" in self.unsupported:
            raise SettingError("trainer.prefix", trainer.prefix, f"fp32 or auto {where}", self.unsupported["prefix"])
        if trainer.compile and "compile" in self.unsupported:
            raise SettingError("trainer.compile", "true", f"false {where}", self.unsupported["compile"])


class _SegmentationRules(KindRules):
    def check(self, config: Config) -> None:
        super().check(config)
        assert config.data.masks is not None, "check_kind rejects a data set without masks"
        _check_masks(config.data.name, config.data.masks)


class _TextRules(KindRules):
    def check(self, config: Config) -> None:
        super().check(config)
        text, model = config.data.text, config.model
        assert text is not None, "check_kind rejects a data set without texts"
        columns = [*text.columns, text.label]
        if len(set(columns)) < len(columns):
            known = f"distinct columns that do not include {text.label}"
            raise SettingError("data.text.columns", text.columns, known)
        for name, value in (("image_size", model.image_size), ("mean", model.mean), ("std", model.std)):
            if value is not None:
                hint = "For texts, use model.max_length." if name == "image_size" else "Texts have no colors."
                raise SettingError(f"model.{name}", show(value), "null with task=text", hint)


class _MultiLabelRules(KindRules):
    def check(self, config: Config) -> None:
        super().check(config)
        options = config.multilabel
        for name in () if options.loss == "asymmetric" else ("gamma_positive", "gamma_negative", "margin"):
            value, default = getattr(options, name), type(options).model_fields[name].default
            if value != default:
                do = "Only the asymmetric loss has this setting. Set multilabel.loss=asymmetric."
                raise SettingError(f"multilabel.{name}", value, f"{default} with multilabel.loss=bce", do)


_MASKS, _TEXTS = ("camvid", "cityscapes", "voc2012_aug", "mask_folder"), ("rte", "text_folder")
_LABEL_FILE = ("with a label file", "Choose data=labels data.root=DIR data.labels.file=FILE.")
#: Rules of all loaded kinds, keyed by name.
RULES: dict[str, KindRules] = {
    "classification": KindRules(
        "classification", tuple(n for n in DATA_NAMES if n not in (*_MASKS, *_TEXTS)), mixes=True
    ),
    "multilabel": _MultiLabelRules(
        "multilabel", ("labels",), data_words=_LABEL_FILE, unsupported={"tasks": None}, settings=("multilabel",)
    ),
    "regression": KindRules("regression", ("labels",), data_words=_LABEL_FILE, unsupported={"tasks": None}),
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
        augmentation="For masks, use data.masks.zoom and data.masks.flip.",
        unsupported={
            "tasks": None,
            "prefix": None,
            "tokens": "Every position of the image requires its own features.",
            "export": "The run segments images at their own size, but an exported graph has a fixed image size.",
        },
    ),
    "text": _TextRules(
        "text",
        _TEXTS,
        family="text",
        section="text",
        section_words="a mapping with the keys columns and label",
        data_words=("of texts", f"Choose data={' or '.join(_TEXTS)}."),
        model_words=(
            "a text classifier",
            "Choose model=bert_base, distilbert_base, bert_tiny, or model=text model.name=bert model.weights=DIR.",
        ),
        augmentation="Texts have no augmentation.",
        unsupported={
            "tasks": None,
            "prefix": None,
            "compile": "The length of the texts differs between batches.",
            "tokens": "These methods require tokens on an image grid.",
        },
    ),
}

_NOT_STORED = {
    "cache_features": "With auto, no features are stored.",
    "prefix": "With auto, the prefix is computed in fp32.",
}
#: Rules for several data sets (``tasks=``), in addition to the rules of the kind.
SEVERAL = KindRules("several tasks", (), unsupported=_NOT_STORED)


def rules_of(name: str) -> KindRules:
    """Return the rules for ``task=NAME``. If necessary, load the package that adds the kind.

    Raise a SettingError if the kind is unknown.
    """
    if name not in RULES:
        for entry in entry_points(group=KINDS_GROUP, name=name):
            entry.load()  # The module of the entry point registers the kind.
    if name not in RULES:
        raise SettingError("task", name, sorted({*RULES, *(entry.name for entry in entry_points(group=KINDS_GROUP))}))
    return RULES[name]


def check_kind(config: Config) -> None:
    """Raise a SettingError if the network or a data set belongs to another kind, or if a setting is not supported."""
    rules, data, model = rules_of(config.task), config.data, config.model
    of_data = rules if data.name in rules.data else _kind_of_data("data.name", data.name)
    for one in config.tasks:
        _kind_of_data(f"tasks.{one}.name", config.tasks[one].name)
    _refuse_section(config, (one for one in RULES.values() if one.section and one is not of_data))
    if model.library is not None and model.family != "classification":
        setting, value = ("max_length", model.max_length) if model.encoder is None else ("encoder", model.encoder)
        do = "The setting does not apply to the image classifiers of model=hf. Remove this setting."
        raise SettingError(f"model.{setting}", show(value), "null with model.library=transformers", do)
    if model.family != rules.family or model.name in OWN_CLASSIFIERS:
        _refuse_setting_of_other_family(model)
    if rules.data_words is None:
        for kind, what in ((of_data.name, f"data={data.name}"), (model.family, f"model.name={model.name}")):
            if kind != rules.name:
                raise SettingError("task", rules.name, f"{kind} with {what}", f"Add task={kind}.")
    elif of_data is not rules:
        words, hint = rules.data_words
        raise SettingError("data.name", data.name, f"a data set {words} with task={rules.name}", hint)
    elif rules.section and getattr(data, rules.section) is None:
        raise SettingError(f"data.{rules.section}", "null", rules.section_words)
    elif model.family != rules.family:
        words, hint = rules.model_words or ("a network of timm", "")
        raise SettingError("model.name", model.name, f"{words} with task={rules.name}", hint or None)
    for name in {name for one in RULES.values() for name in one.settings} - {*rules.settings}:
        for setting, value in getattr(config, name).model_dump(exclude_defaults=True).items():
            raise SettingError(
                f"{name}.{setting}", show(value), f"left out with task={rules.name}", f"Use task={name}."
            )
    rules.check(config)
    if config.tasks:
        SEVERAL.refuse_unsupported(config, "with several tasks")


def _kind_of_data(setting: str, name: str) -> KindRules:
    """Return the rules of the kind to which a data set belongs."""
    for rules in RULES.values():
        if name in rules.data:
            return rules
    raise SettingError(setting, name, [one for rules in RULES.values() for one in rules.data])


def _refuse_section(config: Config, others: Iterable[KindRules]) -> None:
    """Raise a SettingError for settings that apply only to the data sets of the kinds in `others`."""
    for rules in others:
        settings = getattr(config.data, rules.section)
        if settings is not None:
            first = next(iter(settings.model_fields_set), "")
            setting, value = f"data.{rules.section}.{first}".rstrip("."), show(getattr(settings, first, "{}"))
            do = f"Only data sets of {'images with masks' if rules.section == 'masks' else 'texts'} have this setting."
            raise SettingError(setting, value, f"left out with data={config.data.name}", do)


def _refuse_setting_of_other_family(model: ModelConfig) -> None:
    """Raise a SettingError if an image classifier has a setting of text classifiers or segmentation networks."""
    for name, owners in (("max_length", "text classifiers"), ("encoder", "segmentation networks (model=smp)")):
        if getattr(model, name) is not None:
            import timm

            if model.name in OWN_CLASSIFIERS or timm.is_model(model.name.partition(".")[0]):
                do = f"The setting applies only to {owners}. Remove this setting."
                raise SettingError(f"model.{name}", getattr(model, name), f"null with model.name={model.name}", do)


def _check_masks(name: str, masks: MaskConfig) -> None:
    for setting in ("classes", "ignored", "values", "colors", "palette", "folder", "image_folder", "suffix"):
        value = getattr(masks, setting)
        if value and value != "auto" and name != "mask_folder":
            do = f"data={name} defines this setting. To set it, use data=mask_folder."
            raise SettingError(f"data.masks.{setting}", show(value), "left out", do)
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
