"""Tests of mixtures of experts: outputs and gradients per token, the cost of a step, tasks and invalid settings."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import SwiGLU
from torch import Tensor, nn

import efficient_ft.models.small  # noqa: F401  registers vit_digits
from efficient_ft.config import ModelConfig
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.cost import executed, layer_flops
from efficient_ft.methods import (
    BSR,
    LBPWHT,
    BackRazor,
    Blocks,
    BSRMoE,
    Checkpointing,
    Full,
    HeadOnly,
    LoRA,
    Method,
    MoE,
    apply_methods,
    plain_state_dict,
)
from efficient_ft.models.tasks import give_heads
from efficient_ft.models.view import Reason, view
from efficient_ft.testing import batch_of, gradients, largest_difference, model_of
from efficient_ft.training.output import export


def with_experts(gates: float = 1.0, name: str = "vit", **settings: Any) -> tuple[Any, MoE]:
    """Create a small model whose experts differ and whose gates are random."""
    model, method = model_of(name), MoE(**{"num_experts": 6, "top_k": 2, "blocks": [1, -1], **settings})
    method.apply(model)
    generator = torch.Generator().manual_seed(4)
    for n, p in model.named_parameters():
        if ".mlp.gate" in n or ".mlp.experts" in n:
            scale = gates if ".gate" in n else 0.05
            p.data += scale * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return model, method


def by_hand(mlp: Any, x_TC: Tensor, top_k: int, norm_topk_prob: bool) -> tuple[Tensor, Tensor]:
    """Return the experts' output, computed token by token, and the balance loss E · Σ share · mean probability."""
    gate = mlp.gate.weight
    ffns = [mlp, *mlp.experts]
    rows, shares, probabilities = [], [0.0] * len(ffns), []
    for x in x_TC:
        p = [torch.exp(gate[e] @ x) for e in range(len(ffns))]
        p = [value / sum(p) for value in p]
        probabilities.append(torch.stack(p))
        chosen = sorted(range(len(ffns)), key=lambda e: -p[e].item())[:top_k]
        total = sum(p[e] for e in chosen) if norm_topk_prob else 1.0
        y = torch.zeros_like(x)
        for e in chosen:
            ffn = ffns[e]
            hidden = F.gelu(ffn.fc1.weight @ x + ffn.fc1.bias)
            y = y + p[e] / total * (ffn.fc2.weight @ hidden + ffn.fc2.bias)
            shares[e] += 1 / (top_k * len(x_TC))
        rows.append(y)
    means = torch.stack(probabilities).mean(0)
    return torch.stack(rows), len(ffns) * sum((f * m for f, m in zip(shares, means, strict=True)), torch.zeros(()))


# ------------------------------------------------------------------------------------------------ outputs and gradients
@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize("top_k", [1, 2, 6])
def test_output_and_all_gradients_are_those_of_each_token_by_itself(top_k: int, norm_topk_prob: bool) -> None:
    model, method = with_experts(top_k=top_k, norm_topk_prob=norm_topk_prob, aux_loss_coef=0.3, blocks=[1])
    mlp = model.blocks[1].mlp
    x = torch.randn(2, 5, 48, dtype=torch.float64, requires_grad=True)
    g = torch.randn(2, 5, 48, dtype=torch.float64)
    found = mlp(x)
    expected, uneven = by_hand(mlp, x.reshape(10, 48), top_k, norm_topk_prob)
    expected = expected.reshape(2, 5, 48)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    loss, reference = method.total_loss((found * g).sum()), (expected * g).sum() + 0.3 * uneven
    torch.testing.assert_close(loss, reference, rtol=1e-10, atol=1e-12)
    wanted = [x, *mlp.parameters()]
    for a, b in zip(
        torch.autograd.grad(loss, wanted, allow_unused=True),
        torch.autograd.grad(reference, wanted, allow_unused=True),
        strict=True,
    ):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_maps_are_token_by_token_too() -> None:
    """Experts also route feature maps in the layout (B, H, W, C), for example in Swin."""
    model, _ = with_experts(name="swinv2")
    mlp = model.get_submodule(f"{view(model).blocks[-1]}.mlp")
    x = torch.randn(2, 3, 4, 64, dtype=torch.float64)
    expected, _ = by_hand(mlp, x.reshape(24, 64), 2, False)
    torch.testing.assert_close(mlp(x), expected.reshape(x.shape), rtol=1e-10, atol=1e-12)


