"""Tests of the papers' rule against their tables and small networks counted by hand."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import timm
import torch
from timm.layers import set_fused_attn
from torch import Tensor, nn

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.cost import executed, published
from efficient_ft.cost.published import (
    BSR_RULE,
    DENSE,
    MESA,
    TINYTL_RULE,
    Keeping,
    back_razor,
    operations,
)
from efficient_ft.methods import BSR, BackRazor, BitFit, EViT
from efficient_ft.models.frozen_batch_norm import freeze_batch_norm
from tests.cost.flat import Flat


# ---------------------------------------------------------------------------------------------- by hand
def test_a_small_network_by_hand():
    model = Flat(nn.Linear(12, 40), nn.ReLU(), nn.LayerNorm(40), nn.GELU(), nn.Linear(40, 5))
    total = sum(p.numel() for p in model.parameters())
    count = published(model, 3, (2, 2))
    kept = 4 * 12 + 40 / 8 + 4 * 40 + 4 * 40
    assert count.parameter_bytes == 4 * total
    assert count.activation_bytes == kept + 4 * (40 + 5)
    assert count.peak_at == "layers.4"
    assert count.macs == 12 * 40 + 40 * 5
    assert count.bytes == 4 * total + 3 * count.activation_bytes

    # With the first layer and the normalization frozen, only the last layer has a gradient.
    for layer in (model.layers[0], model.layers[2]):
        layer.requires_grad_(False)
    count = published(model, 3, (2, 2))
    assert count.parameter_bytes == 4 * (200 + 5) + (total - 205)
    assert count.activation_bytes == 4 * (12 + 40)
    assert count.peak_at == "layers.0"

    # A trained bias requires a gradient but does not save its layer's input.
    model.layers[0].bias.requires_grad_(True)
    assert [op.saved for op in operations(model, (2, 2))] == [0, 5, 0, 160, 160]


def test_packing_changes_what_is_kept_and_not_what_runs():
    model = Flat(nn.Linear(12, 40), nn.ReLU(), nn.LayerNorm(40), nn.GELU(), nn.Linear(40, 5))
    count = published(model, 1, (2, 2), Keeping(product=1, norm=2, activation=3))
    assert count.activation_bytes == 12 + 40 / 8 + 2 * 40 + 3 * 40 + 4 * (40 + 5)
    assert back_razor(0.75) == Keeping(0.625, 0.625, 2)
    assert back_razor(0.75, norm_bytes=4) == Keeping(0.625, 1.125, 2)
    assert back_razor(0.75, 1) == Keeping(0.375, 0.375, 1)


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 1)
        self.wide = nn.Conv2d(8, 32, 1, bias=False)
        self.depthwise = nn.Conv2d(32, 32, 3, padding=1, groups=32, bias=False)
        self.narrow = nn.Conv2d(32, 8, 1, bias=False)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.narrow(self.depthwise(self.wide(x)))
        return self.head(x.mean((2, 3)))


def test_a_residual_block_by_hand():
    n = 4 * 4
    found = {op.name: op for op in operations(Branch(), (4, 4))}
    assert {name: op.residual for name, op in found.items()} == {
        "stem": 0, "wide": 4 * 8 * n, "depthwise": 4 * 8 * n, "narrow": 4 * 8 * n, "head": 0,
    }  # fmt: skip
    assert found["wide"].tmp == 4 * (8 + 32) * n
    assert found["depthwise"].tmp == 4 * (32 + 1) * n  # the output of one channel at a time
    assert [op.saved for op in found.values()] == [4 * 3 * n, 4 * 8 * n, 4 * 32 * n, 4 * 32 * n, 4 * 8]
    assert [op.macs for op in found.values()] == [n * 3 * 8, n * 8 * 32, n * 32 * 9, n * 32 * 8, 8 * 2]
    assert published(Branch(), 1, (4, 4)).activation_bytes == 4 * n * (3 + 8 + 32 + (32 + 8) + 8)


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False])
def test_an_attention_block_keeps_what_the_reference_says(fused):
    set_fused_attn(fused)
    try:
        model = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=64, num_classes=3)
    finally:
        set_fused_attn(True)
    d, a = 17 * 192, 3 * 17**2

    def block(model: nn.Module, keeping: Keeping = DENSE) -> float:
        """Return the bytes that the second block saves according to the rule."""
        of_kind = {"product": keeping.product, "attention": keeping.product, "norm": keeping.norm}
        of_kind["activation"] = keeping.activation
        ops = [op for op in operations(model, (64, 64)) if op.in_block]
        return sum(op.saved * of_kind[op.kind] / 4 for op in ops[len(ops) // 2 :])

    assert block(model) == 4 * (18 * d + a)
    assert block(model, MESA) == 18 * d + a
    assert block(model, back_razor(0.8, norm_bytes=4)) == pytest.approx(
        (12 * d + a) * (2 * 0.2 + 1 / 8) + 2 * d * (4 * 0.2 + 1 / 8) + 8 * d
    )
    # The inputs of the patch embedding and of the final normalization are not packed.
    dense, packed = (published(model, 1, (64, 64), k).activation_bytes for k in (DENSE, MESA))
    difference = 2 * (block(model) - block(model, MESA))
    assert dense - packed == pytest.approx(difference - 4 * d * (4 - 1))  # the peak is in the last fc2
    BitFit().apply(model)
    assert block(model) == 4 * (7 * d + a)


#: Vision transformers with register tokens, LayerScale, a distillation token, or norms of q and k.
FORMS: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {},
    "deit_tiny_distilled_patch16_224": {},
    "vit_small_patch14_reg4_dinov2": {},
    "vit_tiny_patch16_224 q and k norm": {"qk_norm": True},
}


#: All pairs of two settings are tested by default. The other half of the combinations is slow.
BSR_CASES = [
    case if (index + case[1] + case[2]) % 2 else pytest.param(*case, marks=pytest.mark.slow)
    for index, form in enumerate(FORMS)
    for case in product([form], [True, False], [True, False])
]


@pytest.mark.first(2, "slow")
@pytest.mark.parametrize(("form", "fuse", "fused"), BSR_CASES)
def test_bsr_s_rule_by_hand(form, fuse, fused):
    d, heads, depth, classes = 24, 3, 5, 7
    size = {"img_size": 20, "patch_size": 4, "depth": depth, "embed_dim": d, "num_heads": heads}
    set_fused_attn(fused)
    try:
        model: Any = timm.create_model(form.split()[0], num_classes=classes, **{**size, **FORMS[form]})
    finally:
        set_fused_attn(True)
    BSR([1, 3], [1, 2], 0.3, fuse).apply(model)
    prefix = model.num_prefix_tokens
    after = [25, 8 + fuse, 3 + fuse]  # ⌈.3 · 25⌉; ⌈.3 · 8⌉ = ⌈.3 · 9⌉
    attn = [prefix + after[i] for i in (0, 0, 1, 2, 2)]
    ffn = [prefix + after[i] for i in (0, 1, 2, 2, 2)]
    norms = 2 * d * ("qk_norm" in FORMS[form])  # trained norms also save their inputs

    keeps = []
    for i, (n, m) in enumerate(zip(attn, ffn, strict=True)):
        trains = (6 * n + 10 * m) * d + heads * n**2 + n * norms
        keeps.append(0 if i == 0 else 4 * (trains if i in (1, 3) else (3 * n + 4 * m) * d + heads * n**2))
    ops = operations(model, (20, 20), rule=BSR_RULE)
    for i in range(depth):
        assert sum(op.saved for op in ops if op.name.startswith(f"blocks.{i}")) == keeps[i]
    macs = sum(4 * d**2 * n + 2 * d * n**2 + 8 * d**2 * m for n, m in zip(attn, ffn, strict=True))
    head = d * classes * (1 + hasattr(model, "head_dist"))
    count = published(model, 3, (20, 20), rule=BSR_RULE)
    assert count.macs == 25 * 48 * d + macs + head
    assert all(op.residual == 0 for op in ops)


@pytest.mark.vary_one
@pytest.mark.parametrize("rule", [TINYTL_RULE, BSR_RULE])
@pytest.mark.parametrize("fused", [True, False])
def test_choosing_tokens_counts_nothing(fused, rule):
    set_fused_attn(fused)
    try:
        model = timm.create_model("vit_tiny_patch16_224", depth=4, img_size=64, num_classes=3)
    finally:
        set_fused_attn(True)
    plain = operations(model, (64, 64), rule=rule)
    evit = EViT([1, 2], 1.0)
    evit.apply(model)
    assert operations(model, (64, 64), rule=rule) == plain
    evit.remove(model)
    EViT([1, 2], 0.5).apply(model)
    fewer = operations(model, (64, 64), rule=rule)
    assert [(op.name, op.kind) for op in fewer] == [(op.name, op.kind) for op in plain]
    assert sum(op.macs for op in fewer) < sum(op.macs for op in plain)


@pytest.mark.slow
def test_a_method_of_the_memory_axis_and_frozen_statistics_change_nothing():
    def count(model: nn.Module) -> float:
        return published(model, 2, (64, 64)).bytes

    model = timm.create_model("resnet26", layers=(1, 1, 1, 1), num_classes=3)
    model.bn1.weight.requires_grad_(False)
    plain = count(model)
    freeze_batch_norm(model)
    assert count(model) == plain
    BackRazor().apply(model)
    assert count(model.train()) == plain
    assert model.training
    assert all(p.device.type == "cpu" and p.grad is None for p in model.parameters())


@pytest.mark.first(1, "slow")
@pytest.mark.parametrize(
    ("name", "arguments", "size"),
    [
        ("swinv2_tiny_window8_256", {"img_size": 64, "depths": (2, 1), "num_heads": (3, 6)}, (64, 64)),
        ("efficientformer_l1", {"depths": (1, 1, 2, 2)}, (224, 224)),
        ("xcit_nano_12_p16_224", {"depth": 3, "cls_attn_layers": 1}, (64, 64)),
    ],
)
def test_other_models_are_counted(name, arguments, size):
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=3, **arguments)
    ops = operations(model, size)
    assert any(op.kind == "attention" for op in ops)
    assert sum(op.in_block for op in ops) > len(ops) / 2
    assert published(model, 1, size, MESA).bytes < published(model, 1, size).bytes


PAIR = "a pair (height, width) of integers >= 1"


def test_an_image_size_that_the_model_refuses_is_named():
    model = timm.create_model("vit_tiny_patch16_224", depth=1)
    with pytest.raises(UserError, match="cannot be run on images of 100×100"):
        published(model, 1, (100, 100))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: published(model, 0, (2, 2)), "batch_size must be an integer >= 1, got 0."),
        (lambda model: published(model, 1, (2,)), f"input_size must be {PAIR}, got (2,)."),
        (lambda model: published(model, 1, (2, 0)), f"input_size must be {PAIR}, got (2, 0)."),
        (lambda model: published(model, 1, (2, 2), in_chans=0), "in_chans must be an integer >= 1, got 0."),
        (lambda model: back_razor(1.0), "sparsity must be a number >= 0 and < 1, got 1.0."),
        (lambda model: back_razor(-0.1), "sparsity must be a number >= 0 and < 1, got -0.1."),
        (lambda model: back_razor(0.5, 3), "value_bytes must be one of 1, 2, 4, got 3."),
        (lambda model: back_razor(0.5, norm_bytes=0), "norm_bytes must be one of 1, 2, 4, got 0."),
    ],
)
def test_settings_out_of_range_are_refused(call, message):
    with pytest.raises(SettingError) as error:
        call(Flat(nn.Linear(12, 5)))
    assert str(error.value).startswith(message)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drop_at", "keep", "gmacs"),
    [([1, 3, 5, 7, 9], 0.7, 270.0), ([5, 7, 9], 0.3, 310.6)],
)
def test_what_is_executed_agrees_with_bsr_s_table_8(drop_at, keep, gmacs):
    with torch.device("meta"):
        model = timm.create_model("deit_small_patch16_224", num_classes=10)
    found = executed(model, 1, (224, 224), methods=[EViT(drop_at, keep)])
    assert found.forward_flops / 2 * 128 / 1e9 == pytest.approx(gmacs, rel=0.002)
