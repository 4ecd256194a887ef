"""A forward pass of a model on fake tensors that records the input of each layer."""

from __future__ import annotations

import copy
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.overrides import TorchFunctionMode

from efficient_ft.core.errors import UserError
from efficient_ft.core.fake import FakeTensors
from efficient_ft.models.view.layers import Reason, Skipped, TokenLayout
from efficient_ft.models.view.structure import above
from efficient_ft.models.weight_dtype import to_float32
from efficient_ft.ops.tokens import token_reduction_suspended

BATCH = 2


@dataclass(frozen=True)
class Input:
    """The input of a linear layer or convolution in its first call.

    Attributes:
        shape: Shape of the tensor.
        window: Window size (h, w) of the windowed attention that contains the layer, or None for other layers.
        maps: Grids of the preceding feature maps, starting with the latest.
    """

    shape: tuple[int, ...]
    window: tuple[int, int] | None
    maps: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Probed:
    """The record of a forward pass. All keys are full module names.

    Attributes:
        inputs: Input of each linear layer and convolution that was called.
        reach: Mapping from layers to the attention modules that call them only if `qkv_bias_separate` is True (see
            `Layer.reach`).
        functions: Torch functions that the forward method of each module calls directly.
    """

    inputs: Mapping[str, Input]
    reach: Mapping[str, str]
    functions: Mapping[str, frozenset[Callable[..., Any]]]


