"""Check whether a network can process images of a given size, and whether its patches cover the images."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor, nn

from efficient_ft.core.errors import SettingError

#: Exceptions that a network may raise for an image size that it cannot process. ValueError includes UserError.
FAILURES = (RuntimeError, AssertionError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError)


def nondividing_patch_size(model: nn.Module, size: tuple[int, int], channels: int) -> tuple[int, int] | None:
    """Run a network on an image, and return a patch size (H, W) that does not divide the image size.

    The result is None if the patches cover the whole image. `size` is the image size (H, W) in pixels. Raise one of
    `FAILURES` if the network cannot process the image.
    """
    patches: list[tuple[int, int]] = []

    def check(layer: nn.Conv2d, inputs: tuple[Tensor, ...]) -> None:
        patch = (layer.kernel_size[0], layer.kernel_size[1])
        cuts = patch == tuple(layer.stride) and layer.padding in ((0, 0), 0, "valid") and max(patch) > 1
        if cuts and tuple(inputs[0].shape[-2:]) == size and any(s % p for s, p in zip(size, patch, strict=True)):
            patches.append(patch)

    training = model.training
    try:
        with torch.no_grad(), ExitStack() as hooks:
            for module in model.modules():
                if isinstance(module, nn.Conv2d):
                    hooks.enter_context(module.register_forward_pre_hook(check))
            model.eval()(torch.zeros(1, channels, *size))
    finally:
        model.train(training)
    return patches[0] if patches else None


def unused_pixels_error(name: str, size: tuple[int, int], patch: tuple[int, int]) -> SettingError:
    """Return the error for an image size that is not a multiple of the patch size of the network `name`."""
    used, next_ = ([s // p * p + up * p * (s % p > 0) for s, p in zip(size, patch, strict=True)] for up in (0, 1))
    square = size[0] == size[1] and patch[0] == patch[1]
    near = [side[0] if square else f"[{side[0]},{side[1]}]" for side in (used, next_) if min(side)]
    shown = [str(side[0]) if square else f"{side[0]}×{side[1]}" for side in (used, size)]
    known = f"a multiple of {patch[0]} (the patch size of {name})"
    do = f"Only {shown[0]} of {shown[1]} pixels would be used. Use {' or '.join(map(str, near))}."
    return SettingError("model.image_size", size_setting(size), known, do)


def size_setting(size: tuple[int, int]) -> int | str:
    """Return a size (H, W) as the value of ``model.image_size`` on the command line."""
    return size[0] if size[0] == size[1] else f"[{size[0]},{size[1]}]"
