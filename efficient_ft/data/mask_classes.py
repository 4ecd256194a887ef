"""Find the classes of the masks in a folder, from its class list and from settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from efficient_ft.core.errors import SettingError, UserError, did_you_mean
from efficient_ft.core.input_spec import IGNORED
from efficient_ft.core.text import printable
from efficient_ft.data.class_list import (
    NO_CLASS,
    ClassList,
    Color,
    Entry,
    is_class,
    listed_names,
    parse_color,
    read_class_list,
)
from efficient_ft.data.counts import counted
from efficient_ft.data.masks import UNKNOWN, Classes

if TYPE_CHECKING:
    from efficient_ft.config.schema import MaskConfig

#: The advice for a folder without a class list.
ADVICE = (
    "Create it, or set data.masks.classes=[NAME,…]; for other ids, map each value: data.masks.values={VALUE: NAME, …}."
)


class NoClassListError(UserError):
    """A folder has no class list."""


def folder_classes(root: Path, settings: MaskConfig) -> tuple[Classes, list[str]]:
    """Return the classes of the masks in a folder, and notes.

    Args:
        root: the folder.
        settings: `classes`, `values`, `colors`, `ignored` and `palette` are read.

    Raises:
        NoClassListError: there is no class list.
        UserError: the list cannot be read, or it has fewer than two classes.
        SettingError: settings do not fit the list.
    """
    found = _listed(root, settings)
    entries = list(found.entries)
    if settings.colors is not None:
        entries = _colored(entries, {name: _color(color) for name, color in settings.colors.items()})
    names = [entry.name for entry in entries if entry.is_class]
    place = printable(root.absolute())
    if isinstance(settings.values, Mapping):
        classes = _by_values(entries, dict(sorted(settings.values.items())), settings)
    else:
        without = {entry.id for entry in entries if not entry.is_class} | set(settings.ignored)
        explicit = [entry.id for entry in entries] != list(range(len(entries)))
        kept = [e for e in entries if e.is_class and e.id not in without and (explicit or e.id != IGNORED)]
        ids = [entry.id for entry in kept]
        classes = Classes(
            tuple(entry.name for entry in kept),
            tuple(ids),
            frozenset(without | ({IGNORED} - set(ids))),
            chosen=settings.values is not None or IGNORED in without or IGNORED in ids,
        )
        names = list(classes.names)
    if len(names) < 2:
        hint = " List the background as well." if len(names) == 1 and is_class(names[0]) else ""
        raise UserError(
            f"{place} has {counted(len(names), 'class')} ({found.source}). Segmentation needs at least two.{hint}"
        )
    if len(names) > UNKNOWN:
        raise UserError(f"{place} has {len(names)} classes; at most 254 are possible.")
    return _with_colors(classes, entries, settings), list(found.notes)


def _listed(root: Path, settings: MaskConfig) -> ClassList:
    """Return the class list from the settings or from a file."""
    if settings.classes is not None:
        return listed_names(settings.classes, "data.masks.classes")
    found = read_class_list(root)
    if found is not None:
        return found
    if isinstance(settings.values, Mapping):
        named = [target for _, target in sorted(settings.values.items()) if isinstance(target, str)]
        if len(named) == len(settings.values):
            unique = dict.fromkeys(name for name in named if is_class(name))
            return listed_names(list(unique), "data.masks.values")
    elif settings.colors is not None:
        # The order of a mapping is not part of a run's identity.
        return listed_names(sorted(name for name in settings.colors if is_class(name)), "data.masks.colors")
    others = sorted(one.name for one in root.iterdir() if one.suffix.lower() in (".txt", ".json", ".csv", ".yaml"))
    has = f" Found: {', '.join(map(printable, others[:3]))}." if others else ""
    raise NoClassListError(
        f"{printable(root.absolute())} has no classes.txt, which lists the class names in the order of the mask ids"
        f" 0, 1, …, one per line.{has}"
    )


def _color(given: str | Color) -> Color:
    color = parse_color(given) if isinstance(given, str) else given
    assert color is not None, "refused by `config.check`"
    return color


def _colored(entries: list[Entry], colors: Mapping[str, Color]) -> list[Entry]:
    """Return the entries with the colors of the setting, and an entry for each color without a label."""
    found = []
    left = {name.strip().casefold(): color for name, color in colors.items()}
    seen: dict[Color, str] = {}
    for name, color in colors.items():
        if seen.setdefault(color, name) != name and (is_class(name) or is_class(seen[color])):
            raise SettingError(
                "data.masks.colors",
                list(color),
                "a mapping to unique colors",
                f"{seen[color]} and {name} have the same color.",
            )
    for entry in entries:
        if entry.is_class:
            own = left.pop(entry.name.casefold(), None)
            if own is None:
                raise SettingError(
                    "data.masks.colors",
                    list(colors),
                    "a mapping with a color for each class",
                    f"Add a color for {entry.name}.",
                )
            found.append(Entry(entry.name, entry.id, own))
        else:
            found.append(
                Entry(
                    entry.name,
                    entry.id,
                    left.pop(entry.name.casefold()) if entry.name.casefold() in left else entry.color,
                )
            )
    free = max((entry.id for entry in entries), default=-1) + 1
    for name, color in left.items():
        if is_class(name):
            known = [entry.name for entry in entries if entry.is_class]
            raise SettingError("data.masks.colors", name, known)
        found.append(Entry(name, free, color))
        free += 1
    return found


def _by_values(entries: list[Entry], values: dict[int, str | int], settings: MaskConfig) -> Classes:
    """Return the classes with the pixel values of the setting `values`."""
    by_name = {entry.name.casefold(): entry for entry in entries}
    by_id = {entry.id: entry for entry in entries}
    kept = [entry for entry in entries if entry.is_class]
    index = {entry.id: number for number, entry in enumerate(kept)}
    known = [entry.name for entry in kept]
    ids: dict[int, int] = {}
    further = []
    without = set(settings.ignored)
    for value, target in values.items():
        entry = by_id.get(target) if isinstance(target, int) else by_name.get(target.strip().casefold())
        if entry is None:
            if isinstance(target, str) and target.strip().casefold() in NO_CLASS:
                without.add(value)
                continue
            choices = f"one of {', '.join(known)}, or void" + (", or a class id" if isinstance(target, int) else "")
            raise SettingError(
                f"data.masks.values.{value}", target, choices, did_you_mean(str(target), known).strip() or None
            )
        if not entry.is_class:
            without.add(value)
        elif value in settings.ignored:
            raise SettingError("data.masks.ignored", value, "none of the values in data.masks.values")
        elif entry.id not in ids:
            ids[entry.id] = value
        else:
            further.append((value, index[entry.id]))
    lacking = [entry.name for entry in kept if entry.id not in ids]
    if lacking:
        rest = ", ".join(entry.name for entry in kept if entry.id in ids)
        raise SettingError(
            "data.masks.values",
            values,
            "a mapping that gives each class a value",
            f"Add {', '.join(lacking[:5])}, or list only the existing classes: data.masks.classes=[{rest}].",
        )
    taken = {*values} - without
    return Classes(
        tuple(known),
        tuple(ids[entry.id] for entry in kept),
        frozenset(without | ({IGNORED} - taken)),
        tuple(further),
        chosen=True,
    )


def _with_colors(classes: Classes, entries: list[Entry], settings: MaskConfig) -> Classes:
    """Return the classes with the colors of the list, if it has any."""
    colors = {entry.name: entry.color for entry in entries if entry.is_class}
    given = [colors[name] for name in classes.names]
    complete = tuple(color for color in given if color is not None)
    if len(complete) < len(given) or settings.values is not None:
        if settings.palette == "color":
            raise SettingError(
                "data.masks.palette",
                "color",
                "index or auto, since the classes have no colors",
                "Add colors to classes.txt ('NAME RED GREEN BLUE'), or set data.masks.colors.",
            )
        complete = ()
    ignored = {entry.color for entry in entries if entry.name not in classes.names and entry.color is not None}
    return Classes(
        classes.names,
        classes.ids,
        classes.ignored,
        classes.further,
        complete,
        frozenset(ignored) if complete else frozenset(),
        settings.palette,
        classes.chosen or settings.colors is not None,
    )
