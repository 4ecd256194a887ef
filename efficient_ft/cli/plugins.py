"""Methods of other packages on the command line: their configuration files join Hydra's search path.

A package declares a method by an entry point and ships the YAML of its settings in ``conf/method``::

    [project.entry-points."efficient_ft.methods"]
    every_nth = "every_nth_method.method:EveryNth"      # every_nth_method/conf/method/every_nth.yaml

Only metadata and file names are read here; the packages themselves are not imported.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from efficient_ft.core.errors import UserError

#: The group of entry points through which other packages add methods.
GROUP = "efficient_ft.methods"

#: By distribution: the configuration folders added to Hydra's search path; empty until `register`.
_folders: dict[str, list[Path]] = {}


def register(own: Path) -> None:
    """Find the methods of other packages and check their configuration files, before anything is composed.

    Args:
        own: the folder of this package's configuration groups.

    Raises:
        UserError: a method has no YAML, or a YAML has a name that exists already; names the package at fault.
    """
    folders: dict[str, list[Path]] = {}
    owner = {file.relative_to(own): "efficient-ft" for file in own.rglob("*.yaml")}
    for entry in sorted(entry_points(group=GROUP)):
        package = entry.dist.name if entry.dist is not None else entry.value
        folder = _configuration_folder(entry, package)
        if folder in folders.setdefault(package, []):
            continue
        folders[package].append(folder)
        for file in sorted(file.relative_to(folder) for file in folder.rglob("*.yaml")):
            if file in owner:
                raise UserError(
                    f"Package {package}: its option {file.with_suffix('').as_posix()} exists already in {owner[file]}."
                    " Rename it, or uninstall one of the packages."
                )
            owner[file] = package
    _folders.clear()
    _folders.update(folders)


def folders() -> dict[str, Sequence[Path]]:
    """The configuration folders found by `register`, by the name of the distribution."""
    return dict(_folders)


def _configuration_folder(entry: EntryPoint, package: str) -> Path:
    """The folder ``conf`` of the package that holds the method of `entry`."""
    top = entry.module.partition(".")[0]
    spec = importlib.util.find_spec(top)  # of a top-level package: imports nothing
    if spec is None or spec.submodule_search_locations is None:
        raise UserError(
            f"Package {package}: its method {entry.name} ({entry.value}) is not in an importable package."
            " Mend or uninstall the package."
        )
    places = [Path(place) / "conf" for place in spec.submodule_search_locations]
    for folder in places:
        file = folder / "method" / f"{entry.name}.yaml"
        if not file.is_file():
            continue
        header = f"# @package method.{entry.name}"
        if not re.search(rf"^{re.escape(header)}\s*$", file.read_text(encoding="utf-8"), re.MULTILINE):
            raise UserError(f"Package {package}: {file} must begin with the line '{header}'.")
        return folder
    raise UserError(
        f"Package {package}: its method {entry.name} has no settings file. The package must ship"
        f" {top}/conf/method/{entry.name}.yaml."
    )
