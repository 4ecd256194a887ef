"""What a run records of itself, beside the same numbers computed by hand, one image and one token at a time."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from efficient_ft.methods import BSR, ALaST, Checkpointing
from efficient_ft.models.view import view
from efficient_ft.ops.tokens import Tokens
from efficient_ft.record.step_stats import Passed, StepStats, channel_axis, relative_magnitude, watched
from efficient_ft.training import checkpoint
from efficient_ft.training.module import FineTuner
from efficient_ft.training.run import run
from tests.training import test_tasks
from tests.training.test_run import assert_same_run, interrupted_at

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
    "budget_lr": 0.05,
}
METHODS: dict[str, dict[str, Any]] = {
    "full": {"full": {}},
    "bsr": {"bsr": BSR_SETTINGS},
    "alast": {"alast": ALAST_SETTINGS},
}


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "step_stats.jsonl").read_text().splitlines()]


# ---------------------------------------------------------------------------------------------- by hand
def by_hand(model: Any, images: Tensor, drop: Any) -> tuple[list[int], list[float], list[float]]:
    """Tokens behind each block, magnitudes and tokens compared, of a plain ViT in double precision.

    Args:
        drop: (block, patch tokens) → None, or (how many stay, "middle" with a fused token or "after" without).
    """
    model = copy.deepcopy(model).double().train()  # BatchNorm in the stem
    with torch.no_grad():
        all_images = model.norm_pre(model._pos_embed(model.patch_embed(images.double())))
    count = len(model.blocks)
    tokens = [0] * count
    ratios: list[list[float]] = [[] for _ in range(count)]
    for x in all_images:
        names = ["class", *range(len(x) - 1)]
        for index, block in enumerate(model.blocks):
            told = drop(index, len(x) - 1)
            y, names_after = one_block(block, x, names, told, f"fused in {index}")
            unknown = index == count - 1 and told is not None and told[1] == "after"
            compared = ["class"] if unknown else [name for name in names_after if name in names]
            for name in compared:
                out = y[names_after.index(name)]
                ratios[index].append(float((out - x[names.index(name)]).norm() / out.norm()))
            x, names = y, names_after
            tokens[index] = len(x)
    return tokens, [sum(r) / len(r) for r in ratios], [len(r) / len(all_images) for r in ratios]


@torch.no_grad()
def one_block(block: Any, x: Tensor, names: list, told: Any, new: str) -> tuple[Tensor, list]:
    heads, size = block.attn.num_heads, x.shape[1] // block.attn.num_heads
    q, k, v = block.attn.qkv(block.norm1(x)).view(len(x), 3, heads, size).permute(1, 2, 0, 3)
    shares = (q @ k.mT / math.sqrt(size)).softmax(-1)
    x = x + block.attn.proj((shares @ v).transpose(0, 1).reshape(len(x), -1))
    order = sorted(range(1, len(x)), key=lambda i: -float(shares[:, 0, i].mean()))
    if told is not None and told[1] == "middle":
        kept, gone = order[: told[0]], order[told[0] :]
        fused = sum(shares[:, 0, i].mean() * x[i] for i in gone)
        x, names = torch.stack([x[0], *x[kept], fused]), ["class", *(names[i] for i in kept), new]
    x = x + block.mlp(block.norm2(x))
    if told is not None and told[1] == "after":
        kept = order[: told[0]]
        x, names = torch.stack([x[0], *x[kept]]), ["class", *(names[i] for i in kept)]
    return x, names


folders = test_tasks.folders


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[tuple[nn.Module, Tensor]]]:
    """By optimizer step (from 1), the network before it and the images of each micro-batch."""
    batches: dict[int, list[tuple[nn.Module, Tensor]]] = {}
    step = FineTuner.training_step

    def taking(self: FineTuner, batch: Any, batch_idx: int) -> Tensor:
        batches.setdefault(self.global_step + 1, []).append((copy.deepcopy(self.model), batch[0].clone()))
        return step(self, batch, batch_idx)

    monkeypatch.setattr(FineTuner, "training_step", taking)
    return batches


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
    rows = rows_of(tmp_path)
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
@pytest.mark.parametrize("name", METHODS)
def test_a_recorded_run_is_the_same_run_and_continues(name, tmp_path, configuration):
    """Dropout and drop path on. What was recorded after the checkpoint's step comes again, once."""
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
    assert [row["step"] for row in rows_of(straight)] == list(range(1, 9))
    interrupted_at(5, recorded, broken)
    with open(broken / "step_stats.jsonl", "a") as file:
        file.write(json.dumps({**rows_of(broken)[-1], "step": 6, "trained": ["nonsense"]}) + '\n{"step": 7, "blo')
    run(recorded, broken)
    assert rows_of(broken) == rows_of(straight)
    if name == "alast":
        held = checkpoint.read(broken / checkpoint.NAME)["callbacks"]
        (budgets,) = (state for key, state in held.items() if key.startswith("alast"))
        last = dict(zip(rows_of(broken)[-1]["blocks"], rows_of(broken)[-1]["budgets"], strict=True))
        assert {block: before for block, (_, before) in budgets.items()} != last
        assert any(budgets[block][0] != value for block, value in last.items()), "budgets of the step, not after it"


