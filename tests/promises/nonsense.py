"""Promise 4: a run stops instead of training nonsense."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from efficient_ft.training.output import checkpoint, export
from tests.promises.children import returned, run_child
from tests.promises.runs import arguments, program, write_images
from tests.promises.trial import Trial, require

#: Settings that make a loss, gradients, weights or outputs non-finite, by name.
_DIVERGING = {
    "weights after one step": ("optim.lr=3e38", "trainer.max_steps=1", "optim.warmup_steps=0"),
    "outputs after one step": ("optim.lr=1e30", "trainer.max_steps=1", "optim.warmup_steps=0"),
    "the loss": ("optim.lr=1e10", "optim.warmup_steps=0", "optim=sgd"),
    "gradients in bf16": ("optim.lr=1e25", "optim.warmup_steps=0", "trainer.precision=bf16"),
    "a loss under 8-bit packing": ("optim.lr=1e25", "optim.warmup_steps=0", "method=mesa"),
}
#: Changes of one tensor of pretrained weights, by name.
_DAMAGE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "NaN in one weight": lambda tensor: _with(tensor, math.nan),
    "infinity in one weight": lambda tensor: _with(tensor, math.inf),
    "NaN in every weight": lambda tensor: torch.full_like(tensor, math.nan),
}
#: Additional memory of a process in bytes, which is too small for the batch of `_out_of_memory`.
_ROOM = 2**30


def trials(long: bool) -> Iterator[Trial]:
    """Yield runs that diverge, runs from non-finite pretrained weights, and a run without enough memory."""
    for name, settings in _DIVERGING.items():
        yield Trial(f"not finite: {name}", _diverges, (settings,))
    for name in _DAMAGE:
        yield Trial(f"pretrained weights: {name}", _damaged, (name,))
    yield Trial("out of memory", _out_of_memory)


def _with(tensor: torch.Tensor, value: float) -> torch.Tensor:
    changed = tensor.clone()
    changed.flatten()[0] = value
    return changed


def _diverges(folder: Path, settings: tuple[str, ...]) -> None:
    write_images(folder / "images")
    done = run_child(program, arguments(folder / "images", folder / "run", *settings), output=folder / "run.log")
    _require_stopped(folder / "run", done.status, done.printed)


def _damaged(folder: Path, name: str) -> None:
    write_images(folder / "images")
    first = arguments(folder / "images", folder / "first", "trainer.max_steps=1")
    returned(program, first, output=folder / "first.log")
    weights = load_file(folder / "first" / export.NAME)
    key = "blocks.0.mlp.fc1.weight"
    save_file({**weights, key: _DAMAGE[name](weights[key])}, folder / "damaged.safetensors")
    command = arguments(folder / "images", folder / "run", f"model.weights={folder / 'damaged.safetensors'}")
    done = run_child(program, command, output=folder / "run.log")
    _require_stopped(folder / "run", done.status, done.printed)


def _require_stopped(run: Path, status: int, printed: str) -> None:
    """Require one message, no results, and only finite values in the folder."""
    require(status == 2, f"status {status}\n{printed[-2000:]}")
    require("Traceback" not in printed, printed[-3000:])
    require(not (run / "results.json").exists(), "there is a results.json")
    for file in run.glob("*.json*"):
        for line in file.read_text(encoding="utf-8").splitlines():
            json.loads(line, parse_constant=_no_constant)
    if (run / export.NAME).is_file():
        for name, tensor in load_file(run / export.NAME).items():
            require(bool(tensor.isfinite().all()), f"{name} in {export.NAME} is not finite")
    if checkpoint.exists(run / checkpoint.NAME):
        for name, tensor in checkpoint.read(run / checkpoint.NAME)["state_dict"].items():
            require(bool(tensor.isfinite().all()), f"{name} in the checkpoint is not finite")


def _no_constant(text: str) -> None:
    require(False, f"a JSON file holds {text}")


def _out_of_memory(folder: Path) -> None:
    """Train on a batch that requires more memory than the process can get."""
    write_images(folder / "images")
    # Unfused attention over 64×64 tokens requires 128 MiB per image.
    settings = ("model.image_size=256", "data.batch_size=48", "trainer.max_steps=1", "method=back_razor")
    command = arguments(folder / "images", folder / "run", *settings)
    done = run_child(program, command, _ROOM, output=folder / "run.log")
    require(done.status == 2, f"status {done.status}\n{done.printed[-3000:]}")
    require("Traceback" not in done.printed, done.printed[-3000:])
    for word in ("Out of memory", "data.batch_size=48", "tried to allocate", "predicted to fit"):
        require(word in done.unwrapped, f"{word!r} is not said:\n{done.printed[-2000:]}")
