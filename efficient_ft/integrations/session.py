"""Methods applied to one network, their work per step, and their state: for any training loop, and for the callbacks.

>>> session = MethodSession([LISA(), LoRA()])
>>> session.apply(model)
>>> optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
>>> session.check_optimizers([optimizer])
>>> session.start()
>>> for step, (images, labels) in enumerate(loader):
...     session.step_begin(step)
...     session.total_loss(F.cross_entropy(model(images), labels)).backward()
...     optimizer.step()
...     session.step_end()
...     optimizer.zero_grad()
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.in_backward import Wrong, refuse_in_backward
from efficient_ft.methods.base import Applied, Method, apply_methods, in_order, make_trainable, trainable
from efficient_ft.methods.declarations import Adds, Axis, Needs
from efficient_ft.methods.optimizer_check import check_optimizer
from efficient_ft.models.frozen_batch_norm import freeze_batch_norm
from efficient_ft.optim import steps_in_backward

#: The key of a tensor's values in an encoded state.
_TENSOR = "__tensor__"
#: Classes that wrap a module or run it through a compiler: methods must be applied before them.
_WRAPPERS = ("OptimizedModule", "DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")


class MethodSession:
    """Apply methods to a network and do their work per step, in any training loop.

    Args:
        methods: one method or several, in any order.
        frozen_bn: freeze the BatchNorm statistics of the network.
        classifier: as in `Method.apply`.

    Attributes:
        methods: in their order of application.
        network: the network they are applied to; None before `apply`.
        reports: what each method did, in the order of `methods`; empty before `apply`.
    """

    def __init__(
        self, methods: Method | Iterable[Method], frozen_bn: bool = True, classifier: str | Iterable[str] = ()
    ) -> None:
        self.methods = in_order(methods)
        self.frozen_bn, self.classifier = frozen_bn, classifier
        self.network: nn.Module | None = None
        self.reports: list[Applied] = []
        #: `requires_grad` by name between two steps.
        self._between_steps: dict[str, bool] = {}
        self._step: int | None = None

    # ------------------------------------------------------------------ before training
    def apply(self, network: nn.Module) -> None:
        """Apply the methods in their order and freeze the BatchNorm statistics; again, it changes nothing.

        Raises:
            UserError: the network is compiled or wrapped, or a method refuses it.
        """
        refuse_wrapped_inside(network)
        self.reports = apply_methods(network, self.methods, self.classifier)
        if self.frozen_bn:
            freeze_batch_norm(network)
        self.network = network

    @property
    def find_unused_parameters(self) -> list[str]:
        """Names of the methods under which some trainable parameters get no gradient in some steps."""
        return [method.name for method in self.methods if method.find_unused_parameters]

    @property
    def adds_loss(self) -> list[str]:
        """Names of the methods with a loss of their own."""
        return [method.name for method in self.methods if _adds_loss(method)]

    def check_in_backward(self, optimizers: Iterable[Any], **loop: Wrong | None) -> None:
        """Check that an optimizer which steps inside the backward pass gets on with the methods and the training loop.

        Args:
            optimizers: of the training.
            loop: what the training loop does that it excludes; see `refuse_in_backward`.

        Raises:
            SettingError: the training loop clips, accumulates, scales or averages gradients.
            UserError: a method compares gradients at the end of a step.
        """
        if not steps_in_backward(optimizers):
            return
        refuse_in_backward("an optimizer that steps inside the backward pass", **loop)
        readers = [method.name for method in self.methods if Needs.GRADIENTS_AT_STEP_END in method.needs]
        if readers:
            raise UserError(
                f"method {readers[0]} compares the gradients of all blocks at the end of a step, and an optimizer that"
                " steps inside the backward pass has freed them. Use optim.in_backward=false, or another method."
            )

    def check_optimizers(self, optimizers: Iterable[Any]) -> None:
        """Check that the parameters that methods select or add are in an optimizer.

        Raises:
            UserError: some are not: see `check_optimizer`.
        """
        decides = any({Axis.SELECTION, Axis.ADAPTERS} & set(method.axes) for method in self.methods)
        if self.network is not None and decides:
            check_optimizer(self.network, optimizers)

    # ------------------------------------------------------------------ per step
    def start(self) -> None:
        """Begin a training: the next `step_begin` starts its first step."""
        self.abandon_step()
        if self.network is not None:
            self._between_steps = trainable(self.network)

    def step_begin(self, step: int) -> None:
        """Begin optimizer step `step`; on its further micro-batches nothing happens."""
        if self._step == step:
            return
        self._step = step
        for method in self.methods:
            method.step_begin(step)

    def step_end(self) -> None:
        """End the step, after the optimizer's and before gradients are set to zero."""
        for method in self.methods:
            method.step_end()
        self._step = None

    @property
    def step(self) -> int | None:
        """The optimizer step that has begun and not ended."""
        return self._step

    def abandon_step(self) -> None:
        """Leave a step that training stopped in: `requires_grad` is again what it is between two steps."""
        if self._step is not None and self.network is not None:
            make_trainable(self.network, self._between_steps)
        self._step = None

    def total_loss(self, loss: Tensor) -> Tensor:
        """`loss` plus the losses of the methods' own."""
        for method in self.methods:
            loss = method.total_loss(loss)
        return loss

    # ------------------------------------------------------------------ state
    def state_dict(self) -> dict[str, Any]:
        """The state of the methods that have one, by their `state_key`."""
        return {method.state_key: state for method in self.methods if (state := method.state_dict())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state of each method that `state_dict` holds one of."""
        for method in self.methods:
            if method.state_key in state_dict:
                method.load_state_dict(state_dict[method.state_key])

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Check that a checkpoint to be resumed holds the state of these methods, and of no others.

        Raises:
            UserError: it was written with other methods or settings.
        """
        carried = {method.state_key for method in self.methods}
        foreign = sorted(state_dict.keys() - carried)
        missing = sorted(self.state_dict().keys() - state_dict.keys())
        if foreign or missing:
            holds = ", ".join(foreign or sorted(state_dict)) or "no method"
            raise UserError(
                "The checkpoint was written with other methods or settings: it holds the state of"
                f" {holds}, and {', '.join(missing or sorted(carried))} is to be resumed. Pass the methods and settings"
                " of the interrupted training."
            )


def find_network(module: Any, name: str) -> nn.Module:
    """The module that `name`, an attribute of `module` (dotted for one of an attribute's), refers to; "": `module`.

    Raises:
        SettingError: there is no such attribute, or it holds no module.
    """
    found = module
    for depth, part in enumerate(name.split(".") if name else ()):
        child = getattr(found, part, None)
        if not isinstance(child, nn.Module):
            _refuse_name(found, name, ".".join(name.split(".")[:depth]), hasattr(found, part))
        found = child
    return found


def _refuse_name(holder: Any, name: str, prefix: str, exists: bool) -> None:
    children = holder.named_children() if isinstance(holder, nn.Module) else ()
    names = [f"{prefix}.{child}" if prefix else child for child, _ in children]
    why = (
        "It holds no module when the callback applies the methods: build the network in __init__."
        if exists
        else 'Pass the attribute that holds the timm model, or network="" for the module itself.'
    )
    of = f"{type(holder).__name__}" + (f" ({prefix})" if prefix else "")
    constraint = f"a module of {of}: " + (f"one of {', '.join(names)}" if names else "it has none")
    raise SettingError("network", repr(name), constraint, why)


def refuse_wrapped_inside(network: nn.Module) -> None:
    """Raise UserError where the network or a part of it is compiled or wrapped already."""
    for name, module in network.named_modules():
        wrapper = next((c.__name__ for c in type(module).__mro__ if c.__name__ in _WRAPPERS), None)
        if wrapper is None and isinstance(module, torch.jit.ScriptModule):
            wrapper = "ScriptModule"
        if wrapper is None and getattr(module, "_compiled_call_impl", None) is not None:
            wrapper = "Module.compile"
        if wrapper is not None:
            raise UserError(
                f"The network must be a plain module, got {wrapper}" + (f" at {name}" if name else "") + ". Apply the"
                " methods first; compile or wrap it after that."
            )


def encode(state: Any) -> Any:
    """A method's state in what JSON holds: tensors become a dictionary of their values, tuples become lists.

    Raises:
        UserError: it holds something else than tensors, numbers, strings, lists and dictionaries with string keys.
    """
    if isinstance(state, Tensor):
        return {_TENSOR: state.tolist(), "dtype": str(state.dtype).removeprefix("torch.")}
    if isinstance(state, dict) and all(isinstance(key, str) for key in state):
        return {key: encode(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [encode(value) for value in state]
    if state is None or isinstance(state, str | int | float | bool):
        return state
    raise UserError(
        "The state of a method must be tensors, numbers, strings, lists and dictionaries with string keys, got"
        f" {type(state).__name__} ({state!r:.60}). Mend the method's state_dict."
    )


def decode(state: Any) -> Any:
    """Invert `encode`; tensors are on the CPU."""
    if isinstance(state, dict):
        if _TENSOR in state:
            return torch.tensor(state[_TENSOR], dtype=getattr(torch, state["dtype"]))
        return {key: decode(value) for key, value in state.items()}
    return [decode(value) for value in state] if isinstance(state, list) else state


def _adds_loss(method: Method) -> bool:
    """Whether `total_loss` adds something.

    It does if the method overrides it, unless its settings took `Adds.LOSS` away from what the class declares.
    """
    if type(method).total_loss is Method.total_loss:
        return False
    return Adds.LOSS in method.adds or Adds.LOSS not in type(method).adds
