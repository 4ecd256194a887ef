"""Tests of ALaST: budgets, dropped tokens, sampled blocks and the cost of a step."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import ParallelScalingBlock
from torch import Tensor, nn

from efficient_ft.config import check
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.packages import option_settings
from efficient_ft.cost import executed, layer_flops
from efficient_ft.methods import (
    BSR,
    ALaST,
    EViT,
    LoRA,
    UniformLayers,
    apply_methods,
)
from efficient_ft.methods.build import build_methods
from efficient_ft.methods.forwards import forwards_of
from efficient_ft.testing import MODELS, batch_of, gradients, largest_difference, model_of
from tests.methods.by_hand import DEPTH, C, N, backward_flops, saved_bytes
from tests.methods.settings import small_vit
from tests.methods.test_tokens import FORMS
from tests.training.runs import plain_config

CONF = Path(__file__).resolve().parents[2] / "conf" / "method"


def by_hand(model: Any, images: Tensor, budgets: Sequence[float]) -> tuple[Tensor, list[Tensor], list[int]]:
    """Run the forward pass of ALaST image by image in plain operations.

    Returns the logits, the change Δ of each block per image (B,), and the number of input tokens of each block.
    """
    x = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(images))))
    prefix = model.num_prefix_tokens
    changes, counts = [], []
    for block, budget in zip(model.blocks, budgets, strict=True):
        attn, before = block.attn, x[:, 0]
        qkv = attn.qkv(block.norm1(x)).unflatten(-1, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
        p = (attn.q_norm(qkv[0]) @ attn.k_norm(qkv[1]).mT * attn.scale).softmax(-1)
        counts.append(x.shape[1])
        x = x + block.ls1(attn.proj((p @ qkv[2]).transpose(1, 2).flatten(2)))
        x = x + block.ls2(block.mlp(block.norm2(x)))
        changes.append((x[:, 0] - before).detach().square().sum(1))
        kept = max(model.global_pool != "token", math.floor(budget * (x.shape[1] - prefix) + 1e-9))
        outputs = []
        for tokens, scores in zip(x, p.mean(1)[:, 0, prefix:], strict=True):
            ranked = sorted(range(len(scores)), key=lambda i: -scores[i].item())
            outputs.append(torch.stack([*tokens[:prefix], *(tokens[prefix + i] for i in sorted(ranked[:kept]))]))
        x = torch.stack(outputs)
    return model.forward_head(model.norm(x)), changes, counts


def budgets_of(method: ALaST) -> list[float]:
    return [value for value, _ in method.state_dict().values()]


def give(method: ALaST, budgets: Sequence[float]) -> None:
    state = method.state_dict()
    method.load_state_dict({n: [b, before] for (n, (_, before)), b in zip(state.items(), budgets, strict=True)})


def settings_of(file: str) -> dict[str, Any]:
    settings = option_settings(CONF / f"{file}.yaml").items()
    return {name: value for name, value in settings if not str(value).startswith("${")}


# ------------------------------------------------------------------------------------------------ tokens
BUDGETS = [[0.9, 0.7, 0.5, 0.8], [1.0, 0.26, 1.0, 0.5], [0.33, 1.0, 0.0, 1.0], [0.0, 0.5, 0.5, 0.5], [1.0] * 4]


@pytest.mark.vary_one
@pytest.mark.parametrize("budgets", BUDGETS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_the_output_and_what_trains_are_those_of_the_blocks_written_out(form: str, budgets: list[float]) -> None:
    if "drop path" in form:
        return  # The reference has no drop path.
    plain, model = small_vit(form), small_vit(form)
    method = ALaST(2, budget_min=0.0, budget_lr=0.0, seed=2)
    method.apply(model)
    give(method, budgets)
    method.step_begin(0)
    images, labels = batch_of("vit")
    logits, _, counts = by_hand(plain, images, budgets)
    seen: list[int] = []
    for block in model.blocks:  # type: ignore[union-attr]
        block.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    got = model(images)
    torch.testing.assert_close(got, logits, rtol=1e-9, atol=1e-11)
    assert seen == counts
    F.cross_entropy(logits, labels).backward()
    F.cross_entropy(got, labels).backward()
    chosen = method.step_stats()["trained"]
    assert len(chosen) == 2
    for name, p in model.named_parameters():
        expected = plain.get_parameter(name).grad
        if name.startswith("blocks.") and not name.startswith(tuple(f"{block}." for block in chosen)):
            assert p.grad is None
        elif expected is None or expected.norm() < 1e-12:
            assert p.grad is None or p.grad.norm() < 1e-10, name
        else:
            assert p.grad is not None
            assert (p.grad - expected).norm() < 1e-8 * expected.norm(), name


@pytest.mark.slow
def test_so_many_tokens_flow_on() -> None:
    """Each block passes on exactly ⌊b · N⌋ patch tokens in training and all patch tokens in evaluation."""
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=(8, 20), patch_size=4, depth=4, embed_dim=48, num_heads=3, num_classes=5
    )
    method = ALaST(4, budget_min=0.0, budget_lr=0.0)
    method.apply(model)
    give(method, [0.7, 0.3, 0.49, 1.0])
    seen: list[int] = []
    for block in model.blocks:  # type: ignore[union-attr]
        block.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    images = torch.randn(2, 3, 8, 20)
    model.train()(images)
    assert seen == [1 + 10, 1 + 7, 1 + 2, 1 + 0]
    seen.clear()
    plain = timm.create_model(
        "vit_tiny_patch16_224", img_size=(8, 20), patch_size=4, depth=4, embed_dim=48, num_heads=3, num_classes=5
    ).eval()
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(model.eval()(images), plain(images))
    assert seen == [11] * 4


def test_drop_path_draws_as_in_the_plain_model() -> None:
    form = "vit_tiny_patch16_224 drop path"
    plain, model = small_vit(form), small_vit(form)
    ALaST(4, budget_init=1.0, budget_lr=0.0).apply(model)
    assert largest_difference(gradients(plain, "vit"), gradients(model, "vit")) < 1e-9


# ------------------------------------------------------------------------------------------------ cost
def tokens_of(budgets: Sequence[float]) -> list[int]:
    """Return the number of tokens before each block and after the last block."""
    return list(itertools.accumulate(budgets, lambda count, b: 1 + math.floor(b * (count - 1) + 1e-9), initial=N))


@pytest.mark.slow
@pytest.mark.vary_one(slow=True)
@pytest.mark.parametrize("embeddings", [False, True])
@pytest.mark.parametrize("budgets", BUDGETS[:3], ids=str)
def test_a_step_executes_and_keeps_what_is_counted_by_hand(
    budgets: list[float], embeddings: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tokens_of(budgets)
    for mask in ([0, 3], [2]):
        model, method = (
            MODELS["vit"].create(),
            ALaST(len(mask), budget_min=0.0, budget_lr=0.0, train_embeddings=embeddings),
        )
        method.apply(model)
        give(method, budgets)
        monkeypatch.setattr(ALaST, "choose", lambda self, step, count, mask=mask: mask)
        monkeypatch.setattr(ALaST, "cost_steps", 1)
        counted = executed(model, 2, (32, 32), methods=[method])
        assert counted.backward_flops == backward_flops(mask, tokens[:-1], embeddings)
        assert counted.saved_bytes == saved_bytes(mask, tokens, embeddings, 2)
        forward = 2 * 64 * (3 * 4 * 4) * C + 2 * C * 5
        for before, after in itertools.pairwise(tokens):
            forward += 2 * before * 12 * C * C + 2 * 2 * before**2 * C
            forward += 2 * before * C if after < before else 0  # attention scores of the class token
        assert counted.forward_flops == forward


@pytest.mark.slow
def test_the_mean_cost_is_that_of_the_sampled_masks_and_falls_with_k(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ALaST, "cost_steps", 4)
    tokens, found = tokens_of([0.7] * DEPTH), []
    for k in (1, 3):
        model, method = MODELS["vit"].create(), ALaST(k, budget_init=0.7, train_embeddings=False, seed=3)
        counted = executed(model, 2, (32, 32), methods=[method])
        method.apply(model)
        masks = [method.choose(step, DEPTH) for step in range(4)]
        assert all(len(set(mask)) == k for mask in masks)
        assert counted.backward_flops == sum(backward_flops(m, tokens[:-1], False) for m in masks) / 4
        assert counted.saved_bytes == sum(saved_bytes(m, tokens, False, 2) for m in masks) / 4
        found.append((counted.backward_flops, counted.saved_bytes))
    assert found == sorted(set(found))


@pytest.mark.slow
def test_without_dropping_it_costs_what_uniform_layers_cost() -> None:
    same = {"train_embeddings": False, "seed": 1}
    model = MODELS["vit"].create()
    one = layer_flops(model, 2, (32, 32), methods=[ALaST(4, budget_init=1.0, **same)])  # type: ignore[arg-type]
    other = layer_flops(model, 2, (32, 32), methods=[UniformLayers(4, **same)])  # type: ignore[arg-type]
    assert {n: f for n, f in one.items() if f.forward} == {n: f for n, f in other.items() if f.forward}


def test_frozen_blocks_below_record_nothing_though_they_drop_tokens() -> None:
    model, method = model_of("vit"), ALaST(1, budget_init=0.7, train_embeddings=False, seed=0)
    method.apply(model)
    step = next(step for step in range(50) if method.choose(step, DEPTH) == [2])
    method.step_begin(step)
    kept, seen = [0], []
    for block in model.blocks:  # type: ignore[union-attr]
        block.register_forward_hook(lambda _, inputs, output: seen.append((output.requires_grad, kept[0])))

    def keep(tensor: Tensor) -> Tensor:
        kept[0] += 1
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(batch_of("vit")[0])
    recorded, so_far = zip(*seen, strict=True)
    assert recorded == (False, False, True, True)
    assert so_far[1] == 0 < so_far[2] < so_far[3]


# ------------------------------------------------------------------------------------------------ sampling
def inclusion(budgets: Sequence[float], k: int) -> list[float]:
    """Return the probability of each block that k draws by softmax(b) without replacement include the block."""
    weights = [math.exp(b) for b in budgets]
    found = [0.0] * len(budgets)
    for order in itertools.permutations(range(len(budgets)), k):
        p, rest = 1.0, sum(weights)
        for block in order:
            p, rest = p * weights[block] / rest, rest - weights[block]
        for block in order:
            found[block] += p
    return found


@pytest.mark.parametrize("k", [1, 2, 3])
def test_blocks_are_drawn_by_the_softmax_of_their_budgets(k: int) -> None:
    model, method, steps = MODELS["vit"].create(), ALaST(k, budget_min=0.0, seed=11), 4000
    method.apply(model)
    budgets = [1.0, 0.0, 0.6, 0.2]
    give(method, budgets)
    counts = Counter(block for step in range(steps) for block in method.choose(step, DEPTH))
    assert sum(counts.values()) == k * steps
    for block, p in enumerate(inclusion(budgets, k)):
        assert abs(counts[block] / steps - p) < 4 * math.sqrt(p * (1 - p) / steps)
    again = ALaST(k, budget_min=0.0, seed=11)
    again.apply(MODELS["vit"].create())
    give(again, budgets)
    torch.manual_seed(5)
    assert [again.choose(step, DEPTH) for step in range(30)] == [method.choose(step, DEPTH) for step in range(30)]
    again.seed = 12
    assert [again.choose(step, DEPTH) for step in range(30)] != [method.choose(step, DEPTH) for step in range(30)]


def test_the_highest_budgets_are_chosen_the_first_of_equals() -> None:
    method = ALaST(2, budget_min=0.0, layer_choice="highest")
    method.apply(MODELS["vit"].create())
    for budgets, chosen in (([0.1, 0.9, 0.2, 0.5], [1, 3]), ([1.0] * 4, [0, 1]), ([0.5, 0.5, 0.5, 0.6], [0, 3])):
        give(method, budgets)
        assert sorted(method.choose(0, DEPTH)) == sorted(method.choose(99, DEPTH)) == chosen


# ------------------------------------------------------------------------------------------------ adapters
def test_lora_trains_on_the_tokens_of_the_budgets_and_its_budgets_move() -> None:
    model, method = model_of("vit"), ALaST(2, budget_lr=1e-3, budget_init=0.8)
    torch.manual_seed(0)
    apply_methods(model, [method, LoRA(2)])
    built = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    seen: list[int] = []
    for block in model.blocks:  # type: ignore[union-attr]
        block.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    for step in range(3):
        method.step_begin(step)
        budgets = budgets_of(method)
        seen.clear()
        gradients(model, "vit", seed=step)
        assert seen == tokens_of(budgets)[:-1]
        built.step()
        method.step_end()
        assert budgets_of(method) != budgets


# ------------------------------------------------------------------------------------------------ invalid settings
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"budget_init": 1.5}, "budget_init"),
        ({"budget_init": 0.4}, "budget_init"),
        ({"budget_init": True}, "budget_init"),
        ({"budget_min": -0.1}, "budget_min"),
        ({"budget_min": 0.9, "budget_max": 0.6}, "budget_min"),
        ({"budget_max": 1.5}, "budget_max"),
        ({"budget_lr": -1.0}, "budget_lr"),
        ({"budget_lr": math.inf}, "budget_lr"),
        ({"budget_lr": "fast"}, "budget_lr"),
        ({"delta": "mean"}, "delta"),
        ({"first_delta": "none"}, "first_delta"),
        ({"layer_choice": "lowest"}, "layer_choice"),
        ({"seed": True}, "seed"),
    ],
)
def test_settings_out_of_range_are_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingError) as error:
        ALaST(**settings)
    assert error.value.setting == named
    assert str(settings[named]) in str(error.value)
    with pytest.raises(SettingError, match=rf"method\.alast\.{named} must be"):
        build_methods(check(plain_config(method={"alast": settings})))


def test_what_is_refused_is_left_as_it_was() -> None:
    small: dict[str, Any] = {"img_size": 32, "patch_size": 4, "depth": 4, "embed_dim": 48, "num_heads": 3}
    no_class = timm.create_model("vit_tiny_patch16_224", class_token=False, global_pool="avg", **small)
    parallel = timm.create_model("vit_tiny_patch16_224", block_fn=ParallelScalingBlock, **small)
    dropping, adapted = model_of("vit"), model_of("vit")
    EViT([1]).apply(dropping)
    LoRA(2).apply(adapted)
    cases = [
        (no_class, "no class token"),
        (parallel, r"ParallelScalingBlock\): attention and feed-forward network run in parallel"),
        (
            dropping,
            "evit has been applied to this VisionTransformer, and both methods drop or merge tokens",
        ),
        (adapted, "lora has been applied .* but must be applied after alast"),
        (model_of("resnet"), "no class token"),
    ]
    for model, message in cases:
        trains = {n: p.requires_grad for n, p in model.named_parameters()}
        given = [forwards_of(m) for m in model.modules()]
        with pytest.raises(UserError, match=message):
            ALaST(1, train_embeddings=False).apply(model)
        assert {n: p.requires_grad for n, p in model.named_parameters()} == trains
        assert [forwards_of(m) for m in model.modules()] == given
    with pytest.raises(UserError, match="must be applied after bsr"):
        BSR([1], [1]).apply(adapted)
    assert not any(forwards_of(m) for m in adapted.modules())


def test_a_model_of_another_image_size_than_its_own_still_trains() -> None:
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=4, depth=4, embed_dim=48, num_heads=3, dynamic_img_size=True
    )
    method = ALaST(2, budget_init=0.5)
    method.apply(model)
    method.step_begin(0)
    model.train()(torch.randn(2, 3, 48, 24)).sum().backward()
    method.step_end()
    assert all(p.requires_grad for p in model.parameters())
    assert isinstance(model, nn.Module)
