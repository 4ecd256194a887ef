"""Explain command-line mistakes that Hydra rejects, or would accept silently."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from hydra import compose
from hydra.core.config_loader import ConfigLoader
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from efficient_ft.config import Config, UnknownSetting, check, setting_names
from efficient_ft.config.explain import show
from efficient_ft.config.plain import plain, sentence
from efficient_ft.core.errors import SettingError, UserError, did_you_mean

# Cached options of each group, for each loader. Listing a group takes at least 20 ms, because the loader copies all of
# its sources.
_OPTIONS: WeakKeyDictionary[ConfigLoader, dict[str, list[str]]] = WeakKeyDictionary()


def check_option(loader: ConfigLoader, override: Override) -> None:
    """Raise a `UserError` if a group does not contain the selected option.

    Hydra ignores a missing option of an optional group.
    """
    group, value = override.key_or_group, override.value()
    refuse_keys(group, value)
    field = Config.model_fields.get(group)
    if override.is_delete() and field is not None:  # Hydra's message would be less clear.
        if field.default is None:
            raise UserError(f"{override.input_line}: the setting {group} is null by default. Remove this argument.")
        given = value not in (None, "", field.default)
        if given and isinstance(field.default, bool | int | str):
            raise UserError(f"{override.input_line}: a deleted setting must not have a value. Use ~{group}.")
    options = [] if "." in group or group.startswith("hydra") else group_options(loader, group)
    if not options or isinstance(value, dict):
        return
    if override.is_delete():
        if group in Config.model_fields:
            raise UserError(f"~{group}: a run requires this group. Select an option: {', '.join(options)}.")
        return
    several = value if isinstance(value, list) and value and group == "method" else [value]
    for option in several:
        if option not in options:
            hint = _advice_for_model(option) if group == "model" and isinstance(option, str) else None
            raise SettingError(group, "null" if option is None else option, options, hint)


def refuse_keys(setting: str, value: Any) -> None:
    """Raise a `SettingError` for a mapping whose keys are not names. Hydra accepts such keys.

    Only the setting ``masks.values`` may have other keys (pixel values).
    """
    if not isinstance(value, dict) or setting.endswith("masks.values"):
        return
    for key, inner in value.items():
        if not isinstance(key, str) or not key:
            shown = "null" if key is None else "an empty string" if key == "" else str(key).lower()
            raise SettingError(setting, f"{{{shown}: ...}}", "a mapping with names as keys, {NAME: VALUE}")
        refuse_keys(f"{setting}.{key}", inner)


def _advice_for_model(name: str) -> str:
    """Return advice for a model name that is not an option. The name may be known to timm or `transformers`."""
    import timm

    if timm.is_model(name.partition(".")[0]):
        return f"For a timm model, use model=timm model.name={name}."
    if name in _transformers_model_types():
        return f"For a network of transformers, use model=hf model.name={name} or model=hf model.weights=DIR."
    return f"timm has no model with this name.{did_you_mean(name, timm.list_models())}"


def _transformers_model_types() -> Collection[str]:
    """Return the model types of `transformers`, or an empty collection if `transformers` is not installed."""
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    except ImportError:
        return ()
    return CONFIG_MAPPING_NAMES


def _new_argument(name: str, line: str, forms: str | None = None) -> UserError:
    """Return the error for a setting in ``model.kwargs`` that the selected model option does not contain.

    `forms` is the correct form of the argument.
    """
    from efficient_ft.models.timm_config import SET_ELSEWHERE

    if name in SET_ELSEWHERE:
        return UserError(f"{line}: timm's argument {name} cannot be set in model.kwargs. {SET_ELSEWHERE[name]}")
    return UserError(f"{line}: a new argument of the network requires a plus sign. Use {forms or f'+{line}'}")


def _given_whole(loader: ConfigLoader, known: DictConfig, override: Override) -> UserError | None:
    """Return the error for a mapping with a key that `known` does not contain, or None if `known` contains all keys."""
    line = str(override.input_line)
    found = _first_wrong(override.key_or_group, override.value(), OmegaConf.select(known, override.key_or_group))
    if found is None:
        return None
    key, name, value, node = found
    if name is None:
        form = "a list, [VALUE,VALUE]" if OmegaConf.is_list(node) else "a mapping, {NAME: VALUE}"
        return SettingError(key, value, form)
    if key == "model.kwargs":
        plain = not any(isinstance(one, dict | list) for one in value.values())
        forms = " ".join(f"+{key}.{n}={show(one)}" for n, one in value.items()) if plain else f"'+{line}'"
        return _new_argument(name, f"{key}.{name}={show(value[name])}", forms)
    if key == "method":
        inner = value[name] if isinstance(value[name], dict) else {}
        settings = "".join(f" method.{name}.{n}={show(one)}" for n, one in inner.items())
        return UserError(f"{line}: a method must be selected by name. Use method={name}{settings}")
    if key == "tasks":
        return UserError(f"{line}: to add a data set, use +data@tasks.{name}=OPTION.")
    return unknown(loader, f"{key}.{name}", value[name], [str(k) for k in node])


def _first_wrong(key: str, value: Any, node: Any) -> tuple[str, str | None, Any, Any] | None:
    """Return the first part of a mapping that does not match `node`, as (key, name, value, node).

    The name is None if the type of the part is wrong. Return None if all parts match.
    """
    if not isinstance(value, dict):
        wrong = isinstance(value, list) and OmegaConf.is_dict(node)
        return (key, None, value, node) if wrong else None
    if OmegaConf.is_list(node):
        return key, None, value, node
    if not OmegaConf.is_dict(node):
        return None
    for name, inner in value.items():
        if str(name) not in node.keys():  # noqa: SIM118  as in walk
            return key, str(name), value, node
        found = _first_wrong(f"{key}.{name}", inner, node._get_node(str(name)))
        if found is not None:
            return found
    return None


def group_options(loader: ConfigLoader, group: str) -> list[str]:
    """Return the options of a group, including its subfolders, e.g. ``lbp_wht/cars``."""
    known = _OPTIONS.setdefault(loader, {})
    if group not in known:
        inner = loader.get_group_options(group, ObjectType.GROUP)
        below = [f"{folder}/{option}" for folder in inner for option in group_options(loader, f"{group}/{folder}")]
        known[group] = [*loader.get_group_options(group), *below]
    return known[group]


def check_packages(name: str, parsed: Sequence[Override], composed: DictConfig) -> None:
    """Raise a `UserError` if two options of ``method`` have the same package. Hydra would merge such options."""
    chosen: list[str] = []
    for override in parsed:
        value = override.value()
        if override.key_or_group == "method" and isinstance(value, list):
            chosen = [str(option) for option in value]
    methods = composed.get("method")
    if not OmegaConf.is_dict(methods) or len(chosen) <= len(methods):  # `check` rejects other types.
        return
    owner: dict[str, str] = {}
    for option in chosen:
        package = str(next(iter(compose(name, [f"method=[{option}]"]).method)))
        if package in owner:
            same = "" if owner[package] == option else f" and {option} are variants of {package}"
            raise UserError(f"method=[{','.join(chosen)}]: {owner[package]}{same or ' occurs twice'}. Use one option.")
        owner[package] = option


def refuse_data(parsed: Sequence[Override], config: Config) -> None:
    """Raise a `UserError` if ``data`` settings are given for a run on several tasks.

    Such a run does not use these settings.
    """
    if not config.tasks:
        return
    for override in parsed:
        single = override.key_or_group == "data" and override.package in (None, "data")
        if single or override.key_or_group.startswith("data."):
            names = ", ".join(config.tasks)
            raise UserError(
                f"{override.input_line}: the data sets of this run are set in `tasks` ({names}). Use settings such as"
                f" tasks.{next(iter(config.tasks))}.batch_size=VALUE, or train on one data set with tasks=none."
            )


def explained(loader: ConfigLoader, name: str, parsed: Sequence[Override], error: Exception) -> UserError:
    """Return a message for an error of Hydra. The composition of only the options shows which key does not exist."""
    choices = [
        o
        for o in parsed
        if o.key_or_group.startswith("hydra")
        or (loader.get_group_options(o.key_or_group) and not isinstance(o.value(), dict))
    ]
    lines = [str(o.input_line) for o in choices]
    try:
        known = compose(name, lines)
    except (HydraException, OmegaConfBaseException) as second:
        return UserError(sentence(second))
    for override in parsed:
        if override in choices:
            continue
        key, line = override.key_or_group, str(override.input_line)
        present, missing = walk(known, key)
        if missing is None:
            if override.is_add() and not isinstance(override.value(), dict | list):
                return UserError(f"{line}: the setting {key} already exists. Remove the plus sign.")
            whole = _given_whole(loader, known, override)
            if whole is not None:
                return whole
            continue
        if override.is_add() or override.is_force_add():
            continue
        here = OmegaConf.select(known, present) if present else known
        siblings = [str(k) for k in here] if OmegaConf.is_dict(here) else []
        methods = loader.get_group_options("method")
        if present == "method" and missing in methods:
            package = str(next(iter(compose(name, [f"method={missing}"]).method)))
            if package != missing and package in siblings:
                right = line.replace(f"method.{missing}", f"method.{package}", 1)
                return UserError(f"{line}: the settings of the option {missing} are in method.{package}. Use {right}.")
            return UserError(
                f"{line}: the method {missing} is not selected (selected: {', '.join(siblings)}). Use"
                f" method={missing}, or 'method=[{','.join([*siblings, missing])}]' to combine the methods."
                f" If only some runs of a sweep use {missing}, define the runs as rows of an experiment."
            )
        if present == "method":
            return SettingError("method", missing, methods, f"The argument is {line}.")
        if present == "model.kwargs":
            return _new_argument(missing, line)
        if any(name == key or name.startswith(f"{key}.") for name in setting_names()):
            if override.is_delete():
                return UserError(f"{line}: the selected options do not have this setting. Remove this argument.")
            # The schema contains the setting, but the selected option does not. `check` explains the reason.
            fitting = [o for o in parsed if o not in choices and walk(known, o.key_or_group)[1] is None]
            others = [str(o.input_line).lstrip("+") for o in fitting]
            try:
                # Other errors are reported after the user has corrected this error.
                with suppress(HydraException, OmegaConfBaseException, TypeError):
                    check(plain(compose(name, [*lines, *others, f"+{line}"])))
            except UserError as reason:
                return reason
            return UserError(f"{line}: the selected options do not have this setting. Add the setting with +{line}")
        return unknown(loader, f"{present}.{missing}".lstrip("."), override.value(), siblings)
    return UserError(sentence(error))


def known_here(loader: ConfigLoader, error: UnknownSetting) -> UnknownSetting:
    """Return `error` with the configuration groups as additional known names."""
    return unknown(loader, error.setting, error.value, error.known)


def unknown(loader: ConfigLoader, setting: str, value: object, siblings: Iterable[str]) -> UnknownSetting:
    """Return the error for a key that does not exist. `siblings` are the names that exist at the level of the key."""
    # At the top level, the key may be a misspelled group.
    groups = [] if "." in setting else [group for group in loader.list_groups("") if group != "hydra"]
    return UnknownSetting(setting, value, {*siblings, *groups}, setting_names())


def walk(config: DictConfig, key: str) -> tuple[str, str | None]:
    """Split a dotted key into the longest prefix that exists and the next name, which does not exist.

    The name is None if the whole key exists.
    """
    node: Any = config
    present: list[str] = []
    for part in key.split("."):
        # `in` without keys() does not find a setting with a missing value (???).
        if not OmegaConf.is_dict(node) or part not in node.keys():  # noqa: SIM118
            return ".".join(present), part
        present.append(part)
        node = node._get_node(part)
    return key, None
