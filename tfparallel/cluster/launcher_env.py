"""Reads a job from each launcher's environment variables.

| launcher | sets | does not set; read from |
| --- | --- | --- |
| torchrun | rank and size, in all and on this host | other hosts: TFPARALLEL_WORKERS |
| MPI | rank and size, in all and on this host | other hosts: TFPARALLEL_WORKERS |
| Slurm's `srun` | task, nodes, tasks on each node, job id | |
| Kubernetes' indexed Job | index, host name | TFPARALLEL_NUM_WORKERS, TFPARALLEL_SERVICE |
| Kubeflow's TrainJob, under a runtime for torchrun | as its Job; number of pods, first pod | |

TFPARALLEL_PORT overrides the port computed here; the workers of one host count up from it.
Malformed or incomplete variables raise a ValueError.

References:
    torchrun: https://docs.pytorch.org/docs/stable/elastic/run.html, "Environment Variables"
    Open MPI: https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html
    Slurm: https://slurm.schedmd.com/srun.html, "OUTPUT ENVIRONMENT VARIABLES"
    Kubernetes: https://kubernetes.io/docs/concepts/workloads/controllers/job/,
        "Completion mode", and
        https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/
    Kubeflow: https://trainer.kubeflow.org/en/latest/operator-guides/ml-policy.html, "Torch"
    MPICH and Intel MPI: the environment set by their `mpiexec` (Hydra); see `mpiexec env`
"""

import dataclasses
import os
import re
import zlib
from collections.abc import Callable, Mapping

from tfparallel.cluster import slurm
from tfparallel.cluster.address import join_address
from tfparallel.cluster.config_error import EnvReader, refusal, shown

_WORKERS = "TFPARALLEL_WORKERS"
_PORT = "TFPARALLEL_PORT"
_NUM_WORKERS = "TFPARALLEL_NUM_WORKERS"
_SERVICE = "TFPARALLEL_SERVICE"
# In a pod of a TrainJob: the number of pods, and the first one's address, POD.SERVICE.
_NUM_PODS, _FIRST_POD = "PET_NNODES", "PET_MASTER_ADDR"

_NAME_THEM = (
    f'Set {_WORKERS}="host1:port,host2:port", one address per worker in rank order, the same on '
    "all workers; or set TF_CONFIG"
)
# Each pod has its own address, so all can use the same port.
_POD_PORT = 13_000
# Job ids that distinguish two MPI jobs on one host: PMIx (Open MPI 5), Open MPI 4, schedulers.
_JOB_NAMES = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
# Steps that Slurm starts for itself: interactive, batch, extern and the like.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
_STEP = re.compile("[0-9]{1,10}")

_MPI_VARIABLES = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK",
     "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
# A host's index in Slurm and in a Kubernetes indexed Job.
_NODE_RANKS = ("SLURM_NODEID", "JOB_COMPLETION_INDEX")
_STEP_VARIABLES = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS")


@dataclasses.dataclass(frozen=True)
class LauncherEnv:
    """The job and this process's place in it according to one source; None means unknown.

    Attributes:
        source: The source's name.
        num_workers: The number of workers.
        worker_index: This process's index among them.
        received: The variables that this was read from.
        addresses: Returns every worker's address, or raises ValueError.
        local_rank: This process's index among the workers on its host.
        num_local_workers: The number of workers on this host.
        num_launchers: The number of processes that started the workers.
        num_evaluators: The number of evaluators in TF_CONFIG.
        one_a_host: Whether each host has one process, as when MPI starts its daemons by Slurm.
    """

    source: str
    num_workers: int
    worker_index: int
    received: Mapping[str, str]
    addresses: Callable[[], tuple[str, ...]]
    local_rank: int | None = None
    num_local_workers: int | None = None
    num_launchers: int | None = None
    num_evaluators: int = 0
    one_a_host: bool = False


def of_torchrun(environ: Mapping[str, str]) -> LauncherEnv | None:
    """Reads the variables of torchrun, `tfparallel launch` and DDP's convention.

    Returns:
        The job, or None if WORLD_SIZE is not set.
    """
    if "WORLD_SIZE" not in environ:
        return None
    variables = EnvReader(environ, "torchrun")
    size = variables.number("WORLD_SIZE", least=1)
    index = variables.number("RANK", below=size, required=True)
    local_rank, num_local = variables.place("LOCAL_RANK", "LOCAL_WORLD_SIZE", size)
    launchers = variables.number("GROUP_WORLD_SIZE", least=1)
    variables.check("Start the workers with torchrun or `tfparallel launch`, or unset WORLD_SIZE.")
    if launchers is None and num_local and size % num_local == 0:
        launchers = size // num_local

    def first_port():
        master = variables.number("MASTER_PORT", least=1, below=65536, required=True)
        # torchrun's store keeps MASTER_PORT itself.
        return None if master is None else master + 1

    return LauncherEnv(
        "torchrun",
        size,
        index,
        variables.received,
        lambda: _on_this_host(variables, size, num_local, first_port),
        local_rank,
        num_local,
        launchers,
    )


