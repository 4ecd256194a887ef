"""Tests of token dropping in real models: kept tokens, cost, outputs, gradients and stacks."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import set_fused_attn, set_reentrant_ckpt
from torch import Tensor, nn

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.cost import executed, layer_flops
from efficient_ft.methods import (
    BSR,
    LBPWHT,
    ALaST,
    Applied,
    Axis,
    BackRazor,
    Blocks,
    Checkpointing,
    EViT,
    LastStage,
    LoRA,
    LowBit,
    Mesa,
    Method,
    ModelView,
    MoE,
    RepNet,
    ToMe,
    UniformLayers,
    apply_methods,
)
from efficient_ft.methods.forwards import forwards_of
from efficient_ft.methods.tokens import base
from efficient_ft.models.view import view
from efficient_ft.ops.tokens import class_attention
from efficient_ft.testing import batch_of, gradients, largest_difference, model_of
from tests.methods.settings import RESNET50, small_vit

FORMS = (
    "vit_tiny_patch16_224",
    "deit_tiny_distilled_patch16_224",
    "vit_small_patch14_reg4_dinov2",
    "vit_tiny_patch16_224 q and k norm",
    "vit_tiny_patch16_224 drop path",
    "vit_tiny_patch16_224 average",
)


def by_hand(model: Any, images: Tensor, drop_at: list[int], keep: float, fuse: bool) -> Tensor:
    """Run the forward pass in plain operations and drop tokens image by image."""
    x = model.patch_embed(images)
    x = model.norm_pre(model.patch_drop(model._pos_embed(x)))
    prefix = model.num_prefix_tokens
    for number, block in enumerate(model.blocks):
        attn = block.attn
        h = block.norm1(x)
        qkv = attn.qkv(h).unflatten(-1, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = attn.q_norm(qkv[0]), attn.k_norm(qkv[1])
        p = (q @ k.mT * attn.scale).softmax(-1)
        x = x + block.ls1(attn.proj((p @ qkv[2]).transpose(1, 2).flatten(2)))
        if number in drop_at:
            outputs = []
            for tokens, scores in zip(x, p.mean(1)[:, 0, prefix:], strict=True):
                ranked = sorted(range(len(scores)), key=lambda i: -scores[i].item())
                kept = -int(-keep * len(scores) // 1)
                parts = [*tokens[:prefix], *(tokens[prefix + i] for i in ranked[:kept])]
                if fuse:
                    parts.append(sum((scores[i] * tokens[prefix + i] for i in ranked[kept:]), torch.zeros(())))
                outputs.append(torch.stack(parts))
            x = torch.stack(outputs)
        x = x + block.ls2(block.mlp(block.norm2(x)))
    return model.forward_head(model.norm(x))


@pytest.mark.vary_one
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("form", [form for form in FORMS if "drop path" not in form])
def test_the_output_and_all_gradients_are_those_of_the_blocks_written_out(form: str, fuse: bool, fused: bool) -> None:
    set_fused_attn(fused)
    try:
        model, plain = small_vit(form), small_vit(form)
    finally:
        set_fused_attn(True)
    EViT([1, 2], 0.5, fuse).apply(model)
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = by_hand(plain, images, [1, 2], 0.5, fuse)
    for mode in (True, False):
        found = model.train(mode)(images)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    labels = torch.arange(2)
    F.cross_entropy(model.train()(images), labels).backward()
    F.cross_entropy(expected, labels).backward()
    for (name, p), (_, q) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert p.grad is not None, name
        assert q.grad is not None, name
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("method", [lambda: EViT([1, 2]), lambda: ToMe(8)])
def test_drop_path_is_part_of_the_block(method: Any) -> None:
    model = small_vit("vit_tiny_patch16_224 drop path")
    method().apply(model)
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    torch.manual_seed(3)
    first, other = model(images), model(images)
    torch.manual_seed(3)
    assert torch.equal(first, model(images))
    assert not torch.equal(first, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plain_gmacs", "gmacs"),
    [
        ("deit_small_patch16_224", 588.6, 295.5),
        ("vit_base_patch16_224", 2248.1, 1128.8),
    ],
)
def test_tokens_and_forward_cost_are_those_published(name: str, plain_gmacs: float, gmacs: float) -> None:
    """The forward GMACs equal BSR's Table 5, which counts 128 images without the head."""
    with torch.device("meta"):
        model: Any = timm.create_model(name, num_classes=0)
    costs = executed(model, 1, (224, 224)), executed(model, 1, (224, 224), methods=[EViT([3, 6, 9])])
    for found, published in zip(costs, (plain_gmacs, gmacs), strict=True):
        assert found.forward_flops / 2 * 128 / 1e9 == pytest.approx(published, rel=0.002)

    counts: list[int] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _m, _i, out: counts.append(out.shape[1]))
    EViT([3, 6, 9]).apply(model)
    counts.clear()
    model(torch.empty(1, 3, 224, 224, device="meta"))
    assert counts == [197] * 3 + [100] * 3 + [52] * 3 + [28] * 3


