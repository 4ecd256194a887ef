"""Tests of block indices: an unsupported model is rejected before the indices are checked."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.methods import BSR, ALaST, BSRMoE, EViT, MoE, RepNet


@pytest.mark.parametrize(
    ("method", "name", "message"),
    [
        (lambda: EViT([99]), "beit_base_patch16_224", "attention uses relative position biases"),
        (lambda: BSR([99], [1]), "beit_base_patch16_224", "attention uses relative position biases"),
        (lambda: BSR([1], [99]), "beit_base_patch16_224", "attention uses relative position biases"),
        (lambda: BSRMoE(2, 1, [99]), "beit_base_patch16_224", "attention uses relative position biases"),
        (lambda: ALaST(99), "beit_base_patch16_224", "attention uses relative position biases"),
        (lambda: MoE(2, 1, [99]), "regnetx_002", "s1.b1 of regnetx_002 has no mlp"),
        (lambda: RepNet([99]), "regnetx_002", "side modules support only .* are 13 Bottleneck"),
    ],
)
def test_a_model_that_cannot_serve_is_refused_before_an_index(method: Any, name: str, message: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    with pytest.raises(UserError, match=message) as error:
        method().apply(model)
    assert not isinstance(error.value, SettingError)
