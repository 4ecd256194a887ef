"""Base class of the methods with a low-rank backward pass, and the layer classes of these methods.

A method with a low-rank backward pass changes only the class of each affected layer. The module object, its parameter
names and its forward pass in evaluation remain the same, so that the changed model can be copied, pickled, saved and
restored.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from efficient_ft.core.context import is_recomputing
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.format import format_number
from efficient_ft.methods.base import Applied, Method
from efficient_ft.methods.declarations import Adds, Axis
from efficient_ft.methods.forwards import foreign_forward
from efficient_ft.methods.fused_layers import fuse_layers, separate_layers
from efficient_ft.methods.quantized import refuse_quantized
from efficient_ft.methods.skip import is_skipped
from efficient_ft.methods.summary import count, left, within
from efficient_ft.models.view import Call, Layer, ModelView, Reason, Skipped, TokenLayout, image_channels, view
from efficient_ft.ops.autocast import compute_dtype
from efficient_ft.ops.image_size import ImageSize, Size, attach_image_size, image_size_of, restore_image_size
from efficient_ft.ops.projection import (
    Grid,
    Projection,
    Projector,
    SubsetProjection,
    backward_flops,
    block_energy,
    low_rank_conv1x1,
    low_rank_linear,
)
from efficient_ft.ops.tokens import Tokens, current_tokens


@dataclass
class LowRank:
    """Projector, token layout and profile of a changed layer.

    `projector` is None while the layer is profiled with the exact backward pass. `energy` (8, 8) is a float64 tensor on
    the CPU. `energy` contains the fraction of the energy of the output gradient g_y in each WHT basis, summed over all
    profiled backward passes. Because fractions are summed, all backward passes have the same weight, regardless of the
    loss scale. If `fused` is True, compiled kernels compute the projections on a CPU. `first` is the token layout for
    the image size with which the method is applied, and `layouts` contains the layouts for all image sizes so far.
    `images` is the current image size.
    """

    projector: Projector | None
    first: TokenLayout
    layouts: dict[Size, TokenLayout] = field(default_factory=dict)
    images: ImageSize = field(default_factory=ImageSize)
    energy: Tensor | None = None
    fused: bool = False
    _last: tuple[Any, ...] = field(default=(None, None, None), repr=False, compare=False)

    def projection(self, grid: Grid, channels: tuple[int, int]) -> Projection:
        """Return the projection for a grid and (C_in, C_out) channels, which is usually that of the last call."""
        projector, key, projection = self._last
        if projector is not self.projector or key != (grid, channels):
            assert self.projector is not None
            try:
                projection = self.projector.projection(grid, self.tokens.prefix, channels)
            except ValueError as error:
                raise UserError(
                    f"Low-rank backward pass: a layer with a grid of {grid[0]}×{grid[1]} tokens cannot be projected:"
                    f" {error}. Use larger images, or a lower order."
                ) from error
            self._last = self.projector, (grid, channels), projection
        return projection

    @property
    def tokens(self) -> TokenLayout:
        """Token layout for the current image size."""
        return self.layouts.get(self.images.size, self.first)

    def grid_of(self, count: int, kept: Tokens | None = None) -> Grid:
        """Return the grid of `count` tokens. If tokens have been dropped (`kept` is given), return the current grid.

        A block that is recomputed may receive tokens of images of an earlier size. If the size is not known, the grid
        follows from the number of tokens.
        """
        now = self.tokens
        if kept is not None or len(self.layouts) < 2:
            return now.grid
        unknown = self.images.is_unknown
        if now.count == count and not unknown:
            return now.grid
        sizes = {layout.grid: size for size, layout in self.layouts.items() if layout.count == count}
        if unknown and len(sizes) > 1:
            several = " and of ".join(f"{height}×{width}" for height, width in sizes.values())
            raise UserError(
                f"Low-rank backward pass: a layer is recomputed on {count} tokens, but images of {several} have this"
                " number of tokens. Use the method Checkpointing instead of other checkpointing, or images with"
                " different numbers of tokens."
            )
        return next(iter(sizes), now.grid)

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles of a model do not contain projections.
        return {**self.__dict__, "_last": (None, None, None)}


class LowRankLinear(nn.Linear):
    """`nn.Linear` with a low-rank backward pass in training."""

    same_values = True  # see `methods.forwards.OwnForward`
    not_compiled, compiled_if_frozen = "low-rank layers", True
    low_rank: LowRank

    def forward(self, x: Tensor) -> Tensor:
        if not _records(self, x):
            return super().forward(x)
        how, tokens = self.low_rank, current_tokens()
        grid = how.grid_of(x.shape[1], tokens) if how.tokens.form == "tokens" else (x.shape[1], x.shape[2])
        if tokens is not None and tokens.grid_index_BL is None:
            raise UserError(
                f"Low-rank backward pass: the grid positions of the {x.shape[1]} input tokens are unknown. Tokens have"
                " been merged, or tokens have been dropped and the image size differs from that of the first images."
                " If a method drops tokens, use a single image size."
            )
        if how.projector is None:
            return _profiled(super().forward(x), how, grid, tokens)
        channels = (self.in_features, self.out_features)
        projection: Projection | SubsetProjection = how.projection(grid, channels)
        if tokens is not None:
            projection = _of_kept(projection, tokens, how.tokens.prefix, x)
            exact, low_rank = backward_flops(projection, channels)
            if low_rank >= exact:
                return super().forward(x)
        shape = x.shape
        if (shape[1] if len(shape) == 3 else shape[1:-1].numel()) != projection.tokens:
            raise UserError(
                f"Low-rank backward pass: a layer received {x.shape[1]} tokens, but {how.tokens.prefix} prefix tokens"
                f" and a grid of {grid[0]}×{grid[1]} tokens were expected. Call the network itself instead of one of"
                " its parts, so that the size of the images is known, or set the image size of the model to the size of"
                " the training images."
            )
        return low_rank_linear(x, self.weight, self.bias, projection, how.fused)


class LowRankConv2d(nn.Conv2d):
    """A 1×1 `nn.Conv2d` with a low-rank backward pass in training."""

    same_values = True  # see `methods.forwards.OwnForward`
    not_compiled, compiled_if_frozen = "low-rank layers", True
    low_rank: LowRank

    def forward(self, x: Tensor) -> Tensor:
        if not _records(self, x):
            return super().forward(x)
        how, grid = self.low_rank, (x.shape[2], x.shape[3])
        if how.projector is None:
            return _profiled(super().forward(x), how, grid)
        projection = how.projection(grid, (self.in_channels, self.out_channels))
        return low_rank_conv1x1(x, self.weight, self.bias, projection, how.fused)


class _ImageSizeHook:
    """Forward pre-hook of a network that passes the size of the images to its low-rank layers.

    For each new image size, a forward pass on fake tensors with the arguments of the call determines the token layouts.
    The images are the first 4-D tensor with the number of channels of the network in the arguments, or the first 4-D
    tensor if no number of channels matches. Arguments may be nested dictionaries, tuples and lists.
    """

    def __init__(self, images: ImageSize, channels: int) -> None:
        self.images, self.channels, self.known = images, channels, {images.size}

    def __call__(self, network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled() or not any(layer.training for layer in _low_rank_layers(network)):
            return
        maps = [x for x in _tensors((args, kwargs)) if x.dim() == 4]
        images = next((x for x in maps if x.shape[1] == self.channels), maps[0] if maps else None)
        if images is None:
            return
        size = tuple(images.shape[-2:])
        if size not in self.known:
            self._probe(network, size, Call(args, kwargs, len(images)))
        self.images.set(size)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _probe(self, network: nn.Module, size: Size, call: Call) -> None:
        try:
            layers = view(network, size, call).layers
        except UserError as error:  # for example because a loss that is computed from labels requires their values
            try:
                layers = view(network, size).layers
            except UserError:
                raise error from None
        for layer in layers:
            if layer.tokens is not None and isinstance(layer.module, LowRankLinear):
                how = layer.module.low_rank
                if how.first.form == "tokens":
                    how.layouts[size] = layer.tokens
        self.known.add(size)


class _BlockSizeHook:
    """Forward pre-hook of a block. If the block is recomputed, the image size of its forward pass is restored."""

    def __init__(self, images: ImageSize) -> None:
        self.images = images

    def __call__(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # With reentrant checkpointing, the forward pass of a block runs without gradients.
        if torch.compiler.is_compiling() or not block.training:
            return
        if vars(block).get("gradient_checkpointing"):
            self._hook_parts(block)
        x = args[0] if args and isinstance(args[0], Tensor) else next(_tensors((args, kwargs)), None)
        if x is None:
            return
        if is_recomputing():
            restore_image_size(image_size_of(x))
        else:
            attach_image_size(x, self.images)

    def _hook_parts(self, block: nn.Module) -> None:
        """Register the hook for the parts of a block of transformers, which recomputes only its forward method.

        The first part receives the input of the block.
        """
        for part in block.children():
            if self not in part._forward_pre_hooks.values():
                part.register_forward_pre_hook(self, with_kwargs=True)


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and mappings."""
    for value in tree_leaves(values):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):  # for example BatchFeature of transformers
            yield from _tensors(dict(value))


