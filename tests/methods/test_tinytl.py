"""Tests of TinyTL: outputs, positions of lite residuals, trainable parameters and exports."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models._efficientnet_builder import decode_arch_def, round_channels
from timm.models.efficientnet import EfficientNet
from torch import Tensor, nn

from efficient_ft.config import ModelConfig
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.methods import LBPWHT, BackRazor, Blocks, HeadOnly, LoRA, TinyTL, apply_methods, plain_state_dict
from efficient_ft.methods.adapters.lite import LiteResidual
from efficient_ft.models.frozen_batch_norm import freeze_batch_norm
from efficient_ft.models.view import view
from efficient_ft.training.output import export


def mobile(**changes) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("mobilenetv2_035", num_classes=5, **changes)


def blocks_with(model: nn.Module) -> dict[str, LiteResidual]:
    found = ((n, m) for n, m in model.named_modules() if isinstance(m, LiteResidual))
    return {n.removesuffix(".lite_residual"): m for n, m in found}


@pytest.mark.parametrize(("stride", "size"), [(1, (14, 10)), (2, (7, 5)), (1, (1, 1))])
def test_the_module_by_hand(stride, size):
    torch.manual_seed(0)
    module = LiteResidual(16, 24, 5, 2, stride).double()
    assert not module(torch.randn(2, 16, *size, dtype=torch.float64), torch.Size(size)).any()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.rand_like(p) + 0.1)

    def convolved(x: Tensor, weight: Tensor, **more: int) -> Tensor:
        mean, variance = weight.mean((1, 2, 3), keepdim=True), weight.var((1, 2, 3), correction=0, keepdim=True)
        return F.conv2d(x, (weight - mean) / (variance + 1e-6).sqrt(), **more)

    def normalized(x: Tensor, norm: nn.GroupNorm) -> Tensor:
        grouped = x.reshape(len(x), -1, 8 * x.shape[2] * x.shape[3])
        deviation = (grouped.var(2, correction=0, keepdim=True) + 1e-5).sqrt()
        grouped = (grouped - grouped.mean(2, keepdim=True)) / deviation
        return grouped.reshape(x.shape) * norm.weight[:, None, None] + norm.bias[:, None, None]

    x = torch.randn(2, 16, *size, dtype=torch.float64)
    h, w = (side // 2 for side in size)
    pooled = x if size == (1, 1) else x[:, :, : 2 * h, : 2 * w].reshape(2, 16, h, 2, w, 2).mean((3, 5))
    y = normalized(convolved(pooled, module.conv1.weight, padding=2, groups=2, stride=stride), module.norm1).relu()
    y = normalized(convolved(y, module.conv2.weight), module.norm2)
    expected = F.interpolate(y, size=(9, 8), mode="bilinear")
    torch.testing.assert_close(module(x, torch.Size((9, 8))), expected)


def test_where_modules_go_and_what_trains():
    model = mobile()
    applied = TinyTL().apply(model)
    found = blocks_with(model)
    assert list(found) == [b for b in view(model).blocks if b != "blocks.0.0"]
    assert {n: str(why) for n, why in applied.skipped.items()} == {
        "blocks.0.0": "not an inverted residual with expansion"
    }
    # From block 5.1 on, the inputs are at 1/32 of the image size. These blocks use kernels of size 3.
    kernels = {name: m.conv1.kernel_size[0] for name, m in found.items()}
    coarse = {"blocks.5.1", "blocks.5.2", "blocks.6.0"}
    assert {name for name, kernel in kernels.items() if kernel == 3} == coarse
    assert {kernels[name] for name in kernels.keys() - coarse} == {5}
    trains = {n for n, p in model.named_parameters() if p.requires_grad}
    own = {n for n in trains if "lite_residual" not in n}
    assert own == {n for n, _ in model.named_parameters() if n.endswith("bias") and "lite" not in n} | {
        "classifier.weight"
    }
    assert len(trains) - len(own) == 6 * len(found)
    model(torch.randn(2, 3, 32, 32)).sum().backward()  # The last feature maps have one pixel.
    assert {n for n, p in model.named_parameters() if p.grad is not None} == trains
    assert all(m.weight.grad.any() for m in model.modules() if isinstance(m, nn.GroupNorm) and not m.weight.any())


def test_kernels_of_several_sizes_side_by_side():
    model = timm.create_model("mixnet_s", num_classes=5)
    TinyTL().apply(model)
    # Only the inputs with 200 channels are at 1/32 of the image size.
    found = {m.conv1.in_channels: m.conv1.kernel_size[0] for m in blocks_with(model).values()}
    assert found == {16: 5, 24: 5, 40: 5, 80: 5, 120: 5, 200: 3}
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 5)


def test_it_keeps_to_the_part_that_the_selection_leaves():
    model = mobile()
    apply_methods(model, [TinyTL(), Blocks([-1])])
    assert list(blocks_with(model)) == ["blocks.6.0"]
    trains = {n for n, p in model.named_parameters() if p.requires_grad and "lite" not in n}
    assert {n for n in trains if n.startswith("blocks.")} == {f"blocks.6.0.bn{k}.bias" for k in (1, 2, 3)}
    with pytest.raises(UserError, match=r"tinytl: all .* of mobilenetv2_035 are frozen by the selection"):
        apply_methods(mobile(), [TinyTL(), HeadOnly()])


@pytest.mark.parametrize("frozen_first", [True, False])
def test_norms_are_grouped_whatever_they_are_frozen_to(frozen_first):
    model, other = mobile(), mobile()
    if frozen_first:
        freeze_batch_norm(model)
    method = TinyTL()
    method.apply(model)
    freeze_batch_norm(model)
    TinyTL().apply(other)
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(model.train()(images), other.train()(images))
    torch.testing.assert_close(model.eval()(images), model.train()(images))  # without batch statistics


def test_remove_gives_the_filters_back():
    model, plain = mobile(), mobile()
    method = TinyTL()
    method.apply(model)
    assert model.conv_stem.weight.mean((1, 2, 3)).abs().max() < 1e-6
    method.remove(model)
    assert model.state_dict().keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)


def test_convolutions_without_a_norm_keep_their_weights():
    model, plain = (timm.create_model("efficientnet_b0", num_classes=5) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    TinyTL().apply(model)
    block, before = model.blocks[1][0], plain.blocks[1][0]
    assert torch.equal(block.se.conv_reduce.weight, before.se.conv_reduce.weight)
    assert not torch.equal(block.conv_pw.weight, before.conv_pw.weight)


@pytest.mark.slow
def test_a_run_s_result_is_loaded_with_its_modules(tmp_path: Path):
    model = mobile()
    methods = [TinyTL(kernel_size=3), BackRazor()]
    apply_methods(model, methods)
    with torch.no_grad():
        for m in blocks_with(model).values():
            m.norm2.weight.uniform_(0.5, 1.0)
    config = ModelConfig(name="mobilenetv2_035", pretrained=False)
    spec = InputSpec(size=(64, 64), mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bilinear")
    weights = plain_state_dict(model, methods)
    export.save(tmp_path / export.NAME, weights, config, list("abcde"), spec, {"epoch": 1}, methods)
    trained = export.load(tmp_path)
    assert trained.notes == {"epoch": "1", "efficient_ft": trained.notes["efficient_ft"]}
    assert {m.conv1.kernel_size for m in blocks_with(trained.model).values()} == {(3, 3)}
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(trained.model(images), model.eval()(images))
    assert not any(p.requires_grad for p in trained.model.parameters())


@pytest.mark.slow
def test_other_methods_leave_the_modules_alone():
    model = mobile()
    apply_methods(model, [TinyTL(), LBPWHT(order=2)])
    assert all(type(m.conv2) is timm.layers.StdConv2d for m in blocks_with(model).values())
    assert not any("lite_residual" in layer.name for layer in view(model).layers)
    with pytest.raises(UserError, match="lora and tinytl both add modules"):
        apply_methods(mobile(), [TinyTL(), LoRA(targets="all")])
    with pytest.raises(UserError, match=r"tinytl has been applied .* both methods add modules"):
        TinyTL(kernel_size=3).apply(model)


def test_models_and_settings_that_will_not_do():
    with pytest.raises(UserError, match=r"tinytl: the method requires .* The blocks of resnet18 are"):
        TinyTL().apply(timm.create_model("resnet18"))
    with torch.device("meta"):
        universal = timm.create_model("mobilenetv4_conv_small")
    with pytest.raises(
        UserError,
        match=r"timm's class InvertedResidual \(.* are 5 ConvBnAct and 12 UniversalInvertedResidual\.",
    ):
        TinyTL().apply(universal)
    blocks = [["ds_r1_k3_s1_c16"], ["ir_r1_k3_s2_e2_c20"]]
    odd = EfficientNet(decode_arch_def(blocks), 5, 32, round_chs_fn=partial(round_channels, divisor=4))
    names = list(odd.state_dict())
    for norm in ("group", "batch"):
        with pytest.raises(UserError, match="20 channels, but GroupNorm requires a multiple of 8"):
            TinyTL(norm=norm).apply(odd)
    assert list(odd.state_dict()) == names
    assert all(p.requires_grad for p in odd.parameters())
    with pytest.raises(UserError, match=r"SyncBatchNorm and cannot be replaced with GroupNorm. Use norm='batch'"):
        TinyTL().apply(nn.SyncBatchNorm.convert_sync_batchnorm(mobile()))
    for setting, value in (
        ("kernel_size", 4),
        ("kernel_size", 0),
        ("groups", 3),
        ("norm", "layer"),
        ("kernel_size", True),
    ):
        with pytest.raises(SettingError) as error:
            TinyTL(**{setting: value})
        assert error.value.setting == setting


def test_weights_trained_with_batch_norm_are_refused_with_group_norm():
    model = timm.create_model("mobilenetv2_035", num_classes=5)
    with torch.no_grad():
        model.bn1.running_mean.add_(0.1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UserError, match=r"were trained with BatchNorm .*norm='batch'"):
        TinyTL().apply(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    TinyTL(norm="batch").apply(model)
