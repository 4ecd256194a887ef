"""Selections of the parameters to train."""
