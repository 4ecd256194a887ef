"""Tests of sizes and times in the user's notation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from efficient_ft.core.errors import SettingError
from efficient_ft.core.units import BYTES, SECONDS, parse_bytes, parse_seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GB", 4 * 10**9), ("4 GiB", 2**32), ("3.5gb", 3_500_000_000), (".5GiB", 2**29), ("100B", 100)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes("memory", text) == size


@given(st.integers(1, 10**6), st.sampled_from(sorted(BYTES)))
def test_every_unit_of_size(number: int, unit: str) -> None:
    assert parse_bytes("memory", f"{number}{unit}") == number * BYTES[unit]


@pytest.mark.parametrize(
    "wrong", [4, 4.5, "4", "GB", "4G B", "-4GB", "0GB", "0.0000001B", "4 apples", None, True, "", "9" * 400 + "GB"]
)
def test_a_size_without_a_unit_is_refused(wrong: object) -> None:
    with pytest.raises(SettingError, match=r"^memory must be a number with one of the units B, .*got .*=4") as error:
        parse_bytes("memory", wrong)
    assert str(wrong) in str(error.value)


@pytest.mark.parametrize(
    ("text", "seconds"), [("2h", 7200), ("90min", 5400), ("1h30min", 5400), ("1 h 30 min", 5400), ("1.5h", 5400)]
)
def test_times(text: str, seconds: float) -> None:
    assert parse_seconds("time", text) == seconds


@given(st.integers(1, 10**6), st.sampled_from(sorted(SECONDS)))
def test_every_unit_of_time(number: int, unit: str) -> None:
    assert parse_seconds("time", f"{number}{unit}") == number * SECONDS[unit]


@pytest.mark.parametrize("wrong", [2, "2", "h", "0h", "-1h", "2 weeks", "1h30", None])
def test_a_time_without_a_unit_is_refused(wrong: object) -> None:
    with pytest.raises(SettingError, match=r"^time must be a number with one of the units s, min, h, d, got .*time=2h"):
        parse_seconds("time", wrong)


@pytest.mark.parametrize(("value", "seconds"), [(90, 90), (0.5, 0.5), ("30min", 1800), ("90s", 90)])
def test_a_time_may_be_a_number_of_seconds(value: object, seconds: float) -> None:
    assert parse_seconds("job_timeout", value, plain=True) == seconds


@pytest.mark.parametrize("wrong", [0, -1, 0.0, True, "2", "soon", float("inf"), float("nan")])
def test_a_time_that_is_no_duration_is_refused(wrong: object) -> None:
    with pytest.raises(SettingError, match=r"^job_timeout must be a number of seconds, or a number with one of"):
        parse_seconds("job_timeout", wrong, plain=True)
