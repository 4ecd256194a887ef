"""The result of a run in use: `model.safetensors` with timm's own names, and what is needed to use it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from efficient_ft import __version__
from efficient_ft.core.errors import UserError
from efficient_ft.training.checkpoint import write_atomically

if TYPE_CHECKING:
    from efficient_ft.config import ModelConfig
    from efficient_ft.core.input_spec import InputSpec
    from efficient_ft.methods.base import Method

NAME = "model.safetensors"


@dataclass(frozen=True)
class Trained:
    """A trained network, ready to use.

    Attributes:
        model: in evaluation mode, on the CPU.
        class_names: by output index; with several tasks those of the task that was asked for.
        input: size and normalisation of the images.
        notes: what else the file says: epoch, accuracy, split.
        tasks: class names of each task, where there are several; `models.tasks.tasks_of(model).active` says which of
            them the model works on.
    """

    model: nn.Module
    class_names: list[str]
    input: InputSpec
    notes: dict[str, Any]
    tasks: dict[str, list[str]] = field(default_factory=dict)


def save(
    path: Path,
    weights: dict[str, Tensor],
    model: ModelConfig,
    class_names: list[str] | dict[str, list[str]],
    input: InputSpec,
    notes: dict[str, Any],
    methods: Sequence[Method] = (),
) -> None:
    """Write `weights` (timm's names) with all that `load` needs in the file's metadata.

    `class_names` are by task where there are several. Of `methods`, those that cannot be merged are noted with their
    settings: `weights` hold what they added. So is the selection that said to which part of the model.
    """
    from efficient_ft.methods.base import in_order

    adapted = any(m.axis == "adapters" and not m.merges for m in methods)
    added = [m for m in in_order(methods) if not m.merges or (adapted and m.axis == "selection")]
    about = {
        "architecture": model.name,
        "model_kwargs": model.kwargs,
        "class_names": class_names,
        "image_size": list(input.size),
        "mean": list(input.mean),
        "std": list(input.std),
        "interpolation": input.interpolation,
        **notes,
        "added": [{"method": m.name, "settings": m.settings()} for m in added],
        "efficient_ft": __version__,
    }
    metadata = {"format": "pt", **{k: v if isinstance(v, str) else json.dumps(v) for k, v in about.items()}}
    # Shared storages (tied weights) are refused by the format.
    separate = {k: v.clone() for k, v in weights.items()}

    def write(beside: Path) -> None:
        save_file(separate, beside, metadata)
        # safetensors lets nobody but the owner read; like any other file, it is for whom the umask allows.
        umask = os.umask(0)
        os.umask(umask)
        beside.chmod(0o666 & ~umask)

    write_atomically(path, write)


def load(run: Path, task: str | None = None) -> Trained:
    """The network of a run folder, or of its model.safetensors.

    Args:
        task: of a run on several data sets, the one whose classes are meant; None: the first.

    Raises:
        UserError: there is none, it is damaged, or it does not come from a run; or there is no such task.
    """
    from efficient_ft.config import ModelConfig
    from efficient_ft.core.input_spec import InputSpec
    from efficient_ft.methods import METHODS
    from efficient_ft.models.factory import create_model, random_model, read_state_dict
    from efficient_ft.models.tasks import tasks_of

    file = run / NAME if run.is_dir() else run
    if not file.is_file():
        what = "no such folder" if not run.exists() else f"holds no {NAME}; has the run finished an epoch?"
        raise UserError(f"{run}: {what}")
    try:
        with safe_open(file, "pt") as opened:
            about = dict(opened.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: cannot be read ({error}).") from error
    if "architecture" not in about or "class_names" not in about:
        raise UserError(f"{file}: was not written by a run: its metadata names no architecture and classes.")
    known = ("model_kwargs", "class_names", "image_size", "mean", "std")
    values = {k: json.loads(about[k]) for k in known}
    size = (values["image_size"][0], values["image_size"][1])
    config = ModelConfig(
        name=about["architecture"],
        pretrained=False,
        weights=str(file),
        image_size=size,
        kwargs=values["model_kwargs"],
    )
    added = json.loads(about.get("added", "[]"))
    names = values["class_names"]
    tasks = names if isinstance(names, dict) else {}
    if task is not None and task not in tasks:
        has = f"its tasks are {', '.join(tasks)}" if tasks else "it was trained on one data set"
        raise UserError(f"{run}: has no task {task}; {has}.")
    classes = {name: len(of_task) for name, of_task in tasks.items()} or len(names)
    if added or tasks:
        model = random_model(config, classes)
        for part in added:
            METHODS[part["method"]](**part["settings"]).apply(model)
        model.load_state_dict(read_state_dict(file))
    else:
        model = create_model(config, classes)
    switch = tasks_of(model)
    if switch is not None:
        switch.active = task or switch.active
        names = tasks[switch.active]
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return Trained(
        model=model.eval(),
        class_names=names,
        input=InputSpec(size, tuple(values["mean"]), tuple(values["std"]), about["interpolation"]),
        notes={k: v for k, v in about.items() if k not in (*known, "format", "architecture", "interpolation", "added")},
        tasks=tasks,
    )


@torch.inference_mode()
def probabilities(model: nn.Module, images: Tensor) -> Tensor:
    """Images (B, 3, H, W) → probabilities (B, classes), on the model's device."""
    device = next(model.parameters()).device
    return model(images.to(device)).float().softmax(-1).cpu()
