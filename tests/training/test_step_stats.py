"""Tests of step statistics against the same numbers computed per image and per token."""

from __future__ import annotations

import copy
import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import efficient_ft.models.small  # noqa: F401  registers vit_digits
from efficient_ft.methods import ALaST
from efficient_ft.record.step_stats import step_stats_file
from efficient_ft.training.callbacks.step_stats import StepStats
from efficient_ft.training.module import FineTuner
from efficient_ft.training.run import run
from tests.training import test_tasks
from tests.training.runs import assert_same_run, interrupted_at, method_states

pytestmark = pytest.mark.usefixtures("without_cost")

VIT: dict[str, Any] = {
    "name": "vit_digits",
    "pretrained": False,
    "frozen_bn": False,
    "kwargs": {"depth": 4, "embed_dim": 16, "num_heads": 2},
}
BSR_SETTINGS: dict[str, Any] = {"blocks": [1, 3], "drop_at": [1, 2], "keep_rate": 0.3}
ALAST_SETTINGS: dict[str, Any] = {
    "num_layers": 2,
    "budget_init": 0.7,
    "budget_min": 0.2,
    "budget_max": 0.9,
    "budget_lr": 4e-4,
}
METHODS: dict[str, dict[str, Any]] = {
    "full": {"full": {}},
    "bsr": {"bsr": BSR_SETTINGS},
    "alast": {"alast": ALAST_SETTINGS},
}


# ---------------------------------------------------------------------------------------------- by hand
def by_hand(model: Any, images: Tensor, drop: Any) -> tuple[list[int], list[float], list[float]]:
    """Compute the statistics of a plain ViT in double precision: tokens, magnitudes and compared tokens of each block.

    Args:
        drop: Function of (block, patch tokens) that returns None or a pair of the number of kept tokens and the place.
            The place is "middle" (with a fused token) or "after" (without).
    """
    model = copy.deepcopy(model).double().train()  # the stem has BatchNorm
    with torch.no_grad():
        all_images = model.norm_pre(model._pos_embed(model.patch_embed(images.double())))
    count = len(model.blocks)
    tokens = [0] * count
    ratios: list[list[float]] = [[] for _ in range(count)]
    for x in all_images:
        names = ["class", *range(len(x) - 1)]
        for index, block in enumerate(model.blocks):
            dropped = drop(index, len(x) - 1)
            y, names_after = one_block(block, x, names, dropped, f"fused in {index}")
            unknown = index == count - 1 and dropped is not None and dropped[1] == "after"
            compared = ["class"] if unknown else [name for name in names_after if name in names]
            for name in compared:
                out = y[names_after.index(name)]
                ratios[index].append(float((out - x[names.index(name)]).norm() / out.norm()))
            x, names = y, names_after
            tokens[index] = len(x)
    return tokens, [sum(r) / len(r) for r in ratios], [len(r) / len(all_images) for r in ratios]


@torch.no_grad()
def one_block(block: Any, x: Tensor, names: list, dropped: Any, new: str) -> tuple[Tensor, list]:
    heads, size = block.attn.num_heads, x.shape[1] // block.attn.num_heads
    q, k, v = block.attn.qkv(block.norm1(x)).view(len(x), 3, heads, size).permute(1, 2, 0, 3)
    shares = (q @ k.mT / math.sqrt(size)).softmax(-1)
    x = x + block.attn.proj((shares @ v).transpose(0, 1).reshape(len(x), -1))
    order = sorted(range(1, len(x)), key=lambda i: -float(shares[:, 0, i].mean()))
    if dropped is not None and dropped[1] == "middle":
        kept, gone = order[: dropped[0]], order[dropped[0] :]
        fused = sum(shares[:, 0, i].mean() * x[i] for i in gone)
        x, names = torch.stack([x[0], *x[kept], fused]), ["class", *(names[i] for i in kept), new]
    x = x + block.mlp(block.norm2(x))
    if dropped is not None and dropped[1] == "after":
        kept = order[: dropped[0]]
        x, names = torch.stack([x[0], *x[kept]]), ["class", *(names[i] for i in kept)]
    return x, names


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[tuple[nn.Module, Tensor]]]:
    """The network and the images of each micro-batch, by optimizer step (from 1)."""
    batches: dict[int, list[tuple[nn.Module, Tensor]]] = {}
    step = FineTuner.training_step

    def taking(self: FineTuner, batch: Any, batch_idx: int) -> Tensor:
        batches.setdefault(self.global_step + 1, []).append((copy.deepcopy(self.model), batch[0].clone()))
        return step(self, batch, batch_idx)

    monkeypatch.setattr(FineTuner, "training_step", taking)
    return batches


