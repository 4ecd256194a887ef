"""Tests of selections that change per step: trained blocks, optimizer state and reproducible choices."""

from __future__ import annotations

import copy
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable
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
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.integrations import MethodSession
from efficient_ft.methods import LISA, ALaST, LoRA, Method, TopLayers, UniformLayers, apply_methods, plain_state_dict
from efficient_ft.methods.build import build_methods
from efficient_ft.methods.selection.per_step import LayersPerStep
from efficient_ft.testing import MODELS, batch_of, gradients, model_of
from efficient_ft.training.module import FineTuner, build_optimizer
from efficient_ft.training.output import checkpoint
from efficient_ft.training.run import run
from tests.methods.by_hand import DEPTH
from tests.training.conftest import plain_config

# ------------------------------------------------------------------------------------------------ the optimizer
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1, foreach=False),
    "AdamW foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1, foreach=True),
    "AdamW fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1, fused=True),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1),
    # torch's SGD fails if the first step of a weight comes later.
    "SGD fused": lambda m: build_optimizer(m, OptimConfig(name="sgd", lr=0.01, weight_decay=0.1)),
}
KINDS: dict[str, Callable[[], LayersPerStep]] = {
    "uniform_layers": lambda: UniformLayers(2, seed=1),
    "lisa": lambda: LISA(1, interval=2, seed=1),
    "alast": lambda: ALaST(2, budget_lr=1e-3, seed=1),
    "top_layers": lambda: TopLayers(2, profile_steps=3, train_embeddings=True),
}


@pytest.mark.vary_one
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_block_that_sits_out_keeps_its_weights_and_the_optimizer_s_state(kind: str, optimizer: str) -> None:
    """A frozen block keeps its weights and optimizer state, even if gradients are zeroed in place."""
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


@pytest.mark.slow
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
    # AdamW counts the trained steps of each parameter.
    state = held["optimizer_states"][0]["state"].values()
    assert Counter(int(s["step"]) for s in state) == Counter(counts.values())


def test_a_second_training_begins_its_first_step() -> None:
    """A second training begins its first step, even if the step number equals the previous one."""
    model, method = model_of("vit"), UniformLayers(1)
    session = MethodSession(model, method).apply()
    for _ in range(2):
        session.start()
        session.begin_step(0)
        trained = {n.split(".")[1] for n, p in model.named_parameters() if n.startswith("blocks.") and p.requires_grad}
        assert len(trained) == 1
        session.end_step()
        assert all(p.requires_grad for p in model.parameters())


def test_a_frozen_block_loses_the_gradient_of_the_step_before() -> None:
    model, method = model_of("vit"), LISA(1, interval=1, seed=0)
    method.apply(model)
    for step in range(6):
        method.step_begin(step)  # without `zero_grad`
        images, labels = batch_of("vit", seed=step)
        F.cross_entropy(model(images), labels).backward()
        with_gradient = {n.split(".")[1] for n, p in model.named_parameters() if "blocks" in n and p.grad is not None}
        assert with_gradient == {str(b) for b in method.choose(step, DEPTH)}
        method.step_end()


# ------------------------------------------------------------------------------------------------ choices
def test_uniform_layers_are_uniform() -> None:
    """Every block and every subset of blocks is chosen equally often (χ² test over 3000 steps)."""
    method, steps, count, k = UniformLayers(3, seed=5), 3000, 6, 3
    masks = [tuple(sorted(method.choose(step, count))) for step in range(steps)]
    assert all(len(set(mask)) == k and set(mask) <= set(range(count)) for mask in masks)
    subsets = Counter(masks)
    expected = steps / math.comb(count, k)
    assert (
        sum((subsets[s] - expected) ** 2 / expected for s in subsets) + (20 - len(subsets)) * expected < 43.8
    )  # 19 degrees of freedom, p = 0.001
    blocks = Counter(block for mask in masks for block in mask)
    assert all(abs(blocks[b] / steps - k / count) < 4 * math.sqrt(0.25 / steps) for b in range(count))


def test_lisa_holds_a_choice_for_so_many_steps() -> None:
    method = LISA(2, interval=5, seed=5)
    masks = [sorted(method.choose(step, 12)) for step in range(1000)]
    for step in range(1000):
        assert masks[step] == masks[step - step % 5]
    # Two draws are equal with a probability of 1/66.
    assert sum(masks[step] != masks[step - 5] for step in range(5, 1000, 5)) > 180
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
    # A choice does not use torch's global generator.
    state = torch.get_rng_state()
    method.choose(0, 12)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_run_s_seed_is_the_methods_where_they_have_none() -> None:
    for name, settings, seed in (("alast", {}, 4), ("lisa", {"seed": 9}, 9), ("uniform_layers", {"seed": None}, 4)):
        (method,) = build_methods(check(plain_config(method={name: settings}, seed=4)))
        assert isinstance(method, LayersPerStep)
        assert method.seed == seed


# ------------------------------------------------------------------------------------------------ two processes
def two_processes(kind: str) -> list[Method]:
    if kind == "lora+alast":
        return [LoRA(2), ALaST(2, budget_lr=1e-3, budget_init=0.8, seed=1)]
    kinds: dict[str, Callable[[], Method]] = {
        **KINDS,
        "alast": lambda: ALaST(2, budget_lr=1e-3, budget_init=0.8, seed=1),
    }
    return [kinds[kind]()]


def trained_together(rank: int, world: int, kind: str, folder: Path) -> None:
    """Train six steps of two micro-batches on this process's share of the images, and save the weights and states."""
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


@pytest.mark.exhaustive
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


# ------------------------------------------------------------------------------------------------ adapters
@pytest.mark.parametrize("kind", KINDS)
def test_of_adapters_those_in_the_chosen_blocks_train(kind: str) -> None:
    model, methods = model_of("vit"), [LoRA(2), KINDS[kind]()]
    torch.manual_seed(0)
    apply_methods(model, methods)
    (method,) = (m for m in methods if isinstance(m, LayersPerStep))
    built = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    # The parameters are A and B of qkv and proj, and the weight and bias of the head.
    assert len(built.param_groups[0]["params"]) == DEPTH * 2 * 2 + 2
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


# ------------------------------------------------------------------------------------------------ invalid settings
@pytest.mark.parametrize("kind", ["alast", "uniform_layers", "lisa", "top_layers"])
@pytest.mark.parametrize("layers", [0, -1, True, 2.0, "2", 5])
def test_k_that_cannot_be_names_itself(kind: str, layers: Any) -> None:
    model = model_of("vit")
    config = check(plain_config(method={kind: {"num_layers": layers}}))
    with pytest.raises(SettingError) as error:
        apply_methods(model, build_methods(config))
    shown = "true" if layers is True else '"2"' if layers == "2" else layers
    assert re.match(rf"(method\.{kind}\.)?num_layers must be ", str(error.value))
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
    with pytest.raises(UserError, match="both select the parameters to train"):
        build_methods(check(plain_config(method={"alast": {}, "lisa": {}})))
