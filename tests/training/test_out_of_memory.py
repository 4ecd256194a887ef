"""Tests of out-of-memory errors: one message names a batch size that fits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from efficient_ft.config import check
from efficient_ft.core.errors import UserError
from efficient_ft.training.memory import out_of_memory as module
from efficient_ft.training.memory.budget import Predictor, largest_batch, smaller_evaluation
from efficient_ft.training.memory.out_of_memory import out_of_memory
from tests.conftest import unwrapped
from tests.training.runs import REPOSITORY, plain_config

#: Runs PLAIN in FOLDER in a process that may grow by MORE bytes. The address space has no limit, because each thread
#: reserves at least 64 MiB of it without using them, and a prediction would then fail to start threads.
_SCRIPT = """
import json, resource, sys
from pathlib import Path
import psutil, torch
torch.set_num_threads(1)
from efficient_ft.cli.exits import clean_exits
from efficient_ft.config import check
from efficient_ft.training.run import run
size = psutil.Process().memory_info().data + int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_DATA, (size, size))
with clean_exits():
    run(check(json.loads(sys.argv[1])), Path(sys.argv[2]))
"""


def _limited(plain: dict[str, Any], folder: Path, more: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _SCRIPT, json.dumps(plain), str(folder), str(more)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=REPOSITORY)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a process")
def test_the_batch_size_named_by_a_run_without_memory_fits(tmp_path: Path) -> None:
    plain = plain_config(data__batch_size=1200, model__kwargs={"depth": 4}, trainer__max_steps=1)
    failed = _limited(plain, tmp_path / "run", 500 * 10**6)
    assert failed.returncode == 2, failed.stderr
    assert "Traceback" not in failed.stderr
    message = unwrapped(failed.stderr).strip().splitlines()[-1]
    assert re.match(r"Out of memory on the CPU: the run tried to allocate [\d.]+ [MG]iB, and ", message)
    assert "data.batch_size=1200, model.image_size (default of the network) and method=full" in message
    assert "data.eval_batch_size (" in message
    found = re.search(r"data\.batch_size=(\d+), the run is predicted to fit", message)
    assert found, message
    assert 8 <= int(found[1]) < 1200
    plain["data"]["batch_size"] = int(found[1])
    fits = _limited(plain, tmp_path / "smaller", 500 * 10**6)
    assert fits.returncode == 0, fits.stderr


def _caught() -> AbstractContextManager[None]:
    return out_of_memory(check(plain_config()))


_CPU = "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (
            RuntimeError(f"{_CPU} 1099511627776 bytes. Error code 12 (Cannot allocate memory)"),
            " the run tried to allocate 1.00 TiB, and",
        ),
        (MemoryError("Unable to allocate 2.00 TiB for an array with shape (1, 2)"), " .* allocate 2.00 TiB, and"),
        (MemoryError(), ""),
    ],
)
def test_every_library_s_lack_of_memory_is_known(error: Exception, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "smaller_evaluation", lambda *arguments: None)
    monkeypatch.setattr(module, "largest_batch", lambda *arguments: 96)
    with pytest.raises(UserError) as caught, _caught():
        raise error
    assert re.match(rf"Out of memory on the CPU:{asked} [\d.]+ \w+ of memory is free\. ", str(caught.value))
    same = "data.batch_size=64 trainer.grad_accum_steps=2"
    assert f"fit into memory. To keep the optimizer steps unchanged, use {same}. To find recipes" in str(caught.value)


@pytest.mark.slow
def test_a_method_is_named_where_no_batch_size_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "smaller_evaluation", lambda *arguments: None)
    monkeypatch.setattr(module, "largest_batch", lambda config, *rest: 7 if "checkpointing" in config.method else 0)
    with (
        pytest.raises(UserError, match=r"method=\[full,checkpointing\] data\.batch_size=7, .* fit \(exact gradients"),
        _caught(),
    ):
        raise MemoryError
    monkeypatch.setattr(module, "smaller_evaluation", lambda *arguments: None)
    monkeypatch.setattr(module, "largest_batch", lambda *arguments: 0)
    with pytest.raises(UserError, match=r"No batch size is predicted to fit into memory\. Choose"), _caught():
        raise MemoryError


@pytest.mark.slow
def test_what_a_failed_step_holds_is_freed_before_the_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    import weakref

    held: list[weakref.ref[torch.Tensor]] = []

    def step() -> None:
        activations = torch.zeros(10)
        held.append(weakref.ref(activations))
        raise MemoryError

    def largest(*arguments: object) -> int:
        assert held[0]() is None
        return 5

    monkeypatch.setattr(module, "smaller_evaluation", lambda *arguments: None)
    monkeypatch.setattr(module, "largest_batch", largest)
    with pytest.raises(UserError, match="batch_size=5, the run is predicted"), _caught():
        step()


def test_other_errors_pass_and_a_killed_worker_is_named() -> None:
    other = RuntimeError("shapes differ")
    with pytest.raises(RuntimeError) as caught, _caught():
        raise other
    assert caught.value is other
    killed = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
    with (
        pytest.raises(UserError, match=r"data loader was killed, .*data\.num_workers=0"),
        _caught(),
    ):
        raise killed


@pytest.mark.slow
def test_the_evaluation_batch_is_named_if_only_evaluation_is_too_large() -> None:
    config, cpu = check(plain_config(data__batch_size=8, data__eval_batch_size=2048)), torch.device("cpu")
    small = check(plain_config(data__batch_size=8, data__eval_batch_size=256))
    room = Predictor(small, None, 10**9, cpu)(small).peak_bytes
    assert smaller_evaluation(config, cpu, 10**9, room) == 256
    assert smaller_evaluation(small, cpu, 10**9, room) is None


@pytest.mark.slow
def test_the_largest_batch_size_is_that_of_the_prediction() -> None:
    config, cpu = check(plain_config()), torch.device("cpu")
    room = Predictor(check(plain_config(data__batch_size=40)), None, 10**9, cpu)(
        check(plain_config(data__batch_size=40))
    ).peak_bytes
    assert 30 <= largest_batch(config, cpu, 10**9, room) <= 40
    assert largest_batch(config, cpu, 10**9, 2**60) == 128
    assert largest_batch(config, cpu, 10**9, 10**9) == 0
