"""Tests that the settings which affect a run's result determine the run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from efficient_ft.config import check, fingerprint, run_folder
from tests.config.settings import PLAIN, two_tasks, with_settings

#: Valid values of settings that change the result of a run. The values differ from PLAIN.
_MATTERS = {
    "model__name": "resnet50",
    "model__pretrained": False,
    "model__image_size": [64, 96],
    "model__select": "all",
    "data__name": "pets",
    "data__batch_size": 3,
    "data__augment__flip": False,
    "data__augment__name": "strong",
    "data__augment__mixup": 0.5,
    "data__augment__erase_prob": 0.5,
    "data__val_fraction": 0.3,
    "method": {"full": {}, "lora": {"rank": 3}},
    "optim__lr": 0.5,
    "optim__grad_clip_norm": 1.0,
    "optim__betas": [0.5, 0.6],
    "optim__state_bits": 8,
    "trainer__epochs": 3,
    "trainer__precision": "bf16",
    "trainer__num_nodes": 2,
    "trainer__ema": 0.9,
    "trainer__patience": 1,
    "seed": 1,
}
_SHOWN_ONLY = {
    "trainer__progress": False,
    "trainer__accelerator": "cpu",
    "trainer__strategy": "ddp",
    "resume": "never",
    "evaluate": "somewhere",
    "logger__name": "wandb",
    "data__num_workers": 0,
    "data__download": False,
    "data__follow_links": True,
    "data__eval_batch_size": 7,
    "data__root": "elsewhere",
    "allocator": "system",
    "memory": "4GB",
    "job_timeout": "2h",
    "cost__steps": 9,
    "step_stats__interval": 4,
}


def test_weights_in_bf16_are_another_run_and_the_default_keeps_the_folder() -> None:
    plain = {"trainer__precision": "bf16"}
    same, other = (check(with_settings(**plain, trainer__weight_dtype=dtype)) for dtype in ("fp32", "bf16"))
    assert fingerprint(check(with_settings(**plain))) == fingerprint(same) != fingerprint(other)


def test_runs_without_augmentation_averages_and_early_stopping_keep_their_folders() -> None:
    """The fingerprints are those of the version before these settings."""
    scale = with_settings(data__augment={"scale": [0.2, 1.0], "pick": 1})
    found = [fingerprint(check(plain)) for plain in (PLAIN, two_tasks(), scale)]
    assert found == ["bd46f49e", "c5e0cbb2", "d17b84fe"]


def test_a_compiled_run_is_another_run_and_the_default_keeps_the_folder() -> None:
    same, other = (check(with_settings(trainer__compile=compiles)) for compiles in (False, True))
    assert fingerprint(check(with_settings())) == fingerprint(same) != fingerprint(other)


@pytest.mark.parametrize(("precision", "same"), [("fp32", True), ("bf16", False), ("auto", False)])
def test_the_default_form_of_the_prefix_keeps_the_folder_of_runs_that_it_does_not_change(
    precision: str, same: bool
) -> None:
    of = {"trainer__precision": precision}
    default, fp32 = check(with_settings(**of)), check(with_settings(**of, trainer__prefix="fp32"))
    assert (fingerprint(default) == fingerprint(fp32)) == same


@settings(max_examples=50, deadline=None)
@given(st.sets(st.sampled_from(sorted(_MATTERS))), st.sets(st.sampled_from(sorted(_SHOWN_ONLY))))
def test_the_folder_follows_from_what_matters_and_survives_writing_out(matters: set[str], shown: set[str]) -> None:
    base = check(with_settings(**{name: _MATTERS[name] for name in matters}))
    same = check(with_settings(**{name: {**_MATTERS, **_SHOWN_ONLY}[name] for name in matters | shown}))
    assert run_folder(base) == run_folder(same)
    assert (fingerprint(base) == fingerprint(check(PLAIN))) == (not matters)
    assert check(same.model_dump(mode="json")) == same


def test_the_optimizer_s_memory_is_part_of_the_run_where_it_is_chosen() -> None:
    plain = {"state_bits": 32, "in_backward": False}
    runs = [check(with_settings(optim={**PLAIN["optim"], **plain, **changes})) for changes in
            ({}, {"state_bits": 8}, {"state_bits": 4}, {"in_backward": True})]  # fmt: skip
    assert fingerprint(runs[0]) == fingerprint(check(PLAIN))
    assert len({fingerprint(run) for run in runs}) == 4


def test_a_folder_of_images_is_told_apart_by_its_place() -> None:
    runs = [check(with_settings(data__name="folder", data__root=root)) for root in ("a/pets", "a/./pets/", "b/pets")]
    assert fingerprint(runs[0]) == fingerprint(runs[1]) != fingerprint(runs[2])
    assert run_folder(runs[0]).startswith("outputs/pets/resnet18/full/")


@pytest.mark.parametrize(("root", "name"), [(".", "photos"), ("..", "my"), ("../..", "folder"), ("/", "folder")])
def test_a_relative_path_without_a_name_does_not_move_the_run_folder(
    root: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "folder" / "my" / "photos"
    place.mkdir(parents=True)
    monkeypatch.chdir(place)
    run = check(with_settings(data__name="folder", data__root=root))
    assert run_folder(run).startswith(f"outputs/{name}/resnet18/full/")


def test_the_size_of_a_limited_number_of_evaluation_batches_is_part_of_the_run() -> None:
    def prints(**more: object) -> list[str]:
        sizes: list[dict[str, int]] = [{}, {"data__eval_batch_size": 8}, {"data__eval_batch_size": 32}]
        return [fingerprint(check(with_settings(**size, **more))) for size in sizes]

    assert len(set(prints())) == 1
    assert len(set(prints(trainer__limit_eval_batches=1))) == 3


def test_how_images_are_read_is_part_of_the_run_where_it_changes_them() -> None:
    plain = {"data__name": "folder", "data__root": "a"}
    base = fingerprint(check(with_settings(**plain)))
    assert fingerprint(check(with_settings(**plain, data__value_range=None, data__max_pixels=5))) == base
    others = [
        {"data__value_range": [0, 4095]}, {"data__value_range": [0, 1023]}, {"data__splits": {"train": "a"}},
        {"data__on_corrupt": "skip"}, {"data__on_corrupt": "skip", "data__max_pixels": 5},
    ]  # fmt: skip
    assert len({base, *(fingerprint(check(with_settings(**plain, **other))) for other in others)}) == 6


def test_the_folder_names_data_model_and_methods_safely() -> None:
    run = check(with_settings(model__name="hf_hub:org/a b", method={"lora": {}, "full": {}}))
    assert run_folder(run).split("/")[:-1] == ["outputs", "cifar10", "hf_hub_org_a_b", "full+lora"]


def test_tasks_are_part_of_the_run_in_their_order_and_the_one_data_set_is_not() -> None:
    run = check(two_tasks())
    assert run.data == run.tasks["a"]
    assert run_folder(run).startswith("outputs/a+b/resnet18/full/")
    assert check(run.model_dump(mode="json")) == run
    assert fingerprint(check(two_tasks(data__batch_size=3))) == fingerprint(run)
    assert fingerprint(check(two_tasks(tasks__a__num_workers=0, tasks__b__root="elsewhere"))) == fingerprint(run)
    turned = check(with_settings(tasks={"b": {"name": "pets"}, "a": {"name": "cifar10"}}))
    others = [turned, check(two_tasks(tasks__b__batch_size=3)), check(two_tasks(seed=1)), check(PLAIN)]
    assert len({fingerprint(other) for other in [run, *others]}) == 5


def test_a_run_of_one_data_set_says_nothing_of_tasks() -> None:
    for none in ({}, None):
        run = check(with_settings(tasks=none))
        assert run == check(PLAIN)
        assert "tasks" not in run.model_dump(mode="json")


def test_the_reading_of_texts_is_part_of_the_run() -> None:
    def run(**text: Any) -> str:
        model = {"name": "bert", "weights": "w", "max_length": 16}
        data = {"name": "text_folder", "root": "r", "text": text}
        return fingerprint(check(with_settings(task="text", model=model, data=data)))

    changes: list[dict[str, Any]] = [
        {}, {"names": ["text", "label"]}, {"delimiter": "tab"}, {"quotes": True}, {"encoding": "cp1252"},
        {"missing": []}, {"ignore_case": False},
    ]  # fmt: skip
    assert len({run(**change) for change in changes}) == len(changes)
    assert run() == run(missing=["null", "NULL", "NA", "N/A"])


def test_the_reading_of_masks_is_part_of_the_run_if_it_is_set() -> None:
    def run(**masks: object) -> str:
        data = {"name": "mask_folder", "root": "masks", "masks": masks}
        model = {"name": "unet", "encoder": "resnet18", "pretrained": False}
        config = check(with_settings(task="segmentation", data=data, model=model))
        assert check(config.model_dump(mode="json")) == config
        return fingerprint(config)

    changes: list[dict[str, object]] = [
        {"values": {0: "a", 255: "b"}}, {"values": {0: "b", 255: "a"}}, {"values": "ids"},
        {"colors": {"a": [0, 0, 0], "b": "#ff0000"}}, {"palette": "index"}, {"exif": "raw"}, {"exif": "upright"},
        {"folder": "labels"}, {"image_folder": "scans"}, {"suffix": "_labelIds"},
    ]  # fmt: skip
    assert len({run(), *(run(**masks) for masks in changes)}) == len(changes) + 1
    assert run(values={0: "a", 255: "b"}) == run(values={255: "b", 0: "a"})
