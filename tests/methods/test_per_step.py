"""Selections that change from step to step: what trains, what a frozen block costs, and that choices travel."""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from efficient_ft.config import OptimConfig, check
from efficient_ft.core import distributed
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.cost import compare, executed, layer_flops
from efficient_ft.integrations.lightning import MethodCallback
from efficient_ft.methods import LISA, ALaST, LoRA, Method, TopLayers, UniformLayers, apply_methods, plain_state_dict
from efficient_ft.methods.build import build_methods
from efficient_ft.methods.selection.per_step import LayersPerStep
from efficient_ft.testing import CLASSES, MODELS, batch_of, gradients, model_of
from efficient_ft.training import checkpoint
from efficient_ft.training.module import FineTuner, build_optimizer
from efficient_ft.training.run import run
from tests.training.conftest import plain_config

# Of the small ViT: 4 blocks of width C and H heads; N tokens are a class token and an 8×8 grid of 4×4 patches.
DEPTH, C, H, N = 4, 48, 3, 65


class Fixed(LayersPerStep):
    """The same blocks in every step."""

    name = "fixed"
    cost_steps = 1

    def __init__(self, blocks: list[int], embeddings: bool = False) -> None:
        super().__init__(len(blocks), embeddings, None)
        self.blocks, self.embeddings = blocks, embeddings

    def choose(self, step: int, count: int) -> list[int]:
        return self.blocks


def backward_flops(trained: Sequence[int], tokens: Sequence[int], embeddings: bool) -> int:
    """By hand, per image, a multiply-add counted as 2.

    Args:
        trained: the blocks that train.
        tokens: N of every block.
        embeddings: whether what comes before the blocks trains.
    """
    flops = 2 * 2 * C * CLASSES  # the head's weight, and its input for the norm before it
    for block, count in enumerate(tokens):
        if embeddings or block >= min(trained):
            products = 2 * count * 12 * C * C  # qkv 3 C², projection C², feed-forward network 8 C²
            # inputs' gradients everywhere (the lowest block's first norm wants one too), weights' where they train
            flops += products * (2 if block in trained else 1)
            flops += 4 * 2 * count**2 * C  # of q, k, attention and v
    return flops + (2 * 64 * (3 * 4 * 4) * C if embeddings else 0)  # images need no gradient


def saved_bytes(trained: Sequence[int], tokens: Sequence[int], embeddings: bool, batch: int) -> float:
    """By hand, per image, in single precision, attention fused. `tokens`: of every block, and behind the last."""
    floats = 0
    for block, count in enumerate(tokens[:-1]):
        if embeddings or block >= min(trained):
            floats += 10 * count * C  # both norms' inputs; q, k, v; attention's output; the activation's input (4)
            floats += 4 * count + H * count  # the norms' means and deviations; attention's normaliser
            if block in trained:
                floats += 6 * count * C  # what qkv and both layers of the feed-forward network are given
    floats += 2 * tokens[-1] * C + 2 * tokens[-1]  # the last norm's input and output, of which the head takes a part
    floats += 3 * 32 * 32 if embeddings else 0
    kept = 4 * (floats + CLASSES) + 8 + 4 / batch  # the loss: log-probabilities, labels, the sum of weights
    for block, (before, after) in enumerate(itertools.pairwise(tokens)):
        if after < before and (embeddings or block >= min(trained)):
            kept += 8 * (before - 1)  # places of the patch tokens, by attention
    return kept


MASKS = [[0], [1], [3], [1, 3], [0, 2], [2, 3], [0, 1, 2, 3]]


# ------------------------------------------------------------------------------------------------ 1: truncation
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


def test_the_mean_cost_is_that_of_the_sampled_masks_and_falls_with_k() -> None:
    found = []
    for k in range(1, DEPTH + 1):
        method = UniformLayers(k, train_embeddings=False, seed=3)
        counted = executed(MODELS["vit"].create(), 2, (32, 32), methods=[method])
        masks = [method.choose(step, DEPTH) for step in range(8)]
        assert all(len(set(mask)) == k for mask in masks)
        assert counted.backward_flops == sum(backward_flops(m, [N] * DEPTH, False) for m in masks) / 8
        assert counted.saved_bytes == sum(saved_bytes(m, [N] * (DEPTH + 1), False, 2) for m in masks) / 8
        found.append((counted.backward_flops, counted.saved_bytes))
    assert found == sorted(set(found))


