"""Functions that check the settings of methods, and that convert block indices in a setting to block names."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from efficient_ft.core.errors import SettingError
from efficient_ft.models.view import ModelView


def check_choice(setting: str, value: Any, allowed: Iterable[str]) -> None:
    """Check that `value` is one of the allowed names."""
    if value not in (allowed := tuple(allowed)):
        raise SettingError(setting, value, allowed)


def check_bool(setting: str, value: Any) -> None:
    """Check that `value` is True or False."""
    if not isinstance(value, bool):
        raise SettingError(setting, value, ("true", "false"))


def check_integer(setting: str, value: Any) -> None:
    """Check that `value` is a positive integer."""
    if type(value) is not int or value < 1:
        raise SettingError(setting, value, "an integer >= 1")


def check_number(setting: str, value: Any, allowed: str, is_allowed: Callable[[float], bool]) -> None:
    """Check that `value` is a finite number for which `is_allowed` is True. The message states `allowed`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not is_allowed(value):
        raise SettingError(setting, value, allowed)


def check_sparsity(sparsity: Any) -> None:
    """Check the setting `sparsity`, which is the fraction of the values that is dropped."""
    check_number("sparsity", sparsity, "a number >= 0 and < 1", lambda share: 0 <= share < 1)


def check_keep_rate(keep_rate: Any) -> None:
    """Check the setting `keep_rate`, which is the fraction of the tokens that is kept."""
    check_number("keep_rate", keep_rate, "a number > 0 and <= 1", lambda share: 0 < share <= 1)


def check_indices(setting: str, blocks: Any, example: str = "[3,7,11]", do: str | None = None) -> None:
    """Raise SettingError unless `blocks` is a list of at least one integer.

    The error message shows `example` as a valid value. If the list is empty, the error message ends with `do`.
    """
    if not isinstance(blocks, Sequence) or isinstance(blocks, str) or not all(type(b) is int for b in blocks):
        raise SettingError(setting, blocks, f"a list of integers, e.g. {example}")
    if not blocks:
        raise SettingError(setting, "[]", "a list of at least one index", do)


def classes_in_words(view: ModelView) -> str:
    """Return the number of blocks of each class as text, such as "1 ConvBnAct and 10 InvertedResidual"."""
    counts = Counter(type(view.model.get_submodule(name)).__name__ for name in view.blocks)
    *others, last = (f"{count} {name}" for name, count in counts.items())
    return f"{', '.join(others)} and {last}" if others else last


def blocks_at(
    view: ModelView, setting: str, indices: Sequence[int], *, last: bool = True, once: bool = True
) -> tuple[str, ...]:
    """Return the names of the blocks with the given indices, without duplicates and in the order of the model.

    Args:
        view: view of the model, which must have blocks. The caller must check that the method supports at least one
            block, because otherwise no index is valid.
        setting: name of the setting in the error message.
        indices: indices of the blocks, counted from 0 across all stages. Negative indices count from the end.
        last: if False, the last block is rejected.
        once: if True, a list that contains a block twice is rejected.

    Raises:
        SettingError: If an index is out of range, or if a block is rejected because of `last` or `once`.
    """
    count = len(view.blocks)
    places = [index % count if -count <= index < count else count for index in indices]
    if max(places) >= (count if last else count - 1):
        if last:
            allowed, do = f"indices from {-count} to {count - 1}", f"{view.name} has {count} blocks."
        else:
            allowed = f"indices from 0 to {count - 2}"
            do = f"{view.name} has {count} blocks. The method has no effect in the last block."
        raise SettingError(setting, list(indices), allowed, do)
    if once and len(set(places)) < len(places):
        raise SettingError(setting, list(indices), "a list that contains each block only once")
    return tuple(view.blocks[place] for place in sorted(set(places)))
