"""Files that submit a job of several hosts: a script for Slurm, a list of objects for Kubernetes.

Each host runs one launcher, `tfparallel launch --nnodes`, which starts the workers of that host and
meets the others. A job that is told to end saves its state and ends with code 75
(`cluster/preemption.py`), and goes on when it is started again:

    Slurm        the script puts itself back into the queue
    Kubernetes   the Job's failure policy does not count such a pod, and makes another
"""

import dataclasses
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from tfparallel.cluster.preemption import TRY_AGAIN

__all__ = ["JobFile", "job_name_of", "kubernetes_objects", "slurm_script"]

_PORT = 29_500  # Of a pod, which has an address of its own.
_FIRST_PORT, _NUM_PORTS = 13_000, 16_000  # Of a Slurm job, which may share its nodes.
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?")
_VOLUME = re.compile(r"([a-z0-9][a-z0-9.-]*):(/.+)")
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9./]*")
_NO_STRINGS = {"true", "false", "yes", "no", "on", "off", "y", "n", "null"}
_ENDS_SECONDS = 15  # What a launcher takes to end, beside the workers' grace.


@dataclasses.dataclass(frozen=True)
class JobFile:
    """What is submitted.

    Attributes:
        name: Of the job: lower-case letters, digits and "-".
        command: What each worker runs.
        launch_flags: Further flags of `tfparallel launch`.
        nnodes: How many hosts, at most.
        min_nnodes: With how many the job can run; None if it needs all.
        grace_seconds: What the workers have to save their state.
        gpus_per_node: GPUs of each host; 0 for none.
        sbatch_args: Further options of sbatch, such as "--partition=long".
        image: The container's, with the program and tfparallel in it; for Kubernetes.
        volume: `CLAIM:/PATH`, a claim of a volume, and where pods see it; for Kubernetes.

    Raises:
        ValueError: If a field cannot be; with all that is wrong.
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

    def __post_init__(self):
        problems = []
        if not _NAME.fullmatch(self.name):
            problems.append(
                "--job_name must be of at most 52 lower-case letters, digits and '-', and begin "
                f"and end with none of the last. Received: --job_name={self.name}."
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
        if self.volume is not None and not _VOLUME.fullmatch(self.volume):
            problems.append(f"--volume must be CLAIM:/PATH. Received: --volume={self.volume}.")
        if problems:
            raise ValueError("\n".join(problems))


def job_name_of(command: Sequence[str]) -> str:
    """Returns a job's name, of the program that its workers run."""
    files = [part for part in command if part.endswith(".py")] or [command[0]]
    stem = files[0].rpartition("/")[2].removesuffix(".py").lower()
    return re.sub(r"[^a-z0-9]+", "-", stem).strip("-")[:52].strip("-") or "train"


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
        # A node that fails does not take the others' launchers with it.
        *([] if job.min_nnodes is None else ["--no-kill"]),
        *job.sbatch_args,
    ]
    flags = [*job.launch_flags, f"--grace_seconds={job.grace_seconds:g}"]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in options),
        "#",
        "# A launcher on each node starts the workers there. Before the time limit, and when the",
        "# job is to make room, the workers save their state and end with code 75.",
        "set -u",
        "",
    ]
    hosts, srun = "", "srun"
    if job.min_nnodes is not None:
        srun = "srun --no-kill --kill-on-bad-exit=0"
        lines += [
            f"port=$(({_FIRST_PORT} + SLURM_JOB_ID % {_NUM_PORTS}))",
            'names=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
            'nodes=$(sed "s/$/:$port/" <<< "$names" | paste -sd,)',
            "",
        ]
        hosts = f' --nnodes={_range(job)} --rdzv_endpoint="$nodes"'
    elif job.nnodes > 1:
        lines += [
            'node_0=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            f"port=$(({_FIRST_PORT} + SLURM_JOB_ID % {_NUM_PORTS}))",
            "",
        ]
        hosts = f' --nnodes={job.nnodes} --rdzv_endpoint="$node_0:$port"'
    lines += [
        f"{srun} tfparallel launch{hosts} \\",
        f"  {shlex.join(flags)} \\",
        f"  -- {shlex.join(job.command)}",
        "code=$?",
        "",
        f'if [ "$code" -eq {TRY_AGAIN} ]; then',
        '  scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def kubernetes_objects(job: JobFile) -> str:
    """Returns a headless Service and an indexed Job, in YAML.

    Raises:
        ValueError: If there is no image.
    """
    if not job.image:
        raise ValueError(
            "--emit=kubernetes needs --image=NAME, a container image with the program and "
            "tfparallel in it. Received: none."
        )
    labels = {"app": job.name}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.name, "labels": labels},
        # Pods find each other before they are ready, by the names that it gives them.
        "spec": {"clusterIP": "None", "selector": labels, "publishNotReadyAddresses": True},
    }
    container: dict[str, Any] = {
        "name": "launch",
        "image": job.image,
        "command": _launch_in_a_pod(job),
    }
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
    rules = [
        {
            "action": "Ignore",
            "onExitCodes": {"containerName": "launch", "operator": "In", "values": [TRY_AGAIN]},
        },
        {
            "action": "Ignore",
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
        },
    ]
    spec = {
        "completionMode": "Indexed",
        "completions": job.nnodes,
        "parallelism": job.nnodes,
        # A host that has failed and comes again is a new one, where their number may change.
        "backoffLimit": 0 if job.min_nnodes is None else 3 * job.nnodes,
        "podFailurePolicy": {"rules": rules},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    indexed = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job.name, "labels": labels},
        "spec": spec,
    }
    return "---\n".join("\n".join(_yaml(each)) + "\n" for each in (service, indexed))


def _launch_in_a_pod(job):
    hosts = []
    if job.min_nnodes is not None:
        pods = [f"{job.name}-{index}.{job.name}:{_PORT}" for index in range(job.nnodes)]
        hosts = [f"--nnodes={_range(job)}", f"--rdzv_endpoint={','.join(pods)}"]
    elif job.nnodes > 1:
        hosts = [f"--nnodes={job.nnodes}", f"--rdzv_endpoint={job.name}-0.{job.name}:{_PORT}"]
    flags = [*job.launch_flags, f"--grace_seconds={job.grace_seconds:g}"]
    return ["tfparallel", "launch", *hosts, *flags, "--", *job.command]


def _range(job):
    return f"{job.min_nnodes}:{job.nnodes}"


def _yaml(value: Any, indent: str = "") -> list[str]:
    """The lines of a value; a string that YAML may not read as one is quoted, as in JSON."""
    lines = []
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if isinstance(inner, Mapping | list):
                lines += [f"{indent}{_plain(key)}:", *_yaml(inner, indent + "  ")]
            else:
                lines.append(f"{indent}{_plain(key)}: {_plain(inner)}")
        return lines
    for inner in value:
        if isinstance(inner, Mapping):
            first, *rest = _yaml(inner, indent + "  ")
            lines += [f"{indent}- {first.strip()}", *rest]
        else:
            lines.append(f"{indent}- {_plain(inner)}")
    return lines


def _plain(value: Any) -> str:
    is_word = isinstance(value, str) and _WORD.fullmatch(value) is not None
    return value if is_word and value.lower() not in _NO_STRINGS else json.dumps(value)
