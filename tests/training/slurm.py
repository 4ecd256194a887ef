"""A Slurm cluster with two nodes on this machine, from the packages slurm-wlm and munge.

A requeued job starts after its credential has expired. The default limits for the start of a job are too short for a
busy machine.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sinfo", "scontrol", "squeue", "scancel", "srun")

_CONF = """
ClusterName=trial
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={sockets}/munge.socket,cred_expire=30
StateSaveLocation={folder}/state
SlurmdSpoolDir={sockets}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SchedulerType=sched/builtin
ReturnToService=2
BatchStartTimeout=120
MessageTimeout=60
TCPTimeout=30
KillWait=10
MpiDefault=none
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]}
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]}
PartitionName=trial Nodes=node1,node2 Default=YES MaxTime=INFINITE State=UP
"""


@contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Start a cluster with its files in `folder`, and yield the environment variables that Slurm's commands need."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"needs Slurm (apt-get install slurm-wlm munge): there is no {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("needs root: the daemons of Slurm start jobs of other users")
    (folder / "state").mkdir(parents=True)
    key, conf = folder / "munge.key", folder / "slurm.conf"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    # By default, Lightning uses port 15001 for the first job of each cluster, even if the port is in use.
    environment = {"SLURM_CONF": str(conf), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_ports(1)[0])}
    with ExitStack() as running:
        # A socket path has at most 107 bytes. Slurm holds a job with a longer path and prints no message.
        sockets = running.enter_context(tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp"))
        for name in ("node1", "node2"):
            (Path(sockets) / name).mkdir()
        host = socket.gethostname()
        conf.write_text(_CONF.format(host=host, folder=folder, sockets=sockets, ports=_free_ports(3)))
        munge = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={sockets}/munge.socket",
                 *(f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed"))]  # fmt: skip
        for command in (munge, ["slurmctld", "-D"], ["slurmd", "-D", "-N", "node1"], ["slurmd", "-D", "-N", "node2"]):
            log = running.enter_context(open(folder / f"{command[0]}{command[-1]}.log".replace("/", "_"), "w"))
            daemon = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **environment})
            running.callback(daemon.wait)
            running.callback(daemon.terminate)
            time.sleep(1)
        for _ in range(60):
            if "2 idle" in _said(["sinfo", "-h", "-o", "%D %t"], environment):
                break
            time.sleep(1)
        else:
            pytest.fail("\n".join(log.read_text() for log in folder.glob("*.log")))
        yield environment


def _free_ports(count: int) -> list[int]:
    with ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def _said(command: list[str], environment: dict[str, str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}).stdout
