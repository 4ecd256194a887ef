"""Tests of the forms of the frozen prefix: folded BatchNorm in float64, and the selection of a form."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from efficient_ft.cost.run_flops import FlopsCounter
from efficient_ft.methods import LBPWHT, HeadOnly, LastStage
from efficient_ft.models import prefix_form
from efficient_ft.models.frozen_batch_norm import freeze_batch_norm
from efficient_ft.models.prefix import find_prefix
from efficient_ft.models.prefix_form import ALLOWED, Form, choose_form, find_folds, folded, relative_deviation
from tests.models.test_prefix import gradients, images, network


def some_statistics(model: nn.Module) -> None:
    """Set the parameters and statistics of BatchNorm layers to values that are typical after pretraining."""
    generator = torch.Generator().manual_seed(5)
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            centered, positive = (norm.running_mean, -0.3), (norm.running_var, 0.5)
            for tensor, low in (centered, positive, (norm.weight, 0.5), (norm.bias, -0.3)):
                tensor.data.uniform_(low, low + 0.8, generator=generator)


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 3]), st.sampled_from([1, 2]), st.booleans(), st.booleans())
def test_a_folded_convolution_is_convolution_and_normalization(
    groups: int, kernel: int, stride: int, bias: bool, affine: bool
) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 8, kernel, stride, kernel // 2, groups=groups, bias=bias).double()
    norm = nn.BatchNorm2d(8, affine=affine).double().eval()
    norm.running_mean.uniform_(-1, 1)
    norm.running_var.uniform_(0.1, 2)
    if affine:
        nn.init.uniform_(norm.weight, -1, 1)
        nn.init.uniform_(norm.bias, -1, 1)
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    weight, shift = folded(conv, norm)
    found = F.conv2d(x, weight, shift, stride, kernel // 2, groups=groups)
    torch.testing.assert_close(found, norm(conv(x)), rtol=1e-12, atol=1e-12)


class Branching(nn.Module):
    """A network with a convolution that runs once, a convolution that runs twice, and a convolution before a ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.once, self.twice, self.alone = (nn.Conv2d(4, 4, 1) for _ in range(3))
        self.norm, self.norm2, self.norm3 = (nn.BatchNorm2d(4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.once(x))
        x = self.norm2(self.twice(self.twice(x)))
        return self.norm3(self.alone(x).relu())


def test_only_what_a_batch_norm_takes_directly_and_once_is_folded() -> None:
    model = Branching()
    freeze_batch_norm(model)
    x = torch.randn(2, 4, 3, 3)
    folds = find_folds(model, lambda: model(x))
    assert len(folds) == 1
    some_statistics(model)
    with torch.no_grad():
        expected = model(x)
        with folds.active():
            assert "forward" in vars(model.norm)
            torch.testing.assert_close(model(x), expected)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.slow
@pytest.mark.first(1, "exhaustive")
@pytest.mark.parametrize(
    ("name", "size", "at_least"),
    [("efficientformer_l1", 224, 20), ("efficientnet_lite0", 64, 40), ("resnet18", 64, 15), ("mobilevit_s", 64, 15)],
)
def test_a_folded_prefix_computes_the_same_up_to_rounding(name: str, size: int, at_least: int) -> None:
    model = network(name, [LastStage()], size)
    some_statistics(model)
    prefix = find_prefix(model, images(size, 2))
    x = images(size)
    exact = prefix.features(x)
    expected = gradients(model, x)
    prefix.form = Form.FOLDED
    found = prefix.features(x)
    assert prefix._folds is not None
    assert len(prefix._folds) >= at_least
    assert not torch.equal(found, exact)
    assert (found - exact).norm() < ALLOWED["folded"] * exact.norm()
    assert found.stride() == exact.stride()
    again = gradients(model, x)
    assert all(torch.equal(again[key], expected[key]) for key in expected), "the network is as it was"


def test_bf16_keeps_the_type_of_the_features() -> None:
    model = network("vit_tiny_patch16_224", [HeadOnly()])
    prefix = find_prefix(model, images(64, 2))
    exact = prefix.features(images(64))
    prefix.form = Form.BF16
    found = prefix.features(images(64))
    assert found.dtype == exact.dtype == torch.float32
    assert 1e-4 < (found - exact).norm() / exact.norm() < ALLOWED["bf16"]


class Fusable(nn.Module):
    """A network with layers before activations. The output of `shared` is also used without the activation."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(3, 8, 3, 2, 1, groups=1), nn.BatchNorm2d(8), activation
        self.shared, self.act2 = nn.Conv2d(8, 8, 1, bias=False), nn.ReLU()
        self.linear, self.act3 = nn.Linear(8, 8), nn.GELU()
        self.shares = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.conv(x)))
        y = self.shared(x)
        x = self.act2(y) + y if self.shares else self.act2(y)
        return self.act3(self.linear(x.mean((2, 3))))


ACTIVATIONS = [nn.ReLU(inplace=True), nn.ReLU6(), nn.SiLU(), nn.Hardswish(), nn.GELU(), nn.GELU("tanh"), nn.Tanh()]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
def test_a_layer_and_its_activation_are_one_operation(activation: nn.Module) -> None:
    torch.manual_seed(0)
    model = Fusable(activation).eval()
    freeze_batch_norm(model)
    some_statistics(model)
    x = 3 * images(8)
    with torch.no_grad():
        expected = model.double()(x.double())
        model.float()
        folds = find_folds(model, lambda: model(x[:1]))
        assert len(folds) == 1
        with folds.active(torch.float32):
            assert relative_deviation(model(x), expected) < 1e-5
            assert isinstance(vars(model.linear)["forward"], prefix_form._LinearKernel)
            assert ("forward" in vars(model.act)) == (type(activation) is not nn.Tanh)
        with torch.autocast("cpu", torch.bfloat16):
            plain = relative_deviation(model(x), expected)
            with folds.active(torch.bfloat16):
                assert model(x).dtype == torch.bfloat16
                assert relative_deviation(model(x), expected) < 1.3 * plain


def test_an_output_that_is_used_twice_is_not_replaced_by_its_activation() -> None:
    model = Fusable(nn.ReLU()).eval()
    model.shares = True
    freeze_batch_norm(model)
    x = images(8)
    with torch.no_grad():
        expected = model(x)
        with find_folds(model, lambda: model(x[:1])).active(torch.float32):
            torch.testing.assert_close(model(x), expected)


def test_an_in_place_addition_ends_a_chain() -> None:
    """In ResNets, the shortcut is added in place to the output of a BatchNorm layer before the activation."""
    model = network("resnet18", [LastStage()])
    prefix = find_prefix(model, images(64, 2))
    folds = find_folds(model, lambda: prefix.features(images(64, 1)))
    # The activations after convolutions are fused: one in the stem and one in each of the six blocks.
    assert sum(chain.activation is not None for chain in folds._chains) == 7


@pytest.mark.slow
def test_layers_with_a_low_rank_backward_pass_are_folded() -> None:
    """In the prefix, only their forward pass runs, which is the one of the layers that they replace."""
    model = network("efficientformer_l1", [LastStage(), LBPWHT(bases="l1", order=4)], 224)
    prefix = find_prefix(model, images(224, 2))
    folds = find_folds(model, lambda: prefix.features(images(224, 1)))
    assert len(folds) == 26
    assert sum(chain.activation is not None for chain in folds._chains) == 13


@pytest.mark.slow
def test_a_method_that_another_library_binds_to_a_layer_is_not_folded() -> None:
    model = network("efficientformer_l1", [LastStage(), LBPWHT(bases="l1", order=4)], 224)
    layer: Any = next(m for m in model.modules() if isinstance(m, nn.Conv2d) and getattr(m, "same_values", False))
    assert prefix_form._can_be_combined(layer)
    layer.forward = MethodType(lambda self, x: 2 * type(self).forward(self, x), layer)
    assert not prefix_form._can_be_combined(layer)


def test_weights_that_change_are_folded_again() -> None:
    model = network("resnet18", [LastStage()])
    prefix = find_prefix(model, images(64, 2))
    prefix.form = Form.BF16
    before = prefix.features(images(64))
    with torch.no_grad():
        model.conv1.weight.mul_(0.5)
        after = prefix.features(images(64))
    prefix.form = Form.FP32
    assert not torch.equal(before, after)
    assert relative_deviation(after, prefix.features(images(64))) < 0.02


def test_a_batch_in_parts_gives_the_same_features(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network("resnet18", [LastStage()])
    prefix = find_prefix(model, images(64, 2))
    prefix.form = Form.BF16
    whole = prefix.features(images(64))
    assert prefix._folds is not None
    monkeypatch.setattr(prefix_form, "_PART_BYTES", 2 * prefix._folds._widest)
    assert [len(part) for part in prefix._folds.parts(images(64))] == [1, 1, 1]
    parts = prefix.features(images(64))
    assert parts.stride() == whole.stride()
    assert relative_deviation(parts, whole) < 0.01


@pytest.mark.parametrize("channels_last", [False, True])
def test_bf16_keeps_the_memory_layout_of_the_network(channels_last: bool) -> None:
    model = network("resnet18", [LastStage()], channels_last=channels_last)
    prefix = find_prefix(model, images(64, 2))
    exact = prefix.features(images(64))
    prefix.form = Form.BF16
    assert prefix.features(images(64)).stride() == exact.stride()


def test_the_flops_of_fused_layers_are_those_of_the_layers() -> None:
    model = network("resnet18", [LastStage()])
    prefix = find_prefix(model, images(64, 2))
    counts = []
    for form in (Form.FP32, Form.BF16):
        prefix.form = form
        prefix.features(images(64))
        with FlopsCounter() as counter:
            prefix.features(images(64))
        counts.append(counter.flops)
    assert counts[0] == counts[1] > 0


def outputs(deviation: float) -> dict[Form, Tensor]:
    exact = torch.tensor([3.0, 4.0])
    return {Form.FP32: exact, Form.FOLDED: exact, Form.BF16: exact * (1 + deviation)}


@pytest.mark.parametrize(
    ("times", "deviation", "chosen"),
    [((1.0, 0.5, 0.2), 0.01, Form.BF16), ((1.0, 0.5, 0.2), 0.06, Form.FOLDED), ((1.0, 0.95, 0.92), 0.01, Form.FP32),
     ((1.0, 0.8, 0.78), 0.01, Form.FOLDED)],
)  # fmt: skip
def test_the_fastest_form_that_is_close_enough_is_chosen(
    monkeypatch: pytest.MonkeyPatch, times: tuple[float, ...], deviation: float, chosen: Form
) -> None:
    clock = 0.0

    def run(form: Form) -> Tensor:
        nonlocal clock
        clock += times[list(Form).index(form)]
        return outputs(deviation)[form]

    monkeypatch.setattr("efficient_ft.models.prefix_form.time.perf_counter", lambda: clock)
    form, seconds, deviations = choose_form(run, list(Form))
    assert form is chosen
    assert seconds == pytest.approx(dict(zip(("fp32", "folded", "bf16"), times, strict=True)))
    assert deviations["bf16"] == pytest.approx(deviation, rel=1e-4)


@pytest.mark.parametrize(
    ("time", "deviation", "chosen"),
    [(0.5, 0.01, Form.BF16), (1.05, 0.01, Form.BF16), (1.2, 0.01, Form.FP32), (0.5, 0.02, Form.FP32)],
    ids=["faster", "equal up to noise", "slower", "less exact than the precision of the run"],
)
def test_in_bf16_the_folded_form_is_chosen_unless_it_is_slower_or_less_exact(
    monkeypatch: pytest.MonkeyPatch, time: float, deviation: float, chosen: Form
) -> None:
    clock = 0.0
    exact = torch.tensor([3.0, 4.0])

    def run(form: Form) -> Tensor:
        nonlocal clock
        clock += time if form is Form.BF16 else 1.0
        return exact * (1 + (deviation if form is Form.BF16 else 0.01))

    monkeypatch.setattr("efficient_ft.models.prefix_form.time.perf_counter", lambda: clock)
    form, _, deviations = choose_form(run, [Form.FP32, Form.BF16], exact)
    assert form is chosen
    assert deviations == pytest.approx({"fp32": 0.01, "bf16": deviation}, rel=1e-3)