def test_frozen_blocks_keep_what_their_input_s_gradient_needs_and_those_below_nothing() -> None:
    """Blocks 0 frozen below, 1 trained, 2 frozen above, 3 trained: what autograd keeps, module by module."""
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


# ------------------------------------------------------------------------------------------------ 2: the optimizer
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1, foreach=False),
    "AdamW foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1, foreach=True),
    "AdamW fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1, fused=True),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1),
    # torch's own would fail for weights whose first step comes later
    "SGD fused": lambda m: build_optimizer(m, OptimConfig(name="sgd", lr=0.01, weight_decay=0.1)),
}
KINDS: dict[str, Callable[[], LayersPerStep]] = {
    "uniform_layers": lambda: UniformLayers(2, seed=1),
    "lisa": lambda: LISA(1, interval=2, seed=1),
    "alast": lambda: ALaST(2, budget_lr=1e-3, seed=1),
    "top_layers": lambda: TopLayers(2, profile_steps=3, train_embeddings=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_block_that_sits_out_keeps_its_weights_and_the_optimizer_s_state(kind: str, optimizer: str) -> None:
    """Two micro-batches a step; gradients are set to zero, not to None, at the end of it."""
    model, method = model_of("vit"), KINDS[kind]()
    method.apply(model)
    built = OPTIMIZERS[optimizer](model)
    groups = [[id(p) for p in group["params"]] for group in built.param_groups]
    trained: Counter[int] = Counter()
    for step in range(8):
        method.step_begin(step)
        before = {p: (p.detach().clone(), copy.deepcopy(built.state.get(p))) for p in model.parameters()}
        for micro in range(2):
            images, labels = batch_of("vit", seed=2 * step + micro)
            F.cross_entropy(model(images), labels).backward()
        chosen = {int(name.split(".")[1]) for name in method.step_stats()["trained"]}
        built.step()
        for name, p in model.named_parameters():
            sits_out = name.startswith("blocks.") and int(name.split(".")[1]) not in chosen
            weights, state = before[p]
            assert (p.grad is None) == sits_out == (not p.requires_grad), name
            assert torch.equal(p, weights) == sits_out, name
            if sits_out:
                now = built.state.get(p)
                assert (now is None) == (state is None)
                assert not now or all(torch.equal(now[key], state[key]) for key in now)  # type: ignore[index]
        method.step_end()
        built.zero_grad(set_to_none=False)
        assert all(p.requires_grad for p in model.parameters())
        assert [[id(p) for p in group["params"]] for group in built.param_groups] == groups
        trained.update(chosen)
    assert sum(trained.values()) == (3 * 4 + 5 * 2 if kind == "top_layers" else 8 * method.num_layers)
    assert len(trained) > method.num_layers, "other blocks train in other steps"


def test_a_run_trains_in_each_step_what_the_seed_says_on_every_micro_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = plain_config(
        method={"uniform_layers": {"num_layers": 1}}, model__kwargs={"depth": 3, "embed_dim": 16, "num_heads": 2},
        data__batch_size=64, trainer__grad_accum_steps=2, trainer__epochs=1,
    )  # fmt: skip
    config = check(plain)
    seen: dict[int, list[set[str]]] = defaultdict(list)
    groups: set[tuple[int, ...]] = set()
    counts: Counter[str] = Counter()
    training_step = FineTuner.training_step

    def look(self: FineTuner, batch: Any, batch_idx: int) -> Tensor:
        names = {n for n, p in self.model.named_parameters() if n.startswith("blocks.") and p.requires_grad}
        seen[self.global_step].append({n.split(".")[1] for n in names})
        return training_step(self, batch, batch_idx)

    def before_step(self: FineTuner, optimizer: torch.optim.Optimizer) -> None:
        groups.add(tuple(id(p) for group in optimizer.param_groups for p in group["params"]))
        assert len(next(iter(groups))) == len(list(self.model.parameters()))
        counts.update(n for n, p in self.model.named_parameters() if p.grad is not None)

    monkeypatch.setattr(FineTuner, "training_step", look)
    monkeypatch.setattr(FineTuner, "on_before_optimizer_step", before_step)
    run(config, tmp_path)
    held = checkpoint.read(tmp_path / checkpoint.NAME)
    steps = held["global_step"]
    assert sorted(seen) == list(range(steps))
    assert len(groups) == 1
    reference = UniformLayers(1, seed=config.seed)
    chosen = [str(reference.choose(step, 3)[0]) for step in range(steps)]
    assert len(set(chosen)) == 3
    for step, sets in seen.items():
        assert sets == [{chosen[step]}] * len(sets)
    assert max(len(sets) for sets in seen.values()) == 2
    by_block = Counter(chosen)
    for name, count in counts.items():
        assert count == (by_block[name.split(".")[1]] if name.startswith("blocks.") else steps), name
    # AdamW has counted for each parameter the steps in which it trained.
    state = held["optimizer_states"][0]["state"].values()
    assert Counter(int(s["step"]) for s in state) == Counter(counts.values())


def test_a_second_training_begins_its_first_step() -> None:
    """The number of its step is that of the last step before."""
    from types import SimpleNamespace

    model, method = model_of("vit"), UniformLayers(1)
    method.apply(model)
    callback = MethodCallback(method)
    for _ in range(2):
        callback.on_train_batch_start(SimpleNamespace(global_step=0), None, None, 0)
        trained = {n.split(".")[1] for n, p in model.named_parameters() if n.startswith("blocks.") and p.requires_grad}
        assert len(trained) == 1
        callback.on_train_batch_end(SimpleNamespace(global_step=1), None, None, None, 0)
        assert all(p.requires_grad for p in model.parameters())


def test_a_frozen_block_loses_the_gradient_of_the_step_before() -> None:
    model, method = model_of("vit"), LISA(1, interval=1, seed=0)
    method.apply(model)
    for step in range(6):
        method.step_begin(step)  # and nobody sets gradients to zero
        images, labels = batch_of("vit", seed=step)
        F.cross_entropy(model(images), labels).backward()
        with_gradient = {n.split(".")[1] for n, p in model.named_parameters() if "blocks" in n and p.grad is not None}
        assert with_gradient == {str(b) for b in method.choose(step, DEPTH)}
        method.step_end()


# ------------------------------------------------------------------------------------------------ 3: choices
def test_uniform_layers_are_uniform() -> None:
    """Each block, and each pair of blocks, as often as any other: χ² over 3000 steps."""
    method, steps, count, k = UniformLayers(3, seed=5), 3000, 6, 3
    masks = [tuple(sorted(method.choose(step, count))) for step in range(steps)]
    assert all(len(set(mask)) == k and set(mask) <= set(range(count)) for mask in masks)
    subsets = Counter(masks)
    expected = steps / math.comb(count, k)
    assert (
        sum((subsets[s] - expected) ** 2 / expected for s in subsets) + (20 - len(subsets)) * expected < 43.8
    )  # 19 degrees, p = .001
    blocks = Counter(block for mask in masks for block in mask)
    assert all(abs(blocks[b] / steps - k / count) < 4 * math.sqrt(0.25 / steps) for b in range(count))


def test_lisa_holds_a_choice_for_so_many_steps() -> None:
    method = LISA(2, interval=5, seed=5)
    masks = [sorted(method.choose(step, 12)) for step in range(1000)]
    for step in range(1000):
        assert masks[step] == masks[step - step % 5]
    assert sum(masks[step] != masks[step - 5] for step in range(5, 1000, 5)) > 180  # of 199; one in 66 is the same
    blocks = Counter(block for mask in masks[::5] for block in mask)
    assert all(abs(blocks[b] / 200 - 2 / 12) < 4 * math.sqrt(2 / 12 * 10 / 12 / 200) for b in range(12))


@pytest.mark.parametrize("kind", ["uniform_layers", "lisa"])
def test_choices_come_from_seed_and_step_alone(kind: str) -> None:
    create = {"uniform_layers": lambda seed: UniformLayers(4, seed=seed), "lisa": lambda seed: LISA(4, 1, seed=seed)}[
        kind
    ]
    method = create(7)
    straight = [method.choose(step, 12) for step in range(50)]
    torch.manual_seed(123)
    again = create(7)
    assert [again.choose(step, 12) for step in reversed(range(50))] == straight[::-1], "not from a state"
    other = create(8)
    assert sum(sorted(other.choose(step, 12)) == sorted(straight[step]) for step in range(50)) < 5
    assert create(None).choose(3, 12) == create(0).choose(3, 12)
    # a fixed draw, so that no process and no release changes it unseen
    state = torch.get_rng_state()
    method.choose(0, 12)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_run_s_seed_is_the_methods_where_they_have_none() -> None:
    for name, settings, seed in (("alast", {}, 4), ("lisa", {"seed": 9}, 9), ("uniform_layers", {"seed": None}, 4)):
        (method,) = build_methods(check(plain_config(method={name: settings}, seed=4)))
        assert isinstance(method, LayersPerStep)
        assert method.seed == seed


# ------------------------------------------------------------------------------------------------ 8: top layers
def by_ratio(model: nn.Module, seeds: Sequence[int]) -> list[float]:
    """Of each block Σ over steps of its share of ‖g‖ / ‖w‖, in another way."""
    totals = [0.0] * DEPTH
    for seed in seeds:
        images, labels = batch_of("vit", seed=seed)
        ratios = []
        loss = F.cross_entropy(model(images), labels)
        for block in model.blocks:  # type: ignore[union-attr]
            parameters = list(block.parameters())
            found = torch.autograd.grad(loss, parameters, retain_graph=True)
            flat = [torch.cat([t.detach().flatten() for t in tensors]) for tensors in (found, parameters)]
            ratios.append(float(flat[0].norm() / flat[1].norm()))
        totals = [total + ratio / sum(ratios) for total, ratio in zip(totals, ratios, strict=True)]
    return totals


def test_top_layers_are_those_of_the_largest_gradients_for_their_weights() -> None:
    model = model_of("vit")
    with torch.no_grad():
        for p in model.get_submodule("blocks.1").parameters():
            p.mul_(0.5)  # so that it is not simply the first or the last
    expected = by_ratio(copy.deepcopy(model), range(4))
    method = TopLayers(2, profile_steps=4)
    method.apply(model)
    for step in range(4):
        assert method.warmup_steps == 4 - step
        method.step_begin(step)
        assert len(method.step_stats()["trained"]) == DEPTH
        gradients(model, "vit", seed=step)
        method.step_end()
    held = method.state_dict()
    torch.testing.assert_close(torch.tensor(held["shares"]), torch.tensor(expected))
    best = sorted(sorted(range(DEPTH), key=lambda b: -expected[b])[:2])
    assert held["top"] == best != [0, 1]
    assert method.warmup_steps == 0
    for step in (4, 5, 6):
        method.step_begin(step)
        assert method.step_stats()["trained"] == [f"blocks.{b}" for b in best]
        found = {n for n, g in gradients(model, "vit", seed=step).items() if g is not None}
        assert {n.split(".")[1] for n in found if n.startswith("blocks.")} == {str(b) for b in best}
        method.step_end()
    assert method.state_dict() == held, "the profile is over"


def test_a_profile_continues_where_it_was_saved(tmp_path: Path) -> None:
    straight, method = model_of("vit"), TopLayers(1, profile_steps=4)
    method.apply(straight)
    for step in range(6):
        method.step_begin(step)
        gradients(straight, "vit", seed=step)
        method.step_end()
        torch.save(method.state_dict(), tmp_path / str(step))
    for at in (1, 3, 4):
        again, model = TopLayers(1, profile_steps=4), model_of("vit")
        again.apply(model)
        again.load_state_dict(torch.load(tmp_path / str(at), weights_only=True))
        for step in range(at + 1, 6):
            again.step_begin(step)
            gradients(model, "vit", seed=step)
            again.step_end()
        assert again.state_dict() == method.state_dict()


def test_another_model_has_a_profile_of_its_own() -> None:
    model, method = model_of("vit"), TopLayers(1, profile_steps=1)
    for _ in range(2):
        method.apply(model)
        assert method.warmup_steps == 1
        method.step_begin(0)
        gradients(model, "vit")
        method.step_end()
        assert method.warmup_steps == 0
        method.remove(model)
        model = MODELS["vit"].create(depth=2).double()


def test_a_profile_without_gradients_says_what_is_wrong() -> None:
    model, method = model_of("vit"), TopLayers(1)
    method.apply(model)
    method.step_begin(0)
    with pytest.raises(UserError, match=r"step_end\(\) before the optimizer's zero_grad"):
        method.step_end()


def test_blocks_in_which_no_adapter_trains_are_never_the_top() -> None:
    model, method = model_of("efficientformer"), TopLayers(1, profile_steps=1)
    apply_methods(model, [LoRA(2), method])
    method.step_begin(0)
    gradients(model, "efficientformer")
    method.step_end()
    (top,) = method.state_dict()["top"]
    assert method.applied is not None
    adapted = {n for n, _ in model.named_parameters() if ".lora_" in n}
    for index, block in enumerate(method.applied.touched):
        assert any(n.startswith(f"{block}.") for n in adapted) == (index == top)


def test_gradients_that_overflow_have_no_say() -> None:
    model, method = model_of("vit"), TopLayers(1, profile_steps=2)
    method.apply(model)
    for step, scale in enumerate((math.inf, 1.0)):
        method.step_begin(step)
        gradients(model, "vit")
        for p in model.get_submodule("blocks.0").parameters():
            p.grad = p.grad * scale if p.grad is not None else None
        method.step_end()
    shares = method.state_dict()["shares"]
    assert sum(shares) == pytest.approx(1)


# ------------------------------------------------------------------------------------------------ 6: two processes
def two_processes(kind: str) -> list[Method]:
    if kind == "lora+alast":
        return [LoRA(2), ALaST(2, budget_lr=1e-3, budget_init=0.8, seed=1)]
    kinds: dict[str, Callable[[], Method]] = {
        **KINDS,
        "alast": lambda: ALaST(2, budget_lr=1e-3, budget_init=0.8, seed=1),
    }
    return [kinds[kind]()]


def trained_together(rank: int, world: int, kind: str, folder: Path) -> None:
    """Six steps of two micro-batches on this process's share of the images; rank 0 writes what came of it."""
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder / f'meet-{kind}'}", rank=rank, world_size=world)
    torch.manual_seed(3)
    model, methods = model_of("vit"), two_processes(kind)
    apply_methods(model, methods)
    network: nn.Module = DistributedDataParallel(model, find_unused_parameters=True) if world > 1 else model
    built = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.1)
    (selection,) = (m for m in methods if isinstance(m, LayersPerStep))
    said = []
    for step in range(6):
        for method in methods:
            method.step_begin(step)
        for micro in range(2):
            images, labels = (
                torch.cat(t)
                for t in zip(*(batch_of("vit", seed=4 * step + 2 * micro + i) for i in (0, 1)), strict=True)
            )
            mine = slice(rank, None, world)
            F.cross_entropy(network(images[mine]), labels[mine]).backward()
        assert all((p.grad is None) == (not p.requires_grad) for p in model.parameters())
        built.step()
        for method in methods:
            method.step_end()
        built.zero_grad()
        said.append(selection.step_stats())
    weights = {n: p.detach() for n, p in model.named_parameters()}
    outcome = {"weights": weights, "said": said, "state": selection.state_dict()}
    torch.save(outcome, folder / f"{kind}-{world}-{rank}")
    if world > 1:
        dist.destroy_process_group()


