"""Tests of the figures of a model and a batch of images against plain computations."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from efficient_ft.cli.commands import run_command
from efficient_ft.config import Config, check
from efficient_ft.core.errors import UserError
from efficient_ft.papers.published import figures
from efficient_ft.report import model_figures, paper_figures
from efficient_ft.report.model_figures import FIGURES, _model_and_batch, model_figure
from tests.conftest import unwrapped
from tests.training.runs import plain_config


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, chance = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for split in ("train", "val", "test"):
        for name in ("a", "b"):
            (root / split / name).mkdir(parents=True)
            for i in range(6):
                pixels = chance.integers(0, 255, (48, 48, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{i}.png")
    return root


def config(images: Path, **model: Any) -> Config:
    small = {"name": "vit_tiny_patch16_224", "pretrained": False, "image_size": 64,
             "kwargs": {"depth": 6, "embed_dim": 48, "num_heads": 3}, **model}  # fmt: skip
    return check(plain_config(model=small, data={"name": "folder", "root": str(images), "batch_size": 4}))


def test_relative_magnitudes_are_those_of_each_block(images: Path) -> None:
    of = config(images)
    torch.manual_seed(0)
    model, batch, _ = _model_and_batch(of)
    torch.manual_seed(0)
    (series,) = model_figure("alast/figure_2", of).panels[0].series
    with torch.no_grad():
        x = model.patch_drop(model._pos_embed(model.patch_embed(batch)))
        for block, value in zip(model.blocks, series.y, strict=True):
            y = block(x)
            assert value == pytest.approx(float(((y - x).norm(dim=-1) / y.norm(dim=-1)).mean()), rel=1e-4)
            x = y


def test_class_attention_is_the_softmax_of_its_block(images: Path) -> None:
    of = config(images)
    torch.manual_seed(0)
    model, batch, _ = _model_and_batch(of)
    torch.manual_seed(0)
    chart = model_figure("alast/figure_4", of)
    assert [panel.title for panel in chart.panels] == ["block 2", "block 4", "block 6"]
    timm.layers.set_fused_attn(False)
    attention = model.blocks[3].attn
    attention.fused_attn = False
    seen: list[torch.Tensor] = []
    attention.attn_drop.register_forward_hook(lambda module, args, out: seen.append(out))
    with torch.no_grad():
        model(batch[:1])
    timm.layers.set_fused_attn(True)
    np.testing.assert_allclose(chart.panels[1].series[0].y, seen[0][0, :, 0, 1:].mean(0).numpy(), rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("vit_small_patch16_dinov3", {"embed_dim": 48}),  # rotary embeddings and register tokens
        ("eva02_tiny_patch14_224", {"patch_size": 16, "embed_dim": 48}),  # rotary embeddings and separate biases
        ("beit_base_patch16_224", {"embed_dim": 48}),  # a bias of relative positions
    ],
)
def test_class_attention_contains_biases_and_rotary_embeddings(
    images: Path, monkeypatch: pytest.MonkeyPatch, name: str, kwargs: dict[str, Any]
) -> None:
    of = config(images, name=name, kwargs={"depth": 4, "num_heads": 3, **kwargs})
    model, batch, labels = _model_and_batch(of)
    torch.manual_seed(0)
    for parameter in model.parameters():  # Small random weights would result in nearly uniform attention.
        torch.nn.init.normal_(parameter, std=0.3)
    monkeypatch.setattr(model_figures, "_model_and_batch", lambda _: (model, batch, labels))
    expected: list[torch.Tensor] = []
    softmax = torch.Tensor.softmax

    def recorded(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        expected.append(softmax(x, *args, **kwargs))
        return expected[-1]

    def modules() -> list[tuple[bool, int]]:
        return [(block.attn.fused_attn, len(block.attn.attn_drop._forward_pre_hooks)) for block in model.blocks]

    before = modules()
    chart = model_figure("alast/figure_4", of)
    assert modules() == before == [(True, 0)] * 4
    for block in model.blocks:
        block.attn.fused_attn = False
    monkeypatch.setattr(torch.Tensor, "softmax", recorded)
    with torch.no_grad():
        model(batch[:1])
    assert [panel.title for panel in chart.panels] == ["block 2", "block 4"]
    for panel, probabilities in zip(chart.panels, (expected[1], expected[3]), strict=True):
        of_patches = probabilities[0, :, 0, -16:].mean(0)
        assert of_patches.std() > 0.01, "not uniform"
        np.testing.assert_allclose(panel.series[0].y, of_patches.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "kwargs", "said"),
    [
        ("cait_xxs24_224", {"embed_dim": 48, "num_heads": 3}, "has no class token with a grid of patches"),
        ("vit_base_patch16_siglip_224", {"embed_dim": 48, "num_heads": 3}, "has no class token with a grid of patches"),
        (
            "vit_small_patch16_18x2_224",
            {"embed_dim": 48, "num_heads": 3},
            r"blocks\.1 of the model .* has no attention module",
        ),
    ],
)
def test_attention_without_probabilities_of_the_class_token_is_rejected(
    images: Path, name: str, kwargs: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        model_figure("alast/figure_4", config(images, name=name, kwargs={"depth": 2, **kwargs}))


def test_the_spectrum_adds_up_and_is_that_of_the_gradient(images: Path) -> None:
    of = config(images, kwargs={"depth": 2, "embed_dim": 48, "num_heads": 3})
    (series,) = model_figure("lbp_wht/figure_5", of).panels[0].series
    assert series.name == "blocks.1.attn.qkv", "behind it only the class token has a gradient"
    assert len(series.y) == 64
    assert sum(series.y) == pytest.approx(1, abs=1e-5)


@pytest.mark.slow
def test_training_memory_follows_the_rule(images: Path) -> None:
    (series,) = model_figure("back_razor/figure_1", config(images)).panels[0].series
    memory = dict(zip(series.x, series.y, strict=True))
    assert memory["ViT-B"] > 2 * memory["ViT-B (BitFit)"]
    # Back Razor, Table 3: 19,235 MiB at batch size 128, including 328 MiB of parameters.
    assert memory["ViT-B"] == pytest.approx((19235 - 328) / 8 + 328, rel=0.01)


def test_missing_images_or_weights_are_said(images: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none"):
        model_figure("alast/figure_2", config(tmp_path / "none"))
    with pytest.raises(UserError, match="has no class token with a grid"):
        model_figure("alast/figure_4", config(images, name="resnet18", kwargs={}))


def test_the_command_composes_the_model(images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["model=vit_digits", "data=digits", "--out", str(tmp_path)]
    run_command("figure", ["alast/figure_2", *given])
    rows = list(csv.DictReader((tmp_path / "alast_figure_2.csv").read_text().splitlines()))
    assert len(rows) >= 4
    with pytest.raises(SystemExit):
        run_command("figure", ["alast/figure_3", *given])
    assert "figure must be one of lbp_wht/figure_3" in unwrapped(capsys.readouterr().err)
    with pytest.raises(SystemExit):
        run_command("figure", ["alast/figure_9"])
    assert "is drawn from runs" in unwrapped(capsys.readouterr().err)


def test_every_figure_of_the_papers_is_drawn() -> None:
    assert {figure.name for figure in figures()} == set(FIGURES) | set(paper_figures.FIGURES)
    assert all(figure.command for figure in figures())
