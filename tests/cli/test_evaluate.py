"""Tests of ``evaluate=RUN``: the run folder is read as plain data, and no part of it is composed or executed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from efficient_ft.cli.hydra.compose import configurations
from efficient_ft.cli.hydra.groups import CONF
from efficient_ft.config import Config, ModelConfig, OptimConfig
from efficient_ft.core.errors import UserError
from tests.cli.program import composed as composed_jobs
from tests.cli.program import write_program

#: Recorded overrides that make Hydra call or import an object, in Hydra's reading order.
PAYLOADS = {
    "callback": ["+hydra.callbacks.a={_target_:builtins.open,file:@MARK@,mode:w}"],
    "forced callback": ["++hydra.callbacks.a={_target_:builtins.open,file:@MARK@,mode:w}"],
    "log handler": [
        "+hydra.job_logging.handlers.mark={class:logging.FileHandler,filename:@MARK@}",
        "hydra.job_logging.root.handlers=[mark]",
    ],
    "log factory": ["hydra.searchpath=['file://@RUN@/mark']", "+mark@hydra.job_logging.handlers.mark=factory"],
    "search path": ["hydra.searchpath=['file://@RUN@/mark']", "+mark@hydra.callbacks.a=call"],
    "deleted and replaced": [
        "~hydra.job_logging.handlers.file",
        "++hydra.callbacks={a:{_target_:builtins.open,file:@MARK@,mode:w}}",
    ],
    "launcher": ["hydra.searchpath=['file://@RUN@/mark']", "hydra.mode=MULTIRUN", "hydra/launcher=mark"],
    "folder": ["hydra.run.dir=@MARK@"],
    "environment": ["+hydra.job.env_set.SECRET=@MARK@"],
    "interpolation": ["data.root=${oc.env:SECRET}"],
    "target in ours": ["+model.kwargs.hook={_target_:builtins.open,file:@MARK@,mode:w}"],
}


@pytest.fixture(scope="module")
def settings() -> str:
    """The config.yaml of a run."""
    (config,) = composed_jobs("optim.lr=0.5", "data.root=here")
    return yaml.safe_dump(config.model_dump(mode="json"))


@pytest.fixture
def stored(tmp_path: Path, settings: str) -> Path:
    """A run folder with config.yaml and an empty model.safetensors."""
    write_program(tmp_path)
    run = tmp_path / "a run"
    (run / ".hydra").mkdir(parents=True)
    (run / "config.yaml").write_text(settings)
    (run / "model.safetensors").touch()
    (run / "mark" / "mark").mkdir(parents=True)
    (run / "mark" / "hydra" / "launcher").mkdir(parents=True)
    call = f"file: {tmp_path / 'MARK'}\nmode: w\n"
    (run / "mark" / "mark" / "call.yaml").write_text(f"_target_: builtins.open\n{call}")
    (run / "mark" / "mark" / "factory.yaml").write_text(f"(): builtins.open\n{call}")
    (run / "mark" / "hydra" / "launcher" / "mark.yaml").write_text(f"_target_: builtins.open\n{call}")
    return run


def composed(run: Path, *arguments: str) -> Config:
    (config,) = composed_jobs(f"evaluate='{run}'", *arguments)
    return config


def evaluated(run: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "program.py", f"evaluate='{run.name}'", *arguments],
        cwd=run.parent,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**os.environ, "SECRET": "s3cret"},
    )


def payload(run: Path, *names: str) -> None:
    lines = [
        line.replace("@MARK@", str(run.parent / "MARK")).replace("@RUN@", str(run))
        for n in names
        for line in PAYLOADS[n]
    ]
    (run / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(lines))


def assert_harmless(run: Path, *arguments: str) -> None:
    before = sorted(run.parent.rglob("*"))
    done = evaluated(run, *arguments)
    assert not (run.parent / "MARK").exists(), "code named in a run folder was executed"
    assert (done.returncode, done.stdout) == (0, f"ran 4 lr 0.5 root here evaluate {run.name}\n"), done.stderr
    assert sorted(run.parent.rglob("*")) == before


def test_a_callback_recorded_in_a_run_folder_is_not_executed(stored: Path) -> None:
    payload(stored, "callback")
    assert_harmless(stored)


def test_recorded_overrides_are_not_read_at_all(stored: Path) -> None:
    payload(stored, *PAYLOADS)
    assert_harmless(stored)


@pytest.mark.slow
@pytest.mark.parametrize("name", PAYLOADS)
def test_no_recorded_override_has_an_effect(stored: Path, name: str) -> None:
    payload(stored, name)
    assert_harmless(stored)


def test_the_stored_settings_are_plain_text(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s3cret")
    file = stored / "config.yaml"
    file.write_text(file.read_text().replace("root: here", "root: ${oc.env:SECRET}"))
    assert composed(stored).data.root == "${oc.env:SECRET}"
    # Arguments of the current command may contain interpolations.
    assert composed(stored, "data.root=${oc.env:SECRET}").data.root == "s3cret"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hydra: {callbacks: {a: {_target_: builtins.open}}}", "it has the setting hydra,"),
        ("_target_: builtins.open", "it has the setting _target_,"),
        ("defaults: [/hydra/launcher: mark]", "it has the setting defaults,"),
        ("seed: !!python/object/apply:os.getpid []", "it is not valid YAML"),
        ("optim: {_target_: builtins.open}", "it has the setting optim._target_,"),
    ],
)
def test_a_stored_key_that_is_no_setting_is_refused(stored: Path, text: str, said: str) -> None:
    file = stored / "config.yaml"
    settings = yaml.safe_load(file.read_text())
    settings.pop(text.partition(":")[0], None)
    file.write_text(f"{yaml.safe_dump(settings)}{text}\n")
    with pytest.raises(UserError) as caught:
        composed(stored)
    assert str(file) in str(caught.value)
    assert said in str(caught.value)


def test_arguments_given_now_change_the_stored_settings(stored: Path) -> None:
    kept = composed(stored)
    assert (kept.data.root, kept.optim.lr, kept.evaluate) == ("here", 0.5, str(stored))
    assert composed(stored, "data.root='/else where'", "+trainer.limit_eval_batches=2").data.root == "/else where"
    assert composed(stored, "++trainer.precision=bf16").trainer.precision == "bf16"
    deleted = composed(stored, "~optim.weight_decay").optim.weight_decay
    assert deleted == OptimConfig.model_fields["weight_decay"].default
    other = composed(stored, "data=folder", "data.root=DIR")
    assert (other.data.name, other.data.root, other.optim.lr) == ("folder", "DIR", 0.5)


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("data.rot=x", "Did you mean 'root'?"),
        ("+data.rot=x", "Did you mean 'root'?"),
        ("data.root.x=1", "data.root.x=1: there is no such setting"),
        ("optim.lr=abc", "optim.lr must be"),
        ("data=cifar1000", "Did you mean 'cifar100'?"),
        ("recipe=none", "recipe=none: an evaluation uses the settings of the run"),
        ("+data@tasks.a=pets", "an evaluation uses the settings of the run"),
        ("hydra.run.dir=x", "hydra.run.dir=x: an evaluation does not use Hydra"),
        ("hydra/launcher=basic", "hydra/launcher=basic: an evaluation"),
        ("+hydra.callbacks.a=1", "an evaluation does not use Hydra"),
    ],
)
def test_mistaken_arguments_are_refused(stored: Path, argument: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        composed(stored, argument)
    assert said in str(caught.value)


def test_a_configuration_file_cannot_ask_for_an_evaluation(stored: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mine.yaml").write_text(f"defaults: [train, _self_]\nevaluate: {stored}\n")
    with pytest.raises(UserError, match="is only allowed on the command line"):
        configurations(CONF, "mine", [], sweep=False, search=str(tmp_path / "mine"))


@pytest.mark.slow
def test_its_configuration_can_be_shown_and_several_runs_swept_over(stored: Path) -> None:
    done = evaluated(stored, "data.root=elsewhere", "--cfg", "job")
    assert (done.returncode, yaml.safe_load(done.stdout)["data"]["root"]) == (0, "elsewhere"), done.stderr
    done = evaluated(stored, "optim.lr=1,2", "-m")
    assert done.returncode == 0, done.stderr
    assert "ran 4 lr 1.0 root here evaluate a run\n" in done.stdout
    assert "ran 4 lr 2.0 root here evaluate a run\n" in done.stdout


@pytest.mark.parametrize("argument", ["checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay"])
def test_a_run_folder_names_no_file_for_timm_to_load(argument: str) -> None:
    from efficient_ft.models.factory import random_model

    config = ModelConfig(name="vit_digits", pretrained=False, kwargs={argument: "notes.bin"})
    with pytest.raises(UserError, match=rf"^model\.kwargs\.{argument} must be unset, got notes\.bin\."):
        random_model(config, 10)
