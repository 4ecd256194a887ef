"""Compare recipes by measuring them alternately in one process, after warm-up.

* `step`: time of each part of a training step, for each recipe.
* `memory`: measured and counted memory of a recipe's steps, in a separate process for each recipe.
* `layer`: backward pass of one linear layer, exact and low-rank.
* `loop`: overhead of the framework per step, compared with a plain PyTorch loop.
* `gradient`: errors of each recipe's gradients, and saved bytes.
* `optimizer`: steps of AdamW with low-bit moments, compared with 32-bit moments on the same gradients.
* `gradient_error`: gradient errors of low-rank backward passes on a trained network.

The first six return a JSON-serializable report with the same fields as the files in ``benchmarks``; `tables` formats
it. Times are medians with quartiles. FLOPs and bytes are counted from the executed operations. On CUDA,
peaks are measured instead.
"""
