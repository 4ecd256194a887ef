"""Messages for settings that cannot be used: what is allowed, in words, and the nearest known name."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.errors import PydanticInvalidForJsonSchema

from efficient_ft.config.schema import Config
from efficient_ft.core.errors import SettingError, UserError, did_you_mean


def mistake(
    schema: type[BaseModel], plain: Mapping[str, Any], prefix: str, loc: tuple[int | str, ...], kind: str
) -> SettingError:
    """The message for the mistake at `loc`: walks down to the deepest key that a user would write."""
    whole = json_schema(schema)
    key, value, node = prefix, typing.cast(Any, plain), whole
    for part in loc:
        name = str(part)
        node = resolved(node, whole)
        below = node.get("properties")
        if below is None and isinstance(value, Mapping) and isinstance(node.get("additionalProperties"), dict):
            below = dict.fromkeys(value, node["additionalProperties"])  # names of the user's own
        if below is None or not isinstance(value, Mapping):
            break  # inside one setting's value (a list, or a branch of a union)
        if name not in below:
            return UnknownSetting(f"{key}.{name}".lstrip("."), value.get(name), below, _leaves(whole, whole))
        key, value, node = f"{key}.{name}".lstrip("."), value.get(name), below[name]
    allowed = _allowed(resolved(node, whole), whole)
    if kind == "missing" and value is None:  # not merely an entry of a list too few
        return SettingError(key, "???", allowed, f"It has no default: give {key}=VALUE.")
    if "enum" in node:
        return SettingError(key, show(value), node["enum"])
    return SettingError(key, show(value), allowed)


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
        text = f"{setting}={show(value)}: there is no such setting"
        text += f"; {group or 'a run'} has {', '.join(known)}." if known else f"; {group} has none."
        UserError.__init__(self, text + hint)


def json_schema(schema: type[BaseModel]) -> dict[str, Any]:
    try:
        return schema.model_json_schema()
    except PydanticInvalidForJsonSchema:  # a constructor's type that no YAML can express
        return {"properties": {name: {} for name in schema.model_fields}}


def resolved(node: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    reference = node.get("$ref")
    return whole["$defs"][reference.rpartition("/")[2]] if reference else node


def setting_names() -> list[str]:
    """Full names of all settings but the methods' own."""
    whole = json_schema(Config)
    return _leaves(whole, whole)


def _leaves(node: dict[str, Any], whole: dict[str, Any], prefix: str = "") -> list[str]:
    """Full names of all settings below `node`."""
    names: list[str] = []
    for name, below in node.get("properties", {}).items():
        below = resolved(below, whole)
        names += _leaves(below, whole, f"{prefix}{name}.") if "properties" in below else [prefix + name]
    return names


def _allowed(node: dict[str, Any], whole: dict[str, Any]) -> str:
    """What a JSON schema allows, in words."""
    if "anyOf" in node:
        branches = [resolved(branch, whole) for branch in node["anyOf"]]
        return " or ".join(_allowed(branch, whole) for branch in branches)
    if "enum" in node:
        return "one of " + ", ".join(map(show, node["enum"]))
    if "const" in node:
        return show(node["const"])
    bounds = [
        words.format(show(node[limit]))
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
            items = [_allowed(resolved(item, whole), whole) for item in node["prefixItems"]]
            return f"a list of {len(items)}: {', '.join(items)}"
        case "array":
            item = _allowed(resolved(node.get("items", {}), whole), whole)
            return f"a list, each {item}"
        case "object":
            below = node.get("additionalProperties")
            inner = f" to {_allowed(resolved(below, whole), whole)}" if isinstance(below, dict) else ""
            return f"a mapping from names{inner}" + (", not empty" if node.get("minProperties") else "")
    return "a value of the type that the constructor names"


def show(value: Any) -> str:
    """As on the command line and in YAML."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
