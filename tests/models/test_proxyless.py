"""Tests that ProxylessNAS-Mobile equals a plain implementation with the parameter names of the release."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from efficient_ft.config import ModelConfig
from efficient_ft.core.errors import UserError
from efficient_ft.models import factory, hub
from efficient_ft.models.view import view

#: Input channels, output channels, kernel size, stride and expansion of each block. None denotes a block without
#: weights.
BLOCKS = [
    (32, 16, 3, 1, 1),
    (16, 32, 5, 2, 3), (32, 32, 3, 1, 3), None, None,
    (32, 40, 7, 2, 3), (40, 40, 3, 1, 3), (40, 40, 5, 1, 3), (40, 40, 5, 1, 3),
    (40, 80, 7, 2, 6), (80, 80, 5, 1, 3), (80, 80, 5, 1, 3), (80, 80, 5, 1, 3),
    (80, 96, 5, 1, 6), (96, 96, 5, 1, 3), (96, 96, 5, 1, 3), (96, 96, 5, 1, 3),
    (96, 192, 7, 2, 6), (192, 192, 7, 1, 6), (192, 192, 7, 1, 3), (192, 192, 7, 1, 3),
    (192, 320, 7, 1, 6),
]  # fmt: skip


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, act: bool = True):
    layers: list[tuple[str, nn.Module]] = [
        ("conv", nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)),
        ("bn", nn.BatchNorm2d(outputs, eps=1e-3)),
    ]
    return nn.Sequential(OrderedDict([*layers, ("act", nn.ReLU6())] if act else layers))


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int):
        super().__init__()
        width = inputs * expansion
        parts = [("inverted_bottleneck", convolution(inputs, width, 1))] if expansion > 1 else []
        parts.append(("depth_conv", convolution(width, width, kernel, stride, groups=width)))
        parts.append(("point_linear", convolution(width, outputs, 1, act=False)))
        self.mobile_inverted_conv = nn.Sequential(OrderedDict(parts))
        self.skips = inputs == outputs and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        y = self.mobile_inverted_conv(x)
        return x + y if self.skips else y


class Release(nn.Module):
    def __init__(self, classes: int = 1000):
        super().__init__()
        self.first_conv = convolution(3, 32, 3, 2)
        self.blocks = nn.Sequential(*(nn.Identity() if b is None else Block(*b) for b in BLOCKS))
        self.feature_mix_layer = convolution(320, 1280, 1)
        self.classifier = nn.Sequential(OrderedDict([("linear", nn.Linear(1280, classes))]))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.feature_mix_layer(self.blocks(self.first_conv(x))).mean((2, 3)))


@pytest.fixture(scope="module")
def release() -> Release:
    torch.manual_seed(0)
    network = Release()
    with torch.no_grad():
        for name, value in network.state_dict().items():
            if name.endswith(("running_var", "bn.weight")):
                value.uniform_(0.8, 1.2)
            elif name.endswith(("running_mean", "bias")):
                value.uniform_(-0.2, 0.2)
    return network.eval()


def config(path, **changes) -> ModelConfig:
    return ModelConfig(**{"name": "proxyless_mobile", "weights": str(path), **changes})


@pytest.mark.first(1, "slow")
@pytest.mark.parametrize("form", ["as released", "wrapped in DataParallel", "old torch", "safetensors"])
def test_the_released_weights_give_the_released_network_s_output(tmp_path, release, form):
    weights = release.state_dict()
    if form == "old torch":  # old versions have no batch counter
        weights = {k: v for k, v in weights.items() if not k.endswith("num_batches_tracked")}
    if form == "wrapped in DataParallel":
        weights = {f"module.{k}": v for k, v in weights.items()}
    path = tmp_path / ("w.safetensors" if form == "safetensors" else "w.pth")
    if form == "safetensors":
        save_file(weights, path)
    else:
        torch.save({"state_dict": weights}, path)
    model = factory.create_model(config(path), 1000).eval()
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = release(images)
        torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


def test_its_own_export_and_another_head_are_taken(tmp_path, release, caplog):
    caplog.set_level("INFO")
    torch.save({"state_dict": release.state_dict()}, tmp_path / "w.pth")
    model = factory.create_model(config(tmp_path / "w.pth", drop_rate=0.2), 7)
    assert "classifier newly initialized for 7 classes (1000 in the file)" in caplog.text
    assert model.drop_rate == 0.2
    torch.testing.assert_close(model.conv_head.weight, release.feature_mix_layer.conv.weight)
    save_file(model.state_dict(), tmp_path / "own.safetensors")
    again = factory.create_model(config(tmp_path / "own.safetensors"), 7)
    torch.testing.assert_close(again.classifier.weight, model.classifier.weight)


@pytest.mark.slow
def test_files_that_do_not_fit_are_refused_with_names(tmp_path, release):
    weights = release.state_dict()

    def refused(**changes: Tensor | None) -> str:
        torch.save({k: v for k, v in {**weights, **changes}.items() if v is not None}, tmp_path / "w.pth")
        with pytest.raises(UserError, match=r"must be a file that fits model\.name=proxyless_mobile") as error:
            factory.create_model(config(tmp_path / "w.pth"), 7)
        return str(error.value)

    layer = "blocks.5.mobile_inverted_conv.depth_conv"
    assert "missing: blocks.2.0.conv_dw.weight" in refused(**{f"{layer}.conv.weight": None})
    assert "unexpected: blocks.2.0.conv_dw.bias" in refused(**{f"{layer}.conv.bias": torch.zeros(1)})
    assert "of a different shape: conv_stem.weight" in refused(**{"first_conv.conv.weight": torch.zeros(40, 3, 3, 3)})
    # ProxylessNAS-GPU and -CPU have one more block.
    extra = {k.replace("blocks.2.", "blocks.3."): v for k, v in weights.items() if k.startswith("blocks.2.")}
    assert "21 blocks have weights, but ProxylessNAS-Mobile has 20 blocks" in refused(**extra)


def test_without_a_network_the_message_names_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(hub, "unreachable", lambda url, **_: "no network")
    with pytest.raises(UserError, match=r"proxyless_mobile\.pth \(no network\)"):
        factory.create_model(ModelConfig(name="proxyless_mobile"), 7)


def test_the_download_is_looked_for_in_torch_hub_s_cache(tmp_path, monkeypatch, release):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    torch.save({"state_dict": release.state_dict()}, tmp_path / "checkpoints" / "proxyless_mobile.pth")
    model = factory.create_model(ModelConfig(name="proxyless_mobile.mit_in1k"), 1000)
    torch.testing.assert_close(model.classifier.weight, release.classifier.linear.weight)


def test_the_view_sees_its_stages():
    found = view(timm.create_model("proxyless_mobile"))
    assert [len(stage) for stage in found.stages] == [1, 2, 4, 4, 4, 4, 1]
    assert found.head == ("classifier",)
    assert found.last_stage() == ("blocks.6.0", "conv_head", "bn2", "classifier")
    assert found.name == "proxyless_mobile"
