"""Tests of token merging in real models: merged tokens, cost, outputs, gradients and stacks."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import set_fused_attn
from torch import Tensor, nn

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.cost import executed
from efficient_ft.methods import (
    BSR,
    LBPDCT,
    LBPWHT,
    ALaST,
    BackRazor,
    EViT,
    Mesa,
    ToMe,
    apply_methods,
)
from efficient_ft.methods.forwards import forwards_of
from efficient_ft.methods.tokens.tome import scheduled
from efficient_ft.ops.tokens import Tokens, token_context
from efficient_ft.testing import gradients, model_of
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


def pictures(count: int = 2) -> Tensor:
    return torch.randn(count, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def merged(x: Tensor, sizes: list[int], keys: Tensor, r: int, prefix: int) -> tuple[Tensor, list[int]]:
    """Merge the r most similar pairs of the tokens (N, C) of one image. With r = 0, the order is unchanged."""
    if not r:
        return x, sizes
    a, b = range(0, len(x), 2), range(1, len(x), 2)
    edges = []
    for i in a[(prefix + 1) // 2 :]:
        likeness = {j: F.cosine_similarity(keys[i], keys[j], dim=0).item() for j in b if j >= prefix}
        j = max(likeness, key=likeness.__getitem__)
        edges.append((likeness[j], i, j))
    into = {i: j for _, i, j in sorted(edges, reverse=True)[:r]}
    groups = [[i] for i in range(prefix)] + [[i] for i in a if i >= prefix and i not in into]
    groups += [[j, *(i for i in into if into[i] == j)] for j in b if j >= prefix]
    counts = [sum(sizes[i] for i in group) for group in groups]
    sums = [sum((sizes[i] * x[i] for i in group), torch.zeros(())) for group in groups]
    return torch.stack([s / n for s, n in zip(sums, counts, strict=True)]), counts


def by_hand(model: Any, images: Tensor, r: list[int], proportional: bool) -> Tensor:
    """Run the forward pass in plain operations and merge tokens image by image."""
    x = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(images))))
    prefix, sizes = model.num_prefix_tokens, [[1] * x.shape[1] for _ in x]
    for block, count in zip(model.blocks, r, strict=True):
        attn = block.attn
        h = block.norm1(x)
        qkv = attn.qkv(h).unflatten(-1, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = attn.q_norm(qkv[0]), attn.k_norm(qkv[1])
        weights = (q @ k.mT * attn.scale).exp()
        if proportional:
            weights = weights * torch.tensor(sizes)[:, None, None]
        p = weights / weights.sum(-1, keepdim=True)
        x = x + block.ls1(attn.proj((p @ qkv[2]).transpose(1, 2).flatten(2)))
        found = [merged(*image, count, prefix) for image in zip(x, sizes, k.mean(1), strict=True)]
        x, sizes = torch.stack([tokens for tokens, _ in found]), [of for _, of in found]
        x = x + block.ls2(block.mlp(block.norm2(x)))
    x = model.norm(x)
    if model.global_pool == "token":
        return model.forward_head(x)
    return model.head(model.fc_norm(pooled(model, x, torch.tensor(sizes, dtype=x.dtype))))


def pooled(model: Any, x: Tensor, sizes: Tensor) -> Tensor:
    """Pool tokens by a mean or by attention, weighted by their sizes (B, N)."""
    x, sizes = x[:, model.num_prefix_tokens :], sizes[:, model.num_prefix_tokens :]
    if model.attn_pool is None:
        return (x * sizes.unsqueeze(-1)).sum(1) / sizes.sum(1, keepdim=True)
    pool = model.attn_pool
    q = pool.q(pool.latent).unflatten(-1, (pool.num_heads, -1)).transpose(1, 2)
    k, v = pool.kv(x).unflatten(-1, (2, pool.num_heads, -1)).permute(2, 0, 3, 1, 4)
    scores = q @ k.mT * pool.head_dim**-0.5 + sizes.log()[:, None, None]
    y = pool.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    return (y + pool.mlp(pool.norm(y)))[:, 0]


@pytest.mark.vary_one(slow=True)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("proportional", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_the_output_and_all_gradients_are_those_of_the_blocks_written_out(
    form: str, proportional: bool, fused: bool
) -> None:
    set_fused_attn(fused)
    try:
        model, plain = small_vit(form), small_vit(form)
    finally:
        set_fused_attn(True)
    r = [9, 20, 0, 17]  # The last block merges at most half of the remaining 35 tokens.
    ToMe([9, 20, 0, 30], proportional_attention=proportional).apply(model)
    expected = by_hand(plain, pictures(), r, proportional)
    for mode in (True, False):
        found = model.train(mode)(pictures())
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    labels = torch.arange(2)
    F.cross_entropy(model.train()(pictures()), labels).backward()
    F.cross_entropy(expected, labels).backward()
    for (name, p), (_, q) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None and q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-8, atol=1e-12)


def test_proportional_attention_and_merging_are_not_nothing() -> None:
    outputs = []
    for method in (None, ToMe(12), ToMe(12, proportional_attention=False)):
        model = small_vit("vit_tiny_patch16_224").eval()
        if method is not None:
            method.apply(model)
        outputs.append(model(pictures()))
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert (outputs[one] - outputs[other]).abs().max() > 1e-4


def test_attention_of_two_maps_counts_both() -> None:
    """Fused and unfused differential attention give equal outputs."""
    outputs = []
    for fused in (True, False):
        set_fused_attn(fused)
        try:
            model = small_vit("vit_dwee_patch16_reg1_gap_256")
        finally:
            set_fused_attn(True)
        ToMe(12).apply(model)
        outputs.append(model.eval()(pictures()))
    torch.testing.assert_close(*outputs, rtol=1e-9, atol=1e-10)


def test_attention_without_keys_or_with_a_mask_is_refused() -> None:
    class Mean(nn.Module):
        def forward(self, x: Tensor, **_: Any) -> Tensor:
            return x.mean(1, keepdim=True).expand_as(x)

    class Masked(nn.Module):
        def forward(self, x: Tensor, **_: Any) -> Tensor:
            q = x.unsqueeze(1)
            return F.scaled_dot_product_attention(q, q, q, attn_mask=x.new_zeros(x.shape[1], x.shape[1])).squeeze(1)

    for attention, message in ((Mean(), "keys of Mean were not found"), (Masked(), "with a mask")):
        model: Any = small_vit("vit_tiny_patch16_224")
        model.blocks[1].attn = attention
        with pytest.raises(UserError, match=f"method tome: .*{message}"):
            ToMe(4).apply(model)
        assert not any(forwards_of(m) for m in model.modules())


@pytest.mark.slow
def test_the_order_of_the_tokens_decides_the_two_sets_and_nothing_else() -> None:
    """A permutation of the patch tokens within each of the two sets does not change the output."""
    generator = torch.Generator().manual_seed(0)
    places = torch.arange(65)
    for start in (2, 1):
        places[start::2] = places[start::2][torch.randperm(len(places[start::2]), generator=generator)]
    assert not torch.equal(places, torch.arange(65))

    def output(r: list[int], before: int) -> Tensor:
        model: Any = small_vit("vit_tiny_patch16_224").eval()
        ToMe(r).apply(model)
        model.blocks[before].register_forward_pre_hook(lambda _module, args: (args[0][:, places[: args[0].shape[1]]],))
        return model(pictures())

    def plain(r: list[int]) -> Tensor:
        model = small_vit("vit_tiny_patch16_224").eval()
        ToMe(r).apply(model)
        return model(pictures())

    for r in ([0, 0, 0, 0], [20, 0, 0, 0], [0, 0, 0, 20]):  # A single matching step is independent of the order.
        torch.testing.assert_close(output(r, 0), plain(r), rtol=1e-9, atol=1e-10)
    assert (output([20, 20, 0, 0], 0) - plain([20, 20, 0, 0])).abs().max() > 1e-6  # The second step has different sets.


# ------------------------------------------------------------------------------------------------ schedule of r
def test_r_rises_or_falls_about_its_mean() -> None:
    assert scheduled(8, 0.0, 12) == [8] * 12
    assert scheduled(6, -1, 4) == [12, 8, 4, 0]
    assert scheduled(6, 1.0, 4) == [0, 4, 8, 12]
    assert scheduled(6, 0.5, 3) == [3, 6, 9]
    assert scheduled(7, -1, 1) == [7]
    for r in range(30):
        for inflect in (-1, -0.7, -0.3, 0.1, 0.5, 1):
            for blocks in (2, 5, 12, 24):
                found = scheduled(r, inflect, blocks)
                assert sum(found) == r * blocks
                assert found == sorted(found, reverse=inflect < 0)
                assert found[0] == scheduled(r, -inflect, blocks)[-1]


def tokens_behind(model: Any, size: int) -> list[int]:
    counts: list[int] = []
    for block in model.blocks:
        block.mlp.register_forward_hook(lambda _m, _i, out: counts.append(out.shape[1]))
    model(torch.empty(1, 3, size, size, device="meta"))
    return counts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "counts"),
    [
        ({"r": 8}, [197 - 8 * n for n in range(1, 13)]),
        ({"r": 16}, [*(197 - 16 * n for n in range(1, 12)), 1 + 10]),  # at most half of 20 tokens
        ({"r": 8, "inflect": -1}, [181, 166, 153, 141, 131, 122, 115, 109, 105, 102, 101, 101]),
        ({"r": [98, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 60]}, [99] * 4 + [92] * 7 + [47]),
    ],
)
def test_tokens_after_the_blocks(settings: dict[str, Any], counts: list[int]) -> None:
    with torch.device("meta"):
        model = timm.create_model("deit_small_patch16_224")
    ToMe(**settings).apply(model)
    for mode in (True, False):
        assert tokens_behind(model.train(mode), 224) == counts


def forward_macs(channels: int, r: int, depth: int = 12, patches: int = 196) -> int:
    tokens, macs = patches + 1, patches * 768 * channels + 1000 * channels
    for _ in range(depth):
        macs += 4 * tokens * channels**2 + 2 * tokens**2 * channels
        merged = min(r, (tokens - 1) // 2)
        macs += 64 * ((tokens + 1) // 2) * (tokens // 2) if merged else 0  # similarity
        tokens -= merged
        macs += 8 * tokens * channels**2
    return macs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "channels", "r", "published"),
    [
        ("deit_tiny_patch16_224", 192, 8, 0.9),
        ("deit_small_patch16_224", 384, 0, 4.6),
        ("deit_small_patch16_224", 384, 8, 3.4),
        ("deit_small_patch16_224", 384, 13, 2.7),
        ("deit_small_patch16_224", 384, 16, 2.3),
        ("deit_tiny_patch16_224", 192, 12, 0.8),
        ("deit_tiny_patch16_224", 192, 16, 0.6),
    ],
)
def test_the_forward_pass_costs_what_is_counted_by_hand_and_published(
    name: str, channels: int, r: int, published: float
) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    cost = executed(model, 1, (224, 224), methods=[ToMe(r)])
    assert cost.forward_flops == 2 * forward_macs(channels, r)
    assert round(cost.forward_flops / 2e9, 1) == published


@pytest.mark.slow
def test_attention_stays_fused_and_merging_keeps_no_activation() -> None:
    """Merging saves a weight, an index and a log size per token in addition to the bytes of the plain blocks."""
    with torch.device("meta"):
        model = timm.create_model("deit_small_patch16_224", depth=3)
    off, on, without = (
        executed(model, 1, (224, 224), methods=[ToMe(r, proportional_attention=proportional)])
        for r, proportional in ((0, True), (8, True), (8, False))
    )
    incoming = [197 - 8 * n for n in range(3)]
    assert on.saved_bytes - without.saved_bytes == 4 * sum(incoming[1:])
    # Saved bytes per token before merging (inputs, q, k, v, attention, statistics) and after merging (feed-forward).
    before, behind = 4 * (6 * 384 + 2 + 6), 4 * (10 * 384 + 2)
    outside = off.saved_bytes - 3 * 197 * (before + behind)
    # The final norm saves its input and statistics, and the head saves its input.
    last = 4 * (2 * 384 + 2) * 3 * 8
    assert without.saved_bytes == outside - last + sum(n * (before + 12) + (n - 8) * behind for n in incoming)


# ------------------------------------------------------------------------------------------------ stacks
@pytest.mark.parametrize("other", [lambda: Mesa(), lambda: BackRazor(0.0, "same", attention="fused")])
def test_gradients_from_eight_bits_are_near(other: Any) -> None:
    alone, both = model_of("vit"), model_of("vit")
    ToMe(12).apply(alone)
    apply_methods(both, [ToMe(12), other()])
    a, b = (torch.cat([g.flatten() for g in gradients(m, "vit").values() if g is not None]) for m in (alone, both))
    assert F.cosine_similarity(a, b, dim=0) > 0.99
    assert not torch.equal(a, b)


@pytest.mark.parametrize("low_rank", [LBPWHT, LBPDCT])
def test_low_rank_backward_is_refused_in_either_order(low_rank: Any) -> None:
    model = model_of("vit")
    with pytest.raises(UserError, match=r"cannot be combined: merged tokens have no grid"):
        apply_methods(model, [ToMe(4), low_rank(order=3)])
    assert not any(forwards_of(m) for m in model.modules())
    model = model_of("vit")
    ToMe(4).apply(model)
    with pytest.raises(UserError, match=rf"{low_rank.name}: tome has been applied .*: merged tokens have no grid"):
        low_rank(order=3).apply(model)
    assert not any(hasattr(m, "low_rank") for m in model.modules())
    assert all(g is not None for g in gradients(model, "vit").values())


def test_a_low_rank_layer_never_takes_merged_tokens_for_others() -> None:
    """A low-rank layer rejects merged tokens, even if their number equals the number of grid positions."""
    model: Any = model_of("vit")
    LBPWHT(order=3).apply(model)
    x = torch.randn(2, 65, 48, dtype=torch.float64, requires_grad=True)
    layer = model.blocks[0].attn.qkv
    assert hasattr(layer, "low_rank")
    layer(x)
    with token_context(Tokens(sizes_BN=torch.ones(2, 65))), pytest.raises(UserError, match="Tokens have been merged"):
        layer(x)


@pytest.mark.parametrize("other", [lambda: EViT([1]), lambda: BSR([1], [1]), lambda: ALaST(2)])
def test_two_methods_that_change_the_tokens_are_refused(other: Any) -> None:
    for first, second in ((other, lambda: ToMe(4)), (lambda: ToMe(4), other)):
        model = model_of("vit")
        first().apply(model)
        with pytest.raises(UserError, match="has been applied"):
            second().apply(model)


# ------------------------------------------------------------------------------------------------ rejected settings
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"r": -1}, r"r must be an integer >= 0, or a list .*got -1"),
        ({"r": 2.5}, "integer"),
        ({"r": True}, "integer"),
        ({"r": "8"}, "integer"),
        ({"r": []}, "one such integer for each block"),
        ({"r": [8, -1, 8, 8]}, ">= 0"),
        ({"r": [8, 0.5]}, "integer"),
        ({"r": 4, "inflect": 1.5}, r"inflect must be a number from -1 to 1, got 1.5"),
        ({"r": 4, "inflect": -1.01}, "from -1 to 1"),
        ({"r": 4, "inflect": float("nan")}, "from -1 to 1"),
        ({"r": 4, "inflect": True}, "from -1 to 1"),
        ({"r": [4, 4, 4, 4], "inflect": 1}, "0 if r is a list"),
        ({"r": 4, "proportional_attention": 1}, "proportional_attention must be"),
        ({"r": [8, 8, 8]}, r"r must be a list of 4 integers, one for each block of .*, got \[8, 8, 8\]"),
        ({"r": 33}, r"r must be an integer from 0 to 32, got 33\. .* 64 patch tokens"),
        ({"r": 17, "inflect": -1}, "from 0 to 16"),  # 34 in the first block
        ({"r": [0, 0, 0, 33]}, r"integers from 0 to 32 .* has 64 patch tokens"),
    ],
)
def test_settings_out_of_range_are_named(settings: dict[str, Any], message: str) -> None:
    model = model_of("vit")
    with pytest.raises(SettingError, match=message):
        ToMe(**settings).apply(model)
    assert not any(forwards_of(m) for m in model.modules())


@pytest.mark.slow
def test_an_r_that_would_merge_everything_is_refused() -> None:
    """An r that leaves one patch token is rejected: 7 blocks leave 1 of 64 tokens with r = 16 and 2 with r = 15."""
    for r in (16, 32, [32] * 7):
        with pytest.raises(SettingError, match=r"from 0 to (15|32).* more than one"):
            ToMe(r).apply(small_vit("vit_tiny_patch16_224", depth=7))
    model = small_vit("vit_tiny_patch16_224", depth=7)
    report = ToMe(15).apply(model)
    assert len(report.touched) == 7
    assert model.eval()(pictures()).isfinite().all()
    assert tokens_behind(model.float().to("meta"), 32)[-1] == 1 + 2


def test_r_0_is_said_to_be_nothing() -> None:
    report = ToMe(0).apply(model_of("vit"))
    assert not report.touched
    assert "r is 0" in report.none_needed
    assert ToMe([4, 0, 4, 0]).apply(model_of("vit")).touched == ("blocks.0", "blocks.2")


@pytest.mark.first(2, "slow")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("beit_base_patch16_224", "attention uses relative position biases"),
        ("vit_relpos_small_patch16_224", "attention uses relative position biases"),
        ("vit_base_patch16_xp_224", "attention and feed-forward network run in parallel"),
        ("cait_xxs24_224", "attention maps are mixed across heads"),
        ("mvitv2_tiny", "not share one token grid"),
        ("swin_tiny_patch4_window7_224", "attention uses windows of a grid"),
        ("hiera_tiny_224", "attention uses windows and pools tokens"),
        ("samvit_base_patch16_224", "attention uses windows and relative position biases"),
        ("mixer_s16_224", "the layers require a fixed number of tokens"),
    ],
)
def test_other_models_are_refused_by_name(name: str, message: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    with pytest.raises(UserError, match=message) as error:
        ToMe(1).apply(model)
    assert name in str(error.value)
    assert not any(forwards_of(m) for m in model.modules())
