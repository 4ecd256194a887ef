"""The configuration of a run: its schema, validation and identity. Importing this package does not import torch."""

from efficient_ft.config.check import check, refuse_automatic, validate
from efficient_ft.config.explain import UnknownSetting, setting_names
from efficient_ft.config.identity import data_configs, fingerprint, image_folders, run_folder
from efficient_ft.config.schema import (
    AugmentConfig,
    Config,
    CostConfig,
    DataConfig,
    LoggerConfig,
    ModelConfig,
    OptimConfig,
    StepStatsConfig,
    TrainerConfig,
)

__all__ = [
    "AugmentConfig",
    "Config",
    "CostConfig",
    "DataConfig",
    "LoggerConfig",
    "ModelConfig",
    "OptimConfig",
    "StepStatsConfig",
    "TrainerConfig",
    "UnknownSetting",
    "check",
    "data_configs",
    "fingerprint",
    "image_folders",
    "refuse_automatic",
    "run_folder",
    "setting_names",
    "validate",
]
