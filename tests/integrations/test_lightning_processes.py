"""Tests of Lightning's `MethodCallback` in several processes: supported and rejected strategies."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from efficient_ft.core.errors import SettingError
from efficient_ft.integrations.lightning import MethodCallback
from efficient_ft.methods import Full
from efficient_ft.testing import model_of
from tests.integrations.loops import METHODS, assert_same_weights, batches_of, train_by_hand, trained_by_hand
from tests.integrations.test_lightning import Module, fitted


@pytest.fixture
def one_process_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clean up the process group and the environment variables of Lightning."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


@pytest.mark.usefixtures("one_process_group")
def test_ddp_is_told_of_parameters_without_a_gradient() -> None:
    with pytest.raises(SettingError) as caught:
        fitted(METHODS["alast"](), strategy="ddp", devices=1)
    assert str(caught.value).startswith(
        "strategy must be 'ddp_find_unused_parameters_true' or DDPStrategy(find_unused_parameters=True), got"
        " DDPStrategy(). With method alast"
    )
    for name, strategy in (("full", "ddp"), ("moe", "ddp_find_unused_parameters_true")):
        module = fitted(METHODS[name](), strategy=strategy, devices=1, use_distributed_sampler=False)
        assert_same_weights(trained_by_hand(METHODS[name](), 1, 1), module.net)


@pytest.mark.usefixtures("one_process_group")
def test_synchronized_batch_norm_is_refused() -> None:
    with pytest.raises(SettingError, match=r"^sync_batchnorm must be False, got True"):
        fitted([Full()], Module(model_of("resnet")), strategy="ddp", devices=1, sync_batchnorm=True)


def test_sharding_strategies_are_refused() -> None:
    class FSDPStrategy:  # Lightning's class needs an accelerator.
        pass

    class Trainer:
        strategy = FSDPStrategy()

    with pytest.raises(SettingError, match=r"^strategy must be one device or DDP, got FSDPStrategy"):
        MethodCallback(Full(), network="net").setup(Trainer(), Module(), "fit")  # type: ignore[arg-type]


_TWO = """
import sys, torch
torch.set_num_threads(1)
from torch.utils.data import DataLoader
from efficient_ft.integrations.lightning import MethodCallback
from tests.integrations.loops import METHODS, batches_of
from tests.integrations.test_lightning import Module, trainer_of

name, file = sys.argv[1:]
module = Module()
torch.manual_seed(0)  # the weights of adapters
trainer = trainer_of(
    MethodCallback(METHODS[name](), network="net"), devices=2, max_epochs=2, use_distributed_sampler=False,
    strategy="ddp_find_unused_parameters_true",
)
batches = batches_of("vit", 4)[trainer.global_rank::2]
trainer.fit(module, DataLoader(batches, batch_size=None, shuffle=False))
if trainer.is_global_zero:
    torch.save(module.net.state_dict(), file)
"""


@pytest.mark.first(1, "exhaustive")
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["alast", "lora", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("moe", "lbp_wht_lhe"))]
)
def test_two_processes_equal_one_with_two_micro_batches(name: str, tmp_path: Path) -> None:
    script, file = tmp_path / "two.py", tmp_path / "weights.pt"
    script.write_text(_TWO)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(
        [sys.executable, str(script), name, str(file)], capture_output=True, text=True, timeout=300, env=env
    )
    assert done.returncode == 0, done.stderr
    expected = model_of("vit")  # created before seeding, because it may draw numbers
    torch.manual_seed(0)
    train_by_hand(expected, METHODS[name](), batches_of("vit", 4), epochs=2, accumulate=2)
    found = torch.load(file)
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-8, msg=key)
