"""A forward pass of a model on fake tensors that records the input of each layer."""

from __future__ import annotations

import copy
import inspect
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from efficient_ft.core.errors import UserError
from efficient_ft.core.fake import FakeTensors
from efficient_ft.models.view.layers import Reason, Skipped, TokenLayout
from efficient_ft.models.view.structure import image_tower
from efficient_ft.models.weight_dtype import to_float32
from efficient_ft.ops.tokens import token_reduction_suspended

BATCH = 2

#: Reason why the grid is unknown if a network embeds patches with a linear layer (NaFlexViT, vit-pytorch).
NO_MAPS = ", because no layer outputs a feature map"


@dataclass(frozen=True)
class Input:
    """The input of a linear layer or convolution in its first call.

    Attributes:
        shape: Shape of the tensor.
        grid: Grid (h, w) if the network has reshaped tokens of this number from or to maps, or None. In windowed
            attention, the grid is one window.
        maps: Grids of the preceding feature maps, starting with the latest.
    """

    shape: tuple[int, ...]
    grid: tuple[int, int] | None
    maps: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Probed:
    """The record of a forward pass. All keys are full module names.

    Attributes:
        inputs: Input of each linear layer and convolution that was called.
        reach: Mapping from layers to the attention modules that call them only if `qkv_bias_separate` is True (see
            `Layer.reach`).
        functions: Torch functions that the forward method of each module calls directly.
        calls: Names of the called modules, in the order of their first calls.
        has_dense_output: True if an output has one value per position of the image, for example (B, classes, H, W).
    """

    inputs: Mapping[str, Input]
    reach: Mapping[str, str]
    functions: Mapping[str, frozenset[Callable[..., Any]]]
    calls: tuple[str, ...]
    has_dense_output: bool


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
    """A torch function mode that records the functions that each module of a model calls, and the grids of tokens.

    A grid is recorded when tokens (N, h·w, C) are reshaped to maps (N, h, w, C), or maps to tokens. The tokens of Swin
    are reshaped in every block, to the grid of the stage and to windows.

    Attributes:
        found: Functions that each module calls.
        grids: Latest grid (h, w) of N sequences of h·w tokens, by (N, h·w).
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.running = RunningModules(model)
        self.found: defaultdict[str, set[Callable[..., Any]]] = defaultdict(set)
        self.grids: dict[tuple[int, int], tuple[int, int]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.running.names:
            self.found[self.running.names[-1]].add(func)
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in _RESHAPES and args:
            self._record(args[0].shape, result.shape)
        return result

    def _record(self, *shapes: tuple[int, ...]) -> None:
        tokens, maps = sorted(shapes, key=len)
        # Maps with a side of 1 are attention heads (N, tokens, 1, C).
        is_map = len(tokens) == 3 and len(maps) == 4 and min(maps[1:3]) > 1
        if is_map and tokens == (maps[0], maps[1] * maps[2], maps[3]):
            self.grids[tokens[0], tokens[1]] = (maps[1], maps[2])


#: Names of the functions that reshape tokens to maps.
_RESHAPES = ("view", "reshape", "flatten", "unflatten")


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


def call(model: nn.Module, size: tuple[int, ...], given: Call | None = None) -> Any:
    """Run the fake copy `model` on a batch of images or texts. The mode from `fake_copy` must be active.

    Args:
        model: Fake copy of a model.
        size: Image size (H, W) in pixels, or (L,) for texts of L tokens.
        given: Arguments of a call of the model, or None for images or texts of this size alone.
    """
    parameter = next(model.parameters())
    if given is not None:

        def empty(x: Any) -> Any:
            if isinstance(x, Mapping):  # for example BatchFeature of transformers
                copied: Any = copy.copy(x)
                copied.update({name: tree_map(empty, value) for name, value in x.items()})
                return copied
            if not isinstance(x, Tensor):
                return x
            shape = (BATCH, *x.shape[1:]) if x.dim() and x.shape[0] == given.batch else x.shape
            dtype = parameter.dtype if x.is_floating_point() else x.dtype
            return torch.empty(shape, dtype=dtype, device=x.device)

        args, kwargs = tree_map(empty, (given.args, given.kwargs))
        return model(*args, **kwargs)
    if takes_tokens(model):
        ids = torch.zeros(BATCH, *size, device=parameter.device, dtype=torch.long)
        return model(input_ids=ids, attention_mask=torch.ones_like(ids))
    images = torch.empty(BATCH, image_channels(model), *size, device=parameter.device, dtype=parameter.dtype)
    return model(images, **options_for(model, size))


class Call(NamedTuple):
    """The arguments of a call of a network, and the number of images in the batch."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch: int


