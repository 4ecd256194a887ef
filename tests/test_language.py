"""The house language: words that stop a reader, spelling of names, how docstrings begin, and that there are any.

Checked are the comments, strings and names of the Python files, and the text of the pages and configuration files.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import pkgutil
import re
import sys
import tokenize
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType

import pytest

import efficient_ft

REPOSITORY = Path(__file__).resolve().parent.parent

#: Words and phrases to avoid, as regular expressions, and what to write instead.
AVOIDED = {
    r"beside": "next to, with, in addition to",
    r"lies?": "is, is stored, is located",
    r"told": "given, reported, recorded",
    r"anew": "again, new, newly initialized",
    r"whatever|whoever|whomever": "any, every, regardless of",
    r"aside": "apart, suspended, except for",
    r"among(?:st)?": "of, in, between",
    r"so many": "N, a number of",
    r"a moment's": "of that time",
    r"(?:said|says|say) loudly": "logged, warned",
    r"by (?:itself|themselves)": "alone, automatically",
    r"drawn out": "extrapolated, extended",
    r"laid(?! out)": "placed, composited, stored",
    r"meets? alike": "affects equally",
    r"allowed (?:is|are)": "<setting> must be <constraint>, got <value>.",
    r"felt": "process memory",
    r"mends?|mended": "fix",
    r"all the same": "still",
    r"as (?:it comes|they come)": "unmodified",
    r"at hand": "available",
    r"gets? on with": "is compatible with",
    r"another [a-z]+ than": "a X different from",
    r"also (?:if|where)": "even if",
    r"an? [a-z]+ of (?:its|their|our|your) own": "its own X, a separate X",
    r"nothing of": "none of, no part of",
    r"(?:is|are) said": "is reported",
    r"says? so": "states it, reports it",
    r"as the authors": "like the authors",
    r"searched for in": "searched over, selected from",
    r"asked for": "requested",
    r"(?:is|are) to be": "must be",
    r"in place of": "instead of",
    r"go(?:es)? on": "continues",
    r"once more": "again",
    r"stands? for": "means",
    r"(?<!there )(?:is|are|was|were) no (?!longer|more|less)": "is not a",
}

#: (path, phrase): places where an avoided word is right. "*" is every file.
ALLOWED: list[tuple[str, str]] = [
    # quoted there as what not to write
    ("docs/style.md", "allowed is"),
    ("docs/style.md", "So many"),
    ("docs/style.md", "as it comes"),
    ("docs/style.md", "is no multiple"),
]

#: British spellings in names, where torch and timm write the American ones.
_BRITISH = re.compile(
    r"colour|grey|behaviour|favour|neighbour|"
    r"(?:normal|initial|optim|minim|maxim|quant|recogn|organ|real|general|special|serial|synchron|standard|summar"
    r"|parallel|regular|vector|token)is(?:e|ed|es|ing|er|ation)(?![a-z])",
    re.IGNORECASE,
)

#: Names of variables and functions that do not say what they hold or do.
_NAMES = {"told", "anew", "beside", "aside", "among", "whatever"}

_AVOIDED = re.compile("|".join(rf"(\b(?:{phrase})\b)" for phrase in AVOIDED), re.IGNORECASE)
_BEGINNINGS = re.compile(r"(?:Of|What|Those|Whoever|Whatever|The part with|Whether|How|Where|When|Why)\b")


def files(*patterns: str) -> list[Path]:
    """The files that the patterns match, without caches."""
    found = sorted({path for pattern in patterns for path in REPOSITORY.glob(pattern)})
    return [path for path in found if "__pycache__" not in path.parts]


PACKAGE = files("efficient_ft/**/*.py")
TESTS = [path for path in files("tests/**/*.py") if path.name != "test_language.py"]  # this file holds the words
PYTHON = PACKAGE + files("hydra_plugins/**/*.py", "scripts/**/*.py", "examples/**/*.py", "train.py") + TESTS
PAGES = files("docs/**/*.md", "examples/**/*.md", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "conf/**/*.yaml")


@cache
@cache
def tokens(path: Path) -> list[tokenize.TokenInfo]:
    """The tokens of a Python file."""
    return list(tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline))


def text_of(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines: of a Python file its comments and strings, of any other the whole text."""
    if path.suffix != ".py":
        yield from enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        return
    strings = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    for token in tokens(path):
        if token.type in strings:
            yield from enumerate(token.string.splitlines(), token.start[0])


