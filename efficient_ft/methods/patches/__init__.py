"""Methods that choose which patches of an image enter the blocks: PatchDropout."""
