"""Find and read the texts in the files and class folders of each split."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from efficient_ft.config.schema import TextConfig
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.text import printable
from efficient_ft.data.counts import and_more, counted, some
from efficient_ft.data.file_list import FileList, links_in, visible_entries
from efficient_ft.data.splits import SPLITS, Chosen, Split, ambiguous, part_names, places_of, repeated, show, splits_in
from efficient_ft.data.tables import EXTENSIONS, Records, clean_name, read_text, suffix_of
from efficient_ft.data.text_rows import Row, read_rows

LAYOUT = (
    "Expected layout: a file of rows (.csv, .tsv or .jsonl), a folder that contains such files named train, val and"
    " test, or a folder that contains CLASS/*.txt or {train,val,test}/CLASS/*.txt."
)
_UNLABELED = frozenset(["unsup", "unsupervised", "unlabeled", "unlabelled"])  # names of folders with unlabeled texts
_NOTES = 8  # maximum number of notes about encodings


@dataclass
class SplitRows:
    """The rows of each split, and facts that were found while reading the rows."""

    rows: dict[Split, list[Row]] = field(default_factory=dict)  # rows of each split
    files: dict[Split, list[str]] = field(default_factory=dict)  # paths of each split, relative to the root
    origins: dict[str, str] = field(default_factory=dict)  # short description of the source of each split
    notes: list[str] = field(default_factory=list)  # facts that a user should know, one sentence each
    left_out: Counter[str] = field(default_factory=Counter)  # number of unused files, keyed by the reason
    columns: list[str] = field(default_factory=list)  # columns of the training files; empty for class folders

    def without(self, split: str) -> str:
        """Return a sentence with the setting that excludes a split, or an empty string if there is no such setting."""
        rest: Chosen = {one: names for one, names in self.files.items() if one != split}
        return f" To exclude the split, set 'data.splits={show(rest)}'." if rest.get("train") else ""


def visible(folder: Path) -> list[Path]:
    """Return the non-hidden files and folders in a folder, sorted by name."""
    return sorted(Path(entry.path) for entry in visible_entries(folder))


def folders_in(folder: Path) -> list[Path]:
    """Return the non-hidden subfolders of a folder, sorted by name."""
    return [path for path in visible(folder) if path.is_dir()]


def _only_folder(place: Path) -> Path | None:
    """Return the only subfolder of a folder if this subfolder contains folders, or None otherwise."""
    folders = folders_in(place) if place.is_dir() else []
    return folders[0] if len(folders) == 1 and folders_in(folders[0]) else None


def texts_in(folder: Path) -> int:
    """Count the .txt files directly in a folder."""
    return sum(path.suffix.lower() == ".txt" and path.is_file() for path in visible(folder))


def _is_text(path: Path, *, bare: bool) -> bool:
    suffix = path.suffix.lower()
    return suffix == ".txt" or (bare and (not suffix or suffix[1:].isdigit()))


def has_texts(folder: Path, *, bare: bool = False) -> bool:
    """Return True if a folder contains a text file at any depth."""
    names = (name for _, _, files in os.walk(folder) for name in files if not name.startswith("."))
    return any(_is_text(Path(name), bare=bare) for name in names)


#: Pattern of the shard names that Hugging Face Datasets writes, for example ``train-00000-of-00002``.
_SHARD = re.compile(r"(.+?)[-_.](\d+)[-_]of[-_](\d+)")


class Reader:
    """Reader of the texts in the folder ``data.root``."""

    def __init__(self, root: Path, settings: TextConfig, follow_links: bool) -> None:
        self.root, self._settings, self._follow = root, settings, follow_links
        self._places: Mapping[Split, Sequence[Path]] = {}
        self.found = SplitRows()

    def read(self, chosen: Chosen | None) -> SplitRows:
        """Return the rows of all splits. If `chosen` (``data.splits``) is None, splits are recognized by name.

        Raise `UserError` if there are no training texts, the folder is ambiguous, or a file cannot be read.
        """
        places = self._recognized() if chosen is None else places_of(self.root, chosen)
        used = [path for of in places.values() for path in of if path != self.root]
        self.found.notes += links_in(used, self.root, self._follow)
        self._places = places
        self.found.files = {split: list(map(self._name, of)) for split, of in places.items()}
        for split in SPLITS:
            if split in places:
                self._read_split(split, places[split], check=chosen is None)
        return self.found

    def _read_split(self, split: Split, places: Sequence[Path], *, check: bool) -> None:
        rows: list[Row] = []
        origins, advice = [], self.found.without(split)
        for place in places:
            if place.is_dir() and not (files := self._files_of(place)):
                if check:
                    self._refuse_unclear(split, place)
                rows += self._read_classes(split, place)
                origins.append("class folders" if place == self.root else f"{self._name(place)}/")
                continue
            for file in files if place.is_dir() else [place]:
                of_file, read = self.rows_of(file, advice)
                rows += of_file
                origins.append(f"{self._name(file)} ({read.origin})")
                if split == "train":
                    self.found.columns = self.found.columns or read.columns
        self.found.rows[split], self.found.origins[split] = rows, some(origins, 3)

    def rows_of(self, file: Path, advice: str = "") -> tuple[list[Row], Records]:
        """Read a file of rows (see `read_rows`), and append the notes about this file to `self.found.notes`."""
        rows, read = read_rows(file, self._settings, advice)
        self.found.notes += read.notes
        return rows, read

    def _name(self, place: Path) -> str:
        return os.path.relpath(place, self.root)

    def _recognized(self) -> Mapping[Split, list[Path]]:
        files, folders = _row_files(self.root), folders_in(self.root)
        lost = [path.name for path in visible(self.root) if path.is_symlink() and not path.exists()]
        if lost:
            self.found.left_out[f"broken links ({some(lost, 2)})"] += len(lost)
        bases = {path: _base(path) if path in files else path.name for path in (*files, *folders)}
        splits = splits_in(dict.fromkeys(bases.values()))
        here: dict[Split, list[Path]] = {}
        for path, base in bases.items():
            if base in splits:
                here.setdefault(splits[base], []).append(path)
        for split, places in here.items():
            shards = self._shards(places)
            if shards is None:
                raise repeated(self.root, split, {one: [path.name for path in of] for one, of in here.items()})
            here[split] = shards
        rest = [path for path in bases if bases[path] not in splits]
        if "train" in here:
            train = here["train"][0]
            if train.is_dir() and not self._files_of(train) and not folders_in(train) and texts_in(train):
                raise UserError(
                    f"The folder {printable(train)} contains {counted(texts_in(train), '.txt file')}, but no class"
                    f" folders. {LAYOUT} If the folders in {printable(self.root)} are classes, set"
                    " 'data.splits={train: .}'."
                )
            self._refuse_half_named(here, rest)
            if rest:
                self.found.left_out[f"in no split: {some([path.name for path in rest], 3)}"] += len(rest)
            return here
        if here:
            raise self._without_train(here, rest)
        return {"train": self._single(files, folders)}

    def _refuse_half_named(self, here: Mapping[Split, Sequence[Path]], rest: Sequence[Path]) -> None:
        """Raise `UserError` if the name of an unused file or folder contains the name of a missing split."""
        used: Chosen = {one: [place.name for place in places] for one, places in here.items()}
        for path in rest:
            words = re.split(r"[\W_]+", _base(path) if path.is_file() else path.name)
            split = next((found for word in words if (found := splits_in([word]).get(word)) is not None), None)
            if split is not None and split not in here:
                name = printable(path.name)
                own: tuple[str, Chosen] = (f"{name} is the {split} split", {**used, split: path.name})
                about = f"The name {name} may denote a {split} split."
                raise ambiguous(self.root, about, [own, (f"{name} is not used", used)])

    def note_siblings(self, file: Path) -> None:
        """Add a note about files of other splits next to `file`, the only file that is read."""
        bases = {path: _base(path) for path in _row_files(file.parent)}
        splits = splits_in(dict.fromkeys(bases.values()))
        others = [path.name for path in bases if splits.get(bases[path], "train") != "train"]
        if splits.get(_base(file)) == "train" and others:
            self.found.notes.append(
                f"Files next to {printable(file.name)} are not used: {some(others)}. To use all files, set"
                f" data.root={printable(file.parent)}."
            )

    def _without_train(self, here: Mapping[Split, Sequence[Path]], rest: Sequence[Path]) -> UserError:
        names: dict[Split, list[str]] = {split: [place.name for place in places] for split, places in here.items()}
        others = [path.name for path in rest]
        if others:
            advice = f"Specify the training data with 'data.splits={show({'train': others, **names})}'."
        else:
            first = next(iter(names.values()))
            advice = f"To train on {first[0]}, set 'data.splits={show({'train': first})}'."
        found = some([path.name for places in here.values() for path in places])
        place = printable(self.root.absolute())
        return UserError(f"The folder {place} contains {found}, but no training texts. {advice} {LAYOUT}")

    def _single(self, files: Sequence[Path], folders: Sequence[Path]) -> list[Path]:
        """Return the training data of a folder without split names: a file, the shards of a file, or class folders."""
        classes = [folder for folder in folders if has_texts(folder)]
        names = [path.name for path in classes]
        if not files:
            self._refuse_wrapper(folders)
            if len(names) > 1 and part_names(names) == names and not any(folders_in(path) for path in classes):
                raise UserError(
                    f"The folder {printable(self.root.absolute())} contains the folders {some(names)}. These folders"
                    f" look like parts of a data set without class folders. {LAYOUT} If these folders are the classes,"
                    " set 'data.splits={train: .}'."
                )
            return [self.root]
        shards = self._shards(files)
        if classes:
            found = f"{some([path.name for path in files], 3)} and folders of .txt files ({some(names, 3)})"
            readings: list[tuple[str, Chosen]] = [("the file contains the texts", {"train": files[0].name})]
            readings.append(("the folders are classes", {"train": "."}))
            raise ambiguous(self.root, f"The folder contains {found}.", readings)
        if shards is not None:
            return shards
        raise self._several(files)

    def _several(self, files: Sequence[Path]) -> UserError:
        rows: dict[str, int | None] = {}
        for file in files[:6]:
            try:
                rows[file.name] = len(read_rows(file, self._settings)[0])
            except UserError:
                rows[file.name] = None
        order = sorted(rows, key=lambda name: -(rows[name] or 0))
        shown = ", ".join(f"{name} ({'not readable' if n is None else counted(n, 'row')})" for name, n in rows.items())
        readings: list[tuple[str, Chosen]] = [
            (f"{order[0]} is the training data", {"train": order[0], "test": order[1]}),
            ("all of these files are training data", {"train": order}),
        ]
        return ambiguous(self.root, f"No file name denotes a split: {shown}{and_more(len(files) - 6)}.", readings)

    def _refuse_wrapper(self, folders: Sequence[Path]) -> None:
        if len(folders) == 1 and (_row_files(folders[0]) or folders_in(folders[0])):
            inside = some([path.name for path in (*folders_in(folders[0]), *_row_files(folders[0]))], 4)
            raise UserError(
                f"The only folder in {printable(self.root)} is {folders[0].name}, which contains {inside}. Set"
                f" data.root={printable(folders[0])}."
            )
        deeper = [path for folder in folders for path in _row_files(folder)]
        if deeper and not any(map(has_texts, folders)):
            first = deeper[0].parent
            if all(path.parent == first for path in deeper):
                names = some([path.name for path in deeper], 4)
                raise UserError(
                    f"The files of {printable(self.root)} are in the folder {first.name}: {names}. Set"
                    f" data.root={printable(first)}."
                )
            raise UserError(
                f"The folder {printable(self.root.absolute())} contains no texts, but its subfolders contain"
                f" {some(list(map(str, deeper)), 1)}. Set data.root=FOLDER, or specify the files with"
                f" 'data.splits={show({'train': self._name(deeper[0])})}'."
            )

    def _shards(self, places: Sequence[Path]) -> list[Path] | None:
        """Return the shards of one file in order, or None if the files are not shards."""
        if len(places) == 1 and not _SHARD.fullmatch(_stem(places[0])):
            return list(places)
        numbered = {path: _SHARD.fullmatch(_stem(path)) for path in places if path.is_file()}
        parts = {path: match for path, match in numbered.items() if match}
        if len(parts) < len(places) or len({(m[1], m[3], suffix_of(p)) for p, m in parts.items()}) > 1:
            return None
        order = sorted(parts, key=lambda path: int(parts[path][2]))
        numbers, total = [int(parts[path][2]) for path in order], int(next(iter(parts.values()))[3])
        first = 1 if numbers[-1] == total else 0
        lacking = sorted({*range(first, first + total)} - {*numbers})
        if lacking or len(numbers) != total:
            raise UserError(
                f"The folder {printable(order[0].parent)} contains {len(numbers)} of {total} parts of"
                f" {parts[order[0]][1]}. Part {lacking[0] if lacking else numbers[0]}"
                f" {'is missing. Add this part' if lacking else 'occurs twice. Remove one of the files'}, or use the"
                f" existing parts with 'data.splits={show({'train': [self._name(path) for path in order[:3]]})}'."
            )
        if total > 1:
            self.found.notes.append(f"The {total} files {parts[order[0]][1]}-… are concatenated in order.")
        return order

    def _files_of(self, folder: Path) -> list[Path]:
        files = _row_files(folder)
        if not files or any(map(has_texts, folders_in(folder))):
            return []
        shards = self._shards(files)
        if shards is None:
            raise UserError(
                f"The folder {printable(folder)} contains several files: {some([path.name for path in files])}. Specify"
                f" the used files with 'data.splits={show({'train': [self._name(path) for path in files[:3]]})}'."
            )
        return shards

    def _read_classes(self, split: Split, folder: Path) -> list[Row]:
        """Return the texts at any depth in the class folders of `folder`."""
        if len(self._settings.columns) > 1:
            known = f"a single column, because {printable(folder)} contains one file per text"
            raise SettingError("data.text.columns", self._settings.columns, known)
        classes = folders_in(folder)
        loose = texts_in(folder)
        if loose:
            where = "" if folder == self.root else f" in {self._name(folder)}"
            self.found.left_out[f"outside of class folders{where} (.txt)"] += loose
        self.found.notes += links_in(classes, self.root, self._follow)
        files = FileList(self.root, classes, self._follow)
        below = {place: files.below(place, strict=True) for place in classes}
        self.found.notes += files.notes(folder)
        bare = not any(path.lower().endswith(".txt") for paths in below.values() for path in paths)
        rows: list[Row] = []
        empty: list[str] = []
        for place, paths in below.items():
            texts = [path for path in map(Path, paths) if _is_text(path, bare=bare)]
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
            found = f"Found: {there}.{not_used}"
            about = f"The folder {printable(folder.absolute())} contains no texts in class folders."
            raise UserError(f"{about} {found} {LAYOUT}")
        if empty and split == "train":
            raise UserError(
                f"The folder {printable(folder.absolute())} contains class folders without .txt files: {some(empty)}."
                " Add texts to these folders, or remove the folders."
            )
        if bare:
            self.found.notes.append(f"Files without an extension in {printable(folder)} are read as texts.")
        return rows

    def _row(self, path: Path, label: str) -> Row:
        text, note = read_text(path, self._settings.encoding)
        if note and note not in self.found.notes and len(self.found.notes) < _NOTES:
            self.found.notes.append(note)
        text = text.strip()
        return Row((text,), clean_name(printable(label)), printable(path), None, None if text else "no text")

    def _refuse_unclear(self, split: Split, folder: Path) -> None:
        """Raise `UserError` if it is ambiguous whether the inner folders are parts of the data set or classes."""
        labeled = [place for place in folders_in(folder) if place.name.casefold() not in _UNLABELED]
        used = [place for place in labeled if has_texts(place, bare=True)]
        inner = {place: sorted(sub.name for sub in folders_in(place) if has_texts(sub, bare=True)) for place in used}
        direct = [place for place in used if texts_in(place)]
        nested = [place for place in used if inner[place] and place not in direct]
        mixed = [place for place in direct if inner[place]]
        if mixed:
            self.found.notes.append(
                f"Texts in subfolders of {some([place.name for place in mixed], 3)} (for example,"
                f" {inner[mixed[0]][0]}) belong to the class of the outer folder."
            )
        if not nested:
            return
        if len(used) == 1:
            raise self._wrapped(folder, used[0], inner[used[0]])
        top_classes: Chosen = {**self.found.files, split: self._name(folder)}
        inner_classes: Chosen = {**self.found.files, split: list(map(self._name, nested))}
        top = some([place.name for place in nested], 4)
        if "train" in splits_in(inner[nested[0]]).values():
            raise UserError(
                f"The folder {printable(folder)} contains folders with separate splits ({some(inner[nested[0]])}):"
                f" {top}. Set data.root to one of these folders, for example data.root={printable(nested[0])}."
            )
        if direct:
            raise UserError(
                f"The folder {printable(folder)} contains texts at two depths: directly in"
                f" {some([p.name for p in direct], 3)}, and in subfolders of {top} ({some(inner[nested[0]], 3)}). If"
                f" the top-level folders are the classes, set 'data.splits={show(top_classes)}'. Otherwise, move the"
                " inner folders up by one level."
            )
        shared = Counter(name for place in nested for name in inner[place])
        common = sorted(name for name, count in shared.items() if count > 1)
        if common and len(common) >= len(shared) / 2:
            inner_reading = ("the inner folders are the classes", inner_classes)
            top_reading = ("the top-level folders are the classes", top_classes)
            found = f"The folders {top} contain the same subfolders: {some(common, 4)}."
            raise ambiguous(self.root, found, [inner_reading, top_reading])
        self.found.notes.append(
            f"The classes are the top-level folders of {printable(folder)} ({top}). Texts in subfolders of the class"
            f" folders (for example, {inner[nested[0]][0]}) belong to these classes."
        )

    def _wrapped(self, folder: Path, only: Path, inside: Sequence[str]) -> UserError:
        chosen: Chosen = {
            split: [self._name(_only_folder(place) or place) for place in places]
            for split, places in self._places.items()
        }
        setting = f"data.root={printable(only)}" if folder == self.root else f"'data.splits={show(chosen)}'"
        return UserError(
            f"The texts of {printable(folder)} are in its only folder, {only.name}, which contains {some(inside, 4)}."
            f" Set {setting}."
        )


def _row_files(folder: Path) -> list[Path]:
    return [path for path in visible(folder) if suffix_of(path) in EXTENSIONS and path.is_file()]


def _stem(path: Path) -> str:
    name = path.name.lower().removesuffix(".gz")
    return path.name[: len(name) - len(Path(name).suffix)]


def _base(path: Path) -> str:
    shard = _SHARD.fullmatch(_stem(path))
    return shard[1] if shard else _stem(path)
