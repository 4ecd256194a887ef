"""Tests of the commit-msg hook, which requires short imperative subjects."""

from __future__ import annotations

import runpy

import pytest

from tests.conftest import REPOSITORY

mistakes = runpy.run_path(str(REPOSITORY / "scripts" / "commit_message.py"))["mistakes"]


@pytest.mark.parametrize(
    "subject",
    ["Add a hook", "Process images once", "Address a race", "Merge branch 'main' of a repository with a long name" * 3],
)
def test_a_short_imperative_subject_is_accepted(subject: str) -> None:
    assert mistakes(f"# comment\n{subject}\n\nThe reason, as long as it needs to be." + "x" * 100) == []


@pytest.mark.parametrize(
    ("subject", "said"), [("Added a hook", "imperative"), ("Adds it", "imperative"), ("Add " + "x" * 69, "got 73")]
)
def test_other_subjects_are_rejected(subject: str, said: str) -> None:
    (found,) = mistakes(subject)
    assert said in found
