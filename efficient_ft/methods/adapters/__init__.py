"""What is added beside the model."""

from efficient_ft.methods.adapters.lora import LoRA

__all__ = ["LoRA"]
