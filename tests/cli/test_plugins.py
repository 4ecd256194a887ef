"""Methods of other packages: their YAML is an option of `method`; a package that breaks the rules is named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from efficient_ft.cli import plugins
from efficient_ft.cli.groups import CONF
from efficient_ft.core.errors import UserError
from tests.cli.program import composed


def package(folder: Path, name: str, method: str, files: dict[str, str]) -> None:
    """An installed distribution `name` with a method of that name, and `files` in its conf folder.

    The module raises: nothing may import it.
    """
    module = name.replace("-", "_")
    (folder / module).mkdir(parents=True)
    (folder / module / "__init__.py").write_text("raise AssertionError('imported')")
    for file, text in files.items():
        (folder / module / "conf" / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / module / "conf" / file).write_text(text)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[efficient_ft.methods]\n{method} = {module}.method:Method\n")


YAML = "# @package method.every_nth\n# Every n-th layer.\nn: 3\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith(("every_nth_method", "second_method"))]:
        del sys.modules[name]
    monkeypatch.undo()
    plugins.register(CONF)


def test_its_options_compose_like_our_own(site: Path) -> None:
    package(site, "every-nth-method", "every_nth", {"method/every_nth.yaml": YAML})
    (config,) = composed("method=[every_nth,lora]", "method.every_nth.n=5")
    assert config.method["every_nth"] == {"n": 5}
    with pytest.raises(UserError, match=r"Did you mean 'every_nth'\?"):
        composed("method=every_nthh")
    with pytest.raises(UserError, match=r"Did you mean 'n'\?"):
        composed("method=every_nth", "method.every_nth.nn=5")


def test_the_registry_reads_the_same_entry_points() -> None:
    from efficient_ft.methods import registry

    assert plugins.GROUP == registry.GROUP


def test_without_them_nothing_is_added() -> None:
    plugins.register(CONF)
    assert plugins.folders() == {}


@pytest.mark.parametrize(
    ("method", "files", "said"),
    [
        ("every_nth", {}, "its method every_nth has no settings file.*every_nth_method/conf/method/every_nth.yaml"),
        (
            "lora",
            {"method/lora.yaml": "# @package method.lora\n"},
            "its option method/lora exists already in efficient-ft",
        ),
        ("every_nth", {"method/every_nth.yaml": "n: 3\n"}, "must begin with the line '# @package method.every_nth'"),
        (
            "every_nth",
            {"method/every_nth.yaml": YAML, "optim/adamw.yaml": "lr: 3\n"},
            "its option optim/adamw exists already in efficient-ft",
        ),
    ],
)
def test_a_package_that_breaks_the_rules_is_refused_by_name(
    site: Path, method: str, files: dict[str, str], said: str
) -> None:
    package(site, "every-nth-method", method, files)
    with pytest.raises(UserError, match=rf"^Package every-nth-method: .*{said}"):
        plugins.register(CONF)


def test_two_packages_with_one_name(site: Path) -> None:
    package(site, "every-nth-method", "every_nth", {"method/every_nth.yaml": YAML})
    package(site, "second-method", "every_nth", {"method/every_nth.yaml": YAML})
    with pytest.raises(UserError, match=r"^Package second-method: .* exists already in every-nth-method"):
        plugins.register(CONF)


def test_a_package_that_is_gone(site: Path) -> None:
    package(site, "every-nth-method", "every_nth", {"method/every_nth.yaml": YAML})
    (site / "every_nth_method").rename(site / "elsewhere")
    with pytest.raises(UserError, match="not in an importable package"):
        plugins.register(CONF)
