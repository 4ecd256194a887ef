"""Tests of segmentation networks: their view, the cost of the low-rank backward pass, and weight files."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from efficient_ft.config.schema import ModelConfig
from efficient_ft.core.errors import SettingError
from efficient_ft.cost import executed
from efficient_ft.methods import METHODS
from efficient_ft.methods.backprop.lbp_wht import LBPWHT
from efficient_ft.models import factory
from efficient_ft.models.segmentation import SEGFORMERS, weights_cfg
from efficient_ft.models.view import view
from efficient_ft.task import Segmentation

#: `model.kwargs` of a small Segformer.
SMALL = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16], "num_attention_heads": [1, 1, 2, 2]}
ENCODER = "mobilenetv3_small_050"


def config(name: str = "segformer_b0", **changes: Any) -> ModelConfig:
    return ModelConfig(**{"name": name, "pretrained": False, "image_size": (64, 128), **changes})


def encoder_decoder(name: str = "unet", **changes: Any) -> ModelConfig:
    kwargs = {"decoder_channels": (8, 8, 8, 8, 8)} if name == "unet" else {}
    return config(name, **{"encoder": ENCODER, "kwargs": kwargs, **changes})


@pytest.fixture(scope="module")
def segformer() -> nn.Module:
    torch.manual_seed(0)
    return factory.random_model(config(image_size=(256, 512)), 21)


def test_image_sizes_that_the_encoder_cannot_divide_are_refused() -> None:
    def deeplab(size: tuple[int, int]) -> ModelConfig:
        return encoder_decoder("deeplabv3", image_size=size, kwargs={"encoder_output_stride": 16})

    with pytest.raises(
        SettingError, match=r"model\.image_size must be a multiple of 16 .*, got \(70, 96\)\. Use 64 or 80"
    ):
        factory.random_model(deeplab((70, 96)), 3)
    factory.random_model(deeplab((80, 48)), 3)
    factory.random_model(encoder_decoder(image_size=(70, 96)), 3)  # this network resizes the images


@pytest.mark.slow
def test_segformer_as_methods_see_it(segformer: nn.Module) -> None:
    found = view(segformer)
    assert found.name == "segformer_b0"
    assert found.image_size == (256, 512)
    assert [len(stage) for stage in found.stages] == [2, 2, 2, 2]
    assert found.blocks[-1] == "segformer.stages.3.blocks.1"
    assert found.head == ("decode_head.classifier",)
    last = (f"segformer.stages.3.{name}" for name in ("patch_embeddings", "layer_norm", "blocks.0", "blocks.1"))
    assert found.last_stage() == (*last, "decode_head")
    grids = {layer.name: layer.tokens.grid for layer in found.layers if layer.tokens is not None}
    first = "segformer.stages.0.blocks.0"
    # A convolution with stride 8 reduces the map of keys and values.
    assert [grids[f"{first}.attention.{part}_proj"] for part in "qkvo"] == [(64, 128), (8, 16), (8, 16), (64, 128)]
    assert grids[f"{first}.mlp.fc2"] == (64, 128)
    assert [grids[f"decode_head.linear_projections.{k}.proj"] for k in range(4)] == [
        (64, 128), (32, 64), (16, 32), (8, 16)
    ]  # fmt: skip
    assert grids["decode_head.linear_fuse"] == (64, 128)
    without = {layer.name: str(layer.why_not) for layer in found.layers if layer.tokens is None}
    assert without["segformer.stages.0.patch_embeddings.proj"] == "the stem or patch embedding"
    assert without["decode_head.classifier"] == "the head"


@pytest.mark.slow
@pytest.mark.first(1, "exhaustive")
@pytest.mark.parametrize("name", ["unet", "deeplabv3", "deeplabv3plus", "fpn"])
def test_networks_of_an_encoder_and_a_decoder_as_methods_see_them(name: str) -> None:
    model = factory.random_model(encoder_decoder(name), 5)
    found = view(model)
    assert all(block.startswith("encoder.model.blocks.") for block in found.blocks)
    assert len(found.stages) == len(model.encoder.model.blocks)  # type: ignore[union-attr, arg-type]
    assert found.head == ("segmentation_head",)
    assert found.last_stage()[-2:] == ("decoder", "segmentation_head")
    stem = next(layer for layer in found.layers if layer.name == "encoder.model.conv_stem")
    assert str(stem.why_not) == "the stem or patch embedding"
    assert model(torch.zeros(2, 3, 64, 128)).shape == (2, 5, 64, 128)


@pytest.mark.parametrize("encoder", ["resnet18", "convnext_atto", "vgg11"])
def test_encoders_of_other_forms(encoder: str) -> None:
    model = factory.random_model(encoder_decoder(encoder=encoder), 3)
    found = view(model)
    assert (len(found.stages) >= 4) == (encoder != "vgg11")
    assert found.head == ("segmentation_head",)


def _numbers(segformer: nn.Module, *methods: Any) -> float:
    counted = executed(copy.deepcopy(segformer), 1, (256, 512), methods=methods, task=Segmentation())
    assert counted.counted_on == "fake tensors"
    return counted.backward_flops / 1e6


@pytest.mark.exhaustive
def test_backward_flops_of_the_published_table(segformer: nn.Module) -> None:
    """The counts at 256×512 agree with Table 3 of LBP-WHT, up to the following differences.

    For the last stage and the decoder, the exact count differs by at most 1 % and low-rank counts by at most 8 %. For
    the whole network, every published count is larger by about 2,000 MFLOPs.
    """
    selected = METHODS["last_stage"]
    assert _numbers(segformer, selected()) == pytest.approx(10052.0, rel=0.01)
    for order, published in ((2, 1481.94), (4, 2725.39), (8, 7308.45)):
        found = _numbers(segformer, selected(), LBPWHT(order=order, skip=["attention", "linear_projections"]))
        assert 0.92 * published < found < published, order
    more = 16700.26 - _numbers(segformer, METHODS["full"]())
    assert more == pytest.approx(2124, rel=0.01)
    for order, published in ((2, 5746.54), (4, 7295.52), (8, 13086.06)):
        found = _numbers(segformer, METHODS["full"](), LBPWHT(order=order, skip=["attention"]))
        assert found + more == pytest.approx(published, rel=0.03), order


@pytest.mark.slow
def test_low_rank_of_full_rank_is_exact_on_grids_that_are_not_square() -> None:
    torch.manual_seed(0)
    model = factory.random_model(config(kwargs=SMALL, drop_path_rate=0.0), 4).double()
    images, targets = torch.randn(2, 3, 64, 128).double(), torch.randint(0, 4, (2, 64, 128))
    gradients = []
    for order in (None, 15):
        changed = copy.deepcopy(model).train()
        for module in changed.modules():
            if isinstance(module, nn.BatchNorm2d | nn.Dropout):
                module.eval()
        if order is not None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(LBPWHT, "_costs_more", lambda *_: None)
                touched = LBPWHT(order=order).apply(changed).touched
            assert "segformer.stages.1.blocks.0.attention.k_proj" in touched
            assert "decode_head.linear_fuse" in touched
        task = Segmentation()
        task.loss(task.logits(changed, images), targets).backward()
        gradients.append({n: p.grad for n, p in changed.named_parameters()})
    for name, expected in gradients[0].items():
        assert expected is not None
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-8, atol=1e-10, msg=name)


# ------------------------------------------------------------------------------------------------ weights
def _close(model: nn.Module, weights: dict[str, Tensor]) -> None:
    own = model.state_dict()
    for name, value in weights.items():
        assert torch.equal(own[name], value), name


_EARLIER = (
    (r"segformer\.stages\.(\d)\.patch_embeddings\.", r"segformer.encoder.patch_embeddings.\1."),
    (r"segformer\.stages\.(\d)\.blocks\.", r"segformer.encoder.block.\1."),
    (r"segformer\.stages\.(\d)\.layer_norm", r"segformer.encoder.layer_norm.\1"),
    (r"attention\.q_proj", "attention.self.query"),
    (r"attention\.k_proj", "attention.self.key"),
    (r"attention\.v_proj", "attention.self.value"),
    (r"attention\.sequence_reduction\.sequence_reduction", "attention.self.sr"),
    (r"attention\.sequence_reduction\.layer_norm", "attention.self.layer_norm"),
    (r"attention\.o_proj", "attention.output.dense"),
    (r"mlp\.fc(\d)", r"mlp.dense\1"),
    (r"layernorm_before", "layer_norm_1"),
    (r"layernorm_after", "layer_norm_2"),
    (r"linear_projections", "linear_c"),
)


@pytest.mark.parametrize("names", ["present", "earlier"])
@pytest.mark.parametrize("classes", [4, 6])
def test_segformer_from_a_file(tmp_path: Path, names: str, classes: int, caplog: pytest.LogCaptureFixture) -> None:
    """Weight files load with current parameter names and with the earlier names of the files on the hub."""
    caplog.set_level("INFO")
    source = factory.random_model(config(kwargs=SMALL), 4)
    weights = {k: v.clone() for k, v in source.state_dict().items()}
    stored = weights
    if names == "earlier":
        stored = {}
        for name, value in weights.items():
            for pattern, replacement in _EARLIER:
                name = re.sub(pattern, replacement, name)
            stored[name] = value
    save_file(stored, tmp_path / "w.safetensors")
    model = factory.create_model(config(kwargs=SMALL, weights=str(tmp_path / "w.safetensors")), classes)
    _close(model, {k: v for k, v in weights.items() if classes == 4 or not k.startswith("decode_head.classifier")})
    assert ("decode_head.classifier newly initialized for 6 classes (4 in the file)" in caplog.text) == (classes == 6)
    assert view(model).image_size == (64, 128)


@pytest.mark.parametrize("classes", [4, 6])
def test_a_network_with_an_encoder_from_its_own_file(tmp_path: Path, classes: int) -> None:
    source = factory.random_model(encoder_decoder(), 4)
    weights = {k: v.clone() for k, v in source.state_dict().items()}
    save_file(weights, tmp_path / "w.safetensors")
    model = factory.create_model(encoder_decoder(weights=str(tmp_path / "w.safetensors")), classes)
    _close(model, {k: v for k, v in weights.items() if classes == 4 or not k.startswith("segmentation_head")})


def test_an_encoder_from_timms_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    source = timm.create_model(ENCODER, num_classes=9)
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    model = factory.create_model(encoder_decoder(weights=str(tmp_path / "w.safetensors")), 4)
    for name, value in model.encoder.model.state_dict().items():  # type: ignore[union-attr, operator]
        assert torch.equal(source.state_dict()[name], value), name
    assert "decoder and its head newly initialized for 4 classes" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("encoder", ["convnext_atto", "resnet18"])
def test_an_encoder_without_some_of_its_weights_is_refused(tmp_path: Path, encoder: str) -> None:
    weights = timm.create_model(encoder, num_classes=9).state_dict()
    save_file(weights, tmp_path / "whole.safetensors")
    gone = next(name for name in reversed(weights) if "3" in name and name.endswith("weight"))
    save_file({k: v for k, v in weights.items() if k != gone}, tmp_path / "part.safetensors")
    made = encoder_decoder(encoder=encoder)
    factory.create_model(made.model_copy(update={"weights": str(tmp_path / "whole.safetensors")}), 4)
    with pytest.raises(SettingError, match=rf"another model: missing: {re.escape(gone)}"):
        factory.create_model(made.model_copy(update={"weights": str(tmp_path / "part.safetensors")}), 4)


@pytest.mark.first(1, "exhaustive")
@pytest.mark.first(1, "slow")
@pytest.mark.parametrize("made", [config(kwargs=SMALL), encoder_decoder()], ids=["segformer", "unet"])
def test_weights_of_another_network_are_refused(tmp_path: Path, made: ModelConfig) -> None:
    save_file({"fc.weight": torch.zeros(2, 2)}, tmp_path / "w.safetensors")
    with pytest.raises(SettingError, match=rf"model.weights.*fits model.name={made.name}.*another model"):
        factory.create_model(made.model_copy(update={"weights": str(tmp_path / "w.safetensors")}), 4)
    with pytest.raises(SettingError, match="an existing file"):
        factory.create_model(made.model_copy(update={"weights": str(tmp_path / "x.pth")}), 4)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (encoder_decoder("unnet"), r"model\.name must be one of .*Did you mean"),
        (config("segformer_b9"), r"model\.name must be one of segformer_b0, .*got segformer_b9"),
        (encoder_decoder(encoder="resnet1"), r"model\.encoder must be a classifier of timm"),
        (encoder_decoder(drop_rate=0.1), r"model\.drop_rate must be 0 if model\.encoder is set"),
        (encoder_decoder(kwargs={"classes": 3}), r"model\.kwargs\.classes must be unset"),
        (config(kwargs={"num_labels": 3}), r"model\.kwargs\.num_labels must be unset"),
        (encoder_decoder(kwargs={"decoder_depth": 3}), "cannot be built with model.encoder"),
    ],
)
def test_what_cannot_be_built_is_explained(made: ModelConfig, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        factory.random_model(made, 4)


def test_where_pretrained_weights_come_from() -> None:
    assert weights_cfg(config("segformer_b2")).hf_hub_id == "nvidia/segformer-b2-finetuned-ade-512-512"
    assert weights_cfg(config("segformer_b5")).hf_hub_id == "nvidia/segformer-b5-finetuned-ade-640-640"
    assert weights_cfg(encoder_decoder(encoder="mobilenetv2_100.ra_in1k")).hf_hub_id == "timm/mobilenetv2_100.ra_in1k"
    assert factory.missing_weights(encoder_decoder()) is None
    spec = factory.input_of(encoder_decoder(encoder="tf_efficientnet_lite0", image_size=None))
    assert (spec.size, spec.mean, spec.std) == ((512, 512), (0.5,) * 3, (0.5,) * 3)
    assert factory.input_of(config(mean=(0.1, 0.2, 0.3), std=(1.0, 1.0, 1.0))).mean == (0.1, 0.2, 0.3)
    assert len(SEGFORMERS) == 6
