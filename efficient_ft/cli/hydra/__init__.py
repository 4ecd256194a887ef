"""Composition, sweeps and launchers with Hydra."""
