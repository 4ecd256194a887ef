"""Tests of the cost of selections that change per step, against closed-form FLOPs and saved bytes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from efficient_ft.core import distributed
from efficient_ft.cost import compare, executed, layer_flops
from efficient_ft.methods import ALaST, LoRA, TopLayers, UniformLayers
from efficient_ft.testing import MODELS, batch_of, gradients, model_of
from tests.methods.by_hand import DEPTH, C, Fixed, H, N, backward_flops, saved_bytes

MASKS = [[0], [1], [3], [1, 3], [0, 2], [2, 3], [0, 1, 2, 3]]


@pytest.mark.vary_one(slow=True)
@pytest.mark.parametrize("embeddings", [False, True])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_what_a_step_executes_and_keeps_is_what_is_counted_by_hand(mask: list[int], embeddings: bool) -> None:
    model = MODELS["vit"].create()
    counted = executed(model, 2, (32, 32), methods=[Fixed(mask, embeddings)])
    assert counted.counted_on == "fake tensors"
    assert counted.backward_flops == backward_flops(mask, [N] * DEPTH, embeddings)
    assert counted.saved_bytes == saved_bytes(mask, [N] * (DEPTH + 1), embeddings, 2)


@pytest.mark.parametrize("embeddings", [False, True])
def test_each_linear_layer_s_backward_is_of_what_it_must_give(embeddings: bool) -> None:
    flops = layer_flops(MODELS["vit"].create(), 2, (32, 32), methods=[Fixed([1, 3], embeddings)])
    for block, times in enumerate([1 if embeddings else 0, 2, 1, 2]):
        for layer in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"):
            found = flops[f"blocks.{block}.{layer}"]
            assert found.forward > 0
            assert found.backward == times * found.forward, (block, layer)
    embedding = flops["patch_embed.proj"]
    assert embedding.backward == (embedding.forward if embeddings else 0)


@pytest.mark.slow
def test_the_mean_cost_is_that_of_the_sampled_masks_and_falls_with_k() -> None:
    found = []
    for k in (1, 2, DEPTH):
        method = UniformLayers(k, train_embeddings=False, seed=3)
        counted = executed(MODELS["vit"].create(), 2, (32, 32), methods=[method])
        masks = [method.choose(step, DEPTH) for step in range(8)]
        assert all(len(set(mask)) == k for mask in masks)
        assert counted.backward_flops == sum(backward_flops(m, [N] * DEPTH, False) for m in masks) / 8
        assert counted.saved_bytes == sum(saved_bytes(m, [N] * (DEPTH + 1), False, 2) for m in masks) / 8
        found.append((counted.backward_flops, counted.saved_bytes))
    assert found == sorted(set(found))


def test_frozen_blocks_keep_what_their_input_s_gradient_needs_and_those_below_nothing() -> None:
    """With blocks 1 and 3 trained, block 0 saves nothing. Block 2 saves only tensors for its input gradient."""
    model = model_of("vit")
    method = Fixed([1, 3])
    method.apply(model)
    method.step_begin(0)
    running: list[str] = []
    kept: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    recorded: dict[str, bool] = {}
    weights = {p.untyped_storage()._cdata for p in model.parameters()}

    def leave(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            assert running.pop() == name
            recorded[name] = output.requires_grad

        return hook

    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: running.append(name))
        module.register_forward_hook(leave(name))

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in weights:
            kept[running[-1]].append(tuple(tensor.shape))
        return tensor

    images, labels = batch_of("vit")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(images)
    F.cross_entropy(logits, labels).backward()

    assert [recorded[f"blocks.{block}"] for block in range(DEPTH)] == [False, True, True, True]
    assert not any(name.startswith(("patch_embed", "blocks.0", "norm_pre")) for name in kept)

    def of(block: int) -> dict[str, list[tuple[int, ...]]]:
        start = f"blocks.{block}."
        return {n.removeprefix(start): sorted(s) for n, s in kept.items() if n.startswith(start)}

    norm, inside = [(2, N, 1), (2, N, 1), (2, N, C)], (2, H, N, C // H)
    frozen = {"norm1": norm, "norm2": norm, "mlp.act": [(2, N, 4 * C)], "attn": [(2, H, N), *[inside] * 4]}
    trained = {n: [(2 * N, c)] for n, c in {"attn.qkv": C, "attn.proj": C, "mlp.fc1": C, "mlp.fc2": 4 * C}.items()}
    assert of(2) == frozen
    for block in (1, 3):
        found = of(block)
        assert {n: s for n, s in found.items() if n in frozen} == frozen
        assert {
            n: [(math.prod(s[:-1]), s[-1]) for s in shapes] for n, shapes in found.items() if n not in frozen
        } == trained
    assert {n.split(".")[1] for n, p in model.named_parameters() if n.startswith("blocks.") and p.grad is not None} == {
        "1",
        "3",
    }
    assert all(p.grad is None for n, p in model.named_parameters() if "embed" in n or "token" in n)


@pytest.mark.parametrize("name", ["resnet", "swinv2", "efficientformer"])
def test_other_models_are_truncated_too(name: str) -> None:
    model = model_of(name)
    method = Fixed([2])
    report = method.apply(model)
    method.step_begin(0)
    found = {n for n, g in gradients(model, name).items() if g is not None}
    chosen = report.touched[2]
    assert {n for n in found if n.startswith(report.touched)} == {
        n for n, _ in model.named_parameters() if n.startswith(f"{chosen}.")
    }
    assert not found & set(report.skipped)
    assert any(n.startswith(("fc", "head")) for n in found)
    method.step_end()
    assert {n for n, p in model.named_parameters() if not p.requires_grad} == set(report.skipped)


@pytest.mark.slow
def test_a_cost_is_counted_without_the_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting a cost needs no collective call, because the other processes may have ended."""

    def ask(*_: Any) -> None:
        raise AssertionError("another process was asked")

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(dist, "all_reduce", ask)
    for method in (ALaST(2), TopLayers(1, profile_steps=1)):
        compare(MODELS["vit"].create(), [method], None, batch_size=2, input_size=(32, 32), steps=1)
    model, alast = model_of("vit"), ALaST(2)
    alast.apply(model)
    alast.step_begin(0)
    gradients(model, "vit")
    with pytest.raises(AssertionError, match="asked"):
        alast.step_end()
    with distributed.local_only():
        alast.step_end()


@pytest.mark.slow
def test_adapters_keep_nothing_below_the_lowest_chosen_block() -> None:
    model = MODELS["vit"].create()
    counts = []
    for block in range(DEPTH):
        flops = layer_flops(model, 2, (32, 32), methods=[LoRA(2), Fixed([block])])
        reached = [any(f.backward for n, f in flops.items() if n.startswith(f"blocks.{b}.")) for b in range(DEPTH)]
        assert reached == [b >= block for b in range(DEPTH)]
        counts.append(executed(model, 2, (32, 32), methods=[LoRA(2), Fixed([block])]).saved_bytes)
    assert counts == sorted(counts, reverse=True)
