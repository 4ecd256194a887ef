"""Tests of the optimizer: its schedule, its parameter groups, and parameters whose first gradient comes late."""

from __future__ import annotations

import itertools
import math

import pytest
import timm
import torch

import efficient_ft.models.small  # noqa: F401  registers vit_digits
from efficient_ft.config import OptimConfig
from efficient_ft.core.errors import UserError
from efficient_ft.training.optimizer import build_optimizer, lr_factor, warmup_steps


def optim(**changes) -> OptimConfig:
    return OptimConfig(
        **{"name": "adamw", "lr": 1e-3, "weight_decay": 0.0, "warmup_steps": 0, "label_smoothing": 0.0, **changes}
    )


def test_warm_up_is_linear_and_the_cosine_ends_at_its_floor():
    settings = optim(warmup_steps=10, warmup_start_factor=0.1, min_lr_ratio=0.2)
    factors = [lr_factor(step, 110, settings) for step in range(111)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[5] == pytest.approx(0.55)
    assert factors[10] == pytest.approx(1.0)
    assert factors[60] == pytest.approx(0.6)  # middle of the decay
    assert factors[110] == pytest.approx(0.2)
    assert all(b < a for a, b in itertools.pairwise(factors[10:]))


def test_a_constant_schedule_stays_after_its_warm_up():
    settings = optim(warmup_steps=2, warmup_start_factor=0.5, schedule="constant")
    assert [lr_factor(s, 5, settings) for s in range(5)] == pytest.approx([0.5, 0.75, 1, 1, 1])


def test_a_constant_schedule_decays_in_its_last_steps():
    settings = optim(warmup_steps=2, schedule="constant", decay_steps=4, min_lr_ratio=0.5)
    assert [lr_factor(s, 9, settings) for s in range(2, 9)] == pytest.approx([1, 1, 1, 0.9, 0.8, 0.7, 0.6])
    whole = optim(warmup_steps=2, schedule="constant", decay_steps=100, min_lr_ratio=0.0)
    assert [lr_factor(s, 6, whole) for s in range(2, 6)] == pytest.approx([0.8, 0.6, 0.4, 0.2])


def test_a_run_that_is_cut_within_its_warm_up_does_not_leave_it():
    settings = optim(warmup_steps=1000, warmup_start_factor=0.001)
    assert lr_factor(19, 20, settings) < 1
    assert math.isfinite(lr_factor(20, 20, settings))


@pytest.mark.parametrize(("total", "warmup"), [(1, 0), (3, 0), (20, 5), (399, 99), (400, 100), (10**6, 100)])
def test_without_a_number_the_warm_up_is_a_quarter_of_the_run_and_at_most_100_steps(total, warmup):
    assert warmup_steps(optim(warmup_steps=None), total) == warmup
    factors = [lr_factor(step, total, optim(warmup_steps=None)) for step in (warmup, total)]
    assert factors[0] == 1
    assert math.isfinite(factors[1])


def test_only_what_may_train_is_in_the_optimizer():
    model = timm.create_model("vit_digits")
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    groups = build_optimizer(model, optim(weight_decay=0.1)).param_groups
    assert {id(p) for g in groups for p in g["params"]} == {id(p) for p in model.head.parameters()}
    assert {g["weight_decay"] for g in groups if model.head.bias in set(g["params"])} == {0.0}
    assert {g["weight_decay"] for g in groups if model.head.weight in set(g["params"])} == {0.1}


def test_nothing_to_train_is_refused():
    with pytest.raises(UserError, match="All parameters are frozen"):
        build_optimizer(timm.create_model("vit_digits").requires_grad_(False), optim())


def test_layer_decay_gives_deeper_layers_a_larger_rate():
    model = timm.create_model("vit_digits")
    rates = {
        id(p): g["initial_lr"] for g in build_optimizer(model, optim(layer_decay=0.5)).param_groups for p in g["params"]
    }
    per_block = [rates[id(block.attn.qkv.weight)] for block in model.blocks]
    assert [b / a for a, b in itertools.pairwise(per_block)] == pytest.approx([2.0] * 3)
    assert rates[id(model.head.weight)] == pytest.approx(1e-3)
    assert rates[id(model.cls_token)] == pytest.approx(per_block[0] / 2)


def test_the_head_has_a_rate_of_its_own():
    model = timm.create_model("vit_digits")
    for settings, block in (({}, 1e-3), ({"layer_decay": 0.5}, 5e-4)):
        groups = build_optimizer(model, optim(head_lr_mult=10.0, weight_decay=0.1, **settings)).param_groups
        rates = {id(p): (g["initial_lr"], g["weight_decay"]) for g in groups for p in g["params"]}
        assert len(rates) == sum(len(g["params"]) for g in groups) == len(list(model.parameters()))
        assert rates[id(model.head.weight)] == (pytest.approx(1e-2), 0.1)
        assert rates[id(model.head.bias)] == (pytest.approx(1e-2), 0.0)
        assert rates[id(model.blocks[-1].attn.qkv.weight)] == (pytest.approx(block), 0.1)


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_every_optimizer_by_its_name(name):
    model = timm.create_model("vit_digits")
    made = build_optimizer(model, optim(name=name))
    assert type(made).__name__.lower() == name


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_a_parameter_may_get_its_first_gradient_late(name):
    """A parameter without a gradient stays unchanged until its first gradient, as for an unused expert."""
    settings = optim(name=name, weight_decay=0.1, **({"momentum": 0.9} if name == "sgd" else {}))
    found = []
    for precision in ("fp32", "bf16", "fp16"):  # fp16 does not use the fused kernel
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        optimizer = build_optimizer(model, settings, precision)
        assert optimizer.param_groups[0]["fused"] == (precision != "fp16")
        for step in range(4):
            optimizer.zero_grad()
            x = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))
            (model if step > 1 else model[0])(x).square().sum().backward()
            before = model[1].weight.clone()
            optimizer.step()
            assert torch.equal(model[1].weight, before) == (step < 2)
        found.append([p.detach() for p in model.parameters()])
    for fused, also_fused, plain in zip(*found, strict=True):
        torch.testing.assert_close(fused, plain)
        assert torch.equal(fused, also_fused)


