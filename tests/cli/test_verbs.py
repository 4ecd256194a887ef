"""Tests of ``efficient-ft train|evaluate|cost``: they accept the same settings as a command line without a command."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from efficient_ft.cli.hydra.verbs import VERBS, as_settings
from efficient_ft.core.errors import UserError
from tests.cli.program import call


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("method=full", "method=full"),
        ("train", ""),
        ("train -m method=full,head", "-m method=full,head"),
        ("cost", "cost_only=true"),
        ("cost -m method=full,head --config-dir a=b", "-m cost_only=true method=full,head --config-dir a=b"),
        ("cost --cfg job method=full", "--cfg job cost_only=true method=full"),
        ("evaluate RUN", "evaluate='RUN'"),
        ("evaluate RUN data=folder data.root=DIR", "evaluate='RUN' data=folder data.root=DIR"),
        ("evaluate -m A/1,B/2 data.root=DIR", "-m evaluate='A/1','B/2' data.root=DIR"),
        ("evaluate it's", "evaluate='it\\'s'"),
        ("evaluate RUN -m data.batch_size=8,16", "-m evaluate='RUN' data.batch_size=8,16"),
    ],
)
def test_a_command_becomes_settings(words: str, expected: str) -> None:
    assert as_settings(words.split()) == expected.split()


@pytest.mark.parametrize("folder", [r"q/a\b", "q/a\\", r"q/it\'s"])
def test_a_backslash_in_the_name_of_a_run_is_kept(folder: str) -> None:
    (setting,) = as_settings(["evaluate", folder])
    assert OverridesParser.create().parse_override(setting).value() == folder


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("evaluate data.root=DIR", "The run folder must come first"),
        ("evaluate -m", "The run folder must come first"),
        ("evaluate RUN evaluate=OTHER", "evaluate=OTHER: the command efficient-ft evaluate sets this setting"),
        ("cost cost_only=false", "cost_only=false: the command efficient-ft cost sets this setting"),
        ("cost ++evaluate=RUN", "++evaluate=RUN: the command efficient-ft cost sets this setting"),
    ],
)
def test_mistakes_of_a_command(words: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        as_settings(words.split())
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize("verb", ["evaluate", "cost"])
def test_the_help_of_a_command(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        as_settings([verb, "--help"])
    assert not left.value.code
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: efficient-ft {verb} ")


@pytest.mark.slow
def test_the_program_runs_the_commands(program: Path) -> None:
    for words, said in (
        (["train", "hydra.run.dir=a run"], "ran 4 lr 0.002 "),
        (["evaluate", "a run", "optim.lr=0.25"], "ran 4 lr 0.25 root ./data evaluate a run"),
        (["cost", "-m", "method.lbp_wht.order=2,3"], "ran 3 lr 0.002 root ./data evaluate None"),
    ):
        done = call(program, *words)
        assert done.returncode == 0, done.stderr
        assert said in done.stdout
    refused = call(program, "evaluate", "nowhere")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "nowhere: the folder does not exist. Pass the run folder printed when training ended.\n"
    assert call(program, "evaluate").stdout.startswith("Usage: efficient-ft evaluate RUN")


def test_help_lists_every_command_in_one_line(program: Path) -> None:
    from efficient_ft.cli.commands import COMMANDS

    shown = call(program, "--help").stdout
    listed = shown[shown.index("== Commands") : shown.index("== Groups")].strip().splitlines()[1:]
    assert sorted(line.split()[0] for line in listed) == sorted([*VERBS, *COMMANDS])
    assert "evaluate=" not in shown
    assert "cost_only=" not in shown
