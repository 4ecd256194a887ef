"""Measure recipes against each other: alternately, in one process, after a warm-up.

* `step`: training steps of a model with each recipe, by their parts.
* `memory`: measured and counted memory of a recipe's steps, each recipe in its own process.
* `layer`: the backward pass of one linear layer, exact and low-rank.
* `loop`: what the framework adds to a bare PyTorch loop, per step.
* `gradient`: how close the gradients of each recipe come to the exact ones, and the bytes it keeps.
* `optimizer`: steps of AdamW with moments in few bits, compared with 32 bits on the same gradients.
* `gradient_error`: how close low-rank backward passes come to the exact gradient on a trained network.

The first six return a report for JSON, with the fields of the files in ``benchmarks``; `tables` prints it. Times are
medians with quartiles. FLOPs and bytes are executed ones (counted); on CUDA, peaks are measured.
"""
