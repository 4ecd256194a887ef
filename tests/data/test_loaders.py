"""The sampler and the loaders: counters decide, nothing else; errors arrive whole."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from pathlib import Path

import lightning
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import SPEC, truncate

from efficient_ft.config import DataConfig
from efficient_ft.core.errors import UserError
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.data import CounterSampler, ImageData, open_data
from efficient_ft.data.loading import CountedImages
from efficient_ft.data.sources import Samples

Make = Callable[..., Path]
Config = Callable[..., DataConfig]


@settings(max_examples=80, deadline=None)
@given(size=st.integers(1, 60), world=st.integers(1, 7), seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 99))
def test_shares_cover_an_epoch_and_repeat_only_to_fill_up(size: int, world: int, seed: int, epoch: int) -> None:
    shares = []
    for rank in range(world):
        sampler = CounterSampler(size, seed, rank, world)
        sampler.set_epoch(epoch)
        shares.append(list(sampler))
        assert len(shares[-1]) == len(sampler) == -(-size // world)
        assert {e for e, _ in shares[-1]} == {epoch}
    together = [index for share in shares for _, index in share]
    assert set(together) == set(range(size))
    assert len(together) - size < world
    single = CounterSampler(size, seed)
    single.set_epoch(epoch)
    interleaved = [pair for row in zip(*shares, strict=True) for pair in row]
    assert interleaved[:size] == list(single)  # the same global order for any number of processes


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 40), world=st.integers(1, 5))
def test_evaluation_sees_every_image_once(size: int, world: int) -> None:
    samplers = [CounterSampler(size, 0, rank, world, shuffle=False) for rank in range(world)]
    seen = [index for sampler in samplers for _, index in sampler]
    assert sorted(seen) == list(range(size))
    assert [len(list(s)) for s in samplers] == [len(s) for s in samplers]


@given(size=st.integers(1, 40), start=st.integers(0, 50))
def test_start_leaves_out_what_was_seen_once(size: int, start: int) -> None:
    sampler = CounterSampler(size, 3)
    whole = list(sampler)
    sampler.start = start
    sampler.set_epoch(0)  # as Lightning does, after the state was restored
    assert len(sampler) == size
    assert list(sampler) == whole[start:]
    assert list(sampler) == whole


def test_epochs_and_seeds_differ() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = CounterSampler(50, seed)
        sampler.set_epoch(epoch)
        return [index for _, index in sampler]

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(s, e)) for s in range(3) for e in range(3)}) == 9


def epoch_of(data: ImageData, epoch: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    loader = data.train_loader()
    loader.sampler.set_epoch(epoch)
    images, labels = zip(*loader, strict=True)
    return torch.cat(images), torch.cat(labels)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("kind", ["folder", "digits"])
def test_any_number_of_workers_gives_the_same_epoch(folders: Make, data_config: Config, kind: str) -> None:
    settings = {"root": str(folders(a=12, b=12)), "batch_size": 4} if kind == "folder" else {"batch_size": 256}
    results = [epoch_of(open_data(data_config(kind, num_workers=w, **settings), SPEC, 5)) for w in (0, 1, 4)]
    for images, labels in results[1:]:
        assert torch.equal(images, results[0][0])
        assert torch.equal(labels, results[0][1])
    other_seed, _ = epoch_of(open_data(data_config(kind, **settings), SPEC, 6))
    other_epoch, _ = epoch_of(open_data(data_config(kind, **settings), SPEC, 5), epoch=2)
    assert not torch.equal(other_seed[:8], results[0][0][:8])
    assert not torch.equal(other_epoch[:8], results[0][0][:8])


@pytest.mark.parametrize("workers", [0, 2])
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
    assert isinstance(images, CountedImages)
    keys = [(epoch, index) for epoch in range(2) for index in range(len(images))]
    first = {key: images[key] for key in keys}
    random.Random(0).shuffle(keys)
    for key in keys:
        assert torch.equal(images[key][0], first[key][0])
        assert images[key][1] == first[key][1]
    batch, labels = images.__getitems__(keys)  # type: ignore[misc]
    assert torch.equal(batch, torch.stack([first[key][0] for key in keys]))
    assert labels.tolist() == [first[key][1] for key in keys]
    assert not torch.equal(first[0, 0][0], first[1, 0][0])


def test_no_global_generator_is_disturbed(data_config: Config) -> None:
    data = open_data(data_config("digits", batch_size=64), SPEC, 5)
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    iterator = iter(data.train_loader().dataset[0, i] for i in range(5))
    list(iterator)
    data.train_loader().dataset.__getitems__([(0, 1), (4, 2)])
    list(data.train_loader().sampler)
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    # and a disturbed global generator changes no image
    torch.manual_seed(999)
    again = data.train_loader().dataset[0, 3][0]
    torch.manual_seed(1)
    assert torch.equal(again, data.train_loader().dataset[0, 3][0])


def test_samples_are_what_the_transform_makes_of_the_file(folders: Make, data_config: Config) -> None:
    root = folders(train={"a": 5, "b": 5}, test={"a": 2, "b": 3})
    data = open_data(data_config("folder", root=str(root), batch_size=2), SPEC, 0)
    files = sorted((root / "test").rglob("*.jpg"))
    loader = data.eval_loader("test")
    order = [index for _, index in loader.sampler]
    assert sorted(order) == list(range(5))
    assert order == [index for _, index in data.eval_loader("test").sampler], "the same each time"
    images, labels = zip(*loader, strict=True)
    assert [len(x) for x in images] == [2, 2, 1]
    assert torch.cat(labels).tolist() == [[0, 0, 1, 1, 1][index] for index in order]
    assert torch.cat(labels).dtype == torch.int64
    for image, index in zip(torch.cat(images), order, strict=True):
        assert image.shape == (3, 16, 16)
        assert torch.equal(image, data.transform_eval(files[index]))


def test_small_images_kept_in_memory_are_the_same_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from efficient_ft.data import Transform, loading

    pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)
    samples = Samples(pixels, np.arange(6, dtype=np.int64))
    transform = Transform(SPEC, "resize_crop")
    kept = CountedImages(samples, transform, 0)
    monkeypatch.setattr(loading, "_KEEP_BYTES", 0)
    not_kept = CountedImages(samples, transform, 0)
    assert kept._resized
    assert not not_kept._resized
    for i in range(6):
        assert torch.equal(kept[2, i][0], not_kept[2, i][0])
    travelled = pickle.loads(pickle.dumps(kept))
    assert torch.equal(travelled[2, 3][0], kept[2, 3][0])


@pytest.mark.parametrize(
    ("count", "batch", "sizes"), [(9, 4, [4, 4]), (10, 4, [4, 4, 2]), (3, 8, [3]), (3, 1, [1, 1, 1])]
)
def test_the_last_batch_is_kept_unless_it_is_a_single_image(
    folders: Make, data_config: Config, count: int, batch: int, sizes: list[int]
) -> None:
    root = folders(train={"a": count - 1, "b": 1}, test={"a": 1})
    config = data_config("folder", root=str(root), batch_size=batch, select_best_on="test")
    data = open_data(config, SPEC, 0)
    loader = data.train_loader()
    assert [len(y) for _, y in loader] == sizes
    assert len(loader) == len(sizes)
    assert any("data.batch_size=8" in note for note in data.report()["notes"]) == (count < batch)


def test_the_batch_size_of_evaluation(data_config: Config) -> None:
    data = open_data(data_config("digits", batch_size=64, eval_batch_size=200), SPEC, 0)
    assert [len(y) for _, y in data.eval_loader("test")] == [200, data.splits["test"] - 200]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("split", ["train", "test"])
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


def test_skip_leaves_corrupt_images_out_of_everything_and_reports_them(folders: Make, data_config: Config) -> None:
    root = folders(train={"a": 20, "b": 20}, test={"a": 3, "b": 3})
    truncate(root / "train/b/7.jpg")
    (root / "test/a/2.jpg").write_bytes(b"")
    config = data_config("folder", root=str(root), on_corrupt="skip")
    data = open_data(config, SPEC, 0)
    assert data.splits == {"train": 35, "val": 4, "test": 5}
    report = data.report()
    assert report["skipped_count"] == 2
    assert set(report["skipped"]) == {str(root / "train/b/7.jpg"), str(root / "test/a/2.jpg")}
    assert any("2 images that cannot be read" in note for note in report["notes"])
    first = epoch_of(data)
    # the same as if the files had never been there
    (root / "train/b/7.jpg").unlink()
    (root / "test/a/2.jpg").unlink()
    second = epoch_of(open_data(data_config("folder", root=str(root)), SPEC, 0))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_skip_does_not_lose_a_class_or_a_split_silently(folders: Make, data_config: Config) -> None:
    root = folders(train={"a": 4, "b": 1}, test={"a": 1})
    (root / "test/a/0.jpg").write_bytes(b"")
    with pytest.raises(UserError, match="left in the test split"):
        open_data(data_config("folder", root=str(root), on_corrupt="skip"), SPEC, 0)
    (root / "train/b/0.jpg").write_bytes(b"")
    with pytest.raises(UserError, match="left of the class 'b'"):
        open_data(data_config("folder", root=str(root), on_corrupt="skip"), SPEC, 0)


def test_a_killed_worker_is_explained(folders: Make, data_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    data = open_data(data_config("folder", root=str(folders(a=8, b=8)), num_workers=1), SPEC, 0)
    loader = data.train_loader()
    monkeypatch.setattr(CountedImages, "__getitems__", lambda self, keys: __import__("os")._exit(9))
    with pytest.raises(UserError, match=r"data\.num_workers=0"):
        list(loader)


class Recorder(lightning.LightningModule):
    """Remembers every batch it is given, by epoch, and may save a checkpoint after a step."""

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


@pytest.mark.parametrize("workers", [0, 2])
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


@pytest.mark.parametrize("workers", [0, 2])
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


def test_workers_do_not_spawn_threads(folders: Make, data_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    data = open_data(data_config("folder", root=str(folders(a=4, b=4)), num_workers=1, batch_size=2), SPEC, 0)

    def threads(self: CountedImages, keys: list[tuple[int, int]]) -> int:
        return torch.get_num_threads()

    monkeypatch.setattr(CountedImages, "__getitems__", threads)
    assert set(data.eval_loader("test")) == {1}


def test_real_images(shared_data: Path, tmp_path: Path, data_config: Config) -> None:
    import tarfile

    classes = ("airplane", "frog", "truck")
    with tarfile.open(shared_data / "cifar10.tar.gz") as archive:
        taken: dict[str, int] = {}
        for member in archive:  # a part, read from the front
            parts = member.name.split("/")
            if len(parts) == 4 and parts[1] == "test" and parts[2] in classes and taken.get(parts[2], 0) < 40:
                taken[parts[2]] = taken.get(parts[2], 0) + 1
                archive.extract(member, tmp_path, filter="data")
            if len(taken) == 3 and min(taken.values()) == 40:
                break
    root = tmp_path / "cifar10/test"
    spec = InputSpec((64, 48), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    data = open_data(data_config("folder", root=str(root), num_workers=2, batch_size=16), spec, 0)
    assert data.class_names == list(classes)
    assert data.splits == {"train": 87, "val": 9, "test": 24}
    images, labels = epoch_of(data, 0)
    assert images.shape == (87, 3, 64, 48)
    assert images.isfinite().all()
    assert 0.5 < images.std() < 2
    assert sorted(set(labels.tolist())) == [0, 1, 2]
