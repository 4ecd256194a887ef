"""Tests of messages and reports about networks: inferred properties, several heads, and dense outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision.models
import transformers
from torch import Tensor, nn

from efficient_ft.core.errors import UserError, hint, on_command_line
from efficient_ft.integrations.session import MethodSession
from efficient_ft.methods import (
    BSR,
    LBPDCT,
    LISA,
    ALaST,
    BitFit,
    Blocks,
    Checkpointing,
    EViT,
    Full,
    HeadOnly,
    LastStage,
    LowBit,
    Method,
    NormLast,
    PatchDropout,
    ToMe,
)
from efficient_ft.models.view import view
from tests.methods.test_transformers_networks import SIZES

VISION = {name: value for name, value in SIZES.items() if name != "num_labels"}


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)) for _ in range(4)))
        self.fc, self.classifier = nn.Linear(3, 2), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(x).mean((2, 3))
        return torch.cat([self.fc(x), self.classifier(x)], 1)


def _inception() -> nn.Module:
    return torchvision.models.inception_v3(weights=None, init_weights=False, num_classes=5)


def _googlenet() -> nn.Module:
    return torchvision.models.googlenet(weights=None, init_weights=False, num_classes=5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("create", "heads"),
    [(TwoHeads, ["fc", "classifier"]), (_inception, ["AuxLogits", "fc"]), (_googlenet, ["aux1", "aux2", "fc"])],
)
def test_several_possible_heads_are_named_in_one_message(create: Callable[[], nn.Module], heads: list[str]) -> None:
    with torch.device("meta"):
        model = create()
    for method in (HeadOnly(), BitFit()):
        with pytest.raises(UserError) as error:
            method.apply(model)
        assert f"has several possible heads ({', '.join(heads)})" in str(error.value)
        assert f"for example classifier={heads}." in str(error.value)
        assert all(p.requires_grad for p in model.parameters())
    HeadOnly().apply(model, classifier=heads[-1])
    trained = {name.partition(".")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {heads[-1]}


def test_only_the_head_that_is_specified_is_trained() -> None:
    model = TwoHeads()
    LastStage().apply(model, classifier="fc", image_size=8)
    trained = {name.rpartition(".")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"blocks.3.0", "blocks.3.1", "fc"}
    for name in ("fc", "classifier"):
        model = TwoHeads()
        LISA(1).apply(model, classifier=name)
        assert model.fc.weight.requires_grad


def test_class_attention_blocks_are_frozen_with_their_normalizations() -> None:
    with torch.device("meta"):
        model = timm.create_model("cait_xxs24_224", depth=2, num_classes=3)
    Blocks([-1]).apply(model)
    trained = {name.partition(".")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"blocks", "norm", "head"}


def test_reports_about_one_part_are_singular() -> None:
    def report(method: Method, **structure: Any) -> str:
        with torch.device("meta"):
            model = timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=3)
        return str(method.apply(model, **structure))

    assert report(Checkpointing(), blocks="blocks.0") == (
        "checkpointing: the only block is recomputed in the backward pass"
    )
    assert "1 of 1 block is trained, sampled every 20 steps" in report(LISA(1), blocks="blocks.0")
    assert "1 of 2 blocks is trained in each step" in report(LISA(1, interval=1))
    assert "blocks.0 keeps 0.7 of the patch tokens" in report(EViT(drop_at=[0], keep_rate=0.7))


class Chain(nn.Module):
    """Layers whose order of calls is the reverse of the order of definition."""

    def __init__(self, **names: tuple[int, int]) -> None:
        super().__init__()
        self.names = list(names)
        for name in reversed(self.names):
            setattr(self, name, nn.Linear(*names[name]))
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).mean((2, 3))
        for name in self.names:
            x = nn.functional.relu(self.get_submodule(name)(x), inplace=True)
        return x


@pytest.mark.parametrize("names", [("fc1", "fc2", "fc3"), ("fc", "classifier"), ("head", "fc"), ("classifier", "fc")])
def test_the_last_layer_of_a_chain_is_the_head(names: tuple[str, ...]) -> None:
    for make in (HeadOnly, BitFit):
        model = Chain(**dict.fromkeys(names, (8, 8)))
        make().apply(model, image_size=16)
        assert [n for n, p in model.named_parameters() if p.requires_grad and n.endswith("weight")] == [
            f"{names[-1]}.weight"
        ]


class Tutorial(nn.Module):
    """A network that runs only on images of 12×12 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(256, 12), nn.Linear(12, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).flatten(1)
        return self.fc3(self.fc2(self.fc1(x)))


@pytest.mark.parametrize("size", [12, None])
def test_a_chain_is_recognized_without_the_image_size(size: int | None) -> None:
    model = Tutorial()
    assert str(HeadOnly().apply(model, image_size=size)).startswith("head: fc3 trains")
    with pytest.raises(UserError, match=r"norm_last: Tutorial has no normalization layers .* Use the method head"):
        NormLast().apply(Tutorial(), image_size=size)


