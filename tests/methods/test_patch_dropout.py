"""Tests of PatchDropout: drawn tokens, outputs, cost and stacks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.cost import executed
from efficient_ft.methods import (
    BSR,
    LBPWHT,
    ALaST,
    BackRazor,
    Checkpointing,
    EViT,
    LoRAFA,
    Mesa,
    Method,
    PatchDropout,
    RepNet,
    ToMe,
    apply_methods,
    check_stack,
)
from efficient_ft.methods.forwards import forwards_of
from efficient_ft.ops.tokens import Tokens, current_tokens
from efficient_ft.testing import batch_of, evaluate, gradients, largest_difference, model_of
from tests.methods.settings import small_vit

FORMS = (
    "vit_tiny_patch16_224",
    "deit_tiny_distilled_patch16_224",
    "vit_small_patch14_reg4_dinov2",
    "vit_tiny_patch16_224 q and k norm",
    "vit_tiny_patch16_224 average",
    "vit_base_patch16_siglip_224",
    "vit_base_patch16_reg4_gap_256",
)


def images(count: int = 3) -> Tensor:
    return torch.randn(count, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def drawn(model: nn.Module, block: str = "blocks.1.mlp.fc1", seed: int = 3, batch: Tensor | None = None) -> Tensor:
    """Return the grid indices (B, K) of the patch tokens in a layer during a training step."""
    found: list[Tokens | None] = []
    handle = model.get_submodule(block).register_forward_hook(lambda *_: found.append(current_tokens()))
    torch.manual_seed(seed)
    model.train()(images() if batch is None else batch)
    handle.remove()
    (tokens,) = found
    assert tokens is not None
    assert tokens.grid_index_BL is not None
    return tokens.grid_index_BL


def by_hand(model: Any, x: Tensor, index_BK: Tensor) -> Tensor:
    """Run timm's forward pass image by image, and select the patch tokens after the position embedding."""
    outputs = []
    for image, index in zip(x, index_BK.tolist(), strict=True):
        tokens = model._pos_embed(model.patch_embed(image.unsqueeze(0)))[0]
        picked = [*tokens[: model.num_prefix_tokens], *(tokens[model.num_prefix_tokens + i] for i in index)]
        outputs.append(model.norm(model.blocks(model.norm_pre(torch.stack(picked).unsqueeze(0)))))
    return model.forward_head(torch.cat(outputs))


# ------------------------------------------------------------------------------------------------ outputs
@pytest.mark.first(2, "slow")
@pytest.mark.parametrize("form", FORMS)
def test_output_and_gradients_are_those_of_the_tokens_picked_by_hand(form: str) -> None:
    model, plain = small_vit(form), small_vit(form)
    report = PatchDropout(keep_rate=0.3).apply(model)
    assert report.touched == ("blocks.0",)
    assert "20 of 64 patch tokens" in str(report)
    index_BK = drawn(model)
    assert index_BK.shape == (3, 20)
    torch.manual_seed(3)
    found, expected = model(images()), by_hand(plain, images(), index_BK)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    labels = torch.arange(3)
    F.cross_entropy(found, labels).backward()
    F.cross_entropy(expected, labels).backward()
    for (name, p), (_, q) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert p.grad is not None, name
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-8, atol=1e-12)


def test_at_a_rate_of_one_nothing_is_changed_at_all() -> None:
    model = model_of("vit")
    PatchDropout(keep_rate=1.0).apply(model)
    assert largest_difference(gradients(model_of("vit"), "vit"), gradients(model, "vit")) == 0


def test_evaluation_takes_all_patches() -> None:
    model = model_of("vit")
    PatchDropout().apply(model)
    assert torch.equal(evaluate(model, "vit"), evaluate(model_of("vit"), "vit"))


# ------------------------------------------------------------------------------------------------ drawn patches
def test_patches_are_drawn_for_each_image_uniformly_and_each_once() -> None:
    model = small_vit(FORMS[0], depth=2)
    PatchDropout(keep_rate=0.25).apply(model)
    batch = images(400)
    index_BK = drawn(model, batch=batch)
    assert index_BK.shape == (400, 16)
    assert (index_BK.diff(dim=1) > 0).all(), "each once, in the order of the grid"
    assert len({tuple(row) for row in index_BK.tolist()}) == 400
    counts = index_BK.flatten().bincount(minlength=64)
    # A binomial distribution of 400 draws with probability 1/4 has mean 100 and standard deviation 8.7.
    assert ((counts - 100).abs() < 45).all()


