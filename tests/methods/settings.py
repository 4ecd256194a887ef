"""The table of method settings: one row per method, and one row per variant with a different code path.

`test_contracts` runs every contract of `efficient_ft.testing` on every row. A method without a row fails
`test_contracts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
from torch import nn

from efficient_ft.methods import METHODS
from efficient_ft.methods.tokens.tome import _MergingForward
from efficient_ft.testing import CLASSES, MODELS, USUAL, Instead, Row
from tests.methods import pruned_reference, references

#: The blocks of ResNet-50 at 224 px: input channels, output channels, width of the 3×3 convolution, and the side length
#: of the feature map before and after the block.
RESNET50 = [
    (4 * m if j else 2 * m if i else 64, 4 * m, m, side if j or not i else 2 * side, side)
    for i, (m, side, count) in enumerate([(64, 56, 3), (128, 28, 4), (256, 14, 6), (512, 7, 3)])
    for j in range(count)
]

#: Variants of a plain vision transformer: the timm name, followed by a description, and the arguments of timm.
_FORMS: dict[str, dict[str, Any]] = {
    "vit_small_patch14_reg4_dinov2": {},  # registers, LayerScale
    "vit_tiny_patch16_224 q and k norm": {"qk_norm": True},
    "vit_tiny_patch16_224 drop path": {"drop_path_rate": 0.3},
    "vit_tiny_patch16_224 average": {"global_pool": "avg"},
    "vit_base_patch16_siglip_224": {},  # no class token, attention pooling
    "vit_base_patch16_reg4_gap_256": {},  # registers, no class token
}


def small_vit(form: str, **kwargs: Any) -> nn.Module:
    """Create a small float64 vision transformer with fixed random weights, for images of 32×32 pixels (an 8×8 grid)."""
    torch.manual_seed(0)
    size = {"img_size": 32, "patch_size": 4, "depth": 4, "embed_dim": 48, "num_heads": 3, "num_classes": CLASSES}
    model = timm.create_model(form.split()[0], **{**size, **_FORMS.get(form, {}), **kwargs})
    for name, p in model.named_parameters():
        if p.dim() == 1 or "token" in name:  # layer scales of 1e-5 and zero class tokens hide errors
            nn.init.normal_(p, 1.0 if name.endswith("weight") or "gamma" in name else 0.0, 0.2)
    return model.double()


# ------------------------------------------------------------------------------------------------ methods
def _selection(name: str, *models: str, **settings: Any) -> Row:
    return Row(
        METHODS[name],
        settings,
        why_no_off="what trains is the choice itself",
        instead=Instead.SAME_GRADIENTS,
        models=models,
        on_reference="exact",
    )


_ILL_CONDITIONED = {"swinv2, bf16": "peft's own LoRA gives a gradient that is 45 % away from the one in float64"}


def _adapter(name: str = "lora", **settings: Any) -> Row:
    return Row(
        METHODS[name],
        settings,
        why_no_off="adapters of rank 0 do not exist",
        instead=Instead.SAME_OUTPUT,
        models=("vit", "efficientformer", "swinv2", "rotary") if settings["targets"] == "attention" else USUAL,
        refused={"resnet": "no attention layers"} if settings["targets"] == "attention" else {},
        on_reference=references.lora,
        unreferenced={} if settings["targets"] == "attention" else _ILL_CONDITIONED,
    )


def _with_group_norm(model: nn.Module) -> nn.Module:
    """Replace every BatchNorm by GroupNorm with 8 channels per group, and standardize the convolution filters."""
    for module in model.modules():
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Conv2d) and child.bias is None:
                filters = child.weight.data.flatten(1)
                filters -= filters.mean(1, keepdim=True)
                filters /= (filters.square().mean(1, keepdim=True) + 1e-6).sqrt()
            if isinstance(child, nn.BatchNorm2d):
                norm = nn.GroupNorm(child.num_features // 8, child.num_features, child.eps).to(child.weight)
                norm.weight, norm.bias = child.weight, child.bias
                setattr(module, name, nn.Sequential(norm, getattr(child, "act", nn.Identity())))
    return model


def _tinytl(initial: Callable[[nn.Module], nn.Module] = lambda model: model, **settings: Any) -> Row:
    return Row(
        METHODS["tinytl"],
        settings,
        why_no_off="a module of no width does not exist",
        instead=Instead.SAME_OUTPUT,
        models=("mobilenet",),
        refused={name: "timm's class InvertedResidual" for name in MODELS if name != "mobilenet"},
        initial_model=initial,
        on_reference=references.tinytl,
    )


def _side(**settings: Any) -> Row:
    return Row(
        METHODS["repnet"],
        settings,
        why_no_off="a network without side modules is the head alone",
        instead=Instead.SAME_OUTPUT,
        models=("vit", "resnet", "mobilenet"),
        refused=dict.fromkeys(("efficientformer", "swinv2"), "side modules support only the blocks of"),
        on_reference=references.repnet,
    )


def _quarter(model: nn.Module) -> nn.Module:
    """Scale the output of the last feed-forward network by 1/4, the gate weight of one of four equal experts."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("blocks.3.mlp.fc2."):
                parameter *= 0.25
    return model


