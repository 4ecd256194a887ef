"""Tests of the training loops in `examples/clients`: each loop equals the same loop without this package."""

from __future__ import annotations

import ast
import difflib
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from efficient_ft.methods import LBPDCT, LISA, BackRazor, Checkpointing, Compact, LoRA, LowBit, Mesa, Method, ToMe

CLIENTS = Path(__file__).resolve().parents[1] / "examples" / "clients"
NAMES = [file.stem for file in sorted(CLIENTS.glob("*.py"))]
#: Arguments of `main` in the tests, by loop.
SETTINGS: dict[str, dict[str, Any]] = {
    "accelerate_loop": {"steps": 6},
    "clip_finetune": {"steps": 6},
    "kaggle_loop": {"epochs": 1, "steps_per_epoch": 3, "amp": False},
    "lightning_template": {"epochs": 1},
    "timm_loop": {"epochs": 2},
    "trainer_classification": {"steps": 6},
    "trainer_segmentation": {"steps": 6},
}
_MARK = "# efficient-ft"


def source(name: str) -> str:
    return (CLIENTS / f"{name}.py").read_text(encoding="utf-8")


def without(text: str) -> str:
    """Remove the lines of this package from the source of a loop. A marked ``with`` block becomes a plain block."""
    lines = []
    for line in text.splitlines():
        if not line.endswith(_MARK):
            lines.append(line)
        elif re.match(r" +with session", line):
            lines.append(re.sub(r"with session.*", "if True:", line))
        elif "plain_state_dict" in line:
            lines.append(re.sub(r"methods\.plain_state_dict.*", "model.state_dict()", line))
        elif "session.loss(loss)" in line and not line.lstrip().startswith("loss ="):
            lines.append(line.replace("session.loss(loss)", "loss"))
    return "\n".join(lines)


def main_of(text: str, name: str) -> Callable[..., Any]:
    """Return the function `main` of the source of a loop."""
    names: dict[str, Any] = {"__name__": name}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(text, name, "exec", dont_inherit=True), names)
    found: Callable[..., Any] = names["main"]
    return found


#: Modules for the data and the network of the loops, which the loops without this package also use.
_SHARED = ("efficient_ft.data.digits", "efficient_ft.models.small")


@pytest.mark.parametrize("name", NAMES)
def test_a_loop_needs_at_most_five_further_lines(name: str) -> None:
    """All added and changed lines count, including imports. The indentation inside a ``with`` block does not count."""
    own, plain = ([line.strip() for line in text.splitlines()] for text in (source(name), without(source(name))))
    differing = [line for line in difflib.ndiff(plain, own) if line.startswith("+ ")]
    assert 2 <= len(differing) <= 5, differing
    code = ast.unparse(ast.parse(without(source(name))))
    code = code.replace(ast.get_docstring(ast.parse(code)) or "", "")
    for shared in _SHARED:
        code = code.replace(shared, "")
    assert not re.search(r"efficient_ft|Method(Session|Callback)|session\.|\bmethods\.", code)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_exact_methods_do_not_change_the_metrics_of_a_loop(name: str) -> None:
    plain = main_of(without(source(name)), name)(**SETTINGS[name])
    assert main_of(source(name), name)([Checkpointing()], **SETTINGS[name]) == plain
    found = main_of(source(name), name)([Compact()], **SETTINGS[name])
    bf16 = name == "timm_loop"  # recomputed values are rounded
    if isinstance(plain, dict):
        assert found["accuracy"] == pytest.approx(plain["accuracy"], abs=0.01)
        found, plain = found["losses"], plain["losses"]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(plain), rtol=1e-5, atol=3e-3 if bf16 else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "method",
    [
        lambda: LoRA(rank=4, targets="all"),
        lambda: LowBit(bits=4),
        lambda: BackRazor(sparsity=0.8),
        lambda: Mesa(),
        lambda: LBPDCT(order=3),
        lambda: LISA(num_layers=2, interval=2),
    ],
    ids=["lora", "low_bit", "back_razor", "mesa", "lbp_dct", "lisa"],
)
def test_every_kind_of_method_trains_in_a_loop(name: str, method: Callable[[], Method]) -> None:
    found = main_of(source(name), name)([method()], **SETTINGS[name])
    losses = torch.tensor(found["losses"] if isinstance(found, dict) else found)
    assert losses.isfinite().all()
    if isinstance(found, dict) and "new" in found:  # the accuracy of a plain network with the saved weights
        assert found["new"] == pytest.approx(found["accuracy"], abs=0.01)


@pytest.mark.slow
def test_the_loop_with_the_parts_of_timm_resumes(tmp_path: Path) -> None:
    loop = main_of(source("timm_loop"), "timm_loop")
    whole = loop([LowBit(bits=4)], epochs=3)
    stops = main_of(source("timm_loop").replace("range(first, epochs)", "range(first, 2)"), "stops")
    stops([LowBit(bits=4)], epochs=3, checkpoint=tmp_path / "checkpoint.pt")
    resumed = loop([LowBit(bits=4)], epochs=3, checkpoint=tmp_path / "checkpoint.pt")
    assert resumed["losses"] == whole["losses"][20:]
    assert resumed["accuracy"] == whole["accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize("method", [lambda: LISA(num_layers=2, interval=2), lambda: LoRA(rank=4)], ids=["lisa", "lora"])
def test_the_template_of_lightning_resumes(method: Callable[[], Method], tmp_path: Path) -> None:
    template = main_of(source("lightning_template"), "lightning_template")
    whole = template([method()], epochs=2, folder=tmp_path / "whole")
    template([method()], epochs=1, folder=tmp_path)
    resumed = template([method()], epochs=2, folder=tmp_path, resume=True)
    assert resumed["losses"] == whole["losses"][10:]
    assert resumed["accuracy"] == whole["accuracy"]


@pytest.mark.slow
def test_the_loop_in_mixed_precision_predicts_with_a_plain_network() -> None:
    found = main_of(source("kaggle_loop"), "kaggle_loop")([LoRA(rank=4, targets="all")], epochs=1, steps_per_epoch=2)
    assert torch.tensor(found["losses"]).isfinite().all()
    assert found["new"] == pytest.approx(found["accuracy"], abs=0.01)
    assert len(found["predictions"]) == 256


@pytest.mark.slow
def test_a_linear_probe_of_clip_runs_with_fewer_tokens() -> None:
    name = "clip_finetune"
    plain = main_of(without(source(name)), name)(steps=6, probe=True)
    loop = main_of(source(name), name)
    assert loop([ToMe(r=0)], steps=6, probe=True)["losses"] == pytest.approx(plain["losses"], abs=1e-5)
    merged = torch.tensor(loop([ToMe(r=2)], steps=6, probe=True)["losses"])
    assert merged.isfinite().all()
    assert not torch.equal(merged, torch.tensor(plain["losses"]))


@pytest.mark.slow
def test_two_processes_of_accelerate_train_like_one() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29577"]
    environment = {**os.environ, "PYTHONPATH": str(CLIENTS.parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, str(CLIENTS / "accelerate_loop.py")], env=environment, capture_output=True,
                          text=True, check=False, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    shown = re.search(r"2 process\(es\), losses ([\d.]+) to ([\d.]+)", done.stdout)
    assert shown is not None, done.stdout
    first, last = map(float, shown.groups())
    assert last < first
