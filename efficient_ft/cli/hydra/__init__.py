"""Composition of configurations, sweeps and launchers, based on Hydra."""
