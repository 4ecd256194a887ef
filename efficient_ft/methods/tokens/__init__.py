"""Methods that reduce the number of tokens: EViT drops tokens, ToMe merges them, and PatchDropout samples patches."""
