"""Inspect texts: token counts, unknown tokens, duplicates, and suspicious content."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from efficient_ft.core.format import format_percent
from efficient_ft.core.text import plain_line, shortened
from efficient_ft.core.tokenizer import Tokenizer
from efficient_ft.data.counts import counted, some, verb
from efficient_ft.data.inspection import Inspection, spread
from efficient_ft.data.texts import Texts, is_number

#: Limits of a quick inspection: the number of tokenized texts, the total number of characters in these texts, and the
#: number of compared texts per split.
_TOKENIZED, _CHARACTERS, _COMPARED = 1000, 150_000, 100_000
_NUMBERS = 20  # if more classes than this are non-consecutive numbers, the labels may be a quantity
_UNKNOWN, _CUT, _REPEATED, _ODD = 0.05, 0.25, 0.5, 0.01  # fractions above which a warning is issued
#: Texts that common programs write for missing values.
_NOTHING = frozenset(
    ["nan", "none", "null", "n/a", "na", "#n/a", "#ref!", "#value!", "#name?", "<na>", "[deleted]", "[removed]"]
)
#: Pattern of UTF-8 text that was decoded with a wrong encoding (Ã©, â€™), and of replacement characters.
_GARBLED = re.compile("Ã[\x80-\xbf]|â€|\ufffd|Ð[\x80-\xbf]Ð|ï»¿")
_MARKUP = re.compile(r"<(br|p|div|span|a|b|i)\b[^>]*>", re.IGNORECASE)
#: Class names that often denote a missing label.
_MARKERS = frozenset(
    ["-1", "none", "n/a", "na", "null", "?", "-", ".", "unknown", "unlabeled", "unlabelled", "unsup", "undefined",
     "todo"]
)  # fmt: skip


def inspect_texts(
    parts: Mapping[str, Texts],
    class_names: Sequence[str],
    tokenizer: Tokenizer,
    max_length: int,
    *,
    thorough: bool = False,
) -> Inspection:
    """Inspect the texts of a data set, given its splits. `max_length` is the value of ``model.max_length`` in tokens.

    By default, at most 1,000 training texts are examined, and the first 100,000 texts of each split are compared
    exactly. If `thorough` is True, all training texts are examined, and all texts are compared, ignoring case
    and spaces.
    """
    found = Inspection()
    texts = parts["train"].texts
    chosen = spread(len(texts), len(texts) if thorough else _TOKENIZED)
    examined = [texts[index] for index in chosen]
    if not thorough:
        examined = _within(examined, _CHARACTERS)
    _lengths(found, examined, len(texts), tokenizer, max_length)
    _odd(found, examined)
    _repeated(found, parts, class_names, thorough=thorough)
    _names(found, class_names, parts)
    return found


def _within(texts: Sequence[tuple[str, ...]], characters: int) -> list[tuple[str, ...]]:
    """Return a random subset of the texts with at most `characters` characters in total, but at least one text."""
    kept: list[int] = []
    for index in np.random.default_rng(0).permutation(len(texts)).tolist():
        size = sum(map(len, texts[index]))
        if size <= characters or not kept:
            kept.append(index)
            characters -= size
    return [texts[index] for index in sorted(kept)]


def _lengths(
    found: Inspection, examined: Sequence[tuple[str, ...]], whole: int, tokenizer: Tokenizer, max_length: int
) -> None:
    lengths, unknown = map(np.asarray, tokenizer.measure(examined))
    characters = np.asarray([sum(map(len, text)) for text in examined])
    cut = float((lengths > max_length).mean())
    empty = int((lengths <= tokenizer.special(len(examined[0]))).sum())
    share = float(unknown.sum() / max(1, lengths.sum() - len(lengths) * tokenizer.special(len(examined[0]))))
    found.facts |= {"texts_examined": len(examined), "tokens": _range(lengths), "characters": _range(characters)}
    found.facts |= {"cut_share": cut, "unknown_token_share": share}
    seen = f"; {len(examined):,} of {whole:,} texts were examined" if len(examined) < whole else ""
    ends = f"; {format_percent(cut)} are truncated at model.max_length={max_length}" if cut else ""
    found.lines.append(
        f"texts: {lengths.min():,} to {counted(int(lengths.max()), 'token')} (median"
        f" {np.median(lengths):,.0f}{seen}){ends}"
    )
    if cut > _CUT:
        found.warnings.append(
            f"{format_percent(cut)} of the texts are truncated at model.max_length={max_length}. The longest text has"
            f" {counted(int(lengths.max()), 'token')}. Increase model.max_length if the network supports longer texts."
        )
    if share > _UNKNOWN:
        found.warnings.append(
            f"{format_percent(share)} of the tokens are unknown to the tokenizer, which may be intended for a different"
            " language or script. Choose a different model.name or model.weights."
        )
    if empty:
        found.warnings.append(
            f"{empty:,} of {counted(len(examined), 'text')} {verb(empty, 'contains', 'contain')} only special tokens."
            " Such texts cannot be learned."
        )


def _odd(found: Inspection, examined: Sequence[tuple[str, ...]]) -> None:
    single = [text for pair in examined for text in pair]
    for share, reason, example in (
        (0.0, "may mean a missing text", [text for text in single if text.casefold() in _NOTHING]),
        (0.0, "may have been decoded with a wrong encoding", [text for text in single if _GARBLED.search(text)]),
        (_ODD, "may contain HTML tags", [text for text in single if _MARKUP.search(text)]),
    ):
        if len(example) > share * len(single):
            number = f"{len(example):,} of {counted(len(single), 'text')}"
            found.warnings.append(f"{number} {reason}, for example {_short(example[0])}.")


def _repeated(found: Inspection, parts: Mapping[str, Texts], class_names: Sequence[str], *, thorough: bool) -> None:
    """Report repeated training texts, training texts that occur in another split, and texts with several labels."""
    limit = None if thorough else _COMPARED

    def key_of(text: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(" ".join(one.casefold().split()) for one in text) if thorough else text

    hashes = {name: [hash(key_of(text)) for text in part.texts[:limit]] for name, part in parts.items()}
    train = set(hashes["train"])
    compared = "" if limit is None or len(parts["train"]) <= limit else f" (the first {limit:,} texts were compared)"
    repeats = len(hashes["train"]) - len(train)
    found.facts["repeated_train_texts"] = repeats
    if repeats > _REPEATED * len(hashes["train"]):
        found.warnings.append(
            f"{repeats:,} of {len(hashes['train']):,} training texts {verb(repeats, 'duplicates', 'duplicate')}"
            f" another text{compared}. Check data.text.columns."
        )
    counts = {name: sum(key in train for key in keys) for name, keys in hashes.items() if name != "train"}
    found.facts["shared_texts"] = {name: count for name, count in counts.items() if count}
    shared = [f"{count:,} of {len(hashes[name]):,} {name} texts" for name, count in counts.items() if count]
    if shared:
        found.warnings.append(
            f"The training texts include {' and '.join(shared)}{compared}. The accuracy on these texts measures"
            " memorization. Remove the duplicates."
        )
    labels: dict[int, set[int]] = defaultdict(set)
    for name, part in parts.items():
        for key, label in zip(hashes[name], part.labels[:limit].tolist(), strict=True):
            labels[key].add(label)
    several = {key for key, of in labels.items() if len(of) > 1}
    found.facts["texts_with_several_labels"] = len(several)
    if several:
        found_at = ((part, key, index) for name, part in parts.items() for index, key in enumerate(hashes[name]))
        part, key, index = next(one for one in found_at if one[1] in several)
        names = " and ".join(repr(plain_line(class_names[label])) for label in sorted(labels[key])[:3])
        found.warnings.append(
            f"{counted(len(several), 'text')} {verb(len(several))} several labels{compared}."
            f" Example: {_short(part.texts[index][0])} has the labels {names}."
        )


def _names(found: Inspection, class_names: Sequence[str], parts: Mapping[str, Texts]) -> None:
    markers = [name for name in class_names if name.casefold() in _MARKERS]
    if set(class_names) == {"-1", "1"}:
        markers = []
    counts = Counter(parts["train"].labels.tolist())
    for name in markers:
        number = counts[class_names.index(name)]
        found.warnings.append(
            f"{counted(number, 'training text')} {verb(number)} the label {name!r}, which is trained as a class. If"
            f' this value denotes a missing label, remove or skip the texts: "data.text.missing=[{name!r}]"'
            " data.on_corrupt=skip."
        )
    single = [name for label, name in enumerate(class_names) if counts[label] == 1]
    if single:
        names = some(list(map(_short, single)), 5)
        found.warnings.append(f"{counted(len(single), 'class')} {verb(len(single))} a single training text: {names}.")
    numbers = [name for name in class_names if is_number(name)]
    consecutive = set(range(len(numbers))), set(range(1, len(numbers) + 1))
    if len(numbers) == len(class_names) > _NUMBERS and {*map(float, numbers)} not in consecutive:
        found.warnings.append(
            f"The {len(numbers)} classes are numbers from {numbers[0]} to {numbers[-1]}. If the numbers are a quantity,"
            " map ranges of values to classes."
        )
    known = set(class_names)
    shared = Counter(part for name in class_names for part in set(_parts(name, "|;")))
    joined = [name for name in class_names if _is_joined(name, known, shared)]
    if joined:
        found.warnings.append(
            f"{counted(len(joined), 'class name')} may combine several labels, for example {_short(joined[0])}. Each"
            " combination is trained as a separate class."
        )
    long = [name for name in class_names if len(name) > 100]
    if long:
        found.warnings.append(
            f"{len(long)} of {len(class_names)} class names {verb(len(long))} more than 100 characters, for"
            f" example {_short(long[0])}. Check data.text.label."
        )


def _parts(name: str, separators: str) -> list[str]:
    return [part.strip() for part in re.split(f"[{separators}]", name)]


def _is_joined(name: str, known: set[str], shared: Mapping[str, int]) -> bool:
    """Return True if a class name may combine several labels.

    Such a name is written as a list, consists of other class names, or contains ``|`` or ``;`` and shares a part with
    another name.
    """
    if re.fullmatch(r"[\[({].*,.*[\])}]", name):
        return True
    parts, listed = _parts(name, "|;,/+&"), _parts(name, "|;")
    return (len(parts) > 1 and known.issuperset(parts)) or (len(listed) > 1 and any(shared[one] > 1 for one in listed))


def _range(values: np.ndarray) -> dict[str, int | float]:
    return {"min": int(values.min()), "median": float(np.median(values)), "max": int(values.max())}


def _short(text: str) -> str:
    return repr(shortened(plain_line(text), 40))
