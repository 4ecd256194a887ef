"""What methods know of a model: stages, blocks, head, and for every layer where the token grid lies in its input.

Methods never ask for an architecture. The view reads a timm classifier's own attributes and runs one forward pass on
fake tensors (no memory, no arithmetic) to see what each layer is really given; grids are taken from there, never
inferred from a token count alone.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from efficient_ft.core.errors import UserError
from efficient_ft.ops.tokens import token_reduction_suspended

#: The parameters of a "last stage" follow the papers: EfficientFormerV2's was trained without its downsample.
LAST_STAGE_WITHOUT = {"EfficientFormerV2": "downsample"}

#: How the reason ends for tokens of the images that no grid of the model explains.
NO_GRID = "tokens that lie on no grid of the model"

#: The reason for a layer that works on something else (a table of relative positions).
NOT_OF_IMAGES = "its input does not come from the images"

#: The reason for a layer of an expert.
OF_EXPERTS = "its input is the tokens that an expert is given, of any images"

#: Attention modules by class; not the blocks that hold one beside an MLP (XCiT's ClassAttentionBlock).
_ATTENTION = re.compile(r"^(?!.*Block$).*(Attention|Attn|MHSA|GPSA|XCA|LiteMLA)")

#: What adapters put beside a layer or block: no layers of the model, and exact whatever is done to those.
_ADDED = re.compile(r"\.lora_[AB]\.default$|\.(lite_residual|side_module)\.")

#: Normalisation layers by class.
_NORM = re.compile(r"norm|abn|^affine$", re.IGNORECASE)

_PROBE_BATCH = 2


@dataclass(frozen=True)
class TokenLayout:
    """How the positions of a grid lie in a layer's input.

    Attributes:
        form: ``tokens`` (B, prefix + H·W, C); ``channels_last`` (B, H, W, C); ``channels_first`` (B, C, H, W).
            A window of a windowed attention is a map of its own: (B·windows, H·W, C).
        grid: (H, W). In the two map forms the grid of a step is read from the input's shape; this is the one seen at
            the model's own image size.
        prefix: tokens before the grid (class, distillation, registers).
    """

    form: Literal["tokens", "channels_last", "channels_first"]
    grid: tuple[int, int]
    prefix: int = 0

    @property
    def count(self) -> int:
        """N = prefix + H·W."""
        return self.prefix + self.grid[0] * self.grid[1]


@dataclass(frozen=True, eq=False)
class Layer:
    """One linear layer or convolution.

    Attributes:
        name: full module name.
        module: the `nn.Linear` or `nn.Conv2d`.
        tokens: where its positions lie, or None with the reason in `why_not`.
        in_attention: it belongs to an attention module.
        reach: full name of the attention module whose `qkv_bias_separate` must be set so that this module's forward
            is called at all (SwinV2, BEiT and EVA compute qkv from its weight otherwise), or None.
    """

    name: str
    module: nn.Module
    tokens: TokenLayout | None
    why_not: str | None = None
    in_attention: bool = False
    reach: str | None = None

    @property
    def channels(self) -> tuple[int, int]:
        """(C_in, C_out)."""
        assert isinstance(self.module.weight, Tensor)
        out, in_ = self.module.weight.shape[:2]
        return int(in_), int(out)


@dataclass(frozen=True, eq=False)
class ModelView:
    """A model as methods see it; all names are full module names in forward order.

    Attributes:
        layers: every linear layer and convolution, the head's included.
        stages: the blocks of each stage, in order; an isotropic transformer is cut into four equal stages.
        blocks: all blocks.
        head: the classifier modules.
        tail: top-level modules that run after the last stage (norms, head).
        prefix_tokens: class, distillation and register tokens.
    """

    model: nn.Module
    layers: tuple[Layer, ...]
    stages: tuple[tuple[str, ...], ...]
    stage_extras: tuple[tuple[str, ...], ...]
    blocks: tuple[str, ...]
    head: tuple[str, ...]
    tail: tuple[str, ...]
    prefix_tokens: int

    @property
    def name(self) -> str:
        """The timm architecture where there is one, else the class."""
        cfg = getattr(self.model, "pretrained_cfg", None) or {}
        return cfg.get("architecture") or type(self.model).__name__

    def last_stage(self) -> tuple[str, ...]:
        """Modules of the last stage: its blocks, its downsampling (see LAST_STAGE_WITHOUT) and all that follows it.

        Raises:
            UserError: the model has no stages or blocks that could be recognised.
        """
        if not self.stages:
            raise UserError(
                f"{self.name}: no stages or blocks were recognised, so it has no last stage;"
                " choose what trains by another selection (head, full, bitfit, norm_last)."
            )
        without = LAST_STAGE_WITHOUT.get(type(self.model).__name__)
        extras = (n for n in self.stage_extras[-1] if without is None or n.split(".")[-1] != without)
        return (*extras, *self.stages[-1], *self.tail)


def view(model: nn.Module, image_size: tuple[int, int] | None = None) -> ModelView:
    """Look at `model`, which is not changed.

    Args:
        model: a classifier that takes (B, channels, H, W) images.
        image_size: (H, W) in pixels; by default the model's own.

    Raises:
        UserError: the model cannot be run on an image of that size.
    """
    seen, reach = _probe(model, image_size)
    prefix = int(getattr(model, "num_prefix_tokens", 0) or 0)
    head = _names_of(model, _classifiers(model))
    stem = _stem(model)
    stages, extras, container = _stages(model)
    layers = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d) and not _ADDED.search(name):
            tokens, why_not = _layout(name, module, seen.get(name), prefix, head, stem)
            if any(hasattr(m, "experts") for m in _above(model, name)):
                tokens, why_not = None, OF_EXPERTS
            attention = any(_ATTENTION.search(type(m).__name__) for m in _above(model, name))
            layers.append(Layer(name, module, tokens, why_not, attention, reach.get(name)))
    return ModelView(
        model,
        tuple(layers),
        stages,
        extras,
        tuple(b for stage in stages for b in stage),
        head,
        _after(model, container),
        prefix,
    )


def default_image_size(model: nn.Module) -> tuple[int, int]:
    """(H, W) the model was built for: its patch embedding's, else its pretrained configuration's, else 224 × 224."""
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if size is None:
        size = (getattr(model, "pretrained_cfg", None) or {}).get("input_size", (3, 224, 224))[-2:]
    return (int(size[0]), int(size[1])) if isinstance(size, tuple | list) else (int(size), int(size))


# ---------------------------------------------------------------------------------------------- the probe
@dataclass(frozen=True)
class _Seen:
    shape: tuple[int, ...]
    window: tuple[int, int] | None
    maps: tuple[tuple[int, int], ...]  # grids of the maps seen before, the latest first


def _probe(model: nn.Module, image_size: tuple[int, int] | None) -> tuple[dict[str, _Seen], dict[str, str]]:
    """The input of every linear layer and convolution in one forward pass, and the qkv layers to be reached."""
    size = image_size or default_image_size(model)
    first = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    channels = first.in_channels * first.groups if isinstance(first, nn.Conv2d) and first.groups == 1 else 3
    parameter = next(model.parameters())
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(mode):
        probe = copy.deepcopy(model)
    probe.eval()
    reach = {}
    for name, module in probe.named_modules():
        if hasattr(module, "qkv_bias_separate") and getattr(module, "q_bias", None) is not None:
            if not module.qkv_bias_separate:
                reach[f"{name}.qkv"] = name
            module.qkv_bias_separate = True

    seen: dict[str, _Seen] = {}
    maps: list[tuple[int, int]] = []

    def hook(name: str, window: tuple[int, int] | None) -> Any:
        def see(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            x = args[0]
            seen.setdefault(name, _Seen(tuple(x.shape), window, tuple(dict.fromkeys(reversed(maps)))))
            for shape in (x.shape, output.shape):
                if len(shape) == 4 and shape[0] == _PROBE_BATCH:
                    maps.append(tuple(shape[1:3] if isinstance(module, nn.Linear) else shape[2:]))

        return see

    for name, module in probe.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            module.register_forward_hook(hook(name, _window(probe, name)))
    try:
        with mode, torch.no_grad(), token_reduction_suspended():
            probe(torch.empty(_PROBE_BATCH, channels, *size, device=parameter.device, dtype=parameter.dtype))
    except Exception as error:
        raise UserError(
            f"{type(model).__name__} cannot be run on images of {size[0]}×{size[1]}: {str(error).splitlines()[0]}"
        ) from error
    return seen, reach


def _layout(
    name: str,
    module: nn.Linear | nn.Conv2d,
    seen: _Seen | None,
    prefix: int,
    head: tuple[str, ...],
    stem: str | None,
) -> tuple[TokenLayout | None, str | None]:
    """The layout of a layer's positions, or the reason why it has none."""
    if any(name == h or name.startswith(f"{h}.") for h in head):
        return None, "the head"
    if stem is not None and (name == stem or name.startswith(f"{stem}.")):
        return None, "the stem or patch embedding"
    if isinstance(module, nn.Conv2d):
        if module.groups != 1:
            return None, "a depthwise or grouped convolution"
        if module.kernel_size != (1, 1) or module.stride != (1, 1) or module.padding not in ((0, 0), "valid", "same"):
            return None, "a convolution that is not 1×1 with stride 1"
    if seen is None:
        return None, "its forward is not called by the model"
    shape = seen.shape
    if shape[0] % _PROBE_BATCH:
        return None, NOT_OF_IMAGES
    if isinstance(module, nn.Conv2d):
        if shape[2] * shape[3] == 1:
            return None, "a map of a single position"
        return TokenLayout("channels_first", (shape[2], shape[3])), None
    if len(shape) == 4:
        return TokenLayout("channels_last", (shape[1], shape[2])), None
    if len(shape) != 3:
        return None, "an input without a token dimension"
    if seen.window is not None and shape[1] == seen.window[0] * seen.window[1]:
        return TokenLayout("tokens", seen.window), None
    for grid in seen.maps:
        if shape[0] == _PROBE_BATCH and grid != (1, 1):
            for before in dict.fromkeys((prefix, 0)):
                if shape[1] == before + grid[0] * grid[1]:
                    return TokenLayout("tokens", grid, before), None
    return None, f"{shape[1]} {NO_GRID}"


