"""Tests of methods of other packages: their YAML is an option of `method`, and errors name the package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from efficient_ft.bench.recipes import parse_recipe
from efficient_ft.cli.hydra import plugins
from efficient_ft.cli.hydra.groups import CONF
from efficient_ft.core.errors import UserError
from efficient_ft.methods import METHODS, Applied, Axis, Method, build
from tests.cli.program import composed


def package(folder: Path, name: str, method: str, files: dict[str, str]) -> None:
    """Write an installed distribution `name` with the method `method` and `files` in its conf folder.

    The module raises an error when it is imported.
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


class EveryNth(Method):
    """The method of the test distribution."""

    name, axis = "every_nth", Axis.MEMORY

    def __init__(self, n: int = 3) -> None:
        self.n = n

    def _apply(self, model: Any, view: Any) -> Applied:
        raise AssertionError("made, not applied")

    def _remove(self, model: Any) -> None:
        raise AssertionError("made, not applied")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"every_nth": YAML + "m: 1\n"}, r"every_nth\.yaml has unknown keys: m\. .* of method every_nth: n\."),
        ({"every_nth": YAML.replace("n: 3", "")}, r"every_nth\.yaml lacks keys: n\. .* of method every_nth: n\."),
        (
            {"every_nth": YAML, "every_fifth": YAML.replace("n:", "m:")},
            r"every_fifth\.yaml has unknown keys: m\. .* constructor of method every_nth: n\.",
        ),
        (
            {"every_nth": YAML, "lora_big": "# @package method.lora\nrnk: 64\n"},
            r"lora_big\.yaml has unknown keys: rnk\. .* lora: ",
        ),
    ],
    ids=["extra", "missing", "variant", "variant of ours"],
)
def test_a_yaml_that_does_not_fit_the_constructor_is_refused_by_name(
    site: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], said: str
) -> None:
    monkeypatch.setattr(build, "METHODS", {**METHODS, "every_nth": EveryNth})
    package(site, "every-nth-method", "every_nth", {f"method/{name}.yaml": text for name, text in files.items()})
    with pytest.raises(UserError, match=rf"^Package every-nth-method: .*{said}"):
        build.build_methods(composed(f"method={list(files)[-1]}")[0])
    build.build_methods(composed("method=full")[0])  # files of unused methods are not read


def test_a_yaml_may_have_a_default_selection_or_build_on_another(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "METHODS", {**METHODS, "every_nth": EveryNth})
    files = {
        "method/every_nth.yaml": f"{YAML}select: ${{model.select}}\n",
        "method/every_fifth.yaml": "# @package method.every_nth\ndefaults: [every_nth]\n",
    }
    package(site, "every-nth-method", "every_nth", files)
    _, every_fifth = build.build_methods(composed("method=every_fifth", "method.every_nth.n=5")[0])
    assert every_fifth.settings() == {"n": 5}


def test_a_recipe_to_be_measured_knows_their_variants(site: Path) -> None:
    files = {"method/every_nth.yaml": YAML, "method/every_fifth.yaml": YAML.replace("n: 3", "n: 5")}
    package(site, "every-nth-method", "every_nth", files)
    recipe = parse_recipe("every_fifth:n=7+lora:rank=2", CONF)
    assert recipe.overrides == ("method=[every_fifth,lora]", "method.every_nth.n=7", "method.lora.rank=2")
    assert composed(*recipe.overrides)[0].method["every_nth"] == {"n": 7}


def test_without_them_nothing_is_added() -> None:
    plugins.register(CONF)
    assert plugins.folders() == {}


@pytest.mark.parametrize(
    ("method", "files", "said"),
    [
        ("every_nth", {}, "the method every_nth has no settings file.*every_nth_method/conf/method/every_nth.yaml"),
        (
            "lora",
            {"method/lora.yaml": "# @package method.lora\n"},
            "the option method/lora already exists in efficient-ft",
        ),
        ("every_nth", {"method/every_nth.yaml": "n: 3\n"}, "must begin with the line '# @package method.every_nth'"),
        (
            "every_nth",
            {"method/every_nth.yaml": YAML, "optim/adamw.yaml": "lr: 3\n"},
            "the option optim/adamw already exists in efficient-ft",
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
    with pytest.raises(UserError, match=r"^Package second-method: .* already exists in every-nth-method"):
        plugins.register(CONF)


def test_a_package_that_is_gone(site: Path) -> None:
    package(site, "every-nth-method", "every_nth", {"method/every_nth.yaml": YAML})
    (site / "every_nth_method").rename(site / "elsewhere")
    with pytest.raises(UserError, match="not in a package that can be imported"):
        plugins.register(CONF)
