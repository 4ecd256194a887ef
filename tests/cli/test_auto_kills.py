"""Kill real searches at random moments, and repeat their commands until the searches are finished.

The results must be equal to those of a search that is not interrupted: all steps of all recipes, and the weights bit
for bit. A budget of steps makes searches deterministic.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from efficient_ft.search.state import SearchState, read_state

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not hasattr(os, "killpg"), reason="requires process groups"),
]

#: Number of signals of a kind, and number of signals in each search. The moments are distributed uniformly over the
#: running time of the searches, with one moment in each quarter.
KILLS, REQUESTS, EACH = 20, 8, 4
COMMAND = [sys.executable, "-m", "efficient_ft", "auto", "model=vit_digits", "data.num_workers=0", "memory=4GB",
           "steps=120"]  # fmt: skip
#: Additional running time in seconds of a search for each interruption, which must start processes again.
AGAIN = 10.0


def command_only(process: subprocess.Popen[bytes], number: int) -> bool:
    """Send a signal to the command, whose training process continues without it after SIGKILL."""
    process.send_signal(number)
    return True


def group(process: subprocess.Popen[bytes], number: int) -> bool:
    """Send a signal to all processes of the command, like a terminal."""
    os.killpg(process.pid, number)
    return True


def training_only(process: subprocess.Popen[bytes], number: int) -> bool:
    """Send a signal to the process that trains or proposes recipes. Return False if there is none at this moment."""
    with suppress(psutil.Error):
        for child in psutil.Process(process.pid).children():
            child.send_signal(number)
            return True
    return False


Send = Callable[[subprocess.Popen[bytes], int], bool]
#: Receivers of a signal, the signal, and the number of signals.
KINDS: dict[str, tuple[Send, int, int]] = {
    "command killed": (command_only, signal.SIGKILL, KILLS),
    "group killed": (group, signal.SIGKILL, KILLS),
    "training process killed": (training_only, signal.SIGKILL, KILLS),
    "Ctrl-C in a terminal": (group, signal.SIGINT, REQUESTS),
    "Ctrl-C of the command only": (command_only, signal.SIGINT, REQUESTS),
    "command terminated": (command_only, signal.SIGTERM, REQUESTS),
    "group terminated": (group, signal.SIGTERM, REQUESTS),
}


def start(folder: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "printed").open("ab") as printed:
        return subprocess.Popen(
            COMMAND, cwd=folder, stdout=printed, stderr=printed, start_new_session=True, env=environment
        )


def printed_in(folder: Path) -> str:
    return (folder / "printed").read_text(errors="replace")


def search_folder(folder: Path) -> Path:
    (found,) = (folder / "outputs/auto/digits/vit_digits").iterdir()
    return found


def without_times(state: SearchState) -> dict[str, Any]:
    """Return the parts of a state that do not depend on times or on the memory of the machine."""
    assert state.final is not None
    arms = [(one.name, one.stopped, [(s.step, s.value, s.loss) for s in one.slices]) for one in state.arms]
    final = state.final.model_dump(exclude={"trained", "peak_bytes"})
    return {"arms": arms, "final": final, "elapsed": state.elapsed, "rungs": state.rungs, "shares": state.shares}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """The folder of a search that is not interrupted, and its time in seconds."""
    folder = tmp_path_factory.mktemp("whole")
    began = time.monotonic()
    assert start(folder).wait() == 0, printed_in(folder)
    return folder, time.monotonic() - began


def require_same(folder: Path, whole: Path) -> None:
    from safetensors.torch import load_file

    found, expected = (read_state(search_folder(one)) for one in (folder, whole))
    assert found is not None
    assert expected is not None
    assert expected.final is not None
    assert without_times(found) == without_times(expected)
    run = expected.arm(expected.final.arm).folder
    ours, theirs = (load_file(search_folder(one) / run / "model.safetensors") for one in (folder, whole))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)
    results = [json.loads((search_folder(one) / run / "results.json").read_text()) for one in (folder, whole)]
    assert results[0]["accuracy"] == results[1]["accuracy"]
    assert (search_folder(folder) / "report/report.html").is_file()


class Interrupted:
    """A search in a folder that is interrupted, and whose command is repeated until the search is finished."""

    def __init__(self, folder: Path, send: Send, number: int) -> None:
        self.folder, self.send, self.number, self.sent, self.used = folder, send, number, 0, 0.0
        #: Length of the text that was printed before the current process.
        self.printed = 0
        self.last = 0.0
        self.process, self.began = start(folder), time.monotonic()

    def run(self, moments: list[float]) -> None:
        """Send a signal at each moment of the running time in seconds, as long as the search runs."""
        for moment in moments:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(max(0.0, moment - self.used - (time.monotonic() - self.began)))
            if self.process.poll() is None:
                self.sent += self.send(self.process, self.number)
                if self.send is not training_only:
                    self.process.wait()
            if self.process.poll() is not None and not self.repeated():
                return
        self.process.wait()
        while self.repeated():
            self.process.wait()

    @property
    def seconds(self) -> float:
        """The running time of the finished search in seconds."""
        return self.used + self.last

    def repeated(self) -> bool:
        """Check how the command ended. Repeat the command, or return False if the search is finished."""
        status, text = self.process.returncode, printed_in(self.folder)[self.printed :]
        assert "Traceback" not in text, text[-3000:]
        if status == 0:
            self.last = time.monotonic() - self.began
            return False
        proposing = self.send is training_only and "killed by SIGKILL" in text
        assert status in (-self.number, 128 + self.number) or proposing, (status, text[-3000:])
        if status == 128 + self.number and "Search in" in text:
            kept = ("The same command continues the search.", "the same command prints its result.")
            assert any(one in " ".join(text.split()) for one in kept), text[-3000:]
        self.used += time.monotonic() - self.began
        self.printed += len(text)
        self.process, self.began = start(self.folder), time.monotonic()
        return True


@pytest.mark.parametrize("kind", KINDS)
def test_a_search_that_is_interrupted_at_random_moments_has_the_same_result(
    kind: str, whole: tuple[Path, float], tmp_path: Path
) -> None:
    send, number, count = KINDS[kind]
    chance, sent, searches, length = random.Random(kind), 0, 0, whole[1] + EACH * AGAIN
    while sent < count:
        folder = tmp_path / str(searches)
        folder.mkdir()
        search = Interrupted(folder, send, number)
        search.run([length * (quarter + chance.random()) / EACH for quarter in range(EACH)])
        if not (search_folder(folder) / "report/report.html").is_file():  # the process that writes it was killed
            assert send is training_only
            assert start(folder).wait() == 0, printed_in(folder)[-3000:]
        require_same(folder, whole[0])
        sent, searches, length = sent + search.sent, searches + 1, search.seconds
        print(f"{kind}: {sent} signals, {searches} searches, {length:.0f} s")