@pytest.mark.slow
@pytest.mark.first(1, "exhaustive")
@pytest.mark.parametrize("name", METHODS)
def test_the_record_is_what_one_finds_by_hand(name, tmp_path, configuration, taken):
    config = configuration(
        model=VIT,
        method=METHODS[name],
        data__batch_size=6,
        trainer__max_steps=5,
        trainer__grad_accum_steps=2,
        trainer__limit_eval_batches=1,
        step_stats__interval=2,
    )
    run(config, tmp_path)
    rows = step_stats_file(tmp_path).read()
    assert [row["step"] for row in rows] == [1, 3, 5]
    for row in rows:

        def drop(index: int, patches: int, row: Any = row) -> Any:
            if name == "bsr":
                return (math.ceil(0.3 * patches), "middle") if index in (1, 2) else None
            if name == "alast":
                kept = math.floor(row["budgets"][index] * patches + 1e-9)
                return (kept, "after") if kept < patches else None
            return None

        assert len(taken[row["step"]]) == 2, "micro-batches of a step"
        network, images = taken[row["step"]][0]
        tokens, magnitudes, compared = by_hand(network, images, drop)
        assert row["blocks"] == [f"blocks.{i}" for i in range(4)]
        assert row["tokens"] == tokens
        assert row["magnitudes"] == pytest.approx(magnitudes, rel=2e-5)
        assert row["compared"] == pytest.approx(compared)
    trained = [row["trained"] for row in rows]
    if name == "full":
        assert trained == [[f"blocks.{i}" for i in range(4)]] * 3
    if name == "bsr":
        assert rows[0]["tokens"] == [65, 1 + 20 + 1, 1 + 7 + 1, 9]
        assert trained == [["blocks.1", "blocks.3"]] * 3
    if name == "alast":
        assert rows[0]["budgets"] == [0.7] * 4
        assert rows[1]["budgets"] != rows[0]["budgets"]
        assert rows[0]["tokens"] == [1 + 44, 1 + 30, 1 + 21, 1 + 14]
        assert rows[0]["compared"][3] == 1, "of the last block only the class token is known"
        chosen = [ALaST(**ALAST_SETTINGS, seed=config.seed) for _ in rows]
        for method, row in zip(chosen, rows, strict=True):
            method.load_state_dict({b: [v, None] for b, v in zip(row["blocks"], row["budgets"], strict=True)})
            method.apply(timm.create_model("vit_digits", **VIT["kwargs"]))
            assert [int(b.split(".")[1]) for b in row["trained"]] == sorted(method.choose(row["step"] - 1, 4))


# ---------------------------------------------------------------------------------------------- changes nothing
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["alast", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in METHODS if n != "alast")]
)
def test_a_recorded_run_is_the_same_run_and_continues(name, tmp_path, configuration):
    """Recording changes no weights, and a resumed run records each step once."""
    changes = {
        "method": METHODS[name],
        "model": {**VIT, "drop_rate": 0.1, "drop_path_rate": 0.2},
        "trainer__max_steps": 8,
        "trainer__limit_eval_batches": 1,
    }
    plain, straight, broken = tmp_path / "plain", tmp_path / "straight", tmp_path / "broken"
    run(configuration(**changes), plain)
    recorded = configuration(**changes, step_stats__interval=1)
    run(recorded, straight)
    assert_same_run(plain, straight)
    assert not (plain / "step_stats.jsonl").exists()
    assert [row["step"] for row in step_stats_file(straight).read()] == list(range(1, 9))
    interrupted_at(5, recorded, broken)
    with open(broken / "step_stats.jsonl", "a") as file:
        file.write(
            json.dumps({**step_stats_file(broken).read()[-1], "step": 6, "trained": ["nonsense"]})
            + '\n{"step": 7, "blo'
        )
    run(recorded, broken)
    assert step_stats_file(broken).read() == step_stats_file(straight).read()
    if name == "alast":
        budgets = method_states(broken)["alast"]
        last = dict(
            zip(
                step_stats_file(broken).read()[-1]["blocks"], step_stats_file(broken).read()[-1]["budgets"], strict=True
            )
        )
        assert {block: before for block, (_, before) in budgets.items()} != last
        assert any(budgets[block][0] != value for block, value in last.items()), "budgets of the step, not after it"


# ---------------------------------------------------------------------------------------------- other models and tasks
@pytest.mark.slow
def test_a_network_without_tokens_and_a_logger(tmp_path, configuration):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = configuration(
        model={"name": "resnet18", "pretrained": False, "image_size": 32, "kwargs": {}},
        data__batch_size=8,
        trainer__max_steps=2,
        trainer__limit_eval_batches=1,
        logger={"name": "tensorboard"},
        step_stats__interval=1,
    )
    run(config, tmp_path)
    rows = step_stats_file(tmp_path).read()
    assert rows[0]["tokens"] == [64, 64, 16, 16, 4, 4, 1, 1]
    without = [value is None for value in rows[0]["magnitudes"]]
    assert without == [False, False, True, False, True, False, True, False], "null where a block halves the map"
    first, second = ([value for value in row["magnitudes"] if value is not None] for row in rows)
    assert first == [0] * 5, "timm's residual branches begin as zero"
    assert all(0 < value < 1 for value in second)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    logged = {event.step: event.value for event in events.Scalars("magnitudes/layer1.0")}
    assert logged == pytest.approx({row["step"]: row["magnitudes"][0] for row in rows})
    assert events.Scalars("tokens/layer4.1")[0].value == 1


def test_a_model_without_blocks_is_not_recorded_with_a_warning(tmp_path, caplog):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    stats = StepStats(tmp_path, [], 1)
    trainer: Any = SimpleNamespace(is_global_zero=True, global_step=0, loggers=[])
    module: Any = nn.ModuleDict({"model": model})
    stats.setup(trainer, module, "fit")
    stats.on_train_start(trainer, module)
    stats.on_train_batch_start(trainer, module, None, 0)
    stats.on_train_batch_end(trainer, module, None, None, 0)
    assert "Sequential has no recognized blocks" in caplog.text
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_with_several_tasks_the_row_names_the_step_s(tmp_path, folders):
    run(
        test_tasks.config_of(folders, trainer__max_steps=3, step_stats__interval=1, trainer__limit_eval_batches=1),
        tmp_path,
    )
    rows = step_stats_file(tmp_path).read()
    assert [row["task"] for row in rows] == ["colours", "planes", "colours"]
    assert [row["trained"] for row in rows] == [["blocks.1", "blocks.3"]] * 3
    # a class token, half of the 64 patches and a fused token; then half of the 33 tokens
    assert [row["tokens"] for row in rows] == [[65, 1 + 32 + 1, 1 + 17 + 1, 19]] * 3
