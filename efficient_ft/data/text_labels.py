"""Map labels of texts to classes, and reject columns that do not contain classes."""

from __future__ import annotations

import contextlib
import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from decimal import Decimal

from efficient_ft.core.errors import UserError, did_you_mean
from efficient_ft.core.text import plain_line
from efficient_ft.data.counts import and_more, counted, shortened, some, verb

_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?", re.ASCII)
#: Number of distinct decimal numbers above which labels are considered a quantity. Ratings in half stars have ten.
_DECIMALS = 20
#: Minimum number of distinct labels that may be considered free text.
_FREE = 10
#: Maximum number of labels, or groups of labels, in a message.
_SHOWN = 3


def is_number(name: str) -> bool:
    """Return True if a label is a number."""
    return _NUMBER.fullmatch(name) is not None


def in_order(name: str) -> tuple[int, float, str]:
    """Return a sort key that orders numbers by value and before words."""
    with contextlib.suppress(ValueError):
        if math.isfinite(value := float(name)):
            return (0, value, name)
    return (1, 0.0, name)


def spellings(counts: Mapping[str, int], ignore_case: bool | None) -> tuple[dict[str, str], list[str]]:
    """Return the class of each label, and notes on merged labels. Labels that are equal numbers form one class.

    Args:
        counts: number of texts by label, over all splits.
        ignore_case: True to merge labels that differ only in case, quotes or compatible characters; False to keep such
            labels separate; None to reject such labels (``data.text.ignore_case``).

    Raises:
        UserError: If labels differ only in case, and `ignore_case` is None.
    """
    same, notes = {name: name for name in counts}, []
    numbers: dict[Decimal, list[str]] = defaultdict(list)
    for name in counts:
        if _NUMBER.fullmatch(name):
            numbers[Decimal(name)].append(name)
    equal = [group for group in numbers.values() if len(group) > 1]
    for group in equal:
        best = min(group, key=lambda name: (not re.fullmatch("-?(0|[1-9][0-9]*)", name), -counts[name], name))
        same |= dict.fromkeys(group, best)
    if equal:
        notes.append(f"Labels that are equal numbers are one class: {_groups(equal, counts)}.")
    similar: dict[str, dict[str, None]] = defaultdict(dict)
    for name in counts:
        similar[unicodedata.normalize("NFKC", name).strip("\"'").casefold()][same[name]] = None
    alike = [list(group) for group in similar.values() if len(group) > 1]
    if not alike:
        return same, notes
    shown = _groups(alike, counts)
    if ignore_case is None:
        raise UserError(
            f"Labels differ only in case or quotes: {shown}. If they are one class, set data.text.ignore_case=true; if"
            " they are separate classes, set data.text.ignore_case=false."
        )
    if ignore_case:
        for group in alike:
            best = min(group, key=lambda name: (-counts[name], name))
            same |= {name: best for name, current in same.items() if current in group}
        notes.append(f"Labels that differ only in case are one class (data.text.ignore_case): {shown}.")
    return same, notes


def require_classes(labels: Sequence[str], source: str, column: str | None, columns: Sequence[str]) -> None:
    """Raise `UserError` if the labels of the training texts are a quantity or free text.

    Args:
        labels: labels of all training texts.
        source: file or folder of the texts, for messages.
        column: column of the labels; None if the labels are folder names, which are not checked.
        columns: all columns of the file, for messages.
    """
    if column is None:
        return
    counts = Counter(labels)
    choose = f"Set data.text.label to the class column; the columns are {', '.join(map(plain_line, columns))}."
    if all(_NUMBER.fullmatch(name) for name in counts):
        fractions = sum(Decimal(name) % 1 != 0 for name in counts)
        if fractions and (len(counts) > _DECIMALS or len(counts) > max(2, len(labels) / 2)):
            raise UserError(
                f"{source}: the labels in column {column!r} are decimal numbers with {len(counts)} values in"
                f" {len(labels)} rows, such as {next(name for name in counts if Decimal(name) % 1)}. They look like"
                f" a quantity, not classes. Map ranges of values to classes. {choose}"
            )
    single = sum(count == 1 for count in counts.values())
    if len(counts) >= _FREE and single > len(labels) / 2:
        raise UserError(
            f"{source}: the {len(labels)} rows have {len(counts)} different labels in column {column!r}, such as"
            f" {plain_line(shortened(max(counts, key=len), 40))!r}. They look like free text or identifiers, not"
            f" classes. {choose}"
        )


def require_texts(counts: Mapping[str, int], source: str, places: Mapping[str, str]) -> None:
    """Raise `UserError` if there is only one class, or a class with a single training text."""
    if len(counts) < 2:
        name, count = next(iter(counts.items()))
        raise UserError(
            f"{source} contains only one class, {plain_line(name)!r} ({counted(count, 'text')}). Classification needs"
            " at least two classes."
        )
    single = [name for name, count in counts.items() if count == 1]
    if single:
        shown = some([f"{plain_line(name)!r} ({places[name]})" for name in single], _SHOWN)
        raise UserError(
            f"{source}: {counted(len(single), 'class')} {verb(len(single))} a single training text: {shown}. Each class"
            " needs at least two. Add texts, or remove the class."
        )


def refuse_unknown(
    counts: Mapping[str, int], places: Mapping[str, str], train: Sequence[str], split: str, advice: str
) -> None:
    """Raise `UserError` if a class of a split has no training texts.

    Args:
        counts: number of texts in the split by class.
        places: location of one text by class, for messages.
        train: classes of the training texts.
        split: name of the split.
        advice: last sentence of the message.
    """
    unknown = [name for name in counts if name not in train]
    if not unknown:
        return
    first = unknown[0]
    more = f" {len(unknown)} classes are unknown." if len(unknown) > 1 else ""
    raise UserError(
        f"{places[first]}: the class {plain_line(first)!r} ({counted(counts[first], f'{split} text')}) is unknown."
        f" Training classes: {', '.join(map(plain_line, train[:8]))}{', …' if len(train) > 8 else ''}."
        f"{did_you_mean(first, train)}{more} Correct the labels.{advice}"
    )


def refuse_unlabeled(labels: Sequence[str], missing: int, split: str, source: str, advice: str) -> None:
    """Raise `UserError` if the texts of a split have no labels, or only the label -1 as in test sets of benchmarks.

    Args:
        labels: existing labels.
        missing: number of texts without a label.
        split: name of the split.
        source: file or folder of the split, for messages.
        advice: last sentence of the message.
    """
    if set(labels) - {"-1"} or not (labels or missing):
        return
    why = (
        f"{'all ' * (len(labels) > 1)}{counted(len(labels), 'label')} {verb(len(labels), 'is', 'are')} -1"
        if labels
        else f"none of {counted(missing, 'text')} has a label"
    )
    raise UserError(f"{source} is unlabeled: {why}. It cannot be the {split} split.{advice}")


def _groups(groups: Sequence[Sequence[str]], counts: Mapping[str, int]) -> str:
    shown = "; ".join(
        " and ".join(f"{plain_line(name)!r} ({counts[name]})" for name in group[:4]) for group in groups[:_SHOWN]
    )
    return shown + and_more(len(groups) - _SHOWN)