def test_patches_follow_from_the_seed_of_the_step() -> None:
    model = small_vit(FORMS[0])
    PatchDropout().apply(model)
    assert torch.equal(drawn(model, seed=3), drawn(model, seed=3))
    assert not torch.equal(drawn(model, seed=3), drawn(model, seed=4))
    blocks = [drawn(model, f"blocks.{b}.attn.qkv") for b in range(4)]
    assert all(torch.equal(a, b) for a, b in itertools.pairwise(blocks)), "the same in every block"


# ------------------------------------------------------------------------------------------------ cost
@pytest.mark.slow
def test_half_the_patches_cost_half() -> None:
    costs = [
        executed(timm.create_model("deit_small_patch16_224", num_classes=100), 1, (224, 224), methods=methods)
        for methods in ([], [PatchDropout()])
    ]
    assert costs[1].saved_bytes == pytest.approx((1 + 98) / 197 * costs[0].saved_bytes, rel=0.02)
    assert costs[1].flops < 0.51 * costs[0].flops


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "other", [lambda: BackRazor(), lambda: Mesa(), lambda: LoRAFA(), lambda: Checkpointing(), lambda: EViT([1, 2])]
)
def test_each_stack_keeps_less_than_either(other: Any) -> None:
    def saved(*methods: Method) -> float:
        model = timm.create_model("vit_tiny_patch16_224", depth=4, num_classes=10)
        apply_methods(model, methods)
        return executed(model, 2, (224, 224), methods=methods).saved_bytes

    both = saved(PatchDropout(), other())
    assert both < 0.75 * saved(other())
    assert both < saved(PatchDropout())


# ------------------------------------------------------------------------------------------------ stacks
@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize(
    "other", [lambda: Checkpointing(), lambda: BackRazor(sparsity=0.0, value_dtype="same")], ids=["replayed", "packed"]
)
def test_exact_memory_methods_change_nothing_in_either_order(other: Any, after: bool) -> None:
    alone, both = model_of("vit"), model_of("vit")
    PatchDropout().apply(alone)
    methods = [PatchDropout(), other()] if after else [other(), PatchDropout()]
    for method in methods:
        method.apply(both)
    assert largest_difference(gradients(alone, "vit"), gradients(both, "vit")) < 1e-10
    for method in methods:
        method.remove(both)
    assert not any(forwards_of(module) for module in both.modules())


def test_timm_s_own_checkpointing_draws_the_same_patches() -> None:
    plain, replayed = small_vit(FORMS[0]), small_vit(FORMS[0])
    for model in (plain, replayed):
        PatchDropout().apply(model)
    replayed.set_grad_checkpointing(True)  # type: ignore[operator]
    assert largest_difference(gradients(plain, "vit"), gradients(replayed, "vit")) < 1e-12


