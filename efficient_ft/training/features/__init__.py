"""Stored outputs of the frozen first part of a network."""
