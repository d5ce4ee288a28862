"""Writes job files for several hosts: a script for Slurm, a list of objects for Kubernetes.

Each host runs one launcher, `tfparallel launch --nnodes`, which starts that host's workers and
meets the others. A preempted job saves its state, exits with code 75 (`cluster/preemption.py`), and
resumes when it is restarted:

    Slurm        the script requeues the job
    Kubernetes   the Job's failure policy ignores such a pod, and creates another
"""

import dataclasses
import json
import math
import re
import secrets
import shlex
from collections.abc import Sequence
from typing import Any

from tfparallel.cluster.preemption import TRY_AGAIN

__all__ = ["JobFile", "job_name_of", "kubernetes_objects", "slurm_script"]

_PORT = 29_500  # Of a pod, which has its own address.
_FIRST_PORT, _NUM_PORTS = 13_000, 16_000  # Of a Slurm job, which may share its nodes.
# A Service's name begins with a letter.
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?")
_VOLUME = re.compile(r"([a-z0-9][a-z0-9.-]*):(/[^:]+)")
_ENDS_SECONDS = 15  # For the launcher to end, beyond the workers' grace period.
_MOST_SECONDS = 65_535  # Between Slurm's signal and its time limit.
# With MIN:MAX, the addresses of all pods are one argument, and Linux limits that to 128 KiB.
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
_SLURM_PORT = f"port=$(({_FIRST_PORT} + SLURM_JOB_ID % {_NUM_PORTS}))\n"
_SLURM_NODES = """\
names=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
nodes=$(sed "s/$/:$port/" <<< "$names" | paste -sd,)

"""
_SLURM_NODE_0 = """\
node_0=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

"""


@dataclasses.dataclass(frozen=True)
class JobFile:
    """A job to submit.

    Attributes:
        name: The job's name: lower-case letters, digits and "-".
        command: The command of each worker.
        launch_flags: Further flags of `tfparallel launch`.
        nnodes: The maximum number of hosts.
        min_nnodes: The minimum number of hosts; None if the job needs all.
        grace_seconds: How long the workers have to save their state.
        gpus_per_node: GPUs per host; 0 for none.
        sbatch_args: Further options of sbatch, such as "--partition=long".
        image: The container image, with the program and tfparallel installed; for Kubernetes.
        volume: `CLAIM:/PATH`, a volume claim and its mount path in the pods; for Kubernetes.
        token: The launchers' shared secret; for Kubernetes. The Slurm script creates its own.

    Raises:
        ValueError: If a field is invalid; all problems in one message.
    """

    name: str
    command: Sequence[str]
    launch_flags: Sequence[str] = ()
    nnodes: int = 1
    min_nnodes: int | None = None
    grace_seconds: float = 60.0
    gpus_per_node: int = 0
    sbatch_args: Sequence[str] = ()
    image: str | None = None
    volume: str | None = None
    token: str = dataclasses.field(default_factory=lambda: secrets.token_hex(16), repr=False)

    @property
    def has_several_hosts(self) -> bool:
        """Whether there is more than one launcher, which must meet."""
        return self.nnodes > 1 or self.min_nnodes is not None

    def __post_init__(self):
        problems = []
        if not _NAME.fullmatch(self.name):
            problems.append(
                "--job_name must have at most 52 characters, lowercase letters, digits and '-', "
                f"start with a letter and not end with '-'. Received: --job_name={self.name}."
            )
        if self.nnodes > _MOST_NODES:
            problems.append(
                f"--nnodes must be at most {_MOST_NODES} with --emit. Received: {self.nnodes}."
            )
        longest = _MOST_SECONDS - _ENDS_SECONDS
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
        if self.volume is not None and not _VOLUME.fullmatch(self.volume):
            problems.append(f"--volume must be CLAIM:/PATH. Received: --volume={self.volume}.")
        if problems:
            raise ValueError("\n".join(problems))


def job_name_of(command: Sequence[str]) -> str:
    """Returns a job name derived from the workers' program."""
    files = [part for part in command if part.endswith(".py")] or [command[0]]
    stem = files[0].rpartition("/")[2].removesuffix(".py").lower()
    name = re.sub(r"[^a-z0-9]+", "-", stem).strip("-")
    if not name[:1].isalpha():
        name = f"train-{name}"
    return name[:52].strip("-")


