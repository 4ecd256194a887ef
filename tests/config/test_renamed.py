"""Old names of settings are refused with the new one."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import yaml

from efficient_ft.config import check, setting_names
from efficient_ft.config.renamed import RENAMED, RENAMED_VALUES, renamed
from efficient_ft.config.stored import stored_config
from efficient_ft.core.errors import SettingError, UserError
from tests.config.settings import PLAIN, two_tasks, with_settings


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
    with pytest.raises(UserError) as caught:
        stored_config(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} was written by an earlier version: its setting optim.clip is now optim.grad_clip_norm. Use another"
        " folder, or resume=never to train again; to read it, use the version that wrote it."
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "holds no config.yaml"),
        ("[1, 2]", "must hold a mapping"),
        ("a: [", "cannot be read"),
        ("\x00", "cannot be read"),
        ("optim: {lr: -1}", "config.yaml: "),
    ],
)
def test_a_folder_without_a_usable_configuration_is_refused(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        stored_config(tmp_path)
    assert said in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(UserError, match="no such folder"):
        stored_config(tmp_path / "nix")


def test_a_stored_configuration_is_read_back(tmp_path: Path) -> None:
    config = check(PLAIN)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert stored_config(tmp_path) == config
