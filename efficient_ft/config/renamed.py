"""Settings that were renamed: the old name, or the old word for a value, is refused with the new one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from efficient_ft.config.explain import UnknownSetting, show
from efficient_ft.core.errors import UserError

_STEP = {"layers": "num_layers", "embeddings": "train_embeddings"}
_EXPERTS = {"experts": "num_experts", "top": "top_k", "renormalise": "norm_topk_prob", "balance": "aux_loss_coef"}

#: Settings of methods: by the method's name, the old and the new name of the setting.
_OF_METHODS: dict[str, dict[str, str]] = {
    "alast": {
        "layers": "num_layers",
        "start": "budget_init",
        "lowest": "budget_min",
        "highest": "budget_max",
        "rate": "budget_lr",
        "choice": "layer_choice",
        "embeddings": "train_embeddings",
    },
    "lisa": {**_STEP, "every": "interval"},
    "uniform_layers": _STEP,
    "top_layers": _STEP,
    "evit": {"keep": "keep_rate"},
    "bsr": {"keep": "keep_rate"},
    "moe": _EXPERTS,
    "bsr_moe": {**_EXPERTS, "keep": "keep_rate"},
    "back_razor": {"values": "value_dtype", "norm": "norm_saves", "derive": "recompute_inputs"},
    "mesa": {"derive": "recompute_inputs"},
    "checkpointing": {"inputs": "input_dtype"},
    "swat": {"refresh": "refresh_interval"},
    "tome": {"proportional": "proportional_attention"},
    "tinytl": {"kernel": "kernel_size"},
    "repnet": {"places": "blocks", "kernel": "kernel_size"},
}

#: Full old name to full new name; a group stands for everything below it.
RENAMED: dict[str, str] = {
    "trainer.accumulate": "trainer.grad_accum_steps",
    "optim.clip": "optim.grad_clip_norm",
    "optim.head_lr": "optim.head_lr_mult",
    "optim.warmup_ratio": "optim.warmup_start_factor",
    "model.drop": "model.drop_rate",
    "model.drop_path": "model.drop_path_rate",
    "data.workers": "data.num_workers",
    "cost.compare_full": "cost.baseline",
    "insight": "step_stats",
    "insight.every": "step_stats.interval",
    "keep_allocator": "allocator",
    "keep_freed_memory": "allocator",
    **{
        f"method.{method}.{old}": f"method.{method}.{new}"
        for method, names in _OF_METHODS.items()
        for old, new in names.items()
    },
}

#: Full name of a setting to the old and the new word for a value.
RENAMED_VALUES: dict[str, dict[str, str]] = {
    "method.back_razor.norm_saves": {"normalised": "normalized"},
    "method.back_razor.value_dtype": {"input": "same"},
    "method.checkpointing.input_dtype": {"input": "same"},
}


class RenamedSetting(UnknownSetting):
    """An old name of a setting, or an old word for its value.

    Args:
        setting: the full name as written.
        value: its value.
        new: what to write instead: a full name, or a value.
    """

    def __init__(self, setting: str, value: object, new: str):
        self.setting, self.value, self.known, self.new = setting, value, [new], new
        if new in RENAMED_VALUES.get(setting, {}).values():
            self.old, self.now = f"{setting}={show(value)}", f"{setting}={new}"
        else:
            self.old, self.now = setting, new
        UserError.__init__(self, f"{self.old} was renamed: use {self.now}.")


def refuse_renamed(settings: Mapping[str, Any]) -> None:
    """Refuse old names in nested `settings` of a run.

    Raises:
        RenamedSetting: for the first old name.
    """
    for setting, value in _leaves(settings):
        refuse_renamed_setting(setting, value)


def refuse_renamed_setting(setting: str, value: object) -> None:
    """Refuse the old name of one setting, given in full, or an old word for its value.

    Raises:
        RenamedSetting: it is one.
    """
    new = renamed(setting)
    if new is None and isinstance(value, str):
        new = RENAMED_VALUES.get(setting, {}).get(value)
    if new is not None:
        raise RenamedSetting(setting, value, new)


def renamed(setting: str) -> str | None:
    """Return the new name of a setting that was renamed, else None; ``tasks.NAME.x`` is named like ``data.x``."""
    parts = setting.split(".") if setting.startswith("tasks.") else []
    if len(parts) > 2:
        new = RENAMED.get(".".join(["data", *parts[2:]]))
        return None if new is None else ".".join([*parts[:2], *new.split(".")[1:]])
    return RENAMED.get(setting)


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
