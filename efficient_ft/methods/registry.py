"""Registry that maps names to the method classes of this package and of other packages.

The registry imports all modules in the subpackages of `efficient_ft.methods` (`adapters`, `backprop`, ...). The
registry finds methods of other packages through entry points::

    [project.entry-points."efficient_ft.methods"]
    every_nth = "every_nth_method.method:EveryNth"

All methods are imported once, when the registry is first read. An error is raised if a class breaks the contract of
`Method` or uses the name of another method. The error message names the distribution that contains the class.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from efficient_ft.core.errors import UserError
from efficient_ft.core.packages import GROUP
from efficient_ft.methods.base import OURS, Method
from efficient_ft.methods.declarations import Adds, Axis, Exactness, Needs, PlanCandidate

_PACKAGE = "efficient_ft.methods"
_Class = TypeVar("_Class", bound=type[Method])
#: Methods of the class `Method` that are called with positional arguments only.
_HOOKS = ("_apply", "_remove", "step_begin", "step_end", "total_loss", "step_stats", "state_dict", "load_state_dict")
#: Mapping from method names to the registered classes.
_registered: dict[str, type[Method]] = {}
#: Names of methods from other packages whose constructors have not been checked yet.
_untried: set[str] = set()


class Registry(Mapping[str, type[Method]]):
    """Read-only mapping from method names to method classes. The names are sorted.

    The first access loads the methods of all packages.

    Raises:
        UserError: Raised at the first access if a method of another package cannot be used.
    """

    _loaded = False

    def _all(self) -> dict[str, type[Method]]:
        if not self._loaded:
            own_classes()
            for entry in entry_points(group=GROUP):
                _load(entry)
            self._loaded = True
        for name in sorted(_untried):  # Constructors are checked here, when all modules are complete.
            method = _registered[name]
            _refuse_broken(method, method.distribution, broken_settings(method) or _misspelt_conflict(method))
            _untried.discard(name)
        return _registered

    def __getitem__(self, name: str) -> type[Method]:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._all()))

    def __len__(self) -> int:
        return len(self._all())

    def distribution(self, name: str) -> str:
        """Return the name of the distribution (pip package) that provides the method `name`."""
        return self._all()[name].distribution


#: Mapping from the names of all methods to their classes.
METHODS = Registry()


def register(method: _Class) -> _Class:
    """Register a method class under its `name`. Use this function as a class decorator.

    Args:
        method: subclass of `Method` with `name`, `axis`, `_apply`, `_remove`, and a constructor that stores each
            argument in an attribute of the same name.

    Returns:
        The class itself.

    Raises:
        UserError: If the class breaks the contract of `Method`, or if another class has the same name.
    """
    _add(method, OURS if method.__module__.startswith(f"{_PACKAGE}.") else method.__module__)
    return method


@functools.cache
def own_classes() -> dict[str, type[Method]]:
    """Import all methods of this package, and return a mapping from class names to the classes."""
    package = importlib.import_module(_PACKAGE)
    for folder in pkgutil.iter_modules(package.__path__, f"{_PACKAGE}."):
        if folder.ispkg:
            for module in pkgutil.iter_modules(importlib.import_module(folder.name).__path__, f"{folder.name}."):
                importlib.import_module(module.name)
    return {method.__name__: method for method in _registered.values() if method.distribution == OURS}


def _load(entry: EntryPoint) -> None:
    distribution = entry.dist.name if entry.dist is not None else entry.value
    try:
        method = entry.load()
    except UserError as error:  # The decorator `register` in the other package raises this error.
        raise UserError(f"Package {distribution}: {error}") from error
    except Exception as error:
        raise UserError(
            f"Package {distribution}: the method {entry.name} ({entry.value}) cannot be imported:"
            f" {type(error).__name__}: {error}. Fix or uninstall the package."
        ) from error
    if isinstance(method, type) and getattr(method, "name", None) != entry.name:
        raise UserError(
            f"Package {distribution}: the entry point {entry.name} refers to a class with the name"
            f" {getattr(method, 'name', None)!r}. The two names must be the same."
        )
    _add(method, distribution)  # If the class is registered, its distribution replaces the name of its module.


def _add(method: Any, distribution: str) -> None:
    _refuse_broken(method, distribution, broken_contract(method))
    known = _registered.get(method.name)
    if known is not None and _where(known) != _where(method):
        raise UserError(
            f"Package {distribution}: {_where(method)} has the name {method.name!r}, which is also the name of"
            f" {_where(known)} ({known.distribution}). Rename the class, or uninstall one of the packages."
        )
    _registered[method.name], method.distribution = method, distribution
    if distribution != OURS:
        _untried.add(method.name)


def _refuse_broken(method: Any, distribution: str, broken: str | None) -> None:
    if broken is not None:
        raise UserError(f"Package {distribution}: {_where(method)} is not a valid method: {broken}.")


def _where(method: Any) -> str:
    return f"{method.__module__}.{method.__qualname__}" if isinstance(method, type) else repr(method)


def broken_contract(method: Any) -> str | None:
    """Return a phrase that states how a class breaks the contract of `Method`, or None if the class is valid.

    The function checks the name, the declarations, the arguments of overridden methods, and the names of the settings.
    """
    if not (isinstance(method, type) and issubclass(method, Method)):
        return "the object is not a subclass of efficient_ft.methods.Method"
    name = getattr(method, "name", None)
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        return f"`name` must consist of lower-case letters, digits and underscores, got {name!r}"
    if name in (*Axis, *Adds):
        return f"`name` must not be the name of an axis or an addition, got {name!r}"
    if inspect.isabstract(method):
        return f"the class does not implement {', '.join(f'`{m}`' for m in sorted(method.__abstractmethods__))}"
    for parameter in inspect.signature(method).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            return f"the constructor must name each setting, got the parameter {parameter}"
    return _broken_declaration(method) or next(filter(None, (_broken_hook(method, hook) for hook in _HOOKS)), None)


def _broken_declaration(declared: Any) -> str | None:
    """Return a description of the first invalid declaration, or None if all declarations are valid."""
    for attribute, enumeration in (("axis", Axis), ("other_axes", Axis), ("adds", Adds), ("needs", Needs)):
        value = getattr(declared, attribute, None)
        values = [value] if attribute == "axis" else value
        if not isinstance(values, tuple | list | set | frozenset) or not all(v in tuple(enumeration) for v in values):
            what = f"one of {', '.join(enumeration)}" if attribute == "axis" else f"values of {enumeration.__name__}"
            return f"`{attribute}` must be {what}, got {value!r}"
    for attribute, keys in (("conflicts", "axes, additions or names of methods"), ("hints", "values of Needs")):
        value = getattr(declared, attribute, None)
        if not isinstance(value, Mapping) or not all(isinstance(part, str) for item in value.items() for part in item):
            return f"`{attribute}` must be a mapping from {keys} to sentences, got {value!r}"
    if broken := _broken_candidates(declared):
        return broken
    unknown = [key for key in declared.hints if key not in tuple(Needs)]
    return f"the keys of `hints` must be values of Needs, got {unknown[0]!r}" if unknown else None


def _broken_candidates(declared: Any) -> str | None:
    candidates = getattr(declared, "candidates", ())
    if not isinstance(candidates, tuple | list) or not all(isinstance(one, PlanCandidate) for one in candidates):
        return f"`candidates` must be a tuple of PlanCandidate objects, got {candidates!r}"
    method = declared if isinstance(declared, type) else type(declared)
    settings = inspect.signature(method).parameters
    for one in candidates:
        if unknown := [name for name in one.settings if name not in settings]:
            return f"`candidates` must contain only settings of the constructor, got {unknown[0]!r}"
        if one.exactness is Exactness.EXACT and not one.evidence.strip():
            return "each entry of `candidates` with Exactness.EXACT must name a test or measurement as evidence"
        if not one.time_factor > 0:
            return f"each entry of `candidates` must have a time_factor > 0, got {one.time_factor!r}"
    return None


def _broken_hook(method: type[Method], hook: str) -> str | None:
    """Return a phrase that lists the arguments that `hook` must accept, or None if `hook` accepts these arguments."""
    own = getattr(method, hook)
    wanted = list(inspect.signature(getattr(Method, hook)).parameters)
    bound = isinstance(inspect.getattr_static(method, hook), staticmethod | classmethod)
    try:
        inspect.signature(own).bind(*(wanted[1:] if bound else wanted))
    except TypeError:  # `signature` raises this error for objects that are not callable.
        got = inspect.signature(own) if callable(own) else repr(own)
        return f"`{hook}` must take ({', '.join(wanted)}), got {got}"
    return None


def broken_settings(method: type[Method]) -> str | None:
    """Return a phrase that states how a constructor breaks the contract, or None if the constructor is valid.

    If a setting has no default, the constructor is not checked.
    """
    parameters = inspect.signature(method).parameters.values()
    if any(p.default is p.empty for p in parameters):
        return None
    try:
        made = method()
    except Exception as error:
        return f"the constructor fails with the default settings: {type(error).__name__}: {error}"
    unstored = next((p.name for p in parameters if not hasattr(made, p.name)), None)
    if unstored is not None:
        return f"the constructor does not store the setting `{unstored}` in an attribute of the same name"
    return _broken_declaration(made)


def _misspelt_conflict(method: type[Method]) -> str | None:
    """Return a phrase about a misspelled key of `conflicts`, or None if no key is misspelled.

    All methods must be registered before the call. A key may name a method of a package that is not installed.
    Therefore, only unknown keys that differ from a known name by about one letter (such as ``lorra``) are rejected.
    """
    known = [*Axis, *Adds, *_registered]
    for key in method.conflicts:
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.85)
        if key not in known and near:
            return (
                f"the keys of `conflicts` must be axes, additions or names of methods, got {key!r} (similar to"
                f" '{near[0]}')"
            )
    return None
