"""Tests of loaders: the number of workers does not change the images, and error messages remain complete."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from pathlib import Path

import lightning
import numpy as np
import pytest
import torch

from efficient_ft.config import DataConfig
from efficient_ft.core.errors import UserError
from efficient_ft.data import Transform, loader, open_data
from efficient_ft.data.listing import Samples
from efficient_ft.data.loader import SplitDataset
from tests.data.pictures import SPEC, epoch_of, truncate

Make = Callable[..., Path]
Config = Callable[..., DataConfig]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("kind", ["folder", pytest.param("digits", marks=pytest.mark.slow)])
def test_any_number_of_workers_gives_the_same_epoch(folders: Make, data_config: Config, kind: str) -> None:
    settings = {"root": str(folders(a=12, b=12)), "batch_size": 4} if kind == "folder" else {"batch_size": 256}
    results = [epoch_of(open_data(data_config(kind, num_workers=w, **settings), SPEC, 5)) for w in (0, 1, 3)]
    for images, labels in results[1:]:
        assert torch.equal(images, results[0][0])
        assert torch.equal(labels, results[0][1])
    other_seed, _ = epoch_of(open_data(data_config(kind, **settings), SPEC, 6))
    other_epoch, _ = epoch_of(open_data(data_config(kind, **settings), SPEC, 5), epoch=2)
    assert not torch.equal(other_seed[:8], results[0][0][:8])
    assert not torch.equal(other_epoch[:8], results[0][0][:8])


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_persistent_workers_follow_the_epoch(folders: Make, data_config: Config, workers: int) -> None:
    data = open_data(data_config("folder", root=str(folders(a=8, b=8)), num_workers=workers), SPEC, 5)
    loader = data.train_loader()
    for epoch in (3, 0, 3):
        loader.sampler.set_epoch(epoch)
        images = torch.cat([x for x, _ in loader])
        assert torch.equal(images, epoch_of(data, epoch)[0])


def test_the_order_of_access_does_not_matter(folders: Make, data_config: Config) -> None:
    data = open_data(data_config("folder", root=str(folders(a=6, b=6))), SPEC, 5)
    images = data.train_loader().dataset
    assert isinstance(images, SplitDataset)
    keys = [(epoch, index) for epoch in range(2) for index in range(len(images))]
    first = {key: images.__getitems__([key]) for key in keys}  # type: ignore[misc]
    random.Random(0).shuffle(keys)
    for some in ([key] for key in keys), [keys]:
        for chosen in some:
            batch, labels = images.__getitems__(chosen)  # type: ignore[misc]
            assert torch.equal(batch, torch.cat([first[key][0] for key in chosen]))
            assert torch.equal(labels, torch.cat([first[key][1] for key in chosen]))
    assert not torch.equal(first[0, 0][0], first[1, 0][0])


def test_no_global_generator_is_disturbed(data_config: Config) -> None:
    data = open_data(data_config("digits", batch_size=64), SPEC, 5)
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    data.train_loader().dataset.__getitems__([(0, 1), (4, 2)])
    list(data.train_loader().sampler)
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    # A changed global random state does not change the images.
    torch.manual_seed(999)
    again = data.train_loader().dataset.__getitems__([(0, 3)])[0]
    torch.manual_seed(1)
    assert torch.equal(again, data.train_loader().dataset.__getitems__([(0, 3)])[0])


def test_small_images_kept_in_memory_are_the_same_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)
    samples = Samples(pixels, np.arange(6, dtype=np.int64))
    transform = Transform(SPEC, "resize_crop")
    kept = SplitDataset(samples, transform, 0)
    monkeypatch.setattr(loader, "_CACHE_BYTES", 0)
    not_kept = SplitDataset(samples, transform, 0)
    assert kept._resized
    assert not not_kept._resized
    travelled = pickle.loads(pickle.dumps(kept))
    images = [one.__getitems__([(2, i) for i in range(6)])[0] for one in (kept, not_kept, travelled)]  # type: ignore[misc]
    assert torch.equal(images[0], images[1])
    assert torch.equal(images[0], images[2])


@pytest.mark.parametrize(
    ("workers", "split"), [(0, "train"), (0, "test"), (2, "train"), pytest.param(2, "test", marks=pytest.mark.slow)]
)
def test_a_corrupt_image_stops_with_its_path_alone(
    folders: Make, data_config: Config, workers: int, split: str
) -> None:
    root = folders(train={"a": 8, "b": 8}, test={"a": 3, "b": 3})
    truncate(root / split / "b/1.jpg")
    data = open_data(data_config("folder", root=str(root), num_workers=workers, select_best_on="test"), SPEC, 0)
    with pytest.raises(UserError) as error:
        list(data.train_loader() if split == "train" else data.eval_loader("test"))
    assert str(error.value).startswith(str(root / split / "b/1.jpg"))
    assert "Traceback" not in str(error.value)
    assert "\n" not in str(error.value)


def test_a_killed_worker_is_explained(folders: Make, data_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    data = open_data(data_config("folder", root=str(folders(a=8, b=8)), num_workers=1), SPEC, 0)
    loader = data.train_loader()
    monkeypatch.setattr(SplitDataset, "__getitems__", lambda self, keys: __import__("os")._exit(9))
    with pytest.raises(UserError, match=r"data\.num_workers=0"):
        list(loader)


@pytest.mark.slow
def test_workers_do_not_spawn_threads(folders: Make, data_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    data = open_data(data_config("folder", root=str(folders(a=4, b=4)), num_workers=1, batch_size=2), SPEC, 0)

    def threads(self: SplitDataset, keys: list[tuple[int, int]]) -> int:
        return torch.get_num_threads()

    monkeypatch.setattr(SplitDataset, "__getitems__", threads)
    assert set(data.eval_loader("test")) == {1}


class Recorder(lightning.LightningModule):
    """A module that records each batch with its epoch. It saves a checkpoint after step `save_at`."""

    def __init__(self, save_at: int = -1, target: Path = Path()) -> None:
        super().__init__()
        self.save_at, self.target = save_at, target
        self.layer = torch.nn.Linear(3, 2)
        self.seen: list[tuple[int, torch.Tensor]] = []

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        images, labels = batch
        self.seen.append((self.current_epoch, images.clone()))
        return torch.nn.functional.cross_entropy(self.layer(images.mean((2, 3))), labels)

    def on_train_batch_end(self, *_: object) -> None:
        if self.global_step == self.save_at:
            self.trainer.save_checkpoint(self.target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(folder: Path, epochs: int, **settings: object) -> lightning.Trainer:
    return lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=folder,
        enable_checkpointing=False,
        **settings,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")
def test_lightning_sets_the_epoch_also_of_a_resumed_run(
    folders: Make, data_config: Config, tmp_path: Path, workers: int
) -> None:
    data = open_data(data_config("folder", root=str(folders(a=10, b=10)), num_workers=workers), SPEC, 0)
    whole = Recorder()
    trainer(tmp_path, 3).fit(whole, data.train_loader())
    for epoch in range(3):
        given = torch.cat([x for e, x in whole.seen if e == epoch])
        assert torch.equal(given, epoch_of(data, epoch)[0])

    part = Recorder()
    first = trainer(tmp_path, 2)
    first.fit(part, data.train_loader())
    first.save_checkpoint(tmp_path / "two.ckpt")
    rest = Recorder()
    trainer(tmp_path, 3).fit(rest, data.train_loader(), ckpt_path=tmp_path / "two.ckpt")
    assert torch.equal(torch.cat([x for _, x in rest.seen]), epoch_of(data, 2)[0])


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")
def test_lightning_continues_in_the_middle_of_an_epoch(
    folders: Make, data_config: Config, tmp_path: Path, workers: int
) -> None:
    data = open_data(data_config("folder", root=str(folders(a=10, b=10)), num_workers=workers), SPEC, 0)
    whole = Recorder()
    trainer(tmp_path, 2).fit(whole, data.train_loader())
    per_epoch = len(data.train_loader())
    stop = per_epoch + 2  # two batches into the second epoch

    trainer(tmp_path, 2, max_steps=stop).fit(Recorder(stop, tmp_path / "middle.ckpt"), data.train_loader())
    rest = Recorder()
    loader = data.train_loader()
    loader.sampler.start = 2 * 4
    trainer(tmp_path, 2).fit(rest, loader, ckpt_path=tmp_path / "middle.ckpt")
    expected = [x for _, x in whole.seen][stop:]
    assert len(rest.seen) == len(expected) == per_epoch - 2
    for (_, got), want in zip(rest.seen, expected, strict=True):
        assert torch.equal(got, want)
