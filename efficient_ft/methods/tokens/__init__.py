"""Methods that reduce the number of tokens from block to block: EViT drops tokens, ToMe merges them."""
