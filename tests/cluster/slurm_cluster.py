"""A Slurm cluster of two nodes on this machine: the real daemons, from Debian's packages.

apt-get install slurmctld slurmd slurm-client munge
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tfparallel.cluster.ports import free_ports

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "squeue", "unshare")
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
_DEADLINE_SECONDS = 30

_CONFIGURATION = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SwitchType=switch/none
MpiDefault=none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd_%n.log
ReturnToService=2
KillWait=5
MailProg=/bin/true
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 State=UNKNOWN
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 State=UNKNOWN
PartitionName=main Nodes=node[1-2] Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Why there can be no such cluster here; None if there can."""
    missing = [tool for tool in TOOLS if shutil.which(tool, path=_PATH) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    return None if os.geteuid() == 0 else "Slurm's daemons need root"


@contextlib.contextmanager
def cluster() -> Iterator[dict[str, str]]:
    """Runs the daemons; yields the environment in which Slurm's commands find them."""
    folder = Path(tempfile.mkdtemp(prefix="slurm_"))  # A socket's path must be short.
    environment = {**os.environ, "PATH": _PATH, "SLURM_CONF": str(folder / "slurm.conf")}
    host = socket.gethostname().partition(".")[0]
    for name in ("munge", "state"):
        (folder / name).mkdir(mode=0o700)
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    configuration = _CONFIGURATION.format(folder=folder, host=host, ports=free_ports(3))
    (folder / "slurm.conf").write_text(configuration)
    (folder / "hosts").write_text(f"127.0.0.1 localhost node1 node2 {host}\n")
    munge = [f"--{name}-file={folder}/munge/{name}" for name in ("pid", "log", "seed")]
    # What jobs take for /etc/hosts names the nodes, in the daemons' own view of the files.
    named = f"mount --bind {folder}/hosts /etc/hosts"
    try:
        for command in (
            ["munged", "--force", f"--key-file={key}", f"--socket={folder}/munge/socket", *munge],
            ["slurmctld"],
            ["unshare", "--mount", "sh", "-c", f"{named} && exec slurmd -N node1"],
            ["unshare", "--mount", "sh", "-c", f"{named} && exec slurmd -N node2"],
        ):
            subprocess.run(command, env=environment, check=True, timeout=_DEADLINE_SECONDS)
        _wait_for_nodes(environment)
        yield environment
    finally:
        for file in [*folder.glob("slurmd_*.pid"), folder / "slurmctld.pid", folder / "munge/pid"]:
            _end(file)
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for_nodes(environment):
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while time.monotonic() < deadline:
        done = subprocess.run(
            ["sinfo", "--noheader", "--states=idle", "--format=%D"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_DEADLINE_SECONDS,
        )
        if done.stdout.strip() == "2":
            return
        time.sleep(0.2)
    raise RuntimeError(f"Slurm's nodes are not idle after {_DEADLINE_SECONDS} s: {done}")


def _end(file):
    if not file.exists():
        return
    pid = int(file.read_text())
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            os.kill(pid, 0)
            time.sleep(0.05)
        os.kill(pid, signal.SIGKILL)
