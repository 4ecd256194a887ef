"""Tests of weights in common file formats, and of files that do not match the network."""

from __future__ import annotations

import os

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

from efficient_ft.core.errors import UserError
from efficient_ft.models import factory
from tests.models.small_vit import SMALL, assert_equal, assert_refused, backbone, pretend_pretrained, small


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
    # The model does not store a second copy of the weights.
    assert "state_dict" not in model.pretrained_cfg or model.pretrained_cfg["state_dict"] is None


def test_a_head_of_another_size_is_newly_initialized_and_logged(tmp_path, caplog):
    caplog.set_level("INFO")
    source = pretend_pretrained(1000)
    torch.save(source.state_dict(), tmp_path / "w.pth")
    model = factory.create_model(small(weights=str(tmp_path / "w.pth")), 7)
    assert model.head.weight.shape == (7, 16)
    assert_equal(backbone(model), backbone(source))
    assert "Weights: 30 of 32 tensors from" in caplog.text
    assert "head newly initialized for 7 classes (1000 in the file)" in caplog.text


def test_a_file_without_a_head_is_taken(tmp_path, caplog):
    caplog.set_level("INFO")
    source = pretend_pretrained()
    save_file(backbone(source), tmp_path / "w.safetensors")
    model = factory.create_model(small(weights=str(tmp_path / "w.safetensors")), 7)
    assert_equal(backbone(model), backbone(source))
    assert "absent from the file" in caplog.text


def test_position_embeddings_are_resized(tmp_path):
    source = pretend_pretrained()
    torch.save(source.state_dict(), tmp_path / "w.pth")
    model = factory.create_model(small(weights=str(tmp_path / "w.pth"), image_size=(96, 128)), 1000)
    assert model.pos_embed.shape == (1, 1 + 6 * 8, 16)
    torch.testing.assert_close(model.pos_embed[:, 0], source.pos_embed[:, 0])
    assert model(torch.randn(1, 3, 96, 128)).shape == (1, 1000)
    assert factory.input_of(small(image_size=(96, 128))).size == (96, 128)


@pytest.mark.slow
def test_original_jax_weights_of_the_vit_family(tmp_path):
    """The published .npz files load, with their own parameter names and axis order."""
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
    assert_refused(r"fits model\.name=vit_tiny", tmp_path / "other.npz")


@pytest.mark.slow
def test_a_file_of_another_model_is_refused_with_names(tmp_path):
    weights = pretend_pretrained().state_dict()
    del weights["blocks.1.norm1.weight"]
    weights["extra.weight"] = torch.zeros(2)
    save_file(weights, tmp_path / "w.safetensors")
    assert_refused(r"missing: blocks\.1\.norm1\.weight", tmp_path / "w.safetensors")

    save_file(timm.create_model("resnet18").state_dict(), tmp_path / "resnet.safetensors")
    said = r"a file that fits model\.name=vit_tiny.*none of its 122 names.*and \d+ more.*model\.name=resnet18"
    assert_refused(said, tmp_path / "resnet.safetensors")


@pytest.mark.slow
def test_a_backbone_of_another_width_is_refused(tmp_path):
    torch.save(pretend_pretrained().state_dict(), tmp_path / "w.pth")
    wider = small(weights=str(tmp_path / "w.pth"), kwargs={**SMALL, "embed_dim": 32})
    with pytest.raises(UserError, match="the file has 2 blocks of width 16, but the model has 2 of width 32"):
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
        np.savez(file, **{name: value.numpy() for name, value in pretend_pretrained().state_dict().items()})
        file.write_bytes(file.read_bytes()[:-100])
    assert_refused(r"model\.weights must be .*, got .*w\..*cannot be read", file)


def test_code_in_a_file_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"head.weight": Evil()}, tmp_path / "w.pth")
    assert_refused("cannot be read", tmp_path / "w.pth")
    assert not (tmp_path / "ran").exists()


def test_a_file_without_tensors_is_refused(tmp_path):
    torch.save({"epoch": 3, "lr": 0.1}, tmp_path / "w.pth")
    assert_refused(r"state dict.*The file contains epoch, lr\.", tmp_path / "w.pth")
