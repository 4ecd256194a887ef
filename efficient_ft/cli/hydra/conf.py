"""The folder of the configuration groups."""

from __future__ import annotations

from pathlib import Path


def configuration_groups() -> Path:
    """Return the folder of the configuration groups: inside the installed package, or at the top of a checkout."""
    package = Path(__file__).resolve().parents[2]
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"


CONF = configuration_groups()
