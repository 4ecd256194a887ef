"""Tests of ``efficient-ft cache``: a run reads the stored features."""

from __future__ import annotations

from pathlib import Path

import pytest

from efficient_ft.cli.commands import cache as command
from efficient_ft.cli.hydra.compose import configurations
from efficient_ft.cli.hydra.groups import CONF
from efficient_ft.core.errors import UserError

SETTINGS = [
    "trainer.views=2",
    "model=vit_digits",
    "model.frozen_bn=true",
    "data=digits",
    "data.num_workers=0",
    "method=blocks",
    "method.blocks.blocks=[3]",
]


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "use_allocator", lambda choice: None)  # keeps the allocator of the test process
    monkeypatch.setattr(command, "restart_with", lambda choice: None)
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_a_run_computes_nothing_after_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    from efficient_ft.training.run import run

    command.main(SETTINGS)
    printed = capsys.readouterr().out
    assert "2731 computed, 0 already stored, 0 missing" in printed
    command.main(SETTINGS)
    assert "0 computed, 2731 already stored, 0 missing" in capsys.readouterr().out
    words = [*SETTINGS, "trainer.cache_features=on", "trainer.epochs=1", "optim.lr=1e-3", "cost.baseline=none"]
    (config,) = configurations(CONF, "train", words, sweep=False)
    report = run(config, Path("run"))["features"]
    assert (report["computed"], report["read"]) == (0, 1293 + 145)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["method=full"], "The network has no frozen prefix"),
        (["trainer.cache_limit=1KB"], "trainer.cache_limit must be at least"),
        (["tasks=bsr_moe", "model=deit_tiny", "data=none"], "Features cannot be stored for a run on several tasks"),
        (["model=deit_tiny", "data=cifar100"], "cifar100"),
        (["no_such=1"], "no_such"),
    ],
)
def test_a_mistake_gets_one_message(words: list[str], message: str) -> None:
    own = {word.partition("=")[0] for word in words}
    words = [word for word in words if word != "data=none"]  # the tasks define the data sets
    settings = [word for word in SETTINGS if word.partition("=")[0].split(".")[0] not in own]
    with pytest.raises(UserError, match=message):
        command.main([*settings, *words])
