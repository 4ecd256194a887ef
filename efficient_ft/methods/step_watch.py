"""Warning for training loops that do not call `step_begin` and `step_end` although a method requires these calls."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

#: Number of backward passes outside of a step after which a warning is issued. The limit also applies to steps in which
#: `step_end` is not called. A single occurrence may be caused by a trial run.
_PATIENCE = 2


class StepWatch:
    """Observer of a model's backward passes that issues a warning if `step_begin` or `step_end` is not called.

    A backward pass is outside of a step if no step has begun, or if an optimizer has stepped since an earlier backward
    pass in the same step. An optimizer has stepped if the weights have changed or the gradients have been set to None.
    Neither change occurs between the micro-batches of one step. The class registers a hook on the last trainable
    parameter. Call `stop` to remove the hook.
    """

    def __init__(self, name: str, model: nn.Module) -> None:
        self.name = name
        self._begun = False
        #: Version and gradient of the watched parameter at the first backward pass of the step. The gradient is
        #: required because fused optimizers do not increase the version.
        self._seen: tuple[int, Callable[[], Tensor | None]] | None = None
        self._outside = self._unended = 0
        self._warned = False
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._hook: Any = trained[-1].register_post_accumulate_grad_hook(self._after_backward) if trained else None

    def begin(self) -> None:
        """Record the beginning of a step."""
        stepped = self._seen is not None
        self._unended = self._unended + 1 if self._begun and stepped else 0
        if self._unended >= _PATIENCE:
            self._warn("step_end() was not called after the optimizer's step")
        self._begun, self._seen, self._outside = True, None, 0

    def end(self) -> None:
        """Record the end of a step."""
        self._begun, self._seen = False, None

    def stop(self) -> None:
        """Remove the hook."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_hook": None, "_seen": None}  # hooks are not copied with the parameters

    def _after_backward(self, parameter: Tensor) -> None:
        if self._begun and self._seen is None:
            if parameter.grad is not None:
                self._seen = parameter._version, weakref.ref(parameter.grad)
            return
        if self._seen is not None and self._seen[0] == parameter._version and self._seen[1]() is parameter.grad:
            return
        self._outside += 1
        if self._outside >= _PATIENCE:
            self._warn("a backward pass ran before step_begin(step) was called for the optimizer step")

    def _warn(self, fault: str) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"method {self.name} must be called in each step, but {fault}. Call step_begin(step) before the first"
            " forward pass of each optimizer step, and call step_end() after optimizer.step() and before zero_grad()."
            " efficient_ft.MethodSession makes these calls automatically.",
            stacklevel=2,
        )
