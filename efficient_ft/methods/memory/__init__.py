"""Methods that reduce the memory for the backward pass."""
