"""Tests of the training loops in `examples/clients`: each loop equals the same loop without this package."""

from __future__ import annotations

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

from efficient_ft.methods import LBPDCT, LISA, BackRazor, Checkpointing, Compact, LoRA, LowBit, Mesa, Method

CLIENTS = Path(__file__).resolve().parents[1] / "examples" / "clients"
NAMES = [file.stem for file in sorted(CLIENTS.glob("*.py"))]
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


@pytest.mark.parametrize("name", NAMES)
def test_a_loop_needs_at_most_five_further_lines(name: str) -> None:
    marked = [line for line in source(name).splitlines() if line.endswith(_MARK)]
    # The import is one of the lines. `timm_loop` imports and creates a session, and calls three of its methods.
    assert 2 <= len(marked) <= 5
    assert "MethodSession" not in without(source(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_exact_methods_do_not_change_the_metrics_of_a_loop(name: str) -> None:
    settings = {"epochs": 2} if name == "timm_loop" else {"steps": 6}
    plain = main_of(without(source(name)), name)(**settings)
    assert main_of(source(name), name)([Checkpointing()], **settings) == plain
    found = main_of(source(name), name)([Compact()], **settings)
    if isinstance(plain, dict):  # a loop in bf16, in which recomputed values are rounded
        assert found["accuracy"] == pytest.approx(plain["accuracy"], abs=0.01)
        torch.testing.assert_close(torch.tensor(found["losses"]), torch.tensor(plain["losses"]), rtol=0, atol=3e-3)
    else:
        torch.testing.assert_close(torch.tensor(found), torch.tensor(plain), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "method",
    [
        lambda: LoRA(rank=4),
        lambda: LowBit(bits=4),
        lambda: BackRazor(sparsity=0.8),
        lambda: Mesa(),
        lambda: LBPDCT(order=3),
        lambda: LISA(num_layers=2, interval=2),
    ],
    ids=["lora", "low_bit", "back_razor", "mesa", "lbp_dct", "lisa"],
)
def test_every_kind_of_method_trains_in_a_loop(name: str, method: Callable[[], Method]) -> None:
    found = main_of(source(name), name)([method()], **({"epochs": 2} if name == "timm_loop" else {"steps": 8}))
    losses = torch.tensor(found["losses"] if isinstance(found, dict) else found)
    assert losses.isfinite().all()


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
