"""Tests of the check of ``--device``, which ``efficient-ft bench`` and ``efficient-ft predict`` share."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from efficient_ft.cli.commands import predict
from efficient_ft.cli.device import require_device
from efficient_ft.core.errors import SettingError


@pytest.fixture(autouse=True)
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("name", ["meta", "hpu", "mps", "warp"])
def test_a_device_that_cannot_run_a_model_is_one_message(name: str) -> None:
    with pytest.raises(SettingError, match=rf"^--device must be cpu, cuda or cuda:N, got {name}\.$"):
        predict.main(["no_such_run", "image.png", "--device", name])


def test_cuda_is_refused_without_a_cuda_device() -> None:
    with pytest.raises(SettingError, match=r"^--device must be cpu on this machine, got cuda:1\. There is no CUDA"):
        require_device("cuda:1")


def test_the_accelerator_of_the_machine_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: SimpleNamespace(type="mps"))
    for name in ("cpu", "mps", "mps:0"):
        require_device(name)
    with pytest.raises(SettingError, match=r"^--device must be cpu or mps, got meta\.$"):
        require_device("meta")
    with pytest.raises(SettingError, match=r"^--device must be cpu or mps on this machine, got cuda\."):
        require_device("cuda")