class RunningModules:
    """The modules of a model whose ``forward`` is running, recorded by hooks on all modules.

    Attributes:
        names: Full names of the running modules, starting with the outermost.
        calls: Number of calls of each module, by full name.
    """

    def __init__(self, model: nn.Module) -> None:
        self.names: list[str] = []
        self.calls: Counter[str] = Counter()
        self._handles = []
        for name, module in model.named_modules():
            self._handles.append(module.register_forward_pre_hook(partial(self._enter, name)))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def _enter(self, name: str, *_: Any) -> None:
        self.names.append(name)
        self.calls[name] += 1

    def _leave(self, *_: Any) -> None:
        self.names.pop()

    def remove_hooks(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()


class _Functions(TorchFunctionMode):
    """A torch function mode that records the functions that each module of a model calls."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.running = RunningModules(model)
        self.found: defaultdict[str, set[Callable[..., Any]]] = defaultdict(set)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.running.names:
            self.found[self.running.names[-1]].add(func)
        return func(*args, **(kwargs or {}))


def fake_copy(original: Any) -> tuple[FakeTensorMode, Any]:
    """Copy an object, for example a model or a tuple of objects, and replace the tensors in the copy with fake tensors.

    Returns:
        The fake tensor mode in which a copied model can run, and the copy.
    """
    mode = FakeTensors()
    with FakeCopyMode(mode):
        copied = copy.deepcopy(original)
    for module in copied if isinstance(copied, tuple) else (copied,):
        if isinstance(module, nn.Module):
            to_float32(module)  # fake copies run without autocast
    return mode, copied


def takes_tokens(model: nn.Module) -> bool:
    """Return True if a model takes token ids, like the text models in `transformers`."""
    return getattr(model, "main_input_name", None) == "input_ids"


def call(model: nn.Module, size: tuple[int, ...]) -> Any:
    """Run the fake copy `model` on a batch of images or texts. The mode from `fake_copy` must be active.

    `size` is the image size (H, W) in pixels, or (L,) for texts of L tokens.
    """
    if takes_tokens(model):
        ids = torch.zeros(BATCH, *size, device=next(model.parameters()).device, dtype=torch.long)
        return model(input_ids=ids, attention_mask=torch.ones_like(ids))
    first = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    channels = first.in_channels if first is not None and first.groups == 1 else 3
    parameter = next(model.parameters())
    return model(torch.empty(BATCH, channels, *size, device=parameter.device, dtype=parameter.dtype))


def in_words(size: tuple[int, ...]) -> str:
    """Describe the size of a model's input in words."""
    return f"texts of {size[0]} tokens" if len(size) == 1 else f"images of {size[0]}×{size[1]}"


def probe(model: nn.Module, size: tuple[int, ...]) -> Probed:
    """Run a fake copy of `model` on images of `size` (H, W) in pixels, or on texts of `size` (L,) in tokens.

    Raises:
        UserError: If the model cannot run on an input of this size.
    """
    mode, fake = fake_copy(model)
    fake.eval()
    reach = {}
    for name, module in fake.named_modules():
        if hasattr(module, "qkv_bias_separate") and getattr(module, "q_bias", None) is not None:
            if not module.qkv_bias_separate:
                reach[f"{name}.qkv"] = name
            module.qkv_bias_separate = True

    inputs: dict[str, Input] = {}
    maps: list[tuple[int, int]] = []

    def hook(name: str, window: tuple[int, int] | None) -> Any:
        def see(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            x = args[0]
            inputs.setdefault(name, Input(tuple(x.shape), window, tuple(dict.fromkeys(reversed(maps)))))
            for shape in (x.shape, output.shape):
                if len(shape) == 4 and shape[0] == BATCH:
                    maps.append(tuple(shape[1:3] if isinstance(module, nn.Linear) else shape[2:]))

        return see

    for name, module in fake.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            module.register_forward_hook(hook(name, _window(fake, name)))
    functions = _Functions(fake)
    log = logging.getLogger("torch._subclasses.fake_tensor")  # logs a traceback before the error is raised
    disabled, log.disabled = log.disabled, True
    try:
        with mode, torch.no_grad(), token_reduction_suspended(), functions:
            call(fake, size)
    except Exception as error:
        raise UserError(
            f"{type(model).__name__} cannot be run on {in_words(size)}: {(str(error).splitlines() or [''])[0]}"
        ) from error
    finally:
        log.disabled = disabled
    return Probed(inputs, reach, {name: frozenset(found) for name, found in functions.found.items()})


def layout_of(
    name: str, module: nn.Linear | nn.Conv2d, given: Input | None, prefix: int, head: tuple[str, ...], stem: str | None
) -> tuple[TokenLayout | None, Skipped | None]:
    """Return the layout of a layer's input, or the reason why the input has no layout."""
    if any(name == h or name.startswith(f"{h}.") for h in head):
        return None, Skipped(Reason.HEAD)
    if stem is not None and (name == stem or name.startswith(f"{stem}.")):
        return None, Skipped(Reason.STEM)
    if isinstance(module, nn.Conv2d):
        if module.groups != 1:
            return None, Skipped(Reason.GROUPED_CONVOLUTION)
        if module.kernel_size != (1, 1) or module.stride != (1, 1) or module.padding not in ((0, 0), "valid", "same"):
            return None, Skipped(Reason.SPATIAL_CONVOLUTION)
    if given is None:
        return None, Skipped(Reason.NOT_CALLED)
    shape = given.shape
    if shape[0] % BATCH:
        return None, Skipped(Reason.NOT_FROM_IMAGES)
    if isinstance(module, nn.Conv2d):
        if shape[2] * shape[3] == 1:
            return None, Skipped(Reason.SINGLE_POSITION)
        return TokenLayout("channels_first", (shape[2], shape[3])), None
    if len(shape) == 4:
        return TokenLayout("channels_last", (shape[1], shape[2])), None
    if len(shape) != 3:
        return None, Skipped(Reason.NO_TOKEN_DIMENSION)
    if given.window is not None and shape[1] == given.window[0] * given.window[1]:
        return TokenLayout("tokens", given.window), None
    for grid in given.maps:
        if shape[0] == BATCH and grid != (1, 1):
            for before in dict.fromkeys((prefix, 0)):
                if shape[1] == before + grid[0] * grid[1]:
                    return TokenLayout("tokens", grid, before), None
    return None, Skipped(Reason.NO_GRID, f"{shape[1]} {Reason.NO_GRID.value}")


def _window(model: nn.Module, name: str) -> tuple[int, int] | None:
    """Return the window size (h, w) of the windowed attention that contains a layer, or None for other layers."""
    for module in reversed(list(above(model, name))):
        window = getattr(module, "window_size", None)
        if "Attention" in type(module).__name__ and isinstance(window, tuple) and len(window) == 2:
            return (int(window[0]), int(window[1]))
    return None
