"""Examines this host for the doctor: free disk and memory, cores, and the limits of its job.

And the engine that started this process, Kubernetes or Slurm: each is recognized, and examined, by
what it gives to a process: variables, files and mounts.

References:
    Kubernetes: https://kubernetes.io/docs/concepts/services-networking/dns-pod-service/, "Pod's
        hostname and subdomain fields"
    Slurm: https://slurm.schedmd.com/srun.html, "OUTPUT ENVIRONMENT VARIABLES"
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping

from tfparallel.chatter import has_nvidia_gpu
from tfparallel.cluster import slurm
from tfparallel.cluster.cgroup import cpu_quota, free_memory_bytes
from tfparallel.cluster.cluster_spec import Cluster
from tfparallel.cluster.environment import NUM_THREADS, available_cores
from tfparallel.cluster.launcher_env import is_slurm_step
from tfparallel.diagnostics.report import Finding
from tfparallel.texts import counted

_MIB = 2**20
_SHARED_MEMORY = "/dev/shm"
_DEFAULT_SHARED_MIB = 64  # Of a container, unless its pod says otherwise.
_MOUNT = "mount an emptyDir of medium Memory at /dev/shm, as `tfparallel launch --emit` does"
_ENOUGH_DISK_MIB = 1024
WORKER_MIB = 1024  # Free memory that a worker needs; it uses 500 before it loads data.


def examine_disk(folder: str | None, min_free_mib: float | None) -> Iterator[Finding]:
    """Examines whether checkpoints can be written, and how much space there is.

    Args:
        folder: The checkpoint folder, which need not exist; by default the working folder.
        min_free_mib: Space that the job needs; less is "broken". By default, little space is a
            warning.
    """
    folder = os.path.abspath(folder or os.curdir)
    existing = folder
    while not os.path.exists(existing):
        existing = os.path.dirname(existing)
    try:
        # Write a file: access rights do not reveal a read-only mount or a full disk.
        with tempfile.NamedTemporaryFile(dir=existing) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        yield Finding(
            "disk",
            "broken",
            f"{folder} is not writable ({error.strerror}): checkpoints cannot be saved",
            "choose a writable --checkpoint_dir, or free some space",
        )
        return
    free_mib = shutil.disk_usage(existing).free / _MIB
    text = f"{_size(free_mib)} free for {folder}"
    if min_free_mib is not None and free_mib < min_free_mib:
        text += f", but {_size(min_free_mib)} are required (--min_free_mib)"
        yield Finding("disk", "broken", text, "free some space, or choose another --checkpoint_dir")
    elif min_free_mib is None and free_mib < _ENOUGH_DISK_MIB:
        text += ": a checkpoint holds the weights and, with Adam, twice as much again"
        yield Finding("disk", "warn", text, "free some space, or choose another --checkpoint_dir")
    else:
        yield Finding("disk", "ok", text)


def examine_memory(num_local_workers: int) -> Iterator[Finding]:
    """Examines the free memory of the host and within the container's limit."""
    free = _free_memory()
    if not free:
        return
    name = min(free, key=free.get)
    text = f"{_size(free[name])} free {name}"
    if num_local_workers > 1:
        text += f", for {num_local_workers} workers on this host"
    if free[name] < WORKER_MIB * num_local_workers:
        advice = "stop other programs, start fewer workers, or raise the limit"
        text += ": a worker uses about 500 MiB before it loads any data"
        yield Finding("memory", "warn", text, advice)
    else:
        yield Finding("memory", "ok", text)


def free_memory_mib() -> float | None:
    """Returns the free memory, within the container's limit; None if unknown."""
    return min(_free_memory().values(), default=None)


def examine_cores(num_local_workers: int) -> Iterator[Finding]:
    """Examines the number of cores, and whether a CPU quota limits their use."""
    num_cores, quota = len(available_cores()), cpu_quota()
    set_threads = os.environ.get(NUM_THREADS, "")
    num_threads = (set_threads.isdecimal() and int(set_threads)) or num_cores
    text = counted(num_cores, "core")
    if quota is not None and quota < min(num_cores, num_threads * num_local_workers):
        num_fitting = max(1, int(quota / num_local_workers))
        threads = counted(num_threads, "thread")
        yield Finding(
            "cores",
            "warn",
            f"{text}, but the CPU quota of this container or job is {quota:g}: TensorFlow starts "
            f"{threads} in each worker, and is throttled",
            f"set {NUM_THREADS}={num_fitting} and OMP_NUM_THREADS={num_fitting}",
        )
    elif num_local_workers > num_cores:
        yield Finding(
            "cores",
            "warn",
            f"{text} for {num_local_workers} workers on this host: they take turns",
            "start at most one worker per core",
        )
    else:
        yield Finding("cores", "ok", text)


def _free_memory() -> dict[str, float]:
    free = {
        "on the host": _free_of_host(),
        "within the limit of this container or job": free_memory_bytes(),
    }
    return {name: value / _MIB for name, value in free.items() if value is not None}


def _free_of_host() -> int | None:
    with contextlib.suppress(OSError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _size(mib):
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.0f} MiB"


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
