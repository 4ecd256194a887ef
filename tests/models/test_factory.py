"""Tests of classifiers with unsupported image sizes, random weights and a zero-initialized head."""

from __future__ import annotations

import logging

import pytest
from safetensors.torch import save_file

from efficient_ft.config import ModelConfig
from efficient_ft.core.errors import SettingError
from efficient_ft.models import factory
from tests.models.small_vit import pretend_pretrained, small


def test_an_image_size_the_model_fails_on_is_refused():
    with pytest.raises(SettingError, match=r"model\.image_size.*224×224"):
        factory.create_model(ModelConfig(name="efficientformer_l1", pretrained=False, image_size=256), 7)


def test_random_weights_are_logged(caplog):
    factory.create_model(small(), 7)
    assert [r.levelno for r in caplog.records if "RANDOM" in r.getMessage()] == [logging.WARNING]


def test_a_new_head_may_start_at_zero(tmp_path):
    file = tmp_path / "weights.safetensors"
    save_file(pretend_pretrained(10).state_dict(), file)
    new, own, random = (
        factory.create_model(small(zero_head=True, **settings), classes)
        for settings, classes in (({"weights": str(file)}, 3), ({"weights": str(file)}, 10), ({}, 3))
    )
    for model in (new, random):
        assert not any(p.any() for p in model.head.parameters())
        assert model.blocks[0].attn.qkv.weight.any()
    assert own.head.weight.any(), "the file's head is kept"
