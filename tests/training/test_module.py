"""Tests of training steps: frozen parameters, gradient accumulation, precision and warnings."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from efficient_ft.core.input_spec import IGNORED
from efficient_ft.record.environment import cpu_name
from efficient_ft.training.datamodule import RunDataModule
from efficient_ft.training.kinds.registry import kind_named
from efficient_ft.training.module import FineTuner, likely_causes
from efficient_ft.training.output import checkpoint
from efficient_ft.training.run import run
from efficient_ft.training.trainer import build_trainer
from tests.conftest import unwrapped
from tests.training.runs import uneven_batches

pytestmark = pytest.mark.usefixtures("without_cost")


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [True, False])
def test_frozen_batch_norm_keeps_its_statistics_and_trains_its_weights(tmp_path, configuration, frozen):
    """The statistics stay frozen after an evaluation, which switches the model to evaluation mode and back."""
    limits = {"trainer__max_steps": 3, "trainer__epochs": 3, "trainer__limit_eval_batches": 1}
    config = configuration(model__frozen_bn=frozen, data__batch_size=600, **limits)
    run(config, tmp_path)
    state = checkpoint.read(tmp_path / checkpoint.NAME)["state_dict"]
    norm = "model.patch_embed.backbone.0.bn"
    assert torch.equal(state[f"{norm}.running_mean"], torch.zeros_like(state[f"{norm}.running_mean"])) == frozen
    assert torch.equal(state[f"{norm}.running_var"], torch.ones_like(state[f"{norm}.running_var"])) == frozen
    assert not torch.equal(state[f"{norm}.weight"], torch.ones_like(state[f"{norm}.weight"]))


def test_frozen_weights_never_get_a_gradient_nor_change(tmp_path, configuration):
    """Frozen parameters have no gradient. With a zero gradient, momentum and weight decay would still change them."""
    config = configuration(method={"head": {}}, trainer__epochs=1)
    seen = []

    def look(self, optimizer):
        seen.append({n for n, p in self.model.named_parameters() if p.grad is not None})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FineTuner, "on_before_optimizer_step", look)
        run(config, tmp_path)
    assert seen
    assert all(names == {"head.weight", "head.bias"} for names in seen)
    trained = checkpoint.read(tmp_path / checkpoint.NAME)
    assert len(trained["optimizer_states"][0]["state"]) == 2


@pytest.mark.slow
def test_accumulation_equals_one_large_batch(tmp_path, configuration):
    """Two accumulated batches of 64 give the same first step as one batch of 128."""
    quiet = {
        "model__drop_rate": 0.0,
        "model__drop_path_rate": 0.0,
        "model__frozen_bn": True,
        "trainer__max_steps": 1,
        "optim__warmup_steps": 0,
        "optim__name": "sgd",
    }
    once = configuration(**quiet)
    halves = configuration(**quiet, data__batch_size=64, trainer__grad_accum_steps=2)
    weights = []
    for name, config in (("once", once), ("halves", halves)):
        run(config, tmp_path / name)
        held = checkpoint.read(tmp_path / name / checkpoint.NAME)
        assert held["global_step"] == 1
        weights.append(held["state_dict"])
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.vary_one(slow=True)
@pytest.mark.parametrize(("accumulated", "left"), [(5, 1), (4, 2), (3, 3), (1, 1)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_last_step_of_an_epoch_is_the_mean_over_the_batches_that_it_has(
    tmp_path, configuration, accumulated, left, precision
):
    """An epoch has six batches, and the last batch is smaller."""
    config = configuration(
        model__drop_rate=0.0,
        model__drop_path_rate=0.0,
        model__frozen_bn=True,
        data__batch_size=256,
        optim__grad_clip_norm=None,
        trainer__epochs=2,
        trainer__grad_accum_steps=accumulated,
        trainer__precision=precision,
    )
    batches, errors = [], []
    step = FineTuner.training_step

    def remember(self, batch, batch_idx):
        batches.append(batch)
        return step(self, batch, batch_idx)

    def compare(self, optimizer):
        if self.trainer.fit_loop.batch_idx == 5:
            trained = [p for p in self.model.parameters() if p.requires_grad]
            losses = [self.task.loss(self.model(x), y) for x, y in batches[-left:]]
            exact = torch.autograd.grad(torch.stack(losses).mean(), trained)
            given, exact = (torch.cat([g.flatten() for g in of]) for of in ([p.grad for p in trained], exact))
            errors.append(((given - exact).norm() / exact.norm()).item())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FineTuner, "training_step", remember)
        patch.setattr(FineTuner, "on_before_optimizer_step", compare)
        run(config, tmp_path)
    assert (len(batches), len(errors)) == (12, 2)
    assert max(errors) < (1e-4 if precision == "fp32" else 0.1)


@pytest.mark.parametrize("task", ["classification", "segmentation"])
def test_the_loss_recorded_is_the_mean_over_the_items_trained_on(configuration, monkeypatch, task):
    """The loss is the mean over all items, with batches of different sizes and fractions of labeled pixels."""
    monkeypatch.setattr("efficient_ft.training.module.kind_of", lambda config: kind_named(task))
    logits, labels = uneven_batches(task)
    module = FineTuner(nn.Identity(), configuration(optim__label_smoothing=0.1), 4, 10)
    trainer: Any = SimpleNamespace(world_size=1, fit_loop=SimpleNamespace(batch_idx=0))
    module._trainer = trainer
    assert module.mean_loss("epoch") is None
    for batch in zip(logits.split(5), labels.split(5), strict=True):
        module.on_total_loss(module.training_step(batch, 0))
    flat, own = logits.double().movedim(1, -1).reshape(-1, 4).log_softmax(1), labels.flatten()
    flat, own = flat[own != IGNORED], own[own != IGNORED]
    exact = (-0.9 * flat.gather(1, own[:, None])[:, 0] - 0.1 * flat.mean(1)).mean().item()
    if task == "segmentation":
        exact *= len(own) / (len(own) + 1)  # a batch without labels counts as one pixel
    assert module.loss_so_far() == pytest.approx(exact, rel=1e-6)
    assert module.mean_loss("epoch") == module.mean_loss("window") != module.mean_loss("epoch") is None


@pytest.mark.parametrize("parts", [1, 2])
def test_gradients_are_freed_before_the_next_forward_pass(tmp_path, configuration, parts):
    """Before a forward pass, only gradients of earlier micro-batches of the same step exist."""
    config = configuration(trainer__max_steps=2, trainer__grad_accum_steps=parts)
    step, there = FineTuner.training_step, []

    def look(self, batch, batch_idx):
        there.append(any(p.grad is not None for p in self.model.parameters()))
        return step(self, batch, batch_idx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FineTuner, "training_step", look)
        run(config, tmp_path)
    assert there == [False, False] if parts == 1 else [False, True, False, True]


def test_bf16_trains(tmp_path, configuration):
    results = run(configuration(trainer__precision="bf16", trainer__max_steps=3), tmp_path)
    held = checkpoint.read(tmp_path / checkpoint.NAME)["state_dict"]
    assert all(v.dtype == torch.float32 for k, v in held.items() if v.is_floating_point())
    assert 0 <= results["accuracy"]["last"] <= 1


@pytest.mark.parametrize("supported", [False, True])
def test_a_processor_that_emulates_bf16_is_named(tmp_path, configuration, monkeypatch, caplog, supported):
    monkeypatch.setattr("efficient_ft.training.bf16_units.has_bf16_units", lambda device: supported)
    config = configuration(trainer__precision="bf16")
    build_trainer(config, tmp_path, [], [], [], epochs=1)
    assert ("longer than with fp32" in caplog.text) is not supported
    assert (cpu_name() in caplog.text) is not supported
    caplog.clear()
    build_trainer(configuration(), tmp_path, [], [], [], epochs=1)
    assert not caplog.text


@pytest.mark.slow
def test_constant_predictions_are_reported_once_with_what_likely_caused_them(tmp_path, configuration, capsys):
    """With a very high learning rate, the classifier predicts a single class from the first epoch."""
    settings = {"optim__lr": 30.0, "optim__warmup_steps": 0, "optim__name": "sgd", "optim__weight_decay": 0.0}
    run(configuration(**settings), tmp_path / "short")
    assert "is predicted as class" not in capsys.readouterr().out, "22 steps are too few to tell"
    run(configuration(**settings, data__batch_size=32), tmp_path / "collapsed")
    shown = capsys.readouterr().out
    assert shown.count("every image of the evaluation is predicted as class") == 1
    assert "BatchNorm keeps" not in shown  # frozen_bn is false in this run
    assert "starts from random weights" in shown
    assert "optim.lr=30 is too high. Try optim.lr=3" in unwrapped(shown)


@pytest.mark.slow
def test_a_loss_that_diverged_but_is_finite_is_reported_once(tmp_path, configuration, capsys):
    config = configuration(method={"head": {}}, optim__name="sgd", optim__lr=100.0, optim__warmup_steps=0)
    (warning,) = [text for text in run(config, tmp_path)["warnings"] if text.startswith("The training loss")]
    assert re.match(r"The training loss has diverged: its mean in epoch 1 is [\d.e+]+, but the first batch", warning)
    assert "Try a smaller optim.lr (now 100)" in warning
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("warning: the training loss has diverged") == 1


@pytest.mark.parametrize(
    ("first", "mean", "warned"),
    [(2.3, 24.0, 1), (2.3, 22.0, 0), (0.01, 2.0, 0), (0.01, 24.0, 1), (9.0, 80.0, 0), (2.3, None, 0)],
)
def test_a_loss_is_compared_with_the_first_batch_and_with_chance(configuration, first, mean, warned):
    module = FineTuner(torch.nn.Linear(2, 10), configuration(), 10, 100)
    module.warn_if_diverged(mean)
    assert not module.warnings  # no batch was read yet
    module._first_loss = first
    for _ in range(2):
        module.warn_if_diverged(mean)
    assert len(module.warnings) == warned
    state = {}
    module.on_save_checkpoint(state)
    resumed = FineTuner(torch.nn.Linear(2, 10), configuration(), 10, 100)
    resumed.on_load_checkpoint(state)
    resumed.warn_if_diverged(mean)
    assert resumed.warnings == module.warnings


def test_frozen_batch_norm_statistics_come_first_among_the_likely_causes(configuration):
    network = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.Flatten(), torch.nn.Linear(3, 2))
    module = FineTuner(network, configuration(model__frozen_bn=True), 2, 10)
    first, *_, last = likely_causes(module)
    assert "model.frozen_bn=true" in first
    assert "(method=last_stage)" in first
    assert "optim.lr=0.01" in last
    network[0].requires_grad_(False)  # if only the classifier trains, the statistics are correct
    assert "frozen_bn" not in " ".join(likely_causes(module))


def test_a_run_that_trains_the_last_stage_is_not_advised_to_train_the_last_stage(configuration):
    network = torch.nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 2))
    network[0].requires_grad_(False)
    first, *_ = likely_causes(FineTuner(network, configuration(model__frozen_bn=True), 2, 10))
    assert "a method that trains fewer layers (method=head)" in first


@pytest.mark.parametrize("elsewhere", [None, 0, 1])
@pytest.mark.parametrize("label", [0, 1])
def test_equal_predictions_are_those_of_all_labeled_pixels_in_all_processes(
    configuration, monkeypatch, label, elsewhere
):
    """This process predicts class 0 for every pixel. `elsewhere` is the class predicted by another process, if any."""

    def with_the_other(ranges, op):
        assert op is torch.distributed.ReduceOp.MIN
        ranges.copy_(torch.minimum(ranges, torch.tensor([elsewhere, -elsewhere, 0, 0])))

    monkeypatch.setattr("torch.distributed.all_reduce", with_the_other)
    module = FineTuner(nn.Identity(), configuration(), 2, 100)
    trainer: Any = SimpleNamespace(world_size=1 if elsewhere is None else 2, global_step=100, current_epoch=0)
    module._trainer = trainer
    labels = torch.tensor([[0, label, IGNORED]])
    module._keep_range(0, torch.zeros_like(labels), labels)
    module._keep_range(0, torch.zeros_like(labels), torch.full_like(labels, IGNORED))
    module._warn_if_constant()
    assert bool(module.warnings) == (label == 1 and elsewhere != 1)


@pytest.mark.slow
def test_a_run_that_learns_is_not_warned_about(finished, tmp_path, configuration, capsys):
    run(configuration(), tmp_path / "run")
    assert "warning" not in capsys.readouterr().out


def test_a_process_without_images_of_an_evaluation_repeats_those_of_the_first() -> None:
    """A process without images repeats the first process's batch, because Lightning would skip its evaluation."""

    def loaders(counts: list[int], rank: int) -> list[DataLoader]:
        return [DataLoader(range(count)[rank::2]) for count in counts]  # type: ignore[arg-type]

    images: Any = SimpleNamespace(best_split="val", eval_loaders=lambda split, rank, world: loaders([1], rank))
    data = RunDataModule(images)
    for rank, repeated in ((0, frozenset()), (1, {0})):
        data.trainer = SimpleNamespace(global_rank=rank, world_size=2)  # type: ignore[assignment]
        ((batch,),) = data.val_dataloader()
        assert batch.tolist() == [0]
        assert data.repeated == repeated
    module: Any = SimpleNamespace(trainer=SimpleNamespace(datamodule=data))
    FineTuner.on_validation_start(module)
    assert FineTuner.validation_step(module, None, 0) is None  # type: ignore[arg-type]
