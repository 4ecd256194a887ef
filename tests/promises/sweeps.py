"""Promise 8: a sweep finishes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.promises.children import SECONDS, returned
from tests.promises.runs import configuration, train, write_images
from tests.promises.trial import Trial, require

#: The program with a replaced training. For some orders, the training dies, hangs or raises. For other orders, it
#: writes the results in GIVEN.
_PROGRAM = """
import json, os, signal, subprocess, sys, time, types
from pathlib import Path
from efficient_ft.cli import main

def run(config, folder, arguments=(), begun=lambda: None):
    begun()
    order = config.method["lbp_wht"]["order"]
    with open(f"began_{{order}}", "a") as file:
        file.write(".")
    if order == 5:
        raise RuntimeError("a mistake in the program")
    if order == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    if order == 7:
        time.sleep(3600)
    if order == 8:  # neither the job nor its child stops on request
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path(f"{{folder}}.child").write_text(str(subprocess.Popen(["sleep", "3600"]).pid))
        time.sleep(3600)
    if order == 9:
        sys.exit(3)
    results = json.loads(Path({given!r}).read_text())
    results["config"] = config.model_dump(mode="json")
    results["accuracy"]["best"] = order / 10
    (folder / "results.json").write_text(json.dumps(results))
    (folder / "config.yaml").write_text(json.dumps(results["config"]))
    (folder / "model.safetensors").touch()
    return results

if __name__ == "__main__":
    main.prepare = lambda config: None
    sys.modules["efficient_ft.training.run"] = types.SimpleNamespace(run=run)
    sys.modules["efficient_ft.training"] = types.SimpleNamespace()
    main.main()
"""
_FAILURES = {
    5: "RuntimeError: a mistake in the program",
    6: "killed by SIGKILL",
    7: r"job_timeout",
    8: r"job_timeout",
    9: "exit status 3",
}


def trials(long: bool) -> Iterator[Trial]:
    """Yield a sweep with one job at a time and a sweep with two jobs at a time."""
    for parallel in (1, 2) if long else (2,):
        yield Trial(f"jobs that die, hang, raise and leave, {parallel} at a time", _sweep, (parallel, long))


def _sweep(folder: Path, parallel: int, stubborn: bool) -> None:
    """Run a sweep in which three jobs finish and the other jobs fail in different ways, and repeat the sweep.

    Args:
        folder: Empty folder.
        parallel: Number of concurrent jobs.
        stubborn: If True, add a job that ignores requests to stop and is killed a minute later.
    """
    failures = {order: reason for order, reason in _FAILURES.items() if stubborn or order != 8}
    write_images(folder / "images")
    returned(train, configuration(folder / "images"), folder / "given", output=folder / "given.log")
    (folder / "program.py").write_text(_PROGRAM.format(given=str(folder / "given" / "results.json")))
    orders = [2, *failures, 3, 4]
    command = [
        sys.executable, "program.py", "-m", f"method.lbp_wht.order={','.join(map(str, orders))}", f"jobs={parallel}",
        "job_timeout=10s", "trainer.progress=false",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS)
    require(done.returncode == 1, f"status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    require(f"{len(failures)} of {len(orders)} jobs failed" in done.stdout, done.stdout[-3000:])
    for order, reason in failures.items():
        found = re.search(rf"order={order}: .*{reason}", done.stdout)
        require(found is not None, f"the failure of order={order} is not named as {reason}:\n{done.stdout[-2000:]}")
    for order in (2, 3, 4):
        require(bool(re.search(rf"order={order} +{10 * order}\.00 %", done.stdout)), f"order={order} did not finish")
    for file in folder.rglob("*.child"):
        require(not _runs(int(file.read_text())), "a process that a hanging job had started is left")
    began = {order: _begun(folder, order) for order in orders}
    again = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS)
    require(again.returncode == 1, f"status {again.returncode}\n{again.stderr[-2000:]}")
    require(again.stdout.count("already finished") == 3, f"not three jobs already finished:\n{again.stdout[-3000:]}")
    require(f"{len(failures)} of {len(orders)} jobs failed" in again.stdout, again.stdout[-3000:])
    for order in orders:
        more = _begun(folder, order) - began[order]
        require(more == (order in failures), f"order={order} began {more} times in the repeated sweep")


def _begun(folder: Path, order: int) -> int:
    """Return the number of times that the job of an order has begun."""
    file = folder / f"began_{order}"
    return len(file.read_text()) if file.exists() else 0


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{process}/stat")
    dead = state.is_file() and state.read_text().rsplit(")", 1)[-1].split()[0] == "Z"
    if not dead:
        os.kill(process, signal.SIGKILL)
    return not dead