def _experts(
    name: str, *models: str, initial: Callable[[nn.Module], nn.Module] = lambda model: model, **settings: Any
) -> Row:
    return Row(
        METHODS[name],
        {"num_experts": 4, "top_k": 2, "blocks": [-1], **settings},
        why_no_off="experts are separate parameters",
        instead=Instead.SAME_OUTPUT,
        models=models,
        refused={"resnet": "no class token" if name == "bsr_moe" else "has no mlp"},
        initial_model=initial,
        on_reference=references.moe,
    )


def _never_cheaper(*_: Any) -> None:
    """Disable the cost check, which leaves a layer exact if its full-rank projection costs more."""


def _low_rank(name: str, off: dict[str, Any], *models: str, **settings: Any) -> Row:
    base = next(c for c in METHODS[name].__mro__ if "_costs_more" in vars(c))
    return Row(
        METHODS[name],
        settings,
        off,
        shortcuts=((base, "_costs_more", _never_cheaper),),
        models=models,
        on_reference=references.low_rank,
    )


def _near(name: str, why: str, *models: str, rtol: float = 0.1, random: str = "", **settings: Any) -> Row:
    return Row(
        METHODS[name],
        settings,
        why_no_off=why,
        instead=Instead.NEAR_GRADIENTS,
        models=models,
        on_reference="exact",
        rtol=rtol,
        random=random,
    )


_KEEP_ALL = {"sparsity": 0.0, "value_dtype": "same"}


def _razor(*models: str, **settings: Any) -> Row:
    operations = "the reference has the operations of ViT and ResNet"
    return Row(
        METHODS["back_razor"],
        settings,
        off=_KEEP_ALL,
        models=models or USUAL,
        on_reference=pruned_reference.back_razor,
        unreferenced=dict.fromkeys(("efficientformer", "swinv2", "mobilenet", "rotary"), operations),
    )


#: Networks of the contracts that token methods reject, with a part of the message.
NO_GRID = {
    "efficientformer": "not share one token grid",
    "swinv2": "attention uses windows of a grid",
    "resnet": "no attention blocks",
    "mobilenet": "no attention blocks",
}


def _merging(**settings: Any) -> Row:
    return Row(
        METHODS["tome"],
        settings,
        off={"r": 0},
        shortcuts=((_MergingForward, "_acts", _always),),
        models=("vit", "rotary"),
        refused=NO_GRID,
        own_evaluation="tokens are merged there too",
        on_reference=references.tome,
    )


def _always(*_: Any) -> bool:
    """Enable matching and merging with r = 0. Attention then adds log(1) to the scores."""
    return True


#: The reason for rows with a random forward pass.
_ROUNDING = "values are rounded at random"