@pytest.mark.slow
@pytest.mark.vary_one
@pytest.mark.parametrize(
    "tokens", [lambda: EViT([1, 2]), lambda: ToMe(12), lambda: ToMe(12, proportional_attention=False)]
)
@pytest.mark.parametrize(
    "other",
    [
        lambda: Checkpointing(),
        lambda: BackRazor(sparsity=0.0, value_dtype="same"),
        lambda: BackRazor(sparsity=0.0, value_dtype="same", norm_saves="input", recompute_inputs=False),
    ],
    ids=["checkpointing", "back_razor", "published"],
)
def test_how_activations_are_kept_changes_nothing_where_all_is_kept(other: Any, tokens: Any) -> None:
    alone, both = model_of("vit"), model_of("vit")
    tokens().apply(alone)
    methods: list[Method] = [tokens(), other()]
    apply_methods(both, methods)
    assert largest_difference(gradients(alone, "vit"), gradients(both, "vit")) < 1e-10
    # The order of applying and removing the methods has no effect.
    again = model_of("vit")
    for method in methods:
        fresh = type(method)(**method.settings())
        fresh.apply(again)
    assert largest_difference(gradients(alone, "vit"), gradients(again, "vit")) < 1e-10
    methods[0].remove(both)
    assert largest_difference(gradients(model_of("vit"), "vit"), gradients(both, "vit")) < 1e-10
    methods[1].remove(both)
    assert not any(forwards_of(m) for m in both.modules())


def low_rank(monkeypatch: pytest.MonkeyPatch, order: int) -> LBPWHT:
    # At full rank or with few tokens, an exact layer is cheaper.
    monkeypatch.setattr(LBPWHT, "_costs_more", lambda *_: None)
    monkeypatch.setattr("efficient_ft.methods.backprop.low_rank.backward_flops", lambda *_: (1, 0))
    return LBPWHT(order=order)


def test_full_rank_behind_a_drop_is_exact_and_low_rank_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, full, low = (model_of("vit") for _ in range(3))
    EViT([0, 2]).apply(alone)
    apply_methods(full, [EViT([0, 2]), low_rank(monkeypatch, 15)])
    apply_methods(low, [EViT([0, 2]), low_rank(monkeypatch, 3)])
    expected = gradients(alone, "vit")
    assert largest_difference(expected, gradients(full, "vit")) < 1e-10
    assert largest_difference(expected, gradients(low, "vit")) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("other", [lambda: Checkpointing(), lambda: BackRazor(sparsity=0.0, value_dtype="same")])
@pytest.mark.parametrize("replay", [False, True])
def test_kept_tokens_are_projected_alike_however_they_are_kept(
    other: Any, replay: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, both = model_of("vit"), model_of("vit")
    for model, others in ((alone, []), (both, [] if replay else [other()])):
        apply_methods(model, [*others, EViT([0, 2]), low_rank(monkeypatch, 3)])
    if replay:
        both.set_grad_checkpointing(True)  # type: ignore[operator]
    assert largest_difference(gradients(alone, "vit"), gradients(both, "vit")) < 1e-10


def test_a_side_network_passes_on_where_tokens_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, full = model_of("vit"), model_of("vit")
    for model, others in ((alone, []), (full, [low_rank(monkeypatch, 15)])):
        torch.manual_seed(0)
        apply_methods(model, [RepNet([0, 2]), EViT([1]), *others])
    assert largest_difference(gradients(alone, "vit"), gradients(full, "vit")) < 1e-10


def test_tokens_whose_places_are_not_known_are_not_projected() -> None:
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, depth=4, patch_drop_rate=0.5)
    apply_methods(model, [EViT([1]), LBPWHT()])
    with pytest.raises(UserError, match=r"tokens"):
        model(torch.randn(2, 3, 224, 224))


def test_low_rank_energies_are_those_of_the_grid() -> None:
    """LHE profiles the gradients of the remaining tokens at their grid positions."""
    model = model_of("vit")
    method = LBPWHT(bases="lhe", order=2, profile_steps=1)
    apply_methods(model, [method, EViT([0, 2])])
    method.step_begin(0)
    gradients(model, "vit")
    method.step_end()
    assert all(chosen.projector is not None for chosen in method._layers.values())
    assert all(g is not None for g in gradients(model, "vit").values())


