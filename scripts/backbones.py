"""Count a training step of many networks with every method, or record why a network does not support a method.

    python scripts/backbones.py --json benchmarks/backbones.json

The networks and recipes are listed in ``scripts/backbones.yaml``. All networks have random weights and 10 classes.
Networks that are already in the file are not counted again. Nothing is trained, so no accelerator is required. An error
that is not a `UserError` ends the script, because every combination must either work or be rejected with a reason.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
import yaml
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from efficient_ft.cli.hydra.compose import configurations
from efficient_ft.cli.hydra.groups import CONF, register
from efficient_ft.core.errors import UserError
from efficient_ft.cost import executed
from efficient_ft.methods.build import build_methods
from efficient_ft.models.view import default_image_size
from efficient_ft.record.environment import environment

LISTS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("backbones.yaml").read_text(encoding="utf-8"))
BATCH, CLASSES = 2, 10


def main() -> None:
    """Count the networks that are not in the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="NETWORK", help="may be repeated (default: all)")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    options = parser.parse_args()
    register()
    record: dict[str, Any] = {
        "command": "python scripts/backbones.py --json benchmarks/backbones.json",
        "kind": "backbones",
        "batch": BATCH,
        "networks": {},
    }
    if options.json.is_file():
        record = json.loads(options.json.read_text(encoding="utf-8"))
    for name, create in networks():
        if name in record["networks"] or (options.only and name not in options.only):
            continue
        record["networks"][name] = count(create)
        record["environment"] = environment("cpu", packages=("torch", "timm", "transformers", "torchvision"))
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        supported = sum("reason" not in of for of in record["networks"][name]["recipes"].values())
        print(f"{name}: {supported} of {len(LISTS['recipes'])} recipes", flush=True)


def networks() -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Yield the name of each network, and a function that creates the network."""
    import torchvision
    import transformers

    for name in LISTS["timm"]:
        size: Any = {"img_size": 224} if name.startswith("vit_pe_core") else {}
        yield f"timm {name}", partial(timm.create_model, name, num_classes=CLASSES, **size)
    for name, config in LISTS["transformers"].items():
        yield f"transformers {name}", partial(_of_transformers, getattr(transformers, name), config)
    for name in LISTS["torchvision"]:
        yield f"torchvision {name}", partial(getattr(torchvision.models, name), num_classes=CLASSES)


def _of_transformers(network: Any, config: str) -> nn.Module:
    import transformers

    created: nn.Module = network(getattr(transformers, config)(num_labels=CLASSES))
    return created


def count(create: Callable[[], nn.Module]) -> dict[str, Any]:
    """Return the image size of a network, and the costs per image, or the reason of the rejection, of each recipe."""
    with torch.device("meta"):
        model = create()
    size = default_image_size(model)
    recipes: dict[str, Any] = {}
    for name, arguments in LISTS["recipes"].items():
        (config,) = configurations(CONF, "train", ["model=deit_tiny", "recipe=none", *arguments], sweep=False)
        try:
            cost = executed(model, BATCH, size, methods=build_methods(config))
        except UserError as error:
            recipes[name] = {"reason": str(error)}
        else:
            recipes[name] = {
                "forward_flops": cost.forward_flops,
                "backward_flops": cost.backward_flops,
                "saved_bytes": cost.saved_bytes,
            }
    return {"size": list(size), "recipes": recipes}


if __name__ == "__main__":
    main()
