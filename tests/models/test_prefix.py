"""Tests that a network computes the same result from the stored output of its frozen prefix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import segmentation_models_pytorch as smp
import timm
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from efficient_ft.core.errors import UserError
from efficient_ft.methods import BitFit, Blocks, EViT, Full, HeadOnly, LastStage, LoRA, LowBit, ToMe, apply_methods
from efficient_ft.models.frozen_batch_norm import freeze_batch_norm
from efficient_ft.models.prefix import FrozenPrefix, find_prefix

#: Image size in pixels for each timm name: token models, hybrids, CNNs, windowed attention, and a model with two heads.
MODELS = {
    "vit_tiny_patch16_224": 64,
    "deit_tiny_distilled_patch16_224": 64,
    "efficientformer_l1": 224,
    "swin_tiny_patch4_window7_224": 224,
    "convnext_atto": 64,
    "efficientnet_lite0": 64,
    "resnet18": 64,
    "mobilevit_s": 64,
    "cait_xxs24_224": 64,
}


def network(name: str, methods: list[Any], size: int = 64, channels_last: bool = True, **kwargs: Any) -> nn.Module:
    torch.manual_seed(0)
    if name.startswith(("vit", "deit", "cait")):
        kwargs["img_size"] = size
    model = timm.create_model(name, num_classes=7, **kwargs)
    apply_methods(model, methods)
    model.train()
    freeze_batch_norm(model)
    return model.to(memory_format=torch.channels_last) if channels_last else model


def images(size: int, count: int = 3) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(count))


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    cross_entropy(model(x), torch.arange(len(x)) % 7).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def from_features(model: nn.Module, prefix: FrozenPrefix, x: Tensor) -> dict[str, Tensor]:
    rows = prefix.to_rows(prefix.features(x)).clone()
    assert rows.shape == (len(x), torch.Size(prefix.shape).numel())
    with prefix.replaced(prefix.from_rows(rows)) as placeholder:
        return gradients(model, placeholder)


@pytest.mark.vary_one(slow=True)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", [LastStage, HeadOnly, lambda: Blocks([-2])], ids=["last_stage", "head", "blocks"])
def test_gradients_from_stored_features_are_those_from_images_bit_for_bit(name: str, method: Callable[[], Any]) -> None:
    size = MODELS[name]
    kwargs: dict[str, Any] = {"drop_path_rate": 0.0} if "swin" in name else {}  # the default rate is random
    model = network(name, [method()], size, **kwargs)
    prefix = find_prefix(model, images(size, 2))
    expected = gradients(model, images(size))
    found = from_features(model, prefix, images(size))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    again = gradients(model, images(size))
    assert all(torch.equal(again[name], expected[name]) for name in expected), "the network is as it was"


@pytest.mark.parametrize(
    ("name", "method", "end", "shape"),
    [
        ("vit_tiny_patch16_224", LastStage, "blocks.8", (17, 192)),
        ("vit_tiny_patch16_224", lambda: Blocks([5]), "blocks.4", (17, 192)),
        ("vit_tiny_patch16_224", HeadOnly, "head_drop", (192,)),
        ("resnet18", LastStage, "layer3", (256, 4, 4)),
        ("efficientnet_lite0", HeadOnly, "global_pool", (1280,)),
        ("convnext_atto", LastStage, "stages.2", (160, 4, 4)),
    ],
)
def test_the_prefix_goes_as_far_as_nothing_trains(
    name: str, method: Callable[[], Any], end: str, shape: tuple[int, ...]
) -> None:
    prefix = find_prefix(network(name, [method()]), images(64, 2))
    assert (prefix.end, prefix.shape, prefix.dtype) == (end, shape, torch.float32)
    assert prefix.reason.endswith(" trains")


@pytest.mark.first(1, "slow")
@pytest.mark.parametrize(
    ("other", "end"),
    [(LowBit, "blocks.9"), (lambda: LoRA(rank=2), "blocks.9"), (lambda: ToMe(r=1), "norm_pre")],
    ids=["packed", "adapters", "merged tokens"],
)
def test_other_methods_are_kept(other: Callable[[], Any], end: str) -> None:
    model = network("vit_tiny_patch16_224", [Blocks([10]), other()])
    prefix = find_prefix(model, images(64, 2))
    assert prefix.end == end
    expected = gradients(model, images(64))
    assert all(torch.equal(g, expected[name]) for name, g in from_features(model, prefix, images(64)).items())


def test_a_prefix_ends_below_what_draws_random_numbers() -> None:
    model = network("vit_tiny_patch16_224", [HeadOnly()], drop_path_rate=0.1)
    prefix = find_prefix(model, images(64, 2))
    assert (prefix.end, prefix.reason) == ("blocks.0", "blocks.1.drop_path1 draws random numbers")
    expected = gradients(model, images(64))
    assert torch.equal(from_features(model, prefix, images(64))["head.weight"], expected["head.weight"])


def test_a_prefix_ends_below_tokens_that_carry_their_places() -> None:
    model = network("vit_tiny_patch16_224", [HeadOnly(), EViT(drop_at=[6])])
    assert find_prefix(model, images(64, 2)).end == "blocks.5"


@pytest.mark.parametrize(("method", "name"), [(Full, "the network itself"), (BitFit, "patch_embed.proj")])
def test_networks_without_a_prefix_are_refused_with_the_reason(method: Callable[[], Any], name: str) -> None:
    with pytest.raises(UserError, match=f"constant outputs\\): {name} trains, and no layer precedes it"):
        find_prefix(network("vit_tiny_patch16_224", [method()]), images(64, 2))


def test_random_numbers_at_the_beginning_leave_no_prefix() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Flatten(), nn.Linear(192, 7)).train()
    with pytest.raises(UserError, match=r"constant outputs\): 0 draws random numbers, and no layer precedes it"):
        find_prefix(model, images(8, 2))


def test_live_batch_statistics_end_the_prefix() -> None:
    torch.manual_seed(0)
    model = timm.create_model("resnet18", num_classes=7).train()
    HeadOnly().apply(model)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    prefix = find_prefix(model, images(64, 2))
    assert (prefix.end, prefix.reason) == ("conv1", "bn1 computes batch statistics")
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


class TwoUses(nn.Module):
    """A network that uses the stem again before the head, so the output of `middle` does not determine the result."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.middle = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 7)

    def forward(self, x: Tensor) -> Tensor:
        stem = self.stem(x)
        return self.head((self.middle(stem) + stem.sin()).mean((2, 3)))


