"""Lightning callback that applies methods to any LightningModule and calls these methods during training.

>>> callback = MethodCallback([BSR(blocks=[3, 7, 11]), BackRazor()], network="model")
>>> Trainer(callbacks=[callback]).fit(module, loader)
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, Unpack

from torch import Tensor, nn

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.in_backward import Wrong
from efficient_ft.integrations.checks import check_callback, check_in_backward, find_network, names_adding_loss
from efficient_ft.integrations.session import MethodSession
from efficient_ft.methods.base import Applied, Method, in_order
from efficient_ft.models.frozen_batch_norm import FrozenStatistics
from efficient_ft.models.view import Structure

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy
except ImportError as error:
    raise ImportError(
        "efficient_ft.integrations.lightning requires the package lightning. Run: pip install 'lightning>=2.6.6'"
    ) from error

#: Names of strategies that shard parameters. These strategies are rejected, because methods freeze, replace and add
#: entire parameters.
_SHARDING = ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")


class MethodCallback(Callback):
    """Apply methods to the network of a LightningModule, and call these methods during training.

    The callback opens a `MethodSession` in ``setup`` and controls the session from the hooks of the Trainer:

    - ``setup`` applies the methods once, before the optimizer is created. Build the network and load its pretrained
      weights in the module's ``__init__``. In later stages and training runs, the methods are not applied again.
    - The callback begins each optimizer step before its first micro-batch and ends the step after ``optimizer.step()``.
    - The losses of the methods are added to the result of ``training_step``, which is a tensor or a dictionary with the
      key ``loss``. If the module defines ``on_total_loss(loss)``, this function is called with the total loss of each
      micro-batch.
    - BatchNorm statistics remain frozen, even after calls of ``train()``.
    - Checkpoints contain the states of the methods, so that a resumed training run gives the same result as an
      uninterrupted run.
    - Evaluation does not call the methods and is also possible without previous training.

    Args:
        methods: one method or several methods, in any order.
        network: name of the attribute in which the LightningModule stores the network. A dotted path, such as
            ``"encoder.net"``, is also allowed. ``""`` denotes the LightningModule itself.
        frozen_bn, classifier, **structure: see `MethodSession`.

    Attributes:
        methods: methods in their order of application.
        session: `MethodSession` of the network, or None before ``setup``.

    Raises:
        SettingError: Raised by ``setup`` if the attribute `network` does not exist, or if the strategy is not
            compatible with the methods. The error message names a compatible strategy.
        UserError: Raised by ``setup`` if the network is compiled or wrapped, if a method does not support the network,
            or if a method adds a loss and optimization is manual. Raised when training starts if the optimizer was
            created before the methods were applied. Also raised if the optimizer steps inside the backward pass
            although the Trainer or a method requires all gradients. Raised when training is resumed if the checkpoint
            was written with other methods.
    """

    def __init__(
        self,
        methods: Method | Iterable[Method],
        network: str = "model",
        frozen_bn: FrozenStatistics = True,
        classifier: str | Iterable[str] = (),
        **structure: Unpack[Structure],
    ) -> None:
        check_callback(network, structure)
        self.methods, self.network = in_order(methods), network
        self.session: MethodSession | None = None
        self._options: dict[str, Any] = {"frozen_bn": frozen_bn, "classifier": classifier, **structure}

    @property
    def reports(self) -> list[Applied]:
        """Reports of all methods. The list is empty before ``setup``."""
        return self.session.reports if self.session is not None else []

    @property
    def state_key(self) -> str:
        """Key under which a checkpoint stores the states of the methods."""
        return "MethodCallback" if self.network == "model" else f"MethodCallback({self.network})"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Apply the methods.

        In stage ``fit``, also check the Trainer, and add the losses of the methods to the module's loss.
        """
        if getattr(pl_module, "_compiler_ctx", None) is not None:
            raise UserError(
                f"The LightningModule must not be compiled, got torch.compile({type(pl_module).__name__}). Pass the"
                " module itself, and compile parts of its network after the methods are applied, for example in"
                " on_fit_start."
            )
        network = find_network(pl_module, self.network)
        self._refuse_strategy(trainer, network, stage)
        adding = names_adding_loss(self.methods)
        if stage == "fit" and adding and not pl_module.automatic_optimization:
            raise UserError(
                f"method {adding[0]} adds a loss, which manual optimization does not support. Set"
                " automatic_optimization=True, or use MethodSession in a training loop without a Trainer."
            )
        if self.session is None or self.session.model is not network:
            self.session = MethodSession(network, self.methods, **self._options)
        self.session.apply()
        if stage == "fit" and (adding or hasattr(pl_module, "on_total_loss")):
            _TotalLoss.add(pl_module, self.session)

    def _refuse_strategy(self, trainer: Trainer, network: nn.Module, stage: str) -> None:
        strategy = getattr(trainer, "strategy", None)
        kind = type(strategy).__name__
        if {c.__name__ for c in type(strategy).__mro__} & set(_SHARDING):
            why = "Methods require entire parameters, but this strategy shards parameters."
            raise SettingError("strategy", kind, "one device or DDP", why)
        norms = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in network.modules())
        if norms and getattr(strategy, "_layer_sync", None) is not None:
            raise SettingError(
                "sync_batchnorm",
                True,
                "False",
                "This setting replaces BatchNorm layers after the methods are applied and the statistics are frozen.",
            )
        unused = [method.name for method in self.methods if method.find_unused_parameters]
        if stage != "fit" or not isinstance(strategy, DDPStrategy) or not unused:
            return
        options = strategy._ddp_kwargs
        if not options.get("find_unused_parameters") or options.get("static_graph"):
            given = ", ".join(f"{k}={v}" for k, v in options.items() if k in ("find_unused_parameters", "static_graph"))
            raise SettingError(
                "strategy",
                f"{kind}({given})",
                "'ddp_find_unused_parameters_true' or DDPStrategy(find_unused_parameters=True)",
                f"With method {unused[0]}, some parameters receive no gradient in some steps.",
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that the optimizers were created after the methods were applied and are compatible with the Trainer."""
        session = self._applied()
        self._refuse_earlier_copies(trainer, pl_module)
        session.check_optimizers(trainer.optimizers)
        clip, accumulate = trainer.gradient_clip_val, trainer.accumulate_grad_batches
        precision, processes = trainer.precision, trainer.world_size
        check_in_backward(
            self.methods,
            trainer.optimizers,
            clipping=Wrong("gradient_clip_val", clip, "None") if clip else None,
            accumulation=Wrong("accumulate_grad_batches", accumulate, "1") if accumulate != 1 else None,
            scaling=Wrong("precision", precision, "32-true or bf16-mixed") if precision == "16-mixed" else None,
            processes=Wrong("devices", processes, "1") if processes > 1 else None,
        )

    def _refuse_earlier_copies(self, trainer: Trainer, pl_module: LightningModule) -> None:
        names = [name for name, _ in pl_module.named_parameters()]
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            copied = getattr(callback, "_average_model", None)  # attribute of WeightAveraging and SWA
            copies = copied.named_parameters() if isinstance(copied, nn.Module) else ()
            if copies and [name.removeprefix("module.") for name, _ in copies] != names:
                kind = type(callback).__name__
                raise UserError(
                    f"The callback {kind} copied the network before the methods were applied, so the parameters of its"
                    f" copy differ from those of the network. List MethodCallback before {kind} in"
                    " Trainer(callbacks=[...])."
                )

    def _applied(self) -> MethodSession:
        assert self.session is not None, "the Trainer must call setup before all other hooks"
        return self.session

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reset the session before the first batch."""
        self._applied().start()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin the optimizer step before its first micro-batch."""
        self._applied().begin_step(trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the optimizer step if the optimizer has stepped."""
        if self._applied().current_step not in (None, trainer.global_step):
            self._applied().end_step()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Abandon the last step if there were too few micro-batches to complete the step."""
        self._applied().abandon_step()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close the session after an error, and restore the module's ``training_step``."""
        self._close(pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Close the session, and restore the module's ``training_step``. The methods remain applied."""
        self._close(pl_module)

    def _close(self, pl_module: LightningModule) -> None:
        if self.session is not None:
            self.session.close()
        _TotalLoss.remove(pl_module)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Raise an error if training is resumed from a checkpoint that was written with other methods."""
        if trainer.state.fn == "fit":
            self._applied().check_state(checkpoint.get("callbacks", {}).get(self.state_key, {}))

    def state_dict(self) -> dict[str, Any]:
        """Return a mapping from the `state_key` of each method to its state. Methods without state are omitted."""
        return {} if self.session is None else self.session.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the states of the methods."""
        self._applied().load_state_dict(state_dict)


class _TotalLoss:
    """Replacement for the ``training_step`` of a LightningModule that adds the losses of the methods.

    All callbacks of the module share one replacement.
    """

    def __init__(self, module: LightningModule) -> None:
        self.module, self.sessions = module, list[MethodSession]()
        # Lightning reads the signature through `__wrapped__`.
        functools.update_wrapper(self, module.training_step)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            return output  # Lightning skips the batch if the output is None, and rejects all other values
        for session in self.sessions:
            loss = session.loss(loss)
        if hasattr(self.module, "on_total_loss"):
            self.module.on_total_loss(loss)  # type: ignore[operator]
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    @classmethod
    def add(cls, module: LightningModule, session: MethodSession) -> None:
        own: Any = vars(module).get("training_step")
        if not isinstance(own, cls):
            own = cls(module)
            module.training_step = own  # type: ignore[method-assign]
        if session not in own.sessions:
            own.sessions.append(session)

    @classmethod
    def remove(cls, module: LightningModule) -> None:
        own: Any = vars(module).get("training_step")
        if not isinstance(own, cls):
            return
        del module.training_step
        wrapped: Any = own.__wrapped__  # type: ignore[attr-defined]
        if getattr(wrapped, "__func__", None) is not type(module).training_step:
            module.training_step = wrapped  # type: ignore[method-assign]
