"""Tests of ALaST's budget update (Equations 5 and 6)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_ft.methods import (
    LBPWHT,
    ALaST,
    BackRazor,
    Checkpointing,
    Method,
    apply_methods,
)
from efficient_ft.testing import MODELS, batch_of, gradients, largest_difference, model_of
from tests.methods.by_hand import DEPTH, C
from tests.methods.test_alast import budgets_of, by_hand, settings_of

READINGS: dict[str, dict[str, Any]] = {
    "alast": {**settings_of("alast"), "num_layers": 2},
    "alast fast": {**settings_of("alast"), "num_layers": 2, "budget_lr": 1 / 128},
    "alast_paper": {**settings_of("alast_paper"), "num_layers": 2},
    "alast_paper fast": {**settings_of("alast_paper"), "num_layers": 2, "budget_lr": 20.0},
    "scaled": {"num_layers": 3, "budget_lr": 0.05, "delta_scale": 2.0, "first_delta": "same", "budget_min": 0.2},
}


@pytest.mark.vary_one
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("reading", READINGS)
def test_budgets_follow_the_equations(reading: str, micro_batches: int) -> None:
    """The budgets and weights equal those of a plain training loop in float64 with Equations 5 and 6."""
    settings = READINGS[reading]
    plain, model, method = model_of("vit"), model_of("vit"), ALaST(**settings)
    method.apply(model)
    built, reference = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))
    b = [float(settings.get("budget_init", 0.9))] * DEPTH
    lowest, highest = settings.get("budget_min", 0.5), settings.get("budget_max", 1.0)
    before: list[float] | None = None
    clipped = moved = 0
    for step in range(6):
        images, labels = (
            torch.cat(t) for t in zip(*(batch_of("vit", seed=2 * step + i) for i in range(2)), strict=True)
        )
        method.step_begin(step)
        for part in range(micro_batches):
            mine = slice(part, None, micro_batches)
            (F.cross_entropy(model(images[mine]), labels[mine]) / micro_batches).backward()
        said = method.step_stats()
        built.step()
        method.step_end()
        built.zero_grad()
        assert said["budgets"] == pytest.approx(b, abs=1e-6), "those of this step"
        if settings.get("layer_choice") == "highest":
            ranked = sorted(range(DEPTH), key=lambda block: (-said["budgets"][block], block))
            assert said["trained"] == [f"blocks.{block}" for block in sorted(ranked[:2])]

        logits, changes, _ = by_hand(plain, images, b)
        F.cross_entropy(logits, labels).backward()
        for name, p in plain.named_parameters():
            if name.startswith("blocks.") and not name.startswith(tuple(f"{block}." for block in said["trained"])):
                p.grad = None
        reference.step()
        reference.zero_grad()
        over = {"image": len(images), "value": len(images) * C}[settings.get("delta", "image")]
        now = [float(change.sum()) / over for change in changes]
        if before is None:
            before = now if settings["first_delta"] == "same" else [0.0] * DEPTH
        rate = settings.get("budget_lr", 1e-4) * settings.get("delta_scale", 128.0)
        raw = [value + rate * (new - old) for value, new, old in zip(b, now, before, strict=True)]
        b = [min(highest, max(lowest, value)) for value in raw]
        clipped += b != raw
        moved += any(value not in (lowest, highest) for value in b)
        before = now
        assert budgets_of(method) == pytest.approx(b, abs=2e-6)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, plain.get_parameter(name), rtol=1e-7, atol=1e-9)
    assert moved > 1, "the test sees budgets that move"
    if reading.endswith("fast"):
        assert clipped, "and some that are clipped"


@pytest.mark.parametrize("delta", ["image", "value"])
def test_without_clipping_the_update_telescopes(delta: Any) -> None:
    rate = {"image": 1e-2, "value": 0.5}[delta]
    model, method = model_of("vit"), ALaST(2, 0.5, 0.0, 1.0, rate / 4, delta, 4.0, "same")
    method.apply(model)
    built = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens: list[Tensor] = []
    for block in model.blocks:  # type: ignore[union-attr]
        block.register_forward_hook(lambda _, inputs, output: tokens.append((output - inputs[0][:, :1])[:, 0]))
    deltas = []
    for step in range(6):
        method.step_begin(step)
        tokens.clear()
        built.zero_grad()
        gradients(model, "vit", seed=step)
        over = {"image": 2, "value": 2 * C}[delta]
        deltas.append([float(change.detach().square().sum()) / over for change in tokens])
        built.step()
        method.step_end()
        expected = [0.5 + rate * (now - first) for now, first in zip(deltas[-1], deltas[0], strict=True)]
        assert budgets_of(method) == pytest.approx(expected, abs=1e-6)
    assert max(abs(value - 0.5) for value in budgets_of(method)) > 1e-4


@pytest.mark.slow
def test_the_default_change_is_that_of_a_sum_over_the_batch_of_the_paper() -> None:
    method = ALaST()
    method.apply(timm.create_model("vit_tiny_patch16_224"))
    changes = torch.rand(12)
    for delta, total in zip(method._deltas(changes, 128), changes.tolist(), strict=True):
        assert method.budget_lr * method.delta_scale * delta == pytest.approx(1e-4 * total)


@pytest.mark.parametrize("how", ["Checkpointing", "timm", "both halves"])
def test_what_is_recomputed_counts_once_and_is_the_same(how: str) -> None:
    plain, model = model_of("vit"), model_of("vit")
    expected, method = (ALaST(2, budget_init=0.7, budget_lr=1e-3, seed=4) for _ in range(2))
    expected.apply(plain)
    method.apply(model)
    if how == "Checkpointing":
        Checkpointing().apply(model)
    elif how == "timm":
        model.set_grad_checkpointing(True)  # type: ignore[operator]
    else:
        Checkpointing([1, 2]).apply(model)
    for step in range(3):
        for each in (expected, method):
            each.step_begin(step)
        assert largest_difference(gradients(plain, "vit", step), gradients(model, "vit", step)) < 1e-10
        assert all(budget.images == 2 for budget in method._budgets.values())
        for each in (expected, method):
            each.step_end()
        assert method.state_dict() == expected.state_dict()
    assert len(set(budgets_of(method))) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "other",
    [lambda: BackRazor(sparsity=0.0, value_dtype="same"), lambda: LBPWHT(order=15), lambda: Checkpointing()],
    ids=["back_razor", "lbp_wht", "checkpointing"],
)
def test_other_methods_switched_off_change_nothing(
    other: Callable[[], Method], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = next(c for c in LBPWHT.__mro__ if "_costs_more" in vars(c))
    monkeypatch.setattr(base, "_costs_more", lambda *_: None)
    # At full rank, an exact layer after a token drop would also be cheaper.
    monkeypatch.setattr("efficient_ft.methods.backprop.low_rank.backward_flops", lambda *_: (1, 0))
    plain, model = model_of("vit"), model_of("vit")
    alone, stacked = (ALaST(2, budget_init=0.7, budget_lr=1e-3, seed=4) for _ in range(2))
    alone.apply(plain)
    apply_methods(model, [other(), stacked])
    for step in range(3):
        for each in (alone, stacked):
            each.step_begin(step)
        assert largest_difference(gradients(plain, "vit", step), gradients(model, "vit", step)) < 1e-8
        for each in (alone, stacked):
            each.step_end()
        assert budgets_of(stacked) == pytest.approx(budgets_of(alone), abs=1e-6)


def test_evaluation_and_a_step_without_images_leave_the_budgets() -> None:
    model, method = model_of("vit"), ALaST(2, budget_lr=1e-3)
    method.apply(model)
    held = method.state_dict()
    method.step_begin(0)
    with torch.no_grad():
        model.eval()(batch_of("vit")[0])
    method.step_end()
    assert method.state_dict() == held


def test_an_overflow_leaves_the_budgets() -> None:
    model, method = model_of("vit"), ALaST(2, budget_lr=1e-3)
    method.apply(model)
    states = []
    for step, factor in enumerate((1.0, math.nan, 1.0)):
        method.step_begin(step)
        model(batch_of("vit", seed=step)[0] * factor)
        method.step_end()
        states.append(copy.deepcopy(method.state_dict()))
    assert states[1] == states[0]
    assert states[2] != states[1]
    assert all(math.isfinite(v) for pair in states[2].values() for v in pair)


def test_another_model_begins_anew() -> None:
    model, method = model_of("vit"), ALaST(1, budget_lr=1e-3)
    method.load_state_dict({f"blocks.{b}": [0.6, 2.0] for b in range(DEPTH)})
    method.apply(model)
    assert budgets_of(method) == [0.6] * DEPTH
    method.remove(model)
    method.apply(MODELS["vit"].create(depth=2))
    assert method.state_dict() == {"blocks.0": [0.9, None], "blocks.1": [0.9, None]}
