"""Reject settings of a training loop that do not support an optimizer that steps inside the backward pass."""

from __future__ import annotations

from typing import Any, NamedTuple

from efficient_ft.core.errors import SettingError


class Wrong(NamedTuple):
    """Name and value of an incompatible setting, and the required value."""

    name: str
    value: Any
    right: str


def refuse_in_backward(
    by: str,
    *,
    clipping: Wrong | None = None,
    accumulation: Wrong | None = None,
    scaling: Wrong | None = None,
    processes: Wrong | None = None,
) -> None:
    """Raise an error for the first incompatible setting. An argument is None if its setting is compatible.

    The settings control clipping by the norm of all gradients, accumulation of gradients over several batches, loss
    scaling (as with fp16), and averaging of gradients over several processes. `by` names the setting or the optimizer
    that updates parameters inside the backward pass.

    Raises:
        SettingError: a setting is incompatible.
    """
    for wrong, why in (
        (clipping, "The norm of all gradients is known only after the backward pass, when they are already freed."),
        (accumulation, "Each backward pass updates the parameters, so gradients cannot be accumulated."),
        (scaling, "Whether a scaled gradient overflows is known only after the backward pass."),
        (processes, "Parameters would be updated before their gradients are averaged over the processes."),
    ):
        if wrong is not None:
            raise SettingError(wrong.name, wrong.value, f"{wrong.right} with {by}", why)
