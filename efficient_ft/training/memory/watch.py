"""Enforce the memory budget of a run.

On a CPU, the budget limits the resident memory of the training process. This memory includes the interpreter and
libraries, but not the data-loading workers. On CUDA, the budget limits the memory that PyTorch's allocator reserves,
and the allocator enforces this limit.
"""

from __future__ import annotations

import _thread
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch

from efficient_ft.config import Config
from efficient_ft.core.errors import MemoryLimitError
from efficient_ft.core.format import format_bytes
from efficient_ft.core.process_memory import release_freed_memory
from efficient_ft.core.units import parse_bytes

#: Polling intervals in seconds. The shorter interval is used above the fraction `_CLOSE` of the budget.
INTERVAL, CLOSE_INTERVAL = 0.02, 0.002
_CLOSE = 0.85
#: Fractions of the budget above which freed memory is returned to the system, each with the minimum time in seconds
#: between two releases. Above the second fraction, releases are frequent, because memory could exceed the budget before
#: the next release.
_NEAR, _NEARER = (0.97, 0.5), (0.99, 0.02)
#: Number of seconds after which an interrupt is repeated. Interrupts that arrive in finalizers are lost.
_AGAIN = 5.0
#: The signal that interrupts the main thread. SIGUSR1 and SIGUSR2 request a requeue in Slurm jobs.
_SIGNAL: signal.Signals = getattr(signal, "SIGURG", None) or getattr(signal, "SIGBREAK")  # noqa: B009 (Windows)


def budget_of(config: Config) -> int | None:
    """Return the memory budget in bytes, or None for a run without a budget."""
    return None if config.memory is None else parse_bytes("memory", config.memory)


class _PassedError(BaseException):
    """Exception for an exceeded memory budget, which ``except Exception`` in the block does not catch."""


@contextmanager
def within_budget(config: Config, device: torch.device, *, armed: bool = True) -> Iterator[None]:
    """Inside a ``with`` block, stop the code with a UserError when the run exceeds its memory budget.

    A thread polls the memory of the process and interrupts the main thread between two operations. The files of the run
    are kept, and the same command with a larger budget continues from the last checkpoint. Nested blocks have no
    effect.

    If `armed` is False, the code is stopped only after `stop_from_now_on` is called. This option allows callers to
    predict the memory first, because the error message of the prediction is more helpful.

    Raises:
        UserError: If the run exceeds the budget.
    """
    budget = budget_of(config)
    if budget is None or threading.current_thread() is not threading.main_thread() or _Watch.running is not None:
        yield
        return
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget / total), device)
        try:
            yield
        except torch.OutOfMemoryError:
            raise _passed(config, torch.cuda.max_memory_reserved(device), "reserved on the GPU") from None
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        return
    watch = _Watch(budget, armed)

    def stop(number: int, frame: Any) -> None:
        if watch.seen and not watch.ended.is_set():
            raise _PassedError

    before = signal.signal(_SIGNAL, stop)
    watch.start()
    try:
        yield
    except _PassedError:
        raise _passed(config, watch.seen, "used by the process") from None
    finally:
        watch.end()
        signal.signal(_SIGNAL, before)


def stop_from_now_on(config: Config) -> None:
    """Allow `within_budget` to stop the code. Raise UserError if the budget has already been exceeded."""
    watch = _Watch.running
    if watch is not None:
        if watch.seen:
            raise _passed(config, watch.seen, "used by the process while the data were read")
        watch.armed = True


def _passed(config: Config, size: int, how: str) -> MemoryLimitError:
    again = "the same command continues from the last checkpoint"
    if config.data.automatic:
        again = "data.batch_size=auto starts a new run, because the budget determines the batch size"
    return MemoryLimitError(
        f"memory={config.memory} ({format_bytes(budget_of(config) or 0)}): the run was stopped, because"
        f" {format_bytes(size)} of memory was {how}. With a larger memory budget, {again}. To find recipes that need"
        f" less memory, run efficient-ft plan with the same model, data, and memory={config.memory}."
    )


class _Watch(threading.Thread):
    """Thread that polls the resident memory of the process and interrupts the main thread above `budget` bytes.

    If memory usage is close to the budget, the thread returns freed memory to the system. Otherwise, fragmentation
    would gradually increase the memory usage of the process.
    """

    #: The running instance in this process, or None if no instance is running.
    running: _Watch | None = None

    def __init__(self, budget: int, armed: bool) -> None:
        super().__init__(name="memory budget", daemon=True)
        #: Event that is set at the end of the ``with`` block. Afterwards, pending interrupts have no effect.
        self.ended = threading.Event()
        self._budget, self.armed = budget, armed
        #: The largest memory that exceeded the budget, in bytes, or 0 if the budget was not exceeded.
        self.seen = 0
        _Watch.running = self

    def run(self) -> None:
        """Poll the memory until `end` is called."""
        process, released, size = psutil.Process(), 0.0, 0
        while not self.ended.wait(CLOSE_INTERVAL if size > _CLOSE * self._budget else INTERVAL):
            size = process.memory_info().rss
            since = time.monotonic() - released
            near = any(size > fraction * self._budget and since > least for fraction, least in (_NEAR, _NEARER))
            if near or size > self._budget:
                release_freed_memory()
                released, size = time.monotonic(), process.memory_info().rss
            if size > self._budget:
                self.seen = max(self.seen, size)
                if self.armed:
                    _thread.interrupt_main(_SIGNAL)
                    if self.ended.wait(_AGAIN):
                        return

    def end(self) -> None:
        """Stop polling."""
        self.ended.set()
        self.join()
        _Watch.running = None