@pytest.mark.slow
def test_a_step_on_few_tokens_is_exact_where_that_costs_less() -> None:
    model = timm.create_model("vit_tiny_patch16_224", num_classes=10)
    exact, low = (layer_flops(model, 2, (224, 224), methods=m) for m in ([EViT([3, 6])], [EViT([3, 6]), LBPWHT()]))
    for block, saves in (("2", True), ("3", True), ("5", True), ("8", True)):
        name = f"blocks.{block}.mlp.fc1"
        assert (low[name].backward < exact[name].backward) == saves, name
    assert sum(f.backward for f in low.values()) < 0.75 * sum(f.backward for f in exact.values())


@pytest.mark.parametrize("method", [lambda: EViT([1, 2]), lambda: ToMe(12)])
def test_timm_s_own_checkpointing_replays_the_same_choice(method: Any) -> None:
    plain, replayed = small_vit("vit_tiny_patch16_224"), small_vit("vit_tiny_patch16_224")
    for model in (plain, replayed):
        method().apply(model)
    replayed.set_grad_checkpointing(True)  # type: ignore[operator]
    assert largest_difference(gradients(plain, "vit"), gradients(replayed, "vit")) < 1e-12


@pytest.mark.exhaustive
@pytest.mark.parametrize("tokens", [lambda: EViT([0, 1, 2]), lambda: ToMe(39)])
@pytest.mark.parametrize(
    "other", [lambda: BackRazor(), lambda: Mesa(), lambda: LoRA(rank=2), lambda: LastStage(), lambda: UniformLayers(2)]
)
def test_fewer_tokens_keep_fewer_bytes_whatever_else_is_applied(other: Any, tokens: Any) -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=4, num_classes=10)
    without = executed(model, 2, (224, 224), methods=[other()])
    both = executed(model, 2, (224, 224), methods=[other(), tokens()])
    assert both.saved_bytes < 0.7 * without.saved_bytes
    assert both.backward_flops < 0.7 * without.backward_flops


@pytest.mark.parametrize(
    ("memory", "copied"),
    [(None, False), (LowBit, False), (lambda: LowBit(attention="unfused"), True), (Mesa, True)],
    ids=["plain", "fused", "unfused", "mesa"],
)
def test_only_attention_that_is_kept_in_parts_has_q_and_k_copied_for_the_scores(
    memory: Any, copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = []

    def scores(q: Tensor, k: Tensor, *others: Any) -> Tensor:
        copies.append((q.is_contiguous(), k.is_contiguous()))
        return class_attention(q, k, *others)

    model = small_vit("vit_tiny_patch16_224")
    apply_methods(model, [EViT(drop_at=[1]), *([] if memory is None else [memory()])])
    monkeypatch.setattr(base, "class_attention", scores)
    model(torch.randn(2, 3, 32, 32, dtype=torch.float64)).sum().backward()
    assert copies == [(copied, copied)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"drop_at": []}, "at least one index"),
        ({"drop_at": "3"}, "list of integers"),
        ({"drop_at": [1.5]}, "list of integers"),
        ({"keep_rate": 0.0}, "> 0 and <= 1"),
        ({"keep_rate": 1.5}, "> 0 and <= 1"),
        ({"keep_rate": True}, "> 0 and <= 1"),
        ({"fuse": 1}, "got 1"),
        ({"drop_at": [3]}, "indices from 0 to 2"),  # the last block of four
        ({"drop_at": [-1]}, "has no effect"),
        ({"drop_at": [12]}, "4 blocks"),
        ({"drop_at": [1, 1]}, "each block only once"),
        ({"drop_at": [1, -3]}, "each block only once"),
    ],
)
def test_settings_out_of_range_are_named(settings: dict[str, Any], message: str) -> None:
    model = model_of("vit")
    with pytest.raises(SettingError, match=message):
        EViT(**{"drop_at": [1], **settings}).apply(model)
    assert not any(forwards_of(m) for m in model.modules())


def test_images_that_leave_no_tokens_to_drop_are_refused() -> None:
    small = {"img_size": 32, "patch_size": 16, "depth": 4, "embed_dim": 48, "num_heads": 3}
    model = timm.create_model("vit_tiny_patch16_224", **small)  # 4 patch tokens
    with pytest.raises(
        SettingError,
        match=r"keep_rate must be .*blocks.1 receives 3 patch tokens and keeps 2 .*got 0.5.* 32×32",
    ):
        EViT([0, 1]).apply(model)
    assert not any(forwards_of(m) for m in model.modules())
    EViT([0, 1], fuse=False).apply(model)  # keeps 2 tokens, then 1