def _all_kinds(rank: int, world: int, kinds: list[str], folder: Path) -> None:
    for kind in kinds:
        trained_together(rank, world, kind, folder)


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    kinds = [*KINDS, "lora+alast"]
    mp.spawn(_all_kinds, (2, kinds, tmp_path), nprocs=2)
    _all_kinds(0, 1, kinds, tmp_path)

    def flat(state: dict[str, Any]) -> Tensor:
        values = [value if isinstance(value, list) else [value] for value in state.values()]
        return torch.tensor([v for value in values for v in value], dtype=torch.float64)

    for kind in kinds:
        one, *both = (torch.load(tmp_path / f"{kind}-{w}-{r}") for w, r in ((1, 0), (2, 0), (2, 1)))
        assert both[0]["said"] == both[1]["said"], kind
        assert both[0]["state"] == both[1]["state"], kind
        assert [s["trained"] for s in one["said"]] == [s["trained"] for s in both[0]["said"]], kind
        assert len({tuple(s["trained"]) for s in one["said"]}) > 1, "not one choice for all steps"
        torch.testing.assert_close(flat(both[0]["state"]), flat(one["state"]), rtol=1e-6, atol=1e-6)
        for name, value in one["weights"].items():
            assert torch.equal(both[0]["weights"][name], both[1]["weights"][name]), name
            torch.testing.assert_close(both[0]["weights"][name], value, rtol=1e-5, atol=1e-5)


