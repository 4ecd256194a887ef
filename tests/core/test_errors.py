"""Tests of hints that depend on where a message is shown."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from efficient_ft.core.errors import hint, on_command_line


def test_blocks_may_end_in_any_order() -> None:
    first, second = ExitStack(), ExitStack()
    first.enter_context(on_command_line())
    second.enter_context(on_command_line())
    first.close()
    assert hint("python", "settings") == "settings"
    second.close()
    assert hint("python", "settings") == "python"


def test_other_threads_keep_their_hints() -> None:
    with on_command_line(), ThreadPoolExecutor(1) as other:
        assert other.submit(hint, "python", "settings").result() == "python"
        assert hint("python", "settings") == "settings"
