"""How the recipes of the records are shown.

Records keep the setting names of their date; pages show today's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

MEMORY = {
    "full": "`full` (timm as it comes)",
    "bf16": "`full`, `trainer.precision=bf16`",
    "checkpointing": "`checkpointing`",
    "checkpointing_int8": "`checkpointing`, `input_dtype=int8`",
    "mesa": "`mesa`",
    "mesa_fused": "`mesa`, `attention=fused`",
    "back_razor": "`back_razor` (80 % dropped)",
    "back_razor_90": "`back_razor`, `sparsity=0.9`",
    "back_razor_95": "`back_razor`, `sparsity=0.95`",
    "back_razor_exact": "`back_razor`, `threshold=exact`",
    "back_razor_fused": "`back_razor`, `attention=fused`",
    "back_razor_published": "`back_razor_published`",
    "back_razor_mesa": "`back_razor_mesa`",
    "lbp_wht": "`[full,lbp_wht]`",
    "lbp_wht_back_razor": "`[full,lbp_wht,back_razor]`",
}

#: The recipe of the trained network's gradients that belongs to one of `MEMORY`.
TRAINED = {
    "full": "full",
    "bf16": "full in bf16",
    "checkpointing_int8": "checkpointing:inputs=int8",
    "mesa": "mesa",
    "mesa_fused": "mesa:attention=fused",
    "back_razor": "back_razor:sparsity=0.8",
    "back_razor_90": "back_razor:sparsity=0.9",
    "back_razor_95": "back_razor:sparsity=0.95",
    "back_razor_exact": "back_razor:sparsity=0.8,threshold=exact",
    "back_razor_fused": "back_razor:sparsity=0.8,attention=fused",
    "back_razor_published": "back_razor_published:sparsity=0.8",
    "back_razor_mesa": "back_razor:sparsity=0.8,values=int8",
    "lbp_wht": "lbp_wht:select=all",
    "lbp_wht_back_razor": "lbp_wht:select=all+back_razor:sparsity=0.8",
}

#: Recipes of the record of allocators.
ALLOCATORS = {
    **{name: MEMORY[name] for name in ("full", "mesa", "back_razor", "checkpointing")},
    "compact": "`compact`",
    "low_bit": "`low_bit` (4 bits)",
    "bsr": "`bsr`",
    "bsr+low_bit+lbp_dct": "`[bsr,low_bit,lbp_dct]`",
}

#: Recipes of the record of processes, with the name of their trained network's gradient, exact: None.
MEMORY_FELT: dict[str, tuple[str, str | None]] = {
    "full": (MEMORY["full"], None),
    "compact": ("`compact`", None),
    "compact_recomputed": ("`compact`, `attention=recomputed`", None),
    "compact_kept": ("`compact`, `attention=kept`", None),
    "low_bit_8": ("`low_bit`, `bits=8`", "low_bit:bits=8"),
    "low_bit": ("`low_bit` (4 bits)", "low_bit"),
    "low_bit_3": ("`low_bit`, `bits=3`", "low_bit:bits=3"),
    "low_bit_2": ("`low_bit`, `bits=2`", "low_bit:bits=2"),
    "mesa": (MEMORY["mesa"], "mesa"),
    "back_razor": (MEMORY["back_razor"], "back_razor:sparsity=0.8"),
    "checkpointing": (MEMORY["checkpointing"], None),
}

#: What plans predict, by its key in the record.
PREDICTIONS = {
    "counted": "counted peak of a step",
    "memory": "memory of the process above interpreter and libraries",
    "predicted": "the same, from the count alone, without the plan's trial",
    "step": "time of a step",
}

#: Recipes of the records of ViT-B in a gigabyte: everything trains, and a part.
GIGABYTE = {
    "full": "`full`, AdamW in 32 bits",
    "ckpt8": "`checkpointing`, moments in 8 bits, steps in backward",
    "lb4s8": "`low_bit` (4 bits), moments in 8 bits, steps in backward",
    "lb2s4": "`low_bit`, `bits=2`, moments in 4 bits, steps in backward",
    "lora_low_bit": "`lora` + `low_bit`",
    "upper_low_bit": "upper six blocks + `low_bit`, moments in 8 bits, steps in backward",
    "bsr_low_bit": "`bsr` + `low_bit`",
}

GPU = {
    "full": MEMORY["full"],
    "back_razor": MEMORY["back_razor"],
    "exact": MEMORY["back_razor_exact"],
    "fused": MEMORY["back_razor_fused"],
    "mesa": MEMORY["mesa"],
    "back_razor_mesa": MEMORY["back_razor_mesa"],
    "checkpointing": MEMORY["checkpointing"],
    "checkpointing8": MEMORY["checkpointing_int8"],
    "compact": "`compact`",
    "low_bit": "`low_bit` (4 bits)",
    "low_bit_3": "`low_bit`, `bits=3`",
    "low_bit_2": "`low_bit`, `bits=2`",
}

TOKENS = {
    "full": "`full` (timm as it comes)",
    "bsr": "`bsr`",
    "bsr_all_tokens": "`bsr`, `drop_at=[]`",
    "evit": "`evit`",
    "tome:r=13": "`tome`, `r=13`",
    "alast_fixed": "`alast`, `budget_lr=0` (budgets held at 0.9)",
    "uniform_layers": "`uniform_layers` (9 of 12 blocks)",
    "bsr+back_razor": "`[bsr,back_razor]`",
    "bsr+lbp_wht+back_razor": "`[bsr,lbp_wht,back_razor]`",
    "bsr+checkpointing": "`[bsr,checkpointing]`",
    "lisa": "`lisa` (2 of 12 blocks)",
}

METHODS = {
    "full": "`full` (timm as it comes)",
    "last_stage": "`last_stage`",
    "head": "`head`",
    "bitfit": "`bitfit`",
    "norm_last": "`norm_last`",
    "lora": "`lora`, last stage",
    "lora_all": "`lora_all`, last stage",
    "lbp_wht": "`lbp_wht`, last stage, order 4",
    "lbp_dct": "`lbp_dct`, last stage, order 4",
    "[full,lbp_dct]": "`[full,lbp_dct]`",
}

LOW_RANK = {
    "last_stage": "exact, timm's model as it comes",
    "exact": "exact, channels-last",
    "LP-2": "`lbp_wht`, order 2",
    "LP-4": "`lbp_wht`, order 4",
    "LP-6": "`lbp_wht`, order 6",
    "LP-8": "`lbp_wht`, order 8",
    "DCT-4": "`lbp_dct`, order 4",
    "full-rank": "`lbp_wht`, order 15 (full rank: the plain layers), GELU fused",
    "LP-4-apart": "`lbp_wht`, order 4, `method.lbp_wht.fused=false`",
    "prefix": "`lbp_wht`, order 4, `trainer.prefix=auto`",
    "read": "`lbp_wht`, order 4, stored features",
    "read-2": "`lbp_wht`, order 2, stored features",
    "read-exact": "exact, stored features",
}

_RENAMED = (
    ("checkpointing:inputs=", "checkpointing:input_dtype="),
    ("derive=false", "recompute_inputs=false"),
    ("values=", "value_dtype="),
    ("=input", "=same"),
)


def current(recipe: str) -> str:
    """A recipe of a record, ``METHOD:KEY=VALUE+METHOD``, with today's names."""
    if recipe == "full in bf16":
        return MEMORY["bf16"]
    for old, new in _RENAMED:
        recipe = recipe.replace(old, new)
    parts, settings = [], []
    for part in recipe.split("+"):
        name, _, given = part.partition(":")
        if "select=all" in given:
            name, given = f"full,{name}", given.replace("select=all", "").strip(",")
        parts.append(name)
        settings += [f"`{setting}`" for setting in given.split(",") if setting]
    method = ",".join(parts)
    return ", ".join([f"`[{method}]`" if "," in method else f"`{method}`", *settings])


