"""The papers' rule against their tables, and against small networks counted by hand."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
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
    parameter_bytes,
)
from efficient_ft.methods import BSR, BackRazor, BitFit, EViT
from efficient_ft.models.frozen_batch_norm import freeze_batch_norm

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "published.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("published_tables", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["published_tables"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------------------------------------- the tables
@pytest.mark.parametrize(
    ("label", "mib"),
    [
        ("FT-Last", 525),
        ("FT-Full", 19235),
        ("BitFit", 9460),
        ("Mesa", 5442),
        ("Back Razor@80%", 4565),
        ("Back Razor@90%", 3912),
        ("Back Razor@95%", 3496),
        ("Back Razor@80% + Mesa", 2937),
    ],
)
def test_the_vit_column(script, label, mib):
    row = next(r for r in script.VIT.rows if r.label == label)
    assert row.published == mib
    assert script.VIT.count(row).memory == pytest.approx(mib, abs=1)


#: With one more digit than the table prints (366 is 366.96 cut off).
CNN = {
    "FT-Full": 366.96,
    "Back Razor@90%": 42.1,
    "Back Razor@95%": 40.6,
    "Back Razor@97%": 40.0,
    "Back Razor@99%": 39.4,
    "FT-Last": 30.8,
    "FT-Norm+Last": 192.4,
    "FT-Last, the plain model": 29.0,
    "FT-Norm+Last, the plain model": 183.0,
    "TinyTL": 37.1,
    "TinyTL@320": 64.7,
}


@pytest.mark.parametrize("label", CNN)
def test_the_cnn_column(script, label):
    row = next(r for r in script.CNN.rows if r.label == label)
    assert script.CNN.count(row).memory == pytest.approx(CNN[label], abs=0.1)
    if "plain" not in label:
        assert abs(CNN[label] - row.published) < 1


def test_every_row_is_checked(script):
    assert {r.label for r in script.CNN.rows} == CNN.keys()
    assert len(script.VIT.rows) == 8
    found = {t.title.split(":")[0].removeprefix("BSR, "): [int(r.published) for r in t.rows] for t in script.BSR_TABLES}
    assert found == {
        "Table 3": [8649, 369, 1433],
        "Table 4": [17388, 525, 2938],
        "Table 5": [66, 34],
        "Table 2": [1477, 2187, 2896],
        "Table 7": list(TABLE_7.values()),
        "Table 8": [1363, 1433, 1673],
    }


def bsr_table(script: ModuleType, number: int) -> Any:
    return next(t for t in script.BSR_TABLES if t.title.startswith(f"BSR, Table {number}:"))


#: BSR's Table 7: the blocks, MiB.
TABLE_7 = {
    (3, 6, 9, 11): 1526,
    (2, 5, 8, 11): 2809,
    (4, 7, 10, 11): 1132,
    (8, 9, 10, 11): 502,
    (0, 2, 5, 8): 3705,
    (3, 7, 11): 1433,
    (4, 7, 11): 1079,
    (2, 7, 11): 2731,
    (9, 10, 11): 333,
    (2, 5, 8): 2785,
    (4, 11): 986,
    (7, 11): 460,
    (10, 11): 215,
}

#: Of the rows that unfroze more than they list: MiB of those blocks alone, what of it is kept, and MiB of all that was
#: unfrozen with the gradient passing wherever it has to.
NAMED_ALIKE = {
    (2, 5, 8): (2057, 2036, 3305),
    (2, 5, 8, 11): (2089, 2089, 3329),
    (2, 7, 11): (1915, 1915, 3251),
    (0, 2, 5, 8): (3139, 3118, 3705),
}


@pytest.mark.parametrize("blocks", TABLE_7)
def test_bsr_s_ablation_as_published_and_as_listed(script, blocks):
    table = bsr_table(script, 7)
    row = next(r for r in table.rows if r.label == str(list(blocks)))
    assert row.published == TABLE_7[blocks]
    count = table.count(row)
    assert count.memory == pytest.approx(TABLE_7[blocks], abs=1)
    if blocks not in NAMED_ALIKE:
        assert count.as_listed == count.memory
        return
    listed, kept, passing = NAMED_ALIKE[blocks]
    assert count.as_listed == pytest.approx(listed, abs=0.5)
    model = table.model(row)
    saved = sum(op.saved for op in operations(model, (224, 224), rule=BSR_RULE))
    assert (128 * saved + parameter_bytes(model)) / 2**20 == pytest.approx(kept, abs=0.5)
    for name, p in model.named_parameters():
        p.requires_grad_(p.requires_grad or any(str(b) in name for b in blocks))
    found = published(model, 128, (224, 224), rule=BSR_RULE).bytes / 2**20
    assert found == pytest.approx(passing, abs=0.5)
    if blocks[0]:
        assert f": {passing}" in row.note


def test_which_names_contain_an_index(script):
    names = [n for n, _ in timm.create_model("vit_tiny_patch16_224", embed_dim=12, num_heads=3).named_parameters()]
    two = {n for n in names if n.startswith("blocks.2.") or ".norm2." in n or ".fc2." in n}
    assert set(script.named_alike(names, [2])) == two
    assert {n.split(".")[1] for n in script.named_alike(names, [0])} == {"0", "10"}
    for index in range(3, 12):
        assert {".".join(n.split(".")[:2]) for n in script.named_alike(names, [index])} == {f"blocks.{index}"}
    assert script.named_alike(names, []) == []


def test_the_caption_s_drop_locations_do_not_give_the_column(script):
    """The 4th, 7th and 11th block, of which one is not where the text has it."""
    row = script.Row("", 1433, (lambda: BSR([3, 7, 11], [3, 6, 10]),))
    assert bsr_table(script, 7).count(row).memory == pytest.approx(1470.5, abs=0.5)


@pytest.mark.parametrize(
    ("number", "memory", "gmacs"),
    [
        (2, [1477, 2187, 2896], None),
        (3, [8649, 205, 1433], [588.6, 588.6, 295.5]),  # FT-Last is published as 369
        (4, [17388, 451, 2938], [2248.1, 2248.1, 1128.8]),  # FT-Last as 525, by TinyTL's rule
        (8, [1363, 1433, 1673], [270.0, 295.5, 310.6]),
    ],
)
def test_bsr_s_columns(script, number, memory, gmacs):
    table = bsr_table(script, number)
    counts = [table.count(row) for row in table.rows]
    assert [c.memory for c in counts] == pytest.approx(memory, abs=1)
    for row, expected in zip(table.rows, memory, strict=True):
        assert (row.label == "FT-Last") == (abs(row.published - expected) > 1)
    if gmacs:
        assert [c.gmacs for c in counts] == pytest.approx(gmacs, rel=2e-4)
        assert [r.gmacs for r in table.rows] == pytest.approx(gmacs, rel=2e-3)


def test_bsr_s_activations_of_one_image(script):
    table = bsr_table(script, 5)
    counts = [table.count(row) for row in table.rows]
    assert [c.memory for c in counts] == pytest.approx([66.9, 34.3], abs=0.05)
    assert [c.gmacs for c in counts] == pytest.approx([4.6, 4.6], abs=0.05)


def test_bsr_s_experts_are_left_out_of_their_operations(script):
    """Within .1 % with the gates left out; with four experts of a token counted, the baseline is 3319."""
    for (_, gmacs, methods), expected in zip(script.MOE, (1801, 1237), strict=True):
        assert gmacs == expected
        assert script.moe_gmacs(methods) == pytest.approx(expected, rel=0.0015)


@pytest.mark.parametrize(
    ("drop_at", "keep", "gmacs"), [([1, 3, 5, 7, 9], 0.7, 270.0), ([3, 6, 9], 0.5, 295.5), ([5, 7, 9], 0.3, 310.6)]
)
def test_what_is_executed_agrees_with_bsr_s_table_8(drop_at, keep, gmacs):
    with torch.device("meta"):
        model = timm.create_model("deit_small_patch16_224", num_classes=10)
    found = executed(model, 1, (224, 224), methods=[EViT(drop_at, keep)])
    assert found.forward_flops / 2 * 128 / 1e9 == pytest.approx(gmacs, rel=0.002)


def test_the_script_prints_published_beside_ours(script, monkeypatch, capsys):
    row = script.Row("a row", 1.5, note="as it is")
    small = script.Table("T", "vit_tiny_patch16_224", 2, 2**20, (row,))
    more = replace(row, gmacs=2.5, by_name=(3,), note="")
    monkeypatch.setattr(script, "VIT", small)
    monkeypatch.setattr(script, "CNN", small)
    monkeypatch.setattr(script, "BSR_TABLES", (replace(small, rows=(more,)),))
    monkeypatch.setattr(script, "MOE", script.MOE[:1])
    script.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["published", "ours"]
    assert lines[2].split()[:3] == ["a", "row", "1.5"]
    assert lines[2].endswith("as it is")
    assert lines[9].split() == ["published", "ours", "as", "listed", "published", "ours"]
    assert [lines[10].split()[i] for i in (2, 5)] == ["1.5", "2.5"]
    assert lines[10].split()[3] == lines[10].split()[4]
    assert lines[14].split() == ["MoE,", "baseline", "1801", "1799.6"]


# ---------------------------------------------------------------------------------------------- by hand
class Flat(nn.Module):
    """Images → the layers on their flattened pixels."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.flatten(1))


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

    # With the first layer and the normalisation frozen no gradient passes until the last layer.
    for layer in (model.layers[0], model.layers[2]):
        layer.requires_grad_(False)
    count = published(model, 3, (2, 2))
    assert count.parameter_bytes == 4 * (200 + 5) + (total - 205)
    assert count.activation_bytes == 4 * (12 + 40)
    assert count.peak_at == "layers.0"

    # A bias that trains needs no input of its own layer, but a gradient passes after it.
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
    assert found["depthwise"].tmp == 4 * (32 + 1) * n  # output of one channel at a time
    assert [op.saved for op in found.values()] == [4 * 3 * n, 4 * 8 * n, 4 * 32 * n, 4 * 32 * n, 4 * 8]
    assert [op.macs for op in found.values()] == [n * 3 * 8, n * 8 * 32, n * 32 * 9, n * 32 * 8, 8 * 2]
    assert published(Branch(), 1, (4, 4)).activation_bytes == 4 * n * (3 + 8 + 32 + (32 + 8) + 8)


