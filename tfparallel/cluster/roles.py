"""The tasks of a job with parameter servers, from TF_CONFIG.

```
{"cluster": {"chief": ["host0:port"], "worker": ["host1:port", "host2:port"],
             "ps": ["host3:port"]},
 "task": {"type": "worker", "index": 0}}
```

Such a job trains asynchronously (`sync="async"`). The chief runs the program, the workers compute
gradients, and the servers hold the weights. `Cluster` describes a job without servers.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence

from tfparallel.cluster import tf_config
from tfparallel.cluster.address import local_place


@dataclasses.dataclass(frozen=True)
class Roles:
    """A job with parameter servers, and this process's place in it.

    Attributes:
        chief: `"host:port"` of the process that runs the program.
        workers: `"host:port"` of each process that computes gradients.
        servers: `"host:port"` of each process that holds weights.
        task_type: `"chief"`, `"worker"` or `"ps"`.
        task_index: This process's index among the tasks of its type.
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
        """The addresses by job, in the form of TensorFlow's `ClusterSpec`."""
        return {"chief": [self.chief], "worker": [*self.workers], "ps": [*self.servers]}

    @property
    def addresses(self) -> list[str]:
        """The addresses of all processes: chief, workers, servers."""
        return [self.chief, *self.workers, *self.servers]

    @property
    def place(self) -> int:
        """This process's index in `addresses`."""
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
        """This worker's index among those on its host, and their number."""
        return local_place(self.workers, self.task_index)

    def to_tf_config(self) -> str:
        """Returns the text of the environment variable TF_CONFIG."""
        return tf_config.write(self.jobs, self.task_type, self.task_index)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> "Roles | None":
        """Reads TF_CONFIG; None if it has no servers. `ValueError` if it is invalid."""
        text = (os.environ if environ is None else environ).get("TF_CONFIG", "")
        config = tf_config.parse_with_servers(text)
        if config is None:
            return None  # `Cluster.from_env` reports any problems.
        jobs, task_type, task_index = config
        chief, workers, servers = jobs["chief"][0], tuple(jobs["worker"]), tuple(jobs["ps"])
        return cls(chief, workers, servers, task_type, task_index)
