"""Hydra: composition, sweeps and launchers."""
