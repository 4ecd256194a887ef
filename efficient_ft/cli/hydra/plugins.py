"""Methods of other packages on the command line: their configuration files join Hydra's search path.

`efficient_ft.core.packages` finds the files. Whether a YAML fits the constructor is checked when a run chooses its
method (`efficient_ft.methods.build`): here, no package is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from efficient_ft.core.errors import UserError
from efficient_ft.core.packages import configuration_folders

#: The configuration folders in Hydra's search path by distribution; empty until `register`.
_folders: dict[str, list[Path]] = {}


def register(own: Path) -> None:
    """Find the methods of other packages, and refuse options whose names exist already in `own` or another package."""
    found = configuration_folders()
    owner = {file.relative_to(own): "efficient-ft" for file in own.rglob("*.yaml")}
    for package, folders in found.items():
        for folder in folders:
            for file in sorted(file.relative_to(folder) for file in folder.rglob("*.yaml")):
                if file in owner:
                    raise UserError(
                        f"Package {package}: its option {file.with_suffix('').as_posix()} exists already in"
                        f" {owner[file]}. Rename it, or uninstall one of the packages."
                    )
                owner[file] = package
    _folders.clear()
    _folders.update(found)


def folders() -> dict[str, Sequence[Path]]:
    """Return the configuration folders found by `register`, by the name of the distribution."""
    return dict(_folders)
