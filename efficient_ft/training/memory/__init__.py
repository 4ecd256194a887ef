"""The memory of a run: prediction, budget, measurement, and messages when it runs out."""
