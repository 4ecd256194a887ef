"""The data set that a configuration names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import yaml

from efficient_ft.config import DataConfig
from efficient_ft.data import (
    class_count,
    open_data,
)
from efficient_ft.data.published import PUBLISHED
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
    assert set(files) == {"folder", "digits", *PUBLISHED}
    for name, settings in files.items():
        assert settings["name"] == name
        assert set(settings) == set(DataConfig.model_fields)
        config = DataConfig(**settings)
        assert config.select_best_on == "val", "choosing on the test split is a recipe's business"
        assert set(settings["augment"]) == set(type(config.augment).model_fields)
