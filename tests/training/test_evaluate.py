"""Tests of ``evaluate=RUN``: the scores of a run's weights, and the settings that may be changed."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
import yaml
from torch import nn

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.input_spec import IGNORED
from efficient_ft.record.formats import OtherVersionError
from efficient_ft.record.results import are_correct
from efficient_ft.task.metrics import Accuracy
from efficient_ft.training.evaluate import evaluate
from efficient_ft.training.kinds.registry import kind_named
from efficient_ft.training.kinds.several import mean_accuracies
from efficient_ft.training.module import FineTuner
from efficient_ft.training.output import export
from efficient_ft.training.run import run
from tests.training.runs import uneven_batches


def half_correct() -> Accuracy:
    """Return the metrics of two samples, of which the first one is predicted correctly."""
    found = Accuracy(2, local=True)
    found.update(torch.eye(2), torch.zeros(2, dtype=torch.long))
    return found


@pytest.mark.slow
def test_the_accuracy_on_every_split(configuration, finished, capsys):
    folder, _, results = finished
    found = run(configuration(evaluate=str(folder)), folder)
    assert found["accuracy"] == pytest.approx(results["data"]["accuracy"])
    assert set(found["accuracy"]) == {"val", "test"}
    assert "test" in capsys.readouterr().out


def test_without_a_configuration_it_is_the_stored_one(finished):
    folder, _, results = finished
    assert evaluate(folder)["accuracy"] == pytest.approx(results["data"]["accuracy"])


def test_loading_precision_and_limits_may_be_changed(configuration, finished, monkeypatch):
    seen = []

    def scores(task, model, loader, classes, device, precision, limit):
        seen.append((loader.batch_size, precision, limit))
        return half_correct()

    monkeypatch.setattr("efficient_ft.training.kinds.base.scores", scores)
    changes = {
        "data__eval_batch_size": 7,
        "trainer__precision": "bf16",
        "trainer__limit_eval_batches": 3,
        "optim__lr": 0.5,  # has no effect
    }
    assert evaluate(finished[0], configuration(**changes))["accuracy"] == {"val": 0.5, "test": 0.5}
    assert seen == [(7, "bf16", 3)] * 2


@pytest.mark.parametrize(("channels_last", "expected"), [(None, True), (False, False)])
def test_maps_are_stored_as_in_the_training(configuration, finished, monkeypatch, channels_last, expected):
    found = []

    def scores(task, model, *arguments):
        maps = [p for p in model.parameters() if p.ndim == 4]
        found.append(bool(maps) and all(p.is_contiguous(memory_format=torch.channels_last) for p in maps))
        return half_correct()

    monkeypatch.setattr("efficient_ft.training.kinds.base.scores", scores)
    evaluate(finished[0], configuration(trainer__channels_last=channels_last))
    assert found == [expected] * 2


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 1}, "seed=1 (the run has 233)"),
        ({"data__val_fraction": 0.3}, "data.val_fraction=0.3 (the run has 0.1)"),
        ({"model__kwargs__depth": 3}, "model.kwargs.depth=3 (the run has 2)"),
        ({"method": {"head": {}}}, "method=head (the run has full)"),
    ],
)
def test_another_model_or_method_or_split_is_refused(configuration, finished, changes, named):
    with pytest.raises(UserError) as caught:
        run(configuration(evaluate=str(finished[0]), **changes), finished[0])
    assert named in str(caught.value)
    assert re.search(r"uses the (model, methods and splits|methods) of the run\. Remove the", str(caught.value))


def test_images_that_are_not_there_are_named(tmp_path, configuration, finished):
    data = {"name": "folder", "root": str(tmp_path / "nowhere"), "num_workers": 0}
    with pytest.raises(UserError, match="nowhere"):
        run(configuration(evaluate=str(finished[0]), data=data), tmp_path)


@pytest.mark.parametrize("accelerator", ["gpu", "mps"])
def test_an_accelerator_that_does_not_exist_is_refused(configuration, finished, accelerator):
    available = {"gpu": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if available[accelerator]:
        pytest.skip(f"this machine has the accelerator {accelerator}")
    with pytest.raises(SettingError, match=rf"trainer\.accelerator .* got {accelerator}\..*trainer\.accelerator=auto"):
        evaluate(finished[0], configuration(trainer__accelerator=accelerator))


@pytest.mark.parametrize("what", ["nowhere", "empty"])
def test_a_folder_that_is_no_run_is_refused(tmp_path, configuration, what):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=rf"{what}.*Pass the run folder printed when training ended\."):
        run(configuration(evaluate=str(tmp_path / what)), tmp_path)


def test_a_run_of_another_version_is_refused(tmp_path, configuration, finished):
    shutil.copytree(finished[0], tmp_path / "run")
    file = tmp_path / "run" / "config.yaml"
    plain = yaml.safe_load(file.read_text())
    plain["optim"]["clip"] = plain["optim"].pop("grad_clip_norm")
    file.write_text(yaml.safe_dump(plain))
    with pytest.raises(OtherVersionError, match=r"it has the setting optim\.clip, which is unknown to this version"):
        run(configuration(evaluate=str(tmp_path / "run")), tmp_path)


def test_correct_samples_have_the_order_of_the_data(configuration, finished):
    folder, _, results = finished
    found = export.load(folder)
    loader = kind_named("classification").open(configuration(), found.input).eval_loader("test")
    with torch.inference_mode():
        expected = torch.cat([found.model(images).argmax(1) == labels for images, labels in loader]).tolist()
    assert are_correct(results["data"]["correct"]["test"]) == expected
    assert sum(expected) / len(expected) == pytest.approx(results["data"]["accuracy"]["test"])
    assert evaluate(folder)["correct"] == results["data"]["correct"]


def test_the_mean_is_over_the_splits_that_all_tasks_have():
    found = {"a": {"val": 0.5, "test": 1.0}, "b": {"val": 1.0}}
    assert mean_accuracies(found) == {"val": 0.75}


@pytest.mark.parametrize("task", ["classification", "segmentation"])
def test_the_loss_of_an_evaluation_is_the_mean_over_its_items(configuration, monkeypatch, task):
    """The loss is the mean over all items, with batches of different sizes and fractions of labeled pixels."""
    monkeypatch.setattr("efficient_ft.training.module.kind_of", lambda config: kind_named(task))
    monkeypatch.setattr(FineTuner, "_warn_if_constant", lambda self: None)
    logits, labels = uneven_batches(task)
    module = FineTuner(nn.Identity(), configuration(), 4, 10)
    for _ in range(2):  # the second evaluation starts from zero
        for batch in zip(logits.split(5), labels.split(5), strict=True):
            module.validation_step(batch, 0)
        module.on_validation_epoch_end()
        flat, own = logits.double().movedim(1, -1).reshape(-1, 4), labels.flatten()
        counted = own != IGNORED
        exact = flat[counted].logsumexp(1) - flat[counted].gather(1, own[counted, None])[:, 0]
        assert module.evaluated.loss == pytest.approx(exact.mean().item(), rel=1e-6)
