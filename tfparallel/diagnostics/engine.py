"""Examines the engine that started this process, for the doctor: Kubernetes or Slurm.

Each is recognized, and examined, by what it gives to a process: variables, files and mounts.

References:
    Kubernetes: https://kubernetes.io/docs/concepts/services-networking/dns-pod-service/, "Pod's
        hostname and subdomain fields"
    Slurm: https://slurm.schedmd.com/srun.html, "OUTPUT ENVIRONMENT VARIABLES"
"""

import contextlib
import os
from collections.abc import Iterator, Mapping

from tfparallel.chatter import has_nvidia_gpu
from tfparallel.cluster import slurm
from tfparallel.cluster.cluster_spec import Cluster
from tfparallel.cluster.environment import available_cores
from tfparallel.cluster.launcher_env import is_slurm_step
from tfparallel.diagnostics.report import Finding
from tfparallel.texts import counted

_SHARED_MEMORY = "/dev/shm"
_MIB = 2**20
_DEFAULT_SHARED_MIB = 64  # Of a container, unless its pod says otherwise.
_MOUNT = "mount an emptyDir of medium Memory at /dev/shm, as `tfparallel launch --emit` does"


def examine_engine(cluster: Cluster) -> Iterator[Finding]:
    """Examines what Kubernetes or Slurm gave to this process; nothing elsewhere.

    Args:
        cluster: The job as this process knows it.
    """
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        yield _examine_pod(cluster)
        yield from _examine_pod_name(cluster)
        yield _examine_shared_memory(cluster.num_local_workers)
    if "SLURM_JOB_ID" in os.environ:
        yield _examine_slurm_tasks(os.environ)
        yield from _examine_slurm_cores(os.environ)


def _examine_pod(cluster: Cluster) -> Finding:
    index = os.environ.get("JOB_COMPLETION_INDEX")
    if index is not None:
        of_kubeflow = "PET_NNODES" in os.environ
        kind = "a TrainJob" if of_kubeflow else "an indexed Job or a JobSet"
        return Finding("pod", "ok", f"number {index} of {kind}")
    if cluster.address is not None:
        return Finding("pod", "ok", f"{cluster.source} names its job")
    return Finding(
        "pod",
        "warn",
        "it has neither TF_CONFIG nor an index: it trains alone, and so would each of its replicas",
        "for several pods, let `tfparallel launch --emit=jobset` write the file",
    )


def _examine_pod_name(cluster: Cluster) -> Iterator[Finding]:
    """Others find a pod by POD.SERVICE, which kubelet writes into /etc/hosts if there is one."""
    num_pods = os.environ.get("TFPARALLEL_NUM_WORKERS", os.environ.get("PET_NNODES", ""))
    if "JOB_COMPLETION_INDEX" not in os.environ or num_pods == "1":
        return
    name, names = os.environ.get("HOSTNAME", ""), []
    with contextlib.suppress(OSError), open("/etc/hosts") as file:
        names = [word for line in file for word in line.partition("#")[0].split()[1:]]
    if name in names and not any(each.startswith(f"{name}.") for each in names):
        is_one_of_many = num_pods.isdecimal() or cluster.num_workers > 1
        yield Finding(
            "pod name",
            "broken" if is_one_of_many else "warn",
            f"{name} belongs to no Service: other pods cannot find it by name",
            "set spec.subdomain of the pods to the name of a headless Service",
        )


def _examine_shared_memory(num_local_workers: int) -> Finding:
    try:
        status = os.statvfs(_SHARED_MEMORY)
        is_writable = os.access(_SHARED_MEMORY, os.W_OK)
    except OSError:
        is_writable = False
    if not is_writable:
        text = f"{_SHARED_MEMORY} cannot be written: MPI cannot start"
        return Finding("shared memory", "broken", text, _MOUNT)
    size_mib = status.f_blocks * status.f_frsize / _MIB
    free_mib = status.f_bavail * status.f_frsize / _MIB
    # Measured: MPICH maps about 1 MiB per worker, and gets by without the rest.
    if free_mib < num_local_workers + 1:
        text = (
            f"{free_mib:.3g} MiB free at {_SHARED_MEMORY}: MPI needs {num_local_workers + 1} "
            "MiB for the workers of this pod, and SIGBUS kills them"
        )
        return Finding("shared memory", "broken", text, _MOUNT)
    text = f"{size_mib:.0f} MiB at {_SHARED_MEMORY}"
    if size_mib <= _DEFAULT_SHARED_MIB and has_nvidia_gpu():
        return Finding("shared memory", "warn", f"{text}: too little for NCCL between GPUs", _MOUNT)
    return Finding("shared memory", "ok", text)


def _examine_slurm_tasks(environ: Mapping[str, str]) -> Finding:
    job = f"job {environ['SLURM_JOB_ID']}"
    num_nodes = _number(environ, "SLURM_JOB_NUM_NODES", "SLURM_NNODES") or 1
    num_tasks = max(_number(environ, "SLURM_NTASKS") or 1, num_nodes)
    size = counted(num_tasks, "task") if num_tasks > num_nodes else counted(num_nodes, "node")
    if not is_slurm_step(environ):
        if num_tasks == 1:
            return Finding("Slurm", "ok", f"{job}, on one node")
        return Finding(
            "Slurm",
            "warn",
            f"{job} has {size}, but this shell is one process on the first node: what it starts "
            "trains alone",
            "start the program with srun, or let `tfparallel launch --emit=slurm` write the script",
        )
    num_in_step = _number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") or 1
    if num_in_step == 1 and num_tasks > 1:
        return Finding(
            "Slurm",
            "warn",
            f"{job} has {size}, but this step has one task, which trains alone",
            f"srun --ntasks={num_tasks}",
        )
    index = _number(environ, "SLURM_PROCID") or 0
    return Finding("Slurm", "ok", f"{job}, task {index} of {num_in_step}")


def _examine_slurm_cores(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Finds a step that uses few of the job's cores; since 22.05 srun ignores sbatch's count."""
    num_cores = len(available_cores())
    num_intended = _number(environ, "SLURM_CPUS_PER_TASK")
    try:
        on_nodes = slurm.expand_tasks_per_node(environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
        tasks = slurm.expand_tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    except ValueError:
        on_nodes = tasks = []
    if num_intended is None and on_nodes and tasks and is_slurm_step(environ):
        num_intended = min(on_nodes) // max(tasks)
    if num_intended is not None and num_cores < num_intended:
        yield Finding(
            "cores of the task",
            "warn",
            f"this task may use {num_cores} of its {counted(num_intended, 'core')}",
            f"srun --cpus-per-task={num_intended}",
        )


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    """Returns the first of these variables that is a whole number."""
    for name in names:
        if environ.get(name, "").isdecimal():
            return int(environ[name])
    return None
