"""efficient-ft: fine-tune pretrained vision models with little memory, compute and time."""

__version__ = "0.1.0"
