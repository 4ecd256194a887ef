"""Settings that list blocks by index: validation of the list, and conversion of indices to names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from efficient_ft.core.errors import SettingError
from efficient_ft.models.view import ModelView


def check_indices(setting: str, blocks: Any, example: str = "[3,7,11]", do: str | None = None) -> None:
    """Raise SettingError unless `blocks` is a list of at least one integer.

    The message contains `example` as a valid value, and the sentence `do` if the list is empty.
    """
    if not isinstance(blocks, Sequence) or isinstance(blocks, str) or not all(type(b) is int for b in blocks):
        raise SettingError(setting, blocks, f"a list of integers, e.g. {example}")
    if not blocks:
        raise SettingError(setting, "[]", "a list of at least one index", do)


def classes_in_words(view: ModelView) -> str:
    """Return the number of blocks by class, for messages: "1 ConvBnAct and 10 InvertedResidual"."""
    counts = Counter(type(view.model.get_submodule(name)).__name__ for name in view.blocks)
    *others, last = (f"{count} {name}" for name, count in counts.items())
    return f"{', '.join(others)} and {last}" if others else last


def blocks_at(
    view: ModelView, setting: str, indices: Sequence[int], *, last: bool = True, once: bool = True
) -> tuple[str, ...]:
    """Return the names of blocks, given by index, without duplicates and in the order of the model.

    Args:
        view: view of a model with blocks. Before the call, check that the method supports at least one block, because
            otherwise no index is valid.
        setting: full name of the setting, ``method.<name>.<setting>``.
        indices: indices, counted from 0 across all stages. Negative indices count from the end.
        last: if False, the last block is rejected.
        once: if True, a list that contains a block twice is rejected.

    Raises:
        SettingError: If an index is out of range, or a block is rejected.
    """
    count = len(view.blocks)
    places = [index % count if -count <= index < count else count for index in indices]
    if max(places) >= (count if last else count - 1):
        if last:
            allowed, do = f"indices from {-count} to {count - 1}", f"{view.name} has {count} blocks."
        else:
            allowed = f"indices from 0 to {count - 2}"
            do = f"{view.name} has {count} blocks. In the last block, the method has no effect."
        raise SettingError(setting, list(indices), allowed, do)
    if once and len(set(places)) < len(places):
        raise SettingError(setting, list(indices), "a list with each block once")
    return tuple(view.blocks[place] for place in sorted(set(places)))
