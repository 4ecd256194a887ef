"""Tests of the entry `changed` of a run: the settings that differ from the chosen options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from efficient_ft.config import check
from tests.cli.program import call
from tests.config.settings import PLAIN, two_tasks


@pytest.mark.parametrize(
    ("arguments", "changed"),
    [
        ([], {}),
        (["method=lora", "optim=sgd", "seed=233", "method.lora.rank=8"], {}),
        (["train", "optim.lr=0.5", "seed=1"], {"optim.lr": 0.5, "seed": 1}),
        (["model=timm", "model.name=vit_tiny_patch16_224", "recipe=alast/cifar100"], {
            "model.name": "vit_tiny_patch16_224"}),
        (["method=[full,back_razor_published]", "method.back_razor.sparsity=0.5"], {
            "method.back_razor.sparsity": 0.5}),
        (["+data@tasks.a=digits", "+data@tasks.b=pets", "tasks.b.batch_size=7", "model=deit_tiny"], {
            "tasks.b.batch_size": 7}),
    ],
)  # fmt: skip
def test_a_run_records_what_its_command_changes(program: Path, arguments: list[str], changed: dict[str, Any]) -> None:
    done = call(program, *arguments, "hydra.run.dir=run")
    assert done.returncode == 0, done.stderr
    assert json.loads((program / "run" / "changed.json").read_text()) == changed


def test_a_configuration_made_in_python_differs_from_the_schema() -> None:
    changed = check(PLAIN).changed()
    assert changed == {
        "model.name": "resnet18", "data.name": "cifar10", "method.full": {}, "optim.name": "adamw", "optim.lr": 1e-3,
        "optim.weight_decay": 0.0, "optim.grad_clip_norm": None, "trainer.epochs": 2,
        "trainer.precision": "fp32",
    }  # fmt: skip
    assert check(two_tasks()).changed()["tasks.b.name"] == "pets"
