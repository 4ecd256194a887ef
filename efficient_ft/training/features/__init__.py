"""Stored features of a run's frozen prefix."""
