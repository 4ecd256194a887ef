"""Old names of settings are refused with the new one."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import yaml

from efficient_ft.config import check, setting_names
from efficient_ft.config.renamed import RENAMED, RENAMED_VALUES, renamed
from efficient_ft.core.errors import SettingError
from efficient_ft.record.config_file import read_config
from efficient_ft.record.formats import OtherVersionError
from tests.config.settings import two_tasks, with_settings


def names() -> set[str]:
    """Full names of all settings, with those of the methods."""
    from efficient_ft.methods import METHODS

    own = {f"method.{name}.{p}" for name in METHODS for p in inspect.signature(METHODS[name]).parameters}
    return {*setting_names(), "step_stats", *own}


def test_the_table_leads_from_names_that_are_gone_to_names_that_exist() -> None:
    known = names()
    assert set(RENAMED.values()) | set(RENAMED_VALUES) <= known
    assert not set(RENAMED) & known


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_name_is_refused_with_the_new_one(old: str) -> None:
    with pytest.raises(SettingError) as caught:
        check(with_settings(**{old.replace(".", "__"): 1}))
    assert str(caught.value) == f"{old} was renamed: use {RENAMED[old]}."


def test_old_names_in_tasks_and_old_words_for_values() -> None:
    with pytest.raises(SettingError, match=r"^tasks\.b\.workers was renamed: use tasks\.b\.num_workers\.$"):
        check(two_tasks(tasks__b__workers=1))
    for setting, words in RENAMED_VALUES.items():
        for old, new in words.items():
            with pytest.raises(SettingError) as caught:
                check(with_settings(**{setting.replace(".", "__"): old}))
            assert str(caught.value) == f"{setting}={old} was renamed: use {setting}={new}."
    assert renamed("tasks.b.root") is None


def test_a_run_folder_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(with_settings(optim__clip=1.0)))
    with pytest.raises(
        OtherVersionError,
        match=r"an earlier version of efficient-ft \(it says optim\.clip, which is optim\.grad_clip_norm now\)",
    ):
        read_config(tmp_path)
