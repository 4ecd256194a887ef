"""Tests of Hydra's flags that exclude each other or require another flag."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra._internal.utils import get_args_parser

from efficient_ft.cli.hydra.settings import check_flags
from efficient_ft.core.errors import UserError
from tests.cli.program import call


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cfg", "job", "--info"], r"^The flags --cfg and --info cannot be combined\. Use only one flag\.$"),
        (["--shell-completion", "--run"], r"^The flags --run and --shell-completion cannot be combined"),
        (["-m", "--info", "plugins"], r"^The flags --multirun and --info cannot be combined"),
        (["-m", "--cfg", "job"], r"^--cfg prints the configuration of one run"),
        (["--cfg", "hydra", "--resolve"], r"^--cfg hydra cannot be resolved, .* --cfg all --resolve\.$"),
        (["--resolve"], r"^--resolve requires --cfg job"),
        (["--package", "model", "seed=1"], r"^--package requires --cfg job"),
        (["--experimental-rerun", "x"], r"^--experimental-rerun is not supported"),
        (["--shell-completion"], r"^--shell-completion requires install=bash or install=fish or install=zsh\. Example"),
        (["--shell-completion", "install=csh"], r"^--shell-completion requires install=bash"),
        (["--shell-completion", "install=bash", "seed=1"], r"^--shell-completion requires install=bash"),
        (
            ["--shell-completion", "query=zsh"],
            r"query=zsh is only for the shell\. Use --shell-completion install=zsh$",
        ),
    ],
)
def test_flags_that_hydra_refuses_with_a_traceback(words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_flags(get_args_parser().parse_args(words))


def test_flags_are_checked_before_anything_else(program: Path) -> None:
    done = call(program, "--cfg", "job", "--info", "all")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "The flags --cfg and --info cannot be combined. Use only one flag.\n"


@pytest.mark.slow
def test_help_is_shown_whatever_the_settings_are(program: Path) -> None:
    for flag in ("--help", "--hydra-help"):
        done = call(program, "optim.nope=1", "model=nope", flag)
        assert (done.returncode, done.stderr) == (0, "")


def test_an_entry_that_the_configuration_lacks(program: Path) -> None:
    done = call(program, "--cfg", "job", "--package", "optmi")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("--package optmi: the entry does not exist or is null. Choose one of the groups")


@pytest.mark.slow
def test_help_equals_the_text_of_hydra(program: Path) -> None:
    """The help is written without composing the configuration, which would take most of the time."""
    own, of_hydra = (call(program, "--help", *more).stdout for more in ((), ("--config-name", "train")))
    assert own == of_hydra
    assert "lbp_wht" in own
