"""A network for several tasks, with one classifier per task.

>>> tasks = give_heads(model, {"cifar10": 10, "pets": 37})
>>> tasks.active = "pets"
>>> model(images).shape  # (B, 37)

Every module that differs between tasks (classifiers, routers of experts) is a `PerTask`. The names of its parameters
contain the task (``head.pets.weight``). All of them share one `Tasks` object, which is copied and pickled with the
network.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.models.view import view


class Tasks:
    """The tasks of a network and the active one.

    Args:
        names: one or more unique names of letters, digits, ``_`` and ``-``, which become parts of parameter names.

    Attributes:
        names: the names.

    Raises:
        SettingError: there are no names, or names are repeated or invalid.
    """

    __slots__ = ("_active", "names")  # a mistyped `active` is an error

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        if not self.names or len(set(self.names)) < len(self.names):
            raise SettingError("tasks", list(self.names), "a non-empty list of different names")
        for name in self.names:
            # A ModuleDict rejects the names of its attributes.
            if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or hasattr(nn.ModuleDict, name) or name == "training":
                raise SettingError(
                    "tasks", repr(name), "names of letters, digits, _ and -, other than attributes of nn.ModuleDict"
                )
        self._active = self.names[0]

    @property
    def active(self) -> str:
        """Task of the next forward pass; initially the first one.

        Raises:
            SettingError: the name is not one of `names`.
        """
        return self._active

    @active.setter
    def active(self, name: str) -> None:
        if name not in self.names:
            raise SettingError("task", name, list(self.names))
        self._active = name


class PerTask(nn.ModuleDict):
    """A module per task. The forward pass runs the module of the active task.

    Args:
        tasks: shared by all such modules of a network.
        modules: modules by task.
    """

    def __init__(self, tasks: Tasks, modules: Mapping[str, nn.Module]) -> None:
        assert set(modules) == set(tasks.names)
        super().__init__(modules)
        self.tasks = tasks

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module of the active task."""
        return self[self.tasks.active](*args, **kwargs)


def tasks_of(model: nn.Module) -> Tasks | None:
    """Return the tasks of a network with several tasks; None for one task."""
    return next((module.tasks for module in model.modules() if isinstance(module, PerTask)), None)


def for_each_task(model: nn.Module, make: Callable[[], nn.Module]) -> nn.Module:
    """Call `make` for each task of `model` and return a `PerTask` of the results; for one task, return the result."""
    tasks = tasks_of(model)
    return make() if tasks is None else PerTask(tasks, {name: make() for name in tasks.names})


def give_heads(model: nn.Module, classes: Mapping[str, int], zero: bool = False) -> Tasks:
    """Replace the classifier of `model` by one classifier per task.

    The first task with as many classes as the model keeps the classifier of the model. The others are newly
    initialized.

    Args:
        model: a timm model without applied methods.
        classes: number of classes by task, in the order of the tasks.
        zero: initialize new classifiers to output 0 for every class.

    Raises:
        SettingError: names of tasks are invalid.
        UserError: the classifier cannot be replaced, or the network already has several tasks.
    """
    if tasks_of(model) is not None:
        raise UserError(f"{type(model).__name__} already has several tasks. Call give_heads once.")
    reset: Any = getattr(model, "reset_classifier", None)
    if reset is None:
        raise UserError(
            f"{type(model).__name__} has no reset_classifier, so its classifier cannot be replaced. Use a timm model."
        )
    tasks = Tasks(classes)
    own = getattr(model, "num_classes", None)
    heads: dict[str, dict[str, nn.Module]] = {}  # by full name of the classifier, and by task
    # First the task that keeps the model's classifier, before it is replaced.
    for task in sorted(classes, key=lambda task: classes[task] != own):
        is_new = classes[task] != own or bool(heads)
        if is_new:
            reset(classes[task])
        names = list(heads) or view(model).head
        for name in names:
            head = model.get_submodule(name)
            if is_new and zero:
                zero_parameters(head)
            heads.setdefault(name, {})[task] = head
    for name, by_task in heads.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, PerTask(tasks, {task: by_task[task] for task in tasks.names}))
    return tasks


def zero_parameters(module: nn.Module) -> None:
    """Set all parameters of `module` to 0."""
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
