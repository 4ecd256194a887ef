"""Error messages for settings: the constraint in words, and the nearest known name."""

from __future__ import annotations

import functools
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
    """Return the error for a mistake that pydantic found, named by the deepest key that a user would write.

    Args:
        schema: what `plain` was checked against.
        plain: the settings.
        prefix: full name of the group that `schema` describes; empty for a whole configuration.
        loc: pydantic's location of the mistake.
        kind: pydantic's type of the mistake.
    """
    whole = json_schema(schema)
    key, value, node = prefix, typing.cast(Any, plain), whole
    for part in loc:
        name = str(part)
        node = _section(node, whole) if isinstance(value, Mapping) else resolved(node, whole)
        below = node.get("properties")
        if below is None and isinstance(value, Mapping) and isinstance(node.get("additionalProperties"), dict):
            below = dict.fromkeys(value, node["additionalProperties"])  # names chosen by the user
        if below is None or not isinstance(value, Mapping):
            break  # inside the value of one setting (a list, or a branch of a union)
        if name not in below:
            return UnknownSetting(f"{key}.{name}".lstrip("."), value.get(name), below, _leaves(whole, whole))
        key, value, node = f"{key}.{name}".lstrip("."), value.get(name), below[name]
    constraint = _constraint(resolved(node, whole), whole)
    if kind == "missing" and value is None:  # not merely a list with too few entries
        return SettingError(key, "nothing", constraint, f"It has no default: pass {key}=VALUE.")
    if "enum" in node:
        return SettingError(key, show(value), node["enum"])
    return SettingError(key, show(value), constraint)


class UnknownSetting(SettingError):
    """A key that nothing reads.

    Args:
        setting: its full name.
        value: its value.
        known: the names that exist at its level.
        elsewhere: full names of settings anywhere, to recognize one that was put into the wrong group.
    """

    def __init__(self, setting: str, value: object, known: Iterable[str], elsewhere: Iterable[str] = ()):
        self.setting, self.value, self.known = setting, value, sorted(known)
        group, _, name = setting.rpartition(".")
        same_name = [full for full in elsewhere if full.rpartition(".")[2] == name]
        if same_name:
            hint = f" Did you mean '{same_name[0]}'?"
        else:
            hint = did_you_mean(name, self.known) or did_you_mean(setting, elsewhere)
        text = f"{setting}={show(value)}: there is no such setting"
        text += f"; {group or 'a run'} has {', '.join(self.known)}." if self.known else f"; {group} has none."
        UserError.__init__(self, text + hint)


def json_schema(schema: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON schema of `schema`; the mere names if it has types that JSON cannot express."""
    try:
        return schema.model_json_schema()
    except PydanticInvalidForJsonSchema:
        return {"properties": {name: {} for name in schema.model_fields}}


def resolved(node: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """Return the definition that a node of the JSON schema `whole` refers to, or the node itself."""
    reference = node.get("$ref")
    return whole["$defs"][reference.rpartition("/")[2]] if reference else node


def _section(node: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """The definition of a section; of one that may be null, the branch that is none."""
    options = [resolved(one, whole) for one in node.get("anyOf", [])]
    return next((one for one in options if "properties" in one), resolved(node, whole))


@functools.cache
def setting_names() -> tuple[str, ...]:
    """Return the full names of all settings, without those of the methods."""
    whole = json_schema(Config)
    return tuple(_leaves(whole, whole))


def _leaves(node: dict[str, Any], whole: dict[str, Any], prefix: str = "") -> list[str]:
    """Full names of all settings below `node`."""
    names: list[str] = []
    for name, below in node.get("properties", {}).items():
        # A section that may be null is one of two alternatives.
        options = [resolved(one, whole) for one in below.get("anyOf", [below])]
        sections = [one for one in options if "properties" in one]
        names += [leaf for one in sections for leaf in _leaves(one, whole, f"{prefix}{name}.")] or [prefix + name]
    return names


#: Bounds of numbers: the keyword of JSON schemas, and how it reads.
_BOUNDS = (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"))


def _constraint(node: dict[str, Any], whole: dict[str, Any]) -> str:
    """The constraint of a JSON schema in words that follow "must be"."""
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
            return f"a list, each value {_constraint(resolved(node.get('items', {}), whole), whole)}"
        case "object":
            below = node.get("additionalProperties")
            words = "a non-empty mapping" if node.get("minProperties") else "a mapping"
            # The mapping of a group has names of its own, which its own messages list.
            inner = resolved(below, whole) if isinstance(below, dict) else {}
            keys = " or ".join(resolved(node.get("propertyNames", {}), whole).get("enum", ["names"]))
            return f"{words} from {keys} to {_plural(_constraint(inner, whole))}" if inner else words
    return "a value of the type in the constructor's signature"


def _plural(words: str) -> str:
    return "mappings" if words == "a mapping" or words.startswith("a mapping ") else f"values, each {words}"


def show(value: Any) -> str:
    """Return `value` as on the command line and in YAML."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
