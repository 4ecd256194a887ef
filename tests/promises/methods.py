"""Every method with settings and a small network that the method supports."""

from __future__ import annotations

from typing import Any

from efficient_ft.methods import METHODS

#: A vision transformer for the handwritten digits, with all types of random layers.
_VIT: dict[str, Any] = {
    "name": "vit_digits",
    "pretrained": False,
    "frozen_bn": False,
    "drop_rate": 0.1,
    "drop_path_rate": 0.2,
    "kwargs": {"depth": 3, "embed_dim": 16, "num_heads": 2},
}
_MOBILENET: dict[str, Any] = {"name": "mobilenetv2_035", "pretrained": False, "image_size": 32, "drop_rate": 0.1}
_RESNET: dict[str, Any] = {
    "name": "resnet26",
    "pretrained": False,
    "image_size": 32,
    "drop_path_rate": 0.1,
    "kwargs": {"layers": (1, 1, 1, 1), "channels": (16, 16, 32, 32)},
}

_EXPERTS = {"num_experts": 3, "top_k": 2, "blocks": [0, -1], "aux_loss_coef": 0.01}
_DROPPING = {"drop_at": [0, 1], "keep_rate": 0.5}

#: Methods of a run with their settings, by name. The first word of a name is the method, and the other words are the
#: variant. Unlisted methods use their defaults.
_CASES: dict[str, dict[str, dict[str, Any]]] = {
    "full": {"full": {}},
    "head": {"head": {}},
    "last_stage": {"last_stage": {}},
    "blocks": {"blocks": {"blocks": [0, -1]}},
    "bitfit": {"bitfit": {}},
    "norm_last": {"norm_last": {}},
    "lora": {"lora": {"rank": 2, "dropout": 0.2, "select": "all"}},
    "lora_fa": {"lora_fa": {"rank": 2, "select": "all"}},
    "tinytl": {"tinytl": {}},
    "repnet": {"repnet": {}},
    "lbp_wht": {"full": {}, "lbp_wht": {"order": 2}},
    "lbp_wht lhe": {"full": {}, "lbp_wht": {"bases": "lhe", "order": 2, "profile_steps": 2}},
    "lbp_dct": {"full": {}, "lbp_dct": {"order": 2}},
    "back_razor": {"back_razor": {}},
    "back_razor int8": {"back_razor": {"value_dtype": "int8", "attention": "fused"}},
    "checkpointing": {"checkpointing": {}},
    "checkpointing int8": {"checkpointing": {"input_dtype": "int8"}},
    "mesa": {"mesa": {}},
    "low_bit": {"low_bit": {"rounding": "stochastic"}},
    "low_bit auto": {"full": {}, "low_bit": {"bits": "auto", "budget": 3.3, "profile_steps": 2}},
    "compact": {"compact": {"attention": "recomputed"}},
    "swat": {"swat": {"refresh_interval": 3}},
    "bsr": {"bsr": {"blocks": [0, -1], **_DROPPING}},
    "evit": {"evit": {**_DROPPING, "select": "all"}},
    "tome": {"tome": {"r": 8, "select": "all"}},
    "patch_dropout": {"patch_dropout": {"select": "all"}},
    "alast": {
        "alast": {"num_layers": 1, "budget_init": 0.8, "budget_min": 0.2, "budget_lr": 1e-4, "first_delta": "same"}
    },
    "uniform_layers": {"uniform_layers": {"num_layers": 1}},
    "lisa": {"lisa": {"num_layers": 1, "interval": 3}},
    "top_layers": {"top_layers": {"num_layers": 1, "profile_steps": 2}},
    "moe": {"moe": _EXPERTS},
    "bsr_moe": {"bsr_moe": {**_EXPERTS, **_DROPPING}},
    "stack lora mesa patch_dropout": {  # three axes, each with a state or random choices
        "lora": {"rank": 2, "dropout": 0.2, "select": "all"},
        "mesa": {},
        "patch_dropout": {},
    },
}
_NETWORKS = {"tinytl": _MOBILENET, "repnet": _RESNET}


def method_cases(long: bool = True) -> list[str]:
    """Return the names of the cases: every registered method, some methods in several variants, and a stack.

    Args:
        long: If False, omit the variant that compiles for most of a minute in every process.
    """
    tried = {case.split()[0] for case in _CASES}
    cases = [*_CASES, *(name for name in METHODS if name not in tried)]
    return cases if long else [case for case in cases if case != "low_bit auto"]


def methods_of(case: str) -> dict[str, dict[str, Any]]:
    """Return the section `method` of the configuration of a case."""
    return _CASES.get(case, {case: {}})


def network_of(case: str, quiet: bool = False) -> dict[str, Any]:
    """Return the section `model` of the configuration of a case. `quiet` removes random layers."""
    network = _NETWORKS.get(case.split()[0], _VIT)
    if not quiet:
        return dict(network)
    return {**network, "drop_rate": 0.0, "drop_path_rate": 0.0, "frozen_bn": True}
