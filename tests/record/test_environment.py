"""Tests of the description of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from efficient_ft.record.environment import cpu_name

CORE = "processor : 0\nvendor_id : AuthenticAMD\ncpu family : 26\nmodel : 2\nmodel name : {name}\n"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("AMD EPYC", "AMD EPYC (family 26, model 2)"),
        ("Intel(R) Xeon(R) CPU @ 2.20GHz", "Intel(R) Xeon(R) CPU @ 2.20GHz (family 26, model 2)"),
        ("AMD EPYC 9655 96-Core Processor", "AMD EPYC 9655 96-Core Processor"),
    ],
)
def test_a_name_without_a_number_is_followed_by_the_family_and_the_model(
    monkeypatch: pytest.MonkeyPatch, name: str, shown: str
) -> None:
    cores = "\n".join(CORE.format(name=one) for one in (name, "the second core"))
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: cores)
    assert cpu_name() == shown


def test_a_machine_without_model_names_is_named_by_its_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "processor : 0\nBogoMIPS : 50.00\n")
    assert cpu_name()
