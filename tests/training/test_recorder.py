"""Tests of Ctrl-C during training."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from efficient_ft.training.callbacks.recorder import stop_on_interrupt


def test_a_process_that_inherits_the_handler_leaves_ctrl_c_to_its_parent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder: Any = SimpleNamespace(stop_requested=None)
    with stop_on_interrupt(recorder):
        with monkeypatch.context() as worker:
            worker.setattr(os, "getpid", lambda: -1)
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        assert recorder.stop_requested is None
        assert capsys.readouterr().out == ""
        signal.raise_signal(signal.SIGINT)
        assert recorder.stop_requested == signal.SIGINT
        assert capsys.readouterr().out.count("Stopping after this step") == 1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_sigterm_asks_to_stop_from_the_first_moment_on() -> None:
    recorder: Any = SimpleNamespace(stop_requested=None)
    with stop_on_interrupt(recorder):
        signal.raise_signal(signal.SIGTERM)
    assert recorder.stop_requested == signal.SIGTERM
