"""Tests of the selection of the data set by the configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import yaml

from efficient_ft.config import DataConfig
from efficient_ft.config.schema import MaskConfig, TextConfig
from efficient_ft.data import class_count, open_data
from efficient_ft.data.published import MASK_SETS, PUBLISHED, TEXT_SETS
from tests.data.pictures import SPEC

Make = Callable[..., Path]
Config = Callable[..., DataConfig]
CONF = Path(__file__).resolve().parents[2] / "conf" / "data"


def test_classes_are_counted_without_opening_an_image(folders: Make, data_config: Config, tmp_path: Path) -> None:
    root = folders(train={"cat": 2, "dog": 2}, test={"cat": 1, "dog": 1})
    (root / "train" / ".thumbnails").mkdir()
    assert class_count(data_config("folder", root=str(root))) == 2
    assert class_count(data_config("folder", root=str(root / "train"))) == 2
    assert class_count(data_config("folder", root=str(tmp_path / "nowhere"))) is None
    assert class_count(data_config("digits")) == open_data(data_config("digits"), SPEC, 0).num_classes


def test_every_data_set_has_a_configuration_that_holds_all_settings() -> None:
    files = {path.stem: yaml.safe_load(path.read_text()) for path in CONF.glob("*.yaml")}
    assert set(files) == {
        "folder",
        "labels",
        "digits",
        "mask_folder",
        "text_folder",
        *PUBLISHED,
        *MASK_SETS,
        *TEXT_SETS,
    }
    for name, settings in files.items():
        assert settings["name"] == name
        masks, text = settings.get("masks"), settings.get("text")
        own = "masks" if masks is not None else "text" if text is not None else "augment"
        also = {"labels"} if name == "labels" else set()
        optional = {"follow_links", "splits", "value_range", "max_pixels"}
        others = {"masks", "text", "labels", "augment", "batch_size_selected"}  # a run writes the last setting
        assert set(settings) | optional == set(DataConfig.model_fields) - others | {own} | also
        assert ("follow_links" in settings) == ("splits" in settings)
        assert (
            ("value_range" in settings) == ("max_pixels" in settings) == (name in {"folder", "labels", "mask_folder"})
        )
        assert ("follow_links" in settings) == (name in {"folder", "labels", "mask_folder", "text_folder"})
        assert (masks is not None) == (name == "mask_folder" or name in MASK_SETS)
        assert (text is not None) == (name == "text_folder" or name in TEXT_SETS)
        settings["root"] = settings["root"].replace("???", "images")
        config = DataConfig(**settings)
        assert config.select_best_on == "val", "choosing on the test split is a recipe's business"
        if text is not None:
            assert set(text) == set(TextConfig.model_fields)
        elif masks is None:
            assert set(settings["augment"]) == set(type(config.augment).model_fields)
        else:
            assert set(masks) == set(MaskConfig.model_fields)