@pytest.mark.parametrize("method", [lambda: EViT([1]), lambda: BSR([1], [1]), lambda: ALaST(1), lambda: ToMe(1)])
def test_a_single_patch_and_unknown_blocks_are_named(method: Any) -> None:
    small = {"img_size": 16, "patch_size": 16, "depth": 4, "embed_dim": 48, "num_heads": 3}
    with pytest.raises(SettingError, match=r"^image_size must be larger than one patch .* got 16×16"):
        method().apply(timm.create_model("vit_tiny_patch16_224", **small))
    with torch.device("meta"):
        without = timm.create_model("vgg11")
    with pytest.raises(UserError, match="no blocks were recognized in vgg11"):
        method().apply(without)


def test_budgets_that_leave_nothing_are_refused() -> None:
    small = {"img_size": 32, "patch_size": 16, "depth": 6, "embed_dim": 48, "num_heads": 3}
    model = timm.create_model("vit_tiny_patch16_224", **small)  # 4 patch tokens, of which 3, 2, 1 and 0 remain
    with pytest.raises(
        SettingError,
        match=r"budget_init must be .*, got 0.9. None of the 4 .* left after the block blocks.3. .* 32×32",
    ):
        ALaST(2).apply(model)
    assert all(p.requires_grad for p in model.parameters())
    assert not any(forwards_of(m) for m in model.modules())


def test_blocks_and_places_are_listed_once() -> None:
    for method in (BSR([1, 1], [1]), BSR([1, -3], [1]), MoE(2, 1, [1, 1]), RepNet([1, 1])):
        with pytest.raises(SettingError, match="each block only once"):
            method.apply(model_of("vit"))


def test_a_block_with_a_side_module_keeps_its_tokens() -> None:
    model = model_of("vit")
    RepNet([1]).apply(model)
    with pytest.raises(UserError, match=r"blocks.1 of .* has a module that was added by repnet"):
        EViT([1]).apply(model)


class Adapter(Method):
    """A method that adds a module to the second block, like a method of another package."""

    name = "adapter"
    axis = Axis.ADAPTERS

    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        model.get_submodule("blocks.1").add_module("adapter", nn.Linear(2, 2))
        return Applied(self.name, ("blocks.1.adapter",), modules=("blocks.1.adapter",))

    def _remove(self, model: nn.Module) -> None:
        del model.get_submodule("blocks.1").adapter


def test_a_block_with_a_module_of_another_method_is_refused_by_that_methods_name() -> None:
    model = model_of("vit")
    Adapter().apply(model)
    for method in (EViT([1]), ToMe(2)):
        with pytest.raises(UserError, match=r"blocks.1 of .* has a module that was added by adapter"):
            method.apply(model)
    EViT([2]).apply(model)


def test_reentrant_checkpointing_is_refused_where_it_loses_what_is_known_of_tokens() -> None:
    model = small_vit("vit_tiny_patch16_224")
    ToMe(4).apply(model)
    model.set_grad_checkpointing(True)  # type: ignore[operator]
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64, requires_grad=True)
    set_reentrant_ckpt(True)
    try:
        with pytest.raises(UserError, match="reentrant"):
            model.train()(images).sum().backward()
    finally:
        set_reentrant_ckpt(False)


@pytest.mark.first(1, "slow")
@pytest.mark.parametrize("name", ["beit_base_patch16_224", "vit_base_patch16_xp_224", "cait_xxs24_224", "mvitv2_tiny"])
def test_blocks_of_another_form_are_refused(name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    with pytest.raises(UserError, match=r"class token|cannot be dropped or merged in|not share one token grid"):
        EViT([1]).apply(model)


# ------------------------------------------------------------------------------------------------ BSR
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "flops", "full"),
    [
        ("deit_small_patch16_224", 7.8e9, 27.5e9),
        ("vit_base_patch16_224", 29.8e9, 105.1e9),
    ],
)
def test_bsr_trains_in_a_part_of_the_operations(name: str, flops: float, full: float) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    plain, bsr = executed(model, 1, (224, 224)), executed(model, 1, (224, 224), methods=[BSR()])
    assert plain.forward_flops + plain.backward_flops == pytest.approx(full, rel=0.01)
    assert bsr.forward_flops + bsr.backward_flops <= flops


