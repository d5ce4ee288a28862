"""A job to submit to a scheduler, and the script that submits it to Slurm.

Each host runs one launcher, `tfparallel launch --nnodes`, which starts that host's workers and
meets the others. A preempted job saves its state, exits with code 75 (`cluster/preemption.py`), and
resumes when it is restarted:

    Slurm        the script requeues the job
    Kubernetes   the Job's failure policy ignores such a pod, and creates another
                 (`cluster/kubernetes_files.py`)
"""

import dataclasses
import math
import re
import secrets
import shlex
from collections.abc import Sequence

from tfparallel.cluster.preemption import TRY_AGAIN

_FIRST_PORT, _NUM_PORTS = 13_000, 16_000  # Of a Slurm job, which may share its nodes.
# Kubernetes appends to it in the name of a pod, as in NAME-node-0-999-abcde, and allows 63
# characters. A Service's name begins with a letter.
_MOST_CHARACTERS = 46
_NAME = re.compile(rf"[a-z]([a-z0-9-]{{0,{_MOST_CHARACTERS - 2}}}[a-z0-9])?")
_QUEUE = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")
VOLUME = re.compile(r"([a-z0-9][a-z0-9.-]*):(/[^:]+)")
ENDS_SECONDS = 15  # For the launcher to end, beyond the workers' grace period.
_MOST_SECONDS = 65_535  # Between Slurm's signal and its time limit.
_MOST_NODES = 1_000

_SLURM_SCRIPT = """\
#!/bin/bash
{options}
#
# A launcher on each node starts the workers there. Before the time limit, and when the
# job is preempted, the workers save their state and exit with code {again}.
set -u

{setup}{srun} tfparallel launch{hosts} \\
  {flags} \\
  -- {command}
code=$?

if [ "$code" -eq {again} ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""
# A new token for each start, never written to a file: launchers read it from the environment.
_SLURM_TOKEN = """\
TFPARALLEL_JOB_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')
export TFPARALLEL_JOB_TOKEN

"""
_SLURM_NODE_0 = f"""\
port=$(({_FIRST_PORT} + SLURM_JOB_ID % {_NUM_PORTS}))
node_0=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

"""


@dataclasses.dataclass(frozen=True)
class JobFile:
    """A job to submit.

    Attributes:
        name: The job's name: lower-case letters, digits and "-".
        command: The command of each worker.
        launch_flags: Further flags of `tfparallel launch`.
        nnodes: The number of hosts.
        grace_seconds: How long the workers have to save their state.
        gpus_per_node: GPUs per host; 0 for none.
        sbatch_args: Further options of sbatch, such as "--partition=long".
        image: The container image, with the program and tfparallel installed; for Kubernetes.
        volume: `CLAIM:/PATH`, a volume claim and its mount path in the pods; for Kubernetes.
        queue: Kueue's local queue; for Kubernetes.
        max_restarts: How often a JobSet recreates all pods after a failure.
        token: The launchers' shared secret; for Kubernetes. The Slurm script creates its own.

    Raises:
        ValueError: If a field is invalid; all problems in one message.
    """

    name: str
    command: Sequence[str]
    launch_flags: Sequence[str] = ()
    nnodes: int = 1
    grace_seconds: float = 60.0
    gpus_per_node: int = 0
    sbatch_args: Sequence[str] = ()
    image: str | None = None
    volume: str | None = None
    queue: str | None = None
    max_restarts: int = 0
    token: str = dataclasses.field(default_factory=lambda: secrets.token_hex(16), repr=False)

    @property
    def has_several_hosts(self) -> bool:
        """Whether there is more than one launcher, which must meet."""
        return self.nnodes > 1

    def __post_init__(self):
        problems = []
        if not _NAME.fullmatch(self.name):
            problems.append(
                f"--job_name must have at most {_MOST_CHARACTERS} characters, lowercase letters, "
                "digits and '-', start with a letter and not end with '-'. Received: "
                f"--job_name={self.name}."
            )
        if self.nnodes > _MOST_NODES:
            problems.append(
                f"--nnodes must be at most {_MOST_NODES} with --emit. Received: {self.nnodes}."
            )
        longest = _MOST_SECONDS - ENDS_SECONDS
        if not 0 <= self.grace_seconds <= longest:
            problems.append(
                f"--grace_seconds must be from 0 to {longest} with --emit. Received: "
                f"--grace_seconds={self.grace_seconds}."
            )
        if self.gpus_per_node < 0:
            problems.append(
                f"--gpus_per_node must not be negative. Received: {self.gpus_per_node}."
            )
        problems += [
            f"--sbatch_args must begin with '-', as sbatch's options do. Received: {argument}."
            for argument in self.sbatch_args
            if not argument.startswith("-") or "\n" in argument
        ]
        texts = [*self.command, *self.launch_flags, *self.sbatch_args, self.image or ""]
        problems += [
            f"A job file is UTF-8 text, and so must be everything in it. Received: {text!r}."
            for text in texts
            if not _is_utf_8(text)
        ]
        if self.volume is not None and not VOLUME.fullmatch(self.volume):
            problems.append(f"--volume must be CLAIM:/PATH. Received: --volume={self.volume}.")
        if self.queue is not None and not _QUEUE.fullmatch(self.queue):
            problems.append(
                "--queue must be the name of a LocalQueue: at most 63 lowercase letters, digits, "
                f"'-' and '.'. Received: --queue={self.queue}."
            )
        if problems:
            raise ValueError("\n".join(problems))


def job_name_of(command: Sequence[str]) -> str:
    """Returns a job name derived from the workers' program."""
    files = [part for part in command if part.endswith(".py")] or [command[0]]
    stem = files[0].rpartition("/")[2].removesuffix(".py").lower()
    name = re.sub(r"[^a-z0-9]+", "-", stem).strip("-")
    if not name[:1].isalpha():
        name = f"train-{name}"
    return name[:_MOST_CHARACTERS].strip("-")


def slurm_script(job: JobFile) -> str:
    """Returns a script for `sbatch`."""
    seconds = math.ceil(job.grace_seconds + ENDS_SECONDS)
    options = [
        f"--job-name={job.name}",
        f"--nodes={job.nnodes}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={job.gpus_per_node}"] if job.gpus_per_node else []),
        "--requeue",
        "--open-mode=append",
        f"--signal=USR1@{seconds}",
        *job.sbatch_args,
    ]
    # Since Slurm 22.05, srun does not inherit --cpus-per-task of sbatch, and would use one core.
    srun = 'srun ${SLURM_CPUS_PER_TASK:+"--cpus-per-task=$SLURM_CPUS_PER_TASK"}'
    setup = hosts = ""
    if job.has_several_hosts:
        srun += " --export=ALL"  # Passes the token, also at sites that set SBATCH_EXPORT=NONE.
        setup = _SLURM_TOKEN + _SLURM_NODE_0
        # A job submitted with `--nodes=2-4` may have another size after each requeue.
        hosts = ' --nnodes="$SLURM_JOB_NUM_NODES" --rdzv_endpoint="$node_0:$port"'
        hosts += f' --job_name="{job.name}-$SLURM_JOB_ID"'
    return _SLURM_SCRIPT.format(
        options="\n".join(f"#SBATCH {option}" for option in options),
        again=TRY_AGAIN,
        setup=setup,
        srun=srun,
        hosts=hosts,
        flags=shlex.join([*job.launch_flags, f"--grace_seconds={job.grace_seconds:g}"]),
        command=shlex.join(job.command),
    )


def _is_utf_8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # The command line has bytes that are not text.
        return False
    return True
