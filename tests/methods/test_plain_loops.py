"""Tests of mistakes in training loops: missing step calls, parameters in no optimizer, and a single method."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from efficient_ft import MethodSession
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.methods import (
    LBPWHT,
    LISA,
    SWAT,
    ALaST,
    BackRazor,
    Blocks,
    Full,
    LastStage,
    LoRA,
    LowBit,
    Mesa,
    Method,
    TopLayers,
    UniformLayers,
    apply_methods,
    check_optimizer,
)
from efficient_ft.optim import step_in_backward
from efficient_ft.testing import batch_of, model_of

PER_STEP: list[Callable[[], Method]] = [
    lambda: LISA(1),
    lambda: ALaST(2),
    lambda: UniformLayers(1),
    lambda: TopLayers(1, profile_steps=2),
    lambda: SWAT(),
    lambda: LBPWHT(bases="lhe", profile_steps=2),
]


def warned(run: Callable[[], Any]) -> list[str]:
    """Return the messages of the warnings about steps."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in found if "must be called in each step" in str(w.message)]


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def backward(model: nn.Module) -> None:
    images, labels = batch_of("vit", torch.float64)
    F.cross_entropy(model(images), labels).backward()


def loop(
    model: nn.Module,
    methods: Iterable[Method],
    steps: int = 3,
    begins: Callable[[int], bool] = lambda step: True,
    ends: bool = True,
    micro_batches: int = 1,
    optimizer: Any = torch.optim.AdamW,
) -> None:
    """Run a training loop, with or without the calls of `step_begin` and `step_end`."""
    made = optimizer(trained(model), lr=1e-3)
    for step in range(steps):
        for method in methods if begins(step) else ():
            method.step_begin(step)
        for _ in range(micro_batches):
            backward(model)
        made.step()
        for method in methods if ends else ():
            method.step_end()
        made.zero_grad()


@pytest.mark.parametrize("make", PER_STEP, ids=lambda make: make().name)
def test_a_loop_that_never_begins_a_step_is_warned_once_at_its_second_backward_pass(make: Any) -> None:
    model, method = model_of("vit"), make()
    method.apply(model)
    assert warned(lambda: backward(model)) == []
    (text,) = warned(lambda: backward(model))
    assert text.startswith(f"method {method.name} must be called in each step, but a backward pass ran before step_b")
    assert "MethodSession" in text
    assert warned(lambda: backward(model)) == []


@pytest.mark.parametrize("make", PER_STEP, ids=lambda make: make().name)
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_right_loop_is_not_warned(make: Any, micro_batches: int) -> None:
    model, method = model_of("vit"), make()
    method.apply(model)
    assert warned(lambda: loop(model, [method], micro_batches=micro_batches)) == []


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("kernel", [{"fused": True}, {"foreach": True}, {"foreach": False}])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_loop_that_begins_only_the_first_step_is_warned(optimizer: Any, kernel: Any, micro_batches: int) -> None:
    model, method = model_of("vit"), LISA(1)
    method.apply(model)
    run: dict[str, Any] = {"steps": 3, "begins": lambda step: step == 0, "ends": False, "micro_batches": micro_batches}
    (text,) = warned(lambda: loop(model, [method], optimizer=lambda p, lr: optimizer(p, lr, **kernel), **run))
    assert "step_begin" in text


@pytest.mark.parametrize("make", [lambda: ALaST(2), lambda: TopLayers(1)])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_loop_that_never_ends_a_step_is_warned(make: Any, micro_batches: int) -> None:
    model, method = model_of("vit"), make()
    method.apply(model)
    (text,) = warned(lambda: loop(model, [method], ends=False, micro_batches=micro_batches))
    assert "step_end() was not called after the optimizer's step" in text


@pytest.mark.slow
def test_methods_without_steps_are_not_warned_about() -> None:
    model = model_of("vit")
    apply_methods(model, [Blocks([-1]), BackRazor(), LBPWHT()])
    assert warned(lambda: loop(model, [], steps=3)) == []


def test_a_profile_that_is_complete_needs_no_more_steps() -> None:
    model, method = model_of("vit"), LBPWHT(bases="lhe", profile_steps=2)
    method.apply(model)
    assert warned(lambda: [loop(model, [method], steps=2), loop(model, [], steps=3)]) == []

    other, continued = model_of("vit"), LBPWHT(bases="lhe", profile_steps=2)
    continued.load_state_dict(method.state_dict())
    continued.apply(other)
    assert warned(lambda: loop(other, [], steps=3)) == []