def _window(model: nn.Module, name: str) -> tuple[int, int] | None:
    """The window (h, w) of the windowed attention a layer belongs to."""
    for module in reversed(list(_above(model, name))):
        window = getattr(module, "window_size", None)
        if "Attention" in type(module).__name__ and isinstance(window, tuple) and len(window) == 2:
            return (int(window[0]), int(window[1]))
    return None


# ---------------------------------------------------------------------------------------------- structure
def _above(model: nn.Module, name: str) -> Iterator[nn.Module]:
    """The modules that contain `name`, from the model down, without itself."""
    module = model
    for part in name.split("."):
        yield module
        module = getattr(module, part) if hasattr(module, part) else module[int(part)]  # type: ignore[index]


def _classifiers(model: nn.Module) -> list[nn.Module]:
    get_classifier: Any = getattr(model, "get_classifier", None)
    found = None if get_classifier is None else get_classifier()
    modules = list(found) if isinstance(found, tuple | list) else [found]
    return [m for m in modules if isinstance(m, nn.Module) and not isinstance(m, nn.Identity)]


def _names_of(model: nn.Module, modules: Iterable[nn.Module]) -> tuple[str, ...]:
    wanted = {id(m) for m in modules}
    return tuple(name for name, m in model.named_modules() if id(m) in wanted)


