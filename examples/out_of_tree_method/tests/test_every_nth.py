"""Test the trained blocks of EveryNth, its position in a combination of methods, and its errors."""

from __future__ import annotations

import pytest
from every_nth_method import EveryNth

from efficient_ft.core.errors import SettingError
from efficient_ft.methods import LBPWHT, METHODS, apply_methods
from efficient_ft.testing import model_of


def test_every_second_block_trains() -> None:
    model = model_of("vit")
    report = EveryNth(2).apply(model)
    assert report.touched == ("blocks.0", "blocks.2", "head")
    assert set(report.skipped) >= {"blocks.1", "blocks.3", "patch_embed"}


def test_it_is_on_the_command_line_and_can_be_stacked() -> None:
    assert METHODS["every_nth"] is EveryNth
    assert METHODS.distribution("every_nth") == "every-nth-method"
    reports = apply_methods(model_of("vit"), [LBPWHT(order=3), EveryNth(2)])
    assert [report.method for report in reports] == ["every_nth", "lbp_wht"]


@pytest.mark.parametrize("n", [0, -1, 1.5, True, "2"])
def test_n_out_of_range_is_named(n: object) -> None:
    with pytest.raises(SettingError, match="n must be an integer >= 1"):
        EveryNth(n)  # type: ignore[arg-type]
