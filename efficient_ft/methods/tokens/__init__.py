"""Methods that reduce the number of tokens: EViT drops tokens, ToMe merges tokens, and PatchDropout samples patches."""