def options_for(model: nn.Module, size: tuple[int, ...]) -> dict[str, Any]:
    """Return the arguments that a network of `transformers` requires for images whose size differs from its own.

    Args:
        model: A network.
        size: Image size (H, W) in pixels.
    """
    own = getattr(getattr(model, "config", None), "image_size", None)
    if own is None or tuple(size) == ((own, own) if isinstance(own, int) else tuple(own)):
        return {}
    name = "interpolate_pos_encoding"
    return {name: True} if name in inspect.signature(model.forward).parameters else {}


def image_channels(model: nn.Module) -> int:
    """Return the number of image channels of a model: the input channels of its first convolution, or 3.

    If the images are first divided into squares whose pixels become channels (TResNet), the number is divided by the
    number of these pixels. The cosine transform of CSATv2 requires 3 channels.
    """
    pixels = 1
    for module in model.modules():
        if type(module).__name__ == "SpaceToDepth":
            pixels = int(module.bs) ** 2  # type: ignore[arg-type]
        elif type(module).__name__ == "LearnableDct2d":
            return 3
        elif isinstance(module, nn.Conv2d):
            return module.in_channels // pixels if module.groups == 1 else 3
    return 3


def in_words(size: tuple[int, ...]) -> str:
    """Describe the size of a model's input in words."""
    return f"texts of {size[0]} tokens" if len(size) == 1 else f"images of {size[0]}×{size[1]}"


