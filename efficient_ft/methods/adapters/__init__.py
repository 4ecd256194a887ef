"""Methods that add trainable modules to the model: LoRA, mixture of experts, Rep-Net and TinyTL."""
