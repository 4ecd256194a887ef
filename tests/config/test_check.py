"""Tests of the schema and its messages."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from efficient_ft.config import Config, check, setting_names
from efficient_ft.config.kinds import RULES, KindRules
from efficient_ft.core.errors import SettingError
from tests.config.settings import PLAIN, two_tasks, with_settings


def refused(plain: dict[str, Any]) -> SettingError:
    with pytest.raises(SettingError) as caught:
        check(plain)
    return caught.value


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("optim__lr", "abc", "optim.lr must be a number >= 1e-12, got abc."),
        ("optim__lr", -1, "optim.lr must be a number >= 1e-12, got -1."),
        ("optim__lr", float("nan"), "optim.lr must be a number >= 1e-12, got NaN."),
        ("optim__lr", "1",
         'optim.lr must be a number >= 1e-12, got "1". The quotes make the value a string. Use optim.lr=1.'),
        ("trainer__epochs", True, "trainer.epochs must be an integer >= 1, got true."),
        ("trainer__epochs", 1.5, "trainer.epochs must be an integer >= 1, got 1.5."),
        ("trainer__epochs", "???",
         "trainer.epochs must be an integer >= 1, got nothing. The setting has no default. Pass trainer.epochs=VALUE."),
        ("trainer__compile", "inductor", "trainer.compile must be true or false, got inductor."),
        ("trainer__progress", "yes", "trainer.progress must be true or false, got yes."),
        ("trainer__precision", "fp8", "trainer.precision must be one of auto, fp32, bf16, fp16, got fp8."),
        ("trainer__strategy", "fsdp",
         "trainer.strategy must be auto or ddp, got fsdp. This strategy shards each parameter over the processes"),
        ("trainer__strategy", "deepspeed_stage_2", "trainer.strategy must be auto or ddp, got deepspeed_stage_2."),
        ("trainer__strategy", "dp", "trainer.strategy must be one of auto, ddp, got dp."),
        ("trainer__num_nodes", 0, "trainer.num_nodes must be an integer >= 1, got 0."),
        ("trainer__devices", "al", "trainer.devices must be an integer >= 1 or auto, got al."),
        ("step_stats__interval", -1, "step_stats.interval must be an integer >= 0, got -1."),
        ("trainer__max_steps", 0, "trainer.max_steps must be -1 (no limit) or an integer >= 1, got 0."),
        ("data__name", "cifar1000", "Did you mean 'cifar100'?"),
        ("data__augment__scale", [0.5],
         "data.augment.scale must be a list of 2 values, each a number > 0 and <= 1, got [0.5]."),
        ("data__augment__scale", [0.9, 0.5], "[smallest, largest]"),
        ("data__augment", 3, "data.augment must be a mapping, got 3."),
        ("model__image_size", [224, 0],
         "model.image_size must be an integer >= 1 and <= 8192, a list of 2 values, each"),
        ("model__std", [1.0],
         "model.mean must be a list with one number per channel if model.mean or model.std is set, got null."),
        ("optim__momentum", 0.5, "The setting applies only to optim=sgd."),
        ("optim__state_bits", 5, "optim.state_bits must be one of 32, 8, 4, got 5."),
        ("optim__in_backward", 1, "optim.in_backward must be true or false, got 1."),
        ("method", {}, "method must be a non-empty mapping from names to mappings, got {}."),
        ("method", "full", "method must be a mapping from method names to their settings, got full."),
        ("optim", None, "optim must be a mapping, got null."),
        ("optim__lrr", 1, "optim.lrr=1: there is no such setting"),
        ("optim__lrr", 1, "Did you mean 'lr'?"),
        ("optim__epochs", 1, "Did you mean 'trainer.epochs'?"),
        ("lr", 1, "lr=1: there is no such setting. A run has"),
        ("lr", 1, "Did you mean 'optim.lr'?"),
        ("data__augment__scael", 1,
         "data.augment.scael=1: there is no such setting. data.augment has color_jitter, cutmix, erase_prob, flip,"),
        ("a__typo", 1, 'a={"typo": 1}: there is no such setting'),
        ("seed", -1, "seed must be an integer >= 0 and < 4294967296, got -1."),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_key_constraint_and_value(setting: str, value: Any, said: str) -> None:
    assert said in str(refused(with_settings(**{setting: value})))


def test_the_names_of_splits_are_named() -> None:
    said = str(refused(with_settings(data__name="folder", data__splits={"trian": "a"})))
    assert said.startswith("data.splits must be a mapping from train or val or test to values, ")
    assert "trian" in said


@pytest.mark.parametrize("file", [["a.csv", "b.csv"], {"validation": "a.csv"}, None])
def test_the_label_file_is_one_file_or_one_for_each_split(file: Any) -> None:
    said = str(refused(with_settings(data__name="labels", data__labels={"file": file})))
    form = "one file, or one file for each of the splits train, val and test, such as {train: a.csv, val: b.csv}"
    assert said.startswith(f"data.labels.file must be {form}, got ")
    other = str(refused(with_settings(data__name="folder", data__labels={"separator": "|"})))
    assert other == "data.labels must be null with data=folder, got a mapping. Label files require data=labels."


def test_the_value_range_is_ordered_and_for_files() -> None:
    with pytest.raises(SettingError, match=r"data\.value_range must be \[LOW, HIGH\] with LOW < HIGH, .*got \[5.*, 5"):
        check(with_settings(data__name="folder", data__value_range=[5, 5]))
    with pytest.raises(SettingError, match=r"data\.value_range must be null with data=cifar10"):
        check(with_settings(data__name="cifar10", data__value_range=[0, 5]))


def test_settings_that_exclude_each_other_are_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"evaluate": "run", "cost_only": True}, "cost_only"),
        ({"model__name": "vit_digits", "model__pretrained": True}, "model.pretrained"),
        ({"trainer__precision": "fp16", "trainer__accelerator": "cpu"}, "trainer.precision"),
        ({"trainer__precision": "fp32", "trainer__weight_dtype": "bf16"}, "trainer.weight_dtype"),
        ({"trainer__compile": True, "memory": "4GB"}, "trainer.compile"),
        ({"model__mean": [0.5, 0.5, 0.5], "model__std": [0.5]}, "model.std"),
        ({"data__augment__name": "none", "data__augment__resize": 256}, "data.augment.resize"),
        ({"optim__name": "sgd", "optim__betas": [0.5, 0.9]}, "optim.betas"),
    ]
    for changes, said in cases:
        assert refused(with_settings(**changes)).setting == said


def test_what_the_optimizer_s_memory_excludes_is_refused() -> None:
    inside = {"optim__in_backward": True}
    cases: list[tuple[dict[str, Any], str]] = [
        ({**inside, "optim__grad_clip_norm": 5.0},
         "optim.grad_clip_norm must be null with optim.in_backward=true, got 5.0. The norm of all gradients"),
        ({**inside, "trainer__grad_accum_steps": 2},
         "trainer.grad_accum_steps must be 1 with optim.in_backward=true, got 2. Each backward pass updates"),
        ({**inside, "trainer__precision": "fp16"},
         "trainer.precision must be fp32 or bf16 with optim.in_backward=true, got fp16."),
        ({**inside, "trainer__devices": 2}, "trainer.devices must be 1 with optim.in_backward=true, got 2."),
        ({**inside, "trainer__num_nodes": 2}, "trainer.num_nodes must be 1 with optim.in_backward=true, got 2."),
        ({"optim": {"name": "sgd", "lr": 0.1, "state_bits": 8}},
         "optim.state_bits must be left out with optim=sgd, got 8."),
    ]  # fmt: skip
    for changes, said in cases:
        assert str(refused(with_settings(**changes))).startswith(said)
    check(with_settings(**inside, trainer__precision="bf16", optim__state_bits=4))


@settings(max_examples=5, deadline=None)
@given(name=st.text(st.characters(codec="ascii", categories=["L"]), min_size=1, max_size=8), value=st.integers())
@pytest.mark.parametrize("group", ["model", "data", "optim", "trainer", "logger", "cost", "step_stats"])
def test_unknown_keys_are_refused_everywhere_by_their_full_name(group: str, name: str, value: int) -> None:
    if f"{group}.{name}" in setting_names() or name in ("kwargs", "augment"):
        return
    assert refused(with_settings(**{f"{group}__{name}": value})).setting == f"{group}.{name}"


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("tasks", {"a": {"name": "pets"}},
         "tasks must be two data sets or more, got a. For one, use tasks=none data=NAME."),
        ("tasks__b__batch_size", 0, "tasks.b.batch_size must be an integer >= 1 and <= 65536 or auto, got 0."),
        ("tasks__b__batchsize", 1, "tasks.b.batchsize=1: there is no such setting. tasks.b has augment"),
        ("tasks__b__name", "cat", "tasks.b.name must be one of folder, "),
        ("tasks__b", 3, "tasks.b must be a mapping, got 3."),
        ("tasks", "bsr_moe", "tasks must be a mapping from names to mappings, got bsr_moe."),
        ("tasks__b__select_best_on", "test", "tasks.b.select_best_on must be val, as for a, got test."),
        ("tasks__b__augment", {"scale": [0.9, 0.1]},
         "tasks.b.augment.scale must be [smallest, largest], got [0.9, 0.1]."),
        ("tasks__c d", {"name": "pets"},
         "tasks must be a mapping whose names contain only letters, digits, _ and -, got c d."),
    ],
)  # fmt: skip
def test_a_mistake_in_a_task_is_named_as_such(setting: str, value: Any, said: str) -> None:
    plain = two_tasks(**{setting: value}) if "__" in setting else {**two_tasks(), setting: value}
    assert str(refused(plain)).startswith(said)


def test_configurations_cannot_be_changed_behind_their_folder() -> None:
    with pytest.raises(ValueError, match="frozen"):
        check(PLAIN).optim.lr = 1.0  # type: ignore[misc]
    assert set(Config.model_fields) >= set(PLAIN)


# ------------------------------------------------------------------------------------------------------- augmentation
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__augment__mixup": -0.1}, r"data\.augment\.mixup must be .*0.*, got -0\.1\."),
        ({"data__augment__cutmix": 101}, r"data\.augment\.cutmix must be .*100.*, got 101\."),
        ({"data__augment__mix_prob": 1.5}, r"data\.augment\.mix_prob must be .*, got 1\.5\."),
        ({"data__augment__erase_prob": -1}, r"data\.augment\.erase_prob must be .*, got -1\."),
        ({"data__augment__color_jitter": 2}, r"data\.augment\.color_jitter must be .*, got 2\."),
        ({"data__augment__policy": "rand"}, r"data\.augment\.policy must be .*randaugment.*, got rand\."),
        ({"data__augment__name": "heavy"}, r"data\.augment\.name must be .*strong.*, got heavy\."),
        (
            {"data__augment__policy": "randaugment", "data__augment__magnitude": 31},
            r"data\.augment\.magnitude must be .*30.*, got 31\.",
        ),
        (
            {"data__augment__magnitude": 5},
            r"data\.augment\.magnitude must be left out with data\.augment\.policy=none, got 5\. Only RandAugment",
        ),
        (
            {"data__augment__name": "medium", "data__augment__num_ops": 3},
            r"data\.augment\.num_ops must be left out with data\.augment\.policy=trivialaugment, got 3\.",
        ),
        ({"data__augment__mix_prob": 0.5}, r"mix_prob must be left out without MixUp and CutMix, got 0\.5\."),
        ({"data__augment__reprob": 0.5}, r"data\.augment\.reprob.*data\.augment\.erase_prob"),
        (
            {"data__augment__mixup": 0.2, "trainer__cache_features": "on"},
            r"data\.augment\.mixup must be 0 with trainer\.cache_features=on, got 0\.2\. Each stored feature belongs to"
            r" one image, but MixUp and CutMix mix two images\.",
        ),
        (
            {"data__augment__name": "strong", "trainer__cache_features": "on"},
            r"data\.augment\.name must be light or medium with trainer\.cache_features=on, got strong\. .*"
            r"Or set data\.augment\.mixup=0 data\.augment\.cutmix=0\.",
        ),
        (
            {"data__augment__mixup": 0.2, "data__batch_size": 1},
            r"data\.augment\.mixup must be 0 with data\.batch_size=1, got 0\.2\. Images are mixed with other images",
        ),
    ],
)
def test_augmentation_that_cannot_be_used(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        check(with_settings(**changes))


def test_augmentation_that_can_be_stored_or_applied_is_accepted() -> None:
    for augment in ({"name": "medium"}, {"name": "strong", "mixup": 0, "cutmix": 0}, {"mixup": 0.5, "mix_prob": 0}):
        check(with_settings(data__augment=augment, trainer__cache_features="on"))
    check(with_settings(data__augment={"name": "none", "mixup": 0.5, "policy": "autoaugment"}))


def test_mixing_needs_one_class_per_image() -> None:
    counting = KindRules("counting", RULES["classification"].data)
    message = r"data\.augment\.mixup must be 0 with task=counting, got 0\.2\. MixUp and CutMix require one class per"
    with pytest.raises(SettingError, match=message):
        counting.check(check(with_settings(data__augment__mixup=0.2)))
    counting.check(check(with_settings(data__augment__name="medium")))
    with pytest.raises(SettingError, match=r"tasks\.b\.augment\.name must be light or medium with task=counting"):
        counting.check(check(two_tasks(tasks__b__augment__name="strong")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer__ema": 0}, r"trainer\.ema must be a number > 0 and < 1 or null, got 0\."),
        ({"trainer__ema": 1.0}, r"trainer\.ema must be a number > 0 and < 1 or null, got 1\.0\."),
        ({"trainer__ema": 0.999, "trainer__ema_decay": 0.9}, r"trainer\.ema_decay.*trainer\.ema"),
        ({"trainer__patience": 0}, r"trainer\.patience must be an integer >= 1 or null, got 0\."),
        (
            {"trainer__patience": 2},
            r"trainer\.patience must be less than 2, the value of trainer\.epochs, or null, got 2\. Training could"
            r" never stop early\.",
        ),
        (
            {"trainer__patience": 1, "data__select_best_on": "test"},
            r"data\.select_best_on must be val with trainer\.patience=1, got test\. Early stopping requires a"
            r" validation split\.",
        ),
    ],
)
def test_averages_and_early_stopping_that_cannot_be_used(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        check(with_settings(**changes))
