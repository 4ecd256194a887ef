"""What is added beside the model."""

from efficient_ft.methods.adapters.lora import LoRA
from efficient_ft.methods.adapters.repnet import RepNet
from efficient_ft.methods.adapters.tinytl import TinyTL

__all__ = ["LoRA", "RepNet", "TinyTL"]
