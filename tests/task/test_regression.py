"""Tests of regression against float64 references in NumPy."""

from __future__ import annotations

import math

import numpy as np
import torch

from efficient_ft.task import Regression
from efficient_ft.task.gathered import r2
from efficient_ft.task.scale import Scale


def test_errors_are_in_the_units_of_the_user() -> None:
    random = np.random.default_rng(0)
    true = random.normal([2000.0, -0.01], [10.0, 0.001], (50, 2))
    mean, std = true.mean(0), true.std(0)
    scale = Scale(mean.tolist(), std.tolist())
    scaled = ((true - mean) / std).astype(np.float32)
    outputs = (scaled + random.normal(0, 0.5, scaled.shape)).astype(np.float32)
    predicted = outputs.astype(np.float64) * std + mean
    task = Regression(["year", "shift"], scale)
    scores = task.scores(2, local=True)
    for start in range(0, 50, 20):
        scores.update(torch.from_numpy(outputs[start : start + 20]), torch.from_numpy(scaled[start : start + 20]))
    found = scores.compute()
    errors = predicted - true
    expected = 1 - (errors**2).sum(0) / ((true - mean) ** 2).sum(0)
    assert next(iter(found)) == task.metric
    assert math.isclose(found["r2"], expected.mean(), rel_tol=1e-5)
    for k, name in enumerate(("year", "shift")):
        assert math.isclose(found[f"mae_{name}"], np.abs(errors[:, k]).mean(), rel_tol=1e-5)
        assert math.isclose(found[f"rmse_{name}"], math.sqrt((errors[:, k] ** 2).mean()), rel_tol=1e-5)
        assert math.isclose(scores.each_class()[k], expected[k], rel_tol=1e-5)
    loss = float(task.loss(torch.from_numpy(outputs), torch.from_numpy(scaled)))
    assert math.isclose(loss, ((outputs.astype(np.float64) - scaled) ** 2).mean(), rel_tol=1e-5)


def test_targets_of_other_data_keep_their_scale() -> None:
    task = Regression(["x"], Scale([10.0], [2.0]), Scale([0.0], [1.0]))
    scores = task.scores(1, local=True)
    scores.update(torch.tensor([[0.5], [1.0]]), torch.tensor([[11.0], [13.0]]))  # predictions 11 and 12
    found = scores.compute()
    assert found == {"r2": 0.5, "mae": 0.5, "rmse": math.sqrt(0.5)}


def test_r2_of_constant_targets_and_of_bad_predictions() -> None:
    true = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 2.0]], dtype=torch.float64)
    predicted = torch.tensor([[1.0, 0.0, 5.0], [1.0, 2.0, 5.0]], dtype=torch.float64)
    assert r2(predicted, true).tolist() == [1.0, 0.0, 1 - 25 / 0.5]
