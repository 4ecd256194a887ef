"""Detect whether a device has instructions for products in bfloat16."""

from __future__ import annotations

import platform

import torch


def has_bf16_units(device: torch.device) -> bool:
    """Return True if a CPU or a CUDA device has instructions for products in bfloat16."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    # On x86, oneDNN also accepts bf16 on processors that have AVX-512 but not its bf16 instructions. Processors with
    # AMX have these instructions.
    supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return supported and (not is_x86 or torch.cpu._is_avx512_bf16_supported())


def bf16_is_emulated(device: torch.device) -> bool:
    """Return True if a CPU or a CUDA device has no bfloat16 instructions. Other devices are not checked."""
    return device.type in ("cpu", "cuda") and not has_bf16_units(device)