def test_a_cost_is_counted_without_the_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have ended: the first of them counts alone, and would wait for ever."""

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


# ------------------------------------------------------------------------------------------------ 9: adapters
@pytest.mark.parametrize("kind", KINDS)
def test_of_adapters_those_in_the_chosen_blocks_train(kind: str) -> None:
    model, methods = model_of("vit"), [LoRA(2), KINDS[kind]()]
    torch.manual_seed(0)
    apply_methods(model, methods)
    (method,) = (m for m in methods if isinstance(m, LayersPerStep))
    built = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    assert len(built.param_groups[0]["params"]) == DEPTH * 2 * 2 + 2  # A and B of qkv and projection; the head
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for step in range(5):
        method.step_begin(step)
        found = {n for n, g in gradients(model, "vit", seed=step).items() if g is not None}
        chosen = method.step_stats()["trained"]
        assert {n for n in found if not n.startswith("head.")} == {
            n for n in before if ".lora_" in n and n.startswith(tuple(f"{block}." for block in chosen))
        }
        assert {"head.weight", "head.bias"} <= found
        built.step()
        method.step_end()
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved
    assert all(".lora_" in n or n.startswith("head.") for n in moved)
    fresh = MODELS["vit"].create().double().eval()
    fresh.load_state_dict(plain_state_dict(model, methods), strict=True)
    images, _ = batch_of("vit", seed=9)
    torch.testing.assert_close(fresh(images), model.eval()(images), rtol=1e-9, atol=1e-11)
    assert (fresh(images) - model_of("vit").eval()(images)).abs().max() > 1e-4


def test_adapters_keep_nothing_below_the_lowest_chosen_block() -> None:
    model = MODELS["vit"].create()
    counts = []
    for block in range(DEPTH):
        flops = layer_flops(model, 2, (32, 32), methods=[LoRA(2), Fixed([block])])
        reached = [any(f.backward for n, f in flops.items() if n.startswith(f"blocks.{b}.")) for b in range(DEPTH)]
        assert reached == [b >= block for b in range(DEPTH)]
        counts.append(executed(model, 2, (32, 32), methods=[LoRA(2), Fixed([block])]).saved_bytes)
    assert counts == sorted(counts, reverse=True)


# ------------------------------------------------------------------------------------------------ 10: bad input
@pytest.mark.parametrize("kind", ["alast", "uniform_layers", "lisa", "top_layers"])
@pytest.mark.parametrize("layers", [0, -1, True, 2.0, "2", 5])
def test_k_that_cannot_be_names_itself(kind: str, layers: Any) -> None:
    model = model_of("vit")
    config = check(plain_config(method={kind: {"num_layers": layers}}))
    with pytest.raises(SettingError) as error:
        apply_methods(model, build_methods(config))
    shown = "true" if layers is True else layers
    assert str(error.value).startswith(f"method.{kind}.num_layers must be ")
    assert f", got {shown}." in str(error.value)
    assert ("4 blocks" in str(error.value)) == (layers == 5)
    assert all(p.requires_grad for p in model.parameters())
    if layers != 5:
        with pytest.raises(SettingError, match=f"num_layers must be an integer >= 1, got {layers}"):
            {"alast": ALaST, "uniform_layers": UniformLayers, "lisa": LISA, "top_layers": TopLayers}[kind](layers)


@pytest.mark.parametrize(
    ("kind", "setting", "value"),
    [
        ("lisa", "interval", 0),
        ("lisa", "interval", 1.5),
        ("lisa", "train_embeddings", 1),
        ("lisa", "seed", -1),
        ("uniform_layers", "seed", 0.5),
        ("top_layers", "profile_steps", 0),
        ("top_layers", "profile_steps", True),
    ],
)
def test_settings_out_of_range_are_named(kind: str, setting: str, value: Any) -> None:
    classes: dict[str, Any] = {"lisa": LISA, "uniform_layers": UniformLayers, "top_layers": TopLayers}
    with pytest.raises(SettingError) as of_class:
        classes[kind](**{setting: value})
    assert of_class.value.setting == setting
    with pytest.raises(SettingError, match=rf"method\.{kind}\.{setting} must be"):
        build_methods(check(plain_config(method={kind: {setting: value}})))


@pytest.mark.parametrize("method", [UniformLayers(1), LISA(1), TopLayers(1)], ids=lambda m: m.name)
def test_a_model_without_blocks_is_refused(method: LayersPerStep) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    with pytest.raises(UserError, match=rf"method {method.name}: no blocks were recognized in Sequential"):
        method.apply(model)
    assert all(p.requires_grad for p in model.parameters())


def test_two_that_select_are_refused() -> None:
    with pytest.raises(UserError, match="both select what trains"):
        build_methods(check(plain_config(method={"alast": {}, "lisa": {}})))
