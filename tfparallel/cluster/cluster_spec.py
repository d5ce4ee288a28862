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

__all__ = ["Cluster"]


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Who takes part in a job, and which of them this process is.

    `Cluster.from_env()` finds it out; the constructor is for those who know.
    A cluster without workers is a process that is alone.

    Attributes:
        workers: `"host:port"` of every worker, the chief first; empty for a
            single process.
        worker_index: This process among `workers`; 0 for an evaluator, which is
            none of them.
        evaluators: `"host:port"` of the process that evaluates and takes no part
            in training; there is at most one.
        is_evaluator: Whether this process is the evaluator.
        names_chief: Whether TF_CONFIG has the chief in a job of its own. It is
            worker 0 here; TF_CONFIG's worker k is then worker k + 1.
        local_rank: This process among the workers on its host.
        num_local_workers: How many workers its host has.
        source: Where the cluster was found: `"TF_CONFIG"`, `"Slurm"`, `"MPI"`,
            `"Kubernetes"`, `"torchrun"` or `"none"`. It does not count in `==`.

    Raises:
        ValueError: If an address is malformed or named twice, or an index is out
            of range; all problems in one message.

    Example:
        >>> cluster = tfparallel.Cluster.from_env()
        >>> cluster.num_workers, cluster.is_chief  # A process that is alone.
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
            raise refusal("These fields make no Cluster", problems, shown(vars(self)))

    @property
    def num_workers(self) -> int:
        """The number of processes that train, at least 1."""
        return max(1, len(self.workers))

    @property
    def is_chief(self) -> bool:
        """Whether this process is the one that speaks and writes for all."""
        return self.worker_index == 0 and not self.is_evaluator

    @property
    def address(self) -> str | None:
        """This process's own `"host:port"`; None where none was named."""
        if self.is_evaluator:
            return self.evaluators[0] if self.evaluators else None
        return self.workers[self.worker_index] if self.workers else None

    @property
    def task_type(self) -> str:
        """TF_CONFIG's word for this process: `"chief"`, `"worker"` or `"evaluator"`."""
        if self.is_evaluator:
            return "evaluator"
        return "chief" if self.names_chief and self.worker_index == 0 else "worker"

    @property
    def task_index(self) -> int:
        """TF_CONFIG's index of this process among those of its type."""
        has_chief_before = self.names_chief and self.task_type == "worker"
        return self.worker_index - 1 if has_chief_before else self.worker_index

    def to_tf_config(self) -> str:
        """Writes TF_CONFIG, as `from_tf_config` reads it; `"{}"` for a single process."""
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
            text: JSON with the keys `cluster` and `task`; without a cluster, or
                empty, it means a single process. Workers of one host are given
                their local ranks by the host's name.

        Returns:
            The cluster.

        Raises:
            ValueError: If the text is no JSON, lacks keys or has unknown ones, or
                if what it names cannot be; all problems in one message.
        """
        return cls(**tf_config.parse(text), source="TF_CONFIG")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> "Cluster":
        """Finds out who takes part, from what the job's launcher has set.

        TF_CONFIG goes first; then torchrun's variables, those of Open MPI, MPICH
        and Intel MPI, of Slurm's `srun`, and of a Kubernetes indexed Job. More
        than one may be there, and must agree. Where a launcher does not say on
        which hosts its workers run, TFPARALLEL_WORKERS must.

        Args:
            environ: The variables; by default `os.environ`.

        Returns:
            The cluster; a single process where nothing names workers.

        Raises:
            ValueError: If a source is malformed or incomplete, or if two contradict
                each other.

        References:
            The documentation of each launcher stands in `tfparallel.cluster.launcher_env`.
        """
        environ = os.environ if environ is None else environ
        configured = cls.from_tf_config(environ.get("TF_CONFIG", ""))
        if configured.is_evaluator:
            # It takes no part, so that nothing else counts it for sure.
            return configured
        if not configured.workers:
            return cls(**find(environ))
        found = find(
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
        place = {name: found[name] for name in ("local_rank", "num_local_workers")}
        return dataclasses.replace(configured, **place)

    def device_environment(self, environ: Mapping[str, str] | None = None) -> dict[str, str]:
        """Tells which GPUs this worker should see among the workers on its host.

        Nothing is set here; set what is returned before TensorFlow starts.

        Args:
            environ: Environment variables; by default `os.environ`.

        Returns:
            CUDA_VISIBLE_DEVICES and its value if several workers share the host and
            its GPUs are not bound to them yet; TF_FORCE_GPU_ALLOW_GROWTH if they may
            have to share one; else nothing.

        Raises:
            ValueError: If the host's GPUs cannot be shared out equally.
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
        problems.append("evaluators must be one address or none")
    counts = {"worker_index": cluster.num_workers, "local_rank": cluster.num_local_workers}
    for name, count in counts.items():
        value = getattr(cluster, name)
        if not isinstance(count, int) or count < 1:
            problems.append("num_local_workers must be a whole number of at least 1")
        elif not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < count:
            problems.append(f"{name} must be a whole number from 0 to {count - 1}")
    if cluster.is_evaluator and cluster.worker_index:
        problems.append("an evaluator is no worker; its worker_index must be 0")
    if cluster.names_chief and not cluster.workers:
        problems.append("a chief must be named in workers")
    return problems
