"""Check of settings that are incompatible with optimizer steps inside the backward pass."""

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
    """Raise an error for the first incompatible setting. Pass None for a setting that is compatible.

    The settings control gradient clipping by the norm of all gradients, gradient accumulation, loss scaling (as with
    fp16), and gradient averaging over several processes. `by` names the setting or the optimizer that updates
    parameters inside the backward pass.

    Raises:
        SettingError: If one of the settings is incompatible.
    """
    for wrong, why in (
        (clipping, "The norm of all gradients is known only after the backward pass has freed the gradients."),
        (accumulation, "Each backward pass updates the parameters, so gradients cannot be accumulated."),
        (scaling, "Whether a scaled gradient overflows is known only after the backward pass."),
        (processes, "Parameters would be updated before the gradients are averaged over the processes."),
    ):
        if wrong is not None:
            raise SettingError(wrong.name, wrong.value, f"{wrong.right} with {by}", why)
