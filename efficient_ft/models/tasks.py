"""One network for several tasks: a classifier for each, and a switch that says which of them it works on now.

>>> tasks = give_heads(model, {"cifar10": 10, "pets": 37})
>>> tasks.now = "pets"
>>> model(images).shape  # (B, 37)

What differs from task to task (classifiers, the routers of experts) is a `PerTask` module in the place of one, whose
parameters have the task in their names (``head.pets.weight``). All share the one switch, which the network carries: it
is copied and pickled with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.models.view import view


class Tasks:
    """The tasks of a network, and the one it works on.

    Args:
        names: at least one, each once, of letters, digits, ``_`` and ``-``: they become parts of parameters' names.

    Raises:
        SettingError: names that will not do.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        if not self.names or len(set(self.names)) < len(self.names):
            raise SettingError("tasks", list(self.names), "names, each once")
        for name in self.names:
            # A ModuleDict refuses names of its own attributes.
            if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or hasattr(nn.ModuleDict, name) or name == "training":
                raise SettingError(
                    "tasks", name, "names of letters, digits, _ and -, other than those of a module's own attributes"
                )
        self._now = self.names[0]

    @property
    def now(self) -> str:
        """The task of the next forward pass; at first the first one."""
        return self._now

    @now.setter
    def now(self, name: str) -> None:
        if name not in self.names:
            raise SettingError("task", name, list(self.names))
        self._now = name


class PerTask(nn.ModuleDict):
    """A module for each task, of which the present task's runs."""

    def __init__(self, tasks: Tasks, modules: Mapping[str, nn.Module]) -> None:
        assert set(modules) == set(tasks.names)
        super().__init__(modules)
        self.tasks = tasks

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self[self.tasks.now](*args, **kwargs)


def tasks_of(model: nn.Module) -> Tasks | None:
    """The switch of a network for several tasks; None: it has one task."""
    return next((module.tasks for module in model.modules() if isinstance(module, PerTask)), None)


def for_each_task(model: nn.Module, make: Callable[[], nn.Module]) -> nn.Module:
    """What `make` gives, once for each task of `model`, in one module; of a network of one task, as it is."""
    tasks = tasks_of(model)
    return make() if tasks is None else PerTask(tasks, {name: make() for name in tasks.names})


def give_heads(model: nn.Module, classes: Mapping[str, int], zero: bool = False) -> Tasks:
    """Give `model` a classifier for each task, in the place of its own.

    The first task with as many classes as the model has takes over its classifier; the others are made anew.

    Args:
        model: of timm, before any method is applied to it.
        classes: by task, in the order of the switch.
        zero: those made anew give 0 for every class.

    Raises:
        UserError: a network that cannot be given another classifier, or has several tasks already.
    """
    if tasks_of(model) is not None:
        raise UserError(f"{type(model).__name__} has several tasks already.")
    reset: Any = getattr(model, "reset_classifier", None)
    if reset is None:
        raise UserError(
            f"{type(model).__name__} cannot be given classifiers: it has no reset_classifier, as timm's have."
        )
    tasks = Tasks(classes)
    own = getattr(model, "num_classes", None)
    heads: dict[str, dict[str, nn.Module]] = {}  # by full name of the classifier, then by task
    # The model's own classifier first, before another one takes its place.
    for task in sorted(classes, key=lambda task: classes[task] != own):
        made_anew = classes[task] != own or bool(heads)
        if made_anew:
            reset(classes[task])
        names = list(heads) or view(model).head
        for name in names:
            head = model.get_submodule(name)
            for parameter in head.parameters() if made_anew and zero else ():
                nn.init.zeros_(parameter)
            heads.setdefault(name, {})[task] = head
    for name, made in heads.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, PerTask(tasks, {task: made[task] for task in tasks.names}))
    return tasks
