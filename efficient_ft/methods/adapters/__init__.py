"""Methods that add trainable modules to a model: LoRA, LoRA-FA, mixture of experts, Rep-Net and TinyTL."""
