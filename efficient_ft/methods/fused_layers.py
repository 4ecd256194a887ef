"""Fused operations for training on a CPU: GELU, BatchNorm followed by GELU, and low-rank feed-forward networks.

A fused operation makes one pass over the tensor in the forward pass and one pass in the backward pass. In a network
with low-rank layers, matrix products are small. The operations between the matrix products take a similar amount of
time. Separate BatchNorm and GELU operations require four passes over the widest tensors of the network, and torch's
GELU is compute-bound on a CPU.

In bfloat16, if both layers of a feed-forward network are low-rank, the entire network runs as one operation (see
`ops.projection.feed_forward`), which includes LayerScale and the residual connection of EfficientFormer blocks.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import Mlp
from timm.models.efficientformer import ConvMlpWithNorm, Downsample, MetaBlock1d, MetaBlock2d, Pooling
from torch import Tensor, nn
from torch._C import _len_torch_function_stack

from efficient_ft.methods.forwards import OwnForward, foreign_forward, forwards_of, put_inside, take_away
from efficient_ft.models.frozen_batch_norm import FrozenBatchNorm2d
from efficient_ft.ops.autocast import compute_dtype
from efficient_ft.ops.frozen import frozen_input_conv2d
from efficient_ft.ops.gelu import batch_norm_gelu, gelu
from efficient_ft.ops.projection import Projection, low_rank_feed_forward, pool_mixer
from efficient_ft.ops.saving import current_packing
from efficient_ft.ops.tokens import current_tokens


class FusedGelu(OwnForward):
    """Forward pass of `nn.GELU` that uses the operation in `ops.gelu`."""

    same_values = True

    def __call__(self, x: Tensor) -> Tensor:
        return gelu(x) if _fits(self.module, x) and (x.is_contiguous() or _channels_last(x)) else self.within(x)


class FusedNormGelu(OwnForward):
    """Forward pass of a feed-forward network that fuses frozen BatchNorm and GELU into one operation."""

    same_values = True

    def __call__(self, x: Tensor) -> Tensor:
        mlp: Any = self.module
        projection = _projection(mlp, x)
        if projection is not None:
            return _run(mlp, x, projection)
        norm = mlp.norm1
        changed = "forward" in norm.__dict__ or _hooked(norm) or _hooked(mlp.act)
        if type(norm) is not FrozenBatchNorm2d or changed or not _exact(mlp.act):
            return self.within(x)
        x = mlp.fc1(x)
        if _fits(mlp, x) and _channels_last(x):
            assert norm.running_mean is not None
            assert norm.running_var is not None
            x = batch_norm_gelu(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.eps)
        else:
            x = mlp.act(norm(x))
        x = mlp.fc2(mlp.drop(x))
        return mlp.drop(mlp.norm2(x))


class FusedMlp(OwnForward):
    """Forward pass of `timm.layers.Mlp` that runs as one operation if both layers are low-rank."""

    same_values = True

    def __call__(self, x: Tensor) -> Tensor:
        projection = _projection(self.module, x)
        return self.within(x) if projection is None else _run(self.module, x, projection)


class FusedBlock(OwnForward):
    """Forward pass of an EfficientFormer block that fuses LayerScale and the residual connection with the network."""

    same_values = True

    def __call__(self, x: Tensor) -> Tensor:
        block: Any = self.module
        tokens = type(block) is MetaBlock1d
        projection = None if _changed(block.ls2, block.drop_path2) else _projection(block.mlp, x)
        if projection is None or type(block.drop_path2) is not nn.Identity:
            return self.within(x)
        if not tokens and _pools(block):
            x = pool_mixer(x, block.ls1.gamma)
        else:
            x = x + block.drop_path1(block.ls1(block.token_mixer(block.norm1(x) if tokens else x)))
        return _run(block.mlp, block.norm2(x) if tokens else x, projection, x, block.ls2.gamma)


class FusedDownsample(OwnForward):
    """Forward pass of the first trained layer of a stage, whose input requires no gradient, in bfloat16."""

    same_values = True

    def __call__(self, x: Tensor) -> Tensor:
        stage: Any = self.module
        conv = stage.conv
        frozen = torch.is_grad_enabled() and conv.weight.requires_grad and not x.requires_grad
        if (
            not frozen
            or not _runs(stage)
            or x.device.type != "cpu"
            or compute_dtype(x) is not torch.bfloat16
            or not _plain(conv)
        ):
            return self.within(x)
        return stage.norm(frozen_input_conv2d(x, conv.weight, conv.bias, conv.stride[0], conv.padding[0]))


def _plain(conv: Any) -> bool:
    """Return True if a convolution has the settings of `frozen_input_conv2d`."""
    return (
        type(conv) is nn.Conv2d
        and conv.padding_mode == "zeros"
        and conv.groups == 1
        and conv.dilation == (1, 1)
        and type(conv.padding) is tuple
        and len({*conv.stride}) == len({*conv.padding}) == 1
        and not _changed(conv)
    )


def _projection(mlp: Any, x: Tensor) -> Projection | None:
    """Return the projection of a low-rank feed-forward network, or None if the network cannot run as one operation."""
    low_rank: list[Any] = [getattr(layer, "low_rank", None) for layer in (mlp.fc1, mlp.fc2)]
    if None in low_rank or any(how.projector is None for how in low_rank) or current_tokens() is not None:
        return None
    norms = [mlp.norm1, mlp.norm2] if type(mlp) is ConvMlpWithNorm else []
    others = [mlp.drop] if norms else [mlp.drop1, mlp.drop2, mlp.norm]
    if (
        not _runs(mlp)
        or x.dtype not in (torch.float32, torch.bfloat16)
        or compute_dtype(x) is not torch.bfloat16  # in fp32, separate operations take less time
        or (not torch.is_autocast_enabled("cpu") and x.dtype != mlp.fc1.weight.dtype)
        or not (torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in mlp.parameters())))
        or x.device.type != "cpu"
        or not _exact(mlp.act)
        or any(type(norm) is not FrozenBatchNorm2d for norm in norms)
        or any(type(m) is not nn.Identity and not (type(m) is nn.Dropout and m.p == 0) for m in others)
        or _changed(mlp, mlp.act, mlp.fc1, mlp.fc2, *norms, *others)
    ):
        return None
    if norms and not _channels_last(x):
        return None
    grid = x.shape[2:] if norms else x.shape[1:-1]
    if not norms and low_rank[0].tokens.form == "tokens":
        grid = low_rank[0].grid_of(x.shape[1])
    prefix = low_rank[0].tokens.prefix
    first, second = (
        how.projector.projection(tuple(grid), prefix, (fc.weight.shape[1], fc.weight.shape[0]))
        for how, fc in zip(low_rank, (mlp.fc1, mlp.fc2), strict=True)
    )
    count = x.shape[2:].numel() if norms else x.shape[1:-1].numel()
    return first if first is second and first.tokens == count else None


def _pools(block: Any) -> bool:
    """Return True if the token mixer of a block computes the mean over 3 × 3 neighborhoods inside the map."""
    mixer = block.token_mixer
    if type(mixer) is not Pooling or _changed(mixer, mixer.pool, block.ls1, block.drop_path1):
        return False
    pool = mixer.pool
    sizes = [pool.kernel_size, pool.stride, pool.padding]
    return (
        sizes == [3, 1, 1]
        and not pool.ceil_mode
        and not pool.count_include_pad
        and type(block.drop_path1) is nn.Identity
    )


def _run(
    mlp: Any, x: Tensor, projection: Projection, residual: Tensor | None = None, layer_scale: Tensor | None = None
) -> Tensor:
    """Run a feed-forward network as one operation."""
    norms = (mlp.norm1, mlp.norm2) if type(mlp) is ConvMlpWithNorm else (None, None)
    first, second = (_affine(fc, norm) for fc, norm in zip((mlp.fc1, mlp.fc2), norms, strict=True))
    if layer_scale is not None:
        second = second[0], second[1] * layer_scale, second[2] * layer_scale
    x_BNC = x.flatten(2).transpose(1, 2) if norms[0] is not None else x.flatten(1, -2)
    residual = x_BNC if residual is x else residual
    grid = x.shape[2:] if norms[0] is not None else None
    y = low_rank_feed_forward(x_BNC, first, second, projection, residual, grid)
    return y.transpose(1, 2).unflatten(2, x.shape[2:]) if norms[0] is not None else y.view(*x.shape[:-1], -1)


def _affine(layer: Any, norm: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weight of a layer, and the scale and shift of its bias and of the following frozen BatchNorm."""
    weight = layer.weight.flatten(1)
    if norm is None:
        ones = torch.ones(len(weight), dtype=weight.dtype)
        return weight, ones, torch.zeros_like(ones) if layer.bias is None else layer.bias
    scale = (norm.running_var + norm.eps).rsqrt()
    scale = scale if norm.weight is None else scale * norm.weight
    shift = (-norm.running_mean if layer.bias is None else layer.bias - norm.running_mean) * scale
    return weight, scale, shift if norm.bias is None else shift + norm.bias


