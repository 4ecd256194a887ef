"""Compare recipes by measuring them alternately in one process, after warm-up.

* `step`: time of each part of a training step, for each recipe.
* `memory`: measured and counted memory of a recipe's steps, in a separate process for each recipe.
* `layer`: exact and low-rank backward passes of one linear layer.
* `loop`: overhead of the framework per step, compared with a plain PyTorch loop.
* `gradient`: errors of the gradients and number of saved bytes, for each recipe.
* `optimizer`: steps of AdamW with low-bit moments, compared with 32-bit moments on the same gradients.
* `gradient_error`: gradient errors of low-rank backward passes on a trained network.

The first six modules return a JSON-serializable report with the same fields as the files in ``benchmarks``. `tables`
formats such a report. Times are medians with quartiles. FLOPs and bytes are counted from the executed operations. On
CUDA, the peak memory is measured instead of counted.
"""
