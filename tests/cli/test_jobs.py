"""Tests of sweeps: jobs run in separate processes, finished jobs are skipped, and a table lists failures."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import psutil
import pytest

from efficient_ft.cli.exits import OUTCOME_FILE
from efficient_ft.cli.hydra import jobs, processes
from efficient_ft.config import check
from tests.cli.program import REPOSITORY, call, composed, runs_of
from tests.record.some import some_results
from tests.training.runs import plain_config


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="kills a job by a signal")
def test_a_sweep_runs_all_tables_failures_and_is_repeated_only_where_unfinished(program: Path) -> None:
    assert call(program, "method.lbp_wht.order=3").returncode == 0
    alone = runs_of(program)
    done = call(program, "-m", "method.lbp_wht.order=2,5,8,3", "trainer.progress=false")
    assert done.returncode == 1
    # The job of the first command has the same folder and is not repeated.
    assert "ran 2" in done.stdout
    assert "ran 3" not in done.stdout
    assert len(runs_of(program)) == 2
    assert alone < runs_of(program)
    table = done.stdout[done.stdout.index("best accuracy") :]
    assert re.search(r"order=2 +20\.00 % +2\.00 M", table)
    assert re.search(r"order=3 +30\.00 % +3\.00 M", table)
    assert "2 of 4 jobs failed" in table
    written = re.search(r"Table of the sweep: (\S+\.csv), ", done.stdout)
    assert written
    lines = (program / written[1]).read_text().splitlines()
    assert len(lines) == 3
    assert "method.lbp_wht.order" in lines[0].split(",")
    assert "method.lbp_wht.order=5: order 5 is out of luck\n" in table
    assert "method.lbp_wht.order=8: killed by SIGKILL" in table


@pytest.mark.slow
def test_a_sweep_refuses_a_bad_job_first_and_ends_when_interrupted(program: Path) -> None:
    refused = call(program, "-m", "method.lbp_wht.order=2,3", "optim.lr=0.1,abc")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("optim.lr must be a number >= 1e-12, got abc.")
    shared = call(program, "-m", "optim.lr=0.1,0.10")
    assert shared.returncode == 2
    assert "would share the folder" in shared.stderr
    assert runs_of(program) == set()
    stopped = call(program, "-m", "method.lbp_wht.order=2,7,3")
    assert stopped.returncode == 130
    assert "ran 2" in stopped.stdout
    assert "ran 3" not in stopped.stdout


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="kills a job by a signal")
def test_jobs_at_the_same_time_have_the_same_outcomes(program: Path) -> None:
    done = call(program, "-m", "method.lbp_wht.order=2,5,8,3", "jobs=2", "trainer.progress=false")
    assert done.returncode == 1
    assert len(runs_of(program)) == 2
    assert "ran 2" not in done.stdout  # the output is in a file next to the run folder
    printed = [file.read_text() for file in (program / "outputs").rglob("*.log") if file.parent.name != ".hydra"]
    assert sorted(found for text in printed for found in re.findall(r"^ran \d", text, re.M)) == ["ran 2", "ran 3"]
    table = done.stdout[done.stdout.index("best accuracy") :]
    assert re.search(r"order=2 +20\.00 % ", table)
    assert re.search(r"order=3 +30\.00 % ", table)
    assert "method.lbp_wht.order=8: killed by SIGKILL" in table
    again = call(program, "-m", "method.lbp_wht.order=2,3", "jobs=2")
    assert again.returncode == 0
    assert again.stdout.count("already finished") == 2


@pytest.mark.slow
def test_a_mistake_in_a_job_of_hydra_s_own_launcher_is_one_clear_message(program: Path) -> None:
    """The job raises an exception, because Hydra's launchers cannot report a job that exits."""
    sweep = call(program, "-m", "hydra/launcher=basic", "method.lbp_wht.order=2,5")
    assert sweep.returncode == 2
    assert sweep.stderr.splitlines()[-2:] == ["order 5 is out of luck", "and explains it at length"]
    assert "Traceback" not in sweep.stderr
    assert "ran 2 " in sweep.stdout


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="kills a job by a signal")
def test_an_interrupted_job_ends_a_parallel_sweep(program: Path) -> None:
    stopped = call(program, "-m", "method.lbp_wht.order=7", "optim.lr=0.1,0.2,0.3,0.4,0.5,0.6", "jobs=2")
    assert stopped.returncode == 130
    assert stopped.stdout.count("started") < 6
    assert runs_of(program) == set()


