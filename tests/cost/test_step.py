"""Tests of the settings of a step, and of the methods and other objects that take part in it."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import timm
import torch
from torch import Tensor, nn

from efficient_ft.core.errors import SettingError
from efficient_ft.cost import StepMethods, StepSpec, TrainingStep, compare, executed, kept_after_forward, layer_flops
from efficient_ft.methods import LBPWHT, LastStage, LoRA


class Net(nn.Module):
    """Two linear layers on images of shape (B, 3, 4, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(48, 20), nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.flatten(1)))


class FreezeBody:
    """An external method with two plain functions, which freezes a layer during each step."""

    def __init__(self, model: Net) -> None:
        self.body = model.body

    def step_begin(self, step: int) -> None:
        self.body.requires_grad_(False)

    def step_end(self) -> None:
        self.body.requires_grad_(True)


class EveryOther:
    """A method that freezes a layer in every other step and adds a loss. Its cost is constant after two steps."""

    warmup_steps = 2
    cost_steps = 2

    def __init__(self, model: Net) -> None:
        self.model, self.steps = model, []

    def step_begin(self, step: int) -> None:
        self.steps.append(step)
        self.model.body.requires_grad_(step % 2 == 1)

    def total_loss(self, loss: Tensor) -> Tensor:
        return loss + (self.model.head.weight @ self.model.head.weight.T).sum()


class WatchesPrecision:
    """A method that records whether its steps run under autocast."""

    warmup_steps = 1
    seen: ClassVar[list[bool]] = []

    def total_loss(self, loss: Tensor) -> Tensor:
        self.seen.append(torch.is_autocast_enabled("cpu"))
        return loss


class Applies:
    """A method that freezes a layer when it is applied."""

    applied: Any = None

    def apply(self, model: nn.Module) -> None:
        model.get_submodule("body").requires_grad_(False)
        self.applied = True


def test_a_plain_object_with_two_functions_is_counted():
    plain, frozen = Net(), Net()
    frozen.body.requires_grad_(False)
    model = Net()
    method = FreezeBody(model)
    assert executed(model, 3, (4, 4), methods=[method]) == executed(frozen, 3, (4, 4))
    assert executed(model, 3, (4, 4)) == executed(plain, 3, (4, 4)) != executed(frozen, 3, (4, 4))
    assert layer_flops(model, 3, (4, 4), methods=[method]) == layer_flops(frozen, 3, (4, 4))
    assert kept_after_forward(model, 3, (4, 4), methods=[method]) == kept_after_forward(frozen, 3, (4, 4))
    assert all(p.requires_grad for p in model.parameters())
    costs = compare(model, [method], Net, batch_size=3, input_size=(4, 4), steps=1)
    assert costs["method"].executed == executed(frozen, 3, (4, 4))
    assert costs["method"].measured is not None


def test_the_warm_up_is_in_fp32_so_that_it_chooses_the_same_everywhere():
    WatchesPrecision.seen.clear()
    executed(Net(), 4, (4, 4), methods=[WatchesPrecision()], precision="bf16")
    first, *counted = WatchesPrecision.seen
    assert not first
    assert counted
    assert all(counted)


def test_warm_up_mean_and_loss_of_a_plain_object():
    model = Net()
    method = EveryOther(model)
    found = executed(model, 4, (4, 4), methods=[method])
    assert method.steps == []  # only the methods of copies were called
    assert StepMethods([method]).warmup_steps == StepMethods([method]).cost_steps == 2
    own = 2 * 5 * 20 * 5  # the additional loss is computed once per batch
    assert found.forward_flops == 2 * 48 * 20 + 2 * 20 * 5 + own / 4
    # the head's input gradient is computed only in every other step
    backward = 2 * 20 * 5 + 2 * own / 4
    assert found.backward_flops == (backward + backward + 2 * 20 * 5 + 2 * 48 * 20) / 2


def test_an_object_that_is_not_applied_yet_is_applied_to_a_copy():
    model, method, frozen = Net(), Applies(), Net()
    frozen.body.requires_grad_(False)
    assert executed(model, 3, (4, 4), methods=[method]) == executed(frozen, 3, (4, 4))
    assert method.applied is None
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.first(1, "slow")
@pytest.mark.parametrize("methods", [[LBPWHT, LoRA, LastStage], [LastStage, LoRA, LBPWHT]])
def test_the_order_of_the_list_changes_nothing(methods: list[Any]):
    """Adapters are applied before low-rank backward methods, which also apply to the adapted layers."""
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, embed_dim=48, num_classes=5)
    found = executed(model, 2, (64, 64), methods=[m() for m in methods])
    by_hand = [LastStage(), LoRA(), LBPWHT()]
    for method in by_hand:
        method.apply(model)
    assert found == executed(model, 2, (64, 64), methods=by_hand)


def test_a_training_step_calls_what_an_object_has():
    model = Net()
    method = EveryOther(model)
    step = TrainingStep(model, [method, object()], StepSpec(2, (4, 4)), first_step=3)
    step()
    step()
    assert method.steps == [3, 4]
    assert step.steps == 5
    assert torch.isfinite(model.head.weight).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": "fp8"}, "precision must be one of fp32, bf16, fp16, got fp8."),
        ({"batch_size": -1}, "batch_size must be an integer >= 1, got -1."),
        ({"in_chans": 0}, "in_chans must be an integer >= 1, got 0."),
        ({"input_size": (4, 4, 4)}, "input_size must be a pair (height, width) of integers >= 1, got (4, 4, 4)."),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str):
    with pytest.raises(SettingError) as error:
        StepSpec(**{"batch_size": 2, "input_size": (4, 4), **settings})
    assert str(error.value).startswith(message)


def test_what_a_step_spec_derives():
    spec = StepSpec(2, (4, 6), "bf16", in_chans=1)
    assert spec.dtype is torch.bfloat16
    images, labels = spec.example(torch.nn.Linear(2, 2), 3)
    assert isinstance(images, torch.Tensor)
    assert (images.shape, labels.tolist()) == ((3, 1, 4, 6), [0, 0, 0])
    assert StepSpec(2, (4, 6)).dtype is None
