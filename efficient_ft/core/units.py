"""Parsers for sizes and times in settings, for example ``4GB``, ``3.5GiB``, ``2h`` and ``1h30min``."""

from __future__ import annotations

import math
import re

from efficient_ft.core.errors import SettingError

#: Number of bytes per unit. Decimal units are powers of 1000, and binary units are powers of 1024.
BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
         "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}  # fmt: skip
#: Number of seconds per unit.
SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}
#: Number of seconds per unit, for alternative names of units.
_ALSO = {"m": 60, "sec": 1}

_NUMBER = r"(\d+(?:\.\d+)?|\.\d+)"


def parse_bytes(setting: str, value: object) -> int:
    """Convert a size to bytes, for example ``4GB`` to 4·10⁹ and ``4GiB`` to 4·2³⁰. Units are not case-sensitive.

    Raises:
        SettingError: If the value is not a positive number with a unit. The message names `setting`.
    """
    units = {name.lower(): size for name, size in BYTES.items()}
    found = re.fullmatch(rf"{_NUMBER}\s*({'|'.join(units)})", str(value).strip().lower())
    exact = 0.0 if found is None else float(found[1]) * units[found[2]]
    size = int(exact) if math.isfinite(exact) else 0
    if not size:
        number = re.fullmatch(_NUMBER, str(value).strip())
        shown = number[1] if number and float(number[1]) else "4"
        do = f"For example, use {setting}={shown}GB (1 GB = 10⁹ bytes) or {setting}={shown}GiB (1 GiB = 2³⁰ bytes)."
        raise SettingError(setting, value, f"a number with one of the units {', '.join(BYTES)}", do)
    return size


def parse_seconds(setting: str, value: object, plain: bool = False) -> float:
    """Convert a time (for example, ``2h``, ``90min`` or ``1h30min``) to a number of seconds.

    If `plain` is True, a number without a unit is allowed.

    Raises:
        SettingError: If the value does not consist of positive numbers with units. The message names `setting`.
    """
    if plain and isinstance(value, int | float) and not isinstance(value, bool):
        value = f"{value:.6f}s"
    units = SECONDS | _ALSO
    part = rf"{_NUMBER}\s*({'|'.join(sorted(units, key=len, reverse=True))})"
    text = str(value).strip()
    total = 0.0
    if re.fullmatch(rf"(?:{part}\s*)+", text):
        total = sum(float(number) * units[unit] for number, unit in re.findall(part, text))
    if not total or math.isinf(total):
        do = f"For example, use {setting}=2h or {setting}=90min."
        form = f"a number {'of seconds, or a number ' if plain else ''}with one of the units {', '.join(SECONDS)}"
        raise SettingError(setting, value, form, do)
    return total
