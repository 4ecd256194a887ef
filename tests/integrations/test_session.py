"""Tests of sessions: equality with the low-level calls, removal, and reports of parameters, bytes and FLOPs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from efficient_ft import MethodSession
from efficient_ft.core.errors import UserError
from efficient_ft.cost import executed
from efficient_ft.methods import (
    BSR,
    LBPWHT,
    LISA,
    BackRazor,
    Blocks,
    Full,
    HeadOnly,
    LoRA,
    Method,
    MoE,
    TopLayers,
    apply_methods,
)
from efficient_ft.models.frozen_batch_norm import FrozenBatchNorm2d, freeze_batch_norm
from efficient_ft.optim import step_in_backward
from efficient_ft.testing import MODELS, batch_of, model_of
from tests.integrations.loops import assert_same_weights, batches_of, sgd, states_of, train_by_hand
from tests.integrations.sessions import STACKS, by_hand, sgd_of, train


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize(
    ("accumulate", "numbered"),
    [pytest.param(1, False, marks=pytest.mark.slow), pytest.param(2, False, marks=pytest.mark.slow), (2, True)],
)
def test_a_session_trains_like_the_low_level_calls(stack: str, accumulate: int, numbered: bool) -> None:
    methods = STACKS[stack]()
    expected = by_hand(methods, accumulate=accumulate)
    torch.manual_seed(0)
    model = model_of("vit")
    with warnings.catch_warnings(), MethodSession(model, STACKS[stack]()) as session:
        warnings.simplefilter("error")
        train(model, session, batches_of("vit", 4), accumulate, numbered)
    assert_same_weights(expected, model)
    assert states_of(session.methods) == states_of(methods)
    assert all(p.requires_grad for p in session.parameters())
    assert [report.method for report in session.reports] == [method.name for method in session.methods]


def test_zero_grad_may_follow_the_block_and_an_evaluation_may_be_anywhere() -> None:
    methods = STACKS["top_layers"]()
    expected = by_hand(methods)
    model = model_of("vit")
    with MethodSession(model, STACKS["top_layers"]()) as session:
        optimizer = sgd_of(session)
        for step, (x, y) in enumerate(batches_of("vit", 4)):
            with session.step(step):
                session.loss(F.cross_entropy(model(x), y)).backward()
                with torch.no_grad():
                    model.eval()(x)
                model.train()
                optimizer.step()
            optimizer.zero_grad()
            assert session.current_step is None
    assert_same_weights(expected, model)


def test_two_optimizers_end_a_step_together() -> None:
    expected = by_hand(STACKS["top_layers"]())
    model = model_of("vit")
    with MethodSession(model, STACKS["top_layers"]()) as session:
        named = session.named_parameters()
        parts = [[p for n, p in named if n.startswith("head") == head] for head in (True, False)]
        optimizers = [torch.optim.SGD(part, lr=0.05, momentum=0.9) for part in parts]
        for step, (x, y) in enumerate(batches_of("vit", 4)):
            with session.step(step):
                session.loss(F.cross_entropy(model(x), y)).backward()
                optimizers[0].step()
                assert session.current_step == step
                optimizers[1].step()
                assert session.current_step is None
                for optimizer in optimizers:
                    optimizer.zero_grad()
    assert_same_weights(expected, model)


def test_updates_without_an_optimizer_end_a_step() -> None:
    method = LISA(num_layers=1, interval=1)
    model = model_of("vit")
    other = torch.nn.Linear(1, 1)
    others = torch.optim.SGD(other.parameters())
    with MethodSession(model, method) as session:
        for step, (x, y) in enumerate(batches_of("vit", 2)):
            with session.step(step):
                session.loss(F.cross_entropy(model(x), y)).backward()
                others.step()  # The optimizer of another model does not end the step.
                assert session.current_step == step
                with torch.no_grad():
                    for p in session.parameters():
                        if p.grad is not None:
                            p -= 0.1 * p.grad
                            p.grad = None
            assert session.current_step is None


def test_an_optimizer_in_the_backward_pass() -> None:
    def optimizer_of(model: nn.Module) -> Any:
        return step_in_backward(sgd(model))

    expected = model_of("vit")
    train_by_hand(expected, [LISA(1, interval=1)], batches_of("vit", 3), optimizer_of=optimizer_of)
    model = model_of("vit")
    with MethodSession(model, LISA(1, interval=1)) as session:
        optimizer = optimizer_of(model)
        for step, (x, y) in enumerate(batches_of("vit", 3)):
            with session.step(step):
                session.loss(F.cross_entropy(model(x), y)).backward()
                optimizer.step()
    assert_same_weights(expected, model)
    model = model_of("vit")
    with MethodSession(model, TopLayers(1)) as session:
        optimizer = optimizer_of(model)
        with pytest.raises(UserError, match="method top_layers compares the gradients"), session.step(0):
            session.loss(F.cross_entropy(model(x), y)).backward()


@pytest.mark.parametrize("stack", ["top_layers", "lisa", "alast"])
def test_a_step_that_a_grad_scaler_skips_is_ignored(stack: str) -> None:
    """A skipped step has no effect. The weights equal unscaled training, because powers of two scale exactly."""
    model, batches = model_of("vit"), batches_of("vit", 4)
    before = copy.deepcopy(model.state_dict())
    with warnings.catch_warnings(), MethodSession(model, STACKS[stack]()) as session:
        warnings.simplefilter("error")
        optimizer, scaler = sgd_of(session), torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step, (x, y) in enumerate(batches):
            with session.step(step):
                loss = session.loss(F.cross_entropy(model(x), y))
                scaler.scale(loss * torch.inf if step == 0 else loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            if step == 0:
                assert all(torch.equal(before[n], p) for n, p in model.state_dict().items())
    if stack == "top_layers":
        assert session.methods[0].state_dict()["steps"] == 2
    if stack == "lisa":
        expected, method = model_of("vit"), STACKS[stack]()[0]
        method.apply(expected)
        plain = sgd(expected)
        for step, (x, y) in list(enumerate(batches))[1:]:
            method.step_begin(step)
            F.cross_entropy(expected(x), y).backward()
            plain.step()
            method.step_end()
            plain.zero_grad()
        assert_same_weights(expected, model)


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("stack", ["last_stage+lbp_wht", "lisa", "bsr_moe"])
def test_a_model_wrapped_for_several_processes_after_applying(stack: str) -> None:
    expected = by_hand(STACKS[stack]())
    torch.manual_seed(0)
    model = model_of("vit")
    with MethodSession(model, STACKS[stack]()) as session:
        unused = session.find_unused_parameters
        assert unused is (stack != "last_stage+lbp_wht")
        wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=unused)
        train(wrapped, session, batches_of("vit", 4))
        with pytest.raises(UserError, match=r"got DistributedDataParallel\. Apply the methods to model\.module"):
            MethodSession(wrapped, Full()).apply()
    assert_same_weights(expected, model)


@pytest.mark.slow
@pytest.mark.parametrize("stack", ["last_stage+lbp_wht", "lisa", "back_razor"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_model_compiled_after_applying(stack: str, in_place: bool, tmp_path: Path) -> None:
    expected = by_hand(STACKS[stack]())
    model = model_of("vit")
    with MethodSession(model, STACKS[stack]()) as session:
        if in_place:
            model.compile(backend="aot_eager")
        train(model if in_place else torch.compile(model, backend="aot_eager"), session, batches_of("vit", 4))
        session.save(tmp_path / "part.safetensors")
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-9, atol=1e-11, msg=name)


def test_a_session_is_entered_again_and_followed_by_another() -> None:
    expected = by_hand(STACKS["lora"](), 2)
    torch.manual_seed(0)
    model, batches = model_of("vit"), batches_of("vit", 2)
    session = MethodSession(model, STACKS["lora"]())
    optimizer: Any = None
    for step, (x, y) in enumerate(batches):
        with session:
            optimizer = optimizer or sgd_of(session)
            with session.step(step):
                session.loss(F.cross_entropy(model(x), y)).backward()
                optimizer.step()
                optimizer.zero_grad()
    assert_same_weights(expected, model)
    session.remove()
    with MethodSession(model, HeadOnly()) as after:
        assert [n for n, _ in after.named_parameters()] == ["head.weight", "head.bias"]


@pytest.mark.slow
def test_leaving_keeps_the_methods_and_remove_restores_the_model() -> None:
    model = model_of("resnet")
    names, kinds = list(model.state_dict()), [type(m) for m in model.modules()]
    x, y = batch_of("resnet")
    with MethodSession(model, [LoRA(rank=2, targets="all"), LBPWHT(order=3)]) as session:
        train(model, session, [(x, y)])
    assert any("lora_A" in name for name in model.state_dict())
    assert any(isinstance(m, FrozenBatchNorm2d) for m in model.modules())
    trained = model.eval()(x)
    session.remove()
    assert (list(model.state_dict()), [type(m) for m in model.modules()]) == (names, kinds)
    torch.testing.assert_close(model.eval()(x), trained, rtol=1e-9, atol=1e-9)
    assert all(p.requires_grad for p in model.parameters())
    assert session.reports == []


def test_statistics_that_were_frozen_before_stay_frozen() -> None:
    model = model_of("resnet")
    freeze_batch_norm(model)
    session = MethodSession(model, Full()).apply()
    session.remove()
    assert any(isinstance(m, FrozenBatchNorm2d) for m in model.modules())
    model = model_of("resnet")
    with MethodSession(model, Full(), frozen_bn=False):
        assert not any(isinstance(m, FrozenBatchNorm2d) for m in model.modules())


def test_normalization_layers_train_again_after_removal() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).train()
    session = MethodSession(model, Full(), frozen_bn=True, classifier="3").apply()
    model(torch.randn(3, 3, 2, 2))
    assert not model[2].training
    session.remove()
    assert model[2].training


def test_a_skipped_step_keeps_layers_that_were_unfrozen_between_steps() -> None:
    model = model_of("vit")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("head"))
    images, labels = batch_of("vit")
    with MethodSession(model, BackRazor()) as session:
        for step in range(4):
            if step == 2:
                model.requires_grad_(True)
            with session.step(step):
                F.cross_entropy(model.train()(images), labels).backward()
                if step != 2:  # a step without an update, such as after an overflow
                    sgd(model).step()
        assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_network_of_any_dtype_is_counted(dtype: torch.dtype) -> None:
    model = model_of("vit").to(dtype)
    with MethodSession(model, Full()) as session:
        assert session.cost(2).forward_flops > 0
        assert "not counted" not in str(session)


def test_an_error_in_a_step_leaves_a_usable_model() -> None:
    model = model_of("vit")
    session = MethodSession(model, LISA(1))

    def fail() -> None:
        with session, session.step(0):
            assert not all(p.requires_grad for p in model.parameters())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert all(p.requires_grad for p in model.parameters())
    assert session.current_step is None
    with session:
        train(model, session, batches_of("vit", 1))


@pytest.mark.slow
def test_print_shows_parameters_bytes_and_flops() -> None:
    model = MODELS["vit"].create()
    methods: list[Method] = [Blocks([-1]), BackRazor()]
    with MethodSession(model, methods) as session:
        lines = str(session).splitlines()
        cost = executed(model, 8, (32, 32), methods=methods)
        trains = sum(p.numel() for p in session.parameters())
        assert session.cost(batch_size=4).batch_size == 4
        assert "with 4 images" in str(session)
    assert len(lines) == 3
    assert lines[0].startswith(
        f"trainable: {trains / 1e3:.1f} k of {sum(p.numel() for p in model.parameters()) / 1e3:.0f} k"
    )
    assert lines[0].endswith(f"(blocks, back_razor); save() writes {trains * 4 / 2**10:.0f} KiB")
    assert lines[1].startswith(f"memory: {cost.saved_bytes / 2**10:.1f} KiB kept per image for the backward pass; peak")
    assert lines[2] == (
        f"FLOPs: {cost.forward_flops / 1e6:.1f} M forward and {cost.backward_flops / 1e6:.2f} M backward per image"
    )


def test_a_model_that_cannot_be_counted_is_printed() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("no images")

    session = MethodSession(Odd(), Full()).apply()
    assert "not counted" in str(session)
    assert repr(session) == "MethodSession(Odd: full)"


def test_nothing_is_left_after_a_session() -> None:
    from torch.optim import optimizer

    hooks = dict(optimizer._global_optimizer_post_hooks)
    model = model_of("vit")
    with MethodSession(model, LISA(1)) as session:
        train(model, session, batches_of("vit", 1))
        assert dict(optimizer._global_optimizer_post_hooks) == hooks
    session.remove()
    apply_methods(model, [BSR([1, -1], [1], 0.5), MoE(4, 2, [1])])


@pytest.mark.parametrize("pretrained", [False, True])
def test_statistics_that_were_never_computed_are_not_frozen_in_silence(
    pretrained: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(2))
    model(torch.randn(4, 3, 8, 8))
    if not pretrained:
        model[1].reset_running_stats()
    MethodSession(model, Full()).apply()
    assert ("frozen at their initial values" in caplog.text) is not pretrained
