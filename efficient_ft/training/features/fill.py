"""Compute and store the features of a run before training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as L
import torch
from tqdm import tqdm

from efficient_ft.config import Config
from efficient_ft.core.errors import UserError
from efficient_ft.cost.executed import AUTOCAST
from efficient_ft.data.opened import OpenedData
from efficient_ft.integrations.session import MethodSession
from efficient_ft.methods.build import build_methods
from efficient_ft.models import factory
from efficient_ft.models.weight_dtype import store_weights
from efficient_ft.task import moved
from efficient_ft.training.datamodule import refuse_missing_files
from efficient_ft.training.features.prefix import RunFeatures, run_features, run_prefix, set_form
from efficient_ft.training.features.store import is_stored
from efficient_ft.training.kinds.registry import kind_of
from efficient_ft.training.precision import resolve_precision
from efficient_ft.training.trainer import on_device, use_channels_last


def fill_features(config: Config) -> RunFeatures:
    """Compute and return the features of a run. All features are stored unless the disk is full.

    Features that are already stored are not computed again, so that an interrupted call can be repeated.

    Raises:
        UserError: If weights or images are missing, or if no features can be stored for this run.
    """
    if config.tasks:
        raise UserError("Features cannot be stored for a run on several tasks. Remove tasks from the configuration.")
    kind = kind_of(config)
    if not kind.supports("cache_features"):
        raise UserError(f"Features cannot be stored for task={config.task}. Train without stored features.")
    refuse_missing_files(config)
    device = on_device(config)
    config = resolve_precision(config, device)
    # A balanced sampler would not draw every image in each view.
    config = config.model_copy(update={"data": config.data.model_copy(update={"sampler": "shuffle"})})
    L.seed_everything(config.seed, verbose=False)  # use the same random weights as the run
    images: Any = kind.open(config, factory.input_of(config.model))
    network = store_weights(kind.network(config.model, images.num_classes), config.trainer.weight_dtype)
    if use_channels_last(config, device):
        network.to(memory_format=torch.channels_last)
    session = MethodSession(network, build_methods(config), config.model.frozen_bn).apply()
    try:
        prefix = run_prefix(config, network, session.methods)
    except UserError as error:
        do = "Use a method that trains only the last part of the network, for example method=last_stage."
        raise UserError(f"Features cannot be stored. {error} {do}") from None
    if kind.supports("prefix"):
        set_form(config, images, prefix, device)
    features = run_features(config, images, prefix, config.trainer.views, device)
    network.to(device).train()
    dtype = AUTOCAST[config.trainer.precision]
    autocast = torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)
    with tqdm(total=sum(store.rows for store in features.stores), unit=f" {images.noun}s", disable=None) as bar:
        for loader in _loaders(images, features):
            for pixels, targets, rows in loader:
                if not is_stored(pixels):
                    with autocast, features.input(moved(pixels, device), targets, rows):
                        pass
                bar.update(len(rows))
                if features.full:
                    return features
    return features


def _loaders(images: OpenedData[Any, Any], features: RunFeatures) -> Iterator[Any]:
    """Yield a loader for each view of the training images, and a loader for the split that selects the best epoch."""
    for view in range(features.train.views):
        loader = images.train_loader(wrap=features.training)
        sampler: Any = loader.sampler
        sampler.set_epoch(view)
        yield loader
    if features.evaluated is not None:
        yield images.eval_loader(images.best_split, wrap=features.evaluation)