ROWS = {
    "full": Row(METHODS["full"], off={}, models=("vit",), on_reference="exact"),
    "head": _selection("head", "vit", "efficientformer"),
    "last_stage": _selection("last_stage", *USUAL, "rotary"),
    "blocks": _selection("blocks", "vit", "swinv2", blocks=[0, -1]),
    "bitfit": _selection("bitfit", "vit", "swinv2", "rotary"),
    "norm_last": _selection("norm_last", "vit", "resnet"),
    "lora": _adapter(rank=2, targets="attention"),
    "lora_all": _adapter(rank=2, targets="all"),
    "lora_fa": _adapter("lora_fa", rank=2, targets="all"),
    "lora_fa_attention": _adapter("lora_fa", rank=2, targets="attention"),
    "tinytl": _tinytl(_with_group_norm),
    "tinytl_batch_norm": _tinytl(norm="batch", kernel_size=3, groups=4),
    "repnet": _side(),
    "repnet_places": _side(blocks=[1, -1], kernel_size=3, groups=2),
    "lbp_wht": _low_rank("lbp_wht", {"order": 15}, *USUAL, "rotary", order=3),
    "lbp_wht_zero": _low_rank("lbp_wht", {"order": 8}, "vit", "efficientformer", bases="linf", order=2, padding="zero"),
    "lbp_wht_lhe": _low_rank("lbp_wht", {"order": 15}, "vit", "swinv2", bases="lhe", order=2, profile_steps=1),
    "lbp_dct": _low_rank("lbp_dct", {"order": 15}, "vit", "efficientformer", "rotary", order=3),
    "back_razor": _razor(*USUAL, "mobilenet", "rotary"),
    "back_razor_published": _razor(norm_saves="input", recompute_inputs=False, threshold="exact"),
    "back_razor_exact": _razor("vit", "resnet", threshold="exact"),
    "back_razor_both": _razor(prune="both", sparsity=0.5),
    "back_razor_both_published": _razor(
        "vit", "resnet", prune="both", sparsity=0.5, norm_saves="input", recompute_inputs=False
    ),
    "back_razor_fused": _near(
        "back_razor", "q, k, v are in 8 bits", "vit", random=_ROUNDING, **_KEEP_ALL, attention="fused"
    ),
    "back_razor_mesa": _near(
        "back_razor", "8 bits are not exact", "vit", "resnet", random=_ROUNDING, sparsity=0.0, value_dtype="int8"
    ),
    "checkpointing": Row(
        METHODS["checkpointing"],
        {"input_dtype": "int8"},
        off={"input_dtype": "same"},
        models=(*USUAL, "rotary"),
        on_reference="exact",
        rtol=0.25,
        random=_ROUNDING,
        unreferenced={"rotary": "the gradient of the registers is not much larger than the errors of rounding"},
    ),
    "checkpointing_bf16": _near("checkpointing", "the inputs are rounded", "vit", "swinv2", input_dtype="bf16"),
    "checkpointing_int4": _near(
        "checkpointing", "the inputs are rounded", "vit", "swinv2", rtol=0.25, input_dtype="int4"
    ),
    "checkpointing_some": Row(
        METHODS["checkpointing"],
        {"input_dtype": "int8", "blocks": [0, -1]},
        off={"input_dtype": "same"},
        models=("vit", "resnet"),
        on_reference="exact",
        rtol=0.25,
        random=_ROUNDING,
    ),
    "swat": Row(
        METHODS["swat"],
        off={"sparsity": 0.0},
        own_evaluation="what is trained is a network of sparse weights",
        on_reference=references.swat,
    ),
    "bsr": Row(
        METHODS["bsr"],
        {"blocks": [1, -1], "drop_at": [1, 2], "keep_rate": 1.0},
        why_no_off="what trains is the choice itself",
        instead=Instead.SAME_GRADIENTS,
        models=("vit", "rotary"),
        refused=dict.fromkeys(("efficientformer", "swinv2", "resnet", "mobilenet"), "no class token"),
        on_reference="exact",
    ),
    "bsr_dropping": Row(
        METHODS["bsr"],
        {"blocks": [1, -1], "drop_at": [1, 2], "keep_rate": 0.5, "fuse": False},
        why_no_off="what trains is the choice itself",
        models=("vit", "rotary"),
        own_evaluation="tokens are dropped there too",
        on_reference=references.evit,
    ),
    "bsr_cnn": _selection("bsr", "resnet", "swinv2", blocks=[1, -1], drop_at=[]),
    "evit": Row(
        METHODS["evit"],
        {"drop_at": [1, 2]},
        off={"keep_rate": 1.0},
        models=("vit", "rotary"),
        refused=dict.fromkeys(("efficientformer", "swinv2", "resnet", "mobilenet"), "no class token"),
        own_evaluation="tokens are dropped there too",
        on_reference=references.evit,
    ),
    "tome": _merging(),
    "tome_plain": _merging(proportional_attention=False, inflect=-0.5),
    "patch_dropout": Row(
        METHODS["patch_dropout"],
        off={"keep_rate": 1.0},
        models=("vit", "rotary"),
        refused=NO_GRID,
        on_reference=references.patch_dropout,
        random="patches are drawn for each image, as dropout draws",
    ),
    "alast": Row(
        METHODS["alast"],
        {"num_layers": 2, "budget_init": 0.7},
        why_no_off="budgets of 1 run none of the code that drops tokens",
        models=("vit", "rotary"),
        refused=dict.fromkeys(("efficientformer", "swinv2", "resnet", "mobilenet"), "no class token"),
        on_reference=references.alast,
    ),
    "uniform_layers": Row(
        METHODS["uniform_layers"],
        {"num_layers": 2},
        off={"num_layers": 4},
        models=("vit", "resnet"),
        on_reference="exact",
    ),
    "lisa": Row(
        METHODS["lisa"],
        {"num_layers": 1, "interval": 3, "train_embeddings": False},
        off={"num_layers": 4, "train_embeddings": True},
        models=("vit", "rotary"),
        on_reference="exact",
    ),
    "top_layers": Row(
        METHODS["top_layers"],
        {"num_layers": 2, "profile_steps": 1},
        off={"num_layers": 4, "train_embeddings": True},
        models=("vit",),
        on_reference="exact",
    ),
    "moe": _experts("moe", "vit", "swinv2", norm_topk_prob=True),
    "moe_published": _experts("moe", "vit", top_k=1, initial=_quarter),
    "bsr_moe": _experts("bsr_moe", "vit", blocks=[1, -1], drop_at=[1, 2], keep_rate=1.0, norm_topk_prob=True),
    "mesa": _near("mesa", "8 bits are not exact", *USUAL, random=_ROUNDING),
    "low_bit": replace(
        _near("low_bit", "a few bits are not exact", *USUAL, "mobilenet", "rotary", bits=8),
        unreferenced={"mobilenet": "one gradient is smaller than the errors of rounding; their mean is near zero"},
    ),
    "low_bit_auto": replace(
        _near("low_bit", "a few bits are not exact", *USUAL, "mobilenet", rtol=0.2, bits="auto", budget=4.0),
        unreferenced=dict.fromkeys(
            ("resnet", "efficientformer", "mobilenet"),
            "gradients of scales (BatchNorm, LayerScale) are smaller than the errors of rounding to 4 bits",
        ),
    ),
    "low_bit_2": _near(
        "low_bit", "a few bits are not exact", "vit", rtol=0.4, random=_ROUNDING, bits=2, group=8, rounding="stochastic"
    ),
    "low_bit_unfused": _near("low_bit", "a few bits are not exact", "vit", "swinv2", bits=8, attention="unfused"),
    "compact": Row(METHODS["compact"], off={}, models=(*USUAL, "mobilenet", "rotary"), on_reference="exact"),
    "compact_recomputed": Row(
        METHODS["compact"], {"attention": "recomputed"}, off={}, models=("vit", "swinv2"), on_reference="exact"
    ),
    "compact_kept": Row(
        METHODS["compact"], {"attention": "kept"}, off={}, models=("vit", "swinv2"), on_reference="exact"
    ),
    "compact_half": _near("compact", "GELU's inputs are rounded", "vit", "swinv2", activation_dtype="bf16"),
    "mesa_published": _near("mesa", "8 bits are not exact", "vit", "swinv2", random=_ROUNDING, recompute_inputs=False),
}


def rows_on_vit(often: Sequence[str]) -> list[Any]:
    """Return the first row of each method that supports the small ViT. Only the rows `often` are not exhaustive."""
    on_vit = {row.method: name for name, row in reversed(ROWS.items()) if "vit" in row.models}.values()
    return [name if name in often else pytest.param(name, marks=pytest.mark.exhaustive) for name in on_vit]
