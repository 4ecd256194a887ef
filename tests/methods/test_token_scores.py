"""Tests of the scores of tokens in lower precision."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import Block
from torch import Tensor

from efficient_ft.methods.tokens import base


def scores_of(block: Any, x: Tensor, fused: bool, half: bool) -> Tensor:
    """Return the recorded scores of a block, with bf16 autocast if `half` is True."""
    block.attn.fused_attn = fused
    recorded = base.Attention(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=half), recorded:
        block.attn(x)
    assert recorded.scores_BL is not None
    return recorded.scores_BL


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("bias", [False, True])
def test_scores_are_computed_in_single_precision_under_autocast(monkeypatch: Any, fused: bool, bias: bool) -> None:
    """Fused and unfused attention keep the same tokens in bf16, and nearly the same tokens as in fp32."""
    torch.manual_seed(0)
    block = Block(64, 4, qkv_bias=True)
    with torch.no_grad():
        block.attn.qkv.weight.mul_(2)
    x = torch.randn(8, 197, 64)
    if bias:  # The softmax does not receive the product itself.
        monkeypatch.setattr(timm.layers.attention, "maybe_add_mask", lambda scores, _mask: scores + 0)
    found = scores_of(block, x, fused, True)
    expected = scores_of(block, x, fused, False)
    assert found.dtype == torch.float32
    rows = [len(set(row.tolist())) for row in found]
    assert min(rows) >= 195, "nearly all scores differ"
    kept = [set(row.tolist()) for row in found.topk(98).indices]
    kept_exact = [set(row.tolist()) for row in expected.topk(98).indices]
    shared = sum(len(a & b) for a, b in zip(kept, kept_exact, strict=True)) / (8 * 98)
    assert shared > (0.98 if bias else 0.99), shared
    if not bias:
        assert torch.equal(found, scores_of(block, x, not fused, True))


def test_gradients_flow_through_single_precision_scores_of_unfused_attention() -> None:
    torch.manual_seed(0)
    block, x = Block(64, 4), torch.randn(2, 17, 64)
    weight, g = block.attn.qkv.weight, torch.randn(2, 16)
    exact, found = (
        torch.autograd.grad((scores_of(block, x, False, half) * g).sum(), weight)[0] for half in (False, True)
    )
    assert torch.nn.functional.cosine_similarity(exact.flatten(), found.flatten(), dim=0) > 0.999