def probe(model: nn.Module, size: tuple[int, ...], given: Call | None = None) -> Probed:
    """Run a fake copy of `model` on images of `size` (H, W) in pixels, or on texts of `size` (L,) in tokens.

    If `given` contains the arguments of a call, the copy is called with these arguments.

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
    functions = _Functions(fake)

    def see(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        shape = tuple(args[0].shape)
        grid = functions.grids.get(shape[:2])
        if grid is not None and shape[0] == BATCH and not _has_shape_of(grid, size):
            grid = None
        inputs.setdefault(name, Input(shape, grid, tuple(dict.fromkeys(reversed(maps)))))
        for one in (shape, output.shape):
            if len(one) == 4 and one[0] == BATCH:
                maps.append(tuple(one[1:3] if isinstance(module, nn.Linear) else one[2:]))

    for name, module in fake.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            module.register_forward_hook(partial(see, name))
    with _errors_explained(model, size), mode, torch.no_grad(), token_reduction_suspended(), functions:
        output = call(fake, size, given)
    called = {name: frozenset(found) for name, found in functions.found.items()}
    calls = tuple(functions.running.calls)
    return Probed(inputs, reach, called, calls, any(_is_dense(x, size) for x in _outputs(output)))


def _has_shape_of(grid: tuple[int, int], size: tuple[int, ...]) -> bool:
    """Return True if the aspect ratio of a grid is that of the images, up to a factor of 2 for rounded sides.

    In Hiera, tokens (B, 4 · L, C) are reshaped to (B, 4, L, C) before they are pooled. These sides are not a grid.
    """
    if len(size) != 2:
        return False
    one, other = grid[0] * size[1], grid[1] * size[0]
    return max(one, other) <= 2 * min(one, other)


class DataFlow:
    """The data flow between parts of a model in evaluation, from the autograd graph of a pass on fake tensors.

    Args:
        model: A model, which is not changed.
        size: Image size (H, W) in pixels, or (L,) for texts of L tokens.
        modules: Full names of the modules whose inputs and outputs are recorded.

    Raises:
        UserError: If the model cannot run on an input of this size.
    """

    def __init__(self, model: nn.Module, size: tuple[int, ...], modules: Iterable[str] = ()) -> None:
        mode, self._fake = fake_copy(model)
        self._inputs: defaultdict[str, set[Any]] = defaultdict(set)
        self._outputs: defaultdict[str, set[Any]] = defaultdict(set)
        for parameter in self._fake.eval().parameters():
            parameter.requires_grad_(parameter.is_floating_point() or parameter.is_complex())

        def see(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._inputs[name] |= _nodes((args, kwargs))
            self._outputs[name] |= _nodes(output)

        for name in modules:
            self._fake.get_submodule(name).register_forward_hook(partial(see, name), with_kwargs=True)
        with _errors_explained(model, size), mode, torch.enable_grad(), token_reduction_suspended():
            self._result = _nodes(call(self._fake, size))

    @property
    def called(self) -> list[str]:
        """The recorded modules in the order of their first calls."""
        return list(self._outputs)

    def feeds(self, one: str, other: str) -> bool:
        """Return True if the input of the module `other` depends on the output of the module `one`."""
        return not self._outputs[one].isdisjoint(_reached(self._inputs[other]))

    def uses(self, name: str) -> bool:
        """Return True if the output of the model depends on the parameters of the module `name`."""
        wanted = {id(p) for p in self._fake.get_submodule(name).parameters()}
        return any(id(getattr(node, "variable", None)) in wanted for node in _reached(self._result))


def _nodes(values: Any) -> set[Any]:
    """Return the nodes of the autograd graph that computed the tensors in `values`."""
    return {x.grad_fn for x in tree_leaves(values) if isinstance(x, Tensor) and x.grad_fn is not None}


def _reached(nodes: set[Any]) -> set[Any]:
    """Return `nodes` and all nodes on which they depend."""
    found, waiting = set(nodes), list(nodes)
    while waiting:
        before = {node for node, _ in waiting.pop().next_functions if node is not None} - found
        found |= before
        waiting += before
    return found


@contextmanager
def _errors_explained(model: nn.Module, size: tuple[int, ...]) -> Iterator[None]:
    """Replace errors of a forward pass on fake tensors with a UserError."""
    log = logging.getLogger("torch._subclasses.fake_tensor")  # logs a traceback before the error is raised
    disabled, log.disabled = log.disabled, True
    try:
        yield
    except Exception as error:
        raise UserError(_why_not_run(model, size, error)) from error
    finally:
        log.disabled = disabled


#: Outputs of `transformers` networks that contain the tokens or the attention maps of individual blocks.
_OF_BLOCKS = ("hidden_states", "attentions", "cross_attentions")


def _outputs(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in the output of a network, except the outputs of individual blocks."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for name, value in output.items():
            yield from () if name.endswith(_OF_BLOCKS) else _outputs(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from _outputs(value)


def _is_dense(output: Tensor, size: tuple[int, ...]) -> bool:
    """Return True if an output has one value per position of the image, with shape (B, C, h, w) or (B, H, W)."""
    if output.dim() == 3:
        return tuple(output.shape[1:]) == size
    return output.dim() == 4 and output.shape[2] > 1 and output.shape[3] > 1


def _why_not_run(model: nn.Module, size: tuple[int, ...], error: Exception) -> str:
    if isinstance(error, NotImplementedError) and 'missing the required "forward" function' in str(error):
        parts = ((name, next(part.parameters(), None)) for name, part in model.named_children())
        inner = ", ".join(f"model.{name}" for name, parameter in parts if parameter is not None)
        return f"{type(model).__name__} has no forward method. Apply the method to the network inside it ({inner})."
    text = f"{type(model).__name__} cannot be run on {in_words(size)}: {(str(error).splitlines() or [''])[0]}"
    tower = image_tower(model)
    if tower is None:
        return text
    return f"{text}\nIf it also takes inputs other than images, apply the methods to its image tower, model.{tower}."


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
    for grid in given.maps:
        if shape[0] == BATCH and grid != (1, 1):
            for before in dict.fromkeys((prefix, 0)):
                if shape[1] == before + grid[0] * grid[1]:
                    return TokenLayout("tokens", grid, before), None
    if given.grid is not None:
        return TokenLayout("tokens", given.grid), None
    why = "" if given.maps else NO_MAPS
    tokens = Reason.NO_GRID.value if shape[1] != 1 else Reason.NO_GRID.value.replace("tokens", "token")
    return None, Skipped(Reason.NO_GRID, f"{shape[1]} {tokens}{why}")
