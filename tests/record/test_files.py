"""Tests of JSON records."""

from __future__ import annotations

import json
import math

import pytest

from efficient_ft.record.files import json_text


def test_json_has_no_number_that_is_not_finite() -> None:
    text = json_text({"a": [1.5, math.nan, (math.inf,)], "b": {"c": -math.inf, "d": True, "e": None}}, indent=1)
    assert json.loads(text, parse_constant=pytest.fail) == {
        "a": [1.5, None, [None]],
        "b": {"c": None, "d": True, "e": None},
    }
