"""The optimizer of a run and its learning rate schedule."""

from __future__ import annotations

import math
from typing import Any

import torch
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import nn

from efficient_ft.config import OptimConfig
from efficient_ft.core.errors import UserError
from efficient_ft.models.view import view
from efficient_ft.optim import LowBitAdam, LowBitAdamW, StochasticRounding, step_in_backward

#: If `optim.warmup_steps` is None, the warm-up takes a quarter of the run, but at most 100 optimizer steps.
WARMUP_SHARE, WARMUP_AT_MOST = 4, 100


def warmup_steps(optim: OptimConfig, total_steps: int) -> int:
    """Return `optim.warmup_steps`, or a quarter of `total_steps` (at most 100) if this setting is None."""
    if optim.warmup_steps is None:
        return min(WARMUP_AT_MOST, total_steps // WARMUP_SHARE)
    return optim.warmup_steps


def lr_factor(step: int, total_steps: int, optim: OptimConfig) -> float:
    """Return the learning rate of the optimizer step `step` (counted from 0), as a fraction of `optim.lr`.

    The fraction increases linearly from `optim.warmup_start_factor` to 1 during the warm-up (`warmup_steps`). With the
    schedule ``cosine``, the fraction then follows a cosine down to `optim.min_lr_ratio`. With ``constant``, the
    fraction remains 1, and in the last `optim.decay_steps` steps decreases linearly to `optim.min_lr_ratio`.
    """
    warmup = min(warmup_steps(optim, total_steps), total_steps)
    if step < warmup:
        return optim.warmup_start_factor + (1 - optim.warmup_start_factor) * step / warmup
    if optim.schedule == "constant":
        left, decay = total_steps - step, min(optim.decay_steps or 0, total_steps - warmup)
        return 1.0 if left > decay else optim.min_lr_ratio + (1 - optim.min_lr_ratio) * left / (decay + 1)
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    return optim.min_lr_ratio + (1 - optim.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


class SGD(torch.optim.SGD):
    """`torch.optim.SGD` for parameters that do not all receive their first gradient in the same step.

    The fused kernel fails if only some parameters have a momentum buffer. Missing buffers are therefore initialized to
    zeros. The first step gives bitwise the same result as without buffers.
    """

    def _init_group(self, group: Any, *lists: Any) -> Any:
        for parameter in group["params"] if group["momentum"] and group["fused"] else ():
            if parameter.grad is not None and self.state[parameter].get("momentum_buffer") is None:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return super()._init_group(group, *lists)


def build_optimizer(network: nn.Module, optim: OptimConfig, precision: str = "fp32") -> torch.optim.Optimizer:
    """Build the optimizer for the parameters of `network` that require gradients.

    The methods must already be applied to `network`. As in timm, norm parameters and biases have no weight decay, and
    layer decay gives deeper layers a higher learning rate. The learning rate of the classifier is multiplied by
    `optim.head_lr_mult`. Fused kernels are not used in fp16.

    If `optim.state_bits` is less than 32, the moments are quantized in blocks (`optim.LowBitAdamW`). If
    `optim.in_backward` is True, the parameters are updated during the backward pass (`optim.step_in_backward`). If
    weights are stored in bfloat16, their updates are rounded stochastically (`optim.StochasticRounding`).

    Raises:
        UserError: If no parameter requires gradients.
    """
    if not any(p.requires_grad for p in network.parameters()):
        raise UserError(
            "All parameters are frozen. Choose a method that selects trained parameters, for example method=head."
        )
    no_decay: set[str] = getattr(network, "no_weight_decay", set)()
    if optim.layer_decay is None:
        groups = param_groups_weight_decay(network, optim.weight_decay, no_weight_decay_list=no_decay)
    else:
        groups = param_groups_layer_decay(
            network, optim.weight_decay, no_weight_decay_list=no_decay, layer_decay=optim.layer_decay
        )
    if optim.head_lr_mult != 1:
        head = {id(p) for name in view(network).head for p in network.get_submodule(name).parameters()}
        scaled = [
            {
                **g,
                "params": [p for p in g["params"] if id(p) in head],
                "lr_scale": g.get("lr_scale", 1.0) * optim.head_lr_mult,
            }
            for g in groups
        ]
        groups = [{**g, "params": [p for p in g["params"] if id(p) not in head]} for g in groups] + scaled
    groups = [g for g in groups if g["params"]]
    for group in groups:
        group["lr"] = group["initial_lr"] = optim.lr * group.get("lr_scale", 1.0)
    assert precision != "auto", "trainer.precision=auto must be resolved (training.precision)"
    optimizer = _build(groups, optim, next(network.parameters()).device.type, precision)
    if any(p.dtype == torch.bfloat16 for group in groups for p in group["params"]):
        optimizer = StochasticRounding(optimizer)
    return step_in_backward(optimizer) if optim.in_backward else optimizer


def _build(groups: list[dict[str, Any]], optim: OptimConfig, device: str, precision: str) -> torch.optim.Optimizer:
    if optim.state_bits < 32:
        low_bit = LowBitAdamW if optim.name == "adamw" else LowBitAdam
        return low_bit(groups, lr=optim.lr, betas=optim.betas, bits=optim.state_bits)
    # In fp16, Lightning cannot clip gradients of fused optimizers, which unscale the gradients in each step.
    fused = device in ("cpu", "cuda") and precision != "fp16"
    optimizer: torch.optim.Optimizer
    if optim.name == "sgd":
        optimizer = SGD(groups, lr=optim.lr, momentum=optim.momentum, fused=fused)
    else:
        adam = torch.optim.AdamW if optim.name == "adamw" else torch.optim.Adam
        optimizer = adam(groups, lr=optim.lr, betas=optim.betas, fused=fused)
    if fused:
        # Gradients in fp32 and bf16 are not scaled. Without this change, Lightning does not clip them under autocast.
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    return optimizer
