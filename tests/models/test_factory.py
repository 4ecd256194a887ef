"""Models by name and their weights, in the formats that people have them in; and what is said where there are none."""

from __future__ import annotations

import logging
import os
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.layers import HybridEmbed
from timm.models import VisionTransformer
from timm.models.vision_transformer_hybrid import ConvStem

from efficient_ft.config import ModelConfig
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.models import factory

SMALL = {"depth": 2, "embed_dim": 16, "num_heads": 2}


def small(**changes) -> ModelConfig:
    """vit_tiny of timm, narrowed; or another model."""
    return ModelConfig(**{"name": "vit_tiny_patch16_224", "pretrained": False, "kwargs": SMALL, **changes})


def pretend_pretrained(classes: int = 1000, **kwargs) -> torch.nn.Module:
    torch.manual_seed(7)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=classes, **SMALL, **kwargs)
    torch.nn.init.normal_(model.head.weight)  # timm starts it at zero
    return model


def backbone(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {k: v for k, v in model.state_dict().items() if not k.startswith("head.")}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], **tolerance) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], **({"rtol": 0, "atol": 0} | tolerance))


# ---------------------------------------------------------------------------------------------- small models
@pytest.mark.parametrize(
    ("name", "width", "depth", "strides"), [("vit_digits", 96, 4, (1, 2, 2, 1)), ("vit_micro", 192, 6, (1, 2, 2))]
)
def test_small_models_are_timms_own_classes(name, width, depth, strides):
    ours = timm.create_model(name)
    torch.nn.init.normal_(ours.head.weight)  # starts at zero, which would show no difference
    channels = (width // 4, width // 2, width, width)[: len(strides)]
    stem = ConvStem(depth=len(strides), channels=channels, stride=strides, kernel_size=3, act_layer=torch.nn.GELU)
    plain = VisionTransformer(
        img_size=32, patch_size=1, embed_dim=width, depth=depth, num_heads=3, num_classes=ours.num_classes,
        embed_layer=partial(HybridEmbed, backbone=stem, proj=False),
    )  # fmt: skip
    plain.load_state_dict(ours.state_dict(), strict=True)
    assert ours.patch_embed.grid_size == (8, 8)
    assert ours.num_prefix_tokens == 1
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(ours.eval()(x), plain.eval()(x))


def test_vit_micro_takes_weights_with_a_sequential_stem(shared_data):
    file = shared_data / "vit_micro_tinyimagenet100.safetensors"
    model = factory.create_model(ModelConfig(name="vit_micro", weights=str(file)), 100)
    held = load_file(file)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    torch.testing.assert_close(model.head.weight.half(), held["head.weight"])
    torch.testing.assert_close(model.patch_embed.backbone[1].conv.weight.half(), held["patch_embed.net.3.weight"])
    # A model that is really trained is far from chance on an image of its own kind: its logits are not flat.
    assert model.eval()(torch.randn(1, 3, 32, 32)).softmax(-1).max() > 0.05


# ---------------------------------------------------------------------------------------------- files
@pytest.mark.parametrize("form", ["safetensors", "half", "pth", "model", "ema", "ddp", "lightning", "bin"])
def test_weights_in_the_formats_people_have(tmp_path, form):
    source = pretend_pretrained()
    weights = source.state_dict()
    if form in ("safetensors", "half"):
        file = tmp_path / "w.safetensors"
        save_file({k: v.half() if form == "half" else v for k, v in weights.items()}, file)
    else:
        file = tmp_path / ("w.bin" if form == "bin" else "w.pth")
        wrong = {k: torch.zeros_like(v) for k, v in weights.items()}
        held = {
            "pth": weights,
            "bin": weights,
            "model": {"model": weights, "epoch": 3},
            "ema": {"state_dict": wrong, "state_dict_ema": weights},
            "ddp": {"state_dict": {f"module.{k}": v for k, v in weights.items()}},
            "lightning": {"state_dict": {f"model.{k}": v for k, v in weights.items()}, "global_step": 1},
        }[form]
        torch.save(held, file)
    model = factory.create_model(small(weights=str(file)), 1000)
    tolerance = {"rtol": 1e-3, "atol": 1e-3} if form == "half" else {}
    assert_equal(model.state_dict(), weights, **tolerance)
    assert {v.dtype for v in model.state_dict().values()} == {torch.float32}
    # No second copy of the weights rides along with the model.
    assert "state_dict" not in model.pretrained_cfg or model.pretrained_cfg["state_dict"] is None


def test_a_head_of_another_size_is_made_anew_and_said(tmp_path, caplog):
    source = pretend_pretrained(1000)
    torch.save(source.state_dict(), tmp_path / "w.pth")
    model = factory.create_model(small(weights=str(tmp_path / "w.pth")), 7)
    assert model.head.weight.shape == (7, 16)
    assert_equal(backbone(model), backbone(source))
    assert "head (1000 classes in the file)" in caplog.text
    assert "made anew for 7 classes" in caplog.text


def test_a_file_without_a_head_is_taken(tmp_path, caplog):
    source = pretend_pretrained()
    save_file(backbone(source), tmp_path / "w.safetensors")
    model = factory.create_model(small(weights=str(tmp_path / "w.safetensors")), 7)
    assert_equal(backbone(model), backbone(source))
    assert "absent in the file" in caplog.text


def test_position_embeddings_are_resized(tmp_path):
    source = pretend_pretrained()
    torch.save(source.state_dict(), tmp_path / "w.pth")
    model = factory.create_model(small(weights=str(tmp_path / "w.pth"), image_size=(96, 128)), 1000)
    assert model.pos_embed.shape == (1, 1 + 6 * 8, 16)
    torch.testing.assert_close(model.pos_embed[:, 0], source.pos_embed[:, 0])
    assert model(torch.randn(1, 3, 96, 128)).shape == (1, 1000)
    assert factory.input_of(small(image_size=(96, 128))).size == (96, 128)


def test_original_jax_weights_of_the_vit_family(tmp_path):
    """The layout of the published .npz files: names and axes as in the original repository."""
    width, heads = 16, 2
    rng = np.random.default_rng(0)

    def array(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    held = {
        "cls": array(1, 1, width),
        "embedding/kernel": array(16, 16, 3, width),
        "embedding/bias": array(width),
        "Transformer/posembed_input/pos_embedding": array(1, 197, width),
        "Transformer/encoder_norm/scale": array(width),
        "Transformer/encoder_norm/bias": array(width),
        "head/kernel": array(width, 1000),
        "head/bias": array(1000),
    }
    for i in range(2):
        block, attention = f"Transformer/encoderblock_{i}", "MultiHeadDotProductAttention_1"
        for part in ("query", "key", "value"):
            held[f"{block}/{attention}/{part}/kernel"] = array(width, heads, width // heads)
            held[f"{block}/{attention}/{part}/bias"] = array(heads, width // heads)
        held[f"{block}/{attention}/out/kernel"] = array(heads, width // heads, width)
        held[f"{block}/{attention}/out/bias"] = array(width)
        for norm in ("LayerNorm_0", "LayerNorm_2"):
            held[f"{block}/{norm}/scale"], held[f"{block}/{norm}/bias"] = array(width), array(width)
        for dense, (a, b) in {"Dense_0": (width, 64), "Dense_1": (64, width)}.items():
            held[f"{block}/MlpBlock_3/{dense}/kernel"], held[f"{block}/MlpBlock_3/{dense}/bias"] = array(a, b), array(b)
    np.savez(tmp_path / "w.npz", **held)
    model = factory.create_model(small(weights=str(tmp_path / "w.npz")), 1000)
    kernel = held["Transformer/encoderblock_1/MlpBlock_3/Dense_0/kernel"]
    torch.testing.assert_close(model.blocks[1].mlp.fc1.weight.data, torch.from_numpy(kernel.T))
    torch.testing.assert_close(model.head.weight.data, torch.from_numpy(held["head/kernel"].T))

    np.savez(tmp_path / "other.npz", something=array(3))
    with pytest.raises(UserError, match="not the original JAX weights"):
        factory.create_model(small(weights=str(tmp_path / "other.npz")), 1000)


# ---------------------------------------------------------------------------------------------- files that will not do
def test_a_file_of_another_model_is_refused_with_names(tmp_path):
    weights = pretend_pretrained().state_dict()
    del weights["blocks.1.norm1.weight"]
    weights["extra.weight"] = torch.zeros(2)
    save_file(weights, tmp_path / "w.safetensors")
    with pytest.raises(UserError) as caught:
        factory.create_model(small(weights=str(tmp_path / "w.safetensors")), 7)
    assert "missing: blocks.1.norm1.weight" in str(caught.value)
    assert "unexpected: extra.weight" in str(caught.value)

    save_file(timm.create_model("resnet18").state_dict(), tmp_path / "resnet.safetensors")
    with pytest.raises(UserError, match=r"does not fit model\.name=vit_tiny.*and \d+ more"):
        factory.create_model(small(weights=str(tmp_path / "resnet.safetensors")), 7)


def test_a_backbone_of_another_width_is_refused(tmp_path):
    torch.save(pretend_pretrained().state_dict(), tmp_path / "w.pth")
    wider = small(weights=str(tmp_path / "w.pth"), kwargs={**SMALL, "embed_dim": 32})
    with pytest.raises(UserError, match="of another shape: cls_token"):
        factory.create_model(wider, 1000)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".npz"])
def test_damaged_files_are_refused(tmp_path, suffix):
    file = tmp_path / f"w{suffix}"
    if suffix == ".safetensors":
        save_file(pretend_pretrained().state_dict(), file)
        file.write_bytes(file.read_bytes()[:-100])
    elif suffix == ".pth":
        torch.save(pretend_pretrained().state_dict(), file)
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    else:
        file.write_bytes(b"not an archive")
    with pytest.raises(UserError, match=r"model\.weights=.*w\."):
        factory.create_model(small(weights=str(file)), 7)


def test_code_in_a_file_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"head.weight": Evil()}, tmp_path / "w.pth")
    with pytest.raises(UserError, match="cannot be read"):
        factory.create_model(small(weights=str(tmp_path / "w.pth")), 7)
    assert not (tmp_path / "ran").exists()


def test_a_file_without_tensors_is_refused(tmp_path):
    torch.save({"epoch": 3, "lr": 0.1}, tmp_path / "w.pth")
    with pytest.raises(UserError, match="holds no state dict"):
        factory.create_model(small(weights=str(tmp_path / "w.pth")), 7)


# ---------------------------------------------------------------------------------------------- names and arguments
def test_an_unknown_name_gets_a_suggestion():
    with pytest.raises(SettingError, match="Did you mean 'resnet50'"):
        factory.create_model(ModelConfig(name="resnt50", pretrained=False), 7)


def test_an_unknown_tag_lists_the_known_ones():
    with pytest.raises(SettingError, match=r"deit_small_patch16_224\.fb_in1k"):
        factory.create_model(ModelConfig(name="deit_small_patch16_224.nope", pretrained=False), 7)


def test_arguments_the_model_does_not_take_are_refused():
    with pytest.raises(UserError, match="no_such_argument"):
        factory.create_model(small(kwargs={"no_such_argument": 1}), 7)


def test_an_image_size_the_model_fails_on_is_refused():
    with pytest.raises(SettingError, match=r"model\.image_size.*224×224"):
        factory.create_model(ModelConfig(name="efficientformer_l1", pretrained=False, image_size=256), 7)


def test_random_weights_are_said(caplog):
    factory.create_model(small(), 7)
    assert [r.levelno for r in caplog.records if "RANDOM" in r.getMessage()] == [logging.WARNING]


def test_the_input_follows_the_model_and_the_configuration():
    own = factory.input_of(ModelConfig(name="swinv2_small_window8_256", pretrained=False))
    assert own.size == (256, 256)
    assert own.mean == pytest.approx((0.485, 0.456, 0.406))
    given = factory.input_of(small(image_size=96, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)))
    assert (given.size, given.mean, given.std) == ((96, 96), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


# ---------------------------------------------------------------------------------------------- the hub
@pytest.fixture
def empty_cache(tmp_path, monkeypatch) -> Path:
    """A hub cache with nothing in it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def pretrained(name: str = "resnet18.a1_in1k") -> ModelConfig:
    return ModelConfig(name=name, pretrained=True)


def test_offline_says_what_where_and_what_instead(empty_cache, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    text = factory.missing_weights(pretrained())
    assert text is not None
    for part in (
        "HF_HUB_OFFLINE",
        "timm/resnet18.a1_in1k",
        "model.safetensors",
        "model.weights=FILE",
        "pretrained=false",
    ):
        assert part in text
    with pytest.raises(UserError, match="could not be fetched"):
        factory.create_model(pretrained(), 7)


def test_a_host_that_never_answers_is_given_up_soon(empty_cache, monkeypatch):
    import socket

    silent = socket.socket()
    silent.bind(("127.0.0.1", 0))
    silent.listen()
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(factory, "NETWORK_SECONDS", 1.5)
    monkeypatch.setattr(factory, "hf_hub_url", lambda *a, **k: f"http://127.0.0.1:{silent.getsockname()[1]}/w")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    started = time.monotonic()
    text = factory.missing_weights(pretrained())
    silent.close()
    assert text is not None
    assert "could not be fetched" in text
    # Bounded by design, not fast by luck: a stuck look-up would take minutes.
    assert time.monotonic() - started < 30


def test_weights_in_the_local_cache_need_no_network(empty_cache, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.manual_seed(3)
    source = timm.create_model("resnet18")
    commit = "0" * 40
    snapshot = empty_cache / "models--timm--resnet18.a1_in1k" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    reference = empty_cache / "models--timm--resnet18.a1_in1k" / "refs" / "main"
    reference.parent.mkdir()
    reference.write_text(commit)
    save_file(source.state_dict(), snapshot / "model.safetensors")
    assert factory.missing_weights(pretrained()) is None
    model = factory.create_model(pretrained(), 5)
    torch.testing.assert_close(model.layer3[0].conv1.weight, source.layer3[0].conv1.weight)
    assert model.fc.out_features == 5


def test_nothing_is_missing_where_nothing_is_wanted(tmp_path):
    assert factory.missing_weights(small()) is None
    (tmp_path / "w.pth").write_bytes(b"")
    assert factory.missing_weights(small(weights=str(tmp_path / "w.pth"))) is None
    assert "no such file" in str(factory.missing_weights(small(weights=str(tmp_path / "none.pth"))))


def test_a_model_without_published_weights_says_so():
    text = factory.missing_weights(pretrained("vit_digits"))
    assert "no pretrained weights for model.name=vit_digits" in str(text)
    assert "model.pretrained=false" in str(text)


def test_a_head_made_anew_may_start_at_zero(tmp_path):
    file = tmp_path / "weights.safetensors"
    save_file(pretend_pretrained(10).state_dict(), file)
    anew, own, random = (
        factory.create_model(small(zero_head=True, **settings), classes)
        for settings, classes in (({"weights": str(file)}, 3), ({"weights": str(file)}, 10), ({}, 3))
    )
    for model in (anew, random):
        assert not any(p.any() for p in model.head.parameters())
        assert model.blocks[0].attn.qkv.weight.any()
    assert own.head.weight.any(), "a head of the file is kept"