def command(arguments: Sequence[str]) -> str:
    """Arguments of the command line, short: the methods, then their settings without their methods' names."""
    methods, *settings = arguments
    return ", ".join(
        [f"`{methods.removeprefix('method=')}`", *(f"`{re.sub('^method.[a-z_]+.', '', s)}`" for s in settings)]
    )


#: Rows of the adapters on a ResNet-50.
ADAPTERS = {
    "full": "full fine-tuning",
    "peft_dropout": "peft's LoRA, dropout 0.1",
    "peft": "peft's LoRA, no dropout",
    "lora_fa": "`lora_fa`",
    "lora_fa+checkpointing": "`[lora_fa,checkpointing]`",
    "lora_fa+back_razor_exact_gradient": "`[lora_fa,back_razor]`, `sparsity=0`, `value_dtype=same` (exact)",
    "lora_fa+mesa": "`[lora_fa,mesa]`",
}

#: Recipes of the time to accuracy.
CURVES = {
    "full": "`full`",
    "full+lbp_dct": "`full` + `lbp_dct`",
    "full+lora": "`full` + `lora`",
    "bitfit": "`bitfit`",
    "bsr": "`bsr`",
    "upper half": "`blocks` 6–11",
    "upper half, cached": "`blocks` 6–11, stored features, 2 views",
    "head, cached": "`head`, stored features, 2 views",
    "last_stage": "`last_stage`",
    "last_stage, prefix": "`last_stage`, `trainer.prefix=auto`",
    "last_stage, again": "`last_stage`, measured again",
    "last_stage, cached": "`last_stage`, stored features, 2 views",
    "last_stage, 4 views cached": "`last_stage`, stored features, 4 views",
    "last_stage+lbp_dct": "`last_stage` + `lbp_dct`",
    "last_stage+lbp_dct, cached": "`last_stage` + `lbp_dct`, stored features, 2 views",
}
