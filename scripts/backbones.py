"""Count the costs of a training step of each network with each method, or record why a method is not supported.

    python scripts/backbones.py
    python scripts/backbones.py --list encoders

The lists of networks and recipes are in ``scripts/backbones.yaml``. The record is ``benchmarks/LIST.json``. All
networks have random weights and 10 classes. Networks that are already in the record are not counted again. Nothing is
trained, so no accelerator is required. An error that is not a `UserError` ends the script, because every combination
must either work or be rejected with a reason.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import timm
import torch
import yaml
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from efficient_ft.cli.hydra.compose import configurations
from efficient_ft.cli.hydra.groups import CONF, register
from efficient_ft.config.schema import Config
from efficient_ft.core.errors import UserError
from efficient_ft.cost import executed
from efficient_ft.methods.build import build_methods
from efficient_ft.models.view import default_image_size, view
from efficient_ft.record.environment import environment
from efficient_ft.record.files import json_text, write_text_atomically

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
LISTS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("backbones.yaml").read_text(encoding="utf-8"))
CLASSES = 10


def main() -> None:
    """Count the networks that are not in the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", choices=LISTS, default="backbones", help="list of networks (default: backbones)")
    parser.add_argument("--only", action="append", metavar="NETWORK", help="may be repeated (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: benchmarks/LIST.json")
    options = parser.parse_args()
    register()
    file = options.json or BENCHMARKS / f"{options.list}.json"
    command = "python scripts/backbones.py" + (f" --list {options.list}" if options.list != "backbones" else "")
    record: dict[str, Any] = {"command": command, "kind": "backbones", "list": options.list}
    record |= {"batch": LISTS[options.list]["batch"], "networks": {}}
    if file.is_file():
        record = json.loads(file.read_text(encoding="utf-8"))
    recipes = LISTS[options.list]["recipes"]
    for name in networks(options.list):
        if name in record["networks"] or (options.only and name not in options.only):
            continue
        found = {recipe: count(options.list, name, recipe) for recipe in recipes}
        model, size = created(options.list, name)
        record["networks"][name] = {"name": view(model).name, "size": list(size), "recipes": found}
        record["environment"] = environment("cpu", packages=("torch", "timm", "transformers", "torchvision"))
        write(record, file)
        supported = sum("reason" not in counts for counts in found.values())
        print(f"{name}: {supported} of {len(recipes)} recipes", flush=True)


def write(record: dict[str, Any], file: Path) -> None:
    """Write a record with one line per network."""
    lines = ",\n".join(f"  {json_text(name)}: {json_text(entry)}" for name, entry in record["networks"].items())
    others = ",\n".join(f" {json_text(key)}: {json_text(value)}" for key, value in record.items() if key != "networks")
    write_text_atomically(file, f'{{\n{others},\n "networks": {{\n{lines}\n }}\n}}\n')


@cache
def networks(list_name: str) -> dict[str, Callable[[], nn.Module]]:
    """Return a mapping from the names of the networks of a list to functions that create the networks."""
    import torchvision
    import transformers

    def of_transformers(network: str, config: str) -> nn.Module:
        created: nn.Module = getattr(transformers, network)(getattr(transformers, config)(num_labels=CLASSES))
        return created

    found: dict[str, Callable[[], nn.Module]] = {}
    for name in LISTS[list_name].get("timm", ()):
        size: Any = {"img_size": 224} if name.startswith("vit_pe_core") else {}
        found[f"timm {name}"] = partial(timm.create_model, name, num_classes=CLASSES, **size)
    for name, config in LISTS[list_name].get("transformers", {}).items():
        found[f"transformers {name}"] = partial(of_transformers, name, config)
    for name in LISTS[list_name].get("torchvision", ()):
        found[f"torchvision {name}"] = partial(getattr(torchvision.models, name), num_classes=CLASSES)
    return found


@cache
def created(list_name: str, name: str) -> tuple[nn.Module, tuple[int, int]]:
    """Create a network of a list on the meta device, and return the network and its image size (H, W) in pixels."""
    with torch.device("meta"):
        model = networks(list_name)[name]()
    return model, default_image_size(model)


@cache
def _configuration(list_name: str, recipe: str) -> Config:
    arguments = ["model=deit_tiny", "recipe=none", *LISTS[list_name]["recipes"][recipe]]
    (config,) = configurations(CONF, "train", arguments, sweep=False)
    return config


def count(list_name: str, name: str, recipe: str) -> dict[str, Any]:
    """Return the costs per image of a recipe, or the reason why the network does not support the recipe.

    For encoders, the step uses bf16 autocast and AdamW. The costs then also contain the peak memory of the forward and
    backward pass of one batch, and the size of the optimizer state.
    """
    model, size = created(list_name, name)
    methods = build_methods(_configuration(list_name, recipe))
    with_peak = list_name == "encoders"
    options: dict[str, Any] = {"precision": "bf16", "build_optimizer": _adamw} if with_peak else {}
    try:
        cost = executed(model, LISTS[list_name]["batch"], size, methods=methods, **options)
    except UserError as error:
        return {"reason": str(error)}
    counts: dict[str, Any] = {
        "forward_flops": cost.forward_flops,
        "backward_flops": cost.backward_flops,
        "saved_bytes": cost.saved_bytes,
    }
    if with_peak:
        assert cost.optimizer_bytes is not None
        counts["peak_bytes"] = cost.peak_bytes
        counts["optimizer_bytes"] = cost.optimizer_bytes
    return counts


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameter for parameter in model.parameters() if parameter.requires_grad)


if __name__ == "__main__":
    main()
