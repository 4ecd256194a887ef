"""Methods for efficient fine-tuning. Methods on different axes of a training step can be combined.

All method classes can be imported from this package, for example ``from efficient_ft.methods import LBPWHT,
BackRazor``. `METHODS` maps the name of each method on the command line to its class. A class is imported when it is
first used. The imports under ``TYPE_CHECKING`` are only for editors and type checkers.
"""

from typing import TYPE_CHECKING, Any

from efficient_ft.methods.base import Applied, Method, apply_methods, in_order, plain_state_dict
from efficient_ft.methods.declarations import Adds, Axis, Exactness, Needs, PlanCandidate
from efficient_ft.methods.registry import METHODS, own_classes, register
from efficient_ft.methods.stack import check_optimizer, check_stack
from efficient_ft.models.view import ModelView, Reason, Skipped

if TYPE_CHECKING:
    from efficient_ft.methods.adapters.lora import LoRA
    from efficient_ft.methods.adapters.lora_fa import LoRAFA
    from efficient_ft.methods.adapters.moe import MoE
    from efficient_ft.methods.adapters.repnet import RepNet
    from efficient_ft.methods.adapters.tinytl import TinyTL
    from efficient_ft.methods.backprop.lbp_dct import LBPDCT
    from efficient_ft.methods.backprop.lbp_wht import LBPWHT
    from efficient_ft.methods.memory.back_razor import BackRazor
    from efficient_ft.methods.memory.checkpointing import Checkpointing
    from efficient_ft.methods.memory.compact import Compact
    from efficient_ft.methods.memory.low_bit import LowBit
    from efficient_ft.methods.memory.mesa import Mesa
    from efficient_ft.methods.memory.swat import SWAT
    from efficient_ft.methods.selection.per_step import LISA, TopLayers, UniformLayers
    from efficient_ft.methods.selection.static import BitFit, Blocks, Full, HeadOnly, LastStage, NormLast
    from efficient_ft.methods.tokens.evit import EViT
    from efficient_ft.methods.tokens.patch_dropout import PatchDropout
    from efficient_ft.methods.tokens.tome import ToMe
    from efficient_ft.methods.two_axes.alast import ALaST
    from efficient_ft.methods.two_axes.bsr import BSR, BSRMoE

__all__ = [
    "BSR", "LBPDCT", "LBPWHT", "LISA", "METHODS", "SWAT", "ALaST", "Adds", "Applied", "Axis", "BSRMoE", "BackRazor",
    "BitFit", "Blocks", "Checkpointing", "Compact", "EViT", "Exactness", "Full", "HeadOnly", "LastStage", "LoRA",
    "LoRAFA", "LowBit", "Mesa", "Method", "MoE", "ModelView", "Needs", "NormLast", "PatchDropout", "PlanCandidate",
    "Reason", "RepNet", "Skipped", "TinyTL", "ToMe", "TopLayers", "UniformLayers", "apply_methods",
    "check_optimizer", "check_stack", "in_order", "plain_state_dict", "register",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import the method classes when one of them is first used."""
    if not name.startswith("_") and name in own_classes():
        return own_classes()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *own_classes()])