@pytest.mark.parametrize("fused", [True, False])
def test_an_attention_block_keeps_what_the_reference_says(fused):
    set_fused_attn(fused)
    try:
        model = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=64, num_classes=3)
    finally:
        set_fused_attn(True)
    d, a = 17 * 192, 3 * 17**2

    def block(model: nn.Module, keeping: Keeping = DENSE) -> float:
        """What the rule keeps of the second block."""
        of_kind = {"product": keeping.product, "attention": keeping.product, "norm": keeping.norm}
        of_kind["activation"] = keeping.activation
        ops = [op for op in operations(model, (64, 64)) if op.in_block]
        return sum(op.saved * of_kind[op.kind] / 4 for op in ops[len(ops) // 2 :])

    assert block(model) == 4 * (18 * d + a)
    assert block(model, MESA) == 18 * d + a
    assert block(model, back_razor(0.8, norm_bytes=4)) == pytest.approx(
        (12 * d + a) * (2 * 0.2 + 1 / 8) + 2 * d * (4 * 0.2 + 1 / 8) + 8 * d
    )
    # Outside the blocks nothing is packed: the patch embedding's input and the final normalisation's stay as they are.
    dense, packed = (published(model, 1, (64, 64), k).activation_bytes for k in (DENSE, MESA))
    difference = 2 * (block(model) - block(model, MESA))
    assert dense - packed == pytest.approx(difference - 4 * d * (4 - 1))  # the peak is at the last fc2
    BitFit().apply(model)
    assert block(model) == 4 * (7 * d + a)


#: Vision transformers: registers, LayerScale, two classes, q and k norms.
FORMS: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {},
    "deit_tiny_distilled_patch16_224": {},
    "vit_small_patch14_reg4_dinov2": {},
    "vit_tiny_patch16_224 q and k norm": {"qk_norm": True},
}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fuse", [True, False])
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
    norms = 2 * d * ("qk_norm" in FORMS[form])  # where they train, their inputs of head dimension count too

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


@pytest.mark.parametrize("name", ["swinv2_tiny_window8_256", "efficientformer_l1", "xcit_nano_12_p16_224"])
def test_other_models_are_counted(name):
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=3)
    size = model.pretrained_cfg["input_size"][1:]
    ops = operations(model, size)
    assert any(op.kind == "attention" for op in ops)
    assert sum(op.in_block for op in ops) > len(ops) / 2
    assert published(model, 1, size, MESA).bytes < published(model, 1, size).bytes


def test_mistakes_are_named():
    model = timm.create_model("vit_tiny_patch16_224", depth=1)
    for call in (
        lambda: published(model, 0, (224, 224)),
        lambda: published(model, 1, (224,)),
        lambda: back_razor(1.0),
        lambda: back_razor(0.5, 3),
    ):
        with pytest.raises(SettingError):
            call()
    with pytest.raises(UserError, match="cannot be run on images of 100×100"):
        published(model, 1, (100, 100))
