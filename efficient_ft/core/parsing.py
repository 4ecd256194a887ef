"""Parsers for JSON and YAML from untrusted files. Every error in a file is raised as a `ValueError`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import yaml

from efficient_ft.core.errors import first_line

#: Maximum number of values in a YAML text after aliases are expanded. Without a limit, a text of 300 bytes can expand
#: to billions of values.
MOST_VALUES = 1_000_000
_TOO_DEEP = "it is nested too deeply"


def parse_json(
    text: str | bytes,
    parse_constant: Callable[[str], Any] | None = None,
    parse_float: Callable[[str], float] | None = None,
) -> Any:
    """Parse JSON. `parse_constant` and `parse_float` are passed to `json.loads`.

    Raises:
        ValueError: If the text is not valid JSON or UTF-8, or is nested too deeply.
    """
    try:
        return json.loads(text, parse_constant=parse_constant, parse_float=parse_float)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def parse_yaml(text: str, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> Any:
    """Parse a YAML text with a safe loader.

    The text must contain at most one document and no tags that refer to code. None is returned for an empty text.

    Raises:
        ValueError: If the text is not valid YAML, has an invalid value, is nested too deeply, is self-referential, or
            has more than `MOST_VALUES` values after aliases are expanded.
    """
    try:
        reader = loader(text)
        try:
            node = reader.get_single_node()
            if node is None:
                return None
            if _values(node, {}) > MOST_VALUES:
                raise ValueError(f"the aliases in the text expand to more than {MOST_VALUES:,} values")
            return reader.construct_document(node)
        finally:
            reader.dispose()
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except (LookupError, TypeError, AttributeError, OverflowError) as error:  # raised by values such as `!!int ''`
        raise ValueError(f"it contains a value that cannot be read: {first_line(error)}") from error


def _values(node: yaml.Node, known: dict[int, int]) -> int:
    """Return the number of values in a node after aliases are expanded.

    `known` maps the id of each node to the number of its values, or to 0 while the values are being counted.
    """
    found = known.get(id(node))
    if found == 0:
        raise ValueError("it contains itself")
    if found is None:
        known[id(node)] = 0
        held = node.value if isinstance(node, yaml.CollectionNode) else []
        inner = [one for pair in held for one in pair] if isinstance(node, yaml.MappingNode) else held
        found = known[id(node)] = 1 + sum(_values(one, known) for one in inner)
    return found
