"""One table: a row per method (and per variant that takes another path), and the small models they are tried on.

`test_contracts` drives every row through every contract; a method without a row fails there.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efficient_ft.methods import METHODS
from efficient_ft.methods.base import Method
from efficient_ft.methods.tokens.tome import _MergingForward

CLASSES = 5


# ------------------------------------------------------------------------------------------------ models
@dataclass(frozen=True)
class Model:
    """A timm model made small: `create(**changes)` builds it, images are `size` pixels square."""

    architecture: str
    size: int
    kwargs: dict[str, Any] = field(default_factory=dict)

    def create(self, **changes: Any) -> nn.Module:
        return timm.create_model(self.architecture, **{"num_classes": CLASSES, **self.kwargs, **changes})


MODELS = {
    # A class token before an 8×8 grid.
    "vit": Model(
        "vit_tiny_patch16_224",
        32,
        {"img_size": 32, "patch_size": 4, "depth": 4, "embed_dim": 48, "num_heads": 3},
    ),
    # Convolutions on maps, then attention on tokens; two heads. Its attention biases fix the size.
    "efficientformer": Model(
        "efficientformer_l1",
        224,
        {"depths": (1, 1, 1, 2), "embed_dims": (16, 16, 32, 64), "num_vit": 1},
    ),
    # Windows of 4×4, patch merging, qkv whose forward is not called by default.
    "swinv2": Model(
        "swinv2_tiny_window8_256",
        64,
        {
            "img_size": 64,
            "window_size": 4,
            "embed_dim": 32,
            "depths": (1, 2),
            "num_heads": (1, 2),
            "drop_path_rate": 0.0,
        },
    ),
    # A network without attention.
    "resnet": Model("resnet26", 64, {"layers": (1, 1, 1, 1), "channels": (16, 16, 32, 32)}),
    # Inverted residual blocks; normalisation and activation in one layer.
    "mobilenet": Model("mobilenetv2_035", 64),
}

#: For counts by hand: of each block of ResNet-50 at 224 px its channels in and out, the width of its 3×3 convolution,
#: and the sides of its map before and after.
RESNET50 = [
    (4 * m if j else 2 * m if i else 64, 4 * m, m, side if j or not i else 2 * side, side)
    for i, (m, side, count) in enumerate([(64, 56, 3), (128, 28, 4), (256, 14, 6), (512, 7, 3)])
    for j in range(count)
]

#: Those that a row is tried on where it says nothing else.
USUAL = ("vit", "efficientformer", "swinv2", "resnet")


@functools.cache
def _prototype(name: str) -> nn.Module:
    torch.manual_seed(0)
    return lively(MODELS[name].create().double())


def model_of(name: str) -> nn.Module:
    """A float64 copy of the small model `name` in training mode, always with the same weights."""
    return copy.deepcopy(_prototype(name))


def lively(model: nn.Module) -> nn.Module:
    """`model` with no weight at a value that hides a mistake: scales of 0 or 1e-5, biases of 0."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.uniform_(-0.2, 0.2)
            elif "logit_scale" not in name and (parameter.dim() == 1 or parameter.abs().max() < 1e-3):
                parameter.uniform_(0.5, 1.5)
    return model.train()