@pytest.mark.parametrize("built_first", [False, True])
def test_an_optimizer_in_the_backward_pass_is_not_warned_about(built_first: bool) -> None:
    model, method = model_of("vit"), LISA(1)
    if not built_first:
        method.apply(model)
    optimizer = step_in_backward(torch.optim.SGD([{"params": [p], "lr": 1e-3} for p in trained(model)]))
    if built_first:  # The optimizer's hooks run first and free the gradients.
        method.apply(model)

    def steps() -> None:
        for step in range(3):
            method.step_begin(step)
            backward(model)
            optimizer.step()
            method.step_end()

    assert warned(steps) == []


def test_the_hook_that_watches_goes_with_the_method_and_not_with_copies() -> None:
    model, method = model_of("vit"), LISA(1)
    before = [p._post_accumulate_grad_hooks for p in model.parameters()]
    method.apply(model)
    method.step_begin(0)
    backward(model)
    twin, other = copy.deepcopy((model, method))
    pickle.loads(pickle.dumps((model, method)))
    assert warned(lambda: [backward(twin) for _ in range(3)]) == []
    other.remove(twin)
    method.remove(model)
    assert [p._post_accumulate_grad_hooks or None for p in model.parameters()] == before
    assert warned(lambda: [backward(model) for _ in range(3)]) == []


# ------------------------------------------------------------------------------------------------ the optimizer
def test_an_optimizer_built_before_the_methods_is_rejected() -> None:
    model = model_of("vit")
    optimizer = torch.optim.AdamW(model.parameters())
    apply_methods(model, [LoRA(2)])
    with pytest.raises(UserError, match=r"16 of 18 trainable parameters are not in any optimizer \(blocks\.0.*, …\)"):
        check_optimizer(model, optimizer)
    check_optimizer(model, torch.optim.AdamW(trained(model)))
    check_optimizer(model, [optimizer, torch.optim.SGD(trained(model))])


@pytest.mark.parametrize("make", PER_STEP[:3], ids=lambda make: make().name)
@pytest.mark.parametrize("within", [True, False])
def test_an_optimizer_built_within_a_step_is_rejected(make: Any, within: bool) -> None:
    model, method = model_of("vit"), make()
    method.apply(model)
    check_optimizer(model, torch.optim.AdamW(trained(model)))
    method.step_begin(0)
    optimizer = torch.optim.AdamW(trained(model))
    if not within:
        method.step_end()
    with pytest.raises(UserError, match=r"trainable parameters are not in any optimizer .* after the first step_begin"):
        check_optimizer(model, optimizer)
    if not within:
        check_optimizer(model, torch.optim.AdamW(trained(model)))
    method.remove(model)
    check_optimizer(model, torch.optim.AdamW(trained(model)))


def test_frozen_parameters_need_no_optimizer() -> None:
    model = model_of("vit")
    apply_methods(model, [LastStage()])
    check_optimizer(model, torch.optim.AdamW(trained(model)))
    model.head.bias.requires_grad_(False)
    check_optimizer(model, torch.optim.AdamW(trained(model)))
    check_optimizer(model, torch.optim.AdamW(model.parameters()))


def test_a_session_checks_what_its_methods_select() -> None:
    model = model_of("vit")
    session = MethodSession(model, [LISA(1), Mesa()]).apply()
    session.check_optimizers([torch.optim.AdamW(trained(model))])
    session.start()
    session.begin_step(0)
    with pytest.raises(UserError, match="not in any optimizer"):
        session.check_optimizers([torch.optim.AdamW(trained(model))])
    network = model_of("vit")
    other = MethodSession(network, Mesa()).apply()
    other.check_optimizers([torch.optim.AdamW(network.head.parameters())])  # Mesa selects no parameters.


# ------------------------------------------------------------------------------------------------ one method
def test_a_single_method_is_applied() -> None:
    model = model_of("vit")
    (report,) = apply_methods(model, LowBit())
    assert report.method == "low_bit"
    assert MethodSession(model, Full()).methods[0].name == "full"


@pytest.mark.parametrize(
    ("methods", "text"),
    [
        ("lora", r"methods must be a Method object or a list of Method objects, got 'lora'\. Create method objects"),
        (["lora"], r"got 'lora'\. Create method objects"),
        (LoRA, r"got <class .*LoRA'>\. Create an object of the class: LoRA\(\)\."),
        ([Full(), LoRA], r"Create an object of the class: LoRA\(\)\."),
        (None, r"got None\."),
        (3, r"got 3\."),
        ({"lora": {}}, r"got \{'lora': \{\}\}\."),
        (nn.Linear(1, 1), r"The model is the first argument"),
    ],
)
def test_what_is_no_method_is_rejected_in_one_line(methods: Any, text: str) -> None:
    model = model_of("vit")
    with pytest.raises(SettingError, match=text):
        apply_methods(model, methods)
    with pytest.raises(SettingError, match=text):
        MethodSession(model, methods)
    assert apply_methods(model, []) == []
