"""Who is who in a job with servers of parameters, as TF_CONFIG tells it.

```
{"cluster": {"chief": ["host0:port"], "worker": ["host1:port", "host2:port"],
             "ps": ["host3:port"]},
 "task": {"type": "worker", "index": 0}}
```

Such a job trains asynchronously (`sync="async"`). The chief runs the program, and computes no
gradient; the workers do, and the servers hold the weights. A `Cluster` is of a job without servers.
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from tfparallel.cluster.address import address_problems, local_place
from tfparallel.cluster.config_error import refusal, shown

__all__ = ["Roles"]

_JOBS = ("chief", "worker", "ps")
_FORM = (
    'It must be JSON such as {"cluster": {"chief": ["host0:port"], "worker": ["host1:port"], '
    '"ps": ["host2:port"]}, "task": {"type": "chief", "index": 0}}.'
)


@dataclasses.dataclass(frozen=True)
class Roles:
    """A job with servers, and this process's part in it.

    Attributes:
        chief: `"host:port"` of the process that runs the program.
        workers: `"host:port"` of each that computes gradients.
        servers: `"host:port"` of each that holds weights.
        task_type: `"chief"`, `"worker"` or `"ps"`.
        task_index: This process among those of its type.
    """

    chief: str
    workers: tuple[str, ...]
    servers: tuple[str, ...]
    task_type: str
    task_index: int

    @property
    def is_chief(self) -> bool:
        """Whether this process runs the program."""
        return self.task_type == "chief"

    @property
    def jobs(self) -> dict[str, list[str]]:
        """The addresses, as TensorFlow's `ClusterSpec` takes them."""
        return {"chief": [self.chief], "worker": [*self.workers], "ps": [*self.servers]}

    @property
    def addresses(self) -> list[str]:
        """Those of all processes: the chief's, the workers', the servers'."""
        return [self.chief, *self.workers, *self.servers]

    @property
    def place(self) -> int:
        """This process among all."""
        first = {"chief": 0, "worker": 1, "ps": 1 + len(self.workers)}[self.task_type]
        return first + self.task_index

    def moved_to(self, addresses: Sequence[str]) -> "Roles":
        """Returns the same processes with other addresses, in the order of `addresses`."""
        chief, *others = addresses
        number = len(self.workers)
        workers, servers = tuple(others[:number]), tuple(others[number:])
        return dataclasses.replace(self, chief=chief, workers=workers, servers=servers)

    @property
    def place_on_host(self) -> tuple[int, int]:
        """This worker's index among those of its host, and how many these are."""
        return local_place(self.workers, self.task_index)

    def to_tf_config(self) -> str:
        """Writes the text of the environment variable TF_CONFIG."""
        task = {"type": self.task_type, "index": self.task_index}
        return json.dumps({"cluster": self.jobs, "task": task})

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> "Roles | None":
        """Reads TF_CONFIG; None where it names no server.

        Raises:
            ValueError: If it names one, and cannot be used; all problems in one message.
        """
        text = (os.environ if environ is None else environ).get("TF_CONFIG", "")
        config = _parsed(text)
        cluster = config.get("cluster")
        if not isinstance(cluster, dict) or "ps" not in cluster:
            return None
        problems = _problems(cluster, config.get("task"))
        if problems:
            received = f"TF_CONFIG={shown(text)}"
            raise refusal("TF_CONFIG cannot be used with servers", problems, received, _FORM)
        return cls(
            cluster["chief"][0],
            tuple(cluster["worker"]),
            tuple(cluster["ps"]),
            config["task"]["type"],
            config["task"]["index"],
        )


def _parsed(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}  # `Cluster.from_env` says what is wrong.
    return found if isinstance(found, dict) else {}


def _problems(cluster: Mapping[str, Any], task: Any) -> list[str]:
    problems = [
        f"cluster has {shown(job)}; a job with servers has {', '.join(_JOBS)}"
        for job in cluster
        if job not in _JOBS
    ]
    for job in _JOBS:
        addresses = cluster.get(job)
        if not isinstance(addresses, list) or not addresses:
            problems.append(f"cluster[{job!r}] must list at least one address")
    if problems:
        return problems
    if len(cluster["chief"]) > 1:
        problems.append(f"there is one chief, not {len(cluster['chief'])}")
    problems += address_problems(
        (f"cluster[{job!r}][{index}]", address)
        for job in _JOBS
        for index, address in enumerate(cluster[job])
    )
    return problems + _task_problems(cluster, task)


def _task_problems(cluster: Mapping[str, Sequence[str]], task: Any) -> list[str]:
    if not isinstance(task, dict) or task.get("type") not in _JOBS:
        return [f"task must have a type of {', '.join(_JOBS)}, and an index"]
    index, number = task.get("index"), len(cluster[task["type"]])
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < number:
        return [f"task's index must be from 0 to {number - 1} for {shown(task['type'])}"]
    return []
