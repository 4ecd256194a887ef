"""Every method, by the name it has on the command line."""

from efficient_ft.methods.adapters.lora import LoRA
from efficient_ft.methods.adapters.moe import BSRMoE, MoE
from efficient_ft.methods.adapters.repnet import RepNet
from efficient_ft.methods.adapters.tinytl import TinyTL
from efficient_ft.methods.backprop.lbp_dct import LBPDCT
from efficient_ft.methods.backprop.lbp_wht import LBPWHT
from efficient_ft.methods.base import Applied, Method, apply_methods, in_order, plain_state_dict
from efficient_ft.methods.memory.back_razor import BackRazor
from efficient_ft.methods.memory.checkpointing import Checkpointing
from efficient_ft.methods.memory.mesa import Mesa
from efficient_ft.methods.memory.swat import SWAT
from efficient_ft.methods.recipes.alast import ALaST
from efficient_ft.methods.recipes.bsr import BSR
from efficient_ft.methods.selection.per_step import LISA, TopLayers, UniformLayers
from efficient_ft.methods.selection.static import BitFit, Blocks, Full, HeadOnly, LastStage, NormLast
from efficient_ft.methods.tokens.evit import EViT
from efficient_ft.methods.tokens.tome import ToMe

METHODS: dict[str, type[Method]] = {
    m.name: m
    for m in (
        Full,
        HeadOnly,
        LastStage,
        Blocks,
        BitFit,
        NormLast,
        LoRA,
        TinyTL,
        RepNet,
        LBPWHT,
        LBPDCT,
        BackRazor,
        SWAT,
        Mesa,
        Checkpointing,
        EViT,
        ToMe,
        BSR,
        ALaST,
        LISA,
        UniformLayers,
        TopLayers,
        MoE,
        BSRMoE,
    )
}

__all__ = [
    "BSR",
    "LBPDCT",
    "LBPWHT",
    "LISA",
    "METHODS",
    "SWAT",
    "ALaST",
    "Applied",
    "BSRMoE",
    "BackRazor",
    "BitFit",
    "Blocks",
    "Checkpointing",
    "EViT",
    "Full",
    "HeadOnly",
    "LastStage",
    "LoRA",
    "Mesa",
    "Method",
    "MoE",
    "NormLast",
    "RepNet",
    "TinyTL",
    "ToMe",
    "TopLayers",
    "UniformLayers",
    "apply_methods",
    "in_order",
    "plain_state_dict",
]
