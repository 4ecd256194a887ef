"""Tests of Rep-Net: outputs, positions of side modules, trainable parameters, cost and exports."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efficient_ft.config import ModelConfig
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.cost import executed
from efficient_ft.cost.published import published
from efficient_ft.methods import (
    BSR,
    LBPWHT,
    Blocks,
    Checkpointing,
    EViT,
    HeadOnly,
    LastStage,
    LoRA,
    Method,
    RepNet,
    TinyTL,
    apply_methods,
    plain_state_dict,
)
from efficient_ft.methods.adapters.lite import LiteResidual
from efficient_ft.models.view import view
from efficient_ft.testing import batch_of, gradients, largest_difference, model_of
from efficient_ft.training.output import export
from tests.methods.settings import RESNET50


def sides_of(model: nn.Module) -> dict[str, Any]:
    return {n.removesuffix(".side_module"): m for n, m in model.named_modules() if n.endswith(".side_module")}


def stir(model: nn.Module) -> None:
    """Randomize all parameters of the side modules, because zero-initialized layers have no effect on the output."""
    with torch.no_grad():
        for side in sides_of(model).values():
            for parameter in side.parameters():
                parameter.copy_(torch.rand_like(parameter) - 0.3)


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return timm.create_model(name, num_classes=10)


# ------------------------------------------------------------------------------------------------ outputs
def test_maps_are_the_sum_of_frozen_block_and_module() -> None:
    model, plain = model_of("resnet").eval(), model_of("resnet").eval()
    RepNet(blocks=[1, -1]).apply(model)
    stir(model)
    sides = sides_of(model)
    assert list(sides) == ["layer2.0", "layer4.0"]
    images, _ = batch_of("resnet")
    p: Any = plain
    x = p.maxpool(p.act1(p.bn1(p.conv1(images))))
    for name in ("layer1.0", "layer2.0", "layer3.0", "layer4.0"):
        y = p.get_submodule(name)(x)
        x = y + sides[name](x, y.shape[-2:]) if name in sides else y
    torch.testing.assert_close(model(images), p.forward_head(x))
    assert type(sides["layer2.0"]) is LiteResidual
    assert (model(images) - plain(images)).abs().max() > 1e-3


def test_tokens_are_the_sum_of_frozen_block_and_what_the_side_block_s_branches_add() -> None:
    model, plain = model_of("vit").eval(), model_of("vit").eval()
    RepNet(blocks=[1, 3]).apply(model)
    stir(model)

    def normalized(x: Tensor, norm: Any) -> Tensor:
        deviation = (x.var(-1, correction=0, keepdim=True) + norm.eps).sqrt()
        return (x - x.mean(-1, keepdim=True)) / deviation * norm.weight + norm.bias

    def added(block: Any, x: Tensor) -> Tensor:
        q, k, v = F.linear(normalized(x, block.norm1), block.attn.qkv.weight, block.attn.qkv.bias).chunk(3, -1)
        heads = []
        for at in range(0, 48, 16):
            scores = (q[..., at : at + 16] @ k[..., at : at + 16].mT / 4).softmax(-1)
            heads.append(scores @ v[..., at : at + 16])
        attended = torch.cat(heads, -1) @ block.attn.proj.weight.mT + block.attn.proj.bias
        h = normalized(x + attended, block.norm2) @ block.mlp.fc1.weight.mT + block.mlp.fc1.bias
        h = h * (1 + torch.erf(h / 2**0.5)) / 2
        return attended + h @ block.mlp.fc2.weight.mT + block.mlp.fc2.bias

    images, _ = batch_of("vit")
    p, sides = plain, sides_of(model)
    x = p.norm_pre(p._pos_embed(p.patch_embed(images)))  # type: ignore[operator]
    for name in view(plain).blocks:
        x = x + added(p.get_submodule(name), x) + (added(sides[name], x) if name in sides else 0)
    torch.testing.assert_close(model(images), p.forward_head(p.norm(x)))  # type: ignore[operator]
    assert (model(images) - plain(images)).abs().max() > 1e-3


def test_a_side_block_starts_as_its_main_block_but_for_its_last_projections() -> None:
    model: Any = model_of("vit")
    RepNet(blocks=[2]).apply(model)
    block = model.blocks[2]
    own = {n: p for n, p in block.named_parameters() if not n.startswith("side_module")}
    for name, parameter in block.side_module.named_parameters():
        last = name.startswith(("attn.proj", "mlp.fc2"))
        assert not parameter.any() if last else torch.equal(parameter, own[name])
        assert parameter.requires_grad
        assert not own[name].requires_grad
    found = gradients(model, "vit")
    assert all(found[f"blocks.2.side_module.{name}.weight"].any() for name in ("attn.proj", "mlp.fc2"))  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------------------ positions
@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("resnet50", [1, 4, 6, 9, 12, 14]),
        ("resnet18", [0, 2, 3, 4, 6, 7]),
        ("deit_small_patch16_224", [3, 7, 11]),
        ("deit_tiny_distilled_patch16_224", [3, 7, 11]),
        ("vit_large_patch16_224", [7, 15, 23]),
    ],
)
def test_modules_are_spread_evenly(name: str, places: list[int]) -> None:
    model = on_meta(name)
    applied = RepNet().apply(model)
    blocks = view(model).blocks
    assert list(sides_of(model)) == [blocks[place] for place in places]
    assert set(applied.skipped) == set(blocks) - set(sides_of(model))
    trains = {n for n, p in model.named_parameters() if p.requires_grad}
    heads = ("head.", "head_dist.", "fc.")
    assert trains == {n for n, _ in model.named_parameters() if "side_module" in n or n.startswith(heads)}


@pytest.mark.slow
def test_it_keeps_to_the_part_that_the_selection_leaves() -> None:
    model = timm.create_model("resnet26", num_classes=5)
    apply_methods(model, [RepNet(), LastStage()])
    assert list(sides_of(model)) == ["layer4.0", "layer4.1"]
    report = RepNet(blocks=[0, -1])
    model = timm.create_model("resnet26", num_classes=5)
    apply_methods(model, [report, LastStage()])
    assert list(sides_of(model)) == ["layer4.1"]
    assert report.applied is not None
    assert str(report.applied.skipped["layer1.0"]) == "frozen by the selection"
    assert str(report.applied.skipped["layer4.0"]) == "no side module: the block is not listed in blocks"
    for places in (None, [0]):
        with pytest.raises(UserError, match=r"repnet: all blocks of .* are frozen by the selection. Select full"):
            apply_methods(timm.create_model("resnet26"), [RepNet(places), Blocks([-1]) if places else HeadOnly()])


@pytest.mark.parametrize("name", ["vit", "resnet"])
def test_nothing_is_recorded_before_the_first_module(name: str) -> None:
    model = model_of(name)
    RepNet(blocks=[1, 2]).apply(model)
    stir(model)
    records: dict[str, list[bool]] = {}
    blocks = view(model).blocks
    for block in blocks:
        model.get_submodule(block).register_forward_hook(
            lambda _, x, y, block=block: records.update({block: [x[0].requires_grad, y.requires_grad]})
        )
    found = gradients(model, name)
    assert [records[block] for block in blocks] == [[False, False], [False, True], [True, True], [True, True]]
    assert {n for n, g in found.items() if g is not None} == {n for n, p in model.named_parameters() if p.requires_grad}


# ------------------------------------------------------------------------------------------------ cost
@pytest.mark.slow
def test_resnet50_costs_what_table_5_says() -> None:
    """The cost equals Table 5 (6.2 GMACs and 9.91 MB) and the closed form of the side modules."""
    model = on_meta("resnet50")
    plain = executed(model, 1, (224, 224))
    one, two = (executed(model, images, (224, 224), methods=[RepNet()]) for images in (1, 2))
    macs, kept = 0, 2048 + 10  # head input, log-softmax output
    for at, (inputs, outputs, width, before, after) in enumerate(RESNET50):
        if at in (1, 4, 6, 9, 12, 14):
            assert (inputs, before) == (outputs, after)
            pooled = (before // 2) ** 2
            macs += pooled * (inputs * inputs // 4 * 25 + inputs * outputs)
            # The inputs of both convolutions and both norms, and the mean and deviation of each group of 8 channels.
            kept += 4 * inputs * pooled + 2 * 2 * (inputs // 8)
            # The sum of block and side module. The next convolution saves this input even if the weight is frozen.
            kept += outputs * after**2
        if at > 1:  # outputs of ReLU in frozen blocks with a gradient
            kept += width * before**2 + width * after**2 + outputs * after**2
    assert one.forward_flops - plain.forward_flops == 2 * macs
    assert one.forward_flops / 2e9 == pytest.approx(6.2, abs=0.05)
    # The bytes of the second image exclude the standardized weights, which are shared. A label has 8 bytes.
    assert 2 * two.saved_bytes - one.saved_bytes == 4 * kept + 8
    model = timm.create_model("resnet50", num_classes=10)
    RepNet().apply(model)
    assert published(model, 1, (224, 224)).activation_bytes / 2**20 == pytest.approx(9.91, rel=0.02)


@pytest.mark.slow
def test_deit_costs_what_table_5_says() -> None:
    """The cost equals Table 5: 5.7 GMACs, and 40.1 MiB for three trained blocks and eight frozen blocks."""
    tokens, width, heads = 197, 384, 6
    block = 12 * tokens * width**2 + 2 * tokens**2 * width
    model = on_meta("deit_small_patch16_224")
    plain = executed(model, 1, (224, 224))
    side = executed(model, 1, (224, 224), methods=[RepNet()])
    assert side.forward_flops - plain.forward_flops == 2 * 3 * block
    assert side.forward_flops / 2e9 == pytest.approx(5.7, abs=0.05)
    rule = [4 * (n * tokens * width + heads * tokens**2) for n in (16, 7)]
    assert (3 * rule[0] + 8 * rule[1]) / 2**20 == pytest.approx(40.1, rel=0.01)
    # A real step has two frozen blocks more than a step that trains blocks 3, 7 and 11. The cost of one frozen block is
    # the difference between two selections, without its input, which the next block also saves.
    three, lower, upper = (
        executed(model, 1, (224, 224), methods=[Blocks(at)]) for at in ([3, 7, 11], [3, 11], [4, 11])
    )
    frozen = lower.saved_bytes - upper.saved_bytes - 4 * tokens * width
    assert side.saved_bytes == three.saved_bytes + 2 * frozen
    assert side.backward_flops == three.backward_flops + 2 * (lower.backward_flops - upper.backward_flops)


# ------------------------------------------------------------------------------------------------ stacks
@pytest.mark.first(1, "exhaustive")
@pytest.mark.slow
@pytest.mark.parametrize("select", [None, "last_stage"])
def test_a_run_s_result_is_loaded_with_its_modules(select: str | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = timm.create_model("resnet26", num_classes=5)
    methods: list[Method] = [RepNet(kernel_size=3), *([LastStage()] if select else [])]
    apply_methods(model, methods)
    stir(model)
    spec = InputSpec(size=(64, 64), mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bilinear")
    weights = plain_state_dict(model, methods)
    config = ModelConfig(name="resnet26", pretrained=False)
    export.save(tmp_path / export.NAME, weights, config, list("abcde"), spec, {}, methods)
    trained = export.load(tmp_path)
    assert sides_of(trained.model).keys() == sides_of(model).keys()
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(trained.model(images), model.eval()(images))


def test_other_methods_leave_the_modules_alone() -> None:
    model = model_of("vit")
    report = apply_methods(model, [RepNet([1]), LBPWHT(order=2)])[1]
    assert not any("side_module" in name for name in (*report.touched, *report.skipped))
    plain, replayed = model_of("vit"), model_of("vit")
    RepNet([1, 2]).apply(plain)
    apply_methods(replayed, [Checkpointing(), RepNet([1, 2])])
    for model in (plain, replayed):
        torch.manual_seed(0)
        stir(model)
    assert largest_difference(gradients(plain, "vit"), gradients(replayed, "vit")) < 1e-10


@pytest.mark.parametrize(
    ("name", "first", "second", "message"),
    [
        ("vit", RepNet(), LoRA(), "repnet has been applied .* both methods add modules"),
        ("vit", LoRA(), RepNet(), "lora has been applied .* both methods add modules"),
        ("mobilenet", RepNet(), TinyTL(), "repnet has been applied .* both methods add modules"),
        ("mobilenet", TinyTL(), RepNet(), "tinytl has been applied .* both methods add modules"),
        ("vit", RepNet([1]), RepNet([2]), "repnet has been applied .* both methods add modules"),
        ("vit", BSR([1], [1]), RepNet([1]), "merge tokens cannot be used in a block with a side module"),
        ("vit", RepNet([1]), EViT([1]), "has a module that was added by repnet"),
        ("vit", Checkpointing(), RepNet([1]), "Apply other methods after repnet"),
    ],
    ids=lambda value: value.name if isinstance(value, Method) else "",
)
def test_what_cannot_be_stacked_is_refused(name: str, first: Method, second: Method, message: str) -> None:
    first, second = copy.deepcopy((first, second))
    model = model_of(name)
    first.apply(model)
    trains = {n: p.requires_grad for n, p in model.named_parameters()}
    with pytest.raises(UserError, match=message):
        second.apply(model)
    assert {n: p.requires_grad for n, p in model.named_parameters()} == trains


def test_tokens_may_be_dropped_in_other_blocks() -> None:
    model = model_of("vit")
    apply_methods(model, [EViT([1, 2]), RepNet([0, 3])])
    assert all(g is not None for n, g in gradients(model, "vit").items() if "side_module" in n)


# ------------------------------------------------------------------------------------------------ invalid settings
def test_models_and_settings_that_will_not_do() -> None:
    for setting, value in (
        ("blocks", []),
        ("blocks", "3"),
        ("blocks", [1.5]),
        ("kernel_size", 4),
        ("kernel_size", True),
        ("groups", 3),
    ):
        with pytest.raises(SettingError) as error:
            RepNet(**{setting: value})  # type: ignore[arg-type]
        assert error.value.setting == setting
    for name, place, message in (
        ("vit", 4, r"indices from -4 to 3, got .*\. .* has 4 blocks"),
        ("mobilenet", 0, r"blocks\.0\.0 of \S+ does not support side modules"),
    ):
        model = model_of(name)
        with pytest.raises(SettingError, match=f"blocks.*{message}"):
            RepNet([place]).apply(model)
        assert all(p.requires_grad for p in model.parameters())
    with pytest.raises(UserError, match="12 channels, but GroupNorm requires a multiple of 8"):
        RepNet().apply(timm.create_model("resnet18", channels=(12, 16, 16, 16)))
    for other in ("beit_base_patch16_224", "swin_tiny_patch4_window7_224", "convnext_atto", "vgg11"):
        with pytest.raises(
            UserError,
            match=rf"repnet: (side modules support only .* of {other} are|no blocks were recognized in {other})",
        ):
            RepNet().apply(on_meta(other))
