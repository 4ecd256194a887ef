"""Checks of method settings. Each check raises SettingError if the value is not allowed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from efficient_ft.core.errors import SettingError


def check_choice(setting: str, value: Any, allowed: Iterable[str]) -> None:
    """Check that `value` is one of the allowed names."""
    if value not in (allowed := tuple(allowed)):
        raise SettingError(setting, value, allowed)


def check_bool(setting: str, value: Any) -> None:
    """Check that `value` is True or False."""
    if not isinstance(value, bool):
        raise SettingError(setting, value, ("true", "false"))


def check_integer(setting: str, value: Any, least: int = 1) -> None:
    """Check that `value` is an integer of at least `least`."""
    if type(value) is not int or value < least:
        raise SettingError(setting, value, f"an integer >= {least}")


def check_number(setting: str, value: Any, allowed: str, is_allowed: Callable[[float], bool]) -> None:
    """Check that `value` is a finite number for which `is_allowed` returns True. `allowed` describes the constraint."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not is_allowed(value):
        raise SettingError(setting, value, allowed)


def check_sparsity(sparsity: Any) -> None:
    """Check the setting `sparsity`, the fraction of the values that are dropped."""
    check_number("sparsity", sparsity, "a number >= 0 and < 1", lambda share: 0 <= share < 1)


def check_keep_rate(keep_rate: Any) -> None:
    """Check the setting `keep_rate`, the fraction of the tokens that are kept."""
    check_number("keep_rate", keep_rate, "a number > 0 and <= 1", lambda share: 0 < share <= 1)
