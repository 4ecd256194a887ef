"""Discovery of packages that add methods or kinds of task through entry points, and of their configuration files.

A package declares each method as an entry point and stores the settings of the method in a YAML file in
``conf/method``::

    [project.entry-points."efficient_ft.methods"]
    every_nth = "every_nth_method.method:EveryNth"      # every_nth_method/conf/method/every_nth.yaml

This module reads only metadata and files. The packages are not imported.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import yaml

from efficient_ft.core.errors import UserError

#: Group of entry points through which other packages add methods.
GROUP = "efficient_ft.methods"
#: Group of entry points through which other packages add kinds of task.
KINDS_GROUP = "efficient_ft.kinds"


def configuration_folders() -> dict[str, list[Path]]:
    """Return a dict that maps package names to configuration folders.

    The dict contains every package that adds methods or kinds of task.

    Raises:
        UserError: If a package cannot be found, a method has no YAML file, or the YAML file does not name the method.
    """
    folders: dict[str, list[Path]] = {}
    for entry in (*sorted(entry_points(group=GROUP)), *sorted(entry_points(group=KINDS_GROUP))):
        package = entry.dist.name if entry.dist is not None else entry.value
        if entry.group == GROUP:
            own = [_configuration_folder(entry, package)]
        else:
            own = [folder for place in _places(entry, package) if (folder := Path(place) / "conf").is_dir()]
        for folder in own:
            if folder not in folders.setdefault(package, []):
                folders[package].append(folder)
    return folders


def method_files(folders: Mapping[str, list[Path]]) -> Iterator[tuple[str, str, Path]]:
    """Yield the package name, method name and YAML file of each option of the group ``method`` in `folders`."""
    for package, places in folders.items():
        for folder in places:
            for file in sorted((folder / "method").glob("*.yaml")):
                method = method_of(file)
                if method is not None:
                    yield package, method, file


def option_settings(file: Path) -> dict[str, Any]:
    """Return the settings in the YAML file of an option, merged with the settings of base options (``defaults``)."""
    own = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    bases = [file.with_name(f"{base}.yaml") for base in own.pop("defaults", ())]
    return {key: value for base in bases if base.is_file() for key, value in option_settings(base).items()} | own


def method_of(file: Path) -> str | None:
    """Return NAME from the line ``# @package method.NAME`` of a YAML file, or None if there is no such line.

    All variants of a method have the same name in this line.
    """
    found = re.search(r"^# @package method\.(\w+)\s*$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else None


def _configuration_folder(entry: EntryPoint, package: str) -> Path:
    """Return the ``conf`` folder of the package that provides the method `entry`."""
    top = entry.module.partition(".")[0]
    for place in _places(entry, package):
        folder = Path(place) / "conf"
        file = folder / "method" / f"{entry.name}.yaml"
        if not file.is_file():
            continue
        if method_of(file) != entry.name:
            raise UserError(f"Package {package}: {file} must begin with the line '# @package method.{entry.name}'.")
        return folder
    raise UserError(
        f"Package {package}: the method {entry.name} has no settings file. The package must contain the file"
        f" {top}/conf/method/{entry.name}.yaml."
    )


def _places(entry: EntryPoint, package: str) -> list[str]:
    """Return the folders of the top-level package of `entry`, without importing the package."""
    spec = importlib.util.find_spec(entry.module.partition(".")[0])
    if spec is None or spec.submodule_search_locations is None:
        what = "method" if entry.group == GROUP else "kind of task"
        raise UserError(
            f"Package {package}: the {what} {entry.name} ({entry.value}) is not in a package that can be imported."
            " Fix or uninstall this package."
        )
    return list(spec.submodule_search_locations)
