"""Read class folders of texts: one file per text, in folders named after the classes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.text import printable
from efficient_ft.data.below import Below, files_below, links_in
from efficient_ft.data.paths import is_hidden
from efficient_ft.data.splits import Chosen, Split, ambiguous, name_splits, show, some
from efficient_ft.data.text_files import read_text
from efficient_ft.data.text_rows import Row, clean_name

if TYPE_CHECKING:
    from efficient_ft.config.schema import TextConfig

LAYOUT = (
    "Expected: a file of rows (.csv, .tsv or .jsonl); a folder with such files named train, val and test; or a folder"
    " with CLASS/*.txt or {train,val,test}/CLASS/*.txt."
)
#: Folders of texts without a class, next to class folders.
_UNLABELED = frozenset(["unsup", "unsupervised", "unlabeled", "unlabelled"])


@dataclass
class Places:
    """The rows of a data set by split, and facts found while reading them.

    Attributes:
        rows: rows by split.
        files: paths relative to the root, by split.
        origins: short description of each split's source.
        notes: facts that a user should know, one sentence each.
        left_out: number of unused files by reason.
        columns: columns of the training files; empty for class folders.
    """

    rows: dict[Split, list[Row]] = field(default_factory=dict)
    files: dict[Split, list[str]] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    columns: list[str] = field(default_factory=list)

    def without(self, split: str) -> str:
        """Return a sentence with the setting that leaves a split out; empty if there is none."""
        rest: Chosen = {one: plain(names) for one, names in self.files.items() if one != split}
        return f" To leave the split out: 'data.splits={show(rest)}'." if rest.get("train") else ""


class ClassFolders:
    """Reads folders whose subfolders are classes.

    Args:
        root: ``data.root``, a folder.
        settings: ``data.text``.
        follow_links: use the targets of links out of `root`.
        found: collects notes and unused files.
        places: the places of all splits.
    """

    def __init__(
        self,
        root: Path,
        settings: TextConfig,
        follow_links: bool,
        found: Places,
        places: Mapping[Split, Sequence[Path]],
    ) -> None:
        self._root, self._settings, self._follow, self._found, self._places = (
            root,
            settings,
            follow_links,
            found,
            places,
        )

    def _name(self, place: Path) -> str:
        return os.path.relpath(place, self._root)

    def read(self, split: Split, folder: Path) -> list[Row]:
        """Return the texts in the class folders of a folder, at any depth."""
        if len(self._settings.columns) > 1:
            raise SettingError(
                "data.text.columns",
                self._settings.columns,
                f"a single column, because {printable(folder)} contains one file per text",
            )
        classes = folders_in(folder)
        loose = texts_in(folder)
        if loose:
            where = "" if folder == self._root else f" in {self._name(folder)}"
            self._found.left_out[f"outside of class folders{where} (.txt)"] += loose
        listed = frozenset(os.path.realpath(place) for place in classes)
        self._found.notes += links_in(classes, self._root, self._follow)
        below = {}
        for place in classes:
            below[place] = files_below(
                place, Below(root=os.path.realpath(self._root), listed=listed, follow_links=self._follow)
            )
            if below[place].links or below[place].special or below[place].again:
                raise UserError(below[place].notes(place)[0])
            self._found.notes += below[place].notes(place)
        bare = not any(path.lower().endswith(".txt") for one in below.values() for path in one.files)
        rows: list[Row] = []
        empty: list[str] = []
        for place, one in below.items():
            texts = [path for path in map(Path, one.files) if _is_text(path, without_extension=bare)]
            others = Counter(Path(path).suffix.lower() or "no extension" for path in one.files)
            others.subtract(path.suffix.lower() or "no extension" for path in texts)
            for extension, count in (+others).items():
                self._found.left_out[f"not .txt ({extension})"] += count
            if place.name.casefold() in _UNLABELED:
                self._found.left_out[f"unlabeled ({place.name}/)"] += len(texts)
                continue
            if not texts:
                empty.append(place.name)
            rows += [self._row(path, place.name) for path in texts]
        if not rows:
            there = some([path.name for path in visible(folder)]) or "nothing"
            not_used = "".join(f" Not used: {reason} ({count})." for reason, count in self._found.left_out.items())
            raise UserError(
                f"{printable(folder.absolute())} has no texts in class folders. Found: {there}.{not_used} {LAYOUT}"
            )
        if empty and split == "train":
            raise UserError(
                f"{printable(folder.absolute())} has class folders without .txt files: {some(empty)}. Add texts, or"
                " remove the folders."
            )
        if bare:
            self._found.notes.append(f"Files without an extension in {printable(folder)} are read as texts.")
        return rows

    def _row(self, path: Path, label: str) -> Row:
        text, note = read_text(path, self._settings.encoding)
        if note and note not in self._found.notes and len(self._found.notes) < 8:
            self._found.notes.append(note)
        text = text.strip()
        return Row((text,), clean_name(printable(label)), printable(path), None, None if text else "no text")

    def refuse_unclear(self, split: Split, folder: Path) -> None:
        """Reject folders that may be parts of the data set or classes."""
        used = [
            place
            for place in folders_in(folder)
            if place.name.casefold() not in _UNLABELED and has_texts(place, without_extension=True)
        ]
        inner = {
            place: sorted(sub.name for sub in folders_in(place) if has_texts(sub, without_extension=True))
            for place in used
        }
        direct = [place for place in used if texts_in(place)]
        nested = [place for place in used if inner[place] and place not in direct]
        mixed = [place for place in direct if inner[place]]
        if mixed:
            self._found.notes.append(
                f"Texts in subfolders of {some([place.name for place in mixed], 3)}, such as {inner[mixed[0]][0]},"
                " belong to the class of the outer folder."
            )
        if not nested:
            return
        if len(used) == 1:
            raise self._wrapped(folder, used[0], inner[used[0]])
        top, names = some([p.name for p in nested], 4), [self._name(place) for place in nested]
        others: Chosen = {
            one: plain([self._name(place) for place in places]) for one, places in self._places.items() if one != split
        }
        chosen = show({**others, split: self._name(folder)})
        if "train" in name_splits(inner[nested[0]]).values():
            raise UserError(
                f"{printable(folder)} contains folders with their own splits: {top} with {some(inner[nested[0]])}. Pass"
                f" one of them, such as data.root={printable(nested[0])}."
            )
        if direct:
            raise UserError(
                f"{printable(folder)} has texts at two depths: directly in {some([p.name for p in direct], 3)}, and in"
                f" subfolders of {top} ({some(inner[nested[0]], 3)}). If the top folders are classes:"
                f" 'data.splits={chosen}'. Otherwise move the inner folders up."
            )
        shared = Counter(name for place in nested for name in inner[place])
        common = sorted(name for name, count in shared.items() if count > 1)
        if common and len(common) >= len(shared) / 2:
            raise ambiguous(
                self._root,
                f"{top} contain the same folders: {some(common, 4)}.",
                [
                    ("the inner folders are the classes", {**others, split: names}),
                    ("the top folders are the classes", {**others, split: self._name(folder)}),
                ],
            )
        self._found.notes.append(
            f"The classes are the top folders of {printable(folder)} ({top}). Texts in their subfolders, such as"
            f" {inner[nested[0]][0]}, belong to them."
        )

    def _wrapped(self, folder: Path, only: Path, inside: Sequence[str]) -> UserError:
        """Return the error for a folder whose class folders are one level deeper."""
        if folder == self._root:
            advice = f"Pass data.root={printable(only)}."
        else:
            deeper = {
                split: [self._name(only_folder(place) or place) for place in places]
                for split, places in self._places.items()
            }
            chosen: Chosen = {split: plain(names) for split, names in deeper.items()}
            advice = f"Pass 'data.splits={show(chosen)}'."
        return UserError(
            f"The texts of {printable(folder)} are in its only folder, {only.name}, which contains {some(inside, 4)}."
            f" {advice}"
        )


def plain(names: Sequence[str]) -> str | Sequence[str]:
    """Return one name as a string, and several names as a list, as in ``data.splits``."""
    return names[0] if len(names) == 1 else names


def visible(folder: Path) -> list[Path]:
    """Return the files and folders in a folder that are not hidden, sorted by name."""
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise UserError(f"{printable(folder)} cannot be read ({error.strerror}). Check its permissions.") from error
    return [path for path in paths if not is_hidden(path.name)]


def folders_in(folder: Path) -> list[Path]:
    """Return the visible folders in a folder, sorted by name."""
    return [path for path in visible(folder) if path.is_dir()]


def only_folder(place: Path) -> Path | None:
    """Return the only folder in a folder if it has folders itself."""
    folders = folders_in(place) if place.is_dir() else []
    return folders[0] if len(folders) == 1 and folders_in(folders[0]) else None


def texts_in(folder: Path) -> int:
    """Count the .txt files directly in a folder."""
    return sum(path.suffix.lower() == ".txt" and path.is_file() for path in visible(folder))


def _is_text(path: Path, *, without_extension: bool) -> bool:
    suffix = path.suffix.lower()
    return suffix == ".txt" or (without_extension and (not suffix or suffix[1:].isdigit()))


def has_texts(folder: Path, *, without_extension: bool = False) -> bool:
    """Return whether there is a text file below a folder."""
    return any(
        _is_text(Path(name), without_extension=without_extension)
        for _, _, names in os.walk(folder)
        for name in names
        if not name.startswith(".")
    )