@pytest.mark.parametrize("method", [None, BSR(**BSR_SETTINGS), ALaST(**ALAST_SETTINGS)], ids=["plain", "bsr", "alast"])
def test_nothing_more_is_kept_for_the_backward_pass_and_recomputing_is_not_seen(method):
    torch.manual_seed(0)
    model = timm.create_model("vit_digits", **VIT["kwargs"]).train()
    images = torch.randn(3, 3, 32, 32)
    if method is not None:
        copy.deepcopy(method).apply(model)
    seen: list[tuple[int, list[float]]] = []

    def see(index: int, passed: Passed) -> None:
        found = relative_magnitude(passed, 1, 2)
        assert found is not None
        assert not any(t.requires_grad for t in (*found, passed.x, passed.y))
        seen.append((index, [float(value) for value in found]))

    def saved(model: nn.Module, watching: bool) -> list[torch.Size]:
        sizes: list[torch.Size] = []

        def pack(t: Tensor) -> Tensor:
            sizes.append(t.shape)
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            if watching:
                with watched(model, view(model).blocks, see):
                    model(images).sum().backward()
            else:
                model(images).sum().backward()
        return sizes

    assert saved(model, True) == saved(model, False)
    once = list(seen)
    assert [index for index, _ in once] == [0, 1, 2, 3]
    assert not any(module._forward_hooks for module in model.modules())
    seen.clear()
    Checkpointing().apply(model)
    saved(model, True)
    assert seen == once
    seen.clear()
    timms: Any = timm.create_model("vit_digits", **VIT["kwargs"]).train()
    timms.set_grad_checkpointing(True)
    saved(timms, True)
    assert [index for index, _ in seen] == [0, 1, 2, 3]


# ---------------------------------------------------------------------------------------------- the comparison itself
def test_tokens_are_compared_with_themselves_wherever_they_stand():
    """Shuffled, dropped and fused ones; the places of one pass by hand."""
    torch.manual_seed(0)
    x, y = torch.randn(2, 1 + 5, 4, dtype=torch.float64), torch.randn(2, 1 + 4, 4, dtype=torch.float64)
    before = Tokens(torch.tensor([[7, 2, 0, 9, 4], [1, 9, 3, 8, 6]]), fused=1)  # a grid of 9, so 9 is a fused one
    after = Tokens(torch.tensor([[4, 9, 7, 10], [8, 1, 6, 10]]), fused=2)  # 10 is new
    pairs = [(0, 0), (5, 1), (4, 2), (1, 3)], [(0, 0), (4, 1), (1, 2), (5, 3)]
    expected = [
        (y[image, new] - x[image, old]).norm() / y[image, new].norm()
        for image, which in enumerate(pairs)
        for old, new in which
    ]
    found = relative_magnitude(Passed(x, before, y, after), prefix=1, axis=2)
    assert found is not None
    assert float(found[0]) == pytest.approx(float(sum(expected)) / 8, rel=1e-12)
    assert float(found[1]) == 4


def test_where_places_are_not_known_prefix_tokens_are_compared():
    torch.manual_seed(0)
    x, y = torch.randn(2, 7, 4), torch.randn(2, 5, 4)
    alone = float(((y - x[:, :5])[:, :2].norm(dim=-1) / y[:, :2].norm(dim=-1)).mean())
    for after in (None, Tokens(None, sizes_BN=torch.ones(2, 5))):
        found = relative_magnitude(Passed(x, None, y, after), prefix=2, axis=2)
        assert found is not None
        assert [float(value) for value in found] == pytest.approx([alone, 2])
        assert relative_magnitude(Passed(x, None, y, after), prefix=0, axis=2) is None


