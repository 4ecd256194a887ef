"""Memory of a run: prediction, budget, measurement, and messages for out-of-memory errors."""
