"""Recognize splits by the names of folders and files.

A name denotes a split if it contains one of the words in `_WORDS`, with or without neutral affixes: ``train_set``,
``Validation-images``, ``seg_test``, ``train2017``. Names that differ only in this word also denote splits, for example
``birds_train`` and ``birds_test``.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from efficient_ft.core.errors import SettingError, UserError, did_you_mean
from efficient_ft.core.text import printable
from efficient_ft.data.counts import some
from efficient_ft.data.file_list import is_hidden

Split = Literal["train", "val", "test"]
#: The setting ``data.splits``: the folders or files of each split, relative to ``data.root``.
Chosen = Mapping[Split, str | Sequence[str]]

SPLITS: tuple[Split, ...] = ("train", "val", "test")
#: English words that denote a split, and Spanish, French, Portuguese, Italian, German, Russian, Chinese and Japanese
#: words that rarely name classes.
_NAMES: dict[Split, str] = {
    "train": "train training trn entrenamiento entrainement entraînement treinamento treino addestramento обучение"
    " 训练 训练集 訓練 学習",
    "val": "val valid validation validate dev devel eval evaluation validación validacion validação validacao"
    " validierung валидация 验证 验证集 検証",
    "test": "test testing tst prueba pruebas teste тест 测试 测试集 テスト",
}
_WORDS = {word: split for split, words in _NAMES.items() for word in words.split()}
#: Neutral words that may occur in the name of a split.
_AFFIXES = frozenset(
    ["data", "dataset", "datasets", "set", "sets", "split", "splits", "subset", "part", "folder", "folders", "file",
     "files", "image", "images", "img", "imgs", "pic", "pics", "picture", "pictures", "photo", "photos", "sample",
     "samples", "text", "texts", "seg", "cls", "clf", "classification", "the", "my", "all", "full", "final", "raw",
     "new", "original", "orig", "copy", "v"]
)  # fmt: skip
#: Words that denote a part of a data set if a letter or a number follows: ``fold_a``, ``part 2``.
_PARTS = frozenset({"fold", "folds", "kfold", "split", "part", "subset", "batch", "chunk", "shard", "set"})
_READ_AS_VALUES = frozenset({"true", "false", "null", "nan", "inf"})  # Hydra reads these words as values
_JOINED = re.compile(rf"({'|'.join(sorted(_WORDS, key=len, reverse=True))})(data(?:set)?|sets?|images?|imgs?|splits?)")


def split_of(name: str) -> Split | None:
    """Return the split that a folder name or file stem denotes, or None if it denotes no split or several splits."""
    split, rest = _read(name)
    return split if not rest else None


def splits_in(names: Iterable[str]) -> dict[str, Split]:
    """Return the split of each name that denotes a split, either alone or together with another name.

    `names` must contain subfolder names or file stems of one folder.
    """
    found: dict[str, Split] = {}
    together: dict[tuple[str, ...], dict[str, Split]] = defaultdict(dict)
    for name in names:
        split, rest = _read(name)
        if split is not None:
            (together[rest] if rest else found)[name] = split
    for group in together.values():
        if "train" in group.values() and len(set(group.values())) > 1:
            found |= group
    return found


def part_names(names: Iterable[str]) -> list[str]:
    """Return the names that denote numbered or lettered splits or parts of a data set: ``trainA``, ``fold1``."""

    def is_part(name: str) -> bool:
        split, rest = _read(name)
        if split is not None:
            return all(len(word) == 1 for word in rest)
        words = _words(name)
        known = [word in _PARTS or word.isdigit() or len(word) == 1 for word in words]
        return len(words) > 1 and all(known) and not _PARTS.isdisjoint(words)

    return [name for name in names if is_part(name)]


def places_of(root: Path, chosen: Chosen) -> dict[Split, list[Path]]:
    """Return the folders or files that the setting ``data.splits`` lists for each split. The name ``.`` denotes `root`.

    Raise `SettingError` if there is no training data, if a path does not exist or is outside of `root`, or if two paths
    are equal or one contains the other.
    """
    if not chosen.get("train"):
        raise SettingError("data.splits", show(chosen), "a mapping with the training data", "Add train: FOLDER.")
    places: dict[Split, list[Path]] = {}
    seen: dict[Path, str] = {}
    for split in SPLITS:
        named = chosen.get(split)
        for name in [named] if isinstance(named, str) else named or ():
            place = root if os.path.normpath(name) == "." else root / name
            real = Path(os.path.normpath(place))
            top = Path(os.path.normpath(root))
            if real != top and top not in real.parents:
                raise SettingError(f"data.splits.{split}", name, f"a path below data.root={printable(root)}")
            if not os.path.exists(place):
                there = sorted(entry.name for entry in root.iterdir() if not is_hidden(entry.name))
                shown = f"It has {some(there)}." if there else "It is empty."
                known = f"a folder or file in {printable(root)}"
                raise SettingError(f"data.splits.{split}", name, known, shown + did_you_mean(name, there))
            for other, of in seen.items():
                if other == real or other in real.parents or real in other.parents:
                    raise SettingError(f"data.splits.{split}", name, f"outside of {printable(other)} ({of})")
            seen[real] = split
            places.setdefault(split, []).append(place)
    return places


def ambiguous(root: Path, found: str, readings: Sequence[tuple[str, Chosen]]) -> UserError:
    """Create the error for an ambiguous layout.

    The sentence `found` describes the contents of `root`. Each entry of `readings` contains a description of a possible
    interpretation, and the value of ``data.splits`` that selects this interpretation.
    """
    choices = "; ".join(f"if {words}: 'data.splits={show(chosen)}'" for words, chosen in readings)
    text = f"The folder {printable(root)} can be interpreted in several ways. {found}"
    return UserError(f"{text} Choose one interpretation: {choices}.")


def repeated(root: Path, split: Split, places: Mapping[Split, Sequence[str]], found: str = "") -> UserError:
    """Create the error for a split that has several folders or files.

    `places` contains the names of the folders or files of each split. `found` replaces the list of names in the
    message.
    """
    names, rest = list(places[split]), {one: of for one, of in places.items() if one != split}
    readings: list[tuple[str, Chosen]] = [(f"{names[0]} alone is the {split} split", {**rest, split: names[0]})]
    readings.append((f"all of these form the {split} split", {**rest, split: names}))
    if split == "val" and "test" not in rest and len(names) == 2:
        readings.append((f"{names[1]} is the test split", {**rest, "val": names[0], "test": names[1]}))
    return ambiguous(root, f"{found or some(names)} all denote the {split} split.", readings)


def show(chosen: Chosen) -> str:
    """Format a value of ``data.splits`` for the command line. A list with a single name is formatted like this name."""
    parts = []
    for split in SPLITS:
        value = chosen.get(split)
        if value:
            names = [value] if isinstance(value, str) else list(value)
            listed = ", ".join(map(quoted, names))
            parts.append(f"{split}: {listed if len(names) == 1 else f'[{listed}]'}")
    return "{" + ", ".join(parts) + "}"


def quoted(name: str) -> str:
    """Format a name for Hydra's grammar. The name is quoted unless it is a plain word."""
    plain = re.fullmatch(r"[A-Za-z_][\w.\-/]*", name, re.ASCII) and name.lower() not in _READ_AS_VALUES
    return name if plain or name == "." else '"{}"'.format(name.replace('"', '\\"'))


def _read(name: str) -> tuple[Split | None, tuple[str, ...]]:
    """Return the only split that a name denotes, or None, and the remaining words of the name."""
    words = _words(name)
    at = [i for i, word in enumerate(words) if word in _WORDS]
    if len(at) != 1:
        return (_WORDS[words[at[0]]], ()) if at and len({_WORDS[words[i]] for i in at}) == 1 else (None, ())
    rest = [word for word in words[: at[0]] + words[at[0] + 1 :] if word not in _AFFIXES and not word.isdigit()]
    return _WORDS[words[at[0]]], tuple(rest)


def name_words(name: str) -> list[str]:
    """Return the words and numbers in a name, in lower case."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", unicodedata.normalize("NFC", name))
    return re.findall(r"[^\W\d_]+|\d+", spaced.casefold())


def _words(name: str) -> list[str]:
    words: list[str] = []
    for word in name_words(name):
        joined = _JOINED.fullmatch(word)
        words += joined.groups() if joined else [word]
    return words
