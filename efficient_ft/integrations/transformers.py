"""Callback for Hugging Face's `Trainer` that applies methods to timm models and calls these methods during training.

>>> model = TimmWrapperForImageClassification.from_pretrained("timm/deit_small_patch16_224.fb_in1k", num_labels=37)
>>> callback = MethodCallback([BSR(blocks=[3, 7, 11]), BackRazor()])
>>> Trainer(model, args, train_dataset=images, callbacks=[callback]).train()
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from efficient_ft.core.errors import SettingError, UserError, first_line
from efficient_ft.core.in_backward import Wrong
from efficient_ft.integrations.checks import OPENED, check_callback, check_in_backward, find_network, names_adding_loss
from efficient_ft.integrations.saving import decode, encode
from efficient_ft.integrations.session import MethodSession
from efficient_ft.methods.base import Applied, Method, in_order
from efficient_ft.methods.declarations import Adds, Axis
from efficient_ft.models.frozen_batch_norm import FrozenStatistics
from efficient_ft.models.marks import marks_of
from efficient_ft.models.view import Structure

log = logging.getLogger(__name__)

try:
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise ImportError(
        "efficient_ft.integrations.transformers requires the packages transformers and accelerate."
        " Run: pip install 'efficient-ft[transformers]'"
    ) from error

_CHECKPOINTING = "Use the method Checkpointing, which recomputes blocks together with other methods."
#: Fields of TrainingArguments that are not compatible with methods. The values are reasons or alternatives.
#: Checkpointing is compatible with methods that neither pack activations, reduce tokens nor add a loss.
_REFUSED = {
    "fsdp": "Methods require entire parameters, but FSDP shards parameters.",
    "deepspeed": "Methods require entire parameters, but DeepSpeed shards parameters.",
    # Both names are listed, because recent versions of `transformers` set both arguments if one of them is given.
    "gradient_checkpointing": _CHECKPOINTING,
    "activation_checkpointing": _CHECKPOINTING,
    "auto_find_batch_size": "This argument restarts training in the middle of a step without resetting the methods.",
    "restore_callback_states_from_checkpoint": (
        "This argument creates new callbacks. MethodCallback restores its state without this argument."
    ),
}


class MethodCallback(TrainerCallback, ExportableState):
    """Apply methods to the network in the model of a `Trainer`, and call these methods during training.

    The callback opens a `MethodSession` and controls the session from the hooks of the Trainer:

    - The methods are applied once, when the Trainer is created and before the Trainer creates the optimizer. Pass the
      callback in ``Trainer(callbacks=[...])``.
    - The callback begins each optimizer step before its first micro-batch. The callback ends the step after
      ``optimizer.step()`` and before the gradients are set to zero.
    - The losses of the methods are added to the ``loss`` in the output of the model.
    - BatchNorm statistics remain frozen, although the Trainer calls ``model.train()`` for each micro-batch.
    - Checkpoints contain the states of the methods in ``trainer_state.json``, so that a resumed training run gives the
      same result as an uninterrupted run.
    - Evaluation does not call the methods and is also possible without previous training.

    Args:
        methods: one method or several methods, in any order.
        network: name of the attribute in which the model stores the network (``timm_model`` in `TimmWrapper`
            models). A dotted path is also allowed. ``""`` denotes the model itself.
        frozen_bn, classifier, **structure: see `MethodSession`.

    Attributes:
        methods: methods in their order of application.
        session: `MethodSession` of the network, or None before the Trainer is created.

    Raises:
        SettingError: Raised when the Trainer is created if the attribute `network` does not exist, or if an argument of
            the Trainer is not compatible with the methods.
        UserError: Raised when the Trainer is created if the network is compiled or wrapped, if a method does not
            support the network, or if trained parameters are missing from the given optimizer. Raised when training
            starts if the callback was added to an existing Trainer, if the model has been replaced (``model_init``), or
            if the checkpoint was written with other methods. Also raised if the optimizer steps inside the backward
            pass although the Trainer or a method requires all gradients. Raised during training if a method adds a loss
            and the output of the model contains no loss.
    """

    def __init__(
        self,
        methods: Method | Iterable[Method],
        network: str = "timm_model",
        frozen_bn: FrozenStatistics = True,
        classifier: str | Iterable[str] = (),
        **structure: Unpack[Structure],
    ) -> None:
        check_callback(network, structure)
        self.methods, self.network = in_order(methods), network
        self.session: MethodSession | None = None
        self._options: dict[str, Any] = {"frozen_bn": frozen_bn, "classifier": classifier, **structure}
        self._hook: Any = None

    @property
    def reports(self) -> list[Applied]:
        """Reports of all methods. The list is empty before the Trainer is created."""
        return self.session.reports if self.session is not None else []

    def on_init_end(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Apply the methods before the Trainer creates its optimizer."""
        self._refuse_arguments(args)
        network = find_network(model, self.network)
        if self.session is None or self.session.model is not network:
            self.session = MethodSession(network, self.methods, **self._options)
        opened = OPENED.get(network)
        # The session is already open if a Trainer for evaluation is created during training.
        training = opened is not None and opened() is self.session
        self.session.apply()
        if not training:
            # Other sessions can be used until on_train_begin opens this session again.
            self.session.close()
        if optimizer is not None:
            self.session.check_optimizers([optimizer])

    def _refuse_arguments(self, args: Any) -> None:
        conflicting = [m.name for m in self.methods if {Axis.MEMORY, Axis.TOKENS} & set(m.axes)]
        conflicting += names_adding_loss(self.methods)
        for name, why in _REFUSED.items():
            value = getattr(args, name, None)
            if value and (why != _CHECKPOINTING or conflicting):
                both = why == _CHECKPOINTING and getattr(args, "activation_checkpointing", None)
                name = "gradient_checkpointing (activation_checkpointing)" if both else name
                allowed = f"off with method {conflicting[0]}" if why == _CHECKPOINTING else "off"
                raise SettingError(name, value, allowed, why)
        if args.n_gpu > 1:
            raise SettingError(
                "n_gpu", args.n_gpu, "1 for each process", "Start one process per GPU with torchrun --nproc-per-node=N."
            )
        adding = names_adding_loss(self.methods)
        if args.label_smoothing_factor and adding:
            raise SettingError(
                "label_smoothing_factor",
                args.label_smoothing_factor,
                f"0 with method {adding[0]}, which adds a loss",
                "With label smoothing, the Trainer computes the loss outside of the model.",
            )
        unused = [method.name for method in self.methods if method.find_unused_parameters]
        if args.world_size > 1 and unused:
            why = f"With method {unused[0]}, some parameters receive no gradient in some steps."
            if args.ddp_find_unused_parameters is False:
                raise SettingError("ddp_find_unused_parameters", False, "True or None", why)
            if getattr(args, "ddp_static_graph", None):
                raise SettingError("ddp_static_graph", True, "False or None", why)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Open the session. When training is resumed, restore the states of the methods."""
        if self.session is None:
            raise UserError(
                "MethodCallback was added after the Trainer was created. Pass the callback in Trainer(callbacks=[...]),"
                " so that the methods are applied before the optimizer is created."
            )
        if find_network(model, self.network) is not self.session.model:
            raise UserError(
                "The methods were applied to a different model, because model_init builds a new model for each"
                " training. Pass Trainer(model=...) instead."
            )
        self.session.apply()
        own = {method.state_key for method in self.methods}
        if others := [mark.method for mark in marks_of(self.session.model) if mark.key not in own]:
            log.warning(
                "warning: this Trainer does not run the steps of method %s, because the method was applied outside of"
                " the MethodCallback. To train with all methods, pass all methods to one MethodCallback.",
                ", ".join(others),
            )
        self.session.check_optimizers([optimizer])
        clip, accumulate = args.max_grad_norm, args.gradient_accumulation_steps
        check_in_backward(
            self.methods,
            [optimizer],
            clipping=Wrong("max_grad_norm", clip, "0") if clip else None,
            accumulation=Wrong("gradient_accumulation_steps", accumulate, "1") if accumulate != 1 else None,
            scaling=Wrong("fp16", True, "False") if args.fp16 else None,
            processes=Wrong("world_size", args.world_size, "1") if args.world_size > 1 else None,
        )
        name = type(self).__name__
        if state.global_step > 0:
            saved = state.stateful_callbacks.get(name, {"attributes": {"methods": {}}})
            if isinstance(saved, list):
                raise UserError("A Trainer accepts only one MethodCallback. Pass all methods to one callback.")
            try:
                states = decode(saved["attributes"]["methods"])
            except ValueError as error:
                raise UserError(
                    f"The states of the methods in the checkpoint are malformed: {first_line(error)}."
                ) from error
            self.session.check_state(states)
            self.session.load_state_dict(states)
        state.stateful_callbacks.setdefault(name, self.state())  # the Trainer requires this entry and updates it
        self.session.start()
        if names_adding_loss(self.methods) and self._hook is None:
            self._hook = model.register_forward_hook(self._add_losses, with_kwargs=True)

    def _add_losses(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if not model.training or not torch.is_grad_enabled():
            return None
        name = names_adding_loss(self.methods)[0]
        if kwargs.get("num_items_in_batch") is not None:
            raise UserError(
                f"method {name} adds a mean over the batch to the loss, but {type(model).__name__} divides its loss by"
                " num_items_in_batch. Set accepts_loss_kwargs=False in the model's class."
            )
        if isinstance(output, Mapping):
            loss = output.get("loss")
        else:
            loss = output[0] if isinstance(output, tuple) and output else None
        if not isinstance(loss, Tensor) or loss.dim():
            raise UserError(
                f"method {name} adds a loss, but the output of {type(model).__name__} contains no loss. Compute the"
                " loss in the model from the labels, instead of in compute_loss_func."
            )
        total = self._applied().loss(loss)
        if isinstance(output, tuple):
            return (total, *output[1:])
        output["loss"] = total  # type: ignore[index]
        return output

    def _applied(self) -> MethodSession:
        assert self.session is not None, "on_train_begin must refuse training without a session"
        return self.session

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the optimizer step before its first micro-batch."""
        self._applied().begin_step(state.global_step)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the optimizer step before the gradients are set to zero."""
        self._applied().end_step()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Abandon an unfinished step, and close the session. The methods remain applied."""
        self._applied().close()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def save_pretrained(self, model: Any, folder: str | Path, **kwargs: Any) -> None:
        """Save the model with merged adapters, so that ``from_pretrained`` can load the model. `model` is not changed.

        ``model.save_pretrained`` would save the parameters under the names of the adapters, which ``from_pretrained``
        does not recognize.

        Args:
            model: model of the Trainer.
            folder: folder to which the files are written.
            kwargs: further arguments of ``model.save_pretrained``.

        Raises:
            UserError: If a method adds modules that cannot be merged.
        """
        added = [method.name for method in self.methods if not method.merges and Adds.MODULES in method.adds]
        if added:
            raise UserError(
                f"method {added[0]} adds modules that cannot be merged, and from_pretrained would not load these"
                " modules. Save model.state_dict() instead, and load this state after the method is applied."
            )
        plain = copy.deepcopy(model)
        for method in reversed(self.methods):
            method._remove(find_network(plain, self.network))
        plain.save_pretrained(folder, **kwargs)

    def state(self) -> dict[str, Any]:
        """Return the states of the methods in the format of ``trainer_state.json``.

        Methods without state are omitted.
        """
        return {
            "args": {},
            "attributes": {"methods": encode({} if self.session is None else self.session.state_dict())},
        }