def _low_rank_layers(model: nn.Module) -> Iterator[LowRankLinear | LowRankConv2d]:
    return (module for module in model.modules() if isinstance(module, LowRankLinear | LowRankConv2d))


CHANGED = {nn.Linear: LowRankLinear, nn.Conv2d: LowRankConv2d}


def _records(module: nn.Linear | nn.Conv2d, x: Tensor) -> bool:
    """Return True if the module is called in training and the gradient of its input or weight is required."""
    return module.training and torch.is_grad_enabled() and (x.requires_grad or module.weight.requires_grad)


def _of_kept(whole: Any, tokens: Tokens, prefix: int, x: Tensor) -> SubsetProjection:
    """Return the projection for the remaining tokens, which all layers with the same tokens share."""
    dtype = compute_dtype(x)
    key = whole, dtype
    if key not in tokens.cache:
        tokens.cache[key] = SubsetProjection.from_columns(whole, tokens.columns_BN(prefix), tokens.fused, dtype)
    return tokens.cache[key]


def _profiled(y: Tensor, how: LowRank, grid: tuple[int, int], tokens: Tokens | None = None) -> Tensor:
    """Return `y`, and register a hook that adds the energy of the gradient of `y` to the energy of the layer."""

    def gather(g: Tensor) -> None:
        if how.tokens.form == "channels_first":
            g = g.permute(0, 2, 3, 1)
        if tokens is not None:
            g = tokens.on_grid(g, how.tokens.prefix, grid[0] * grid[1]).unflatten(1, grid)
        g_BHWC = g[:, how.tokens.prefix :].unflatten(1, grid) if g.dim() == 3 else g
        energy = block_energy(g_BHWC).cpu().double()
        if 0 < energy.sum() < torch.inf:  # steps with an fp16 overflow are skipped
            share = energy / energy.sum()
            how.energy = share if how.energy is None else how.energy + share

    y.register_hook(gather)
    return y