def of_mpi(environ: Mapping[str, str]) -> LauncherEnv | None:
    """Reads the `mpirun` variables of Open MPI, MPICH and Intel MPI; None if there are none."""
    names = next((names for names in _MPI_VARIABLES if names[0] in environ), None)
    if names is None:
        return None
    variables = EnvReader(environ, "MPI")
    size = variables.number(names[0], least=1)
    index = variables.number(names[1], below=size, required=True)
    local_rank, num_local = variables.place(*names[2:], size)
    variables.check("Start the workers with mpirun.")

    def first_port():
        # MPICH does not name its jobs: two jobs on one host need TFPARALLEL_PORT.
        job = variables.text(*_JOB_NAMES) or ""
        return slurm.base_port(zlib.crc32(job.encode(errors="replace")), 0, size)

    return LauncherEnv(
        "MPI",
        size,
        index,
        variables.received,
        lambda: _on_this_host(variables, size, num_local, first_port),
        local_rank,
        num_local,
    )


def is_slurm_step(environ: Mapping[str, str]) -> bool:
    """Whether `srun` started this process, rather than a batch script or a shell of `salloc`."""
    step = _slurm_step(environ)
    return (
        any(name in environ for name in _STEP_VARIABLES)
        and _STEP.fullmatch(step) is not None
        and int(step) < _FIRST_SPECIAL_STEP
    )


def of_slurm(environ: Mapping[str, str]) -> LauncherEnv | None:
    """Reads Slurm's variables for a task of a step; None outside a step, or in a single-task step.

    A batch script's shell has SLURM_PROCID=0 and the SLURM_NTASKS of the whole job, but is not a
    task: only processes started by `srun` belong to a step.
    """
    if not is_slurm_step(environ):
        return None
    variables = EnvReader(environ, "Slurm")
    # Prefer the step's variables: an interactive step inherits those of its job.
    size = variables.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", least=1, required=True)
    if size == 1:
        return None
    index = variables.number("SLURM_PROCID", below=size, required=True)
    local_rank = variables.number("SLURM_LOCALID")
    node = variables.number("SLURM_NODEID")
    job = variables.number("SLURM_JOB_ID", "SLURM_JOBID", required=True)
    nodes = _slurm_nodes(variables)
    counts = _slurm_counts(variables, size, nodes)
    num_local = counts[node] if counts and node is not None and node < len(counts) else None
    if num_local is not None and local_rank is not None and local_rank >= num_local:
        variables.problems.append(f"SLURM_LOCALID must be less than the node's {num_local} tasks")
    variables.check("Start the workers with srun.")

    def addresses():
        base = variables.number(_PORT, least=1, below=65536)
        places = []
        try:
            places = slurm.place_tasks(counts, variables.text("SLURM_DISTRIBUTION") or "")
        except ValueError as error:
            variables.problems.append(str(error))
        if places:
            expected_node, expected_local = places[index]
            if node not in (None, expected_node) or local_rank not in (None, expected_local):
                variables.problems.append(
                    f"task {index} should be number {expected_local} on node {expected_node} of "
                    f"the step, but is number {local_rank} on node {node}; srun's --distribution "
                    "must be block or cyclic"
                )
        variables.check(f"{_NAME_THEM}.")
        if base is None:
            base = slurm.base_port(job, int(_slurm_step(environ)), max(counts))
        return tuple(join_address(nodes[at], base + local) for at, local in places)

    return LauncherEnv(
        "Slurm", size, index, variables.received, addresses, local_rank, num_local,
        one_a_host=set(counts) == {1},
    )


