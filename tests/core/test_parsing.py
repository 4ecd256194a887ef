"""Tests of JSON and YAML texts that are damaged or designed to use much time and memory."""

from __future__ import annotations

import json
from typing import Any

import pytest

from efficient_ft.core.parsing import parse_json, parse_yaml

_NINE = ",".join(["*a"] * 9)
BOMB = "a0: &a0 [x,x]\n" + "".join(f"a{k}: &a{k} [{_NINE.replace('*a', f'*a{k - 1}')}]\n" for k in range(1, 12))


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"a":' * 100_000, "[1] [2]", b"\xff", "9" * 5000])
def test_what_is_no_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  the message is Python's
        parse_json(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "expected the node content"),
        ("[" * 5000, "nested too deeply"),
        ("a: &a [*a]", "contains itself"),
        ("&a {b: *a}", "contains itself"),
        (BOMB, "the aliases in the text expand to more than"),
        ("a: !!int ''", "cannot be read"),
        ("a: !!bool perhaps", "cannot be read"),
        ("a: !!timestamp x", "cannot be read"),
        ("a: 2001-99-99", "month must be in"),
        ("? [a]\n: 1", "unhashable key"),
        ("a: !!python/name:os.system", "could not determine a constructor"),
        ("--- 1\n--- 2", "expected a single document"),
        ("a: \0", "special characters are not allowed"),
    ],
)
def test_what_is_no_yaml_is_a_value_error(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_yaml(text)


@pytest.mark.parametrize("value", [None, 3, [1, {"a": None}], {"a": [1.5, "x"], "b": {}}])
def test_others_are_read(value: Any) -> None:
    assert parse_json(json.dumps(value)) == parse_yaml(json.dumps(value)) == value
    assert parse_yaml("a: &x [1]\nb: *x\nc: {d: *x}") == {"a": [1], "b": [1], "c": {"d": [1]}}
    assert parse_yaml("") is None
