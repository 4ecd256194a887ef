"""The Lightning callback that carries methods through a training, in any LightningModule.

>>> callback = MethodCallback([BSR(blocks=[3, 7, 11]), BackRazor()], network="model")
>>> Trainer(callbacks=[callback]).fit(module, loader)
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.in_backward import Wrong
from efficient_ft.integrations.session import MethodSession, find_network
from efficient_ft.methods.base import Applied, Method

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy
except ImportError as error:
    raise ImportError(
        "efficient_ft.integrations.lightning needs the package lightning: pip install 'lightning>=2.6.6'"
    ) from error

log = logging.getLogger(__name__)

#: Strategies that shard parameters, which methods freeze, replace and add to.
_SHARDING = ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")


class MethodCallback(Callback):
    """Apply methods to the network of a LightningModule and carry them through training.

    - ``setup`` applies them, once, before the optimizer is built. The network is built, and its pretrained weights are
      loaded, in the module's ``__init__``. In later stages and trainings nothing is applied again.
    - Each optimizer step begins once, before its first micro-batch, and ends after the optimizer's step.
    - A loss of a method's own is added to what ``training_step`` returns (a tensor, or a dict with ``loss``). A module
      with a method ``on_total_loss(loss)`` is called with the sum of a micro-batch, e.g. to log it.
    - BatchNorm statistics stay frozen, after any ``train()`` too.
    - The methods' state is part of the checkpoint. A resumed training continues exactly.
    - Evaluation has no work per step, and needs no training before it.

    Args:
        methods: one method or several; their order in the list has no effect.
        network: the attribute of the LightningModule that holds the timm model; dotted for an attribute's attribute
            (``"encoder.net"``); ``""`` for the LightningModule itself.
        frozen_bn: freeze the BatchNorm statistics of the network, as the recipes of the papers do.
        classifier: full names of the classifier's modules in the network, where timm does not state them.

    Raises:
        SettingError: in ``setup``: no such network; a strategy that the methods cannot run under, with the one to pass.
        UserError: in ``setup``: a compiled or wrapped network, a network that a method refuses, manual optimization
            under a method with a loss of its own. When training starts: an optimizer built before the methods were
            applied, or one that steps inside the backward pass where the Trainer or a method needs all gradients. When
            a training is resumed: a checkpoint of other methods.
    """

    def __init__(
        self,
        methods: Method | Iterable[Method],
        network: str = "model",
        frozen_bn: bool = True,
        classifier: str | Iterable[str] = (),
    ) -> None:
        self.network = network
        self._runner = MethodSession(methods, frozen_bn, classifier)

    @property
    def methods(self) -> list[Method]:
        """The methods, in their order of application."""
        return self._runner.methods

    @property
    def reports(self) -> list[Applied]:
        """The report of each method; empty before ``setup``."""
        return self._runner.reports

    @property
    def state_key(self) -> str:
        """The key of the methods' state in the callback states of a checkpoint."""
        return "MethodCallback" if self.network == "model" else f"MethodCallback({self.network})"

    # ------------------------------------------------------------------ before training
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Apply the methods; in stage ``fit``, refuse what cannot carry them and add their losses to the module's."""
        if getattr(pl_module, "_compiler_ctx", None) is not None:
            raise UserError(
                f"The LightningModule must be a plain module, got torch.compile({type(pl_module).__name__}). Pass the"
                " module itself, and compile parts of its network after the methods are applied (on_fit_start)."
            )
        network = find_network(pl_module, self.network)
        self._refuse_strategy(trainer, network, stage)
        if stage == "fit" and self._runner.adds_loss and not pl_module.automatic_optimization:
            raise UserError(
                f"method {self._runner.adds_loss[0]} adds a loss of its own, which manual optimization would lose. Set"
                " automatic_optimization=True, or call total_loss in a training loop of your own."
            )
        applied_before = bool(self.reports)
        self._runner.apply(network)
        if not applied_before and getattr(trainer, "is_global_zero", False):
            for report in self.reports:
                log.info("%s", report)
                log.debug("%s", report.details().partition("\n")[2])
        if stage == "fit" and (self._runner.adds_loss or hasattr(pl_module, "on_total_loss")):
            _TotalLoss.add(pl_module, self._runner)

    def _refuse_strategy(self, trainer: Trainer, network: nn.Module, stage: str) -> None:
        strategy = getattr(trainer, "strategy", None)
        kind = type(strategy).__name__
        if {c.__name__ for c in type(strategy).__mro__} & set(_SHARDING):
            raise SettingError(
                "strategy", kind, "one device or DDP", "Methods act on whole parameters, which this strategy shards."
            )
        norms = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in network.modules())
        if norms and getattr(strategy, "_layer_sync", None) is not None:
            raise SettingError(
                "sync_batchnorm",
                True,
                "False",
                "It replaces the network's BatchNorm layers after the methods are applied and statistics are frozen.",
            )
        if stage != "fit" or not isinstance(strategy, DDPStrategy) or not self._runner.find_unused_parameters:
            return
        options = strategy._ddp_kwargs
        if not options.get("find_unused_parameters") or options.get("static_graph"):
            given = ", ".join(f"{k}={v}" for k, v in options.items() if k in ("find_unused_parameters", "static_graph"))
            raise SettingError(
                "strategy",
                f"{kind}({given})",
                "'ddp_find_unused_parameters_true' or DDPStrategy(find_unused_parameters=True)",
                f"With method {self._runner.find_unused_parameters[0]} some parameters get no gradient in some steps.",
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse an optimizer built before the methods were applied, or one that this training cannot use."""
        self._runner.check_optimizers(trainer.optimizers)
        clip, accumulate = trainer.gradient_clip_val, trainer.accumulate_grad_batches
        precision, processes = trainer.precision, trainer.world_size
        self._runner.check_in_backward(
            trainer.optimizers,
            clipping=Wrong("gradient_clip_val", clip, "None") if clip else None,
            accumulation=Wrong("accumulate_grad_batches", accumulate, "1") if accumulate != 1 else None,
            scaling=Wrong("precision", precision, "32-true or bf16-mixed") if precision == "16-mixed" else None,
            processes=Wrong("devices", processes, "1") if processes > 1 else None,
        )

    # ------------------------------------------------------------------ per step
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reset the step state before the first batch."""
        self._runner.start()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin the optimizer step with its first micro-batch."""
        self._runner.step_begin(trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the optimizer step once the optimizer has stepped."""
        if self._runner.step not in (None, trainer.global_step):
            self._runner.step_end()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave a step that the last micro-batches did not complete."""
        self._runner.abandon_step()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the step that was interrupted, and the module as it was."""
        self._runner.abandon_step()
        _TotalLoss.remove(pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the module back its own ``training_step``; the methods stay applied."""
        _TotalLoss.remove(pl_module)

    # ------------------------------------------------------------------ state
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Refuse to resume from a checkpoint of other methods."""
        if trainer.state.fn == "fit":
            self._runner.check_state(checkpoint.get("callbacks", {}).get(self.state_key, {}))

    def state_dict(self) -> dict[str, Any]:
        """The state of the methods that have one, by method and settings."""
        return self._runner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the methods' state."""
        self._runner.load_state_dict(state_dict)


class _TotalLoss:
    """The ``training_step`` of a LightningModule plus the losses of methods: one for all callbacks of the module."""

    def __init__(self, module: LightningModule) -> None:
        self.module, self.runners = module, list[MethodSession]()
        # Lightning reads the signature through `__wrapped__`.
        functools.update_wrapper(self, module.training_step)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            return output  # None is a batch without a step; Lightning refuses the rest
        for runner in self.runners:
            loss = runner.total_loss(loss)
        if hasattr(self.module, "on_total_loss"):
            self.module.on_total_loss(loss)  # type: ignore[operator]
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    @classmethod
    def add(cls, module: LightningModule, runner: MethodSession) -> None:
        """Add the losses of a runner's methods to the ``training_step`` of `module`."""
        own: Any = vars(module).get("training_step")
        if not isinstance(own, cls):
            own = cls(module)
            module.training_step = own  # type: ignore[method-assign]
        if runner not in own.runners:
            own.runners.append(runner)

    @classmethod
    def remove(cls, module: LightningModule) -> None:
        """Give `module` back the ``training_step`` it had."""
        own: Any = vars(module).get("training_step")
        if not isinstance(own, cls):
            return
        del module.training_step
        wrapped: Any = own.__wrapped__  # type: ignore[attr-defined]
        if getattr(wrapped, "__func__", None) is not type(module).training_step:
            module.training_step = wrapped  # type: ignore[method-assign]
