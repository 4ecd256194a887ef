"""Processes that trials start, interrupt and kill.

A server process imports the libraries once, and each child is forked from the server. A fork takes a tenth of a second,
and the imports take seconds. Each child is the leader of its process group.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from efficient_ft.core.format import format_seconds
from tests.promises.trial import BrokenPromiseError

#: Each process uses one thread, because trials run in parallel and the order of sums depends on the threads.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "offline",
}
_ROOT = Path(__file__).resolve().parents[2]
#: Time limit of a child in seconds.
SECONDS = 300.0
#: Lock for starting a process and reading its status. At each start, multiprocessing reads the status of all ended
#: processes. If two threads read the same status, the second thread gets 255.
_STATUS = threading.Lock()


@dataclass(frozen=True)
class Ended:
    """A child process that has ended.

    Attributes:
        status: Exit status, or the negative number of the signal that killed the child.
        value: Returned value, or None if the function did not return.
        printed: Standard output and standard error.
    """

    status: int
    value: Any
    printed: str

    @property
    def said(self) -> str:
        """The last printed message, with its indented continuation lines joined."""
        return self.unwrapped.strip().rpartition("\n")[2]

    @property
    def unwrapped(self) -> str:
        """The printed text with continuation lines joined."""
        return re.sub(r"\n {2,}(?=\S)", " ", self.printed)


class Child:
    """A process that calls a function.

    Args:
        function: Function at the top level of a module.
        arguments: Picklable arguments of the function.
        output: New file for the printed text.
        environment: Additional environment variables.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        output: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.output = output
        self._receiver, sender = _context().Pipe(duplex=False)
        self.process: BaseProcess = _context().Process(
            target=_main, args=(sender, str(output), dict(environment or {}), function, arguments)
        )
        with _STATUS:
            self.process.start()
        sender.close()

    @property
    def pid(self) -> int:
        """The process id."""
        assert self.process.pid is not None
        return self.process.pid

    @property
    def runs(self) -> bool:
        """True until the process ends."""
        with _STATUS:
            return self.process.is_alive()

    @property
    def succeeded(self) -> bool:
        """True if the process has ended with status 0."""
        return not self.runs and self.process.exitcode == 0

    def signal(self, number: int) -> None:
        """Send a signal to the process if the process is running."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def signal_group(self, number: int) -> None:
        """Send a signal to the process and all processes that it started, like a terminal or a scheduler."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def ended(self, seconds: float = SECONDS) -> Ended:
        """Wait until the process ends.

        Raises:
            BrokenPromiseError: If the process runs longer than `seconds`. The process is then killed.
        """
        value = None
        end = time.monotonic() + seconds
        try:
            # Processes that a killed child started may keep the pipe open.
            wait([self._receiver, self.process.sentinel], seconds)
            if self._receiver.poll():
                value = self._receiver.recv()
        except EOFError:  # the child ended without a value
            pass
        wait([self.process.sentinel], max(0.0, end - time.monotonic()))
        alive = self.runs
        with contextlib.suppress(ProcessLookupError, PermissionError):  # also ends the processes that the child started
            os.killpg(self.pid, signal.SIGKILL)
        wait([self.process.sentinel])
        with _STATUS:
            self.process.join()
        printed = self.output.read_text(encoding="utf-8", errors="replace") if self.output.is_file() else ""
        if alive:
            raise BrokenPromiseError(
                f"a process ran longer than {format_seconds(seconds)}; it printed:\n{printed[-2000:]}"
            )
        status = self.process.exitcode
        assert status is not None
        return Ended(status, value, printed)


def run_child(
    function: Callable[..., Any],
    *arguments: Any,
    output: Path,
    environment: Mapping[str, str] | None = None,
    seconds: float = SECONDS,
) -> Ended:
    """Call `function` in a child and wait until the child ends (see `Child`)."""
    return Child(function, *arguments, output=output, environment=environment).ended(seconds)


def returned(
    function: Callable[..., Any], *arguments: Any, output: Path, environment: Mapping[str, str] | None = None
) -> Any:
    """Call `function` in a child and return its value.

    Raises:
        BrokenPromiseError: If the function does not return.
    """
    done = run_child(function, *arguments, output=output, environment=environment)
    if done.status != 0:
        raise BrokenPromiseError(f"status {done.status}:\n{done.printed[-3000:]}")
    return done.value


def wait_until(holds: Callable[[], bool], seconds: float = SECONDS) -> bool:
    """Wait until `holds()` is true. Return False after `seconds`."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def _context() -> Any:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.promises.preloaded"])
    return context


def prepare_environment() -> None:
    """Set the variables that children inherit, and start the server. This function must run before the first child."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if "forkserver" in multiprocessing.get_all_start_methods():
        _context()
        with contextlib.chdir(_ROOT):  # the server imports its preloaded module from this folder
            forkserver.ensure_running()


def _end_with_the_server() -> None:
    """Make the system kill this process when the server ends (Linux). The server ends with the main process."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _main(
    sender: Connection,
    output: str,
    environment: Mapping[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    with contextlib.suppress(OSError):
        os.setsid()
    _end_with_the_server()
    os.environ.update(environment)
    # Workers of a data loader are forked from the child, as in a program without a server.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for standard in (1, 2):
        os.dup2(handle, standard)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    import torch

    torch.set_num_threads(1)
    status = 0
    try:
        value = function(*arguments)
        sender.send(value)
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
