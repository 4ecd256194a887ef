"""Functions that format numbers, sizes, times and percentages for output."""

from __future__ import annotations

import math


def format_number(value: float, unit: str = "", step: int = 1000) -> str:
    """Format a number with three digits and a unit prefix: 1234567 → ``1.23 M``; with ``step=1024``: ``1.18 Mi``."""
    prefixes = ["", "k", "M", "G", "T", "P"] if step == 1000 else ["", "Ki", "Mi", "Gi", "Ti", "Pi"]
    power = 0
    while abs(value) >= 999.5 and power < len(prefixes) - 1:
        value /= step
        power += 1
    digits = 0 if abs(value) >= 99.95 or (power == 0 and value == int(value)) else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} {prefixes[power]}{unit}".rstrip()


def format_bytes(value: float) -> str:
    """Format a size in bytes: 1536 → ``1.50 KiB``."""
    return format_number(value, "B", 1024)


def format_seconds(value: float) -> str:
    """Format a time in seconds: 0.0421 → ``42.1 ms``; 3725 → ``1 h 02 min``."""
    if 0 < value < 0.9995:
        return f"{value * 1000:.3g} ms"
    if value < 100:
        return f"{value:.3g} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    whole, part = (f"{hours} h", f" {minutes:02d} min") if hours else (f"{minutes} min", f" {rest:02d} s")
    return whole + part * bool(minutes if hours else rest)


def format_percent(fraction: float, sign: bool = False, digits: int = 2) -> str:
    """Format a fraction as a percentage: 0.93139 → ``93.14 %``.

    If `sign` is True, positive values begin with a plus sign. A fraction below 1 is never formatted as ``100 %``, and a
    fraction above 0 is never formatted as ``0 %``. By default, the percentage has two decimals (`digits`), so that
    different accuracies on 10,000 samples can be distinguished.
    """
    value, least = 100 * fraction, 10**-digits
    value = min(value, 100 - least) if value < 100 else value
    if 0 < abs(value) < least / 2:
        return f"< {least:.{digits}f} %" if value > 0 else f"> -{least:.{digits}f} %"
    return f"{value:{'+' if sign and value else ''}.{0 if value in (0, 100) else digits}f} %"


#: Metrics that are not fractions, so that they are not formatted as percentages.
NOT_IN_PERCENT = frozenset({"r2"})


def format_metric(value: float, metric: str = "accuracy") -> str:
    """Format a metric as a percentage: 0.93139 → ``93.14 %``. R² is formatted as a number: ``0.9314``."""
    return f"{value:.4f}" if metric in NOT_IN_PERCENT else format_percent(value)


def format_ratio(value: float) -> str:
    """Format a ratio: 0.4912 → ``0.49×``."""
    return f"{value:.2f}×"


def bytes_setting(value: float) -> str:
    """Format a size as the value of a setting, rounded up: 4271234567 → ``3.98GiB``; 4000000000 → ``4GB``."""
    hundredths = 100 * value / 2**30
    if hundredths % 1 and not value % 10**7:
        return f"{value / 10**9:g}GB"
    return f"{math.ceil(hundredths) / 100:g}GiB"


def format_digits(value: float, digits: int = 4) -> str:
    """Format a number with `digits` significant digits and without a unit, for columns whose header states the unit."""
    if not value or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"