def refuse_order(order: int, largest: int, where: str = "") -> None:
    """Raise SettingError unless `order` is an integer from 1 to `largest`."""
    if type(order) is not int or not 1 <= order <= largest:
        raise SettingError("order", order, f"an integer from 1 to {largest}{where}")


class LowRankBackward(Method):
    """Base class of the methods that compute the gradients of linear layers and 1×1 convolutions in a low-rank space.

    All layers whose inputs have a token grid are changed: attention and MLP layers, talking heads and patch merging.
    The stem, the patch embedding and the head are not changed. If the low-rank backward pass of a layer would cost more
    than the exact backward pass, the layer keeps the exact backward pass, and the report lists the layer. Frozen layers
    are also changed.

    Subclasses must implement `projector_for`.

    Attributes:
        as_published: if True, layers are projected even if the exact backward pass costs less, and layers whose forward
            method is never called keep the exact backward pass.
        profiles: if True, layers initially run the exact backward pass and are profiled. After profiling, the subclass
            sets the projectors of the layers.
        skip: parts of layer names. Layers whose names contain one of these parts keep the exact backward pass (see
            `methods.skip`).
        fused: if True, low-rank feed-forward networks run as one operation on a CPU, and elsewhere GELU and the
            preceding frozen BatchNorm are fused (see `methods.fused_layers`). If None, the operations are fused only in
            networks with BatchNorm before GELU.

    Raises:
        UserError: Raised by `apply` if the model has no layer with a token grid, or if a grid cannot be projected.
            Raised by a forward pass in training if the positions of the tokens are unknown, or if the number of tokens
            does not match the grid.
    """

    axis = Axis.BACKPROP
    changes_weights = False
    adds = frozenset({Adds.LOW_RANK_LAYERS})
    as_published: bool = False
    profiles: bool = False
    fused: bool | None = None
    _fuses: bool | None = None  # True if GELU layers are fused, or None before `apply`
    skip: Sequence[str] | None = None

    @abstractmethod
    def projector_for(self, layer: Layer) -> Projector:
        """Return the projector for a layer.

        If the projector is selected only after profiling, return a placeholder with the same rank and cost.

        Args:
            layer: linear layer or 1×1 convolution from the view of the model. `layer.tokens` is the token layout, and
                `layer.channels` is (C_in, C_out).

        Raises:
            SettingError: If a setting is not valid for this layer. If a projector cannot project a grid, its method
                `projection` must raise ValueError, which `apply` converts to UserError.
        """

    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        chosen: list[tuple[Layer, Projector, TokenLayout]] = []
        skipped: dict[str, Skipped] = {}
        exact: dict[str, Skipped] = {}
        for layer in view.layers:
            if layer.tokens is None:
                assert layer.why_not is not None
                skipped[layer.name] = layer.why_not
            elif foreign_forward(layer.module) is not None:
                skipped[layer.name] = Skipped(Reason.OTHER_FORM, "another library has replaced the forward method")
            elif type(layer.module) not in CHANGED:
                detail = f"the class {type(layer.module).__name__} overrides the forward method"
                skipped[layer.name] = Skipped(Reason.OTHER_FORM, detail)
            elif is_skipped(layer.name, self.skip):
                skipped[layer.name] = Skipped(Reason.NOT_CHOSEN, f"left exact ({self.full_name('skip')})")
            elif layer.reach is not None and self.as_published:
                detail = "left exact, as published (the forward method is never called)"
                skipped[layer.name] = Skipped(Reason.AS_PUBLISHED, detail)
            elif why := self._costs_more(layer, layer.tokens):
                exact[layer.name] = Skipped(Reason.EXACT_IS_CHEAPER, why)
            else:
                chosen.append((layer, self.projector_for(layer), layer.tokens))
        # The model is changed only after all layers have been checked, so that an error leaves the model unchanged.
        refuse_quantized(self.name, model, [f"{layer.name}.weight" for layer, *_ in chosen])
        images = ImageSize(size := tuple(view.image_size))
        for layer, projector, tokens in chosen:
            layer.module.__class__ = CHANGED[type(layer.module)]
            how = LowRank(None if self.profiles else projector, tokens, {size: tokens}, images)
            layer.module.low_rank = how  # type: ignore[assignment]
            if layer.reach is not None:
                model.get_submodule(layer.reach).qkv_bias_separate = True  # type: ignore[assignment]
                layer.module.low_rank_reach = layer.reach  # type: ignore[assignment]
        note = f"{len(exact)} layers keep the exact backward pass, which is cheaper for these layers"
        notes = [note] if exact else []
        if len(size) == 2 and any(tokens.form == "tokens" for *_, tokens in chosen):
            model.register_forward_pre_hook(_ImageSizeHook(images, image_channels(model)), with_kwargs=True)
            for name in (part for block in view.blocks for part in view.called_modules(block)):
                model.get_submodule(name).register_forward_pre_hook(_BlockSizeHook(images), with_kwargs=True)
        fused = [] if self.fused is False else fuse_layers(model, everywhere=self.fused is True)
        self._fuses = bool(fused)
        for how in self._changed(model).values():
            how.fused = self._fuses
        if fused:
            notes.append(f"on a CPU, {len(fused)} GELU layers run as fused operations ({self.full_name('fused')})")
        return Applied(
            self.name,
            tuple(layer.name for layer, *_ in chosen),
            {**skipped, **exact},
            tuple(notes),
            none_needed=note if exact else "",
            summary=f"{count(len(chosen), 'layer')} in {within(x.name for x, *_ in chosen)} low-rank"
            + left({**skipped, **exact}, "exact")
            if chosen
            else "",
        )

    @property
    def libraries(self) -> tuple[str, ...]:  # type: ignore[override]
        # Before `apply`, predictions of the process memory include numba unless fusion is disabled.
        return () if self.fused is False or self._fuses is False else ("numba",)

    def _costs_more(self, layer: Layer, tokens: TokenLayout) -> str | None:
        """Return the reason why a layer keeps the exact backward pass, or None if the layer is projected."""
        try:
            projection = self.projector_for(layer).projection(tokens.grid, tokens.prefix, layer.channels)
        except ValueError as error:
            raise UserError(
                f"method {self.name}: the layer {layer.name} on a {tokens.grid[0]}×{tokens.grid[1]} grid cannot be"
                f" projected: {error}."
            ) from error
        exact, low_rank = backward_flops(projection, layer.channels)
        if self.as_published or low_rank < exact:
            return None
        costs = f"{format_number(exact, 'FLOPs')} instead of {format_number(low_rank, 'FLOPs')}"
        return f"the exact backward pass is cheaper: {costs} at rank {projection.rank}"

    def _remove(self, model: nn.Module) -> None:
        separate_layers(model)
        for module in model.modules():
            hooks = module._forward_pre_hooks
            for key in [key for key, hook in hooks.items() if isinstance(hook, _ImageSizeHook | _BlockSizeHook)]:
                del hooks[key], module._forward_pre_hooks_with_kwargs[key]
            if isinstance(module, LowRankLinear | LowRankConv2d):
                reach = module.__dict__.pop("low_rank_reach", None)
                if reach is not None:
                    model.get_submodule(reach).qkv_bias_separate = False  # type: ignore[assignment]
                del module.low_rank
                plain: type[nn.Module] = nn.Linear if isinstance(module, LowRankLinear) else nn.Conv2d
                module.__class__ = plain  # type: ignore[assignment]

    @staticmethod
    def _changed(model: nn.Module) -> dict[str, LowRank]:
        return {n: m.low_rank for n, m in model.named_modules() if isinstance(m, LowRankLinear | LowRankConv2d)}