def test_gated_feed_forward_networks_become_experts_too() -> None:
    model = model_of("vit")
    model.blocks[1].mlp = SwiGLU(48, 32).double()
    plain = copy.deepcopy(model)
    MoE(3, 2, [1], norm_topk_prob=True).apply(model)
    images, _ = batch_of("vit")
    torch.testing.assert_close(model(images), plain(images), rtol=1e-10, atol=1e-12)


def test_at_first_the_output_is_top_of_experts_and_the_first_ones_are_taken() -> None:
    plain, model = model_of("vit"), model_of("vit")
    MoE(16, 4, [1]).apply(model)
    x = torch.randn(2, 7, 48, dtype=torch.float64)
    torch.testing.assert_close(model.blocks[1].mlp(x), plain.blocks[1].mlp(x) / 4)
    found = gradients(model, "vit")
    for number in range(15):
        taken = found[f"blocks.1.mlp.experts.{number}.fc1.weight"] is not None
        assert taken == (number < 3), "the model's own and the next three"
    assert found["blocks.1.mlp.fc1.weight"] is not None


def test_the_sum_is_in_single_precision_and_the_result_in_the_layer_s_type() -> None:
    model, _ = with_experts(top_k=6)
    mlp = model.blocks[1].mlp.float()
    x = torch.randn(2, 5, 48)
    with torch.autocast("cpu", torch.bfloat16):
        found = mlp(x)
    assert found.dtype == torch.bfloat16
    expected, _ = by_hand(mlp, x.reshape(10, 48), 6, False)
    torch.testing.assert_close(found.float(), expected.reshape(2, 5, 48), rtol=0.05, atol=0.02)


def test_the_gate_is_in_single_precision_under_autocast() -> None:
    """In bf16, many probabilities would be equal, so that a token would choose its experts by their order."""
    model, _ = with_experts(top_k=1)
    mlp = model.blocks[1].mlp.float()
    with torch.no_grad():
        mlp.gate.weight.div_(100)
    counts: list[int] = []
    for expert in mlp.experts:
        expert.register_forward_pre_hook(lambda _m, args: counts.append(len(args[0])))
    x = torch.randn(64, 16, 48)
    with torch.no_grad():
        mlp(x)
        exact = counts[:]
        counts.clear()
        with torch.autocast("cpu", torch.bfloat16):
            mlp(x)
    assert counts == exact


# ------------------------------------------------------------------------------------------------ the cost of a step
def test_an_expert_without_tokens_is_not_run() -> None:
    model, _ = with_experts(num_experts=8, top_k=2, gates=0.0)
    mlp = model.blocks[1].mlp
    with torch.no_grad():  # For a positive first feature, every token chooses experts 2 and 5.
        mlp.gate.weight[2, 0] = mlp.gate.weight[5, 0] = 50.0
    called: list[int] = []
    for number, expert in enumerate(mlp.experts, start=1):
        expert.register_forward_hook(lambda _m, _i, _o, number=number: called.append(number))
    x = torch.rand(3, 4, 48, dtype=torch.float64) + 0.1
    mlp(x).sum().backward()
    assert called == [2, 5]
    for number, expert in enumerate(mlp.experts, start=1):
        assert all((p.grad is not None) == (number in (2, 5)) for p in expert.parameters())
    assert mlp.fc1.weight.grad is None