def test_low_rank_backward_is_exact_at_full_rank_and_not_below(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, full, low = (model_of("vit") for _ in range(3))
    PatchDropout().apply(alone)
    apply_methods(low, [PatchDropout(), LBPWHT(order=3)])
    monkeypatch.setattr(LBPWHT, "_costs_more", lambda *_: None)
    monkeypatch.setattr("efficient_ft.methods.backprop.low_rank.backward_flops", lambda *_: (1, 0))
    apply_methods(full, [PatchDropout(), LBPWHT(order=15)])
    expected = gradients(alone, "vit")
    assert largest_difference(expected, gradients(full, "vit")) < 1e-10
    assert largest_difference(expected, gradients(low, "vit")) > 1e-2


TOKEN_METHODS = {
    "evit": lambda: EViT([0, 2]),
    "evit, not fused": lambda: EViT([1], fuse=False),
    "bsr": lambda: BSR([1, 3], [1]),
    "alast": lambda: ALaST(4, budget_init=0.7),
    "tome": lambda: ToMe(4),
}


@pytest.mark.vary_one(slow=True)
@pytest.mark.parametrize("first", [True, False], ids=["applied first", "applied last"])
@pytest.mark.parametrize("other", TOKEN_METHODS.values(), ids=list(TOKEN_METHODS))
def test_token_methods_work_on_what_is_left(other: Any, first: bool) -> None:
    """In either order, the stack equals the token method on the kept tokens. Each method can be removed alone."""
    model, reference, token_method, patches = model_of("vit"), model_of("vit"), other(), PatchDropout(keep_rate=0.5)
    for method in (patches, token_method) if first else (token_method, patches):
        method.apply(model)
    token_method.step_begin(0)
    alone = other()
    alone.apply(reference)
    alone.step_begin(0)
    index_BK = drawn(model, "blocks.0.norm1", batch=batch_of("vit")[0])
    assert index_BK.shape == (2, 32)

    # The reference drops the same patches before the blocks, but does not record their positions.
    def pick(module: nn.Module, inputs: Any, x: Tensor) -> Tensor:
        return torch.cat([x[:, :1], x[:, 1:].gather(1, index_BK.unsqueeze(-1).expand(-1, -1, x.shape[-1]))], 1)

    handle = reference.get_submodule("norm_pre").register_forward_hook(pick)
    assert largest_difference(gradients(reference, "vit", seed=3), gradients(model, "vit", seed=3)) < 1e-10
    handle.remove()

    token_method.step_end()
    alone.step_end()
    token_method.remove(model)
    only = model_of("vit")
    PatchDropout(keep_rate=0.5).apply(only)
    assert largest_difference(gradients(only, "vit"), gradients(model, "vit")) == 0
    token_method = other()
    token_method.apply(model)
    patches.remove(model)
    reference = model_of("vit")
    (plain := other()).apply(reference)
    for method in (token_method, plain):
        method.step_begin(0)
    assert largest_difference(gradients(reference, "vit"), gradients(model, "vit")) == 0
    token_method.step_end()
    token_method.remove(model)
    assert not any(forwards_of(module) for module in model.modules())


def test_low_rank_backward_after_patches_and_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, full = model_of("vit"), model_of("vit")
    apply_methods(alone, [PatchDropout(), EViT([0, 2])])
    monkeypatch.setattr(LBPWHT, "_costs_more", lambda *_: None)
    monkeypatch.setattr("efficient_ft.methods.backprop.low_rank.backward_flops", lambda *_: (1, 0))
    apply_methods(full, [LBPWHT(order=15), PatchDropout(), EViT([0, 2])])
    assert largest_difference(gradients(alone, "vit"), gradients(full, "vit")) < 1e-10


# ------------------------------------------------------------------------------------------------ rejected models
@pytest.mark.parametrize("keep_rate", [0, 0.0, -0.5, 1.5, True, "half", float("nan")])
def test_a_rate_out_of_range_is_named(keep_rate: Any) -> None:
    with pytest.raises(SettingError, match="keep_rate must be a number > 0 and <= 1, got"):
        PatchDropout(keep_rate=keep_rate)


def test_a_rate_that_leaves_out_nothing_is_refused() -> None:
    model = model_of("vit")
    with pytest.raises(SettingError, match=r"keep_rate must be low enough .* 64 .*got 0.99.*32×32"):
        PatchDropout(keep_rate=0.99).apply(model)
    assert not any(forwards_of(module) for module in model.modules())


def test_a_model_that_drops_patches_already_is_refused() -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=2, patch_drop_rate=0.5)
    with pytest.raises(UserError, match=r"already drops patches\. Create the model with patch_drop_rate=0"):
        PatchDropout().apply(model)


@pytest.mark.first(1, "slow")
@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("vit_relpos_small_patch16_224", "attention uses relative position biases"),
        ("hiera_small_abswin_256", "attention uses windows and pools tokens"),
        ("mixer_s32_224", "the layers require a fixed number of tokens"),
        ("samvit_base_patch16", "attention uses windows and relative position biases"),
    ],
)
def test_positions_inside_the_blocks_are_refused(architecture: str, message: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(architecture, num_classes=3)
    with pytest.raises(UserError, match=rf"method patch_dropout: .*{architecture}.*{message}"):
        PatchDropout().apply(model)
    assert not any(forwards_of(module) for module in model.modules())


def test_side_modules_and_a_second_one_are_refused() -> None:
    model = model_of("vit")
    RepNet([1]).apply(model)
    with pytest.raises(UserError, match="has a module that was added by repnet"):
        PatchDropout().apply(model)
    with pytest.raises(UserError, match="both select the patches that enter the blocks"):
        check_stack([PatchDropout(), PatchDropout(0.7)])
