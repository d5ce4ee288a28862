"""The workers of a job and this process's part in it: `Cluster` <-> TF_CONFIG.

```python
cluster = tfparallel.Cluster.from_env()
cluster.num_workers, cluster.worker_index, cluster.address
os.environ["TF_CONFIG"] = cluster.to_tf_config()
```
"""

import dataclasses
import os
from collections.abc import Mapping

from tfparallel.cluster import tf_config
from tfparallel.cluster.address import address_problems
from tfparallel.cluster.config_error import refusal, shown
from tfparallel.cluster.discover import find
from tfparallel.cluster.gpu_binding import visible_gpus
from tfparallel.cluster.launcher_env import LauncherEnv


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The workers of a job and this process's place among them.

    `Cluster.from_env()` reads them from the environment; use the constructor to set them yourself.
    A cluster without workers is a single process.

    Attributes:
        workers: `"host:port"` of every worker, the chief first; empty for a
            single process.
        worker_index: This process's index in `workers`; 0 for an evaluator,
            which is not among them.
        evaluators: `"host:port"` of the process that evaluates without
            training; there is at most one.
        is_evaluator: Whether this process is the evaluator.
        names_chief: Whether TF_CONFIG has a separate job `chief`. The chief is
            worker 0 here; TF_CONFIG's worker k is then worker k + 1.
        local_rank: This process's index among the workers on its host.
        num_local_workers: The number of workers on its host.
        source: The source of the cluster: `"TF_CONFIG"`, `"Slurm"`, `"MPI"`,
            `"Kubernetes"`, `"torchrun"` or `"none"`. Ignored by `==`.

    Raises:
        ValueError: If an address is malformed or named twice, or an index is out
            of range; all problems in one message.

    Example:
        >>> cluster = tfparallel.Cluster.from_env()
        >>> cluster.num_workers, cluster.is_chief  # A single process.
        (1, True)
        >>> tfparallel.Cluster(["a:2222", "b:2222"], worker_index=1).address
        'b:2222'
    """

    workers: tuple[str, ...] = ()
    worker_index: int = 0
    evaluators: tuple[str, ...] = ()
    is_evaluator: bool = False
    names_chief: bool = False
    local_rank: int = 0
    num_local_workers: int = 1
    source: str = dataclasses.field(default="none", compare=False)

    def __post_init__(self):
        for name in ("workers", "evaluators"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        problems = _field_problems(self)
        if problems:
            raise refusal("Cannot create a Cluster from these fields", problems, shown(vars(self)))

    @property
    def num_workers(self) -> int:
        """The number of processes that train, at least 1."""
        return max(1, len(self.workers))

    @property
    def is_chief(self) -> bool:
        """Whether this process is the chief, which logs and writes files for all workers."""
        return self.worker_index == 0 and not self.is_evaluator

    @property
    def address(self) -> str | None:
        """This process's `"host:port"`; None if it has none."""
        if self.is_evaluator:
            return self.evaluators[0] if self.evaluators else None
        return self.workers[self.worker_index] if self.workers else None

    @property
    def task_type(self) -> str:
        """This process's TF_CONFIG task type: `"chief"`, `"worker"` or `"evaluator"`."""
        if self.is_evaluator:
            return "evaluator"
        return "chief" if self.names_chief and self.worker_index == 0 else "worker"

    @property
    def task_index(self) -> int:
        """This process's TF_CONFIG task index, among the tasks of its type."""
        has_chief_before = self.names_chief and self.task_type == "worker"
        return self.worker_index - 1 if has_chief_before else self.worker_index

    def to_tf_config(self) -> str:
        """Returns TF_CONFIG, as `from_tf_config` reads it; `"{}"` for a single process."""
        num_chiefs = int(self.names_chief)
        jobs = {
            "chief": self.workers[:num_chiefs],
            "worker": self.workers[num_chiefs:],
            "evaluator": self.evaluators,
        }
        return tf_config.write(jobs, self.task_type, self.task_index)

    @classmethod
    def from_tf_config(cls, text: str) -> "Cluster":
        """Reads the text of the environment variable TF_CONFIG.

        Args:
            text: JSON with the keys `cluster` and `task`; empty, or without a
                cluster, it means a single process. Workers with the same host
                name get consecutive local ranks.

        Returns:
            The cluster.

        Raises:
            ValueError: If the text is not JSON, has missing or unknown keys, or
                describes an invalid cluster; all problems in one message.
        """
        return cls(**tf_config.parse(text), source="TF_CONFIG")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> "Cluster":
        """Reads the cluster from the environment variables set by the job's launcher.

        TF_CONFIG takes precedence; then the variables of torchrun; of Open MPI,
        MPICH and Intel MPI; of Slurm's `srun`; and of a Kubernetes indexed Job.
        If several are set, they must agree. If the launcher does not set the
        workers' hosts, set TFPARALLEL_WORKERS.

        Args:
            environ: The variables; by default `os.environ`.

        Returns:
            The cluster; a single process if no variable names workers.

        Raises:
            ValueError: If a source is malformed or incomplete, or if two contradict
                each other.

        References:
            `tfparallel.cluster.launcher_env` links the documentation of each launcher.
        """
        environ = os.environ if environ is None else environ
        configured = cls.from_tf_config(environ.get("TF_CONFIG", ""))
        if configured.is_evaluator:
            # Other sources may or may not count the evaluator: ignore them.
            return configured
        if not configured.workers:
            return cls(**find(environ))
        fields = find(
            environ,
            LauncherEnv(
                source="TF_CONFIG",
                num_workers=configured.num_workers,
                worker_index=configured.worker_index,
                received={"TF_CONFIG": environ["TF_CONFIG"]},
                addresses=lambda: configured.workers,
                num_evaluators=len(configured.evaluators),
            ),
        )
        place = {name: fields[name] for name in ("local_rank", "num_local_workers")}
        return dataclasses.replace(configured, **place)

    def device_environment(self, environ: Mapping[str, str] | None = None) -> dict[str, str]:
        """Returns the variables that give this worker its share of the host's GPUs.

        They are not set here; set them before TensorFlow starts.

        Args:
            environ: Environment variables; by default `os.environ`.

        Returns:
            CUDA_VISIBLE_DEVICES and its value if several workers share the host and
            its GPUs are not bound to them yet; TF_FORCE_GPU_ALLOW_GROWTH if they may
            have to share one; otherwise empty.

        Raises:
            ValueError: If the host's GPUs cannot be divided equally.
        """
        environ = os.environ if environ is None else environ
        return visible_gpus(environ, self.local_rank, self.num_local_workers)


def _field_problems(cluster):
    problems = []
    for name in ("workers", "evaluators"):
        if not isinstance(getattr(cluster, name), tuple):
            problems.append(f"{name} must be a tuple of 'host:port'")
    if problems:
        return problems
    problems = address_problems(
        (f"{name}[{index}]", address)
        for name in ("workers", "evaluators")
        for index, address in enumerate(getattr(cluster, name))
    )
    if len(cluster.evaluators) > 1:
        problems.append("evaluators must have at most one address")
    counts = {"worker_index": cluster.num_workers, "local_rank": cluster.num_local_workers}
    for name, count in counts.items():
        value = getattr(cluster, name)
        if not isinstance(count, int) or count < 1:
            problems.append("num_local_workers must be a whole number of at least 1")
        elif not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < count:
            problems.append(f"{name} must be a whole number from 0 to {count - 1}")
    if cluster.is_evaluator and cluster.worker_index:
        problems.append("an evaluator is not a worker; its worker_index must be 0")
    if cluster.names_chief and not cluster.workers:
        problems.append("names_chief requires the chief's address in workers")
    return problems
