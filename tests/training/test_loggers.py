"""Tests of the loggers wandb and TensorBoard."""

from __future__ import annotations

import itertools
import os
import re
import signal

import pytest
import yaml

from efficient_ft.config import check
from efficient_ft.core.errors import UserError
from efficient_ft.models import factory
from efficient_ft.training.callbacks.recorder import Recorder, rows_every
from efficient_ft.training.output import loggers
from efficient_ft.training.run import run
from tests.cli.program import composed
from tests.training.runs import REPOSITORY, plain_config, rows_of
from tests.training.wandb_files import offline_run


@pytest.mark.slow
def test_wandb_offline_continues_the_same_run(tmp_path, configuration, monkeypatch, without_cost):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    end = Recorder.on_train_batch_end

    def interrupted(self, trainer, *args):
        self.stop_requested = signal.SIGINT if trainer.global_step == 4 else None
        end(self, trainer, *args)

    config = configuration(logger={"name": "wandb", "mode": "offline"}, trainer__max_steps=5)
    folder = tmp_path / "group" / "name"
    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "on_train_batch_end", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(config, folder)
    run_id = (folder / "run_id").read_text().strip()
    (folder / "run_id").unlink()  # the checkpoint also contains the id
    run(config, folder)
    started = sorted(p.name for p in (folder / "wandb").iterdir() if p.name.startswith("offline-run-"))
    assert len(started) == 2
    # wandb appends a number to a run that starts within the same second.
    assert [re.sub(r"^offline-run-\d+_\d+-", "", name).removesuffix("-1") for name in started] == [run_id] * 2


@pytest.mark.slow
def test_tensorboard_gets_the_metrics(tmp_path, configuration, without_cost):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run(configuration(logger={"name": "tensorboard"}, trainer__max_steps=2), tmp_path)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    row = rows_of(tmp_path)[-1]
    assert events.Scalars("val_accuracy")[0].value == pytest.approx(row["val_accuracy"])
    assert "hp_metric" not in events.Tags()["scalars"]


@pytest.mark.slow
def test_tensorboard_gets_curves_classes_samples_and_the_results(tmp_path, configuration, without_cost):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    results = run(configuration(logger={"name": "tensorboard"}), tmp_path)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert len(events.Scalars("train_loss")) == len(events.Scalars("lr")) == results["totals"]["steps"] >= 20
    row = rows_of(tmp_path)[-1]
    classes = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"] if tag.startswith("val_accuracy/")}
    assert sorted(classes) == [f"val_accuracy/{digit}" for digit in range(10)]
    support = [sum(1 for _ in group) for _, group in itertools.groupby(sorted(validation_labels()))]
    mean = sum(n * classes[f"val_accuracy/{digit}"][-1].value for digit, n in enumerate(support)) / sum(support)
    assert mean == pytest.approx(row["val_accuracy"], abs=1e-6)
    samples = [tag for tag in events.Tags()["images"] if tag.startswith("samples/")]
    assert len(samples) == 8
    assert all(re.fullmatch(r"samples/\d: \d, predicted \d \([\d.]+ %\)", tag) for tag in samples)
    for selection in ("mispredictions", "least_certain"):
        tags = [tag for tag in events.Tags()["images"] if tag.startswith(f"{selection}/")]
        assert len(tags) == 24
        assert all(re.fullmatch(rf"{selection}/\d+: \d, predicted \d \([\d.]+ %\)", tag) for tag in tags)
    assert [tag for tag in events.Tags()["images"] if tag.startswith("confusion_matrix/test: rows are true classes")]
    assert len(events.Scalars("val_balanced_accuracy")) == len(events.Scalars("val_macro_f1")) == 2
    (text,) = events.Tensors("results/text_summary")
    assert "accuracy     best     last" in text.tensor_proto.string_val[0].decode()
    assert events.Scalars("accuracy.test")[0].value == pytest.approx(results["accuracy"]["test"])


def validation_labels():
    """Return the labels of the validation images."""
    from efficient_ft.training.kinds.registry import kind_of

    config = check(plain_config())
    return kind_of(config).open(config, factory.input_of(config.model)).eval_loader("val").dataset.labels.tolist()


@pytest.mark.slow
@pytest.mark.first(1, "slow")
@pytest.mark.parametrize(("given", "steps"), [(None, list(range(1, 23))), (5, [5, 10, 15, 20])])
def test_the_interval_of_rows(tmp_path, configuration, without_cost, given, steps):
    run(configuration(logger={"name": "none", "every_n_steps": given}), tmp_path)
    assert [row["step"] for row in rows_of(tmp_path) if "lr" in row] == steps


