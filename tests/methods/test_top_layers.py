"""Tests of FT top-K of the ALaST paper: the profile of the first steps and the chosen blocks."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from efficient_ft.core.errors import UserError
from efficient_ft.methods import LoRA, TopLayers, apply_methods
from efficient_ft.testing import MODELS, batch_of, gradients, model_of
from tests.methods.by_hand import DEPTH


def by_ratio(model: nn.Module, seeds: Sequence[int]) -> list[float]:
    """Return each block's share of the ratios ‖g‖ / ‖w‖, summed over the steps."""
    totals = [0.0] * DEPTH
    for seed in seeds:
        images, labels = batch_of("vit", seed=seed)
        ratios = []
        loss = F.cross_entropy(model(images), labels)
        for block in model.blocks:  # type: ignore[union-attr]
            parameters = list(block.parameters())
            found = torch.autograd.grad(loss, parameters, retain_graph=True)
            flat = [torch.cat([t.detach().flatten() for t in tensors]) for tensors in (found, parameters)]
            ratios.append(float(flat[0].norm() / flat[1].norm()))
        totals = [total + ratio / sum(ratios) for total, ratio in zip(totals, ratios, strict=True)]
    return totals


def test_top_layers_are_those_of_the_largest_gradients_for_their_weights() -> None:
    model = model_of("vit")
    with torch.no_grad():
        for p in model.get_submodule("blocks.1").parameters():
            p.mul_(0.5)  # The largest ratio is not in the first or last block.
    expected = by_ratio(copy.deepcopy(model), range(4))
    method = TopLayers(2, profile_steps=4)
    method.apply(model)
    for step in range(4):
        assert method.warmup_steps == 4 - step
        method.step_begin(step)
        assert len(method.step_stats()["trained"]) == DEPTH
        gradients(model, "vit", seed=step)
        method.step_end()
    held = method.state_dict()
    torch.testing.assert_close(torch.tensor(held["shares"]), torch.tensor(expected))
    best = sorted(sorted(range(DEPTH), key=lambda b: -expected[b])[:2])
    assert held["top"] == best != [0, 1]
    assert method.warmup_steps == 0
    for step in (4, 5, 6):
        method.step_begin(step)
        assert method.step_stats()["trained"] == [f"blocks.{b}" for b in best]
        found = {n for n, g in gradients(model, "vit", seed=step).items() if g is not None}
        assert {n.split(".")[1] for n in found if n.startswith("blocks.")} == {str(b) for b in best}
        method.step_end()
    assert method.state_dict() == held, "the profile is over"


def test_a_profile_continues_where_it_was_saved(tmp_path: Path) -> None:
    straight, method = model_of("vit"), TopLayers(1, profile_steps=4)
    method.apply(straight)
    for step in range(6):
        method.step_begin(step)
        gradients(straight, "vit", seed=step)
        method.step_end()
        torch.save(method.state_dict(), tmp_path / str(step))
    for at in (1, 3, 4):
        again, model = TopLayers(1, profile_steps=4), model_of("vit")
        again.apply(model)
        again.load_state_dict(torch.load(tmp_path / str(at), weights_only=True))
        for step in range(at + 1, 6):
            again.step_begin(step)
            gradients(model, "vit", seed=step)
            again.step_end()
        assert again.state_dict() == method.state_dict()


def test_another_model_has_a_profile_of_its_own() -> None:
    model, method = model_of("vit"), TopLayers(1, profile_steps=1)
    for _ in range(2):
        method.apply(model)
        assert method.warmup_steps == 1
        method.step_begin(0)
        gradients(model, "vit")
        method.step_end()
        assert method.warmup_steps == 0
        method.remove(model)
        model = MODELS["vit"].create(depth=2).double()


def test_a_profile_without_gradients_says_what_is_wrong() -> None:
    model, method = model_of("vit"), TopLayers(1)
    method.apply(model)
    method.step_begin(0)
    with pytest.raises(UserError, match=r"step_end\(\) before the optimizer's zero_grad"):
        method.step_end()


def test_blocks_in_which_no_adapter_trains_are_never_the_top() -> None:
    model, method = model_of("efficientformer"), TopLayers(1, profile_steps=1)
    apply_methods(model, [LoRA(2), method])
    method.step_begin(0)
    gradients(model, "efficientformer")
    method.step_end()
    (top,) = method.state_dict()["top"]
    assert method.applied is not None
    adapted = {n for n, _ in model.named_parameters() if ".lora_" in n}
    for index, block in enumerate(method.applied.touched):
        assert any(n.startswith(f"{block}.") for n in adapted) == (index == top)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_step_whose_gradients_overflow_is_not_one_of_the_profile(bad: float) -> None:
    """Steps with an overflow are not part of the profile. With loss scaling, the first steps usually overflow."""
    straight, model = model_of("vit"), model_of("vit")
    expected, method = TopLayers(1, profile_steps=1), TopLayers(1, profile_steps=1)
    expected.apply(straight)
    method.apply(model)
    expected.step_begin(0)
    gradients(straight, "vit")
    expected.step_end()
    for step, scale in enumerate((bad, 1.0)):
        assert method.warmup_steps == 1
        method.step_begin(step)
        gradients(model, "vit")
        for p in model.get_submodule("blocks.0").parameters():
            p.grad = p.grad * scale if p.grad is not None else None
        method.step_end()
    assert method.warmup_steps == 0
    assert method.state_dict() == expected.state_dict()
