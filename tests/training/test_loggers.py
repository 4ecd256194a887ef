"""wandb and TensorBoard."""

from __future__ import annotations

import pytest

from efficient_ft.core.errors import UserError
from efficient_ft.training.recorder import Recorder
from efficient_ft.training.run import run
from tests.training.runs import rows_of


def test_wandb_offline_continues_the_same_run(tmp_path, configuration, monkeypatch, without_cost):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    end = Recorder.on_train_batch_end

    def interrupted(self, trainer, *args):
        self.stop_requested = trainer.global_step == 4
        end(self, trainer, *args)

    config = configuration(logger={"name": "wandb", "mode": "offline"}, trainer__max_steps=5)
    folder = tmp_path / "group" / "name"
    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "on_train_batch_end", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(config, folder)
    run_id = (folder / "run_id").read_text().strip()
    (folder / "run_id").unlink()  # the checkpoint has it too
    run(config, folder)
    started = sorted(p.name for p in (folder / "wandb").iterdir() if p.name.startswith("offline-run-"))
    assert len(started) == 2
    assert all(name.endswith(f"-{run_id}") for name in started)


def test_tensorboard_gets_the_metrics(tmp_path, configuration, without_cost):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run(configuration(logger={"name": "tensorboard"}, trainer__max_steps=2), tmp_path)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    row = rows_of(tmp_path)[-1]
    assert events.Scalars("val_accuracy")[0].value == pytest.approx(row["val_accuracy"])


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_logger_that_is_not_installed_is_named(tmp_path, configuration, monkeypatch, name):
    import lightning.pytorch.loggers as loggers

    class Missing:
        def __init__(self, *args, **kwargs):
            raise ModuleNotFoundError(name)

    monkeypatch.setattr(loggers, {"wandb": "WandbLogger", "tensorboard": "TensorBoardLogger"}[name], Missing)
    with pytest.raises(UserError, match=rf"not installed\. Install it: pip install {name}$"):
        run(configuration(logger={"name": name}), tmp_path)