def place(path: Path, line: int, text: str) -> str:
    """A finding as a line that an editor can jump to."""
    return f"{path.relative_to(REPOSITORY).as_posix()}:{line}: {text}"


def avoided(path: Path, line: str) -> list[str]:
    """The avoided words in a line, each with what to write instead."""
    for where, phrase in ALLOWED:
        if where in ("*", path.relative_to(REPOSITORY).as_posix()):
            line = line.replace(phrase, "")
    instead = list(AVOIDED.values())
    return [f"'{hit[0]}' → {instead[(hit.lastindex or 1) - 1]}" for hit in _AVOIDED.finditer(line)]


def test_no_word_stops_a_reader() -> None:
    found = [
        place(path, number, f"{'; '.join(hits)}: {line.strip()}")
        for path in (*PYTHON, *PAGES)
        for number, line in text_of(path)
        if (hits := avoided(path, line))
    ]
    assert not found, "\n" + "\n".join(found)


def test_names_are_american_and_say_what_they_hold() -> None:
    found = [
        place(path, token.start[0], token.string)
        for path in PYTHON
        for token in tokens(path)
        if token.type == tokenize.NAME and (token.string in _NAMES or _BRITISH.search(token.string))
    ]
    assert not found, "\n" + "\n".join(found)


def test_docstrings_begin_with_a_verb_or_a_noun_phrase() -> None:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        place(path, getattr(node, "lineno", 1), text.splitlines()[0])
        for path in PYTHON
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, kinds) and (text := ast.get_docstring(node)) and _BEGINNINGS.match(text)
    ]
    assert not found, "\n" + "\n".join(found)


def undocumented(module: ModuleType) -> Iterator[str]:
    """Yield the module and its public definitions without a docstring. An override inherits the docstring."""
    if not module.__doc__:
        yield "module"
    for name, item in vars(module).items():
        if name.startswith("_") or getattr(item, "__module__", None) != module.__name__:
            continue
        if not isinstance(item, type):
            if callable(item) and not item.__doc__:  # also functions that a decorator has wrapped in an object
                yield name
            continue
        if not item.__doc__ or "__doc__" not in vars(item) or item.__doc__.startswith(f"{name}("):  # a dataclass's own
            yield name
        for attribute, member in vars(item).items():
            kinds = property | classmethod | staticmethod | cached_property
            public = (callable(member) or isinstance(member, kinds)) and attribute[0] != "_"
            if public and not inspect.getdoc(getattr(item, attribute)):
                yield f"{name}.{attribute}"


def test_every_public_definition_has_a_docstring() -> None:
    modules = [info.name for info in pkgutil.walk_packages(efficient_ft.__path__, "efficient_ft.")]
    found = [
        f"{name}.{item}"
        for name in modules
        if not name.rpartition(".")[2].startswith("_")
        for item in undocumented(importlib.import_module(name))
    ]
    assert not found, "\n" + "\n".join(found)


SAMPLE = """
'Documented.'
from functools import cache, cached_property
class A:
    def b(self): pass
    def _c(self): pass
class B(A):
    'Documented.'
    def b(self): 'Documented.'
class C(B):
    'Documented.'
    def b(self): pass
    @cached_property
    def e(self): pass
def d(): pass
@cache
def f(): pass
"""


def test_the_checks_find_what_they_look_for(monkeypatch: pytest.MonkeyPatch) -> None:
    readme = REPOSITORY / "README.md"
    assert avoided(readme, "It stands beside it.") == ["'beside' → next to, with, in addition to"]
    assert avoided(readme, "Laid down.") == ["'Laid' → placed, composited, stored"]
    assert not avoided(readme, "Besides, rows are laid out in memory; clients relied on it.")
    assert _BRITISH.search("_renormalised")
    assert not _BRITISH.search("normalized_is_e")
    assert _BEGINNINGS.match("Of the images: sizes")
    assert not _BEGINNINGS.match("Offsets of the images")
    sample = ModuleType("sample")
    monkeypatch.setitem(sys.modules, "sample", sample)
    exec(SAMPLE, vars(sample))
    assert list(undocumented(sample)) == ["A", "A.b", "C.e", "d", "f"]
    assert len(PYTHON) - len(TESTS) > 80
    assert len(TESTS) > 80
    assert len(PAGES) > 40
