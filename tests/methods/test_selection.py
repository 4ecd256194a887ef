"""Tests of selections: trainable parameters, error messages, and no saved tensors below the lowest trainable layer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from torch import nn

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.integrations import MethodSession
from efficient_ft.methods import BitFit, Blocks, Full, HeadOnly, LastStage, LoRA, Method, NormLast, apply_methods
from efficient_ft.methods.selection.static import concise
from efficient_ft.models.view import Reason
from efficient_ft.testing import MODELS, batch_of, gradients, model_of


def trains(model: nn.Module) -> set[str]:
    return {n for n, p in model.named_parameters() if p.requires_grad}


def under(model: nn.Module, *prefixes: str) -> set[str]:
    return {n for n, _ in model.named_parameters() if n.startswith(tuple(f"{p}." for p in prefixes))}


class HeadFirst(nn.Module):
    """A network whose classifier is registered before its blocks, under an uncommon name."""

    def __init__(self, blocks: str) -> None:
        super().__init__()
        self.patch, self.result, self.list = nn.Conv2d(3, 32, 8, 8), nn.Linear(32, 5), blocks
        layers = [nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)]
        self.add_module(blocks, nn.ModuleList(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        for block in self.get_submodule(self.list).children():
            x = x + block(x)
        out: torch.Tensor = self.result(x.mean(1))
        return out


# ------------------------------------------------------------------------------------------------ trainable parameters
@pytest.mark.parametrize("blocks", ["chain", "blocks"])
def test_the_head_is_the_layer_that_runs_last(blocks: str) -> None:
    model = HeadFirst(blocks)
    HeadOnly().apply(model)
    assert trains(model) == {"result.weight", "result.bias"}


def test_a_layer_before_a_network_does_not_replace_its_head() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), model_of("vit")).double()
    MethodSession(model, HeadOnly(), image_size=MODELS["vit"].size).apply()
    assert trains(model) == under(model, "0", "1.head")


def test_full_trains_everything_again() -> None:
    model = model_of("vit").requires_grad_(False)
    report = Full().apply(model)
    assert trains(model) == set(model.state_dict())
    assert report.touched == ("cls_token", "pos_embed", "patch_embed", "blocks", "norm", "head")
    assert report.skipped == {}


@pytest.mark.parametrize("architecture", ["efficientformer_l1", "ese_vovnet19b_dw"])
def test_full_without_normalization_layers_trains_all_products(architecture: str) -> None:
    """Modules such as timm's ConvMlpWithNorm and ConvNormAct have "norm" in their names, but contain products."""
    with torch.device("meta"):
        model = timm.create_model(architecture, num_classes=3)
    Full(train_norms=False).apply(model)
    layers = dict(model.named_modules())
    frozen = {type(layers[n.rpartition(".")[0]]) for n, p in model.named_parameters() if not p.requires_grad}
    assert frozen
    assert all(issubclass(kind, nn.BatchNorm2d | nn.LayerNorm) for kind in frozen), frozen


@pytest.mark.parametrize(
    ("name", "heads"), [("vit", ["head"]), ("efficientformer", ["head", "head_dist"]), ("swinv2", ["head.fc"])]
)
def test_head_trains_the_classifiers_alone(name: str, heads: list[str]) -> None:
    model = model_of(name)
    HeadOnly().apply(model)
    assert trains(model) == under(model, *heads)


@pytest.mark.parametrize(
    ("architecture", "modules"),
    [
        ("deit_tiny_patch16_224", ["blocks.9", "blocks.10", "blocks.11", "norm", "head"]),
        ("efficientformer_l1", ["stages.3", "norm", "head", "head_dist"]),
        ("efficientformerv2_s0", ["stages.3.blocks", "norm", "head", "head_dist"]),  # without the downsample layer
        ("swinv2_tiny_window8_256", ["layers.3", "norm", "head"]),  # with the patch merging layer
        ("resnet18", ["layer4", "fc"]),
        ("efficientnet_b0", ["blocks.6", "conv_head", "bn2", "classifier"]),
    ],
)
def test_last_stage(architecture: str, modules: list[str]) -> None:
    model = timm.create_model(architecture, num_classes=3)
    LastStage().apply(model)
    assert trains(model) == under(model, *modules)