@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
def test_ending_a_sweep_ends_its_job() -> None:
    code = (
        "import sys; from efficient_ft.cli import stopping; from efficient_ft.cli.hydra import processes\n"
        "stopping.answer_signals()\n"
        "processes.run([sys.executable, '-c',\n"
        "    'import os, time; print(os.getpid(), flush=True); time.sleep(60)'])"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as sweep:
        assert sweep.stdout is not None
        job = int(sweep.stdout.readline())
        sweep.send_signal(signal.SIGTERM)
        assert sweep.wait() == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(job, 0)


@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
def test_a_job_that_dies_in_any_way_is_a_failure_of_its_own() -> None:
    half = f"printf '{{\"re' > ${OUTCOME_FILE}; exit 1"
    failed = processes.run(["bash", "-c", half])
    assert failed.failure == "exit status 1"
    assert not failed.killed
    killed = processes.run(["bash", "-c", "kill -40 $$"])
    assert killed.failure == "killed by signal 40"
    assert killed.killed
    said = f'printf \'{{"reason": "Terminated."}}\' > ${OUTCOME_FILE}'
    for command in (f"{said}; exit 143", "exit 143"):
        assert processes.run(["bash", "-c", command]).killed
    assert not processes.run(["bash", "-c", f"{said}; exit 2"]).killed


#: A job that starts a child, prints both process ids and sleeps. With "ignore", it ignores SIGTERM.
_HANGS = """
import os, signal, subprocess, sys, time
if sys.argv[1] == "ignore":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[1] == "saves":
    signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(143)))
child = subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(300)"],
    stdout=subprocess.PIPE)
child.stdout.readline()
print(os.getpid(), child.pid, flush=True)
time.sleep(300)
"""


@pytest.mark.first(1, "exhaustive")
@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
@pytest.mark.parametrize("kind", ["sleeps", "saves", "ignore"])
def test_a_job_that_hangs_is_stopped_with_all_that_it_has_started(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "GRACE", 0.5)
    output = tmp_path / "job.log"
    ended = processes.run([sys.executable, "-c", _HANGS, kind], {}, output, timeout=2.0)
    first, *rest = output.read_text().splitlines()
    assert ended.failure is not None
    assert ended.failure.startswith("stopped after 2 s (job_timeout)")
    assert ("killed" in ended.failure) == (kind == "ignore")
    assert rest == (["saved"] if kind == "saves" else [])
    deadline = time.monotonic() + 60
    while any(map(_lives, map(int, first.split()))):
        assert time.monotonic() < deadline, "a process was left behind"
        time.sleep(0.05)


def _lives(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


#: Arguments that select the experiment written by `experiment`.
MINE = ("--config-dir", "own", "experiment=mine")


def experiment(folder: Path, *rows: str) -> None:
    """Write an experiment with the given rows."""
    file = folder / "own" / "experiment" / "mine.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"# @package _global_\nrows: {json.dumps(rows)}\n")


#: Writes the name of the first signal to a file, and ends after this signal.
_WAITS = """
import pathlib, signal, sys, time
def end(number, frame):
    pathlib.Path(sys.argv[1]).write_text(signal.Signals(number).name)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGINT, end)
pathlib.Path(sys.argv[2]).touch()
time.sleep(300)
"""


@pytest.mark.parametrize("terminal", [True, False])
def test_ctrl_c_ends_a_job_even_if_the_signal_does_not_reach_it(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "ASKED", 60.0 if terminal else 0.2)
    received, began = tmp_path / "received", tmp_path / "began"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes may ignore SIGINT

    def press() -> None:
        while not began.exists():
            time.sleep(0.01)
        if terminal:
            (child,) = processes._running
            child.send_signal(signal.SIGINT)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            processes.run([sys.executable, "-c", _WAITS, str(received), str(began)])
    finally:
        signal.signal(signal.SIGINT, before)
    thread.join()
    assert received.read_text() == ("SIGINT" if terminal else "SIGTERM")
    assert not processes._running


@pytest.mark.parametrize("kind", ["terminal", "process", "twice"])
def test_ctrl_c_ends_parallel_jobs_even_if_the_signal_does_not_reach_them(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With "process", only the sweep receives the signal. With "twice", the sweep receives the signal again."""
    monkeypatch.setattr(processes, "ASKED", 0.2 if kind == "process" else 60.0)
    slots = processes.Slots(2)
    monkeypatch.setattr(processes, "Slots", lambda count: slots)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes may ignore SIGINT
    [config] = composed("cost_only=true")
    began, received = ([tmp_path / f"{name}{number}" for number in range(2)] for name in ("began", "received"))

    def press() -> None:
        while not all(file.exists() for file in began):
            time.sleep(0.01)
        sweep = threading.main_thread().ident
        signal.pthread_kill(sweep, signal.SIGINT)
        while not slots._stopped:
            time.sleep(0.01)
        if kind == "terminal":
            for child in list(processes._running):
                child.send_signal(signal.SIGINT)
        if kind == "twice":
            signal.pthread_kill(sweep, signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            jobs.run_jobs(
                [jobs.Job((), str(number), tmp_path, config) for number in range(2)],
                lambda job: [sys.executable, "-c", _WAITS, str(received[int(job.title)]), str(began[int(job.title)])],
                parallel=2,
            )
    finally:
        signal.signal(signal.SIGINT, before)
    thread.join()
    expected = "SIGINT" if kind == "terminal" else "SIGTERM"
    assert [file.read_text() for file in received] == [expected, expected]
    assert not processes._running


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system cannot restrict a process to some CPUs")
def test_slots_divide_the_cpus_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 4, 8, 9})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with processes.Slots(2).taken() as environment:
        assert environment["OMP_NUM_THREADS"] == "2"


def test_a_job_that_ends_in_time_is_not_stopped() -> None:
    assert processes.run([sys.executable, "-c", ""], timeout=60.0).failure is None


@pytest.mark.exhaustive
@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
@pytest.mark.parametrize("parallel", [1, 2])
def test_a_sweep_goes_on_after_a_job_that_hangs(program: Path, parallel: int) -> None:
    experiment(program, "method.lbp_wht.order=9 job_timeout=3s", "method.lbp_wht.order=2 job_timeout=10min")
    done = call(program, "-m", *MINE, "trainer.progress=false", f"jobs={parallel}")
    assert done.returncode == 1, done.stderr
    table = done.stdout[done.stdout.index("best accuracy") :]
    assert re.search(r"order=9 .*: stopped after 3 s \(job_timeout\)\n", table)
    assert re.search(r"order=2 .* 20\.00 % ", table)
    # The timeout is not part of the run's identity, so the finished job is found.
    again = call(program, "-m", "method.lbp_wht.order=2,3", "job_timeout=1h")
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("already finished") == 1


def test_a_job_is_started_as_the_sweep_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "efficient-ft"
    script.touch()
    started = {
        (None, str(script)): [sys.executable, str(script)],
        (None, "efficient-ft.exe"): [sys.executable, "-m", "efficient_ft"],
        ("efficient_ft.__main__", "/somewhere/efficient_ft/__main__.py"): [sys.executable, "-m", "efficient_ft"],
    }
    for (name, argument), expected in started.items():
        spec = None if name is None else types.SimpleNamespace(name=name)
        monkeypatch.setitem(sys.modules, "__main__", types.SimpleNamespace(__spec__=spec))
        monkeypatch.setattr(sys, "argv", [argument, "-m"])
        assert jobs.this_program() == expected
    assert jobs.command("conf", "train", None, ["a=1", "jobs=2"])[-5:] == [
        "--config-path",
        "conf",
        "--config-name",
        "train",
        "a=1",
    ]


def test_finished_means_the_same_settings(tmp_path: Path) -> None:
    (config,) = composed()
    (other,) = composed("optim.lr=0.5")
    assert jobs.finished(tmp_path, config) is None
    (tmp_path / "results.json").write_text(json.dumps({**some_results(), "config": config.model_dump(mode="json")}))
    assert jobs.finished(tmp_path, config) is not None
    assert jobs.finished(tmp_path, other) is None
    for cut_short in ("", "{", "[]", "{}", json.dumps({**some_results(), "config": {"optim": 3}})):
        (tmp_path / "results.json").write_text(cut_short)
        assert jobs.finished(tmp_path, config) is None


def test_the_table_of_a_sweep_names_the_metric() -> None:
    def job(metric: str, best: float) -> jobs.Job:
        config = check(plain_config())
        return jobs.Job((), metric, Path("x"), config, {"accuracy": {"best": best, "metric": metric}})

    header, row = jobs.summary([job("r2", 0.5)]).splitlines()
    assert "best R²" in header
    assert "0.5000" in row
    header = jobs.summary([job("r2", 0.5), job("mean_average_precision", 0.5)]).splitlines()[0]
    assert "best R² or mAP" in header


def test_lines_of_parallel_jobs_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(io.StringIO):
        """Stream that lets another thread write after each write."""

        def write(self, text: str) -> int:
            count = super().write(text)
            time.sleep(0.002)
            return count

    [config] = composed("cost_only=true")
    monkeypatch.setattr(processes, "run", lambda *_: processes.Ended({"executed": {}}, None, "printed"))
    monkeypatch.setattr(jobs, "summary", lambda _: "table")
    written = Slow()
    monkeypatch.setattr(sys, "stdout", written)
    several = [jobs.Job((), f"job {number}", tmp_path, config) for number in range(8)]
    jobs.run_jobs(several, lambda job: [], parallel=4)
    expected = ["printed", "", "table"]
    for number in range(8):
        expected += [f"[{number + 1}/8] job {number}: {what}" for what in ("started", "finished")]
    lines = written.getvalue().splitlines()
    assert set(lines) == set(expected)
    assert len(lines) == len(expected) + 7


@pytest.mark.slow
def test_the_rows_of_an_experiment_are_a_sweep(program: Path) -> None:
    experiment(program, "method.lbp_wht.order=2", "method=lbp_wht_published method.lbp_wht.order=3")
    done = call(program, "-m", *MINE, "optim.lr=0.1,0.2", "trainer.progress=false")
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"^ran (\d) lr ([\d.]+)", done.stdout, re.M)) == [
        ("2", "0.1"), ("2", "0.2"), ("3", "0.1"), ("3", "0.2")]  # fmt: skip
    experiment(program, "method=lbp_wht method.lbp_wht.order=2")
    again = call(program, "-m", *MINE, "optim.lr=0.1,0.2", "jobs=2")
    assert again.stdout.count("already finished") == 2, again.stderr
    preset = call(program, "cost", "-m", "experiment=alast_layers", "model=deit_tiny", "jobs=3")
    assert preset.returncode == 0, preset.stderr
    assert len(re.findall(r"^ran None", preset.stdout, re.M)) == 8
    alone = call(program, "experiment=lbp_wht_ranks")
    assert alone.returncode == 2
    said = "experiment=lbp_wht_ranks: the experiment defines several runs. Add -m to start all runs."
    assert alone.stderr.startswith(said)
