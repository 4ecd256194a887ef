"""The settings of a training loop that an optimizer which steps inside the backward pass excludes."""

from __future__ import annotations

from typing import Any, NamedTuple

from efficient_ft.core.errors import SettingError


class Wrong(NamedTuple):
    """A setting that is excluded: its name, its value, and the value it must have."""

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
    """Refuse the first of these that is given; None: the training loop does not do this.

    Args:
        by: what turns stepping inside the backward pass on, for the message.
        clipping: by the norm of the whole gradient.
        accumulation: of the gradients of several batches.
        scaling: of the loss, as with fp16.
        processes: more than one, whose gradients are averaged.

    Raises:
        SettingError: one is given.
    """
    for wrong, why in (
        (clipping, "The norm of the whole gradient is known only after the backward pass, when its parts are gone."),
        (accumulation, "Each backward pass updates the parameters: no sum of gradients is formed."),
        (scaling, "Whether a scaled gradient overflows is known only after the backward pass."),
        (processes, "Parameters would be updated before their gradients are averaged over the processes."),
    ):
        if wrong is not None:
            raise SettingError(wrong.name, wrong.value, f"{wrong.right} with {by}", why)
