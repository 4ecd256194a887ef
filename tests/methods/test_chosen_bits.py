"""Tests of ``low_bit`` with ``bits=auto``: the profile, the choice of bits and its state."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efficient_ft.core.errors import SettingError
from efficient_ft.cost import executed
from efficient_ft.methods import BSR, LBPWHT, LowBit, UniformLayers, apply_methods
from efficient_ft.methods.memory import chosen_bits
from efficient_ft.methods.memory.chosen_bits import ChosenBits, bits_per_value, choose_forms
from efficient_ft.testing import MODELS, batch_of, gradients, model_of
from efficient_ft.testing.steps import warm_up

Gradients = dict[str, torch.Tensor]


def chosen(method: LowBit) -> ChosenBits:
    assert isinstance(method._packing, ChosenBits)
    return method._packing


def relative_change(a: Gradients, b: Gradients, parts: list[str]) -> float:
    """Return Σ ‖a − b‖² / ‖b‖² over parts. Parameters outside `parts` form one further part."""
    total = 0.0
    for part in (*parts, ""):
        names = [
            n for n in b if (n.startswith(f"{part}.") if part else not n.startswith(tuple(f"{p}." for p in parts)))
        ]
        size = sum(b[n].square().sum().item() for n in names)
        total += sum((a[n] - b[n]).square().sum().item() for n in names) / size if size else 0.0
    return total


def found(model: nn.Module, name: str, seed: int = 0) -> Gradients:
    return {n: g for n, g in gradients(model, name, seed=seed).items() if g is not None}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "resnet"])
def test_the_profile_measures_the_change_of_the_whole_gradient(name: str) -> None:
    """The profile agrees with separate steps in which one tensor has 3 bits and all others have 8 bits."""
    model, method = model_of(name), LowBit("auto")
    method.apply(model)
    plain = found(model, name)  # The profile does not change the gradient of its step.
    again = model_of(name)
    fixed = LowBit(8, group=64)
    fixed.apply(again)
    for key, g in found(again, name).items():
        torch.testing.assert_close(plain[key], g)
    method.step_end()
    state = chosen(method)
    assert state.steps == 1
    assert set(state.changes) == set(state.values)
    parts = list(dict.fromkeys(key.partition("/")[0] for key in state.values))
    heads = [n for n in ("head", "fc") if hasattr(model, n)]
    for tensor in [*state.values][:: max(1, len(state.values) // 6)]:
        state.forms = {key: (3 if key == tensor else 8, 64) for key in state.values}
        expected = relative_change(found(model, name), plain, [*dict.fromkeys([*parts, *heads])])
        assert state.changes[tensor][3, 64] == pytest.approx(expected, rel=0.25, abs=1e-9), tensor
        ratios = state.changes[tensor][2, 64], state.changes[tensor][4, 64]
        assert ratios[0] >= state.changes[tensor][3, 64] >= ratios[1]


def test_the_choice_is_nearly_the_best_of_all() -> None:
    """The sum of changes is at most 15 % above the minimum over all 5⁷ choices."""
    forms = [(2, 64), (3, 128), (3, 64), (4, 64), (8, 64)]
    values = {f"t{i}": 384 * n for i, n in enumerate((1, 4, 1, 2, 1, 1, 2))}
    scale = torch.rand(7, generator=torch.Generator().manual_seed(3)).mul(6).exp().tolist()
    errors = (5.5, 1.3, 1.0, 0.22, 0.0)
    changes = {n: {f: s * e for f, e in zip(forms, errors, strict=True)} for n, s in zip(values, scale, strict=True)}
    total = sum(values.values())

    def bits(choice: Any) -> float:
        return sum(n * bits_per_value(f) for n, f in zip(values.values(), choice, strict=True)) / total

    def change(choice: Any) -> float:
        return sum(changes[name][f] for name, f in zip(values, choice, strict=True))

    every = [(bits(choice), change(choice)) for choice in itertools.product(forms, repeat=7)]
    for budget in (2.5, 2.6, 2.9, 3.5, 4.1, 6.0, 8.5):
        choice = choose_forms(values, changes, budget, forms)
        assert list(choice) == list(values)
        spent, reached = bits(choice.values()), change(choice.values())
        assert spent <= budget + 1e-6
        assert reached <= 1.15 * min(c for b, c in every if b <= budget)
    assert set(choose_forms(values, changes, 2.5, forms).values()) == {(2, 64)}
    assert set(choose_forms(values, changes, 8.5, forms).values()) == {(8, 64)}
    # A tensor without any change gets the fewest bits.
    changes["t1"] = dict.fromkeys(forms, 0.0)
    assert choose_forms(values, changes, 3.5, forms)["t1"] == (2, 64)


@pytest.mark.first(1, "exhaustive")
@pytest.mark.slow
@pytest.mark.parametrize(("bits", "budget"), [(3, 3.5), (2, 2.8), (4, None)])
def test_at_equal_bytes_the_gradient_is_nearer_than_with_equal_bits(bits: Any, budget: float | None) -> None:
    errors, sizes = {}, {}
    for key, method in (("equal", LowBit(bits)), ("auto", LowBit("auto", budget))):
        model = model_of("vit")
        method.apply(model)
        warm_up(model, method, "vit")
        of = [relative_change(found(model, "vit", s), found(model_of("vit"), "vit", s), []) for s in range(10, 14)]
        errors[key] = sum(of)
        sizes[key] = executed(model.float(), 2, (MODELS["vit"].size,) * 2, methods=[method]).saved_bytes
    assert sizes["auto"] <= sizes["equal"]
    assert errors["auto"] < errors["equal"]


@pytest.mark.slow
def test_the_choice_is_reported_and_keeps_to_the_budget() -> None:
    model, method = model_of("vit"), LowBit("auto", 3.0)
    assert method.warmup_steps == 1
    before = method.apply(model)
    assert method.applied == before
    warm_up(model, method, "vit")
    assert method.warmup_steps == 0
    report = method.applied
    assert report is not None
    (note,) = set(report.notes) - set(before.notes)
    mean = float(re.findall(r"([0-9.]+) bits per value", note)[0])
    assert 2.8 < mean <= 3.0
    state = chosen(method)
    assert state.forms is not None
    assert len(re.findall(r"\d+/\d+", note.partition("tensor are:")[2])) == len(state.forms) == len(state.values)
    assert len(set(state.forms.values())) > 2
    kept = chosen(method).forms
    for seed in (5, 6):
        method.step_begin(seed)
        gradients(model, "vit", seed=seed)
        method.step_end()
    assert chosen(method).forms == kept, "no second profile"


@pytest.mark.slow
def test_a_group_that_is_set_is_kept() -> None:
    model, method = model_of("vit"), LowBit("auto", 3.6, group=32, rounding="stochastic", attention="unfused")
    method.apply(model)
    warm_up(model, method, "vit")
    forms = chosen(method).forms
    assert forms is not None
    assert {group for _, group in forms.values()} == {32}
    assert len({bits for bits, _ in forms.values()}) > 1


@pytest.mark.slow
def test_a_profile_continues_where_it_was_saved(tmp_path: Path) -> None:
    straight, method = model_of("vit"), LowBit("auto", 3.2, profile_steps=3)
    method.apply(straight)
    for step in range(5):
        assert method.warmup_steps == max(3 - step, 0)
        gradients(straight, "vit", seed=step)
        method.step_end()
        torch.save(method.state_dict(), tmp_path / str(step))
    for at in (0, 1, 3):
        again, model = LowBit("auto", 3.2, profile_steps=3), model_of("vit")
        again.apply(model)
        again.load_state_dict(torch.load(tmp_path / str(at), weights_only=True))
        for step in range(at + 1, 5):
            gradients(model, "vit", seed=step)
            again.step_end()
        assert again.state_dict() == method.state_dict()
        assert again.applied == method.applied


@pytest.mark.slow
def test_micro_batches_are_measured_once() -> None:
    one, two = (LowBit("auto", 3.2) for _ in range(2))
    model = model_of("vit")
    copied = copy.deepcopy(model)
    for method, net, seeds in ((one, model, (0,)), (two, copied, (0, 1))):
        method.apply(net)
        for seed in seeds:
            gradients(net, "vit", seed=seed)
        method.step_end()
    assert one.state_dict() == two.state_dict()


@pytest.mark.slow
def test_steps_without_a_gradient_are_not_counted() -> None:
    """The profile skips steps with zero gradients (a zero head) and with infinite gradients (an overflow in fp16)."""
    model, method = model_of("vit"), LowBit("auto", 3.5)
    method.apply(model)
    with torch.no_grad():
        weight = model.head.weight.clone()  # type: ignore[union-attr]
        model.head.weight.zero_()  # type: ignore[union-attr, operator]
    gradients(model, "vit")
    method.step_end()
    images, labels = batch_of("vit")
    (F.cross_entropy(model(images), labels) * torch.inf).backward()
    method.step_end()
    assert method.warmup_steps == 1
    assert method.state_dict()["in_vain"] == 2
    with torch.no_grad():
        model.head.weight.copy_(weight)  # type: ignore[union-attr, operator]
    other = copy.deepcopy((model, method))
    gradients(model, "vit")
    method.step_end()
    assert method.warmup_steps == 0
    # After too many skipped steps, all tensors get equal bits.
    model, method = other
    with torch.no_grad():
        model.head.weight.zero_()  # type: ignore[union-attr, operator]
    for _ in range(14):
        gradients(model, "vit")
        method.step_end()
    assert method.warmup_steps == 0
    assert chosen(method).forms == {}
    assert "all tensors use 3 bits and groups of 64 values" in method.applied.details()
    gradients(model, "vit")


@pytest.mark.slow
def test_a_block_that_pauses_in_the_profile_is_not_measured_there() -> None:
    """A block that is frozen during the profile is not measured and does not get the fewest bits."""
    model, bits, selection = model_of("vit"), LowBit("auto", 3.5), UniformLayers(1, seed=0)
    exact = copy.deepcopy(model)
    apply_methods(model, [selection, bits])
    selection.step_begin(0)
    (trained,) = selection.step_stats()["trained"]
    found(model, "vit")
    for method in (selection, bits):
        method.step_end()
    parts = {name.partition("/")[0] for name in chosen(bits).forms or {}}
    assert {part for part in parts if part.startswith("blocks.")} == {trained}
    # With all blocks trained, the error of the unmeasured blocks is similar to the error with equal bits.
    equal = model_of("vit")
    LowBit(3).apply(equal)
    true, ours, equals = (found(net, "vit") for net in (exact, model, equal))
    for block in {f"blocks.{i}" for i in range(4)} - {trained}:
        errors = [relative_change(of, {n: g for n, g in true.items() if block in n}, []) for of in (ours, equals)]
        assert errors[0] < 1.5 * errors[1], block


def test_a_block_that_never_trains_is_measured() -> None:
    model, bits = model_of("vit"), LowBit("auto", 3.5)
    model.get_submodule("blocks.2").requires_grad_(False)
    bits.apply(model)
    found(model, "vit")
    bits.step_end()
    assert any(name.startswith("blocks.2/") for name in chosen(bits).forms or {})


@pytest.mark.slow
def test_it_is_chosen_within_a_stack_and_in_a_compiled_model() -> None:
    model = model_of("vit").float()
    methods = [BSR(blocks=[1, 3], drop_at=[1, 2]), LBPWHT(order=2), LowBit("auto", 3.0)]
    apply_methods(model, methods)
    model.train()
    images, labels = batch_of("vit", torch.float32)
    for step in range(2):
        for method in methods:
            method.step_begin(step)
        F.cross_entropy(model(images), labels).backward()
        for method in methods:
            method.step_end()
    assert methods[2].warmup_steps == 0

    model, auto = model_of("vit").float(), LowBit("auto", 3.0)
    auto.apply(model)
    compiled = torch.compile(model.train(), backend="aot_eager")
    for _ in range(2):
        F.cross_entropy(compiled(images), labels).backward()
        auto.step_end()
    assert auto.warmup_steps == 0


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"bits": 5}, "bits must be one of 8, 4, 3, 2, auto, got 5."),
        ({"bits": 4, "budget": 4.0}, "budget must be null with bits=4, got 4.0."),
        ({"bits": "auto", "budget": 2.0}, "per value from 2.125 to 8.5, including minimum and step, got 2.0."),
        ({"bits": "auto", "budget": 2.4, "group": 64}, "from 2.5 to 8.5, including minimum and step, got 2.4."),
        ({"bits": "auto", "budget": 32}, "from 2.125 to 8.5, including minimum and step, got 32."),
        ({"bits": "auto", "budget": "4MB"}, "budget must be null or a number of bits per value"),
        ({"bits": "auto", "budget": True}, "budget must be null or a number of bits per value"),
        ({"bits": "auto", "budget": float("nan")}, "got nan."),
        ({"bits": "auto", "profile_steps": 0}, "profile_steps must be an integer >= 1, got 0."),
    ],
)  # fmt: skip
def test_wrong_settings_say_what_to_do(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingError) as error:
        LowBit(**settings)
    assert text in str(error.value)


def test_processes_with_batches_of_different_sizes_choose_the_same_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes choose equal bits, although their batches have different shares of attention values."""

    def one(tokens: int) -> ChosenBits:
        chosen = ChosenBits(budget=4.5)
        chosen.values = {"attention": 8 * tokens**2, "linear": 64 * tokens}
        chosen._step = {
            name: {form: 4.0 ** -form[0] for form in chosen.all_forms if form[0] < 8} for name in chosen.values
        }
        return chosen

    def add_up(tensors: Iterator[Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda own: next(tensors).clone()

    given: list[list[Tensor]] = []
    for tokens in (16, 256):
        given.append([])
        monkeypatch.setattr(chosen_bits, "all_reduce_sum", lambda own: given[-1].append(own) or own)
        one(tokens).step_end()
    forms = []
    for tokens in (16, 256):
        sums = iter([a + b for a, b in zip(*given, strict=True)])
        monkeypatch.setattr(chosen_bits, "all_reduce_sum", add_up(sums))
        process = one(tokens)
        process.step_end()
        forms.append(process.forms)
    assert forms[0] == forms[1]
    assert len(set(forms[0].values())) == 2, "the smaller tensor gets more bits"
