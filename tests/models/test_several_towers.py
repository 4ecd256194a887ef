"""Tests of modules that contain several networks with blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
import transformers
from open_clip.transformer import VisionTransformer
from torch import Tensor, nn
from vit_pytorch import ViT

from efficient_ft.core.errors import UserError
from efficient_ft.integrations.session import MethodSession
from efficient_ft.methods import (
    BSR,
    LISA,
    ALaST,
    Checkpointing,
    Compact,
    EViT,
    HeadOnly,
    LastStage,
    LoRA,
    Method,
    PatchDropout,
    ToMe,
)
from efficient_ft.models.view import view


def _vit(depth: int = 4, **settings: Any) -> nn.Module:
    sizes = {"num_classes": 0, "img_size": 64, "embed_dim": 48, "depth": depth}
    return timm.create_model("vit_tiny_patch16_224", **(sizes | settings))  # type: ignore[no-any-return]


class Two(nn.Module):
    """A network that classifies the features of two towers."""

    def __init__(self, a: nn.Module | None = None, b: nn.Module | None = None) -> None:
        super().__init__()
        self.a, self.b = a or _vit(), b or _vit(6)
        with torch.no_grad():
            width = self.features(torch.zeros(2, 3, 64, 64)).shape[1]
        self.head = nn.Linear(width, 5)

    def features(self, images: Tensor) -> Tensor:
        found = (tower(images) for tower in (self.a, self.b))
        return torch.cat([x if isinstance(x, Tensor) else x.pooler_output.flatten(1) for x in found], 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))


def _open_clip() -> nn.Module:
    return VisionTransformer(image_size=64, patch_size=16, width=32, layers=4, heads=2, mlp_ratio=2.0, output_dim=16)


def _vit_pytorch() -> nn.Module:
    return ViT(image_size=64, patch_size=16, num_classes=16, dim=32, depth=4, heads=2, mlp_dim=48)


def _of_transformers() -> nn.Module:
    sizes = {"image_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    return transformers.ViTModel(transformers.ViTConfig(**sizes, intermediate_size=64))


#: Towers, and the blocks of both towers.
TOWERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], list[str]]] = {
    "timm": (_vit, _vit, ["a.blocks.*", "b.blocks.*"]),
    "open_clip": (_open_clip, _open_clip, ["a.transformer.resblocks.*", "b.transformer.resblocks.*"]),
    "vit-pytorch": (_vit_pytorch, _vit_pytorch, ["a.transformer.layers.*", "b.transformer.layers.*"]),
    "transformers": (_of_transformers, _vit, ["a.layers.*", "b.blocks.*"]),
    "torchvision": (
        _vit,
        lambda: torchvision.models.resnet18(num_classes=16),
        ["a.blocks.*", "b.layer1.*", "b.layer2.*", "b.layer3.*", "b.layer4.*"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("library", TOWERS)
def test_the_message_names_the_blocks_of_all_towers(library: str) -> None:
    first, second, blocks = TOWERS[library]
    model = Two(first(), second())
    assert view(model).towers == ("a", "b")
    with pytest.raises(UserError) as error:
        Checkpointing().apply(model)
    assert (
        f"contains 2 networks with blocks (a, b), so the blocks to use are unknown. To use the blocks of all of"
        f" them, pass blocks={blocks}. To use the blocks of one network, pass only its blocks, for example"
        f" blocks={blocks[0]!r}. Alternatively, apply the method to model.a and model.b separately" in str(error.value)
    )
    if library == "vit-pytorch":  # each block is a list of two halves without a forward method
        return
    Checkpointing().apply(model, blocks=blocks)
    counts = [sum(isinstance(m, nn.Module) and "forward" in vars(m) for m in t.modules()) for t in (model.a, model.b)]
    assert min(counts) >= 4


@pytest.mark.parametrize(
    "create", [Checkpointing, LastStage, lambda: LISA(1), lambda: ALaST(1), PatchDropout, lambda: ToMe(2)]
)
def test_methods_that_depend_on_blocks_require_them(create: Callable[[], Method]) -> None:
    model = Two()
    with pytest.raises(UserError, match=r"method \w+: Two contains 2 networks with blocks \(a, b\)"):
        create().apply(model)
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    "create", [PatchDropout, lambda: ToMe(2), lambda: EViT([1]), lambda: BSR([2], [1]), lambda: ALaST(1)]
)
def test_token_methods_support_one_tower(create: Callable[[], Method]) -> None:
    message = r"\(a, b\), and the method supports only one of them\. To use the blocks of one network, pass only its"
    with pytest.raises(UserError, match=message):
        create().apply(Two(), blocks=["a.blocks.*", "b.blocks.*"])
    model = Two()
    with MethodSession(model, create(), blocks="b.blocks.*") as session, session.step(0):
        session.loss(model(torch.randn(2, 3, 64, 64)).square().mean()).backward()
    assert all("forward" not in vars(block) for block in model.a.blocks)  # type: ignore[union-attr]
    assert any("forward" in vars(module) for module in model.b.modules())


def test_token_methods_can_be_applied_to_each_tower() -> None:
    model = Two()
    with MethodSession(model.a, ToMe(2)), MethodSession(model.b, ToMe(1)):
        model(torch.randn(2, 3, 64, 64)).square().mean().backward()
    assert all("forward" in vars(tower.blocks[1]) for tower in (model.a, model.b))  # type: ignore[index,union-attr]


def trained(model: nn.Module) -> set[str]:
    return {".".join(name.split(".")[:3]) for name, p in model.named_parameters() if p.requires_grad and "." in name}


def test_the_last_stage_of_each_tower_is_trained() -> None:
    model = Two()
    LastStage().apply(model, blocks=["a.blocks.*", "b.blocks.*"])
    norms = {f"{tower}.norm.{kind}" for tower in "ab" for kind in ("weight", "bias")}
    head = {"head.weight", "head.bias"}
    assert trained(model) == {"a.blocks.3", "b.blocks.4", "b.blocks.5"} | norms | head
    model = Two(b=torchvision.models.resnet18(num_classes=16))
    LastStage().apply(model, blocks=TOWERS["torchvision"][2])
    assert trained(model) == {"a.blocks.3", "b.layer4.0", "b.layer4.1", "a.norm.weight", "a.norm.bias", *head} | {
        "b.fc.weight",
        "b.fc.bias",
    }
    for tower, blocks in (("a", {"a.blocks.3"}), ("b", {"b.blocks.4", "b.blocks.5"})):
        model = Two()
        LastStage().apply(model, blocks=f"{tower}.blocks.*")
        assert trained(model) == blocks | {name for name in norms if name.startswith(tower)} | head


@pytest.mark.slow
def test_blocks_are_sampled_in_both_towers() -> None:
    model = Two()
    report = LISA(1, train_embeddings=False).apply(model, blocks=["a.blocks.*", "b.blocks.*"])
    assert len(report.touched) == 10
    assert {"a.norm.weight", "b.norm.weight", "a.blocks.0", "b.blocks.5", "head.bias"} <= trained(model)
    assert not any(name.endswith(("patch_embed.proj", "cls_token")) for name in trained(model))


def test_the_tokens_of_the_tower_with_the_blocks_are_counted() -> None:
    model = Two(_vit(), _vit(reg_tokens=4))
    PatchDropout().apply(model, blocks="b.blocks.*")
    assert view(model).prefix_tokens == 5
    assert view(Two(_vit(), _vit(reg_tokens=4))).prefix_tokens == 1


@pytest.mark.parametrize("create", [HeadOnly, LoRA, Compact])
def test_other_methods_change_both_towers(create: Callable[[], Method]) -> None:
    report = create().apply(Two())
    assert isinstance(create(), HeadOnly) or {name[0] for name in report.touched} >= {"a", "b"}


def test_a_tower_without_influence_on_the_output_is_ignored() -> None:
    class Teacher(Two):
        def forward(self, images: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.b(images)
            found = self.a(images)
            return self.head(torch.cat([found, target], 1))

    assert view(Teacher()).towers == ()
    assert len(Checkpointing().apply(Teacher()).touched) == 4


def test_a_decoder_is_not_a_tower() -> None:
    class Series(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = timm.create_model("resnet18", features_only=True)
            self.decoder = nn.Sequential(*(nn.Sequential(nn.Conv2d(512, 512, 1), nn.ReLU()) for _ in range(3)))

        def forward(self, images: Tensor) -> Tensor:
            return self.decoder(self.encoder(images)[-1])

    assert view(Series()).towers == ()
