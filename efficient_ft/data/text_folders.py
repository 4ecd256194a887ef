"""Read class folders of texts, which contain one file per text."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from efficient_ft.config.schema import TextConfig
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.text import printable
from efficient_ft.data.counts import some
from efficient_ft.data.file_list import FileList, links_in, visible_entries
from efficient_ft.data.splits import Chosen, Split, ambiguous, name_splits, show
from efficient_ft.data.text_files import read_text
from efficient_ft.data.text_rows import Row, clean_name

LAYOUT = (
    "Expected: a file of rows (.csv, .tsv or .jsonl); a folder with such files named train, val and test; or a folder"
    " with CLASS/*.txt or {train,val,test}/CLASS/*.txt."
)
#: Names of folders with unlabeled texts next to class folders.
_UNLABELED = frozenset(["unsup", "unsupervised", "unlabeled", "unlabelled"])
#: Maximum number of notes about encodings.
_NOTES = 8


@dataclass
class SplitRows:
    """The rows of a data set by split, and facts found while reading the rows."""

    rows: dict[Split, list[Row]] = field(default_factory=dict)  # rows by split
    files: dict[Split, list[str]] = field(default_factory=dict)  # paths relative to the root, by split
    origins: dict[str, str] = field(default_factory=dict)  # short description of the source of each split
    notes: list[str] = field(default_factory=list)  # facts that a user should know, one sentence each
    left_out: Counter[str] = field(default_factory=Counter)  # number of unused files by reason
    columns: list[str] = field(default_factory=list)  # columns of the training files; empty for class folders

    def without(self, split: str) -> str:
        """Return a sentence with the setting that excludes a split, or an empty string if there is no such setting."""
        rest: Chosen = {one: names for one, names in self.files.items() if one != split}
        return f" To exclude the split: 'data.splits={show(rest)}'." if rest.get("train") else ""


@dataclass
class ClassFolders:
    """Read folders whose subfolders are classes."""

    root: Path  # ``data.root``, a folder
    settings: TextConfig
    follow_links: bool  # True to use the targets of links that lead out of the root
    found: SplitRows  # collects notes and unused files
    places: Mapping[Split, Sequence[Path]]  # folders and files of all splits

    def read(self, split: Split, folder: Path) -> list[Row]:
        """Return the texts at any depth in the class folders of `folder`."""
        if len(self.settings.columns) > 1:
            known = f"a single column, because {printable(folder)} contains one file per text"
            raise SettingError("data.text.columns", self.settings.columns, known)
        classes = folders_in(folder)
        loose = texts_in(folder)
        if loose:
            where = "" if folder == self.root else f" in {os.path.relpath(folder, self.root)}"
            self.found.left_out[f"outside of class folders{where} (.txt)"] += loose
        self.found.notes += links_in(classes, self.root, self.follow_links)
        files = FileList(self.root, classes, self.follow_links)
        below = {place: files.below(place, strict=True) for place in classes}
        self.found.notes += files.notes(folder)
        bare = not any(path.lower().endswith(".txt") for paths in below.values() for path in paths)
        rows: list[Row] = []
        empty: list[str] = []
        for place, paths in below.items():
            texts = [path for path in map(Path, paths) if _is_text(path, without_extension=bare)]
            others = Counter(Path(path).suffix.lower() or "no extension" for path in paths)
            others.subtract(path.suffix.lower() or "no extension" for path in texts)
            for extension, count in (+others).items():
                self.found.left_out[f"not .txt ({extension})"] += count
            if place.name.casefold() in _UNLABELED:
                self.found.left_out[f"unlabeled ({place.name}/)"] += len(texts)
                continue
            if not texts:
                empty.append(place.name)
            rows += [self._row(path, place.name) for path in texts]
        if not rows:
            there = some([path.name for path in visible(folder)]) or "nothing"
            not_used = "".join(f" Not used: {reason} ({count})." for reason, count in self.found.left_out.items())
            raise UserError(
                f"{printable(folder.absolute())} has no texts in class folders. Found: {there}.{not_used} {LAYOUT}"
            )
        if empty and split == "train":
            raise UserError(
                f"{printable(folder.absolute())} has class folders without .txt files: {some(empty)}. Add texts, or"
                " remove the folders."
            )
        if bare:
            self.found.notes.append(f"Files without an extension in {printable(folder)} are read as texts.")
        return rows

    def _row(self, path: Path, label: str) -> Row:
        text, note = read_text(path, self.settings.encoding)
        if note and note not in self.found.notes and len(self.found.notes) < _NOTES:
            self.found.notes.append(note)
        text = text.strip()
        return Row((text,), clean_name(printable(label)), printable(path), None, None if text else "no text")

    def refuse_unclear(self, split: Split, folder: Path) -> None:
        """Reject folders that may be either parts of the data set or classes."""
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
            self.found.notes.append(
                f"Texts in subfolders of {some([place.name for place in mixed], 3)}, such as {inner[mixed[0]][0]},"
                " belong to the class of the outer folder."
            )
        if not nested:
            return
        if len(used) == 1:
            raise self._wrapped(folder, used[0], inner[used[0]])
        relative = {one: [os.path.relpath(place, self.root) for place in of] for one, of in self.places.items()}
        top_classes: Chosen = {**relative, split: os.path.relpath(folder, self.root)}
        inner_classes: Chosen = {**relative, split: [os.path.relpath(place, self.root) for place in nested]}
        top = some([place.name for place in nested], 4)
        if "train" in name_splits(inner[nested[0]]).values():
            raise UserError(
                f"{printable(folder)} contains folders with their own splits: {top} with {some(inner[nested[0]])}. Pass"
                f" one of them, such as data.root={printable(nested[0])}."
            )
        if direct:
            raise UserError(
                f"{printable(folder)} has texts at two depths: directly in {some([p.name for p in direct], 3)}, and in"
                f" subfolders of {top} ({some(inner[nested[0]], 3)}). If the top folders are classes:"
                f" 'data.splits={show(top_classes)}'. Otherwise move the inner folders up."
            )
        shared = Counter(name for place in nested for name in inner[place])
        common = sorted(name for name, count in shared.items() if count > 1)
        if common and len(common) >= len(shared) / 2:
            raise ambiguous(
                self.root,
                f"{top} contain the same folders: {some(common, 4)}.",
                [
                    ("the inner folders are the classes", inner_classes),
                    ("the top folders are the classes", top_classes),
                ],
            )
        self.found.notes.append(
            f"The classes are the top folders of {printable(folder)} ({top}). Texts in their subfolders, such as"
            f" {inner[nested[0]][0]}, belong to them."
        )

    def _wrapped(self, folder: Path, only: Path, inside: Sequence[str]) -> UserError:
        """Create the error for a folder whose class folders are one level deeper."""
        chosen: Chosen = {
            split: [os.path.relpath(_only_folder(place) or place, self.root) for place in places]
            for split, places in self.places.items()
        }
        setting = f"data.root={printable(only)}" if folder == self.root else f"'data.splits={show(chosen)}'"
        return UserError(
            f"The texts of {printable(folder)} are in its only folder, {only.name}, which contains {some(inside, 4)}."
            f" Pass {setting}."
        )


def visible(folder: Path) -> list[Path]:
    """Return the visible files and folders in a folder, sorted by name."""
    return sorted(Path(entry.path) for entry in visible_entries(folder))


def folders_in(folder: Path) -> list[Path]:
    """Return the visible folders in a folder, sorted by name."""
    return [path for path in visible(folder) if path.is_dir()]


def _only_folder(place: Path) -> Path | None:
    """Return the only subfolder of a folder if it contains folders, otherwise None."""
    folders = folders_in(place) if place.is_dir() else []
    return folders[0] if len(folders) == 1 and folders_in(folders[0]) else None


def texts_in(folder: Path) -> int:
    """Count the .txt files directly in a folder."""
    return sum(path.suffix.lower() == ".txt" and path.is_file() for path in visible(folder))


def _is_text(path: Path, *, without_extension: bool) -> bool:
    suffix = path.suffix.lower()
    return suffix == ".txt" or (without_extension and (not suffix or suffix[1:].isdigit()))


def has_texts(folder: Path, *, without_extension: bool = False) -> bool:
    """Return True if a folder contains a text file at any depth."""
    names = (name for _, _, files in os.walk(folder) for name in files if not name.startswith("."))
    return any(_is_text(Path(name), without_extension=without_extension) for name in names)
