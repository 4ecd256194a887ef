"""Tests of the storage formats of features: values are restored within their precision, or rejected."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from efficient_ft.core.errors import UserError
from efficient_ft.training.features.row_form import FORMS, RowForm


@settings(max_examples=30, deadline=None)
@given(values=st.integers(1, 300), count=st.integers(1, 5), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_values_come_back_within_the_precision_of_the_form(values: int, count: int, dtype: torch.dtype) -> None:
    x = (torch.randn(count, values, generator=torch.Generator().manual_seed(values)) * 5).to(dtype)
    for name in FORMS:
        form = RowForm(name, values)
        rows = form.encode(x)
        assert (rows.dtype, rows.shape) == (torch.uint8, (count, form.bytes))
        found = form.decode(rows)
        assert (found.dtype, found.shape) == (torch.float32, (count, values))
        if name == "fp32":
            assert torch.equal(found, x.float())
        elif name == "fp16":
            assert torch.equal(found, x.float().half().float())
        else:  # half a step of 255 steps per group, plus fp16 rounding
            for begin in range(0, values, 64):
                part, back = x[:, begin : begin + 64].float(), found[:, begin : begin + 64]
                span = (part.amax(1) - part.amin(1))[:, None]
                assert ((part - back).abs() <= span * (0.5 / 255 + 2e-3) + part.abs().amax() * 2e-3).all()
        alone = form.encode(x[-1:])
        assert torch.equal(alone, rows[-1:]), "a row does not depend on the others"


@pytest.mark.parametrize("name", ["fp16", "int8"])
def test_values_that_a_form_does_not_hold_are_refused(name: str) -> None:
    large = torch.tensor([[0.0, 1.0, 1e9]])
    with pytest.raises(UserError, match=rf"too large to be stored as {name}\. Store the features as fp32\."):
        RowForm(name, 3).encode(large)
    assert torch.equal(RowForm("fp32", 3).decode(RowForm("fp32", 3).encode(large)), large)
    assert RowForm(name, 3).decode(RowForm(name, 3).encode(torch.tensor([[0.0, 1.0, torch.nan]])))[0, 2].isnan()
