"""Numbers, sizes and times as text."""

from __future__ import annotations

import pytest

from efficient_ft.core.format import format_bytes, format_digits, format_number, format_percent, format_seconds


def test_human_units():
    assert format_number(1_234_567) == "1.23 M"
    assert format_number(999.6) == "1.00 k"
    assert format_bytes(1536) == "1.50 KiB"
    assert format_bytes(4.27 * 2**30) == "4.27 GiB"
    assert format_seconds(0.0421) == "42.1 ms"
    assert format_seconds(3725) == "1 h 02 min"


@pytest.mark.parametrize(
    ("fraction", "shown"), [(0.93139, "93.1 %"), (0.0966, "9.66 %"), (1, "100 %"), (0.99999, "99.9 %"), (0, "0 %")]
)
def test_a_share_below_one_is_never_100_percent(fraction: float, shown: str) -> None:
    assert format_percent(fraction) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(1203.4, "1203"), (0.0123456, "0.01235"), (12345678, "12345678"), (0, "0"), (-2.5, "-2.500")]
)
def test_digits_of_a_column_with_a_unit(value: float, shown: str) -> None:
    assert format_digits(value) == shown


def test_a_time_that_rounds_to_a_second_is_one() -> None:
    assert format_seconds(0.9996) == "1 s"
