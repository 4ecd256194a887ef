"""Adapters: methods that add modules to the model."""
