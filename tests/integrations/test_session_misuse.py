"""Tests of session calls in the wrong order or place, which raise errors."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from efficient_ft import MethodSession
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.methods import (
    LISA,
    BackRazor,
    Full,
    LastStage,
    LoRA,
)
from efficient_ft.testing import batch_of, model_of
from tests.integrations.loops import batches_of, sgd
from tests.integrations.sessions import STACKS, sgd_of


def test_calls_before_the_methods_are_applied() -> None:
    session = MethodSession(model_of("vit"), LISA(1))
    for call in (session.parameters, session.named_parameters, session.remove, lambda: session.save("x")):
        with pytest.raises(UserError, match=r"was called before the methods were applied\. Enter the session"):
            call()
    for call in (lambda: session.begin_step(0), session.end_step):
        with pytest.raises(
            UserError, match=r"_step\(\) was called before the methods were applied\. Enter the session"
        ):
            call()
    with pytest.raises(UserError, match="outside of the session"), session.step(0):
        pass
    assert "not applied" in str(session)


def test_a_step_that_has_not_begun_cannot_end() -> None:
    session = MethodSession(model_of("vit"), LISA(1)).apply()
    for _ in range(2):
        with pytest.raises(
            UserError, match=r"end_step\(\) was called, but no step has begun\. Call session\.begin_step"
        ):
            session.end_step()
        session.begin_step(0)
        session.end_step()
        with pytest.raises(UserError, match="no step has begun"):
            session.end_step()
        session.start()


def test_numbers_of_steps_that_repeat_are_rejected() -> None:
    model = model_of("vit")
    (x, y), *_ = batches_of("vit", 1)

    def block(session: MethodSession, optimizer: torch.optim.Optimizer, number: int, updates: bool = True) -> None:
        with session.step(number):
            session.loss(F.cross_entropy(model(x), y)).backward()
            if updates:
                optimizer.step()
        if updates:
            optimizer.zero_grad()

    with MethodSession(model, LISA(1, interval=1)) as session:
        optimizer = sgd_of(session)
        for number in (5, 6, 9):  # A resumed run may start at any number.
            block(session, optimizer, number)
        for number in (0, 8, 9):
            with pytest.raises(UserError, match=rf"^Step {number} follows step 9 .*Number the steps across all epochs"):
                block(session, optimizer, number)
            with pytest.raises(UserError, match="Number the steps across all epochs"):
                session.begin_step(number)
            assert session.current_step is None
            assert all(p.requires_grad for p in session.parameters())
        for updates in (False, False, True):  # micro-batches of one step
            block(session, optimizer, 10, updates)
        block(session, optimizer, 11, updates=False)
        with pytest.raises(UserError, match="Step 10 follows step 11"):
            block(session, optimizer, 10)
        block(session, optimizer, 12)  # step 11 ends without an update
        with pytest.raises(UserError, match="Step 11 follows step 12"):
            block(session, optimizer, 11)
        session.start()
        block(session, optimizer, 0)
    with session:
        block(session, optimizer, 0)  # a new run
    session.start()
    for number in (0, 0, 1):
        session.begin_step(number)
        session.begin_step(number)
        if number:
            session.end_step()
    with pytest.raises(UserError, match="Step 1 follows step 1 of the same training"):
        session.begin_step(1)


def test_a_step_that_failed_may_be_repeated() -> None:
    model = model_of("vit")
    with MethodSession(model, LISA(1)) as session:
        optimizer = sgd_of(session)
        with pytest.raises(ZeroDivisionError), session.step(0):
            raise ZeroDivisionError
        step_without_loss(session, optimizer, 0)
        with pytest.raises(UserError, match="Number the steps across all epochs"):
            step_without_loss(session, optimizer, 0)


def test_a_second_step_of_the_optimizer_in_one_block_is_named() -> None:
    model = model_of("vit")
    (x, y), *_ = batches_of("vit", 1)
    with MethodSession(model, LISA(1)) as session:
        optimizer = sgd_of(session)
        text = r"after the end of step 3, but method lisa must be called in each step\. The step ended"

        def twice() -> None:
            with session.step(3):
                for _ in range(2):
                    session.loss(F.cross_entropy(model(x), y)).backward()
                    optimizer.step()
                    optimizer.zero_grad()

        with pytest.raises(UserError, match=text):
            twice()


def step_without_loss(session: MethodSession, optimizer: torch.optim.Optimizer, number: int) -> None:
    x, y = batch_of("vit")
    with session.step(number):
        F.cross_entropy(session.model(x), y).backward()
        optimizer.step()


def test_steps_and_losses_at_the_wrong_place() -> None:
    model = model_of("vit")
    with MethodSession(model, STACKS["bsr_moe"]()) as session:
        with pytest.raises(UserError, match="Step 1 began inside step 0"), session.step(0), session.step(1):
            pass
        with pytest.raises(UserError, match=r"loss\(\) was called outside of a step, but method bsr_moe adds a loss"):
            session.loss(torch.zeros(()))
        with pytest.raises(UserError, match=r"save\(\) was called inside step 2"), session.step(2):
            session.save("x")
        with pytest.raises(SettingError, match=r"^step must be an integer >= 0, got '1'"), session.step("1"):  # type: ignore[arg-type]
            pass
        with pytest.raises(UserError, match=r"adds a loss, but session\.loss\(\) was not called in step 3"):
            step_without_loss(session, sgd_of(session), 3)
    with pytest.raises(UserError, match="outside of the session"), session.step(4):
        pass
    with MethodSession(model_of("vit"), Full()) as plain:
        assert float(plain.loss(torch.ones(()))) == 1  # Full needs no step.
    other = MethodSession(model_of("vit"), LISA(1)).apply()
    with pytest.raises(UserError, match="method lisa must be called in each step"):
        other.loss(torch.zeros(()))


@pytest.mark.slow
def test_nested_sessions_are_rejected() -> None:
    model = model_of("vit")
    holder = nn.Sequential(model)
    with MethodSession(model, LastStage()) as session:
        for nested in (model, holder, model.blocks):
            with pytest.raises(UserError, match=r"Another session is open on this VisionTransformer: MethodSession\("):
                MethodSession(nested, BackRazor()).__enter__()
        with pytest.raises(UserError, match="The session is already open"):
            session.__enter__()
    with MethodSession(model, BackRazor()) as after:
        assert len(after.reports) == 1


@pytest.mark.parametrize("end", ["close", "remove", "__exit__"])
def test_a_session_of_hooks_is_open_from_apply_to_close(end: str) -> None:
    model = model_of("vit")
    session = MethodSession(model, LastStage()).apply()
    session.begin_step(0)
    for nested in (model, nn.Sequential(model), model.blocks):
        with pytest.raises(UserError, match=r"Another session is open on this VisionTransformer: MethodSession\("):
            MethodSession(nested, BackRazor()).apply()
    session.end_step()
    session.apply()
    with pytest.raises(UserError, match="Another session is open"), MethodSession(model, BackRazor()):
        pass
    if end == "__exit__":
        with session, pytest.raises(UserError, match="The session is already open"):
            session.__enter__()
    else:
        getattr(session, end)()
    with MethodSession(model, BackRazor()) as after:
        assert len(after.reports) == 1


def test_a_session_that_is_no_longer_referenced_is_not_open() -> None:
    model = model_of("vit")
    MethodSession(model, LastStage()).apply()
    with MethodSession(model, BackRazor()) as after:
        assert len(after.reports) == 1


def test_arguments_of_other_types() -> None:
    with pytest.raises(SettingError, match=r"^model must be a torch\.nn\.Module, got .*Pass the model first"):
        MethodSession([Full()], model_of("vit"))  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="Create an object of the class: Full"):
        MethodSession(model_of("vit"), Full)  # type: ignore[arg-type]


def test_an_optimizer_without_the_added_parameters_is_rejected_after_one_step() -> None:
    model = model_of("vit")
    optimizer = sgd(model)
    session = MethodSession(model, LoRA(rank=2)).apply()
    with pytest.raises(UserError, match="trainable parameters are not in any optimizer"):
        step_without_loss(session, optimizer, 0)