def test_an_output_that_does_not_determine_the_rest_is_not_the_end() -> None:
    model = TwoUses().train()
    model.stem.requires_grad_(False)
    model.middle.requires_grad_(False)
    prefix = find_prefix(model, images(8, 2))
    assert prefix.end == "stem"
    expected = gradients(model, images(8))
    assert torch.equal(from_features(model, prefix, images(8))["head.weight"], expected["head.weight"])


class OtherInEvaluation(TwoUses):
    """A network that uses its stem again in evaluation mode only."""

    def forward(self, x: Tensor) -> Tensor:
        stem = self.stem(x)
        middle = self.middle(stem)
        return self.head((middle if self.training else middle + stem).mean((2, 3)))


def test_the_rest_is_checked_in_evaluation_as_well() -> None:
    model = OtherInEvaluation().train()
    model.stem.requires_grad_(False)
    model.middle.requires_grad_(False)
    assert find_prefix(model, images(8, 2)).end == "stem"
    assert all(module.training for module in model.modules())


def test_parameters_that_another_module_uses_end_the_prefix() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Unflatten(1, (4, 48)), nn.Linear(48, 48))
    attention = nn.MultiheadAttention(48, 2, batch_first=True)

    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.below, self.attention, self.head = model, attention, nn.Linear(48, 7)

        def forward(self, x: Tensor) -> Tensor:
            x = self.below(x)
            return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))

    whole = Attend().train().requires_grad_(False)
    attention.out_proj.requires_grad_(True)  # attention uses this weight without calling the layer
    assert find_prefix(whole, images(8, 2)).end == "below"
    assert find_prefix(whole, images(8, 2)).reason == "attention.out_proj trains"


def test_an_error_inside_leaves_the_network_as_it_was() -> None:
    model = network("vit_tiny_patch16_224", [LastStage()])
    prefix = find_prefix(model, images(64, 2))
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    with pytest.raises(KeyError), prefix.replaced(prefix.features(images(64))):
        raise KeyError
    assert {name: module.__dict__.keys() for name, module in model.named_modules()} == {
        name: of.keys() for name, of in before.items()
    }
    assert model(images(64)).shape == (3, 7)


@pytest.mark.parametrize("several", [True, False])
def test_several_outputs_are_stored_if_later_layers_use_them(several: bool) -> None:
    torch.manual_seed(0)
    model = smp.Unet("resnet18", encoder_weights=None, classes=3, decoder_channels=(16,) * 5)
    model.encoder.requires_grad_(False)
    freeze_batch_norm(model, "frozen_part")
    if not several:
        with pytest.raises(UserError, match="later layers also use"):
            find_prefix(model, images(64, 2))
        return
    prefix = find_prefix(model, images(64, 2), several=True)
    assert len(prefix.shapes) > 3
    assert prefix.values < 3 * 64 * 64 + sum(c * 64 * 64 // 4**k for k, c in enumerate((64, 64, 128, 256, 512), 1))
    x = images(64)

    def map_gradients(given: Tensor) -> dict[str, Tensor]:
        model.zero_grad()
        model(given).square().mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = map_gradients(x)
    rows = prefix.to_rows(prefix.features(x)).clone()
    assert rows.shape == (len(x), prefix.values)
    with prefix.replaced(prefix.from_rows(rows)) as placeholder:
        found = map_gradients(placeholder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    larger = prefix.resized(images(96, 2))
    model.eval()
    with torch.no_grad(), larger.replaced(larger.features(images(96))) as placeholder:
        assert torch.equal(model(placeholder), model(images(96)))
