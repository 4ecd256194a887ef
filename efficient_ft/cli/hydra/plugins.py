"""Find the command-line options of methods in other packages.

`efficient_ft.core.packages` finds the configuration folders of these packages, and `hydra_plugins` appends them to
Hydra's search path. This module does not import the packages. When a run selects a method, `efficient_ft.methods.build`
compares the YAML file with the constructor of the method.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from efficient_ft.core.errors import UserError
from efficient_ft.core.packages import configuration_folders

#: Configuration folders of each distribution. The dict is empty until `register` is called.
_folders: dict[str, list[Path]] = {}


def register(own: Path) -> None:
    """Find the methods of other packages.

    Raises:
        UserError: If an option of a package already exists in the folder `own` or in another package.
    """
    found = configuration_folders()
    owner = {file.relative_to(own): "efficient-ft" for file in own.rglob("*.yaml")}
    for package, folders in found.items():
        for folder in folders:
            for file in sorted(file.relative_to(folder) for file in folder.rglob("*.yaml")):
                if file in owner:
                    raise UserError(
                        f"Package {package}: the option {file.with_suffix('').as_posix()} already exists in"
                        f" {owner[file]}. Rename the option, or uninstall one of the packages."
                    )
                owner[file] = package
    _folders.clear()
    _folders.update(found)


def folders() -> dict[str, Sequence[Path]]:
    """Return the configuration folders of each distribution that `register` has found."""
    return dict(_folders)
