"""``cost_only``: the cost of a step without data, weights or a folder."""

from __future__ import annotations

from efficient_ft.training.run import run


def test_cost_only_needs_no_data_and_no_weights_and_leaves_nothing(tmp_path, configuration, capsys):
    config = configuration(
        cost_only=True,
        cost__compare_full=True,
        model={"name": "resnet18", "image_size": 32, "select": "last_stage"},
        data={"name": "folder", "root": str(tmp_path / "nowhere"), "batch_size": 2},
        method={"last_stage": {}},
    )
    costs = run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert costs["executed"]["backward_flops"] < 0.5 * costs["full"]["executed"]["backward_flops"]
    shown = capsys.readouterr().out
    assert "1000 classes" in shown
    assert "full" in shown
