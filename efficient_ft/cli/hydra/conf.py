"""The folder of the configuration groups, which is inside the installed package or at the top level of a checkout."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[2]
CONF = _PACKAGE / "conf" if (_PACKAGE / "conf").is_dir() else _PACKAGE.parent / "conf"
