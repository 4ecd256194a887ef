"""Tests of Ctrl-C and SIGTERM outside of training, including libraries that catch the signal's exception."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from efficient_ft.cli import stopping
from efficient_ft.cli.exits import clean_exits
from efficient_ft.core import stopping as core_stopping
from efficient_ft.core.errors import UserError
from tests.cli.program import REPOSITORY
from tests.conftest import unwrapped

STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143}
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="sends signals")


@pytest.fixture(autouse=True)
def answers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STATUS}
    stopping.answer_signals()
    yield
    core_stopping.asked.clear()
    for number, handler in before.items():
        signal.signal(number, handler)


def signalled(number: int, error: Exception | None) -> None:
    """Raise a signal, suppress its exception and raise `error`; with None, the exception is not suppressed."""
    with contextlib.suppress(*(() if error is None else (BaseException,))):
        signal.raise_signal(number)
    assert error is not None
    raise error


@pytest.mark.parametrize("number", STATUS)
@pytest.mark.parametrize("error", [RecursionError("half an import"), UserError("the file cannot be read"), None])
def test_an_error_that_follows_a_signal_is_its_exit(
    number: int, error: Exception | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left, clean_exits():
        signalled(number, error)
    assert left.value.code == STATUS[signal.Signals(number)]
    word = "Interrupted" if number == signal.SIGINT else "Terminated"
    said = f"{word}. The same command continues the run from the last checkpoint.\n"
    assert unwrapped(capsys.readouterr().err) == said


def test_an_error_without_a_signal_stays_itself() -> None:
    with pytest.raises(RecursionError), clean_exits():
        raise RecursionError


@pytest.mark.parametrize("number", STATUS)
def test_a_signal_within_code_that_is_a_text_has_the_same_status(number: int, tmp_path: Path) -> None:
    """After a plain KeyboardInterrupt, ``python -m`` would exit by the signal instead of the status."""
    (tmp_path / "stopped.py").write_text(
        textwrap.dedent(f"""
        from efficient_ft.cli.exits import clean_exits
        from efficient_ft.cli.stopping import answer_signals

        answer_signals()
        with clean_exits():
            exec("import signal; signal.raise_signal({int(number)})")
        """)
    )
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{tmp_path}"}
    done = subprocess.run([sys.executable, "-m", "stopped"], env=environment, capture_output=True, text=True)
    assert done.returncode == STATUS[signal.Signals(number)], done.stderr
    assert done.stderr.endswith("The same command continues the run from the last checkpoint.\n")


@pytest.mark.parametrize("number", STATUS)
def test_while_libraries_load_nothing_can_catch_it(number: int) -> None:
    code = f"""
        import signal
        from efficient_ft.cli.stopping import answer_signals, while_loading
        answer_signals()
        with while_loading():
            pass
        try:
            with while_loading():
                signal.raise_signal({int(number)})
        except BaseException:
            pass
        print("went on")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert done.returncode == STATUS[signal.Signals(number)]
    assert done.stdout == ""
    assert done.stderr.endswith("The same command restarts or continues the run.\n")


def test_a_second_signal_at_the_same_time_is_the_same_request(capsys: pytest.CaptureFixture[str]) -> None:
    """``timeout`` sends one signal to its child and one to the process group."""

    @contextlib.contextmanager
    def cleaning_up() -> Iterator[None]:
        try:
            yield
        finally:
            signal.raise_signal(signal.SIGTERM)
            print("cleaned up")

    with pytest.raises(SystemExit) as left, clean_exits(), cleaning_up():
        signal.raise_signal(signal.SIGTERM)
    assert left.value.code == 143
    assert capsys.readouterr().out == "cleaned up\n"


@pytest.mark.parametrize("name", ["SIGHUP", "SIGUSR1", "SIGXCPU"])
def test_other_signals_that_ask_to_end_have_their_own_status(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    def unanswered(*_: object) -> None:
        pytest.fail(f"{name} is not answered")

    number = getattr(signal, name)
    before = signal.signal(number, unanswered)  # nohup ignores SIGHUP; the default handler would end the test process
    core_stopping.answer(stopping._answer)
    try:
        with pytest.raises(SystemExit) as left, clean_exits():
            signal.raise_signal(number)
    finally:
        signal.signal(number, before)
    assert left.value.code == 128 + number
    said = "Terminated. The same command continues the run from the last checkpoint.\n"
    assert unwrapped(capsys.readouterr().err) == said


def test_a_hang_up_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in core_stopping.answer(stopping._answer)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", STATUS)
@pytest.mark.parametrize("place", ["before", "after_in_parent", "finalizer"])
def test_an_exception_that_python_discards_is_raised_later(number: int, place: str) -> None:
    """An exception that Python discards in a fork callback or a finalizer still ends the program."""
    arm = "Finalized()" if place == "finalizer" else f"os.register_at_fork({place}=send)"
    code = f"""
        import os, signal, time
        from efficient_ft.cli.exits import clean_exits
        from efficient_ft.cli.stopping import answer_after_forks, answer_signals

        send = lambda: signal.raise_signal({int(number)})
        class Finalized:
            def __del__(self):
                send()
        answer_signals()
        with clean_exits():
            {arm}
            answer_after_forks()
            if (child := os.fork()) == 0:
                os._exit(0)
            os.waitpid(child, 0)
            time.sleep(60)
            print("went on")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=50)
    assert done.returncode == STATUS[signal.Signals(number)], done.stderr
    word = "Interrupted" if number == signal.SIGINT else "Terminated"
    assert done.stdout == ""
    assert done.stderr == f"{word}. The same command continues the run from the last checkpoint.\n"


@pytest.mark.parametrize("number", STATUS)
def test_a_signal_that_is_sent_again_too_early_is_not_lost(number: int) -> None:
    """On a busy machine, the signal can arrive again before the hook for discarded exceptions has returned."""
    code = f"""
        import signal, threading, time
        from efficient_ft.cli.exits import clean_exits
        from efficient_ft.cli.stopping import answer_signals

        start = threading.Timer.start
        def slow(timer):
            threading.Timer.start = start
            timer.start()
            time.sleep(0.2)
        threading.Timer.start = slow
        class Finalized:
            def __del__(self):
                signal.raise_signal({int(number)})
        answer_signals()
        with clean_exits():
            Finalized()
            time.sleep(10)
            print("went on")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=50)
    assert done.returncode == STATUS[signal.Signals(number)], done.stderr


@pytest.mark.parametrize("number", STATUS)
def test_a_signal_during_a_fork_leaves_no_lock_held(number: int) -> None:
    """The signal does not interrupt fork callbacks, in which libraries release their locks."""
    code = f"""
        import os, signal, threading, time
        from efficient_ft.cli.exits import clean_exits
        from efficient_ft.cli.stopping import answer_after_forks, answer_signals

        lock = threading.Lock()
        def after():
            signal.raise_signal({int(number)})
            lock.release()
        answer_signals()
        with clean_exits():
            os.register_at_fork(before=lock.acquire, after_in_parent=after, after_in_child=lock.release)
            answer_after_forks()
            if (child := os.fork()) == 0:
                os._exit(0)
            os.waitpid(child, 0)
            try:
                time.sleep(60)
            finally:
                print("held" if lock.locked() else "released")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=50)
    assert done.returncode == STATUS[signal.Signals(number)], done.stderr
    assert done.stdout == "released\n"
