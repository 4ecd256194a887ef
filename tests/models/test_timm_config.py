"""Tests of the conversion of a model configuration to timm's arguments."""

from __future__ import annotations

import pytest

from efficient_ft.config import ModelConfig
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.models import factory
from tests.models.small_vit import small


def test_an_unknown_name_gets_a_suggestion():
    with pytest.raises(SettingError, match="Did you mean 'resnet50'"):
        factory.create_model(ModelConfig(name="resnt50", pretrained=False), 7)


def test_an_unknown_tag_lists_the_known_ones():
    with pytest.raises(SettingError, match=r"deit_small_patch16_224\.fb_in1k"):
        factory.create_model(ModelConfig(name="deit_small_patch16_224.nope", pretrained=False), 7)


def test_arguments_the_model_does_not_take_are_refused():
    with pytest.raises(UserError, match="no_such_argument"):
        factory.create_model(small(kwargs={"no_such_argument": 1}), 7)


def test_the_input_follows_the_model_and_the_configuration():
    own = factory.input_of(ModelConfig(name="swinv2_small_window8_256", pretrained=False))
    assert own.size == (256, 256)
    assert own.mean == pytest.approx((0.485, 0.456, 0.406))
    given = factory.input_of(small(image_size=96, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)))
    assert (given.size, given.mean, given.std) == ((96, 96), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