@pytest.mark.slow
def test_bsr_is_its_selection_and_its_dropping_in_one() -> None:
    one, two = model_of("vit"), model_of("vit")
    BSR([1, 3], [1, 2], 0.5, True).apply(one)
    apply_methods(two, [EViT([1, 2], 0.5, True), Blocks([1, 3])])
    assert largest_difference(gradients(one, "vit"), gradients(two, "vit")) == 0
    frozen = [n for n, p in one.named_parameters() if not p.requires_grad]
    assert "pos_embed" in frozen
    assert "blocks.0.norm1.weight" in frozen
    plain = gradients(one, "vit")
    assert all(plain[n] is None for n in frozen)


def test_bsr_leaves_a_model_it_refuses_as_it_was() -> None:
    for settings, message in (({"blocks": [12]}, "blocks must"), ({"drop_at": [3]}, "drop_at must")):
        model = model_of("vit")
        with pytest.raises(SettingError, match=message):
            BSR(**{"blocks": [1], "drop_at": [1], **settings}).apply(model)
        assert all(p.requires_grad for p in model.parameters())
        assert not any(forwards_of(m) for m in model.modules())


@pytest.mark.slow
def test_bsr_on_resnet50_executes_and_keeps_what_is_counted_by_hand() -> None:
    """The FLOPs and saved bytes equal the closed form if the last blocks of layers 2, 3 and 4 train."""
    with torch.device("meta"):
        model = timm.create_model("resnet50", num_classes=10)
    trained = [6, 12, 15]
    method = BSR(trained, drop_at=[])
    macs, floats, bits = 2 * 2048 * 10, 2048 + 10, 0  # the head's gradients; head input, log-softmax output
    for at, (inputs, outputs, width, before, after) in enumerate(RESNET50):
        if at < trained[0]:
            continue
        first = inputs * width * before**2
        forward = first + (9 * width * width + width * outputs) * after**2
        forward += inputs * outputs * after**2 * (inputs != outputs)  # the shortcut
        macs += forward * (2 if at in trained else 1) - first * (at == trained[0])  # no gradient below
        # Torch saves the outputs of the three ReLUs in full. A trained convolution needs the values of its input. For
        # other outputs, one bit per value is sufficient.
        within, last = width * (before**2 + after**2), outputs * after**2
        floats += within + last
        bits += (within if at not in trained else 0) + (last if at + 1 not in trained else 0)
        if at in trained:  # inputs of the norms, and of the first trained block
            floats += within + outputs * after**2 + inputs * before**2 * (at == trained[0])
    plain, bsr = executed(model, 1, (224, 224)), executed(model, 1, (224, 224), methods=[method])
    assert bsr.forward_flops == plain.forward_flops
    assert bsr.backward_flops == 2 * macs
    assert bsr.saved_bytes == 4 * floats + 8 + 4  # a label and the loss's sum of weights
    # A packing method saves one bit per ReLU output that no trained convolution needs. Back Razor also saves a bitmap
    # of the other values.
    exact = BackRazor(sparsity=0.0, value_dtype="same", norm_saves="input", recompute_inputs=False)
    packed = executed(model, 1, (224, 224), methods=[method, exact])
    assert packed.saved_bytes == pytest.approx(4 * (floats - bits) + bits / 8, rel=0.05)
    assert packed.saved_bytes / 1e6 == pytest.approx(9.1, abs=0.1)
    assert plain.saved_bytes / 1e6 == pytest.approx(85.9, abs=0.1)


@pytest.mark.parametrize("name", ["vit", "resnet", "swinv2"])
def test_bsr_without_dropping_is_its_selection(name: str) -> None:
    one, two = model_of(name), model_of(name)
    report = BSR([1, -1], drop_at=[]).apply(one)
    Blocks([1, -1]).apply(two)
    assert largest_difference(gradients(one, name), gradients(two, name)) == 0
    assert all(f.same_values for m in one.modules() for f in forwards_of(m))
    assert report.notes == ()
    first = view(one).blocks[1]
    seen: list[bool] = []
    one.get_submodule(first).register_forward_hook(lambda _m, x, y: seen.extend([x[0].requires_grad, y.requires_grad]))
    gradients(one, name)
    assert seen == [False, True]


@pytest.mark.parametrize("method", [lambda: EViT([1, 2]), lambda: ToMe(12)])
def test_the_batch_is_not_mixed(method: Any) -> None:
    """The tokens that remain of an image do not depend on the other images of the batch."""
    model = model_of("vit").eval()
    method().apply(model)
    images, _ = batch_of("vit")
    together = model(images)
    torch.testing.assert_close(together, torch.cat([model(image[None]) for image in images]))
