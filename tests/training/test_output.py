"""Tests of the output of real runs in a pipe and on a terminal: the number of lines and their width."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from efficient_ft.core.text import spelled
from efficient_ft.training.callbacks import progress
from tests.models.text_models import write_model, write_texts
from tests.training.runs import REPOSITORY

#: Maximum number of lines before the first progress line.
MOST_LINES = 25
#: Matches a progress line in a pipe and a progress bar.
PROGRESS = re.compile(r"epoch \d+/\d+")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def printed(arguments: list[str], folder: Path, width: int | None) -> str:
    """Return the output of a run in a pipe (`width` is None) or on a terminal of `width` columns."""
    command = [sys.executable, "-m", "efficient_ft", f"hydra.run.dir={folder / 'run'}", *arguments]
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR", "WANDB_SILENT")}
    environment |= {"PYTHONPATH": str(REPOSITORY), "TERM": "xterm"}
    if width is None:
        done = subprocess.run(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert done.returncode == 0, done.stdout
        return done.stdout
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdin=terminal, stdout=terminal, stderr=terminal
    ) as run:
        os.close(terminal)
        found = b""
        while True:
            try:
                part = os.read(controller, 65536)
            except OSError:  # the terminal was closed
                break
            if not part:
                break
            found += part
    os.close(controller)
    text = found.decode()
    assert run.returncode == 0, text
    return text


def check(text: str, width: int) -> list[str]:
    """Check the number of lines before training and the width of all lines; return the lines without colors."""
    lines = [_ESCAPES.sub("", line) for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
    before = next(number for number, line in enumerate(lines) if PROGRESS.search(line))
    assert before <= MOST_LINES, "\n".join(lines[:before])
    wide = [
        line for line in lines if len(line) > width and " " in line.strip()
    ]  # a line with only a path may be longer
    assert not wide
    return lines


def images(folder: Path) -> list[str]:
    """Write an image folder of two classes, and return the settings."""
    for split, count in (("train", 12), ("test", 4)):
        for number in range(count):
            for channel, name in enumerate(("green apples", "red apples")):
                pixels = np.random.default_rng(number).integers(0, 80, (40, 40, 3), dtype=np.uint8)
                pixels[:, :, 1 - channel] += 120
                path = folder / "my images" / split / name / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(path)
    small = ["model.pretrained=false", "model.image_size=32", "++model.kwargs={depth:4,patch_size:8}"]
    return ["data=folder", "data.root=my images", "method=[lbp_dct,last_stage,back_razor]", "model=deit_tiny", *small]


def masks(folder: Path) -> list[str]:
    """Write a folder of images with masks, and return the settings."""
    chance = np.random.default_rng(0)
    for split, count in (("train", 4), ("val", 2)):
        for number in range(count):
            mask = chance.integers(0, 3, (8, 8), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
            for kind, pixels in (("images", np.stack([mask * 90] * 3, 2)), ("masks", mask)):
                path = folder / "masks" / split / kind / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(path)
    (folder / "masks" / "classes.txt").write_text("road\ncar\nsky\n")
    model = ["model=segformer_b0", "model.pretrained=false", "model.image_size=64"]
    return ["task=segmentation", "data=mask_folder", "data.root=masks", "method=lbp_wht", *model]


def texts(folder: Path) -> list[str]:
    """Write a file of texts and a folder with a network, and return the settings."""
    write_texts(folder / "texts.csv", 160)
    write_model(folder / "bert")
    model = ["model=text", "model.name=bert", "model.weights=bert", "model.max_length=16"]
    return ["task=text", "data=text_folder", "data.root=texts.csv", "method=back_razor", *model]


SHORT = ["trainer.max_steps=3", "trainer.accelerator=cpu", "data.num_workers=0", "data.batch_size=4", "cost.steps=1"]


@pytest.mark.first(1, "exhaustive")
@pytest.mark.slow
@pytest.mark.parametrize("width", [None, 80, 120])
def test_the_default_job(tmp_path: Path, width: int | None) -> None:
    arguments = ["trainer.epochs=2", "cost.steps=1", "trainer.accelerator=cpu"]
    text = printed(arguments, tmp_path, width)
    lines = check(text, width or 100)
    assert any(line.startswith("lbp_wht: 16 layers in blocks 0–3 low-rank") for line in lines)
    ends = [line for line in lines if re.match(r"epoch [12]/2: loss \d.*, val accuracy \d+\.\d\d %", line)]
    assert len(ends) == 2
    assert not any(line.strip() == "left" for line in lines), "lines of progress are shortened instead of wrapped"
    assert any(re.match(r"Results: run ", line) for line in lines), "relative to the current folder"
    if width is None:
        assert "\r" not in text
        assert "\x1b" not in text
        assert all(re.search(r"lr \d\.\de-\d+, .* images/s", line) for line in ends)
    else:
        assert "\x1b[33mwarning:\x1b[0m vit_digits starts from RANDOM weights" in text
        bars = [line for line in lines if re.match(r"epoch \d/2 .*\d+/82, loss \d", line)]
        assert any(re.search(r"lr \d\.\de-\d+, .* images/s, .* left", line) for line in bars)
    log = (tmp_path / "run" / "train.log").read_text()
    assert "  + blocks.3.mlp.fc2" in log
    assert "LD_PRELOAD" not in text


@pytest.mark.first(1, "exhaustive", of="width")
@pytest.mark.first(2, "exhaustive", of="kind")
@pytest.mark.slow
@pytest.mark.parametrize("width", [80, None])
@pytest.mark.parametrize("kind", [images, masks, texts])
def test_other_kinds_of_runs(tmp_path: Path, kind: object, width: int | None) -> None:
    arguments = kind(tmp_path)  # type: ignore[operator]
    lines = check(printed([*arguments, *SHORT], tmp_path, width), width or 100)
    metric, sample = {
        images: ("accuracy", "images/s"), masks: (spelled("mean_iou"), "images/s"), texts: ("accuracy", "texts/s")
    }[kind]  # type: ignore[index]  # fmt: skip
    assert any(f"val {metric}" in line and sample in line for line in lines)


@pytest.mark.slow
def test_verbose_prints_every_module(tmp_path: Path) -> None:
    shown = printed(["verbose=true", "trainer.max_steps=1", "cost.baseline=none"], tmp_path, None)
    log = (tmp_path / "run" / "train.log").read_text()
    listed = [line for line in log.splitlines() if line.startswith("  + ")]
    assert len(listed) > 16
    assert set(listed) <= set(shown.splitlines())
    assert shown.count("lbp_wht: 16 layers") == 1


def test_a_line_of_progress_drops_the_learning_rate_and_the_speed_first() -> None:
    parts = ["lr 1.0e-03", "12.0 images/s", "13 min left"]
    for width, left in ((100, parts), (25, ["lr 1.0e-03", "13 min left"]), (11, ["13 min left"]), (3, [])):
        kept = list(parts)
        progress._shorten(kept, width)
        assert kept == left
    progress._shorten(kept := ["loss 1.000", "lr 1.0e-03"], 3, least=1)
    assert kept == ["lr 1.0e-03"]
