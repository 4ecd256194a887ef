"""Tests that the contract kit reports each planted fault by the violated contract, and accepts a correct method."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from efficient_ft.testing import MethodContracts, Row
from tests.testing import planted
from tests.testing.planted import Damped, row_of


class TestACorrectMethod(MethodContracts):
    rows = {"damped": row_of(Damped, "vit", "resnet")}  # noqa: RUF012


REFERENCE = "test_gradients_are_those_of_the_reference"
LOWER = "test_gradients_in_lower_precision_are_those_of_the_reference"
EVALUATION = "test_evaluation_changes_nothing"
REMOVE = "test_remove_gives_the_plain_model_back"
AS_APPLIED = "test_steps_leave_the_model_as_applied"
WEIGHTS = "test_steps_move_no_weights"
FROZEN = "test_frozen_parameters_stay_frozen"
RANDOM = "test_random_choices_follow_from_seed_and_step"
PASSES = "test_two_passes_of_a_step_are_equal"
PROCESS = "test_the_state_of_the_process_stays"
STATE = "test_state_travels_in_a_checkpoint"
METER = "test_nothing_hides_from_the_meter"
COPY = "test_no_copy_of_an_activation_is_kept_outside_of_tensors"

#: The contracts that each fault violates.
FAULTS: list[tuple[type[Damped], str]] = [
    (planted.WeightDoubled, REFERENCE),
    (planted.WeightDoubled, LOWER),
    (planted.InputScaled, REFERENCE),
    (planted.InputScaled, LOWER),
    (planted.BiasZero, REFERENCE),
    (planted.BiasZero, LOWER),
    (planted.InputZeroInHalf, LOWER),
    (planted.WrongInSingle, LOWER),
    (planted.OfOneImage, REFERENCE),
    (planted.LastLayer, REFERENCE),
    (planted.NotContiguous, REFERENCE),
    (planted.FrozenWeight, REFERENCE),
    (planted.SecondMicroBatch, REFERENCE),
    (planted.LaterSteps, REFERENCE),
    (planted.InSinglePrecision, REFERENCE),
    (planted.Norms, REFERENCE),
    (planted.OutputScaled, REFERENCE),
    (planted.LossDoubled, REFERENCE),
    (planted.WrongInEvaluation, "test_gradients_in_evaluation_are_those_of_the_reference"),
    (planted.RaisesInInference, EVALUATION),
    (planted.CachedInInference, EVALUATION),
    (planted.TrainsInEvaluationMode, EVALUATION),
    (planted.BufferInEvaluation, EVALUATION),
    (planted.EvaluationScaled, "test_what_is_exported_is_the_pretrained_models_own"),
    (planted.HookLeft, REMOVE),
    (planted.WeightHookLeft, REMOVE),
    (planted.AttributeLeft, REMOVE),
    (planted.HookEachStep, AS_APPLIED),
    (planted.TensorHookEachStep, AS_APPLIED),
    (planted.TogglesTraining, AS_APPLIED),
    (planted.ReplacesParameter, AS_APPLIED),
    (planted.FreezesInStep, AS_APPLIED),
    (planted.FreesInStep, FROZEN),
    (planted.FreesInApply, FROZEN),
    (planted.MovesInStep, WEIGHTS),
    (planted.DecaysAtEnd, WEIGHTS),
    (planted.StaleState, "test_a_removed_method_begins_again"),
    (planted.DrawsInPass, RANDOM),
    (planted.DrawsInPass, PASSES),
    (planted.DrawsInPass, PROCESS),
    (planted.DrawsNumpyInPass, PASSES),
    (planted.UnseededChoice, RANDOM),
    (planted.ChoiceOfProcess, RANDOM),
    (planted.ChoiceOfHistory, STATE),
    (planted.DrawsInApply, PROCESS),
    (planted.DrawsInStep, PROCESS),
    (planted.DefaultDtype, PROCESS),
    (planted.Unsaved, STATE),
    (planted.UnsavedLater, STATE),
    (planted.OffByOne, STATE),
    (planted.OnContext, METER),
    (planted.OnModule, METER),
    (planted.InNumpy, COPY),
    (planted.InBytes, COPY),
    (planted.RaisesInHalf, LOWER),
    (planted.RaisesInHalf, "test_mixed_precision_trains"),
    (planted.SwitchesOff, "test_off_runs_the_methods_own_code"),
]


@pytest.fixture
def restored() -> Iterator[None]:
    """Restore the process settings that a faulty method changes."""
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)


def broken(row: Row, contract: str, model: str) -> str:
    """Return the message of the contract for this row, or an empty string if the contract passes."""

    class Contracts(MethodContracts):
        rows = {"row": row}  # noqa: RUF012
        _prototypes = {}  # noqa: RUF012

    test: Any = getattr(Contracts(), contract)
    try:
        test("row", model) if "name" in test.__code__.co_varnames[: test.__code__.co_argcount] else test("row")
    except AssertionError as error:
        return str(error) or "failed"
    except RuntimeError as error:  # an error from torch
        if "Inference tensors" not in str(error):
            raise
        return str(error)
    return ""


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize(("fault", "contract"), FAULTS, ids=[f"{f.__name__}-{c}" for f, c in FAULTS])
def test_a_fault_is_reported(fault: type[Damped], contract: str) -> None:
    model = "resnet" if fault is planted.BufferInEvaluation else "vit"
    assert broken(row_of(fault, model), contract, model)


def test_a_row_without_a_reference_is_reported() -> None:
    row = Row(Damped, off={"factor": 1.0}, models=("vit",))
    assert "on_reference" in broken(row, "test_the_row_is_complete", "vit")


def test_a_wrong_gradient_is_named() -> None:
    message = broken(row_of(planted.LastLayer), REFERENCE, "vit")
    assert "head.weight" in message
    assert "0.9 × the reference" in message