def batch_of(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two smooth images and their labels: on noise alone a low-pass method would keep next to nothing."""
    generator = torch.Generator().manual_seed(seed)
    size = MODELS[name].size
    coarse = torch.randn(2, 3, 6, 6, generator=generator, dtype=torch.float64)
    images = F.interpolate(coarse, size=(size, size), mode="bicubic")
    return images.to(dtype), torch.randint(0, CLASSES, (2,), generator=generator)


#: Forms of a plain vision transformer: a timm name and, after a space, in which way another one.
_FORMS: dict[str, dict[str, Any]] = {
    "vit_small_patch14_reg4_dinov2": {},  # registers, LayerScale
    "vit_tiny_patch16_224 q and k norm": {"qk_norm": True},
    "vit_tiny_patch16_224 drop path": {"drop_path_rate": 0.3},
    "vit_tiny_patch16_224 average": {"global_pool": "avg"},
    "vit_base_patch16_siglip_224": {},  # no class token, attention pooling
    "vit_base_patch16_reg4_gap_256": {},  # registers, no class token
}


def small_vit(form: str, **kwargs: Any) -> nn.Module:
    """A float64 model of a form, always with the same weights; its images are 32 pixels square, on an 8×8 grid."""
    torch.manual_seed(0)
    size = {"img_size": 32, "patch_size": 4, "depth": 4, "embed_dim": 48, "num_heads": 3, "num_classes": CLASSES}
    model = timm.create_model(form.split()[0], **{**size, **_FORMS.get(form, {}), **kwargs})
    for name, p in model.named_parameters():
        if p.dim() == 1 or "token" in name:  # scales of 1e-5 and classes of 0 hide mistakes
            nn.init.normal_(p, 1.0 if name.endswith("weight") or "gamma" in name else 0.0, 0.2)
    return model.double()


# ------------------------------------------------------------------------------------------------ one step
def gradients(model: nn.Module, name: str, seed: int = 0) -> dict[str, Tensor | None]:
    """Gradient of every parameter, by name, after the forward and backward pass of one training step."""
    torch.manual_seed(seed)  # rounding at random
    model.train()
    for parameter in model.parameters():
        parameter.grad = None
    images, labels = batch_of(name, next(model.parameters()).dtype, seed)
    F.cross_entropy(model(images), labels).backward()
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def warm_up(model: nn.Module, method: Method, name: str) -> None:
    """The steps after which `method` does what it does for good, and the begin of the next; no parameter moves."""
    steps = method.warmup_steps
    for step in range(steps):
        method.step_begin(step)
        gradients(model, name, seed=step)
        method.step_end()
    method.step_begin(steps)


def train_a_little(model: nn.Module, method: Method, name: str, steps: int = 2, lr: float = 0.05) -> None:
    """A few steps in anyone's own loop."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    for step in range(steps):
        method.step_begin(step)
        gradients(model, name, seed=step)
        optimizer.step()
        method.step_end()


@torch.no_grad()
def evaluate(model: nn.Module, name: str) -> Tensor:
    """Logits in evaluation mode; `model` stays in training mode."""
    model.eval()
    logits = model(batch_of(name, next(model.parameters()).dtype, seed=99)[0])
    model.train()
    return logits


# ------------------------------------------------------------------------------------------------ methods
@dataclass(frozen=True)
class Row:
    """What the contracts need to know of a method.

    Attributes:
        method: its class.
        settings: at which it differs from plain training.
        off: changes of `settings` at which it equals plain training (the shortcuts named are disabled meanwhile), or
            None with `why_no_off`, and `instead`, the property that is tested in its place.
        shortcuts: (class, attribute, what it returns in the test) that would skip the off case's own path.
        models: those it is tried on.
        refused: models that it must refuse, with a part of the message.
        what_trains: it sets `requires_grad`.
        own_evaluation: why evaluation is not the pretrained model's own.
        adds_parameters: evaluation includes what it adds to the model.
        reference: what the model is at first, where that is not the pretrained one.
    """

    method: type[Method]
    settings: dict[str, Any] = field(default_factory=dict)
    off: dict[str, Any] | None = None
    why_no_off: str = ""
    instead: Literal[
        "",
        "gradients of what trains are the plain ones",
        "output unchanged at first",
        "gradients are near the plain ones",
    ] = ""
    shortcuts: tuple[tuple[type, str, Callable[..., Any]], ...] = ()
    models: tuple[str, ...] = USUAL
    refused: dict[str, str] = field(default_factory=dict)
    what_trains: bool = False
    own_evaluation: str = ""
    adds_parameters: bool = False
    reference: Callable[[nn.Module], nn.Module] = lambda model: model

    def create(self, **changes: Any) -> Method:
        return self.method(**{**self.settings, **changes})


def _selection(name: str, *models: str, **settings: Any) -> Row:
    return Row(
        METHODS[name],
        settings,
        why_no_off="what trains is the choice itself",
        instead="gradients of what trains are the plain ones",
        models=models,
        what_trains=True,
    )


def _adapter(**settings: Any) -> Row:
    return Row(
        METHODS["lora"],
        settings,
        why_no_off="adapters of rank 0 do not exist",
        instead="output unchanged at first",
        models=("vit", "efficientformer", "swinv2") if settings["targets"] == "attention" else USUAL,
        refused={"resnet": "no attention layers"} if settings["targets"] == "attention" else {},
        what_trains=True,
        adds_parameters=True,
    )


def _with_group_norm(model: nn.Module) -> nn.Module:
    """GroupNorm of 8 channels in place of every BatchNorm, every filter before one with mean 0 and deviation 1."""
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


def _tinytl(reference: Callable[[nn.Module], nn.Module] = lambda model: model, **settings: Any) -> Row:
    return Row(
        METHODS["tinytl"],
        settings,
        why_no_off="a module of no width does not exist",
        instead="output unchanged at first",
        models=("mobilenet",),
        refused={name: "no inverted residual blocks" for name in MODELS if name != "mobilenet"},
        what_trains=True,
        adds_parameters=True,
        reference=reference,
    )


def _side(**settings: Any) -> Row:
    return Row(
        METHODS["repnet"],
        settings,
        why_no_off="a network without side modules is the head alone",
        instead="output unchanged at first",
        models=("vit", "resnet", "mobilenet"),
        refused=dict.fromkeys(("efficientformer", "swinv2"), "no blocks of a form beside which"),
        what_trains=True,
        adds_parameters=True,
    )


def _quarter(model: nn.Module) -> nn.Module:
    """The feed-forward network of the last block gives a quarter: one of four experts, all alike."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("blocks.3.mlp.fc2."):
                parameter *= 0.25
    return model


def _experts(
    name: str, *models: str, reference: Callable[[nn.Module], nn.Module] = lambda model: model, **settings: Any
) -> Row:
    return Row(
        METHODS[name],
        {"experts": 4, "top": 2, "blocks": [-1], **settings},
        why_no_off="experts are parameters of their own",
        instead="output unchanged at first",
        models=models,
        refused={"resnet": "has no mlp"},
        what_trains=True,
        adds_parameters=True,
        reference=reference,
    )


def _never_cheaper(*_: Any) -> None:
    """A full-rank projection costs more than the exact backward: the layer would be left exact."""


def _low_rank(name: str, off: dict[str, Any], *models: str, **settings: Any) -> Row:
    base = next(c for c in METHODS[name].__mro__ if "_costs_more" in vars(c))
    return Row(METHODS[name], settings, off, shortcuts=((base, "_costs_more", _never_cheaper),), models=models)


def _near(name: str, why: str, *models: str, **settings: Any) -> Row:
    return Row(METHODS[name], settings, why_no_off=why, instead="gradients are near the plain ones", models=models)


def _merging(**settings: Any) -> Row:
    another_form = dict.fromkeys(("efficientformer", "resnet", "mobilenet"), "not of the form")
    return Row(
        METHODS["tome"],
        settings,
        off={"r": 0},
        shortcuts=((_MergingForward, "_acts", _always),),
        models=("vit",),
        refused={**another_form, "swinv2": "not of the form"},
        own_evaluation="tokens are merged there too",
    )


def _always(*_: Any) -> bool:
    """Matching and merging run, though there is nothing to merge, and attention adds log(1)."""
    return True


_KEEP_ALL = {"sparsity": 0.0, "values": "input"}

ROWS = {
    "full": Row(METHODS["full"], off={}, models=("vit",), what_trains=True),
    "head": _selection("head", "vit", "efficientformer"),
    "last_stage": _selection("last_stage", *USUAL),
    "blocks": _selection("blocks", "vit", "swinv2", blocks=[0, -1]),
    "bitfit": _selection("bitfit", "vit", "swinv2"),
    "norm_last": _selection("norm_last", "vit", "resnet"),
    "lora": _adapter(rank=2, targets="attention"),
    "lora_all": _adapter(rank=2, targets="all"),
    "tinytl": _tinytl(_with_group_norm),
    "tinytl_batch_norm": _tinytl(norm="batch", kernel=3, groups=4),
    "repnet": _side(),
    "repnet_places": _side(places=[1, -1], kernel=3, groups=2),
    "lbp_wht": _low_rank("lbp_wht", {"order": 15}, *USUAL, order=3),
    "lbp_wht_zero": _low_rank("lbp_wht", {"order": 8}, "vit", "efficientformer", bases="linf", order=2, padding="zero"),
    "lbp_wht_lhe": _low_rank("lbp_wht", {"order": 15}, "vit", "swinv2", bases="lhe", order=2, profile_steps=1),
    "lbp_dct": _low_rank("lbp_dct", {"order": 15}, "vit", "efficientformer", order=3),
    "back_razor": Row(METHODS["back_razor"], off=_KEEP_ALL, models=(*USUAL, "mobilenet")),
    "back_razor_published": Row(
        METHODS["back_razor"], {"norm": "input", "derive": False, "threshold": "exact"}, off=_KEEP_ALL
    ),
    "back_razor_exact": Row(METHODS["back_razor"], {"threshold": "exact"}, off=_KEEP_ALL, models=("vit", "resnet")),
    "back_razor_both": Row(METHODS["back_razor"], {"prune": "both", "sparsity": 0.5}, off=_KEEP_ALL),
    "back_razor_both_published": Row(
        METHODS["back_razor"],
        {"prune": "both", "sparsity": 0.5, "norm": "input", "derive": False},
        off=_KEEP_ALL,
        models=("vit", "resnet"),
    ),
    "back_razor_fused": _near("back_razor", "q, k, v are in 8 bits", "vit", **_KEEP_ALL, attention="fused"),
    "back_razor_mesa": _near("back_razor", "8 bits are not exact", "vit", "resnet", sparsity=0.0, values="int8"),
    "checkpointing": Row(METHODS["checkpointing"], {"inputs": "int8"}, off={"inputs": "input"}),
    "checkpointing_bf16": _near("checkpointing", "the inputs are rounded", "vit", "swinv2", inputs="bf16"),
    "checkpointing_some": Row(
        METHODS["checkpointing"],
        {"inputs": "int8", "blocks": [0, -1]},
        off={"inputs": "input"},
        models=("vit", "resnet"),
    ),
    "swat": Row(
        METHODS["swat"], off={"sparsity": 0.0}, own_evaluation="what is trained is a network of sparse weights"
    ),
    "bsr": Row(
        METHODS["bsr"],
        {"blocks": [1, -1], "drop_at": [1, 2], "keep": 1.0},
        why_no_off="what trains is the choice itself",
        instead="gradients of what trains are the plain ones",
        models=("vit",),
        refused=dict.fromkeys(("efficientformer", "swinv2", "resnet", "mobilenet"), "no class token"),
        what_trains=True,
    ),
    "bsr_cnn": _selection("bsr", "resnet", "swinv2", blocks=[1, -1], drop_at=[]),
    "evit": Row(
        METHODS["evit"],
        {"drop_at": [1, 2]},
        off={"keep": 1.0},
        models=("vit",),
        refused=dict.fromkeys(("efficientformer", "swinv2", "resnet", "mobilenet"), "no class token"),
        own_evaluation="tokens are dropped there too",
    ),
    "tome": _merging(),
    "tome_plain": _merging(proportional=False, inflect=-0.5),
    "alast": Row(
        METHODS["alast"],
        {"layers": 2, "start": 0.7},
        off={"layers": 4, "start": 1.0},
        models=("vit",),
        refused=dict.fromkeys(("efficientformer", "swinv2", "resnet", "mobilenet"), "no class token"),
        what_trains=True,
    ),
    "uniform_layers": Row(
        METHODS["uniform_layers"], {"layers": 2}, off={"layers": 4}, models=("vit", "resnet"), what_trains=True
    ),
    "lisa": Row(
        METHODS["lisa"],
        {"layers": 1, "embeddings": False},
        off={"layers": 4, "embeddings": True},
        models=("vit",),
        what_trains=True,
    ),
    "top_layers": Row(
        METHODS["top_layers"],
        {"layers": 2, "profile_steps": 1},
        off={"layers": 4, "embeddings": True},
        models=("vit",),
        what_trains=True,
    ),
    "moe": _experts("moe", "vit", "swinv2", renormalise=True),
    "moe_published": _experts("moe", "vit", top=1, reference=_quarter),
    "bsr_moe": _experts("bsr_moe", "vit", blocks=[1, -1], drop_at=[1, 2], keep=1.0, renormalise=True),
    "mesa": _near("mesa", "8 bits are not exact", *USUAL),
    "mesa_published": _near("mesa", "8 bits are not exact", "vit", "swinv2", derive=False),
}
CASES = [(row, model) for row, r in ROWS.items() for model in r.models]