@pytest.mark.parametrize("name", ["adamw", "adam"])
@pytest.mark.parametrize("bits", [8, 4])
def test_low_bit_states_have_the_groups_of_32_bits(name, bits):
    model = timm.create_model("vit_digits")
    settings = {"name": name, "layer_decay": 0.5, "head_lr_mult": 10.0, "weight_decay": 0.1, "betas": (0.8, 0.9)}
    plain, low = (build_optimizer(model, optim(**settings, state_bits=b)) for b in (32, bits))
    assert type(low).__name__.lower() == f"lowbit{name}"
    assert low.bits == bits
    for group, expected in zip(low.param_groups, plain.param_groups, strict=True):
        assert [id(p) for p in group["params"]] == [id(p) for p in expected["params"]]
        assert all(group[key] == expected[key] for key in ("lr", "initial_lr", "weight_decay", "betas", "eps"))


@pytest.mark.parametrize("settings", [{}, {"state_bits": 8}, {"name": "sgd"}])
def test_the_backward_pass_steps(settings):
    """Steps in the backward pass give the same weights as steps after it, including layer decay and head_lr_mult."""
    settings = {"layer_decay": 0.5, "head_lr_mult": 10.0, "weight_decay": 0.1, **settings}
    trained = []
    for in_backward in (False, True):
        torch.manual_seed(0)
        model = timm.create_model("vit_digits")
        optimizer = build_optimizer(model, optim(**settings, in_backward=in_backward))
        for step in range(2):
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] / (1 + step)
            images = torch.randn(2, *model.pretrained_cfg["input_size"], generator=torch.Generator().manual_seed(step))
            model(images).square().sum().backward()
            assert all((p.grad is None) == in_backward for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        trained.append(model.state_dict())
    assert all(torch.equal(value, trained[1][key]) for key, value in trained[0].items())
