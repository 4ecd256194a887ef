"""A correct method `Damped`, and methods that each differ from it by one fault."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from efficient_ft.core.seeding import generator_of
from efficient_ft.methods import Applied, Axis, Method, ModelView
from efficient_ft.methods.forwards import OwnForward, put_around, take_away
from efficient_ft.ops.autocast import to_autocast_dtype
from efficient_ft.testing import Row

Found = tuple[Tensor | None, Tensor | None, Tensor | None]


class Product(torch.autograd.Function):
    """Compute x Wᵀ + b. The gradient of W is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, owner: LinearForward, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.owner = owner
        saved = x if weight.requires_grad else None, weight if x.requires_grad else None
        ctx.save_for_backward(*saved)
        owner.kind.saved(ctx, owner, x)
        with torch.autocast("cpu", enabled=False):
            return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        g_w = None if x is None else ctx.owner.factor * torch.einsum("...o,...i->oi", g, x)
        g_b = g.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None
        g_x = None if weight is None else g @ weight
        return None, *ctx.owner.kind.gradients(ctx.owner, g, (g_x, g_w, g_b))


class LinearForward(OwnForward):
    """A forward pass of a linear layer that uses `Product` in training."""

    def __init__(self, module: nn.Module, name: str, method: Damped) -> None:
        super().__init__(module)
        self.name, self.kind, self.state, self.factor = name, type(method), method.shared, method.factor

    def __call__(self, x: Tensor) -> Tensor:
        if not self.module.training or not torch.is_grad_enabled():
            return self.kind.evaluated(self, x)
        if self.kind.switches_off and self.factor == 1:
            return self.within(x)
        module: Any = self.module
        return self.kind.trained(self, x, Product.apply(self, *to_autocast_dtype(x, module.weight, module.bias)))


class Damped(Method):
    """Multiply the weight gradients of linear layers by a factor.

    Subclasses override the static methods to introduce faults.

    Args:
        factor: A positive number. With 1, the gradients do not change.
    """

    name = "damped"
    axis = Axis.BACKPROP
    changes_weights = False
    switches_off: ClassVar[bool] = False

    def __init__(self, factor: float = 0.5) -> None:
        self.factor = factor
        #: State that the layers share with the method.
        self.shared: dict[str, Any] = {"steps": 0}
        self._model: nn.Module | None = None

    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        self._model = model
        names = tuple(n for n, m in model.named_modules() if type(m) is nn.Linear)
        for name in names:
            put_around(model.get_submodule(name), LinearForward(model.get_submodule(name), name, self))
        return Applied(self.name, names, summary=f"{len(names)} layers")

    def _remove(self, model: nn.Module) -> None:
        for module in model.modules():
            take_away(module, LinearForward)

    def remove(self, model: nn.Module) -> None:
        super().remove(model)
        self.shared, self._model = {"steps": 0}, None

    @property
    def model(self) -> nn.Module:
        assert self._model is not None
        return self._model

    @staticmethod
    def gradients(owner: LinearForward, g: Tensor, found: Found) -> Found:
        return found

    @staticmethod
    def saved(ctx: Any, owner: LinearForward, x: Tensor) -> None: ...

    @staticmethod
    def evaluated(owner: LinearForward, x: Tensor) -> Tensor:
        y: Tensor = owner.within(x)
        return y

    @staticmethod
    def trained(owner: LinearForward, x: Tensor, y: Tensor) -> Tensor:
        return y


def reference(method: Any, model: nn.Module, parameters: dict[str, Tensor], images: Tensor) -> Tensor:
    """Compute the logits of the plain network, with the weight gradients of linear layers multiplied by the factor."""
    if model.training:
        for name in method.applied.touched:
            weight = parameters[f"{name}.weight"]
            parameters[f"{name}.weight"] = method.factor * weight + ((1 - method.factor) * weight).detach()
    return functional_call(model, parameters, (images,))


def row_of(method: type[Damped], *models: str) -> Row:
    return Row(method, off={"factor": 1.0}, models=models or ("vit",), on_reference=reference)


# ---------------------------------------------------------------------------------------------- wrong gradients
def scaled(found: Found, x: float = 1, w: float = 1, b: float = 1) -> Found:
    g_x, g_w, g_b = (None if g is None else g * factor for g, factor in zip(found, (x, w, b), strict=True))
    return g_x, g_w, g_b


def wrong(
    when: Callable[[LinearForward, Tensor, Found], bool] = lambda *_: True, **factors: float
) -> Callable[[LinearForward, Tensor, Found], Found]:
    """Return a `Damped.gradients` that multiplies gradients by `factors` if `when` returns True."""
    return lambda owner, g, found: scaled(found, **factors) if when(owner, g, found) else found


class WeightDoubled(Damped):
    gradients = staticmethod(wrong(w=2))


class InputScaled(Damped):
    gradients = staticmethod(wrong(x=1.3))


class BiasZero(Damped):
    gradients = staticmethod(wrong(b=0))


