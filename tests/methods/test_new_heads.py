"""Tests of new heads and other new modules in networks outside of timm: methods train and report the new modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision.models
from torch import Tensor, nn
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    ViTConfig,
    ViTForImageClassification,
)

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.methods import (
    BSR,
    LISA,
    ALaST,
    BitFit,
    Blocks,
    BSRMoE,
    HeadOnly,
    LastStage,
    LoRA,
    LoRAFA,
    Method,
    NormLast,
    RepNet,
    TinyTL,
    TopLayers,
    UniformLayers,
    apply_methods,
)
from efficient_ft.methods.selection.per_step import LayersPerStep
from efficient_ft.models.view import view


class Wrapped(nn.Module):
    """A pretrained network with a new head, as in a typical training script."""

    def __init__(self, network: nn.Module, channels: int, head_first: bool = False) -> None:
        super().__init__()
        if head_first:
            self.head = nn.Linear(channels, 5)
        self.backbone = network
        if not head_first:
            self.head = nn.Linear(channels, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


class Several(nn.Module):
    """A network with new parts under arbitrary names: a neck, two heads and a parameter."""

    def __init__(self, network: nn.Module, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.net = network
        self.neck = nn.Sequential(nn.Linear(channels, 8), nn.GELU())
        self.coarse, self.fine = nn.Linear(8, 2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.neck(self.net(x))
        return torch.cat([self.coarse(y), self.fine(y)], 1) * self.scale


class Plain(nn.Module):
    """A vision transformer that belongs to no known library."""

    def __init__(self) -> None:
        super().__init__()
        vit = _vit()
        self.patch_embed, self.pos_embed, self.blocks, self.norm = vit.patch_embed, vit.pos_embed, vit.blocks, vit.norm
        self.out = nn.Linear(48, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        return self.out(self.norm(self.blocks(x + self.pos_embed[:, 1:])).mean(1))


def _vit(classes: int = 0) -> Any:
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=64, depth=4, embed_dim=48, num_heads=3, num_classes=classes
    )


def _resnet(head: nn.Module) -> nn.Module:
    model = torchvision.models.resnet50()
    model.fc = head
    return model


def _replaced() -> nn.Module:
    """Create a timm model whose registered classifier `head.fc` no longer exists."""
    model: Any = timm.create_model("convnext_atto", num_classes=0)
    model.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(320, 5))
    return model


def _hugging_face() -> nn.Module:
    config = ViTConfig(hidden_size=48, num_hidden_layers=4, num_attention_heads=3, intermediate_size=96)
    return ViTForImageClassification(config)


class Inside(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        return self.model(x)


#: Maps a description to a function that creates the network, and to the names of its new parts.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "wrapper": (lambda: Wrapped(_vit(), 48), {"head"}),
    "wrapper, head first": (lambda: Wrapped(_vit(), 48, head_first=True), {"head"}),
    "wrapper of a network with its old classifier": (lambda: Wrapped(_vit(9), 9), {"head"}),
    "several heads": (lambda: Several(_vit(), 48), {"neck", "coarse", "fine", "scale"}),
    "sequence": (lambda: nn.Sequential(_vit(), nn.Linear(48, 5)), {"1"}),
    "wrapper in a wrapper": (lambda: Inside(Wrapped(_vit(), 48)), {"model.head"}),
    "wrapper without parts of its own": (lambda: Inside(_vit(5)), {"model.head"}),
    "of nobody's library": (Plain, {"out"}),
    "timm, head replaced": (_replaced, {"head"}),
    "torchvision ResNet": (lambda: _resnet(nn.Linear(2048, 5)), {"fc"}),
    "torchvision ResNet, sequence": (lambda: _resnet(nn.Sequential(nn.Dropout(), nn.Linear(2048, 5))), {"fc"}),
    "torchvision ResNet in a wrapper": (lambda: Wrapped(_resnet(nn.Identity()), 2048), {"head"}),
    "torchvision ViT": (lambda: torchvision.models.vit_b_32(num_classes=5), {"heads"}),
    "torchvision Swin": (lambda: torchvision.models.swin_t(num_classes=5), {"head"}),
    "torchvision MobileNet": (lambda: torchvision.models.mobilenet_v2(num_classes=5), {"classifier"}),
    "transformers ViT": (_hugging_face, {"classifier"}),
    "transformers ViT in a wrapper": (lambda: Inside(_hugging_face()), {"model.classifier"}),
    "transformers DistilBERT": (
        lambda: DistilBertForSequenceClassification(DistilBertConfig(n_layers=2, dim=48, n_heads=3, hidden_dim=96)),
        {"classifier", "pre_classifier"},
    ),
    "transformers Segformer": (lambda: SegformerForSemanticSegmentation(SegformerConfig()), {"decode_head"}),
}

FREEZING: list[Callable[[], Method]] = [
    LoRAFA,
    lambda: LoRA(targets="all"),
    BitFit,
    HeadOnly,
    LastStage,
    NormLast,
    lambda: Blocks([-1]),
    lambda: TopLayers(1),
    lambda: LISA(1, train_embeddings=False),
    lambda: UniformLayers(1, train_embeddings=False),
]


@pytest.mark.slow
@pytest.mark.vary_one
@pytest.mark.parametrize("make", FREEZING, ids=lambda make: make().name)
@pytest.mark.parametrize("name", NETWORKS)
def test_new_parts_train_and_are_reported(name: str, make: Callable[[], Method]) -> None:
    build, parts = NETWORKS[name]
    with torch.device("meta"):
        model = build()
    method = make()
    known = "classifier" in parts or "decode_head" in parts
    (report,) = apply_methods(model, [method])
    of_parts = {n: p for n, p in model.named_parameters() if any(n == a or n.startswith(f"{a}.") for a in parts)}
    assert of_parts
    assert all(p.requires_grad for p in of_parts.values()), [n for n, p in of_parts.items() if not p.requires_grad]
    per_step = isinstance(method, LayersPerStep) and name in ("torchvision Swin", "torchvision MobileNet")
    # In two networks, the blocks include the stem.
    assert any(not p.requires_grad for p in model.parameters()) or per_step
    if per_step:
        return
    if not known:
        assert all(part in str(report) for part in parts), str(report)
        assert "argument classifier" in str(report)
    method.remove(model)


@pytest.mark.parametrize("make", [LoRA, BitFit, HeadOnly])
def test_a_new_head_learns_and_the_rest_is_frozen(make: Callable[[], Method]) -> None:
    torch.manual_seed(0)
    model = Several(_vit(), 48)
    apply_methods(model, make())
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    assert {"net.patch_embed.proj.weight", "net.norm.weight"} <= frozen.keys()
    before = {n: p.detach().clone() for n, p in model.named_parameters() if n.startswith(("neck", "coarse", "fine"))}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    nn.functional.cross_entropy(model(torch.randn(4, 3, 64, 64)), torch.arange(4)).backward()
    optimizer.step()
    for name, value in before.items():
        assert not torch.equal(model.get_parameter(name), value), name
    for name, value in frozen.items():
        assert torch.equal(model.get_parameter(name), value), name


@pytest.mark.parametrize("make", [lambda: TinyTL(norm="batch"), RepNet])
def test_adapters_in_a_wrapped_network_train_its_head(make: Callable[[], Method]) -> None:
    network = timm.create_model("mobilenetv2_100", num_classes=0)
    model = Wrapped(network, 1280)
    report = make().apply(model)
    assert model.head.weight.requires_grad
    assert "not part of backbone, and therefore treated as new: head" in str(report)
    assert not model.backbone.conv_stem.weight.requires_grad


def test_the_user_names_the_classifier() -> None:
    model = Several(_vit(), 48)
    assert view(model).head == ("neck", "coarse", "fine")
    (report,) = apply_methods(model, HeadOnly(), classifier=["coarse", "fine"])
    assert view(model).head == ("coarse", "fine")
    assert "neck" in str(report)  # The neck is still outside of the pretrained network.
    assert model.neck[0].weight.requires_grad

    plain = Plain()
    HeadOnly().apply(plain, classifier="out")
    assert [n for n, p in plain.named_parameters() if p.requires_grad] == ["out.weight", "out.bias"]

    bare = _vit()
    with pytest.raises(UserError, match=r"has no classifier that can be trained\. .*classifier='NAME'"):
        HeadOnly().apply(bare)
    with pytest.raises(
        SettingError, match=r"classifier must be a module of VisionTransformer with parameters .*norm.*, got 'haed'"
    ):
        HeadOnly().apply(bare, classifier="haed")
    with pytest.raises(SettingError, match=r"classifier must be a module"):  # The head has no parameters.
        HeadOnly().apply(bare, classifier="head")


def test_the_head_of_timm_s_networks_is_the_one_they_state() -> None:
    for name in (
        "vit_tiny_patch16_224",
        "resnet18",
        "efficientnet_b0",
        "convnext_atto",
        "swin_tiny_patch4_window7_224",
    ):
        with torch.device("meta"):
            model: Any = timm.create_model(name)
            looked, bare = view(model), view(timm.create_model(name, num_classes=0))
        assert [model.get_submodule(n) for n in looked.head] == [model.get_classifier()]
        assert (looked.outside, looked.head_note, bare.head, bare.outside) == ((), "", (), ())


@pytest.mark.parametrize(
    "make", [lambda: BSR([3], drop_at=[1]), lambda: ALaST(2), lambda: BSRMoE(4, 2, [3], drop_at=[1])]
)
def test_recipes_find_the_class_token_of_a_wrapped_network(make: Callable[[], Method]) -> None:
    model, method = Wrapped(_vit(), 48), make()
    method.apply(model)
    method.step_begin(0)
    model.train()(torch.randn(2, 3, 64, 64)).square().sum().backward()
    assert model.head.weight.grad is not None


@pytest.mark.parametrize("make", [lambda: BSR([3], drop_at=[1]), lambda: ALaST(2)])
def test_a_network_without_a_class_token_is_rejected_without_changes(make: Callable[[], Method]) -> None:
    model = Wrapped(timm.create_model("resnet10t", channels=(8, 8, 8, 8), num_classes=0), 8)
    with pytest.raises(UserError, match=r"has no class token"):
        make().apply(model)
    assert all(p.requires_grad for p in model.parameters())
