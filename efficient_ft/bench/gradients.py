"""Compute the gradients of one training step, compare two gradients, and load batches of images."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset
from torchvision.datasets import ImageFolder

from efficient_ft.config import ModelConfig
from efficient_ft.core.errors import UserError
from efficient_ft.cost.step import StepMethods, StepSpec, forward_and_loss
from efficient_ft.data import Transform, read_image
from efficient_ft.data.images import is_image
from efficient_ft.models.factory import input_of
from efficient_ft.models.frozen_batch_norm import freeze_batch_norm
from efficient_ft.task import Classification, Inputs, Task, tensors_of

#: Inputs of a network and their targets: images (B, C, H, W) and class indices (B,).
Batch = tuple[Inputs, Tensor]
_CLASSIFICATION = Classification()
Gradients = dict[str, Tensor]


class StepGradients(NamedTuple):
    """Gradients of one step, and the task's metric (accuracy) on the batch of this step."""

    accuracy: float
    gradients: Gradients


def step_gradients(
    model: nn.Module,
    batch: Batch,
    *,
    methods: Iterable[Any] = (),
    step: int = 0,
    inputs: Sequence[str] = (),
    precision: str = "fp32",
    seed: int | None = None,
    task: Task = _CLASSIFICATION,
) -> StepGradients:
    """Compute the gradients of a training step without updating parameters. BatchNorm statistics are frozen.

    Args:
        model: network for the task. The network is set to training mode.
        batch: inputs and targets on the model's device.
        methods: methods that are applied to `model`. Additional losses of the methods are not included.
        step: number of the step, which is passed to the methods.
        inputs: names of modules whose input gradients are also returned.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        seed: seed that is set for torch's generators before the step. If None, no seed is set.
        task: task that defines the logits and the loss.

    Returns:
        The task's metric, and a dict with all gradients. The key of a parameter's gradient is the name of the parameter
        in the plain model. The key of a gradient requested by `inputs` is ``input:NAME``.
    """
    found: Gradients = {}

    def before(name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if args[0].requires_grad:
            args[0].register_hook(lambda g: found.__setitem__(f"input:{name}", g.detach()))

    given, targets = batch
    taking_part = StepMethods(methods)
    model.train()
    freeze_batch_norm(model)
    model.zero_grad(set_to_none=True)
    if seed is not None:
        torch.manual_seed(seed)
    taking_part.begin(step)
    size = tuple(given.shape[-2:]) if isinstance(given, Tensor) else tuple(tensors_of(given)[0].shape[1:])
    spec = StepSpec(len(targets), size, precision, task=task)
    with ExitStack() as hooks:
        for name in inputs:
            hooks.enter_context(model.get_submodule(name).register_forward_pre_hook(partial(before, name)))
        logits, loss = forward_and_loss(model, StepMethods(), given, targets, spec)
        loss.backward()
    taking_part.end()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name.replace(".base_layer", "")] = parameter.grad.detach()  # peft inserts .base_layer
    model.zero_grad(set_to_none=True)
    scores = task.scores(logits.shape[1], local=True).to(logits.device)
    scores.update(logits.detach().float(), targets)
    return StepGradients(scores.compute()[task.metric], found)


def error_and_cosine(
    exact: Mapping[str, Tensor], approximate: Mapping[str, Tensor], keys: Iterable[str]
) -> tuple[float, float]:
    """Return the relative error ‖g̃ − g‖ / ‖g‖ and the cosine of the concatenated gradients in `keys`.

    Keys without an exact gradient are ignored.

    Raises:
        UserError: If the exact gradient is zero.
    """
    dot = square = own = error = 0.0
    for key in keys:
        if key not in exact:  # the parameter has no exact gradient
            continue
        g, a = exact[key].double(), approximate[key].double()
        dot += (g * a).sum().item()
        square += g.square().sum().item()
        own += a.square().sum().item()
        error += (a - g).square().sum().item()
    if not square:
        raise UserError("The exact gradient is zero. Check whether the network's loss is zero on these images.")
    return math.sqrt(error / square), dot / math.sqrt(square * own) if own else 0.0


def image_folder(folder: Path, config: ModelConfig) -> ImageFolder:
    """Open the images in FOLDER/CLASS/* with the evaluation transform of the network. Classes are sorted by name.

    Raises:
        UserError: If the folder does not exist, or has no class folders with images.
    """
    if not folder.is_dir():
        raise UserError(f"The folder {folder} does not exist.")
    try:
        return ImageFolder(str(folder), Transform(input_of(config)), loader=read_image, is_valid_file=is_image)
    except FileNotFoundError as error:
        raise UserError(f"The folder {folder} must contain images in class folders (CLASS/*.jpg). {error}") from error


def shuffled_batches(images: ImageFolder, batch: int, count: int, skip: int, seed: int) -> Iterator[Batch]:
    """Shuffle the images with `seed`, skip `skip` batches, and load at most `count` disjoint batches."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed)).tolist()
    chosen = order[skip * batch : (skip + count) * batch]
    return iter(DataLoader(Subset(images, chosen), batch, drop_last=True))
