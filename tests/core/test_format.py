"""Numbers, sizes and times as text."""

from __future__ import annotations

from efficient_ft.core.format import format_bytes, format_number, format_seconds


def test_human_units():
    assert format_number(1_234_567) == "1.23 M"
    assert format_number(999.6) == "1.00 k"
    assert format_bytes(1536) == "1.50 KiB"
    assert format_bytes(4.27 * 2**30) == "4.27 GiB"
    assert format_seconds(0.0421) == "42.1 ms"
    assert format_seconds(3725) == "1 h 02 min"
