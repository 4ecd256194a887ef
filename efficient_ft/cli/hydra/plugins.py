"""Command-line options for methods of other packages, whose configuration folders join Hydra's search path.

`efficient_ft.core.packages` finds the folders. No package is imported here: `efficient_ft.methods.build` compares a
YAML file with its constructor when a run chooses the method.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from efficient_ft.core.errors import UserError
from efficient_ft.core.packages import configuration_folders

#: Configuration folders in Hydra's search path by distribution; empty until `register` is called.
_folders: dict[str, list[Path]] = {}


def register(own: Path) -> None:
    """Find the methods of other packages, and refuse options that already exist in `own` or in another package."""
    found = configuration_folders()
    owner = {file.relative_to(own): "efficient-ft" for file in own.rglob("*.yaml")}
    for package, folders in found.items():
        for folder in folders:
            for file in sorted(file.relative_to(folder) for file in folder.rglob("*.yaml")):
                if file in owner:
                    raise UserError(
                        f"Package {package}: the option {file.with_suffix('').as_posix()} already exists in"
                        f" {owner[file]}. Rename it, or uninstall one of the packages."
                    )
                owner[file] = package
    _folders.clear()
    _folders.update(found)


def folders() -> dict[str, Sequence[Path]]:
    """Return the configuration folders that `register` has found, by distribution."""
    return dict(_folders)