def _stem(model: nn.Module) -> str | None:
    """The top-level module that holds the first convolution."""
    cfg = getattr(model, "pretrained_cfg", None) or {}
    first = cfg.get("first_conv")
    if isinstance(first, tuple | list):
        first = first[0] if first else None
    if first is None:
        first = next((n for n, m in model.named_modules() if isinstance(m, nn.Conv2d)), None)
    if first is None:
        return None
    top = first.split(".")[0]
    return first if top in ("blocks", "stages", "layers", "features") else top


def _stages(
    model: nn.Module,
) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """Blocks of each stage, other modules of each stage (downsampling), and the top-level modules that hold them."""
    for top in ("blocks", "stages", "layers"):
        container = getattr(model, top, None)
        if not isinstance(container, nn.ModuleList | nn.Sequential) or not len(container):
            continue
        children = [(f"{top}.{n}", m) for n, m in container.named_children() if _has_parameters(m)]
        if all(_is_stage(m) for _, m in children):
            return (*_split_stages(children), (top,))
        names = [n for n, _ in children]
        cuts = [round(len(names) * k / 4) for k in range(5)]
        quarters = tuple(tuple(names[a:b]) for a, b in itertools.pairwise(cuts) if b > a)
        return quarters, tuple(() for _ in quarters), (top,)
    layers = [(f"layer{k}", getattr(model, f"layer{k}")) for k in range(1, 9) if hasattr(model, f"layer{k}")]
    if layers:
        return (*_split_stages(layers), tuple(n for n, _ in layers))
    return (), (), ()


def _is_stage(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential) or isinstance(
        getattr(module, "blocks", None), nn.ModuleList | nn.Sequential
    )


def _split_stages(
    stages: list[tuple[str, nn.Module]],
) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]:
    blocks: list[tuple[str, ...]] = []
    extras: list[tuple[str, ...]] = []
    for name, stage in stages:
        holder = getattr(stage, "blocks", None)
        if holder is None:
            blocks.append(tuple(f"{name}.{n}" for n, m in stage.named_children() if _has_parameters(m)))
            extras.append(())
        else:
            blocks.append(tuple(f"{name}.blocks.{n}" for n, m in holder.named_children() if _has_parameters(m)))
            extras.append(
                tuple(f"{name}.{n}" for n, m in stage.named_children() if n != "blocks" and _has_parameters(m))
            )
    return tuple(blocks), tuple(extras)


def _after(model: nn.Module, container: tuple[str, ...]) -> tuple[str, ...]:
    """Top-level modules registered after the stages: timm registers them in the order they run."""
    names = [n for n, _ in model.named_children()]
    last = max((names.index(c) for c in container), default=len(names))
    return tuple(n for n in names[last + 1 :] if _has_parameters(getattr(model, n)))


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def is_norm(module: nn.Module) -> bool:
    """Whether it is a normalisation layer, by the name of its class."""
    return _NORM.search(type(module).__name__) is not None


def parameters_under(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Parameters, by full name, of the modules (or parameters) named."""
    prefixes = tuple(names)
    return {
        n: p
        for n, p in model.named_parameters()
        if any(n == prefix or n.startswith(f"{prefix}.") for prefix in prefixes)
    }