def test_blocks_train_with_the_final_norm_and_the_head() -> None:
    model = model_of("vit")
    report = Blocks(blocks=[1, -1, 3]).apply(model)
    assert trains(model) == under(model, "blocks.1", "blocks.3", "norm", "head")
    assert report.touched == ("blocks.1", "blocks.3", "norm", "head")
    assert report.skipped["blocks.0"].reason == Reason.FROZEN


def test_blocks_are_counted_through_all_stages() -> None:
    model = model_of("swinv2")  # two stages with 1 and 2 blocks
    Blocks(blocks=[0, -1]).apply(model)
    assert trains(model) == under(model, "layers.0.blocks.0", "layers.1.blocks.1", "norm", "head")


def test_bitfit_trains_all_biases_and_the_head() -> None:
    model = model_of("vit")
    BitFit().apply(model)
    assert trains(model) == {n for n in model.state_dict() if n.endswith(".bias")} | {"head.weight"}


def test_bitfit_reaches_the_separate_biases_of_qkv_but_no_table_of_positions() -> None:
    model = model_of("swinv2")
    BitFit().apply(model)
    assert {"layers.0.blocks.0.attn.q_bias", "layers.0.blocks.0.attn.v_bias"} <= trains(model)
    assert all(g is not None for n, g in gradients(model, "swinv2").items() if n.endswith("_bias"))
    model = model_of("efficientformer")
    BitFit().apply(model)
    assert not any("attention_biases" in n for n in trains(model))


@pytest.mark.parametrize("name", MODELS)
def test_norm_last_trains_every_scale_and_shift(name: str) -> None:
    model = model_of(name)
    NormLast().apply(model)
    norms = (nn.LayerNorm, nn.GroupNorm, nn.BatchNorm2d)
    expected = {f"{n}.{p}" for n, m in model.named_modules() if isinstance(m, norms) for p, _ in m.named_parameters()}
    assert expected
    heads = ("head.", "head_dist.", "fc.", "classifier.")
    assert trains(model) == expected | {n for n in model.state_dict() if n.startswith(heads)}


def test_frozen_parameters_lose_the_gradients_of_before() -> None:
    model = model_of("vit")
    gradients(model, "vit")
    HeadOnly().apply(model)
    assert all((p.grad is None) != p.requires_grad for p in model.parameters())


# ------------------------------------------------------------------------------------------------ the report
def test_names_are_as_few_as_can_be() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    ids = {n: id(p) for n, p in model.named_parameters()}
    assert concise(model, set(ids.values())) == ("0", "1")
    assert concise(model, {ids["0.0.weight"], ids["0.0.bias"], ids["1.bias"]}) == ("0.0", "1.bias")
    assert concise(model, set()) == ()


# ------------------------------------------------------------------------------------------------ removal
def test_remove_restores_what_trained_before_also_on_a_copy() -> None:
    model, method = model_of("vit"), LastStage()
    model.get_parameter("pos_embed").requires_grad = False
    before = trains(model)
    method.apply(model)
    chosen = trains(model)
    copied, copied_method = copy.deepcopy((model, method))
    copied_method.remove(copied)
    assert trains(copied) == before
    assert trains(model) == chosen
    method.remove(model)
    assert trains(model) == before


# ------------------------------------------------------------------------------------------------ invalid settings
@pytest.mark.parametrize("index", [4, -5, 100])
def test_a_block_that_is_not_there(index: int) -> None:
    model = model_of("vit")
    with pytest.raises(SettingError, match=r"indices from -4 to 3, got .*\. .* has 4 blocks") as error:
        Blocks(blocks=[0, index]).apply(model)
    assert str(error.value).startswith("blocks must be indices")
    assert f"got [0, {index}]" in str(error.value)
    assert trains(model) == set(model.state_dict())