def test_the_last_layers_of_two_chains_are_ambiguous() -> None:
    class Both(Tutorial):
        def __init__(self) -> None:
            super().__init__()
            self.aux = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Any:
            x = self.fc2(self.fc1(self.conv(x).flatten(1)))
            return self.fc3(x), self.aux(x)

    with pytest.raises(UserError, match=r"Both has several possible heads \(fc3, aux\)"):
        HeadOnly().apply(Both(), image_size=12)
    with on_command_line(), pytest.raises(UserError, match=r"unknown\. Use the method full, which trains all param"):
        HeadOnly().apply(Both(), image_size=12)
    assert Full().apply(Both(), image_size=12).touched


def test_declared_heads_and_heads_around_a_network_are_not_ambiguous() -> None:
    with torch.device("meta"):
        distilled = timm.create_model("deit_tiny_distilled_patch16_224")
        assert "head and head_dist train" in str(HeadOnly().apply(distilled))
        teacher = transformers.DeiTForImageClassificationWithTeacher(transformers.DeiTConfig(**SIZES))
        assert "cls_classifier and distillation_classifier train" in str(HeadOnly().apply(teacher))


def _dinov2(**settings: Any) -> Any:
    return transformers.Dinov2Config(**VISION, reshape_hidden_states=True, **settings)


def _uper_net() -> nn.Module:
    backbone = _dinov2(out_features=["stage1", "stage2", "stage3", "stage4"])
    about = transformers.UperNetConfig(
        backbone_config=backbone, hidden_size=8, auxiliary_in_channels=32, auxiliary_channels=8, num_labels=3
    )
    return transformers.UperNetForSemanticSegmentation(about)


#: Networks with dense outputs.
MAPS: dict[str, Callable[[], nn.Module]] = {
    "masked images": lambda: transformers.ViTForMaskedImageModeling(transformers.ViTConfig(**VISION, encoder_stride=4)),
    "backbone": lambda: transformers.Dinov2Backbone(_dinov2(out_features=["stage4"])),
    "UperNet": _uper_net,
    "timm features": lambda: timm.create_model("deit_tiny_patch16_224", img_size=64, features_only=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MAPS)
def test_tokens_are_not_dropped_in_networks_with_dense_outputs(name: str) -> None:
    model = MAPS[name]()
    methods: list[Method] = [EViT([1]), ToMe(2), PatchDropout(), ALaST(2), BSR([3], drop_at=[1])]
    for method in methods:
        with pytest.raises(UserError, match=rf"method {method.name}: .* has a dense output .* only in classification"):
            method.apply(model)
    assert all(p.requires_grad for p in model.parameters())
    assert Checkpointing().apply(model).touched


@pytest.mark.slow
def test_attention_maps_are_not_dense_outputs() -> None:
    about = transformers.ViTConfig(**SIZES, output_attentions=True, output_hidden_states=True)
    about._attn_implementation = "eager"
    EViT([1]).apply(transformers.ViTForImageClassification(about))


def test_the_decoder_around_a_backbone_of_transformers_is_new() -> None:
    model = _uper_net()
    report = str(LastStage().apply(model))
    assert "not part of backbone, and therefore treated as new: decode_head.psp_modules" in report
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen
    assert all(name.startswith("backbone.") for name in frozen)


def test_the_layers_of_an_mlp_are_not_blocks() -> None:
    about = transformers.YolosConfig(**{**VISION, "image_size": [32, 32]}, num_detection_tokens=4)
    with torch.device("meta"):
        assert view(transformers.YolosForObjectDetection(about)).blocks[0] == "vit.encoder.layer.0"


# ------------------------------------------------------------------------------------------------ image size
@pytest.mark.slow
def test_an_assumed_image_size_is_reported() -> None:
    network = torchvision.models.resnet50(num_classes=3)
    note = "images of 224×224 pixels are assumed (to change this size, pass image_size)"
    with MethodSession(network, LBPDCT(4), frozen_bn=False) as session:
        assert note in str(session.reports[0])
        assert str(session).endswith(note)
        session.cost(2, (64, 64))
        assert "assumed" not in str(session)
    with MethodSession(torchvision.models.resnet50(), LBPDCT(4), frozen_bn=False, image_size=64) as session:
        assert "assumed" not in f"{session.reports[0]}\n{session}"
    report = LowBit().apply(torchvision.models.resnet50())
    assert f"{note}, which affects only the choice of layers" in str(report)
    assert "assumed" not in str(Checkpointing().apply(torchvision.models.resnet50()))  # does not use the size


# ------------------------------------------------------------------------------------------------ command line
def test_arguments_of_functions_are_not_named_on_the_command_line() -> None:
    def message() -> str:
        with pytest.raises(UserError) as error:
            LISA(1).apply(nn.Linear(2, 2))
        return str(error.value)

    assert "pass their names, for example blocks=" in message()
    with on_command_line():
        assert message() == (
            "method lisa: no blocks were recognized in Linear. Use a method that does not require blocks, for example"
            " full or head."
        )
        assert hint("python", "settings") == "settings"
    assert hint("python", "settings") == "python"
