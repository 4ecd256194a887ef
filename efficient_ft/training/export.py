"""``model.safetensors``: the trained weights under timm's own names, with all that is needed to use them."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from efficient_ft import __version__
from efficient_ft.config import ModelConfig
from efficient_ft.core.errors import UserError
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.core.tokenizer import Tokenizer
from efficient_ft.methods import METHODS
from efficient_ft.methods.base import Method, in_order
from efficient_ft.models.factory import create_model, random_model, read_state_dict
from efficient_ft.models.tasks import tasks_of
from efficient_ft.models.text import TOKENIZER
from efficient_ft.record.files import write_atomically
from efficient_ft.record.formats import OtherVersionError
from efficient_ft.task import Classification, Inputs, TextClassification, moved

NAME = "model.safetensors"


@dataclass(frozen=True)
class Trained:
    """A trained network, ready to use.

    Attributes:
        model: in evaluation mode, on the CPU; its parameters require no gradient.
        class_names: by output index; with several tasks those of the chosen task.
        input: size and normalization of the images; or length and tokenizer of the texts.
        notes: further metadata of the file: epoch, accuracy, split.
        tasks: class names by task, where there are several; `models.tasks.tasks_of(model).active` is the task that the
            model works on.
    """

    model: nn.Module
    class_names: list[str]
    input: InputSpec
    notes: dict[str, Any]
    tasks: dict[str, list[str]] = field(default_factory=dict)


def save(
    path: Path,
    weights: Mapping[str, Tensor],
    model: ModelConfig,
    class_names: list[str] | dict[str, list[str]],
    input: InputSpec,
    notes: dict[str, Any],
    methods: Sequence[Method] = (),
) -> None:
    """Write `weights`, with all that `load` needs in the file's metadata.

    Args:
        path: the file.
        weights: under timm's own names (`plain_state_dict`).
        model: the model's configuration.
        class_names: by output index; with several tasks, by task.
        input: size and normalization of the images.
        notes: further metadata.
        methods: those that cannot be merged into the model's own weights are noted with their settings, since
            `weights` hold what they added, and with them the selection that chose the adapted layers.
    """
    adapted = any(m.axis == "adapters" and not m.merges for m in methods)
    added = [m for m in in_order(methods) if not m.merges or (adapted and m.axis == "selection")]
    about = {
        "architecture": model.name,
        **({} if model.encoder is None else {"encoder": model.encoder}),
        "model_kwargs": model.kwargs,
        "class_names": class_names,
        "image_size": list(input.size),  # of texts the number of tokens, alone
        "mean": list(input.mean),
        "std": list(input.std),
        "interpolation": input.interpolation,
        **notes,
        "added": [{"method": m.name, "settings": m.settings()} for m in added],
        "efficient_ft": __version__,
    }
    if input.tokenizer is not None:
        about |= {TOKENIZER: input.tokenizer.dumps()}
    metadata = {"format": "pt", **{k: v if isinstance(v, str) else json.dumps(v) for k, v in about.items()}}
    separate = _without_shared_storages(weights)

    def write(temporary: Path) -> None:
        save_file(separate, temporary, metadata)
        # safetensors creates files that only their owner can read; use the umask as for any other file.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)

    write_atomically(path, write)


def _without_shared_storages(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that are part of another's storage (tied weights, views), which the format refuses."""
    seen: set[int] = set()
    separate: dict[str, Tensor] = {}
    for name, weight in weights.items():
        storage = weight.untyped_storage()
        alone = storage.data_ptr() not in seen and storage.nbytes() == weight.nbytes
        separate[name] = weight if alone else weight.clone()
        seen.add(storage.data_ptr())
    return separate


def load(run: Path, task: str | None = None) -> Trained:
    """The trained network of a run.

    Args:
        run: a run folder, or its model.safetensors.
        task: with several tasks, the one whose classes are meant; None: the first.

    Raises:
        OtherVersionError: the file notes a method or a setting that this version does not know.
        UserError: there is no such file, it is damaged, or no run wrote it; or there is no such task.
    """
    file = run / NAME if run.is_dir() else run
    about = _metadata(run, file)
    known = ("model_kwargs", "class_names", "image_size", "mean", "std")
    values = {k: json.loads(about[k]) for k in known}
    size = tuple(values["image_size"])
    tokenizer = Tokenizer.loads(about[TOKENIZER]) if TOKENIZER in about else None
    config = ModelConfig(
        name=about["architecture"],
        encoder=about.get("encoder"),
        pretrained=False,
        weights=str(file),
        image_size=None if tokenizer else size,
        max_length=size[0] if tokenizer else None,
        kwargs=values["model_kwargs"],
    )
    added = [_noted_method(file, part) for part in json.loads(about.get("added", "[]"))]
    names = values["class_names"]
    tasks = names if isinstance(names, dict) else {}
    if task is not None and task not in tasks:
        has = f"its tasks are {', '.join(tasks)}" if tasks else "it was trained on one data set"
        raise UserError(f"{run} has no task {task}: {has}.")
    classes = {name: len(of_task) for name, of_task in tasks.items()} or len(names)
    if added or tasks:
        model = random_model(config, classes)
        for method in added:
            method.apply(model)
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
        input=InputSpec(size, tuple(values["mean"]), tuple(values["std"]), about["interpolation"], tokenizer),
        notes={
            k: v
            for k, v in about.items()
            if k not in (*known, "format", "architecture", "encoder", "interpolation", "added", TOKENIZER)
        },
        tasks=tasks,
    )


def _metadata(run: Path, file: Path) -> dict[str, str]:
    """The metadata of `file`, the model.safetensors of `run`."""
    if not file.is_file():
        if not run.exists():
            raise UserError(f"{run}: no such folder. Pass the run folder printed when training ended.")
        raise UserError(f"{run} holds no {NAME}: the run has finished no epoch.")
    try:
        with safe_open(file, "pt") as opened:
            about = dict(opened.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} cannot be read ({error}).") from error
    if "architecture" not in about or "class_names" not in about:
        raise UserError(f"{file} was not written by a run: its metadata names no architecture and classes.")
    return about


def _noted_method(file: Path, part: dict[str, Any]) -> Method:
    """The method that the metadata of `file` notes, with its settings."""
    name, settings = part["method"], part["settings"]
    do = "Train again with this version, or use the version that wrote the file."
    if name not in METHODS:
        raise OtherVersionError(file, f"it notes the method {name}, unknown to this version", do, "another")
    unknown = sorted(set(settings) - set(inspect.signature(METHODS[name]).parameters))
    if unknown:
        which = ", ".join(f"method.{name}.{setting}" for setting in unknown)
        raise OtherVersionError(file, f"it notes {which}, unknown to this version", do, "another")
    try:
        return METHODS[name](**settings)
    except UserError as error:
        raise OtherVersionError(file, f"it notes the method {name} with {error}", do) from error


@torch.inference_mode()
def probabilities(model: nn.Module, inputs: Inputs) -> Tensor:
    """Images (B, 3, H, W), or tensors of texts by name → probabilities (B, classes) on the CPU; computed on the model's
    device."""
    device = next(model.parameters()).device
    task = Classification() if isinstance(inputs, Tensor) else TextClassification()
    return task.logits(model, moved(inputs, device)).float().softmax(-1).cpu()
