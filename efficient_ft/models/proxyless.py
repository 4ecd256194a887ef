"""ProxylessNAS-Mobile, which is registered with timm as `proxyless_mobile`.

Source: Cai, Zhu, Han, "ProxylessNAS: Direct Neural Architecture Search on Target Task and Hardware", ICLR 2019. The
model is timm's EfficientNet with other block definitions, so its weights load into timm without this package.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._efficientnet_builder import decode_arch_def
from timm.models.efficientnet import EfficientNet
from torch import Tensor, nn

#: Blocks of each stage in timm's notation: repetitions (r), kernel size (k), stride (s), expansion (e), and channels
#: (c).
STAGES = [
    ["ds_r1_k3_s1_c16"],
    ["ir_r1_k5_s2_e3_c32", "ir_r1_k3_s1_e3_c32"],
    ["ir_r1_k7_s2_e3_c40", "ir_r1_k3_s1_e3_c40", "ir_r2_k5_s1_e3_c40"],
    ["ir_r1_k7_s2_e6_c80", "ir_r3_k5_s1_e3_c80"],
    ["ir_r1_k5_s1_e6_c96", "ir_r3_k5_s1_e3_c96"],
    ["ir_r1_k7_s2_e6_c192", "ir_r1_k7_s1_e6_c192", "ir_r2_k7_s1_e3_c192"],
    ["ir_r1_k7_s1_e6_c320"],
]

default_cfgs = generate_default_cfgs(
    {
        # The entry point `proxyless_mobile` of mit-han-lab/ProxylessNAS in torch.hub downloads this file.
        "proxyless_mobile.mit_in1k": {
            "url": "https://raw.githubusercontent.com/han-cai/files/master/proxylessnas/proxyless_mobile.pth",
            "num_classes": 1000,
            "input_size": (3, 224, 224),
            "pool_size": (7, 7),
            "crop_pct": 0.875,
            "interpolation": "bilinear",
            "mean": IMAGENET_DEFAULT_MEAN,
            "std": IMAGENET_DEFAULT_STD,
            "first_conv": "conv_stem",
            "classifier": "classifier",
        }
    }
)
#: Prefixes of timm's parameter names outside of the blocks. The keys are the prefixes in the release.
_OUTSIDE = {
    "first_conv.conv.": "conv_stem.",
    "first_conv.bn.": "bn1.",
    "feature_mix_layer.conv.": "conv_head.",
    "feature_mix_layer.bn.": "bn2.",
    "classifier.linear.": "classifier.",
}
#: timm's names of the convolution and the BatchNorm of each layer, in blocks with expansion and in other blocks.
_EXPANDING = {
    "inverted_bottleneck": ("conv_pw", "bn1"), "depth_conv": ("conv_dw", "bn2"), "point_linear": ("conv_pwl", "bn3")
}  # fmt: skip
_SEPARABLE = {"depth_conv": ("conv_dw", "bn1"), "point_linear": ("conv_pw", "bn2")}
_BLOCK = re.compile(r"blocks\.(\d+)\.mobile_inverted_conv\.(\w+)\.(conv|bn)\.(.+)")


def timm_names(weights: dict[str, Tensor], *_: Any) -> dict[str, Tensor]:
    """Rename the keys of a state dict of the ProxylessNAS release to timm's names.

    Blocks are matched by their order, because the numbering in the release includes blocks without weights. Unknown
    names are not changed, and are rejected when the weights are loaded. A state dict with timm's names is returned
    unchanged. Raise a ValueError if the number of blocks differs from that of ProxylessNAS-Mobile.
    """
    if not any(name.startswith("first_conv.") for name in weights):
        return weights
    places = [(stage, k) for stage, blocks in enumerate(decode_arch_def(STAGES)) for k in range(len(blocks))]
    numbers = sorted({int(found[1]) for name in weights if (found := _BLOCK.fullmatch(name))})
    if len(numbers) != len(places):
        raise ValueError(f"{len(numbers)} blocks have weights, but ProxylessNAS-Mobile has {len(places)} blocks")
    place_of = dict(zip(numbers, places, strict=True))

    def renamed(name: str) -> str:
        found = _BLOCK.fullmatch(name)
        if found is None:
            start = next((old for old in _OUTSIDE if name.startswith(old)), None)
            return name if start is None else _OUTSIDE[start] + name.removeprefix(start)
        stage, k = place_of[int(found[1])]
        layers = (_EXPANDING if stage else _SEPARABLE).get(found[2])
        return name if layers is None else f"blocks.{stage}.{k}.{layers[found[3] == 'bn']}.{found[4]}"

    return {renamed(name): value for name, value in weights.items()}


@register_model
def proxyless_mobile(pretrained: bool = False, **kwargs: Any) -> EfficientNet:
    """Create ProxylessNAS-Mobile, which has 4.1 M parameters (1000 classes) and 320 M multiply-adds at 224 px."""
    own = {
        "block_args": decode_arch_def(STAGES),
        "stem_size": 32,
        "norm_layer": partial(nn.BatchNorm2d, eps=1e-3),  # the release uses this value
        "act_layer": nn.ReLU6,
    }
    return build_model_with_cfg(
        EfficientNet, "proxyless_mobile", pretrained, pretrained_filter_fn=timm_names, **{**own, **kwargs}
    )
