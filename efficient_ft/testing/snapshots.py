"""Snapshots of a model and of the process, which are compared before and after calls of a method."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def structure(model: nn.Module) -> dict[str, Any]:
    """Return all properties of a model that a method can change, except for the values of tensors.

    The snapshot contains the classes, training flags, hooks and attributes of modules. The snapshot also contains the
    names, dtypes and shapes of parameters and buffers, and the `requires_grad` flags and hooks of parameters.
    """
    found: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        where = f"module {name or '(root)'}"
        found[f"{where}: class"] = type(module)
        found[f"{where}: training"] = module.training
        for attribute, value in vars(module).items():
            if "_hooks" in attribute or attribute == "_non_persistent_buffers_set":
                found[f"{where}: {attribute}"] = len(value)
            else:
                found[f"{where}: attribute {attribute}"] = True
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found[f"parameter {name}: requires_grad"] = parameter.requires_grad
        found[f"parameter {name}: form"] = (parameter.dtype, tuple(parameter.shape), type(parameter))
        found[f"parameter {name}: hooks"] = _tensor_hooks(parameter)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        found[f"buffer {name}: form"] = (buffer.dtype, tuple(buffer.shape))
    return found


def _tensor_hooks(tensor: Tensor) -> int:
    """Return the number of hooks of a tensor, including hooks on the accumulation of its gradient."""
    hooks = (getattr(tensor, "_backward_hooks", None), getattr(tensor, "_post_accumulate_grad_hooks", None))
    return sum(len(registered) for registered in hooks if registered)


def values(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters and buffers by name, including non-persistent buffers."""
    return {name: t.detach().clone() for name, t in (*model.named_parameters(), *model.named_buffers())}


def moved(before: dict[str, Tensor], model: nn.Module) -> list[str]:
    """Return the names of parameters and buffers whose values differ from `before`."""
    now = dict((*model.named_parameters(), *model.named_buffers()))
    return [n for n, old in before.items() if n not in now or not torch.equal(now[n].detach(), old)]


def differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return a description of each entry that differs between two snapshots."""
    pairs = {key: (before.get(key, "absent"), after.get(key, "absent")) for key in (*before, *after)}
    return [f"{key} (before: {old}, after: {new})" for key, (old, new) in pairs.items() if old != new]


def process_state() -> dict[str, Any]:
    """Return the parts of the process state that a method must not change, by name."""
    numpy_state: Any = np.random.get_state()  # noqa: NPY002
    global_hooks = {
        name: len(value)
        for name, value in vars(torch.nn.modules.module).items()
        if name.startswith("_global_") and name.endswith("_hooks")
    }
    return {
        "torch's generator": torch.get_rng_state().numpy().tobytes(),
        "numpy's generator": (numpy_state[1].tobytes(), *numpy_state[2:]),
        "python's generator": random.getstate(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "gradient mode": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "anomaly mode": torch.is_anomaly_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "number of threads": torch.get_num_threads(),
        "numpy's error handling": tuple(sorted(np.geterr().items())),
        "hooks of all modules": tuple(sorted(global_hooks.items())),
        "fused attention": (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
        ),
    }


def seed_everything(seed: int) -> None:
    """Seed the global generators of PyTorch, NumPy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)


@dataclass
class Lines:
    """Record of executed code.

    Attributes:
        lines: File name and line number of each executed line.
        backwards: Qualified names of the executed backward methods of autograd functions.
    """

    lines: set[tuple[str, int]] = field(default_factory=set)
    backwards: set[str] = field(default_factory=set)


@contextmanager
def traced_lines(folders: list[str]) -> Iterator[Lines]:
    """Record the executed lines of files in `folders` inside a ``with`` block, including lines of backward passes."""
    found = Lines()
    inside: dict[str, bool] = {}

    def line(frame: types.FrameType, event: str, _: Any) -> Any:
        if event == "line":
            found.lines.add((frame.f_code.co_filename, frame.f_lineno))
        return line

    def call(frame: types.FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if file not in inside:
            inside[file] = str(Path(file).resolve()).startswith(tuple(folders))
        if not inside[file]:
            return None
        if frame.f_code.co_name == "backward":
            found.backwards.add(frame.f_code.co_qualname)
        return line

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield found
    finally:
        sys.settrace(before)