def _runs(module: nn.Module) -> bool:
    packed = _len_torch_function_stack() > 0 or current_packing() is not None
    return module.training and not torch.compiler.is_compiling() and not packed


def _changed(*modules: nn.Module) -> bool:
    """Return True if a module has hooks or a forward pass that changes its values."""
    return any(
        _hooked(m) or foreign_forward(m) is not None or any(not f.same_values for f in forwards_of(m)) for m in modules
    )


def _fits(module: nn.Module, x: Tensor) -> bool:
    """Return True if a fused operation can process `x`: in training on a CPU, in fp32, and without function modes."""
    return _runs(module) and x.device.type == "cpu" and x.dtype == torch.float32


def _exact(act: nn.Module) -> bool:
    return type(act) is nn.GELU and act.approximate == "none"


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def _channels_last(x: Tensor) -> bool:
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)


#: Forward passes of feed-forward networks and blocks, by class.
FUSED: dict[type[nn.Module], type[OwnForward]] = {
    ConvMlpWithNorm: FusedNormGelu,
    Downsample: FusedDownsample,
    Mlp: FusedMlp,
    MetaBlock1d: FusedBlock,
    MetaBlock2d: FusedBlock,
}


def fuse_layers(model: nn.Module, *, everywhere: bool = True) -> list[str]:
    """Use the fused operations for GELU, and for a frozen BatchNorm followed by GELU, where possible.

    If `everywhere` is False, only models that contain feed-forward networks with BatchNorm before GELU are changed.

    Returns:
        Names of the GELU layers that use a fused operation.
    """
    names: list[str] = []
    if not everywhere and not any(type(module) is ConvMlpWithNorm for module in model.modules()):
        return names
    for name, module in model.named_modules():
        if type(module) in FUSED:
            put_inside(module, FUSED[type(module)](module))
        elif _exact(module):
            names.append(name)
            put_inside(module, FusedGelu(module))
    return names


def separate_layers(model: nn.Module) -> None:
    """Undo `fuse_layers`."""
    kinds: set[type[OwnForward]] = {FusedGelu, *FUSED.values()}
    for kind in kinds:
        take_away(model, kind)
