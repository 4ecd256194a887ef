"""Tests of the claims of the papers: verdicts, commands and references in ``scripts/docsgen/claims.yaml``."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from efficient_ft.cli.commands import COMMANDS, bench
from efficient_ft.papers.published import PAPERS, figures, published_table
from tests.conftest import REPOSITORY


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the module that generates the tables of claims."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    from docsgen import claims

    return claims


def test_every_claim_names_its_paper_its_location_and_an_allowed_verdict(generator: Any) -> None:
    claims = generator.all_claims()
    assert {claim["paper"] for claim in claims} == set(PAPERS)
    for claim in claims:
        assert claim.keys() <= {"paper", "claim", "where", "command", "result", "verdict", "because"}, claim
        assert claim["verdict"] in generator.VERDICTS, claim
        assert claim["claim"].endswith("."), claim
        assert claim["where"], claim


def test_a_tested_claim_has_a_command_and_a_result_from_the_records(generator: Any) -> None:
    for claim in generator.all_claims():
        if claim["verdict"] == "not tested":
            assert claim["because"], claim
        else:
            assert generator.commands(claim), claim
            assert "{" in claim["result"], claim


def test_the_commands_of_claims_exist(generator: Any) -> None:
    drawn = {figure.name for figure in figures() if figure.command}
    for command in (command for claim in generator.all_claims() for command in generator.commands(claim)):
        program, subcommand, what = shlex.split(command)[:3]
        assert program == "efficient-ft", command
        assert subcommand in COMMANDS, command
        if subcommand == "table":
            assert published_table(what).rows, command
        elif subcommand == "study":
            assert (REPOSITORY / what / "records.json").is_file(), command
        elif subcommand == "figure":
            assert what in drawn, command
        else:
            assert f"efficient-ft bench {what}" in bench.DESCRIPTION, command


def test_references_are_replaced_with_values_of_the_records(generator: Any) -> None:
    from docsgen import studies

    study = "deit_tiny_caltech101"
    full, one = studies.point(study, "full"), studies.point(study, "full+lp8")
    assert full["seeds"] == 3
    assert one["seeds"] == 1
    both = f"`full` {full['accuracy']:.1f} % (3 seeds), `full+lp8` {one['accuracy']:.1f} % (one seed)"
    assert generator.resolved(f"At 112 px: {{study-rows {study} full full+lp8}}.") == f"At 112 px: {both}."
    assert generator.resolved(f"{{study-rows {study} full}}") == f"`full` {full['accuracy']:.1f} % (3 seeds)"
    assert generator.resolved(f"{{study-seed {study} 0 full+lp8}}") == f"`full+lp8` {one['accuracy']:.1f} % (seed 0)"
    assert generator.resolved("no reference") == "no reference"
    with pytest.raises(ValueError, match="accuracyy is not a value"):
        generator.resolved("{accuracyy full}")


def test_the_verdicts_are_counted(generator: Any) -> None:
    *_, last = generator.claim_verdicts().splitlines()
    every, *counts = [int(cell) for cell in last.strip("| ").split(" | ")[1:]]
    assert every == len(generator.all_claims()) == sum(counts)