def _vit() -> Any:
    """Create a ViT with one block of width 48, a hidden width of 192 and 65 tokens."""
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=4, depth=1, embed_dim=48, num_heads=3, num_classes=5
    )


@pytest.mark.parametrize("experts", [4, 16])
def test_flops_are_those_of_the_experts_that_a_token_takes(experts: int) -> None:
    token = 2 * 2 * 48 * 192  # FLOPs of one feed-forward network per token
    plain = executed(_vit(), 2, (32, 32))
    found = executed(_vit(), 2, (32, 32), methods=[MoE(experts, 4, [0])])
    assert found.counted_on == "fake tensors"
    assert found.forward_flops - plain.forward_flops == 65 * (3 * token + 2 * 48 * experts)
    assert found.backward_flops - plain.backward_flops == 2 * 65 * (3 * token + 2 * 48 * experts)

    # The FLOPs of a real forward pass do not depend on the routing.
    model = _vit()
    MoE(experts, 4, [0]).apply(model)
    for spread in (0.0, 3.0):
        nn.init.normal_(model.blocks[0].mlp.gate.weight, std=spread)
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False) as counter:
            model.blocks[0].mlp(torch.randn(2, 65, 48))
        assert counter.get_total_flops() == 2 * 65 * (4 * token + 2 * 48 * experts)


def test_kept_bytes_by_hand() -> None:
    plain = executed(_vit(), 2, (32, 32))
    found = executed(_vit(), 2, (32, 32), methods=[MoE(16, 4, [0])])
    tokens = 65
    of_ffn = 4 * (48 + 192 + 192)  # fp32: inputs of fc1, GELU and fc2
    routed = 4 * (of_ffn + 4 * 48)  # four experts, and their outputs for the gradients of the routing weights
    # The gate saves its input, the softmax output and the sort indices. Each pair of token and expert saves the token
    # index, the weight and the position in the sorted order.
    gate = 4 * (48 + 16) + 8 * 16 + 4 * (8 + 4 + 8)
    # The plain network saves `of_ffn` bytes per token.
    assert found.saved_bytes - plain.saved_bytes == pytest.approx(tokens * (routed + gate - of_ffn), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "real", "published"),
    [((Full(), MoE()), 3319, 1801), ((BSRMoE(keep_rate=0.7, fuse=False),), 2025, 1237)],
    ids=["full", "bsr"],
)
def test_the_published_forward_cost_leaves_out_experts_and_attention(
    method: tuple[Method, ...], real: float, published: float
) -> None:
    """The forward GMACs of Table 6 (ViT-B, batch 128) count only the linear layers outside of the experts."""
    with torch.device("meta"):
        model: Any = timm.create_model("vit_base_patch16_224", num_classes=10)
    found = layer_flops(model, 1, (224, 224), methods=copy.deepcopy(method))
    gmacs = {name: cost.forward / 2 * 128 / 1e9 for name, cost in found.items()}
    inside = tuple(f"blocks.{block}.mlp.{part}" for block in (3, 7, 11) for part in ("fc", "experts"))
    left_out = sum(value for name, value in gmacs.items() if name.endswith(".attn") or name.startswith(inside))
    assert sum(gmacs.values()) == pytest.approx(real, rel=1e-3)
    assert sum(gmacs.values()) - left_out == pytest.approx(published, rel=1e-3)


def test_a_model_without_memory_can_be_run() -> None:
    with torch.device("meta"):
        model = _vit()
    MoE(16, 4, [0]).apply(model)
    assert model(torch.empty(2, 3, 32, 32, device="meta")).shape == (2, 5)