class InputZeroInHalf(Damped):
    gradients = staticmethod(wrong(lambda _, g, __: g.dtype == torch.bfloat16, x=0))


class WrongInSingle(Damped):
    gradients = staticmethod(wrong(lambda _, g, __: g.dtype == torch.float32, w=1.1))


class OfOneImage(Damped):
    gradients = staticmethod(wrong(lambda _, g, __: len(g) == 1, w=1.1))


class LastLayer(Damped):
    gradients = staticmethod(wrong(lambda owner, *_: owner.name == "head", w=0.9))


class NotContiguous(Damped):
    @staticmethod
    def trained(owner: LinearForward, x: Tensor, y: Tensor) -> Tensor:
        if not x.is_contiguous() and y.requires_grad:
            y.register_hook(lambda g: g * 1.1)
        return y


class FrozenWeight(Damped):
    gradients = staticmethod(wrong(lambda _, __, found: found[1] is None, x=1.1))


class SecondMicroBatch(Damped):
    @staticmethod
    def gradients(owner: LinearForward, g: Tensor, found: Found) -> Found:
        seen = owner.state.setdefault("seen", set())
        first = owner.name not in seen
        seen.add(owner.name)
        return found if first else scaled(found, w=0)

    def step_begin(self, step: int) -> None:
        self.shared.pop("seen", None)


