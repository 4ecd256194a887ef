"""Test the counted costs of SampledRows, its choice of layers, its axes, and its errors."""

from __future__ import annotations

from typing import Any

import pytest
from every_nth_method import SampledRows

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.cost import executed
from efficient_ft.methods import Mesa, apply_methods
from efficient_ft.testing import model_of


def test_counts_on_fake_tensors_show_fewer_flops_and_bytes() -> None:
    plain = executed(model_of("vit").float(), 2, (32, 32))
    model, method = model_of("vit").float(), SampledRows()
    method.apply(model)
    count = executed(model, 2, (32, 32), methods=[method])
    assert count.saved_bytes < plain.saved_bytes
    assert count.backward_flops < plain.backward_flops
    assert count.forward_flops == plain.forward_flops


def test_layers_can_be_left_exact() -> None:
    report = SampledRows(skip=["attn", "fc2"]).apply(model_of("vit"))
    assert report.touched == tuple(f"blocks.{n}.mlp.fc1" for n in range(4))


def test_it_acts_on_two_axes() -> None:
    with pytest.raises(UserError, match="sampled_rows"):
        apply_methods(model_of("vit"), [SampledRows(), Mesa()])


@pytest.mark.parametrize("settings", [{"rows": 0}, {"rows": True}, {"stride": 0}, {"stride": 1.5}, {"skip": "attn"}])
def test_settings_out_of_range_are_named(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=next(iter(settings))):
        SampledRows(**settings)