def test_maps_have_their_channels_where_the_block_puts_them():
    torch.manual_seed(0)
    for block, axis in ((nn.Conv2d(3, 3, 1), 1), (nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 3)), 3)):
        x = torch.randn(2, 3, 4, 5) if axis == 1 else torch.randn(2, 4, 5, 3)
        y = torch.randn_like(x)
        y.select(axis, 0)[0], y.select(axis, 1)[0], y.select(axis, 2)[0] = (
            0,
            0,
            0,
        )  # ReLU leaves whole positions at zero
        assert channel_axis(block, 4) == axis
        found = relative_magnitude(Passed(x, None, y, None), prefix=0, axis=axis)
        expected = ((y[1] - x[1]).norm(dim=axis - 1) / y[1].norm(dim=axis - 1)).mean()
        assert found is not None
        assert [float(value) for value in found] == pytest.approx([float(expected), 10])
    assert channel_axis(nn.Conv2d(3, 3, 1), 3) == 2


# ---------------------------------------------------------------------------------------------- other models and places
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
    rows = rows_of(tmp_path)
    assert rows[0]["tokens"] == [64, 64, 16, 16, 4, 4, 1, 1]
    without = [value is None for value in rows[0]["magnitudes"]]
    assert without == [False, False, True, False, True, False, True, False], "null where a block halves the map"
    first, second = ([value for value in row["magnitudes"] if value is not None] for row in rows)
    assert first == [0] * 5, "timm's residual branches begin as zero"
    assert all(0 < value < 1 for value in second)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    told = {event.step: event.value for event in events.Scalars("magnitudes/layer1.0")}
    assert told == pytest.approx({row["step"]: row["magnitudes"][0] for row in rows})
    assert events.Scalars("tokens/layer4.1")[0].value == 1


def test_a_model_without_blocks_is_told_and_leaves_nothing(tmp_path, caplog):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    stats = StepStats(tmp_path, [], 1)
    trainer: Any = SimpleNamespace(is_global_zero=True, global_step=0, loggers=[])
    stats.setup(trainer, model, "fit")  # type: ignore[arg-type]
    stats.on_train_start(trainer, model)  # type: ignore[arg-type]
    stats.on_train_batch_start(trainer, model, None, 0)  # type: ignore[arg-type]
    stats.on_train_batch_end(trainer, model, None, None, 0)  # type: ignore[arg-type]
    assert "no blocks were recognised in Sequential" in caplog.text
    assert not list(tmp_path.iterdir())


def test_with_several_tasks_the_row_names_the_step_s(tmp_path, folders):
    run(
        test_tasks.config_of(folders, trainer__max_steps=3, step_stats__interval=1, trainer__limit_eval_batches=1),
        tmp_path,
    )
    rows = rows_of(tmp_path)
    assert [row["task"] for row in rows] == ["colours", "planes", "colours"]
    assert [row["trained"] for row in rows] == [["blocks.1", "blocks.3"]] * 3
    # class token, half of 64 patches, fused; then half of these 33
    assert [row["tokens"] for row in rows] == [[65, 1 + 32 + 1, 1 + 17 + 1, 19]] * 3


@pytest.mark.slow
def test_of_two_processes_the_first_one_writes(tmp_path):
    from tests.training.conftest import plain_config

    script = (
        "import json, sys; from pathlib import Path; import torch; torch.set_num_threads(1)\n"
        "from efficient_ft.config import check\nfrom efficient_ft.training.run import run\n"
        "run(check(json.loads(sys.argv[1])), Path(sys.argv[2]))\n"
    )
    file = tmp_path / "ddp.py"
    file.write_text(script)
    plain = plain_config(
        model=VIT,
        method={"uniform_layers": {"num_layers": 2}},
        trainer__devices=2,
        trainer__max_steps=4,
        step_stats__interval=1,
    )
    done = subprocess.run(
        [sys.executable, str(file), json.dumps(plain), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(len(row["magnitudes"]) == 4 and len(row["trained"]) == 2 for row in rows)
