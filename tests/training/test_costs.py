"""Tests of ``cost_only``, which counts the cost of a step without data, weights or a run folder."""

from __future__ import annotations

import pytest

from efficient_ft.core.errors import SettingError
from efficient_ft.training.run import run


@pytest.mark.slow
def test_cost_only_needs_no_data_and_no_weights_and_leaves_nothing(tmp_path, configuration, capsys):
    config = configuration(
        cost_only=True,
        cost__baseline="full",
        model={"name": "resnet18", "image_size": 32, "select": "last_stage"},
        data={"name": "folder", "root": str(tmp_path / "nowhere"), "batch_size": 2},
        method={"last_stage": {}},
    )
    costs = run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert costs["executed"]["backward_flops"] < 0.5 * costs["baseline"]["executed"]["backward_flops"]
    shown = capsys.readouterr().out
    assert "1000 classes" in shown
    assert "full" in shown


@pytest.mark.parametrize(("baseline", "share"), [("last_stage", 1.0), ("head", None), ("none", None)])
def test_the_baseline_is_the_selection_asked_for(tmp_path, configuration, capsys, baseline, share):
    config = configuration(
        cost_only=True,
        cost__baseline=baseline,
        model={"name": "resnet18", "image_size": 32, "select": "last_stage"},
        data={"name": "folder", "root": str(tmp_path / "nowhere"), "batch_size": 2},
        method={"last_stage": {}},
    )
    costs = run(config, tmp_path / "run")
    shown = capsys.readouterr().out
    if baseline == "none":
        assert costs["baseline"] is None
        assert "ratio" not in shown
        return
    assert costs["baseline"]["name"] == baseline
    own = baseline == "last_stage"  # the baseline equals the run's own step
    assert ("ratio" in shown) is (not own)
    if own:
        assert {group: costs["baseline"][group] for group in ("executed", "measured")} == {
            group: costs[group] for group in ("executed", "measured")
        }
    ratio = costs["executed"]["backward_flops"] / costs["baseline"]["executed"]["backward_flops"]
    assert ratio == share if share else ratio > 5


def test_a_baseline_that_is_no_selection_is_refused(tmp_path, configuration):
    config = configuration(cost_only=True, cost__baseline="lora")
    with pytest.raises(SettingError, match=r"cost.baseline must be one of all, none, .*last_stage.*, got lora"):
        run(config, tmp_path / "run")


@pytest.mark.slow
def test_weights_in_bf16_are_reported_next_to_the_baseline_s_in_fp32(tmp_path, configuration, capsys):
    changes = {"model__kwargs": {"depth": 2, "embed_dim": 64, "num_heads": 2}, "cost__baseline": "full"}
    plain = run(configuration(**changes, cost_only=True, trainer__precision="bf16"), tmp_path / "no")
    assert "weights and buffers" not in capsys.readouterr().out
    in_bf16 = {"trainer__precision": "bf16", "trainer__weight_dtype": "bf16"}
    costs = run(configuration(**changes, cost_only=True, **in_bf16), tmp_path / "no")
    assert "weights and buffers" in capsys.readouterr().out
    own, whole = costs["executed"], costs["baseline"]["executed"]
    assert 0.5 < own["model_bytes"] / whole["model_bytes"] < 0.55
    assert own["optimizer_bytes"] == whole["optimizer_bytes"]
    assert own["saved_bytes"] < whole["saved_bytes"]  # autocast keeps no bf16 copies of the weights
    assert costs["measured"]["peak_bytes"] < plain["measured"]["peak_bytes"]


@pytest.mark.slow
def test_the_optimizer_s_state_is_reported_and_the_baseline_s_is_plain(tmp_path, configuration, capsys):
    changes = {
        "model__kwargs": {"depth": 2, "embed_dim": 64, "num_heads": 2},
        "cost__baseline": "full",
        "cost_only": True,
        "optim__grad_clip_norm": None,
    }
    plain = run(configuration(**changes), tmp_path / "no")
    low = run(configuration(**changes, optim__state_bits=8, optim__in_backward=True), tmp_path / "no")
    shown = capsys.readouterr().out
    assert "optimizer state" in shown
    held = plain["executed"]["optimizer_bytes"]
    assert held == plain["baseline"]["executed"]["optimizer_bytes"] == low["baseline"]["executed"]["optimizer_bytes"]
    assert low["executed"]["optimizer_bytes"] < 0.35 * held
    assert low["baseline"]["measured"] == plain["baseline"]["measured"]
    assert low["measured"]["peak_bytes"] <= plain["measured"]["peak_bytes"]
