"""Tests of worker processes, which leave signals to their parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from typing import Any

import pytest
from torch.utils.data import Dataset, SequentialSampler

from efficient_ft.core import stopping
from efficient_ft.core.errors import TerminatedRun, UserError
from efficient_ft.data.loader import make_loader, refuse_killed_worker

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sends signals")


class Numbers(Dataset[int]):
    """A data set of numbers with a short delay per item."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        time.sleep(0.02)
        return index


@pytest.mark.parametrize("number", stopping.STOPPING)
def test_workers_go_on_after_a_signal_to_all_processes(number: int) -> None:
    dataset: Any = Numbers()
    loader = make_loader(dataset, SequentialSampler(dataset), 2, None)
    found = []
    for value in loader:
        found.append(int(value))
        if len(found) == 3:
            for worker in multiprocessing.active_children():
                assert worker.pid is not None
                os.system(f"kill -{number} {worker.pid}")  # the signal comes from a process that is not the parent
    assert found == list(range(12))


def test_a_parent_still_ends_its_worker() -> None:
    worker = multiprocessing.get_context("fork").Process(target=_waiting)
    worker.start()
    time.sleep(0.5)
    worker.terminate()
    worker.join(20)
    assert worker.exitcode == 0


def _waiting() -> None:
    stopping.leave_to_parent()
    time.sleep(300)


def test_a_requested_stop_is_no_lack_of_memory() -> None:
    died = RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated. ")
    stopping.asked.append(signal.SIGTERM)
    try:
        with pytest.raises(TerminatedRun) as stopped:
            refuse_killed_worker(died)
        assert stopped.value.code == 143
    finally:
        stopping.asked.clear()
    with pytest.raises(UserError, match=r"was killed by another process"):
        refuse_killed_worker(died)
    with pytest.raises(UserError, match=r"was killed, probably because of a lack of memory"):
        refuse_killed_worker(RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "))
