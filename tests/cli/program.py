"""Helpers that run the command line in this process, or as a program whose run trains nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from efficient_ft.cli.hydra.compose import configurations
from efficient_ft.cli.hydra.groups import CONF, register
from efficient_ft.config import Config
from tests.conftest import unwrapped

REPOSITORY = Path(__file__).resolve().parents[2]

# train.py with a run that returns immediately and does not import torch.
PROGRAM = """
import json, os, signal, sys, time, types
sys.path.insert(0, {repository!r})
import train
from efficient_ft.cli import main
from tests.record.some import some_results

def run(config, folder, arguments=(), begun=lambda: None):
    if config.evaluate is None and not config.cost_only:
        begun()
    from efficient_ft.core.errors import UserError
    order = config.method.get("lbp_wht", {{}}).get("order")
    if order == 5:
        raise UserError("order 5 is out of luck\\nand explains it at length")
    if order == 6:
        raise RuntimeError("a bug")
    if order == 7:
        raise KeyboardInterrupt
    if order == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    if order == 9:
        time.sleep(300)
    print("ran", order, "lr", config.optim.lr, "root", config.data.root, "evaluate", config.evaluate)
    if config.evaluate is not None or config.cost_only:
        return {{"executed": {{"backward_flops": 3e6}}}}
    settings = config.model_dump(mode="json")
    results = some_results()
    results["accuracy"]["best"] = (order or 0) / 10
    results["cost"]["executed"]["backward_flops"] = (order or 0) * 1e6
    results["config"] = settings
    (folder / "results.json").write_text(json.dumps(results))
    (folder / "config.yaml").write_text(json.dumps(settings))
    (folder / "changed.json").write_text(json.dumps(config.changed()))
    (folder / "model.safetensors").touch()
    return results

main.prepare = lambda config: None
sys.modules["efficient_ft.training.run"] = types.SimpleNamespace(run=run)
sys.modules["efficient_ft.training"] = types.SimpleNamespace()
train.main()
assert "torch" not in sys.modules
"""


def composed(*arguments: str, sweep: bool = False, search: Path | None = None) -> list[Config]:
    """Return the configurations of a command line."""
    register()
    return configurations(CONF, "train", arguments, sweep=sweep, search=None if search is None else str(search))


def write_program(folder: Path) -> None:
    """Write the program into `folder`."""
    (folder / "program.py").write_text(PROGRAM.format(repository=str(REPOSITORY)))


def call(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the program in `folder`, with each message on one line."""
    done = subprocess.run(
        [sys.executable, "program.py", *arguments], cwd=folder, capture_output=True, text=True, encoding="utf-8"
    )
    done.stderr = unwrapped(done.stderr)
    return done


def runs_of(folder: Path) -> set[Path]:
    """Return the run folders below `folder` as relative paths."""
    return {file.parent.relative_to(folder) for file in (folder / "outputs").rglob("results.json")}
