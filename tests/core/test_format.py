"""Tests of numbers, sizes and times as text."""

from __future__ import annotations

import re

import pytest

from efficient_ft.core.format import (
    bytes_setting,
    format_bytes,
    format_digits,
    format_number,
    format_percent,
    format_seconds,
)
from efficient_ft.core.units import parse_bytes
from tests.conftest import REPOSITORY


def test_human_units():
    assert format_number(1_234_567) == "1.23 M"
    assert format_number(999.6) == "1.00 k"
    assert format_bytes(1536) == "1.50 KiB"
    assert format_bytes(4.27 * 2**30) == "4.27 GiB"
    assert format_seconds(0.0421) == "42.1 ms"
    assert format_seconds(3725) == "1 h 02 min"
    assert format_seconds(0) == "0 s"


@pytest.mark.parametrize(
    ("fraction", "shown"),
    [(0.93139, "93.14 %"), (0.0966, "9.66 %"), (1, "100 %"), (0.99999, "99.99 %"), (0, "0 %"), (1e-6, "< 0.01 %"),
     (-0.12, "-12.00 %"), (1.5, "150.00 %")],
)  # fmt: skip
def test_a_share_below_one_is_never_100_percent(fraction: float, shown: str) -> None:
    assert format_percent(fraction) == shown


def test_accuracies_that_differ_by_one_of_10000_images_look_different() -> None:
    assert format_percent(0.8897) != format_percent(0.8898)


def test_a_difference_has_its_sign() -> None:
    assert [format_percent(one, sign=True) for one in (0.031, -0.031, 0)] == ["+3.10 %", "-3.10 %", "0 %"]
    assert [format_percent(one, digits=1) for one in (0.31, 0.9999, 0.0001, 1)] == [
        "31.0 %",
        "99.9 %",
        "< 0.1 %",
        "100 %",
    ]


@pytest.mark.parametrize(("size", "shown"), [(4 * 10**9, "4GB"), (3 * 2**30, "3GiB"), (4271234567, "3.98GiB")])
def test_a_size_as_a_setting_is_never_too_small(size: int, shown: str) -> None:
    assert bytes_setting(size) == shown
    assert parse_bytes("memory", shown) >= size


#: Matches percentages, sizes and times in f-strings: ``{x:.2%}``, ``{x / 2**20:.1f}``, ``{x:.1f} s``.
_OWN = re.compile(
    r":[+.0-9]*%\}|\{[^{}]*/ ?(?:2 ?\*\* ?[23]0|1e6|1e9|10\*\*9)[^{}]*:[^{}]*\}|:\.\dg?f?\} ?(?:s|min|[MG]i?B|%)\b"
)
#: Modules that may format numbers: the formatters in core, and charts and tables with units.
_ALLOWED = ("core/", "report/figures.py", "report/plan_figure.py", "bench/tables.py")


def test_no_other_module_formats_percentages_sizes_or_times() -> None:
    package = REPOSITORY / "efficient_ft"
    found = [
        f"{file.relative_to(package)}:{number}: {line.strip()}"
        for file in sorted(package.rglob("*.py"))
        if not str(file.relative_to(package)).startswith(_ALLOWED)
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if _OWN.search(line)
    ]
    assert not found


@pytest.mark.parametrize(
    ("value", "shown"), [(1203.4, "1203"), (0.0123456, "0.01235"), (12345678, "12345678"), (0, "0"), (-2.5, "-2.500")]
)
def test_digits_of_a_column_with_a_unit(value: float, shown: str) -> None:
    assert format_digits(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.5, "500 ms"), (90, "90 s"), (1800, "30 min"), (5400, "1 h 30 min"), (7200, "2 h")],
)
def test_parts_of_a_time_that_are_zero_are_left_out(seconds: float, shown: str) -> None:
    assert format_seconds(seconds) == shown


def test_a_time_that_rounds_to_a_second_is_one() -> None:
    assert format_seconds(0.9996) == "1 s"