def test_the_head_of_a_model_without_classes_is_refused() -> None:
    model = MODELS["vit"].create(num_classes=0)
    with pytest.raises(UserError, match="num_classes=N"):
        HeadOnly().apply(model)
    assert trains(model) == set(dict(model.named_parameters()))


@pytest.mark.parametrize("method", [LastStage(), Blocks(blocks=[0]), BitFit(), NormLast()])
def test_a_missing_classifier_is_reported(method: Method) -> None:
    model = MODELS["vit"].create(num_classes=0)
    report = str(method.apply(model))
    assert "no classifier was found (if there is one, pass its name as the argument classifier)" in report
    assert "head" not in report.partition(";")[0]
    assert trains(model)


class Bare(nn.Module):
    """A minimal classifier with a head, but without blocks, biases or normalizations."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 8, stride=8, bias=False)
        self.fc = nn.Linear(4, 2)

    def get_classifier(self) -> nn.Module:
        return self.fc

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.conv(x).mean((2, 3)))


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (LastStage(), "no blocks were recognized in"),
        (Blocks(blocks=[0]), "no blocks were recognized"),
        (BitFit(), "no biases outside its head"),
        (NormLast(), "no normalization layers"),
    ],
)
def test_what_a_model_does_not_have_cannot_train(method: Method, message: str) -> None:
    model = Bare()
    with pytest.raises(UserError, match=message):
        method.apply(model)
    assert trains(model) == {"conv.weight", "fc.weight", "fc.bias"}
    HeadOnly().apply(model)
    assert trains(model) == {"fc.weight", "fc.bias"}


def test_a_selection_comes_before_adapters_and_leaves_after_them() -> None:
    model, lora, selection = model_of("vit"), LoRA(rank=2), LastStage()
    lora.apply(model)
    with pytest.raises(UserError, match=r"lora has been applied .* must be applied after last_stage"):
        LastStage().apply(model)
    lora.remove(model)
    apply_methods(model, [lora, selection])
    with pytest.raises(UserError, match=r"lora was applied after last_stage\. Remove lora first"):
        selection.remove(model)
    lora.remove(model)
    selection.remove(model)
    assert trains(model) == set(model.state_dict())


# ------------------------------------------------------------------------------------------------ truncation
@pytest.mark.parametrize(
    ("name", "method", "lowest"),
    [
        ("vit", LastStage(), "blocks.3"),
        ("vit", Blocks(blocks=[2]), "blocks.2"),
        ("vit", HeadOnly(), "head"),
        ("efficientformer", LastStage(), "stages.3"),
        ("efficientformer", HeadOnly(), "head"),
        ("swinv2", LastStage(), "layers.1"),
    ],
)
def test_below_the_lowest_layer_that_trains_nothing_is_recorded_or_kept(name: str, method: Method, lowest: str) -> None:
    def kept_below(model: nn.Module) -> tuple[int, int, bool]:
        """Return the number of tensors saved before and after `lowest` runs, and if its input requires gradients."""
        kept, at_lowest, recorded = [0], [0], [False]

        def reach(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            at_lowest[0], recorded[0] = kept[0], inputs[0].requires_grad

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept[0] += 1
            return tensor

        handle = model.get_submodule(lowest).register_forward_pre_hook(reach)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model.train()(batch_of(name)[0])
        handle.remove()
        return at_lowest[0], kept[0] - at_lowest[0], recorded[0]

    below, _, recorded = kept_below(model_of(name))
    assert below > 0, "the test sees what plain training keeps there"
    assert recorded
    model = model_of(name)
    copy.deepcopy(method).apply(model)
    below, above, recorded = kept_below(model)
    assert (below, recorded) == (0, False)
    assert above > 0
    assert {n for n, g in gradients(model, name).items() if g is not None} == trains(model)
