"""The callback of Hugging Face's `Trainer` that carries methods through a training, with any timm model.

>>> model = TimmWrapperForImageClassification.from_pretrained("timm/deit_small_patch16_224.fb_in1k", num_labels=37)
>>> callback = MethodCallback([BSR(blocks=[3, 7, 11]), BackRazor()])
>>> Trainer(model, args, train_dataset=images, callbacks=[callback]).train()
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.in_backward import Wrong
from efficient_ft.integrations.session import MethodSession, decode, encode, find_network
from efficient_ft.methods.base import Applied, Method
from efficient_ft.methods.declarations import Adds

try:
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise ImportError(
        "efficient_ft.integrations.transformers needs the packages transformers and accelerate:"
        " pip install 'efficient-ft[transformers]'"
    ) from error

log = logging.getLogger(__name__)

_CHECKPOINTING = "Use the method Checkpointing, which recomputes blocks together with other methods."
#: Arguments of TrainingArguments that methods cannot work under, and what to do instead.
_REFUSED = {
    "fsdp": "Methods act on whole parameters, which FSDP shards.",
    "deepspeed": "Methods act on whole parameters, which DeepSpeed shards.",
    # New versions set both names if one is given.
    "gradient_checkpointing": _CHECKPOINTING,
    "activation_checkpointing": _CHECKPOINTING,
    "auto_find_batch_size": "It starts over in the middle of a step, with the state that methods have by then.",
    "restore_callback_states_from_checkpoint": "It makes new callbacks; this one restores its state without it.",
}


class MethodCallback(TrainerCallback, ExportableState):
    """Apply methods to the network of a `Trainer`'s model and carry them through training.

    - They are applied when the Trainer is built, once, before its optimizer: pass the callback in
      ``Trainer(callbacks=[...])``.
    - Each optimizer step begins once, before its first micro-batch, and ends after the optimizer's step and before
      gradients are set to zero.
    - A loss of a method's own is added to the ``loss`` of the model's output.
    - BatchNorm statistics stay frozen, though the Trainer calls ``model.train()`` at each micro-batch.
    - The methods' state is part of the checkpoint (``trainer_state.json``). A resumed training continues exactly.
    - Evaluation has no work per step, and needs no training before it.

    Args:
        methods: one method or several; their order in the list has no effect.
        network: the attribute of the model that holds the timm model, ``timm_model`` in `TimmWrapper` models; dotted
            for an attribute's attribute; ``""`` for the model itself.
        frozen_bn: freeze the BatchNorm statistics of the network, as the recipes of the papers do.
        classifier: full names of the classifier's modules in the network, where timm does not state them.

    Raises:
        SettingError: when the Trainer is built: no such network; an argument that the methods cannot work under.
        UserError: when the Trainer is built: a compiled or wrapped network, a network that a method refuses, an
            optimizer without the parameters that methods added. When training starts: the callback was added after
            the Trainer was built, or the model is another one (``model_init``); a checkpoint of other methods; an
            optimizer that steps inside the backward pass where the Trainer or a method needs all gradients. In
            training: an output without the loss to which a method adds its own.
    """

    def __init__(
        self,
        methods: Method | Iterable[Method],
        network: str = "timm_model",
        frozen_bn: bool = True,
        classifier: str | Iterable[str] = (),
    ) -> None:
        self.network = network
        self._runner = MethodSession(methods, frozen_bn, classifier)
        self._hook: Any = None

    @property
    def methods(self) -> list[Method]:
        """The methods, in their order of application."""
        return self._runner.methods

    @property
    def reports(self) -> list[Applied]:
        """The report of each method; empty before the Trainer is built."""
        return self._runner.reports

    # ------------------------------------------------------------------ before training
    def on_init_end(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Apply the methods, before the Trainer builds its optimizer."""
        self._refuse_arguments(args)
        self._runner.apply(find_network(model, self.network))
        if optimizer is not None:
            self._runner.check_optimizers([optimizer])
        if state.is_world_process_zero:
            for report in self.reports:
                log.info("%s", report)
                log.debug("%s", report.details().partition("\n")[2])

    def _refuse_arguments(self, args: Any) -> None:
        for name, why in _REFUSED.items():
            value = getattr(args, name, None)
            if value:
                both = why == _CHECKPOINTING and getattr(args, "activation_checkpointing", None)
                name = "gradient_checkpointing (activation_checkpointing)" if both else name
                raise SettingError(name, value, "off", why)
        if args.n_gpu > 1:
            raise SettingError(
                "n_gpu", args.n_gpu, "1 for each process", "Start one process per GPU: torchrun --nproc-per-node=N."
            )
        if args.label_smoothing_factor and self._runner.adds_loss:
            raise SettingError(
                "label_smoothing_factor",
                args.label_smoothing_factor,
                f"0 with method {self._runner.adds_loss[0]}, which adds a loss of its own",
                "With it the Trainer computes the loss outside of the model.",
            )
        if args.world_size > 1 and self._runner.find_unused_parameters:
            why = f"With method {self._runner.find_unused_parameters[0]} some parameters get no gradient in some steps."
            if args.ddp_find_unused_parameters is False:
                raise SettingError("ddp_find_unused_parameters", False, "True or None", why)
            if getattr(args, "ddp_static_graph", None):
                raise SettingError("ddp_static_graph", True, "False or None", why)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Restore the methods' state where a training is resumed, and begin with the first step."""
        if self._runner.network is None:
            raise UserError(
                "MethodCallback was added after the Trainer was built. Pass it in Trainer(callbacks=[...]), which"
                " applies the methods before the optimizer is built."
            )
        if find_network(model, self.network) is not self._runner.network:
            raise UserError(
                "The Trainer trains another model than the one the methods were applied to: model_init builds a new"
                " one for each training. Pass Trainer(model=...) instead."
            )
        self._runner.check_optimizers([optimizer])
        clip, accumulate = args.max_grad_norm, args.gradient_accumulation_steps
        self._runner.check_in_backward(
            [optimizer],
            clipping=Wrong("max_grad_norm", clip, "0") if clip else None,
            accumulation=Wrong("gradient_accumulation_steps", accumulate, "1") if accumulate != 1 else None,
            scaling=Wrong("fp16", True, "False") if args.fp16 else None,
            processes=Wrong("world_size", args.world_size, "1") if args.world_size > 1 else None,
        )
        name = type(self).__name__
        if state.global_step > 0:
            held = state.stateful_callbacks.get(name, {"attributes": {"methods": {}}})
            if isinstance(held, list):
                raise UserError("A Trainer takes one MethodCallback: pass all methods in its list.")
            states = decode(held["attributes"]["methods"])
            self._runner.check_state(states)
            self._runner.load_state_dict(states)
        state.stateful_callbacks.setdefault(name, self.state())  # which the Trainer writes over
        self._runner.start()
        if self._runner.adds_loss and self._hook is None:
            self._hook = model.register_forward_hook(self._add_losses, with_kwargs=True)

    def _add_losses(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """Add the methods' losses to that of the model's output, in training."""
        if not model.training or not torch.is_grad_enabled():
            return None
        name = self._runner.adds_loss[0]
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
                f"method {name} adds a loss of its own, but the output of {type(model).__name__} holds no loss to add"
                " it to. Compute the loss in the model, from labels, and not in compute_loss_func."
            )
        total = self._runner.total_loss(loss)
        if isinstance(output, tuple):
            return (total, *output[1:])
        output["loss"] = total  # type: ignore[index]
        return output

    # ------------------------------------------------------------------ per step
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the optimizer step, before its first micro-batch."""
        self._runner.step_begin(state.global_step)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the optimizer step, before gradients are set to zero."""
        self._runner.step_end()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave a step that was not completed; the methods stay applied."""
        self._runner.abandon_step()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    # ------------------------------------------------------------------ the model
    def save_pretrained(self, model: Any, folder: str | Path, **kwargs: Any) -> None:
        """Save the model with its own names, adapters merged, so that ``from_pretrained`` loads it as it is.

        `model` is not changed. ``model.save_pretrained`` would save the names of adapters, which ``from_pretrained``
        does not find.

        Args:
            model: the Trainer's model.
            folder: of the files.
            kwargs: arguments of ``model.save_pretrained``.

        Raises:
            UserError: a method adds parts that cannot be merged.
        """
        added = [method.name for method in self.methods if not method.merges and Adds.MODULES in method.adds]
        if added:
            raise UserError(
                f"method {added[0]} adds modules that cannot be merged, and from_pretrained would not load them. Save"
                " model.state_dict() instead, and load it after the method is applied."
            )
        plain = copy.deepcopy(model)
        for method in reversed(self.methods):
            method._remove(find_network(plain, self.network))
        plain.save_pretrained(folder, **kwargs)

    # ------------------------------------------------------------------ state
    def state(self) -> dict[str, Any]:
        """The state of the methods that have one, for `trainer_state.json`."""
        return {"args": {}, "attributes": {"methods": encode(self._runner.state_dict())}}