# ------------------------------------------------------------------------------------------------ the balance loss
def test_the_balance_loss_takes_tokens_from_the_expert_that_has_most() -> None:
    """Even with equal probabilities, the balance loss moves tokens away from the most used expert."""
    model, method = with_experts(gates=0.0, num_experts=4, top_k=1, aux_loss_coef=1.0)
    mlp = model.blocks[1].mlp
    x = torch.randn(400, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.5
    optimizer = torch.optim.SGD([mlp.gate.weight], lr=0.05)
    most = []
    for _ in range(20):
        most.append((x @ mlp.gate.weight.T).argmax(-1).bincount(minlength=4).argmax().item())
        mlp(x)
        model.blocks[3].mlp(x[:1])  # The balance losses of both layers are added.
        optimizer.zero_grad()
        method.total_loss(torch.zeros((), dtype=torch.float64)).backward()
        optimizer.step()
    assert most[0] == 0
    assert most[1] != 0
    assert set(most) == {0, 1, 2, 3}


def test_without_a_balance_nothing_is_added_and_nothing_kept() -> None:
    model, method = with_experts()
    loss = F.cross_entropy(model(batch_of("vit")[0]), batch_of("vit")[1])
    assert method.total_loss(loss) is loss
    assert Full().total_loss(loss) is loss


def test_a_balance_loss_does_not_stand_in_the_way_of_copies_and_evaluation() -> None:
    model, method = with_experts(aux_loss_coef=0.1)
    images, _ = batch_of("vit")
    model(images)
    other, copied = copy.deepcopy((model, method))
    model.eval()(images)
    model.train()
    loss = torch.zeros((), dtype=torch.float64)
    assert method.total_loss(loss) > 0
    with pytest.raises(UserError, match=r"no balance loss .*aux_loss_coef=0"):
        method.total_loss(loss)
    other(images)
    assert copied.total_loss(loss) > 0


@pytest.mark.slow
def test_what_is_counted_includes_the_balance_loss() -> None:
    without, balanced = (
        executed(_vit(), 2, (32, 32), methods=[MoE(16, 4, [0], aux_loss_coef=balance)]) for balance in (0.0, 0.1)
    )
    assert balanced.flops == without.flops
    assert balanced.saved_bytes - without.saved_bytes == 65 * 4 * 8  # indices of the chosen experts (int64)


# ------------------------------------------------------------------------------------------------ tasks
@pytest.mark.parametrize("kind", [MoE, BSRMoE])
def test_every_task_has_routers_and_a_classifier(kind: type[MoE] | type[BSRMoE]) -> None:
    torch.manual_seed(0)
    model = _vit_of_four()
    give_heads(model, {"pets": 5, "food": 7})
    method = kind(num_experts=4, top_k=2, blocks=[1, 3], **({"drop_at": [1, 2]} if kind is BSRMoE else {}))
    method.apply(model)
    assert method.task == "pets"
    images = torch.randn(2, 3, 32, 32)
    for task, classes in (("food", 7), ("pets", 5)):
        method.task = task
        logits = model(images)
        assert logits.shape == (2, classes)
        model.zero_grad()
        logits.square().sum().backward()
        moved = {n for n, p in model.named_parameters() if p.grad is not None}
        of_tasks = {n for n in moved if ".gate." in n or n.startswith("head.")}
        assert of_tasks == {
            f"blocks.{block}.mlp.gate.{task}.weight" for block in (1, 3)
        } | {f"head.{task}.{n}" for n in ("weight", "bias")}  # fmt: skip
    # A copy has an independent task.
    other, copied = copy.deepcopy((model, method))
    copied.task = "food"
    assert other(images).shape == (2, 7)
    assert model(images).shape == (2, 5)
    with pytest.raises(SettingError, match=r"^task must be one of pets, food, got cats"):
        method.task = "cats"
    method.remove(model)
    assert method.task is None


def test_a_network_of_one_task_has_no_other() -> None:
    _, method = with_experts()
    assert method.task is None
    with pytest.raises(UserError, match=r"moe: the network has only one task. .*give_heads"):
        method.task = "pets"


# ------------------------------------------------------------------------------------------------ stacks
def _vit_of_four() -> Any:
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=4, depth=4, embed_dim=48, num_heads=3, num_classes=5
    )


