"""Tests of the view of timm models: grids, prefix tokens, stages, heads and special cases."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import timm
import torch
from torch import nn

from efficient_ft.core.errors import UserError
from efficient_ft.models.view import Reason, Skipped, default_image_size, image_channels, parameters_under, view


def layouts(model: nn.Module, size=None) -> Counter:
    found = (layer.tokens for layer in view(model, size).layers if layer.tokens)
    return Counter((tokens.form, tokens.grid, tokens.prefix) for tokens in found)


@pytest.mark.first(3, "slow")
@pytest.mark.parametrize(
    ("name", "kwargs", "expected"),
    [
        ("vit_tiny_patch16_224", {"depth": 3}, {("tokens", (14, 14), 1): 12}),
        ("deit_tiny_distilled_patch16_224", {"depth": 2}, {("tokens", (14, 14), 2): 8}),
        ("vit_small_patch14_reg4_dinov2", {"depth": 1, "img_size": (70, 126)}, {("tokens", (5, 9), 5): 4}),
        ("efficientformer_l1", {}, {
            ("channels_first", (56, 56), 0): 6, ("channels_first", (28, 28), 0): 4, ("channels_first", (14, 14), 0): 12,
            ("channels_first", (7, 7), 0): 6, ("tokens", (7, 7), 0): 4}),
        ("swinv2_tiny_window8_256", {"img_size": (64, 128), "window_size": 4, "depths": (1, 1, 1, 1)}, {
            ("tokens", (4, 4), 0): 6, ("tokens", (16, 32), 0): 2, ("tokens", (8, 16), 0): 2, ("tokens", (4, 8), 0): 2,
            ("tokens", (2, 4), 0): 4, ("channels_last", (8, 16), 0): 1, ("channels_last", (4, 8), 0): 1,
            ("channels_last", (2, 4), 0): 1}),
        ("resnet50", {}, {
            ("channels_first", (56, 56), 0): 8, ("channels_first", (28, 28), 0): 8, ("channels_first", (14, 14), 0): 12,
            ("channels_first", (7, 7), 0): 6}),
    ],
)  # fmt: skip
def test_where_the_tokens_lie(name, kwargs, expected):
    found = layouts(timm.create_model(name, **kwargs))
    if name == "resnet50":  # some blocks also have a convolution as shortcut
        assert set(found) == set(expected)
    else:
        assert dict(found) == expected


@pytest.mark.parametrize(
    ("name", "last", "head"),
    [
        ("vit_tiny_patch16_224", ("blocks.9", "blocks.10", "blocks.11", "norm", "head"), ("head",)),
        ("efficientformer_l1", (
            "stages.3.downsample", "stages.3.blocks.0", "stages.3.blocks.1", "stages.3.blocks.2", "stages.3.blocks.4",
            "norm", "head", "head_dist"), ("head", "head_dist")),
        ("efficientformerv2_s0", (
            *(f"stages.3.blocks.{k}" for k in range(4)), "norm", "head", "head_dist"), ("head", "head_dist")),
        ("swinv2_tiny_window8_256", (
            "layers.3.downsample", "layers.3.blocks.0", "layers.3.blocks.1", "norm", "head"), ("head.fc",)),
        ("resnet18", ("layer4.0", "layer4.1", "fc"), ("fc",)),
    ],
)  # fmt: skip
def test_last_stages_are_those_of_the_papers(name, last, head):
    seen = view(timm.create_model(name))
    assert seen.last_stage() == last
    assert seen.head == head


@pytest.mark.parametrize(
    ("name", "blocks", "last"),
    [
        ("regnetx_002", [1, 1, 4, 7], (*(f"s4.b{k}" for k in range(1, 8)), "head")),
        ("regnetz_005", [1, 4, 9, 7], (*(f"s4.b{k}" for k in range(1, 8)), "final_conv", "head")),
        ("pit_ti_224", [2, 6, 4], (
            "transformers.2.pool", *(f"transformers.2.blocks.{k}" for k in range(4)), "norm", "head")),
        ("visformer_tiny", [7, 4, 4], ("patch_embed3", *(f"stage3.{k}" for k in range(4)), "norm", "head")),
        ("volo_d1_224", [4, 4, 8, 2], ("network.4.0", "network.4.1", "post_network", "aux_head", "norm", "head")),
        ("nest_tiny", [2, 2, 8], (
            "levels.2.pool", *(f"levels.2.transformer_encoder.{k}" for k in range(8)), "norm", "head")),
        ("tresnet_m", [3, 4, 11, 3], (*(f"body.layer4.{k}" for k in range(3)), "head")),
        ("densenet121", [1, 1, 1, 1], ("features.transition3", "features.denseblock4", "features.norm5", "classifier")),
        ("dla46_c", [1, 1, 1, 1, 1, 1], ("level5", "fc")),
        ("rexnet_100", [4, 4, 5, 4], (*(f"features.{k}" for k in range(13, 17)), "head")),
        ("legacy_xception", [1] * 12, ("block12", "conv3", "bn3", "conv4", "bn4", "fc")),
        ("convmixer_768_32", [8, 8, 8, 8], (*(f"blocks.{k}" for k in range(24, 32)), "head")),
        ("deepseek_vit_412m", [8, 8, 8, 8], (
            *(f"encoder.blocks.{k}" for k in range(24, 32)), "encoder.norm", "head")),
        # These models have no sequence of blocks.
        ("vgg11", [], None),
        ("dpn48b", [], None),
        ("selecsls42", [], None),
        ("inception_resnet_v2", [], None),
        ("coat_lite_tiny", [], None),
    ],
)  # fmt: skip
def test_stages_under_other_names_are_found(name, blocks, last):
    with torch.device("meta"):
        seen = view(timm.create_model(name, num_classes=5))
    assert [len(stage) for stage in seen.stages] == blocks
    if last is not None:
        assert seen.last_stage() == last


@pytest.mark.slow
def test_swinv2_qkv_is_found_though_its_forward_is_never_called():
    model = timm.create_model("swinv2_tiny_window8_256", img_size=64, window_size=4)
    layers = {layer.name: layer for layer in view(model).layers}
    qkv = layers["layers.3.blocks.1.attn.qkv"]
    assert qkv.reach == "layers.3.blocks.1.attn"
    assert qkv.tokens is not None
    assert not model.layers[3].blocks[1].attn.qkv_bias_separate, "looking must not change the model"
    position_mlp = layers["layers.3.blocks.1.attn.cpb_mlp.0"]
    assert position_mlp.why_not == Skipped(Reason.NOT_FROM_IMAGES)


@pytest.mark.slow
def test_reasons_for_layers_without_tokens():
    reasons = {layer.name: layer.why_not for layer in view(timm.create_model("efficientformerv2_s0")).layers}
    assert reasons["stem.conv1.conv"] == Skipped(Reason.STEM)
    assert reasons["stages.0.blocks.0.mlp.mid.conv"] == Skipped(Reason.GROUPED_CONVOLUTION)
    assert reasons["stages.1.downsample.conv.conv"] == Skipped(Reason.SPATIAL_CONVOLUTION)
    assert reasons["head"] == Skipped(Reason.HEAD)
    assert reasons["stages.3.blocks.3.token_mixer.talking_head1"] is None
    assert view(timm.create_model("mixer_s16_224", img_size=64)).image_size == (64, 64)
    mixer = {layer.name: layer.why_not for layer in view(timm.create_model("mixer_s16_224")).layers}
    assert mixer["blocks.0.mlp_tokens.fc1"].reason == Reason.NO_GRID
    assert str(mixer["blocks.0.mlp_tokens.fc1"]) == "512 tokens without positions on a grid"
    assert mixer["blocks.0.mlp_channels.fc1"] is None


def test_looking_changes_nothing():
    model = timm.create_model("efficientformer_l1").train()
    before = copy.deepcopy(model.state_dict())
    modes = [m.training for m in model.modules()]
    state = torch.get_rng_state()
    assert view(model).layers
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert not any(m._forward_hooks for m in model.modules())


def test_attention_layers_are_marked():
    layers = view(timm.create_model("vit_tiny_patch16_224", depth=1)).layers
    assert [layer.name for layer in layers if layer.in_attention] == ["blocks.0.attn.qkv", "blocks.0.attn.proj"]


def test_a_size_the_model_cannot_take_is_an_error_of_one_line():
    with pytest.raises(UserError, match="VisionTransformer cannot be run on images of 100×100: "):
        _ = view(timm.create_model("vit_tiny_patch16_224", depth=1), (100, 100)).layers


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("hiera_tiny_224", {"embed_dim": 24, "stages": (1, 1, 1, 1), "img_size": (64, 64)}),
        ("swinv2_cr_tiny_224", {"embed_dim": 24, "depths": (1,), "num_heads": (2,), "img_size": 64}),
    ],
)
def test_a_network_of_timm_knows_the_size_with_which_it_was_created(name, options):
    assert view(timm.create_model(name, **options)).image_size == (64, 64)


@pytest.mark.slow
def test_a_size_from_the_pretrained_configuration_may_be_wrong():
    with torch.device("meta"):
        model = timm.create_model("levit_128s", img_size=96)
    with pytest.raises(UserError, match=r"cannot be run on images of 224×224: .*\n.*declares this size.*size=112"):
        _ = view(model).layers


class Positions(nn.Module):
    """A network for images of 112×112 pixels that does not declare its image size."""

    def __init__(self):
        super().__init__()
        self.stem, self.positions = nn.Conv2d(3, 8, 16, 16), nn.Parameter(torch.zeros(1, 49, 8))
        self.layer, self.fc = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.fc(self.layer(self.stem(x).flatten(2).mT + self.positions).mean(1))


def test_a_network_may_state_the_size_of_its_images():
    model = Positions()
    with pytest.raises(UserError, match=r"on images of 224×224: .*\n.* pass it, for example image_size=112"):
        _ = view(model).layers
    model.image_size = 112
    assert next(layer.tokens.grid for layer in view(model).layers if layer.name == "layer") == (7, 7)
    model.image_size = 96
    with pytest.raises(UserError, match=r"on images of 96×96: .*\n.*declares this size"):
        _ = view(model).layers


def test_a_model_without_stages_has_no_last_stage():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)

        def forward(self, x):
            return self.fc(self.conv(x).mean((2, 3)))

    with pytest.raises(UserError, match=r"no blocks were recognized in .* so the last stage is unknown.*Otherwise"):
        view(Plain(), (8, 8)).last_stage()


def test_one_module_per_stage_outside_of_the_stages():
    with torch.device("meta"):
        twins = timm.create_model("twins_pcpvt_small")
    found = view(twins, (64, 64)).last_stage()
    assert "pos_block.3" in found
    assert not any(name in found for name in ("pos_block", "pos_block.0", "pos_block.2"))


def test_stages_of_several_maps_are_not_recognized():
    with torch.device("meta"):
        hrnet = timm.create_model("hrnet_w18_small")
    with pytest.raises(UserError, match=r"no blocks were recognized in hrnet_w18_small"):
        view(hrnet, (64, 64)).last_stage()


@pytest.mark.parametrize(("name", "channels"), [("tresnet_m", 3), ("csatv2", 3), ("resnet18", 4), ("tresnet_m", 4)])
def test_image_channels_of_networks_that_rearrange_pixels(name, channels):
    with torch.device("meta"):
        model = timm.create_model(name, **({} if name == "csatv2" else {"in_chans": channels}))
    assert image_channels(model) == channels
    assert view(model, (64, 64)).layers


def test_sizes_and_parameters_by_name():
    model = timm.create_model("vit_tiny_patch16_224", depth=12, img_size=(32, 64))
    assert default_image_size(model) == (32, 64)
    names = set(parameters_under(model, ("blocks.1", "head.bias")))
    assert "blocks.1.attn.qkv.weight" in names
    assert not any(n.startswith("blocks.10") for n in names), "a prefix of a name is not its parent"
    assert "head.bias" in names
    assert "head.weight" not in names
