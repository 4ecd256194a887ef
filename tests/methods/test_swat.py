"""Tests of SWAT: pruned layers, gradients of dropped weights, export of dropped weights as zeros, and resuming."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efficient_ft.methods import (
    SWAT,
    Method,
    plain_state_dict,
)
from efficient_ft.testing import batch_of, gradients, model_of

FIRST = {"vit": None, "resnet": "conv1", "efficientformer": "stem.conv1", "swinv2": None}


@pytest.mark.parametrize("name", FIRST)
def test_swat_leaves_the_first_layer_and_reaches_all_others(name: str) -> None:
    model, method = model_of(name), SWAT(0.7)
    report = method.apply(model)
    first = FIRST[name]
    assert first is None or str(report.skipped[first]) == "dense, as published"
    gradients(model, name)
    state = method.state_dict()["of"]
    assert {f"{layer}.weight" for layer in report.touched} == {place for place in state if place.endswith(".weight")}
    covered = {n for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)} - set(report.skipped)
    assert {n for n in covered if not n.startswith(("patch_embed", "head"))} <= set(report.touched)
    # A layer uses sparse weights in training and in evaluation. The first layer uses dense weights.
    for layer, dense in ((report.touched[0], False), (first, True)):
        if layer is None:
            continue
        module = model.get_submodule(layer)
        seen: list[tuple[Tensor, Tensor]] = []
        module.register_forward_hook(lambda m, args, y, seen=seen: seen.append((args[0].detach(), y.detach())))
        for training in (True, False):
            model.train(training)
            model(batch_of(name)[0])
        for x, y in seen:
            used = module.weight
            if not dense:
                threshold = used.abs().flatten().sort().values[int(used.numel() * 0.7)]
                used = used * (used.abs() >= threshold)
            like = (
                F.linear(x, used, module.bias)
                if isinstance(module, nn.Linear)
                else module._conv_forward(x, used, module.bias)
            )
            torch.testing.assert_close(y, like)


def test_swat_stopped_and_resumed_equals_a_straight_run() -> None:
    def trained(model: nn.Module, method: Method, steps: range) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in steps:
            method.step_begin(step)
            gradients(model, "resnet", seed=step)
            optimizer.step()
            method.step_end()

    straight, broken, resumed = model_of("resnet"), model_of("resnet"), model_of("resnet")
    methods = [SWAT(refresh_interval=4) for _ in range(3)]
    for model, method in zip((straight, broken, resumed), methods, strict=True):
        method.apply(model)
    trained(straight, methods[0], range(10))
    trained(broken, methods[1], range(6))
    resumed.load_state_dict(broken.state_dict())
    methods[2].load_state_dict(methods[1].state_dict())
    trained(resumed, methods[2], range(6, 10))
    assert methods[0].state_dict() == methods[2].state_dict()
    for (name, one), other in zip(straight.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_swat_s_dropped_weights_train_and_are_exported_as_zeros() -> None:
    model, method = model_of("resnet"), SWAT(0.75)
    method.apply(model)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    gradients(model, "resnet")
    assert model.layer1[0].conv2.weight.grad.ne(0).all()
    exported = plain_state_dict(model, [method])
    weight = exported["layer1.0.conv2.weight"]
    assert (weight == 0).sum() == int(weight.numel() * 0.75)
    assert torch.equal(exported["conv1.weight"], before["conv1.weight"])
    assert torch.equal(model.layer1[0].conv2.weight, before["layer1.0.conv2.weight"])
