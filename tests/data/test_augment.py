"""Tests of random transforms after the crop, and of batches that MixUp or CutMix mixes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from timm.data.mixup import mixup_target
from torch.nn import functional as F

from efficient_ft.config import AugmentConfig, DataConfig
from efficient_ft.config.augment import PRESETS
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.data import ImageData, open_data
from efficient_ft.data.augment import MixedDataset
from efficient_ft.data.loader import LoadFailure, SplitDataset
from tests.data.pictures import SPEC, epoch_of, truncate

Make = Callable[..., Path]
Config = Callable[..., DataConfig]

SETTINGS = [
    {"policy": "randaugment"}, {"policy": "randaugment", "num_ops": 3, "magnitude": 27}, {"policy": "trivialaugment"},
    {"policy": "autoaugment"}, {"color_jitter": 0.5}, {"erase_prob": 1.0}, {"mixup": 0.2}, {"cutmix": 1.0},
    {"mixup": 0.8, "cutmix": 1.0, "mix_prob": 0.7}, *({"name": name} for name in PRESETS),
]  # fmt: skip


@pytest.fixture
def opened(folders: Make, data_config: Config) -> Callable[..., ImageData]:
    root = folders(a=8, b=8, c=8)

    def make(seed: int = 5, spec: InputSpec = SPEC, workers: int = 0, **augment: object) -> ImageData:
        chosen = AugmentConfig(**augment)  # type: ignore[arg-type]
        data = open_data(data_config("folder", root=str(root), num_workers=workers, augment=chosen), spec, seed)
        assert isinstance(data, ImageData)
        return data

    return make


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_images_depend_only_on_seed_epoch_and_batch(opened: Callable[..., ImageData], settings: dict) -> None:
    base = epoch_of(opened(**settings))
    torch.manual_seed(7)
    assert all(map(torch.equal, base, epoch_of(opened(**settings))))
    for other in (epoch_of(opened()), epoch_of(opened(seed=6, **settings)), epoch_of(opened(**settings), epoch=2)):
        assert not torch.equal(other[0], base[0])
    state, dataset = torch.get_rng_state(), opened(**settings).train_loader().dataset
    dataset.__getitems__([(0, 1), (0, 2)])
    assert torch.get_rng_state().equal(state), "the state of the global generator is restored"


@pytest.mark.parametrize("settings", [{"name": "strong"}])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_worker_processes_do_not_change_the_batches(opened: Callable[..., ImageData], settings: dict) -> None:
    found = [epoch_of(opened(workers=workers, **settings)) for workers in (0, 2)]
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("settings", SETTINGS[:6], ids=str)
def test_gray_images_are_transformed_too(opened: Callable[..., ImageData], settings: dict) -> None:
    gray = InputSpec((16, 16), (0.5,), (0.2,))
    found, plain = epoch_of(opened(spec=gray, **settings))[0], epoch_of(opened(spec=gray))[0]
    assert found.shape == plain.shape
    assert not torch.equal(found, plain)


def test_off_and_evaluation_are_the_plain_images(opened: Callable[..., ImageData]) -> None:
    plain = opened()
    off = opened(name="strong", policy="none", color_jitter=0.0, erase_prob=0.0, mixup=0.0, cutmix=0.0)
    assert all(map(torch.equal, epoch_of(off), epoch_of(plain)))
    assert isinstance(off.train_loader().dataset, SplitDataset)
    strong = opened(name="strong")
    for of_plain, of_strong in zip(plain.eval_loader("val"), strong.eval_loader("val"), strict=True):
        assert all(map(torch.equal, of_plain, of_strong))


def test_an_explicit_setting_overrides_its_preset(opened: Callable[..., ImageData]) -> None:
    explicit = {"policy": "randaugment", "erase_prob": 0.25, "mixup": 0.8, "cutmix": 1.0}
    assert all(map(torch.equal, epoch_of(opened(name="strong")), epoch_of(opened(**explicit))))
    medium = {"name": "medium", "policy": "randaugment", "erase_prob": 0.25}
    unmixed = opened(name="strong", mixup=0.0, cutmix=0.0)
    assert all(map(torch.equal, epoch_of(unmixed), epoch_of(opened(**medium))))
    assert opened(name="strong", cutmix=0.0).report()["notes"] == [
        "Training images are also transformed by policy=randaugment erase_prob=0.25 mixup=0.8 num_ops=2 magnitude=9"
        " mix_prob=1.0."
    ]
    assert opened().report()["notes"] == []


def test_an_erased_rectangle_has_the_mean_color(opened: Callable[..., ImageData]) -> None:
    plain, erased = epoch_of(opened())[0], epoch_of(opened(erase_prob=1.0))[0]
    changed = (plain != erased).any(1)
    assert (changed.sum((1, 2)) > 0).all()
    assert erased.movedim(1, -1)[changed].abs().max() < 0.01, "normalized, the mean color is almost 0"


def test_mixup_mixes_each_image_and_its_target_with_the_preceding_image(opened: Callable[..., ImageData]) -> None:
    (images, labels), (mixed, targets) = epoch_of(opened()), epoch_of(opened(mixup=0.5))
    assert targets.dtype == torch.float32
    assert targets.shape == (len(labels), 3)
    lams = set()
    for start in range(0, len(labels), 4):
        x, y = images[start : start + 4], labels[start : start + 4]
        # The share of the image itself is found by least squares.
        other = x.roll(1, 0)
        lam = float(((mixed[start : start + 4] - other) * (x - other)).sum() / (x - other).square().sum())
        assert torch.allclose(mixed[start : start + 4], lam * x + (1 - lam) * other, atol=1e-5)
        ones = F.one_hot(y, 3).float()
        assert torch.allclose(targets[start : start + 4], lam * ones + (1 - lam) * ones.roll(1, 0), atol=1e-5)
        lams.add(round(lam, 4))
    assert len(lams) > 3, "each batch has its own share"


def test_cutmix_pastes_a_rectangle_and_counts_its_area(opened: Callable[..., ImageData]) -> None:
    (images, labels), (mixed, targets) = epoch_of(opened()), epoch_of(opened(cutmix=1.0))
    for start in range(0, len(labels), 4):
        x, new = images[start : start + 4], mixed[start : start + 4]
        other = x.roll(1, 0)
        pasted = (new != x).any(1)
        assert torch.equal(new.movedim(1, -1)[pasted], other.movedim(1, -1)[pasted])
        share = pasted[0].float().mean()
        ones = F.one_hot(labels[start : start + 4], 3).float()
        assert torch.allclose(targets[start : start + 4], (1 - share) * ones + share * ones.roll(1, 0), atol=1e-5)


def test_label_smoothing_equals_timm_s_mixed_targets() -> None:
    """timm smooths and then mixes, and this package mixes and then smooths in the loss."""
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(6, 5, generator=generator), torch.randint(0, 5, (6,), generator=generator)
    ones = F.one_hot(labels, 5).float()
    ours = F.cross_entropy(logits, 0.3 * ones + 0.7 * ones.flip(0), label_smoothing=0.1)
    theirs = -(mixup_target(labels, 5, lam=0.3, smoothing=0.1) * logits.log_softmax(-1)).sum(-1).mean()
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_some_batches_stay_unmixed_and_both_ways_occur(opened: Callable[..., ImageData]) -> None:
    data = opened(mixup=5.0, cutmix=1.0, mix_prob=0.6)
    dataset = data.train_loader().dataset
    assert isinstance(dataset, MixedDataset)
    plain = opened().train_loader().dataset
    kinds = set()
    for epoch in range(24):
        keys = [(epoch, index) for index in range(4)]
        images, targets = dataset.__getitems__(keys)
        x, y = plain.__getitems__(keys)
        if torch.equal(images, x):
            kinds.add("none")
            assert torch.equal(targets, F.one_hot(y, 3).float())
        else:
            same = (images == x).any(1) | (images == x.roll(1, 0)).any(1)
            kinds.add("cutmix" if same.all() else "mixup")
    assert kinds == {"none", "mixup", "cutmix"}


def test_tiny_and_huge_parameters_give_finite_batches(opened: Callable[..., ImageData]) -> None:
    for alpha in (1e-6, 100.0):
        images, targets = epoch_of(opened(mixup=alpha, cutmix=alpha))
        assert images.isfinite().all()
        assert torch.allclose(targets.sum(1), torch.ones(len(targets)), atol=1e-5)


def test_an_unreadable_file_stops_a_mixed_batch(opened: Callable[..., ImageData], folders: Make) -> None:
    data = opened(mixup=1.0)
    dataset = data.train_loader().dataset
    path = dataset._images._images[0]
    truncate(Path(path))
    failure = dataset.__getitems__([(0, 0), (0, 1)])
    assert isinstance(failure, LoadFailure)
    assert str(path) in failure.message


def test_the_contact_sheet_shows_images_that_are_not_mixed(opened: Callable[..., ImageData]) -> None:
    (images, labels), chosen = opened(name="strong").training_batch(4)
    (unmixed, _), same = opened(name="strong", mixup=0.0, cutmix=0.0).training_batch(4)
    assert chosen == same
    assert torch.equal(images, unmixed)
    assert labels.dtype == torch.int64
