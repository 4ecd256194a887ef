"""Tests that frozen BatchNorm equals torch's BatchNorm in evaluation mode and saves fewer tensors."""

from __future__ import annotations

import copy
import pickle

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from efficient_ft.models.frozen_batch_norm import FrozenBatchNorm2d, freeze_batch_norm


def lively(channels: int, **kwargs) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, **kwargs).double()
    generator = torch.Generator().manual_seed(channels)
    for t in (*norm.parameters(), norm.running_mean, norm.running_var):
        t.data = torch.rand(t.shape, generator=generator, dtype=torch.float64) + 0.5
    return norm


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    shape=st.tuples(*(st.integers(1, 5) for _ in range(4))),
    affine=st.booleans(),
    needs=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    channels_last=st.booleans(),
)
def test_gradients_equal_those_of_an_evaluating_batch_norm(shape, affine, needs, channels_last):
    norm = lively(shape[1], affine=affine)
    for p, need in zip(norm.parameters(), needs[1:], strict=False):
        p.requires_grad_(need)
    x = torch.randn(shape, dtype=torch.float64)
    x = (x.to(memory_format=torch.channels_last) if channels_last else x).requires_grad_(needs[0])
    wanted = [t for t in (x, *norm.parameters()) if t.requires_grad]
    expected_y = copy.deepcopy(norm).eval()(x)
    frozen = copy.deepcopy(norm)
    freeze_batch_norm(nn.Sequential(frozen))
    y = frozen.train()(x)
    assert type(frozen) is FrozenBatchNorm2d
    assert torch.equal(y, expected_y)
    if not wanted:
        assert not y.requires_grad
        return
    g = torch.randn(shape, dtype=torch.float64)
    norm.eval()
    expected = torch.autograd.grad((norm(x) * g).sum(), [t for t in (x, *norm.parameters()) if t.requires_grad])
    found = torch.autograd.grad((y * g).sum(), [t for t in (x, *frozen.parameters()) if t.requires_grad])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(frozen.running_mean, norm.running_mean)


@pytest.mark.parametrize("trains", [True, False])
def test_the_input_is_kept_only_for_the_scale_s_gradient(trains):
    frozen = lively(3)
    freeze_batch_norm(nn.Sequential(frozen))
    frozen.weight.requires_grad_(trains)
    kept = []
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        frozen(x)
    assert (x.numel() in kept) == trains
    assert trains or max(kept) == 3


def test_a_model_keeps_its_names_copies_and_pickles():
    model = timm.create_model("resnet10t")
    before = list(model.state_dict())
    names = freeze_batch_norm(model)
    assert names == [n for n, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)]
    assert list(model.state_dict()) == before
    model.train()
    freeze_batch_norm(model)
    statistics = model.bn1.running_mean.clone()
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(torch.randn(2, 3, 32, 32)).sum().backward()
        assert torch.equal(other.bn1.running_mean, statistics)


def test_timm_s_normalization_with_a_fused_activation():
    plain = timm.create_model("mobilenetv2_035").double()
    for name, buffer in plain.named_buffers():
        if "running" in name:
            buffer.uniform_(0.5, 1.5)
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(not ("bn" in name and name.endswith("weight")))
    frozen = copy.deepcopy(plain).train()
    names = [n for n, m in plain.named_modules() if isinstance(m, nn.BatchNorm2d)]
    assert freeze_batch_norm(frozen) == freeze_batch_norm(frozen) == names
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    y, expected = frozen.train()(x), plain.eval()(x)
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    expected.sum().backward()
    for (name, p), q in zip(plain.named_parameters(), frozen.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None and q.grad is not None:
            torch.testing.assert_close(q.grad, p.grad)
    torch.testing.assert_close(frozen.bn1.running_mean, plain.bn1.running_mean)

    kept = []
    x = torch.randn(2, 16, 8, 8, dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        frozen.bn1(x)
    assert kept.count(x.numel()) == 1  # only ReLU6 saves a tensor of this size


def test_bf16_autocast_gives_fp32_parameter_gradients():
    frozen = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    freeze_batch_norm(frozen)
    with torch.autocast("cpu", torch.bfloat16):
        y = frozen.train()(torch.randn(2, 3, 5, 5))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert frozen[1].weight.grad.dtype == torch.float32
