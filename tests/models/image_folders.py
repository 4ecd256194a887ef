"""Small image classifiers in local folders in the format of `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

#: Arguments of a small ViT and of similar networks for images of 32×32 pixels (an 8×8 grid).
SMALL: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "num_hidden_layers": 2,
                         "image_size": 32, "patch_size": 4}  # fmt: skip
_TEXT = {**{k: v for k, v in SMALL.items() if "size" not in k or k == "hidden_size"}, "intermediate_size": 32,
         "vocab_size": 50}  # fmt: skip
_SWIN = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4, "image_size": 32, "patch_size": 4}
_RESNET = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1]}
#: Class of the network, class of the configuration, and arguments, by model type.
NETWORKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vit": ("ViTForImageClassification", "ViTConfig", SMALL),
    "deit": ("DeiTForImageClassificationWithTeacher", "DeiTConfig", SMALL),
    "dinov2": ("Dinov2Model", "Dinov2Config", SMALL),
    "beit": ("BeitForImageClassification", "BeitConfig", {**SMALL, "use_relative_position_bias": True}),
    "siglip": ("SiglipModel", "SiglipConfig", {"vision_config": SMALL, "text_config": _TEXT}),
    "clip": ("CLIPModel", "CLIPConfig", {"vision_config": SMALL, "text_config": _TEXT}),
    "swin": ("SwinForImageClassification", "SwinConfig", _SWIN),
    "resnet": ("ResNetForImageClassification", "ResNetConfig", _RESNET),
    "convnext": ("ConvNextForImageClassification", "ConvNextConfig",
                 {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "image_size": 32}),
}  # fmt: skip


def write_network(folder: Path, kind: str = "vit", size: int | None = 32, **changes: Any) -> Path:
    """Write a network with random weights, and an image processor for images of `size` pixels unless `size` is None."""
    network, config, arguments = NETWORKS[kind]
    torch.manual_seed(0)
    about = getattr(transformers, config)(**{**arguments, **changes})
    model = getattr(transformers, network)(about)
    with torch.no_grad():  # position embeddings may be initialized to 0
        for name, parameter in model.named_parameters():
            if "position" in name or name.endswith("bias"):
                parameter.normal_(std=0.1)
    model.save_pretrained(folder)
    if size is not None:
        sides = {"height": size, "width": size}
        transformers.ViTImageProcessor(size=sides).save_pretrained(folder)
    return folder
