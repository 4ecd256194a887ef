"""Session that applies methods to a model and calls these methods in each training step."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from efficient_ft.core.distributed import rank
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.integrations import saving
from efficient_ft.integrations.checks import (
    OPENED,
    freeze_statistics,
    names_adding_loss,
    refuse_foreign_state,
    refuse_gradient_readers,
    refuse_loss_outside,
    refuse_nested,
)
from efficient_ft.integrations.summary import summary
from efficient_ft.methods.base import Applied, Method, apply_methods, in_order
from efficient_ft.methods.declarations import Axis, Needs
from efficient_ft.methods.stack import check_optimizer
from efficient_ft.methods.wrapped import check_module, refuse_wrapped
from efficient_ft.models.frozen_batch_norm import FrozenStatistics, unfreeze_batch_norm
from efficient_ft.models.trained import make_trainable, trainable
from efficient_ft.models.view import Structure, assumed_size_note, check_arguments, default_image_size, image_channels

if TYPE_CHECKING:
    from efficient_ft.cost.executed import Executed

log = logging.getLogger(__name__)


class MethodSession:
    """Apply methods to a model, and use these methods in any training loop.

    Entering the session applies the methods. Leaving the session ends the training, but **the methods remain applied**,
    because adapters that cannot be merged and token methods are part of the trained model. The outputs of the model
    therefore remain the same, and `save` can still be called. Call `remove` to restore the model's own modules. Enter
    the session again to continue the training.

    Methods that add a loss or act per step require calls of `step` and `loss`. For all other methods, these calls are
    optional. The following rules apply:

    - Run all micro-batches of an optimizer step inside one ``with session.step(n)`` block, or in several consecutive
      blocks with the same number. Call `loss` once after each forward pass.
    - Number the steps across all epochs of a training run. Each number must be larger than the number of the last
      completed step.
    - A step ends when the optimizer has stepped. Therefore, ``zero_grad()`` may be called inside the block or after the
      block. With several optimizers, the step ends when all parameters with a gradient have been updated.
    - ``torch.amp.GradScaler`` may skip the step of the optimizer. Methods that compare gradients ignore such a step.
    - To compile the model or to wrap it in ``DistributedDataParallel``, apply the methods first. Pass
      ``find_unused_parameters=session.find_unused_parameters`` to ``DistributedDataParallel``.

    Training loops that consist of hooks can call `apply`, `begin_step`, `end_step` and `close` instead of using
    ``with`` blocks. The session is then open until `close` is called. While a session is open, other sessions on the
    same model are rejected.

    Args:
        model: image classifier that is neither compiled nor wrapped (see `Method.apply`).
        methods: one method or several methods, in any order.
        frozen_bn: if True, freeze the BatchNorm statistics of the model. If "frozen_part", freeze only the statistics
            of layers whose weight and bias are not trained. `remove` unfreezes the statistics.
        classifier, **structure: head, image size, prefix tokens and blocks of the model (see `Method.apply`).

    Attributes:
        model: model to which the session applies the methods.
        methods: methods in their order of application.
        reports: reports of the methods in the same order. The list is empty before `apply`.

    Raises:
        SettingError: If `model` is not a module, or if `methods` contains an object that is not a method.
        TypeError: If `structure` contains an unknown argument.

    Examples:
        >>> with MethodSession(model, [LastStage(), LBPDCT(order=4)]) as session:
        ...     optimizer = torch.optim.AdamW(session.parameters(), 1e-4)
        ...     for step, (images, labels) in enumerate(loader):
        ...         with session.step(step):
        ...             loss = session.loss(F.cross_entropy(model(images), labels))
        ...             loss.backward()
        ...             optimizer.step()
        ...             optimizer.zero_grad()
        >>> session.save("trained.safetensors")
    """

    def __init__(
        self,
        model: nn.Module,
        methods: Method | Iterable[Method],
        frozen_bn: FrozenStatistics = True,
        classifier: str | Iterable[str] = (),
        **structure: Unpack[Structure],
    ) -> None:
        check_module(model)
        check_arguments(structure)
        self.model = model
        self.methods = in_order(methods)
        self.frozen_bn, self.classifier, self.structure = frozen_bn, classifier, structure
        self.reports: list[Applied] = []
        self._applied = self._open = self._entered = False
        self._frozen: list[str] = []  # Names of the BatchNorm layers that this session has frozen.
        # The next two attributes are empty before the first step.
        self._between_steps: dict[str, bool] = {}  # value of requires_grad between two steps, by parameter name
        self._parameters: list[nn.Parameter] = []  # all parameters of the model
        self._step: int | None = None
        self._last: int | None = None  # number of the last completed step of this training run
        self._block: int | None = None  # number of the step whose ``with`` block is running
        self._losses = 0
        self._stepped: list[Optimizer] = []  # optimizers whose step() has been called in the current step
        self._updated = False  # True if parameters were updated inside the backward pass
        self._checked = False
        self._counted: Executed | None = None
        self._size_note = ""  # phrase that states the assumed image size of `_counted`, or an empty string

    def apply(self) -> MethodSession:
        """Apply the methods, freeze the BatchNorm statistics, and open the session.

        If the methods are already applied, this method only opens the session.

        Returns:
            The session itself.

        Raises:
            UserError: If the model is compiled or wrapped, if another session is open on the model, or if a method does
                not support the model.
        """
        if not self._applied:
            refuse_wrapped(self.model)
        refuse_nested(self.model, self)
        if not self._applied:
            self.reports = apply_methods(self.model, self.methods, self.classifier, **self.structure)
            self._frozen = freeze_statistics(self.model, self.frozen_bn)
            for report in self.reports if rank() == 0 else ():
                log.info("%s", report)
                log.debug("%s", report.details().partition("\n")[2])
        self._applied = self._open = True
        OPENED[self.model] = ref(self)
        return self

    def remove(self) -> None:
        """Close the session, and restore the model's own modules, names and `requires_grad`.

        Trained values are kept, and adapters are merged if possible. Modules that cannot be merged are deleted together
        with their trained weights. To keep these weights, call `save` first.

        Raises:
            UserError: If the methods are not applied, or if a step is running.
        """
        self._require_applied("remove")
        self.close()
        for method in reversed(self.methods):
            method.remove(self.model)
        unfreeze_batch_norm(self.model, self._frozen)
        self.reports, self._frozen, self._counted, self._applied = [], [], None, False

    def close(self) -> None:
        """End the training. The methods remain applied. An unfinished step is abandoned."""
        self.abandon_step()
        self._open = self._entered = False
        if (opened := OPENED.get(self.model)) is not None and opened() is self:
            del OPENED[self.model]

    def __enter__(self) -> MethodSession:
        if self._entered:
            raise UserError("The session is already open. Enter the session once, around the training loop.")
        self.apply()
        self.start()
        self._entered = True
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return (name, parameter) pairs for all parameters that are trained in at least one step.

        Parameters that are frozen only in the current step are included.

        Raises:
            UserError: If the methods are not applied.
        """
        self._require_applied("parameters", in_block=True)
        others = {id(p) for method in self.methods for p in method.trained_in_some_step()}
        return [(n, p) for n, p in self.model.named_parameters() if p.requires_grad or id(p) in others]

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters to pass to an optimizer (see `named_parameters`)."""
        return [p for _, p in self.named_parameters()]

    @property
    def find_unused_parameters(self) -> bool:
        """True if some trainable parameters receive no gradient in some steps (see ``DistributedDataParallel``)."""
        return any(method.find_unused_parameters for method in self.methods)

    def check_optimizers(self, optimizers: Iterable[Any]) -> None:
        """Check that the optimizers contain all parameters that are trained in at least one step.

        The check also runs automatically at the end of the first completed ``with session.step()`` block. The check is
        skipped if no method selects or adds parameters.

        Raises:
            UserError: See `check_optimizer`.
        """
        if self._applied and any({Axis.SELECTION, Axis.ADAPTERS} & set(method.axes) for method in self.methods):
            check_optimizer(self.model, optimizers)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Return a context manager for one optimizer step.

        The block must contain the forward pass, the call of `loss`, the backward pass and ``optimizer.step()``.

        Args:
            number: number of the optimizer step, counted from 0 across all epochs. The number must be the same on all
                processes. A block with the number of an unfinished step continues this step (gradient accumulation).

        Raises:
            UserError: If the session is not open, if another step is running, or if the number has already been used.
                Raised at the end of the block if a call of `loss` is missing, or if an optimizer lacks parameters.
        """
        if not self._open:
            raise UserError(
                "session.step() was called outside of the session. Call session.step() inside `with"
                " MethodSession(model, methods) as session:`."
            )
        if self._block is not None:
            raise UserError(
                f"Step {number} began inside step {self._block}. Leave the `with session.step({self._block}):` block"
                " first. All micro-batches of an optimizer step may share one block."
            )
        self._check_number(number)
        if self._step is not None and self._step != number:
            self._end_without_update()
        continues = self._step == number
        self.begin_step(number)
        versions = self._versions()
        hook = register_optimizer_step_post_hook(self._after_optimizer)
        self._block, self._losses = number, self._losses if continues else 0
        try:
            yield
            if self._step is not None and (self._stepped or self._updated or self._versions() != versions):
                self._end_updated_step()
        except BaseException:
            self.abandon_step()
            raise
        finally:
            self._block = None
            hook.remove()

    def loss(self, loss: Tensor) -> Tensor:
        """Return `loss` plus the losses that the methods add.

        Call this method inside a step, once after each forward pass in training.

        Args:
            loss: loss of the forward pass, with shape ().

        Raises:
            UserError: If no step is running and a method acts per step or adds a loss, or if no forward pass has
                computed the loss that a method adds.
        """
        if self._step is None:
            refuse_loss_outside(self.methods, self._block)
        self._losses += 1
        for method in self.methods:
            loss = method.total_loss(loss)
        return loss

    @property
    def current_step(self) -> int | None:
        """Number of the running step, or None if no step is running."""
        return self._step

    def start(self) -> None:
        """Begin a new training run. The next step is the first step of this run."""
        self.abandon_step()
        self._between_steps, self._parameters, self._checked, self._last = {}, [], False, None

    def begin_step(self, number: int) -> None:
        """Begin the optimizer step with the given number.

        Calls for further micro-batches of the same step have no effect.

        Raises:
            UserError: If the methods are not applied, or if a step with this number or a larger number has already
                ended.
        """
        self._require_applied("begin_step", in_block=True)
        self._check_number(number)
        if self._step == number:
            return
        if self._step is None:  # the user may have frozen or unfrozen layers since the last step
            self._between_steps, self._parameters = trainable(self.model), list(self.model.parameters())
        self._step = number
        for method in self.methods:
            method.step_begin(number)

    def end_step(self) -> None:
        """End the step. Call this method after ``optimizer.step()`` and before the gradients are set to zero.

        Raises:
            UserError: If the methods are not applied, or if no step is running.
        """
        self._require_applied("end_step", in_block=True)
        if self._step is None:
            raise UserError(
                "session.end_step() was called, but no step has begun. Call session.begin_step(number) before the first"
                " forward pass of each step."
            )
        for method in self.methods:
            method.step_end()
        self._last = self._step
        self._forget_step()

    def abandon_step(self) -> None:
        """Abandon an unfinished step, and reset `requires_grad` to the values between two steps."""
        if self._step is not None:
            make_trainable(self.model, self._between_steps)
            for method in self.methods:
                _forget_step(method)
        self._forget_step()

    def _check_number(self, number: int) -> None:
        """Raise an error unless `number` is the number of the running step or is larger than all earlier numbers."""
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise SettingError("step", f"{number!r:.60}", "an integer >= 0")
        last = self._last if self._step is None else self._step
        if last is not None and number <= last and number != self._step:
            raise UserError(
                f"Step {number} follows step {last} of the same training. Number the steps across all epochs, and give"
                " each step of the optimizer a new number. To begin a new training, call session.start()."
            )

    def _forget_step(self) -> None:
        self._step, self._stepped, self._updated = None, [], False

    def _end_without_update(self) -> None:
        """End a step in which the parameters were not updated.

        For example, GradScaler skips the update after an overflow, or a step is incomplete. The gradients of the step
        may already have been freed.
        """
        make_trainable(self.model, self._between_steps)
        for method in self.methods:
            if Needs.GRADIENTS_AT_STEP_END in method.needs:
                _forget_step(method)
            else:
                method.step_end()
        self._last = self._step
        self._forget_step()

    def _after_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        """End the step if all parameters with a gradient have been updated."""
        if self._step is None:
            return
        stepped = {id(p) for o in (*self._stepped, optimizer) for group in o.param_groups for p in group["params"]}
        mine = [p for p in self._parameters if p.requires_grad]
        if not any(id(p) in stepped for p in mine):
            return  # the optimizer belongs to another model
        if torch._C._current_graph_task_id() != -1:
            refuse_gradient_readers(self.methods)
            self._updated = True
            return
        self._stepped.append(optimizer)
        if all(id(p) in stepped for p in mine if p.grad is not None):
            self._end_updated_step()

    def _end_updated_step(self) -> None:
        if not self._losses and (adding := names_adding_loss(self.methods)):
            raise UserError(
                f"method {adding[0]} adds a loss, but session.loss() was not called in step {self._step}. Call"
                " loss = session.loss(loss) after each forward pass and before loss.backward()."
            )
        optimizers = self._stepped
        self.end_step()
        if not self._checked and optimizers:
            self._checked = True
            self.check_optimizers(optimizers)

    def _versions(self) -> int:
        """Return the sum of the parameters' version counters. Any in-place update increases the sum."""
        return sum(p._version for p in self._parameters)

    def state_dict(self) -> dict[str, Any]:
        """Return a mapping from the `state_key` of each method to its state, for a checkpoint.

        Methods without state are omitted. Parameters, optimizer states and random states are not included.
        """
        return {method.state_key: state for method in self.methods if (state := method.state_dict())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the method states in `state_dict`."""
        for method in self.methods:
            if method.state_key in state_dict:
                method.load_state_dict(state_dict[method.state_key])

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Check that the `state_dict` of a checkpoint belongs to these methods and settings.

        Raises:
            UserError: If the checkpoint was written with other methods or settings.
        """
        refuse_foreign_state(self.methods, self.state_dict(), state_dict)

    def save(self, path: str | Path, whole: bool = False) -> None:
        """Write the trained part or all weights to a ``.safetensors`` file.

        The trained part consists of the trained parameters, the modules that methods added, the buffers (except frozen
        BatchNorm statistics), and the states of the methods. `load` restores the trained part on the same pretrained
        model with the same methods. If all weights are written, adapters are merged, and the weights have the names of
        the pretrained model. Such a file can be loaded with ``timm.create_model(..., checkpoint_path=path)``. Modules
        that cannot be merged keep their names.

        Args:
            path: path of the file. The folder that contains the file is created if necessary.
            whole: if True, write all weights instead of only the trained part.

        Raises:
            UserError: If the methods are not applied, if a step is running, or if the file cannot be written.
        """
        self._require_applied("save")
        if whole:
            saving.write_whole(Path(path), self.model, self.methods)
        else:
            saving.write_trained(Path(path), self.model, self._saved_names(), self.methods)

    def load(self, path: str | Path) -> None:
        """Load a file written by `save` into the model, and restore the states of the methods.

        Load a file with a trained part inside the session. Load a file with all weights before the session is entered,
        or inside the session if the methods do not rename layers. Existing optimizers remain valid.

        Raises:
            UserError: If the file cannot be read, is malformed, or was saved with other methods, settings, parameters
                or pretrained weights. In this case, the model is unchanged.
        """
        content = saving.read(Path(path))
        if content.about is None:
            saving.load_whole(content, self.model)
            return
        self._require_applied("load")
        saving.load_trained(content, self.model, self._saved_names(), self.methods)

    def _saved_names(self) -> list[str]:
        return saving.names_of_trained_part(self.model, self.parameters())

    def cost(self, batch_size: int = 8, input_size: Sequence[int] | None = None, **options: Any) -> Executed:
        """Count the cost of a training step without changing the model. ``print(session)`` shows the last result.

        Args:
            batch_size: number of images in the batch.
            input_size: image size (H, W) in pixels. If None, the model's own image size is used.
            options: further arguments of `efficient_ft.cost.executed`, such as ``precision`` and ``task``.
        """
        from efficient_ft.cost.executed import executed

        options = {"in_chans": image_channels(self.model), "frozen_bn": self.frozen_bn, **options}
        size = default_image_size(self.model) if input_size is None else input_size
        self._size_note = assumed_size_note(self.model) if input_size is None else ""
        self._counted = executed(self.model, batch_size, size, methods=self.methods, **options)
        return self._counted

    def __repr__(self) -> str:
        names = ", ".join(method.name for method in self.methods) or "no method"
        return f"MethodSession({type(self.model).__name__}: {names}{'' if self._applied else '; not applied'})"

    def __str__(self) -> str:
        """Return three lines (trainable parameters, memory, FLOPs), and a fourth line if the image size is assumed."""
        if not self._applied:
            return f"{self!r}. Enter the session or call apply() to apply the methods."
        text = summary(self.model, self.methods, self._saved_names(), lambda: self._counted or self.cost())
        return "\n".join(filter(None, (text, self._size_note)))

    def _require_applied(self, call: str, in_block: bool = False) -> None:
        if not self._applied:
            raise UserError(
                f"session.{call}() was called before the methods were applied. Enter the session (`with session:`) or"
                " call session.apply() first."
            )
        if self._block is not None and not in_block:
            raise UserError(f"session.{call}() was called inside step {self._block}. Call it between two steps.")


def _forget_step(method: Method) -> None:
    """End the step in the `StepWatch` of a method without calling `Method.step_end`."""
    if method._watch is not None:
        method._watch.end()