def test_bsr_with_experts_is_bsr_and_experts() -> None:
    one, two = model_of("vit"), model_of("vit")
    settings: dict[str, Any] = {"num_experts": 4, "top_k": 2, "blocks": [1, -1], "norm_topk_prob": True}
    apply_methods(one, [BSR([1, -1], [1, 2], 0.5), MoE(**settings)])
    BSRMoE(**settings, drop_at=[1, 2]).apply(two)
    assert {n for n, p in one.named_parameters() if p.requires_grad} == {
        n for n, p in two.named_parameters() if p.requires_grad
    }
    assert largest_difference(gradients(one, "vit"), gradients(two, "vit")) == 0


def test_experts_go_where_the_selection_trains() -> None:
    model = model_of("vit")
    _, applied = apply_methods(model, [MoE(4, 2, [1]), Blocks([0, 1])])
    assert applied.touched == ("blocks.1.mlp",)
    assert set(applied.skipped) == {"blocks.0", "blocks.2", "blocks.3"}
    for selection, frozen in ((HeadOnly(), 0), (Blocks([0]), 1)):
        with pytest.raises(SettingError, match=rf"blocks .* got \[0, 1\]\. The network blocks\.{frozen}\.mlp of"):
            apply_methods(model_of("vit"), [MoE(4, 2, [0, 1]), selection])


@pytest.mark.parametrize(
    "other",
    [
        lambda: Checkpointing(),
        pytest.param(lambda: BackRazor(sparsity=0.0, value_dtype="same"), marks=pytest.mark.slow),
        pytest.param(
            lambda: BackRazor(sparsity=0.0, value_dtype="same", norm_saves="input", recompute_inputs=False),
            marks=pytest.mark.slow,
        ),
        pytest.param(lambda: LBPWHT(order=15), marks=pytest.mark.slow),
    ],
    ids=["checkpointing", "back_razor", "published", "lbp_wht"],
)
def test_stacked_with_what_changes_nothing(other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LBPWHT, "_costs_more", lambda *_: None)  # At full rank, an exact layer would be cheaper.
    alone, _ = with_experts()
    both, _ = with_experts()
    report = other().apply(both)
    if report.method != "checkpointing":
        inside = {n: why for n, why in report.skipped.items() if n.startswith(("blocks.1.mlp.", "blocks.3.mlp."))}
        assert {why.reason for why in inside.values()} == {Reason.ROUTED}
        assert len(inside) == 2 * (6 * 2 + 1)
    assert largest_difference(gradients(alone, "vit"), gradients(both, "vit")) < 1e-8


def test_what_is_packed_next_to_experts_leaves_them_exact() -> None:
    """Packing at a sparsity of 90 % leaves the gradients of the last block's experts exact."""
    alone, _ = with_experts()
    both, _ = with_experts()
    BackRazor(sparsity=0.9, value_dtype="same").apply(both)
    exact, packed = gradients(alone, "vit"), gradients(both, "vit")
    last = [n for n in exact if n.startswith("blocks.3.mlp.") and exact[n] is not None]
    assert len(last) > 8
    assert largest_difference({n: exact[n] for n in last}, {n: packed[n] for n in last}) < 1e-10
    assert largest_difference(exact, packed) > 1e-2


def test_a_recomputed_block_has_no_balance_loss() -> None:
    model, method = with_experts(aux_loss_coef=0.1)
    Checkpointing().apply(model)
    model(batch_of("vit")[0])
    with pytest.raises(UserError, match="checkpointing"):
        method.total_loss(torch.zeros(()))


def test_checkpointing_of_the_model_s_own_after_experts_is_rejected() -> None:
    model, method = with_experts(aux_loss_coef=0.1)
    model.set_grad_checkpointing(True)  # type: ignore[operator]
    loss = method.total_loss(model(batch_of("vit")[0]).square().mean())
    with pytest.raises(UserError, match=r"method moe: blocks\.\d\.mlp is recomputed\. .* set aux_loss_coef=0"):
        loss.backward()
    model.set_grad_checkpointing(False)  # type: ignore[operator]
    method.total_loss(model(batch_of("vit")[0]).square().mean()).backward()


