"""``efficient-ft cache KEY=VALUE...``: compute and store the outputs of the frozen part of a network."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from efficient_ft.cli.hydra.compose import configured
from efficient_ft.cli.terminal import Help
from efficient_ft.core.allocator import restart_with, use_allocator
from efficient_ft.core.format import format_bytes
from efficient_ft.core.terminal import show, shown_path

DESCRIPTION = """\
Compute and store the features of a run's images at the end of the frozen part of the network.

    efficient-ft cache method=lbp_wht model=efficientformer_l1 data=cifar100 trainer.views=4

Pass the settings of the run. Every run with the same frozen part, images, augmentation, seed and number of views can
then read the features instead of computing them. To use them, pass trainer.cache_features=on (or auto) to a run, or to
a sweep over settings of the trained part. After an interruption, the same command continues. Without this command, the
first run stores the features.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Compute and store the features of a run."""
    parser = argparse.ArgumentParser(prog="efficient-ft cache", description=DESCRIPTION, formatter_class=Help)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of the run")
    settings = parser.parse_intermixed_args(arguments).settings
    config = configured(settings)
    restart_with(config.allocator)
    use_allocator(config.allocator)
    from efficient_ft.training.features.fill import fill_features
    from efficient_ft.training.memory.watch import within_budget
    from efficient_ft.training.trainer import on_device

    with within_budget(config, on_device(config)):
        features = fill_features(config)
    report, stores = features.report(), features.stores
    rows, missing = sum(store.rows for store in stores), sum(store.missing() for store in stores)
    folders = ", ".join(shown_path(store.folder) for store in stores)
    show(
        f"Features: {report['computed']} computed, {rows - missing - report['computed']} already stored,"
        f" {missing} missing. Size: {format_bytes(report['bytes'])}. Folder: {folders}"
    )
