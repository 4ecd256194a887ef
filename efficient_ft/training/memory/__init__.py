"""The memory of a run: prediction, budget, measurement, and out-of-memory messages."""
