"""Tests of the permitted versions of dependencies in pyproject.toml against published advisories."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]

#: For each package: the last version that an advisory names, and the advisory.
ADVISORIES = {
    "torch": ("2.9.1", "CVE-2026-24747: memory corruption in torch.load(weights_only=True)"),
    "transformers": ("5.9.0", "CVE-2026-4372, CVE-2026-5241: code of config.json; CVE-2026-9856: paths in templates"),
    "lightning": ("2.6.5", "CVE-2026-58659: code of a checkpoint; 2.6.2 and 2.6.3 were compromised"),
    "hydra-core": ("1.3.6", "CVE-2026-68508, CVE-2026-106439: calls what a configuration names"),
    "pillow": ("12.3.0", "CVE-2026-112403: heap overflow in the JPEG decoder; CVE-2026-59199"),
    "pillow-heif": ("1.6.0", "CVE-2026-84383: heap overflow in the HEIF decoder; CVE-2026-28231"),
    "filelock": ("3.20.2", "CVE-2025-68146, CVE-2026-22701: truncates the target of a link"),
    "accelerate": ("1.14.0", "CVE-2026-69112: paths in the index of a checkpoint"),
    "tqdm": ("4.66.2", "CVE-2024-34062: runs code of its command line"),
    "wandb": ("0.27.2", "CVE-2026-39821: in its program wandb-core"),
    "pytest": ("9.0.2", "CVE-2025-71176: predictable temporary folder"),
    "setuptools": ("78.1.0", "CVE-2025-47273: path of a download"),
}


def _requirements() -> list[Requirement]:
    read = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = read["project"]
    texts = [*read["build-system"]["requires"], *project["dependencies"]]
    texts += [text for extra in project["optional-dependencies"].values() for text in extra]
    return [Requirement(text) for text in texts]


@pytest.mark.parametrize("name", ADVISORIES)
def test_versions_with_an_advisory_are_excluded(name: str) -> None:
    found = [one for one in _requirements() if canonicalize_name(one.name) == name]
    assert found
    for one in found:
        assert ADVISORIES[name][0] not in one.specifier, f"{one}: {ADVISORIES[name][1]}"


def test_transformers_of_the_first_months_is_excluded() -> None:
    for one in _requirements():
        if one.name == "transformers":
            assert not [v for v in ("5.0.0", "5.1.0", "5.2.0", "5.2.5") if v in one.specifier], one


def _pins() -> dict[str, str]:
    """Return the version of each package in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = [match for line in lines if (match := re.fullmatch(r"([\w-]+)==(\S+)", line))]
    return {canonicalize_name(match[1]): match[2] for match in found}


def test_the_constraints_are_within_the_requirements() -> None:
    pins = _pins()
    for one in _requirements():
        if (name := canonicalize_name(one.name)) in pins:
            assert pins[name] in one.specifier, f"{one}, and constraints.txt has {pins[name]}"


def test_the_constraints_contain_every_requirement_of_the_development_environment() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    todo, needed = [*project["dependencies"], *extras["dev"]], set()
    while todo:
        one = Requirement(todo.pop())
        if one.name == project["name"]:
            todo += [text for extra in one.extras for text in extras[extra]]
        else:
            needed.add(canonicalize_name(one.name))
    assert sorted(needed - {*_pins()}) == []