def slurm_script(job: JobFile) -> str:
    """Returns a script for `sbatch`."""
    seconds = math.ceil(job.grace_seconds + _ENDS_SECONDS)
    options = [
        f"--job-name={job.name}",
        f"--nodes={job.nnodes if job.min_nnodes is None else f'{job.min_nnodes}-{job.nnodes}'}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={job.gpus_per_node}"] if job.gpus_per_node else []),
        "--requeue",
        "--open-mode=append",
        f"--signal=USR1@{seconds}",
        # A failed node must not end the others' launchers.
        *([] if job.min_nnodes is None else ["--no-kill"]),
        *job.sbatch_args,
    ]
    # Since Slurm 22.05, srun does not inherit --cpus-per-task of sbatch, and would use one core.
    srun = 'srun ${SLURM_CPUS_PER_TASK:+"--cpus-per-task=$SLURM_CPUS_PER_TASK"}'
    setup = hosts = ""
    if job.has_several_hosts:
        srun += " --export=ALL"  # Passes the token, also at sites that set SBATCH_EXPORT=NONE.
        setup = _SLURM_TOKEN + _SLURM_PORT
        if job.min_nnodes is None:
            setup += _SLURM_NODE_0
            hosts = f' --nnodes={job.nnodes} --rdzv_endpoint="$node_0:$port"'
        else:
            srun += " --no-kill --kill-on-bad-exit=0"
            setup += _SLURM_NODES
            hosts = f' --nnodes={job.min_nnodes}:{job.nnodes} --rdzv_endpoint="$nodes"'
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


def kubernetes_objects(job: JobFile) -> str:
    """Returns a headless Service, an indexed Job and, for several hosts, a Secret, as JSON.

    Raises:
        ValueError: If there is no image.
    """
    if not job.image:
        raise ValueError(
            "--emit=kubernetes needs --image=NAME, a container image that contains the program and "
            "tfparallel. Received: none."
        )
    labels = {"app": job.name}
    # Its DNS names let pods find each other before they are ready.
    service = {"clusterIP": "None", "selector": labels, "publishNotReadyAddresses": True}
    command = _launch_in_a_pod(job)
    container: dict[str, Any] = {"name": "launch", "image": job.image, "command": command}
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "subdomain": job.name,
        "terminationGracePeriodSeconds": math.ceil(job.grace_seconds + _ENDS_SECONDS),
        "containers": [container],
    }
    if job.gpus_per_node:
        container["resources"] = {"limits": {"nvidia.com/gpu": str(job.gpus_per_node)}}
    if job.volume:
        claim, path = _VOLUME.fullmatch(job.volume).groups()
        container["volumeMounts"] = [{"name": "data", "mountPath": path}]
        pod["volumes"] = [{"name": "data", "persistentVolumeClaim": {"claimName": claim}}]
    objects = [_object("v1", "Service", job.name, labels, spec=service)]
    if job.has_several_hosts:
        name = f"{job.name}-token"
        objects.append(_object("v1", "Secret", name, labels, stringData={"token": job.token}))
        source = {"secretKeyRef": {"name": name, "key": "token"}}
        container["env"] = [{"name": "TFPARALLEL_JOB_TOKEN", "valueFrom": source}]
    rules = [
        {
            "action": "Ignore",
            "onExitCodes": {"containerName": "launch", "operator": "In", "values": [TRY_AGAIN]},
        },
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    spec = {
        "completionMode": "Indexed",
        "completions": job.nnodes,
        "parallelism": job.nnodes,
        # In an elastic job, a host that returns after a failure counts as a new one.
        "backoffLimit": 0 if job.min_nnodes is None else 3 * job.nnodes,
        "podFailurePolicy": {"rules": rules},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    objects.append(_object("batch/v1", "Job", job.name, labels, spec=spec))
    # JSON is valid YAML, and its strings cannot be misread as numbers.
    manifest = {"apiVersion": "v1", "kind": "List", "items": objects}
    return json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"


def _object(api, kind, name, labels, **content):
    metadata = {"name": name, "labels": labels}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **content}


def _launch_in_a_pod(job):
    hosts = []
    if job.min_nnodes is not None:
        pods = [f"{job.name}-{index}.{job.name}:{_PORT}" for index in range(job.nnodes)]
        hosts = [f"--nnodes={job.min_nnodes}:{job.nnodes}", f"--rdzv_endpoint={','.join(pods)}"]
    elif job.nnodes > 1:
        hosts = [f"--nnodes={job.nnodes}", f"--rdzv_endpoint={job.name}-0.{job.name}:{_PORT}"]
    if job.has_several_hosts:
        hosts.append(f"--job_name={job.name}")
    flags = [*job.launch_flags, f"--grace_seconds={job.grace_seconds:g}"]
    command = ["tfparallel", "launch", *hosts, *flags, "--", *job.command]
    # Kubernetes expands $(NAME), and reads $$ as a literal $.
    return [part.replace("$", "$$") for part in command]


def _is_utf_8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # The command line has bytes that are not text.
        return False
    return True