@pytest.mark.parametrize(
    ("given", "total", "every"), [(None, 10, 1), (None, 100, 4), (None, 5000, 4), (7, 5000, 7), (1, 9, 1)]
)
def test_short_runs_have_twenty_rows(given, total, every):
    """A short run records about twenty rows. RECORD_EVERY is 4 in these tests."""
    assert rows_every(given, total) == every


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_logger_that_is_not_installed_is_named(tmp_path, configuration, monkeypatch, name):
    import lightning.pytorch.loggers as loggers

    class Missing:
        def __init__(self, *args, **kwargs):
            raise ModuleNotFoundError(name)

    monkeypatch.setattr(loggers, {"wandb": "WandbLogger", "tensorboard": "TensorBoardLogger"}[name], Missing)
    with pytest.raises(UserError, match=rf"not installed\. Run pip install {name}\.$"):
        run(configuration(logger={"name": name}), tmp_path)


@pytest.fixture
def no_key(tmp_path, monkeypatch):
    """Remove wandb's key and mode from the environment, and set an empty home folder."""
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.usefixtures("no_key")
def test_a_missing_key_of_wandb_is_said_at_once(tmp_path, configuration):
    with pytest.raises(UserError, match=r"^logger=wandb requires an API key, .* is configured\. Log in .*offline\.$"):
        loggers.start_loggers(configuration(logger={"name": "wandb"}), tmp_path / "run", "id")


@pytest.mark.slow
@pytest.mark.usefixtures("no_key")
def test_an_offline_run_after_an_online_one_stays_offline(tmp_path, configuration, monkeypatch):
    """wandb keeps the mode of its first use in a process, but each job of a sweep uses its own mode."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    with pytest.raises(UserError, match="requires an API key"):
        loggers.start_loggers(configuration(logger={"name": "wandb"}), tmp_path / "online", "a")
    offline = configuration(logger={"name": "wandb", "mode": "offline"})
    started = loggers.start_loggers(offline, tmp_path / "offline", "b")
    assert started[0].experiment.offline
    loggers.close_loggers(started, failed=False)
    assert "WANDB_MODE" not in os.environ
    with pytest.raises(UserError, match="requires an API key"):
        loggers.start_loggers(configuration(logger={"name": "wandb"}), tmp_path / "online", "c")


@pytest.mark.slow
def test_a_run_on_wandb_has_a_readable_name_and_what_runs_are_compared_by(tmp_path, configuration, without_cost, capfd):
    pytest.importorskip("wandb")
    logger = {"name": "wandb", "mode": "offline", "entity": "us", "tags": ["a", "b"], "job_type": "study"}
    config = configuration(logger=logger, trainer__max_steps=5, published=0.25)
    arguments = ["method=full", "data=digits", "optim.lr=1e-2", "trainer.max_steps=5", "data.root=/x", "seed=3"]
    results = run(config, tmp_path / "lbp_wht_published" / "name", arguments)
    found = offline_run(tmp_path)
    sent = found["run"]
    assert sent.display_name == "lbp_wht_published lr=1e-2 max_steps=5 seed=3"
    assert (sent.entity, sent.run_group, sent.job_type, list(sent.tags)) == (
        "us",
        "lbp_wht_published",
        "study",
        ["a", "b"],
    )
    assert found["summary"]["accuracy.published"] == 0.25
    assert found["summary"]["accuracy.minus_published"] == pytest.approx(results["accuracy"]["test"] - 0.25)
    assert found["summary"]["accuracy.test"] == results["accuracy"]["test"]
    assert found["summary"]["totals.images"] == results["totals"]["images"]
    assert found["metrics"]["val_accuracy*"].max
    assert any("flops" in row for row in found["history"])
    assert {f"val_accuracy/{digit}" for digit in range(10)} <= found["history"][-2].keys()
    assert len(found["history"][-1]["samples.captions"]) == 8
    assert len(list(tmp_path.rglob("media/images/samples_*.png"))) == 8
    for selection in ("mispredictions", "least_certain"):
        assert len(list(tmp_path.rglob(f"media/images/{selection}_*.png"))) == 24
    assert len(list(tmp_path.rglob("media/images/confusion_matrix_*.png"))) == 1
    assert len(list(tmp_path.rglob("media/table/confusions_*.json"))) == 1
    assert found["summary"]["test.macro_f1"] == results["data"]["scores"]["test"]["macro_f1"]
    printed = capfd.readouterr()
    assert re.search(r"^wandb: The command\s+`wandb sync \S*offline-run-\S+`\s+uploads this run\.$", printed.out, re.M)
    assert (printed.out + printed.err).count("wandb:") == 1, "and no more of its own"


@pytest.mark.slow
def test_the_sweep_of_the_examples_composes():
    """Each combination of the sweep's values is a valid command line."""
    held = yaml.safe_load((REPOSITORY / "examples" / "wandb_sweep.yaml").read_text())
    given = [word for word in held["command"] if not word.startswith("$") and word != "efficient-ft"]
    for order in held["parameters"]["method.lbp_dct.order"]["values"]:
        (config,) = composed(*given, "optim.lr=1e-4", f"method.lbp_dct.order={order}", "seed=1")
        assert config.logger.name == "wandb"
    assert held["metric"]["name"] == "val_accuracy"
