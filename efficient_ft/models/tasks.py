"""A network for several tasks, with one classifier per task.

>>> tasks = give_heads(model, {"cifar10": 10, "pets": 37})
>>> tasks.active = "pets"
>>> model(images).shape  # (B, 37)

Every module that differs between tasks, such as a classifier or a router of experts, is a `PerTask`. The names of the
parameters of a `PerTask` contain the name of the task (``head.pets.weight``). All `PerTask` modules of a network share
one `Tasks` object, which is copied and pickled with the network.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from torch import nn

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.models.view import view


class Tasks:
    """The tasks of a network, one of which is active.

    Args:
        names: One or more unique names that consist of letters, digits, ``_`` and ``-``. The names become parts of
            parameter names.

    Raises:
        SettingError: If there are no names, or if names are repeated or invalid.
    """

    __slots__ = ("_active", "names")  # an assignment to a misspelled `active` raises an error

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        if not self.names or len(set(self.names)) < len(self.names):
            raise SettingError("tasks", list(self.names), "a non-empty list of different names")
        for name in self.names:
            # A ModuleDict does not accept the names of its attributes as keys.
            if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or hasattr(nn.ModuleDict, name) or name == "training":
                known = "names of letters, digits, _ and - that are not attributes of nn.ModuleDict"
                raise SettingError("tasks", repr(name), known)
        self._active = self.names[0]

    @property
    def active(self) -> str:
        """The task of the next forward pass. The default is the first task.

        Raises:
            SettingError: If the name is not one of `names`.
        """
        return self._active

    @active.setter
    def active(self, name: str) -> None:
        if name not in self.names:
            raise SettingError("task", name, list(self.names))
        self._active = name


class PerTask(nn.ModuleDict):
    """A container with one module per task. The forward method of the container runs the module of the active task.

    All `PerTask` modules of a network share the object `tasks`.
    """

    def __init__(self, tasks: Tasks, modules: Mapping[str, nn.Module]) -> None:
        assert set(modules) == set(tasks.names)
        super().__init__(modules)
        self.tasks = tasks

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module of the active task."""
        return self[self.tasks.active](*args, **kwargs)


def tasks_of(model: nn.Module) -> Tasks | None:
    """Return the tasks of a network, or None for a network with a single task."""
    return next((module.tasks for module in model.modules() if isinstance(module, PerTask)), None)


def for_each_task(model: nn.Module, make: Callable[[], nn.Module]) -> nn.Module:
    """Return a `PerTask` with one module from `make` for each task of `model`.

    If `model` has a single task, return a module from `make` without a container.
    """
    tasks = tasks_of(model)
    return make() if tasks is None else PerTask(tasks, {name: make() for name in tasks.names})


def give_heads(model: nn.Module, classes: Mapping[str, int], zero: bool = False) -> Tasks:
    """Replace the classifier of `model` with one classifier per task.

    The first task whose number of classes equals that of the model keeps the model's classifier. The other classifiers
    are newly initialized.

    Args:
        model: A timm model, or an image classifier of `transformers`, to which no methods have been applied.
        classes: Number of classes of each task, in the order of the tasks.
        zero: If True, initialize the parameters of new classifiers to 0.

    Raises:
        SettingError: If the name of a task is invalid.
        UserError: If the classifier cannot be replaced, or if the network already has several tasks.
    """
    if tasks_of(model) is not None:
        raise UserError(f"{type(model).__name__} already has several tasks. Call give_heads only once.")
    reset: Any = getattr(model, "reset_classifier", None)
    if reset is None and not hasattr(getattr(model, "config", None), "num_labels"):
        why = "has no method reset_classifier, which is required to replace the classifier"
        raise UserError(f"{type(model).__name__} {why}. Use a model of timm or transformers.")
    if reset is None:
        reset = partial(_reset_classifier, model)
    tasks = Tasks(classes)
    own = getattr(model, "num_classes", getattr(model, "num_labels", None))
    heads: dict[str, dict[str, nn.Module]] = {}  # modules by full name of the classifier and by task
    # Start with the task that keeps the model's classifier, because the others replace the classifier.
    for task in sorted(classes, key=lambda task: classes[task] != own):
        is_new = classes[task] != own or bool(heads)
        before = {name: copy.deepcopy(model.get_submodule(name)) for name in heads}
        if is_new:
            reset(classes[task])
        names = list(heads) or [part for name in view(model).head for part in _callable_parts(model, name)]
        for name in names:
            head = model.get_submodule(name)
            if is_new and zero:
                zero_parameters(head)
            by_task = heads.setdefault(name, {})
            for other, module in by_task.items():
                if module is head:  # some networks change their classifier in place
                    by_task[other] = before[name]
            by_task[task] = head
    for name, by_task in heads.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, PerTask(tasks, {task: by_task[task] for task in tasks.names}))
    return tasks


def _callable_parts(model: nn.Module, name: str) -> list[str]:
    """Return the names of the items of a list of classifiers, or `name` for a single classifier."""
    head = model.get_submodule(name)
    return [f"{name}.{n}" for n, _ in head.named_children()] if isinstance(head, nn.ModuleList) else [name]


def _reset_classifier(model: nn.Module, classes: int) -> None:
    """Replace the last linear layer of each head of a `transformers` network with a new layer for `classes` classes."""
    init: Any = model._init_weights
    own = model.num_labels
    for name in view(model).head:
        head = copy.deepcopy(model.get_submodule(name))
        layers = [n for n, m in head.named_modules() if isinstance(m, nn.Linear) and m.out_features == own]
        if not layers:
            raise UserError(f"{type(model).__name__}: the head {name} has no linear layer with {own} outputs.")
        old: Any = head.get_submodule(layers[-1])
        new = nn.Linear(old.in_features, classes, old.bias is not None, old.weight.device, old.weight.dtype)
        init(new)
        if layers[-1]:
            head.set_submodule(layers[-1], new)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, head if layers[-1] else new)
    model.num_labels = classes  # type: ignore[assignment]


def zero_parameters(module: nn.Module) -> None:
    """Set all parameters of `module` to 0."""
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
