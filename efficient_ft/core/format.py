"""Numbers, sizes and times as text for people: the only place that formats them."""

from __future__ import annotations

import math


def format_number(value: float, unit: str = "", step: int = 1000) -> str:
    """Three digits and a prefix: 1234567 → ``1.23 M``; with ``step=1024``: ``1.18 Mi``."""
    prefixes = ["", "k", "M", "G", "T", "P"] if step == 1000 else ["", "Ki", "Mi", "Gi", "Ti", "Pi"]
    power = 0
    while abs(value) >= 999.5 and power < len(prefixes) - 1:
        value /= step
        power += 1
    digits = 0 if abs(value) >= 99.95 or (power == 0 and value == int(value)) else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} {prefixes[power]}{unit}".rstrip()


def format_bytes(value: float) -> str:
    """1536 → ``1.50 KiB``."""
    return format_number(value, "B", 1024)


def format_seconds(value: float) -> str:
    """0.0421 → ``42.1 ms``; 3725 → ``1 h 02 min``."""
    if value < 0.9995:
        return f"{value * 1000:.3g} ms"
    if value < 100:
        return f"{value:.3g} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def format_percent(fraction: float) -> str:
    """0.93139 → ``93.1 %``; a fraction below 1 is never ``100 %``."""
    value = 100 * fraction
    value = min(value, 99.9) if value < 100 else value
    return f"{value:.{0 if value in (0, 100) else 1 if value >= 9.995 else 2}f} %"


def format_digits(value: float, digits: int = 4) -> str:
    """A number with some significant digits and no prefix, for a column whose unit is in its header: ``1203``."""
    if not value or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"
