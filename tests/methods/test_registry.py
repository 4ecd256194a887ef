"""Tests of the registry: built-in methods, methods of other packages, and packages that violate the contract."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import efficient_ft.methods
from efficient_ft.core.errors import UserError
from efficient_ft.methods import METHODS, Method, registry
from efficient_ft.testing import model_of

REPOSITORY = Path(__file__).resolve().parents[2]

GOOD = """
    from efficient_ft.methods import Applied, Axis, Method

    class Nothing(Method):
        name = "nothing"
        axis = Axis.MEMORY

        def __init__(self, n: int = 1) -> None:
            self.n = n

        def _apply(self, model, view):
            return Applied(self.name, view.blocks)

        def _remove(self, model):
            pass
"""


def distribution(folder: Path, source: str, entry: str = "nothing = foreign:Nothing") -> None:
    """Install a distribution `foreign-methods` with the module `foreign` in a folder."""
    (folder / "foreign.py").write_text(textwrap.dedent(source))
    information = folder / "foreign_methods-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign-methods\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[efficient_ft.methods]\n{entry}\n")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> registry.Registry:
    """Create a registry that has read no entry points yet and finds the distributions in `tmp_path`."""
    known = dict(METHODS)
    monkeypatch.setattr(registry, "_registered", known)
    monkeypatch.setattr(registry, "_untried", set())
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "foreign", raising=False)
    return registry.Registry()


# ------------------------------------------------------------------------------------------------ built-in methods
def test_names_are_those_of_the_classes() -> None:
    assert list(METHODS) == sorted(METHODS)
    for name, method in METHODS.items():
        assert method.name == name
        assert getattr(efficient_ft.methods, method.__name__) is method
        assert METHODS.distribution(name) == "efficient-ft"
    assert "LBPWHT" in dir(efficient_ft.methods)
    with pytest.raises(ImportError, match="NoSuchMethod"):
        from efficient_ft.methods import NoSuchMethod  # noqa: F401


# ------------------------------------------------------------------------------------------------ other packages
def test_a_package_adds_a_method(fresh: registry.Registry, tmp_path: Path) -> None:
    distribution(tmp_path, GOOD)
    assert fresh["nothing"].__module__ == "foreign"
    assert fresh.distribution("nothing") == "foreign-methods"
    assert set(fresh) == {*METHODS, "nothing"}


def test_a_decorated_method_of_a_package_has_its_distributions_name(fresh: registry.Registry, tmp_path: Path) -> None:
    source = GOOD.replace("Applied, Axis, Method", "Applied, Axis, Method, register")
    distribution(tmp_path, source.replace("    class Nothing", "    @register\n    class Nothing"))
    assert fresh.distribution("nothing") == "foreign-methods"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("    from efficient_ft", "    import no_such_module\n    from efficient_ft"), "cannot be imported"),
        (("class Nothing(Method)", "class Nothing"), "is not a subclass of"),
        (('axis = Axis.MEMORY', "pass"), "`axis` must be one of selection, adapters, .* got None"),
        (('axis = Axis.MEMORY', 'axis = "memmory"'), "`axis` must be one of .* got 'memmory'"),
        (('name = "nothing"', 'name = "Nothing!"'), "two names must be the same"),
        (("def _remove", "def _restore"), "does not implement `_remove`"),
        (("self.n = n", "self.m = n"), "does not store the setting `n`"),
        (("self.n = n", "raise ValueError(n)"), "the constructor fails with the default settings: ValueError: 1"),
        (("n: int = 1", "**settings"), r"must name each setting, got the parameter \*\*settings"),
        (("axis =", 'conflicts = ("lora",); axis ='), r"`conflicts` must be a mapping from axes, .* got \('lora',\)"),
        (("axis =", 'conflicts = {"lora": 1}; axis ='), "`conflicts` must be a mapping from .* to sentences, got"),
        (("axis =", 'conflicts = {"lorra": "x"}; axis ='), r"`conflicts` must .* got 'lorra' \(similar to 'lora'\)"),
        (("axis =", 'conflicts = {"memmory": "x"}; axis ='), r"`conflicts` must .* 'memmory' \(similar to 'memory'\)"),
        (("self.n = n", "self.n = n; self.conflicts = None"), "`conflicts` must be a mapping from .* got None"),
        (("axis =", "hints = None; axis ="), "`hints` must be a mapping from values of Needs to sentences, got None"),
        (("axis =", 'hints = {"block": "x"}; axis ='), "the keys of `hints` must be values of Needs, got 'block'"),
        (("view)", "v, w)"), r"`_apply` must take \(self, model, view\), got \(self, model, v, w\)"),
        (("_remove(self, model)", "_remove(self)"), r"`_remove` must take \(self, model\), got \(self\)"),
        (("axis =", "step_end = None; axis ="), r"`step_end` must take \(self\), got None"),
        (("axis =", "step_begin = lambda self: None; axis ="), r"`step_begin` must take \(self, step\), got \(self\)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_package_that_breaks_the_contract_is_refused_by_name(
    fresh: registry.Registry, tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    assert change[0] in GOOD
    distribution(tmp_path, GOOD.replace(*change))
    for _ in range(2):  # The error is raised again on the second access.
        with pytest.raises(UserError, match=f"^Package foreign-methods: .*{message}"):
            list(fresh)


def test_conflicts_may_name_methods_that_are_not_installed(fresh: registry.Registry, tmp_path: Path) -> None:
    distribution(tmp_path, GOOD.replace("axis =", 'conflicts = {"lora": "x", "dora": "y", "tokens": "z"}; axis ='))
    assert fresh["nothing"].conflicts["dora"] == "y"


def test_hooks_may_be_static_and_take_more_than_they_must(fresh: registry.Registry, tmp_path: Path) -> None:
    source = GOOD.replace("def _remove(self, model)", "@staticmethod\n        def _remove(model, quiet=True)")
    distribution(tmp_path, source.replace("_apply(self, model, view)", "_apply(self, *parts)"))
    assert fresh["nothing"].distribution == "foreign-methods"


def test_a_method_without_settings_needs_no_constructor(fresh: registry.Registry, tmp_path: Path) -> None:
    distribution(tmp_path, GOOD.replace("def __init__(self, n: int = 1)", "def other(self, n)"))
    method = fresh["nothing"]()
    method.apply(model_of("vit"))
    assert (method.settings(), method.state_key, repr(method)) == ({}, "nothing[]", "Nothing()")


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("None", "must return an Applied object, got None"),
        ('Applied("other", view.blocks)', "must report the method's own name, got 'other'"),
        ('Applied(self.name, ("no.such",))', "list only parts of the model in Applied.touched, got 'no.such'"),
        ('Applied(self.name, view.blocks, modules=("x",))', "list only parts of the model in Applied.modules, got 'x'"),
        ('Applied(self.name, view.blocks, routed=("x",))', "list only parts of the model in Applied.routed, got 'x'"),
    ],
)
def test_a_report_that_breaks_the_contract_is_refused_by_name(
    fresh: registry.Registry, tmp_path: Path, returned: str, message: str
) -> None:
    distribution(tmp_path, GOOD.replace("Applied(self.name, view.blocks)", returned))
    with pytest.raises(UserError, match=f"^Package foreign-methods: `_apply` of method nothing .*{message}"):
        fresh["nothing"]().apply(model_of("vit"))


def test_a_report_of_our_own_that_breaks_the_contract_is_a_mistake_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(METHODS["full"], "_apply", lambda self, model, view: None)
    with pytest.raises(AssertionError, match=r"Full\._apply must return an Applied object, got None"):
        METHODS["full"]().apply(model_of("vit"))


def test_a_name_that_exists_is_refused(fresh: registry.Registry, tmp_path: Path) -> None:
    distribution(tmp_path, GOOD.replace('"nothing"', '"mesa"'), "mesa = foreign:Nothing")
    taken = r"foreign.Nothing has the name 'mesa', .* efficient_ft.methods.memory.mesa.Mesa \(efficient-ft\)"
    with pytest.raises(UserError, match=f"^Package foreign-methods: {taken}"):
        list(fresh)
    from efficient_ft.methods import Mesa

    assert Mesa.name == "mesa", "this package's own methods need no other package"


@pytest.mark.parametrize("name", ["tokens", "loss", "Every", "", "a-b"])
def test_names_that_cannot_be_are_refused(name: str) -> None:
    class Odd(METHODS["full"]):  # type: ignore[misc]
        pass

    Odd.name = name
    with pytest.raises(UserError, match="`name` must"):
        registry.register(Odd)
    assert issubclass(Odd, Method)


# ------------------------------------------------------------------------------------------------ example package
@pytest.mark.slow
def test_the_out_of_tree_example_passes_its_tests(tmp_path: Path) -> None:
    example = REPOSITORY / "examples" / "out_of_tree_method"
    information = tmp_path / "every_nth_method-0.1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: every-nth-method\nVersion: 0.1.0\n")
    (information / "entry_points.txt").write_text(
        "[efficient_ft.methods]\nevery_nth = every_nth_method.method:EveryNth\n"
        "sampled_rows = every_nth_method.sampled_rows:SampledRows\n"
    )
    path = os.pathsep.join(map(str, (tmp_path, example / "src", REPOSITORY)))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=example,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    passed = done.stdout.strip().splitlines()[-1]
    assert "passed" in passed
    assert int(passed.split()[0]) > 25, passed