class LaterSteps(Damped):
    @staticmethod
    def gradients(owner: LinearForward, g: Tensor, found: Found) -> Found:
        return scaled(found, w=1.1) if owner.state["steps"] >= 5 else found

    def step_end(self) -> None:
        self.shared["steps"] += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.shared["steps"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.shared["steps"] = state_dict["steps"]


class InSinglePrecision(Damped):
    @staticmethod
    def gradients(owner: LinearForward, g: Tensor, found: Found) -> Found:
        g_x, g_w, g_b = found
        return g_x, None if g_w is None else g_w.float().to(g.dtype), g_b


class Norms(Damped):
    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.register_hook(lambda g: g * 0.9)
        return super()._apply(model, view)


class OutputScaled(Damped):
    @staticmethod
    def trained(owner: LinearForward, x: Tensor, y: Tensor) -> Tensor:
        return y * (1 + 1e-6)


class LossDoubled(Damped):
    def total_loss(self, loss: Tensor) -> Tensor:
        return 2 * loss


# ---------------------------------------------------------------------------------------------- evaluation
class WrongInEvaluation(Damped):
    @staticmethod
    def evaluated(owner: LinearForward, x: Tensor) -> Tensor:
        y: Tensor = owner.within(x)
        return y + 0.5 * (y - y.detach()) if torch.is_grad_enabled() else y


class RaisesInInference(Damped):
    @staticmethod
    def evaluated(owner: LinearForward, x: Tensor) -> Tensor:
        assert not torch.is_inference_mode_enabled()
        return Damped.evaluated(owner, x)


class EvaluationScaled(Damped):
    @staticmethod
    def evaluated(owner: LinearForward, x: Tensor) -> Tensor:
        return 1.01 * Damped.evaluated(owner, x)


class BufferInEvaluation(Damped):
    @staticmethod
    def evaluated(owner: LinearForward, x: Tensor) -> Tensor:
        buffers = owner.state["buffers"]
        if buffers:
            buffers[0].add_(0.1)
        return Damped.evaluated(owner, x)

    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        self.shared["buffers"] = [b for n, b in model.named_buffers() if n.endswith("running_mean")]
        return super()._apply(model, view)


class CachedInInference(Damped):
    @staticmethod
    def evaluated(owner: LinearForward, x: Tensor) -> Tensor:
        module: Any = owner.module
        owner.state.setdefault("transposed", {}).setdefault(owner.name, module.weight.T * 1.0)
        return Damped.evaluated(owner, x)

    @staticmethod
    def trained(owner: LinearForward, x: Tensor, y: Tensor) -> Tensor:
        cached = owner.state.get("transposed", {}).get(owner.name)
        return y if cached is None else y + 0 * (x @ cached)


class TrainsInEvaluationMode(Damped):
    @staticmethod
    def evaluated(owner: LinearForward, x: Tensor) -> Tensor:
        owner.module.train()
        return Damped.evaluated(owner, x)


# ---------------------------------------------------------------------------------------------- unwanted changes
def _nothing(*_: Any) -> None:
    """Do nothing, as a hook."""


def _larger(g: Tensor) -> Tensor:
    return 1.5 * g


class HookLeft(Damped):
    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        model.register_forward_hook(_nothing)
        return super()._apply(model, view)


class WeightHookLeft(Damped):
    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        model.get_parameter("head.weight").register_hook(_larger)
        return super()._apply(model, view)


class AttributeLeft(Damped):
    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        model.damped = True  # type: ignore[assignment]
        return super()._apply(model, view)


class HookEachStep(Damped):
    def step_begin(self, step: int) -> None:
        next(self.model.children()).register_forward_pre_hook(_nothing)


class TensorHookEachStep(Damped):
    def step_begin(self, step: int) -> None:
        self.model.get_parameter("head.weight").register_post_accumulate_grad_hook(_nothing)


class FreesInStep(Damped):
    def step_begin(self, step: int) -> None:
        for parameter in self.model.parameters():
            parameter.requires_grad_(True)


class FreesInApply(Damped):
    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        model.requires_grad_(True)
        return super()._apply(model, view)


class FreezesInStep(Damped):
    def step_begin(self, step: int) -> None:
        self.model.get_parameter("head.weight").requires_grad_(step % 2 == 0)


class MovesInStep(Damped):
    @torch.no_grad()
    def step_begin(self, step: int) -> None:
        for parameter in self.model.parameters():
            parameter.add_(1e-3)


class DecaysAtEnd(Damped):
    @torch.no_grad()
    def step_end(self) -> None:
        for parameter in self.model.parameters():
            parameter.mul_(1 - 1e-4)


class TogglesTraining(Damped):
    def step_begin(self, step: int) -> None:
        next(self.model.children()).eval()


class ReplacesParameter(Damped):
    def step_begin(self, step: int) -> None:
        head: Any = self.model.get_submodule("head")
        head.weight = nn.Parameter(head.weight.detach().clone())


class StaleState(LaterSteps):
    @staticmethod
    def gradients(owner: LinearForward, g: Tensor, found: Found) -> Found:
        return scaled(found, w=1 + 0.1 * owner.state["steps"])

    def remove(self, model: nn.Module) -> None:
        steps = self.shared["steps"]
        super().remove(model)
        self.shared["steps"] = steps


# ---------------------------------------------------------------------------------------------- random choices
class DrawsInPass(Damped):
    @staticmethod
    def trained(owner: LinearForward, x: Tensor, y: Tensor) -> Tensor:
        return y + (y - y.detach()) * torch.rand(())


class DrawsNumpyInPass(Damped):
    @staticmethod
    def trained(owner: LinearForward, x: Tensor, y: Tensor) -> Tensor:
        return y + (y - y.detach()) * np.random.rand()  # noqa: NPY002


class UnseededChoice(Damped):
    @staticmethod
    def gradients(owner: LinearForward, g: Tensor, found: Found) -> Found:
        return scaled(found, w=owner.state["choice"])

    def step_begin(self, step: int) -> None:
        self.shared["choice"] = random.SystemRandom().random()


class ChoiceOfProcess(UnseededChoice):
    def step_begin(self, step: int) -> None:
        self.shared["choice"] = random.random()


class ChoiceOfHistory(UnseededChoice):
    def step_begin(self, step: int) -> None:
        generator = self.shared.setdefault("generator", generator_of(0))
        self.shared["choice"] = torch.rand((), generator=generator).item()


class DrawsInApply(Damped):
    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        torch.rand(1)
        return super()._apply(model, view)


class DrawsInStep(Damped):
    def step_begin(self, step: int) -> None:
        torch.rand(1)


class DefaultDtype(Damped):
    def step_begin(self, step: int) -> None:
        torch.set_default_dtype(torch.float64)


# ---------------------------------------------------------------------------------------------- state
class Unsaved(StaleState):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    def remove(self, model: nn.Module) -> None:
        Damped.remove(self, model)


class UnsavedLater(LaterSteps):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class OffByOne(LaterSteps):
    @staticmethod
    def gradients(owner: LinearForward, g: Tensor, found: Found) -> Found:
        return scaled(found, w=1 + owner.state["steps"] % 2)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.shared["steps"] = state_dict["steps"] + 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.shared["steps"]}


# ---------------------------------------------------------------------------------------------- memory
class OnContext(Damped):
    @staticmethod
    def saved(ctx: Any, owner: LinearForward, x: Tensor) -> None:
        ctx.hidden = x * 2


class OnModule(Damped):
    @staticmethod
    def trained(owner: LinearForward, x: Tensor, y: Tensor) -> Tensor:
        owner.hidden = (x * 2).detach()  # type: ignore[attr-defined]
        return y


class InNumpy(Damped):
    @staticmethod
    def saved(ctx: Any, owner: LinearForward, x: Tensor) -> None:
        if type(x) is Tensor and x.dtype == torch.float64:
            ctx.hidden = x.detach().numpy().copy()


class InBytes(Damped):
    @staticmethod
    def saved(ctx: Any, owner: LinearForward, x: Tensor) -> None:
        if type(x) is Tensor and x.dtype == torch.float64:
            ctx.hidden = x.detach().numpy().tobytes()


class RaisesInHalf(Damped):
    @staticmethod
    def trained(owner: LinearForward, x: Tensor, y: Tensor) -> Tensor:
        assert y.dtype != torch.bfloat16
        return y


class SwitchesOff(Damped):
    switches_off = True
