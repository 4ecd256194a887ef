"""Random transforms of images after the crop, and the mixing of the images of a batch.

All of them are transforms of `torchvision.transforms.v2`, which draw their random numbers from torch's CPU generator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchvision.transforms import InterpolationMode, v2

from efficient_ft.config.augment import resolved
from efficient_ft.config.schema import AugmentConfig
from efficient_ft.data.loader import LoadFailure, SplitDataset, seed_cpu


def further_steps(augment: AugmentConfig, mean: Sequence[float]) -> list[nn.Module]:
    """Return the transforms of PIL images that follow the crop and the flips.

    The policy and the erased rectangles fill pixels with the mean color.

    Args:
        augment: settings of augmentation.
        mean: mean of each channel for normalization, from 0 to 1.
    """
    options, steps = resolved(augment), list[nn.Module]()
    color = [round(255 * min(max(value, 0), 1)) for value in mean]
    fill: Any = {"fill": color, "interpolation": InterpolationMode.BILINEAR}
    if options.policy == "randaugment":
        steps.append(v2.RandAugment(options.num_ops, options.magnitude, **fill))
    elif options.policy == "trivialaugment":
        steps.append(v2.TrivialAugmentWide(**fill))
    elif options.policy == "autoaugment":
        steps.append(v2.AutoAugment(**fill))
    if options.color_jitter:
        steps.append(v2.ColorJitter(*[options.color_jitter] * 3))
    if options.erase_prob:
        steps.append(v2.RandomErasing(options.erase_prob, value=color))  # type: ignore[arg-type]
    return steps


class MixedDataset(Dataset[Any]):
    """A dataset of batches that MixUp or CutMix mixes: images (B, C, H, W), and targets, float32 (B, classes).

    Each image is mixed with the preceding image of the batch, and the first image with the last image. The targets are
    probabilities. The loss adds label smoothing to these targets, which equals timm's order (first smoothing, then
    mixing), because both operations are linear.

    The random numbers depend only on the seed and on the (epoch, index) pairs of the batch, and therefore on (seed,
    epoch, step). The number of worker processes and the state of global random generators have no effect.

    Sources: Zhang, Cisse, Dauphin, Lopez-Paz, "mixup: Beyond Empirical Risk Minimization", ICLR 2018; Yun, Han, Oh,
    Chun, Choe, Yoo, "CutMix: Regularization Strategy to Train Strong Classifiers with Localizable Features", ICCV 2019.

    Args:
        images: dataset of the images, whose augmentation precedes the mixing.
        augment: settings of augmentation.
        classes: number of classes.
        seed: seed of the run.
    """

    def __init__(self, images: SplitDataset, augment: AugmentConfig, classes: int, seed: int) -> None:
        options = resolved(augment)
        self._images, self._classes, self._seed = images, classes, seed
        self._probability = options.mix_prob
        ways = ((v2.MixUp, options.mixup), (v2.CutMix, options.cutmix))
        self._ways = [way(alpha=alpha, num_classes=classes) for way, alpha in ways if alpha]

    def __len__(self) -> int:
        return len(self._images)

    def __getitems__(self, keys: list[tuple[int, int]]) -> tuple[Tensor, Tensor] | LoadFailure:
        """Load a mixed batch. If a file cannot be read, return the failure instead."""
        loaded = self._images.__getitems__(keys)
        if isinstance(loaded, LoadFailure):
            return loaded
        images, labels = loaded
        targets = nn.functional.one_hot(labels, self._classes).float()
        with torch.random.fork_rng(devices=[]):
            seed_cpu(self._seed, *(number for key in keys for number in key), purpose=b"mix")
            if torch.rand(()) >= self._probability:
                return images, targets
            way = self._ways[int(torch.randint(len(self._ways), ()))]
            mixed: tuple[Tensor, Tensor] = way(images, targets)
        return mixed