def test_a_balance_loss_is_whole_or_refused() -> None:
    """`total_loss` raises an error if one of two blocks with experts is recomputed."""
    model, method = model_of("vit"), MoE(4, 2, [1, 3], aux_loss_coef=0.1)
    method.apply(model)
    Checkpointing(blocks=[1]).apply(model)
    images, labels = batch_of("vit")
    for _ in range(2):
        loss = F.cross_entropy(model(images), labels)
        with pytest.raises(UserError, match=r"no balance loss for blocks\.1\.mlp\..*checkpointing"):
            method.total_loss(loss)
        loss.backward()
    assert not method._balance_losses


def test_a_run_s_result_is_loaded_with_its_experts(tmp_path: Path) -> None:
    config = ModelConfig(name="vit_digits", pretrained=False, kwargs={"depth": 2, "embed_dim": 16, "num_heads": 2})
    model = timm.create_model("vit_digits", num_classes=5, **config.kwargs)
    methods = [MoE(4, 2, [-1])]
    apply_methods(model, methods)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    spec = InputSpec(size=(32, 32), mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bilinear")
    export.save(
        tmp_path / export.NAME, plain_state_dict(model, methods), config, list("abcde"), spec, {"epoch": 1}, methods
    )
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(export.load(tmp_path).model(images), model.eval()(images))


# ------------------------------------------------------------------------------------------------ invalid settings
@pytest.mark.parametrize(
    "setting",
    [
        {"num_experts": 0},
        {"num_experts": 2.0},
        {"top_k": 0},
        {"top_k": 17},
        {"top_k": True},
        {"blocks": []},
        {"blocks": "3"},
        {"norm_topk_prob": 1},
        {"aux_loss_coef": -0.1},
        {"aux_loss_coef": float("nan")},
        {"aux_loss_coef": True},
    ],
)
@pytest.mark.parametrize("kind", [MoE, BSRMoE])
def test_a_setting_out_of_range_names_itself(kind: Any, setting: dict[str, Any]) -> None:
    with pytest.raises(SettingError) as error:
        kind(**setting)
    assert error.value.setting == next(iter(setting))


def test_what_can_have_no_experts_is_refused_and_left_as_it_was() -> None:
    model = model_of("vit")
    for method, said in (
        (MoE(4, 2), r"blocks must be indices from -4 to 3, got \[3, 7, 11\]\. .* has 4 blocks"),
        (BSRMoE(4, 2), r"blocks must be .* got \[3, 7, 11\]"),
    ):
        with pytest.raises(SettingError, match=said):
            method.apply(model)
    with pytest.raises(
        UserError, match=r"moe: the block stages\.0\.blocks\.0 .*has an mlp of an unsupported type \(ConvMlp"
    ):
        MoE(4, 2, [0]).apply(model_of("efficientformer"))
    with pytest.raises(UserError, match="no class token"):
        BSRMoE(4, 2, [1], drop_at=[0]).apply(model_of("swinv2"))
    assert list(model.state_dict()) == list(model_of("vit").state_dict())
    assert all(p.requires_grad for p in model.parameters())
    MoE(4, 2, [1]).apply(model)
    assert len(model.blocks[1].mlp.experts) == 3
    for other in (MoE(3, 2, [2]), LoRA(rank=2), BSRMoE(3, 2, [2], drop_at=[1])):
        with pytest.raises(UserError, match=rf"{other.name}: moe has been applied .* both methods add modules"):
            other.apply(model)
    for applied, said in ((LoRA(rank=2), "both methods add modules"), (LBPWHT(order=2), "must be applied after moe")):
        changed = model_of("vit")
        applied.apply(changed)
        with pytest.raises(UserError, match=said):
            MoE(4, 2, [1]).apply(changed)