def without_counts(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without the process counts of Slurm, MPI and Kubernetes.

    For workers on Ray, whose nodes may be tasks of Slurm: their number is another.
    """
    counts = {*_STEP_VARIABLES, *(names[0] for names in _MPI_VARIABLES), _NUM_WORKERS, _NUM_PODS}
    return {name: value for name, value in environ.items() if name not in counts}


def of_kubernetes(environ: Mapping[str, str], counted: bool = False) -> LauncherEnv | None:
    """Reads the variables of a pod of an indexed Job; None elsewhere, or for a single worker.

    Kubernetes does not set the number of pods, but Kubeflow does. An index alone is ignored if
    another source `counted` the workers, and an error otherwise: each pod would silently train a
    separate model.
    """
    num_pods = environ.get(_NUM_WORKERS, environ.get(_NUM_PODS))
    if "JOB_COMPLETION_INDEX" not in environ or num_pods == "1" or (counted and num_pods is None):
        return None
    variables = EnvReader(environ, "the Kubernetes Job")
    size = variables.number(_NUM_WORKERS, _NUM_PODS, least=1, required=True)
    index = variables.number("JOB_COMPLETION_INDEX", below=size)
    fix = (
        f"Set {_NUM_WORKERS} to the Job's completions and {_SERVICE} to the name of its headless "
        f"Service (spec.subdomain of the pods), in the pods' env; {_NUM_WORKERS}=1 if each pod "
        "trains its own model."
    )
    variables.check(fix)

    def addresses():
        first_pod = variables.text(_FIRST_POD) or ""
        service = variables.text(_SERVICE) or first_pod.partition(".")[2]
        if not service:
            variables.problems.append(f"{_SERVICE} is missing")
        port = variables.number(_PORT, least=1, below=65536) or _POD_PORT
        host = variables.text("HOSTNAME") or ""
        job, dash, number = host.rpartition("-")
        if not (job and dash and number == str(index)):
            variables.problems.append(
                f"HOSTNAME must be the Job's name and the pod's index, as in 'train-{index}' (with "
                f"hostNetwork it is the node's name), not {shown(host)}"
            )
        variables.check(f"{fix} Or list the workers: {_NAME_THEM}.")
        return tuple(f"{job}-{other}.{service}:{port}" for other in range(size))

    return LauncherEnv("Kubernetes", size, index, variables.received, addresses, 0, 1)


def parse_nnodes(text: str) -> int:
    """Parses a fixed number of hosts, "2"; raises `ValueError` for anything else."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is not None:
        least, most = match.groups()
        raise ValueError(
            f"the number of hosts is fixed: N is required. Received: {text!r}. If it must change, "
            f"use Ray (`launch --on=ray --num_workers={text}`); or Slurm, which may requeue a job "
            f"at another size (`launch --emit=slurm --nnodes={most} "
            f"--sbatch_args=--nodes={least}-{most}`); or Kubernetes, where a JobSet replaces lost "
            f"pods (`launch --emit=jobset --nnodes={most}`)."
        )
    if re.fullmatch(r"\d+", text) is None:
        raise ValueError(f"a number is required. Received: {text!r}.")
    if int(text) < 1:
        raise ValueError(f"at least 1 host is required. Received: {text!r}.")
    return int(text)


def node_rank_of(flag_value: int | None, nnodes: int) -> int | None:
    """Returns this host's index from the flag or the scheduler; `ValueError` if they disagree."""
    if nnodes == 1:
        return flag_value
    variables = {name: os.environ.get(name, "") for name in _NODE_RANKS}
    name = next((name for name in _NODE_RANKS if variables[name].isdecimal()), None)
    if name is None:
        return flag_value
    rank = int(variables[name])
    if flag_value not in (None, rank):
        raise ValueError(
            f"--node_rank must match the scheduler's {name}={rank}. Received: "
            f"--node_rank={flag_value}. Drop the flag."
        )
    return rank


def _slurm_step(environ):
    return environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", "0"))


def _slurm_nodes(variables):
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    text = variables.text(*names)
    if text is None:
        variables.problems.append("SLURM_STEP_NODELIST is missing")
        return []
    try:
        return slurm.expand_node_list(text)
    except ValueError as error:
        name = next(name for name in names if name in variables.environ)
        variables.problems.append(f"{name} is not a node list such as 'node[01-04]': {error}")
        return []


def _slurm_counts(variables, size, nodes):
    if not nodes or size is None:
        return []
    text = variables.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if text is None:
        if size % len(nodes):
            variables.problems.append("SLURM_STEP_TASKS_PER_NODE is missing")
            return []
        return [size // len(nodes)] * len(nodes)
    try:
        counts = slurm.expand_tasks_per_node(text)
    except ValueError as error:
        variables.problems.append(f"SLURM_STEP_TASKS_PER_NODE cannot be read: {error}")
        return []
    if len(counts) != len(nodes) or sum(counts) != size:
        variables.problems.append(
            f"the step has {size} tasks and {len(nodes)} nodes, but its task counts add up to "
            f"{sum(counts)} on {len(counts)} nodes"
        )
        return []
    return counts


def _on_this_host(variables, size, num_local, first_port):
    """Returns loopback addresses if all workers run on this host; otherwise raises."""
    if num_local != size:
        num_here = "an unknown number" if num_local is None else num_local
        raise refusal(
            f"{variables.source} starts {size} workers, {num_here} of them on this host, but does "
            "not say where the others are",
            ["the address of every worker is required"],
            shown(variables.received),
            f"{_NAME_THEM}.",
        )
    base = variables.number(_PORT, least=1, below=65536)
    if base is None and _PORT not in variables.environ:
        base = first_port()
    if base is not None and base + size - 1 > 65535:
        variables.problems.append(
            f"{size} ports from {base} on are needed, but the last port is 65535"
        )
    variables.check(f"Set {_PORT} to the first of {size} free ports, the same for all workers.")
    return tuple(f"127.0.0.1:{base + rank}" for rank in range(size))
