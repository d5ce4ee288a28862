"""The text of the environment variable TF_CONFIG: parse, check, write.

```
{"cluster": {"chief": ["host0:port"], "worker": ["host1:port"], "evaluator": ["host2:port"]},
 "task": {"type": "worker", "index": 0}}
```

An asynchronous job has parameter servers, `"ps"`, and no evaluator.

References:
    https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/TFConfigClusterResolver
    https://www.tensorflow.org/guide/distributed_training, "Setting up the TF_CONFIG
        environment variable"
"""

import collections
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tfparallel.cluster.address import address_problems, local_place
from tfparallel.cluster.config_error import refusal, shown

_TASK = '"task": {"type": "worker", "index": 0}}.'
_FORM = (
    'TF_CONFIG must be JSON such as {"cluster": {"worker": ["host1:port", "host2:port"]}, ' + _TASK
)
_FORM_WITH_SERVERS = (
    'It must be JSON such as {"cluster": {"chief": ["host0:port"], "worker": ["host1:port"], '
    '"ps": ["host2:port"]}, ' + _TASK
)
_JOBS = ("chief", "worker", "evaluator")
_JOBS_WITH_SERVERS = ("chief", "worker", "ps")
_SINGLE = ("chief", "evaluator")
# Keys that TensorFlow, Estimators and cloud services add. None affects the cluster; rpc_layer is
# checked.
_EXTRA_KEYS = (
    "environment", "eval_session_master", "job", "model_dir", "rpc_layer", "service",
    "session_master",
)
_EXTRA_TASK_KEYS = ("cloud", "trial")
_UNSUPPORTED = {
    "ps": "parameter servers are only for data_parallel(…, sync='async'); use that, or start the "
    "job without them (`tfparallel launch` without --num_ps)",
    "master": "TensorFlow now calls it 'chief'; rename it",
}


class _Config(NamedTuple):
    """The content of TF_CONFIG; the task is None if it is invalid or not needed."""

    jobs: dict[str, list[str]]
    task_type: str | None = None
    task_index: int | None = None


def parse(text: str) -> dict[str, Any]:
    """Parses TF_CONFIG into arguments of a `Cluster`; without a cluster, a single process.

    Raises:
        ValueError: If the text is invalid; all problems in one message.
    """
    problems = []
    jobs, task_type, task_index = _read(text, _JOBS, problems)
    if any(jobs.values()) and not (jobs["chief"] or jobs["worker"]):
        problems.append("cluster lists no worker; 'worker' must list at least one")
    if problems:
        raise refusal("TF_CONFIG cannot be used", problems, f"TF_CONFIG={shown(text)}", _FORM)
    workers = (*jobs["chief"], *jobs["worker"])
    arguments = {
        "workers": workers,
        "evaluators": tuple(jobs["evaluator"]),
        "names_chief": bool(jobs["chief"]),
    }
    if task_type is None:
        return arguments
    if task_type == "evaluator":
        return arguments | {"is_evaluator": True}
    rank = task_index + (len(jobs["chief"]) if task_type == "worker" else 0)
    local_rank, num_local_workers = local_place(workers, rank) if workers else (0, 1)
    of_task = {"local_rank": local_rank, "num_local_workers": num_local_workers}
    return arguments | {"worker_index": rank} | of_task


def parse_with_servers(text: str) -> tuple[dict[str, list[str]], str, int] | None:
    """Returns each job's addresses, and this process's job and index; None without servers.

    Raises:
        ValueError: If the text is invalid; all problems in one message.
    """
    cluster = _json_object(text, []).get("cluster")
    if not isinstance(cluster, dict) or "ps" not in cluster:
        return None
    problems = []
    config = _read(text, _JOBS_WITH_SERVERS, problems)
    missing = [job for job in _JOBS_WITH_SERVERS if not config.jobs[job]]
    if missing:
        problems.append(f"cluster must list at least one address for each of {', '.join(missing)}")
    if problems:
        head = "TF_CONFIG cannot be used with servers"
        raise refusal(head, problems, f"TF_CONFIG={shown(text)}", _FORM_WITH_SERVERS)
    return config


def write(jobs: Mapping[str, Sequence[str]], task_type: str, task_index: int) -> str:
    """Returns TF_CONFIG, omitting jobs without addresses; `"{}"` for a single worker."""
    cluster = {job: list(addresses) for job, addresses in jobs.items() if addresses}
    if not cluster and task_type != "evaluator":
        return "{}"
    config = {"cluster": cluster} if cluster else {}
    return json.dumps({**config, "task": {"type": task_type, "index": task_index}})


def _read(text, job_names: Sequence[str], problems: list[str]) -> _Config:
    """Parses the text, whose cluster may have jobs named `job_names`."""
    if not isinstance(text, str):
        problems.append(f"it must be a string, not {type(text).__name__}; use json.dumps()")
        return _Config({job: [] for job in job_names})
    config = _json_object(text, problems)
    _check_keys("the text", config, ("cluster", "task"), _EXTRA_KEYS, problems)
    if config.get("rpc_layer") not in (None, "", "grpc"):
        problems.append(f"rpc_layer must be 'grpc', not {shown(config['rpc_layer'])}")
    cluster = _object(config, "cluster", problems)
    jobs = {job: _addresses(cluster, job, problems) for job in job_names}
    for job in cluster:
        if job not in job_names:
            why = _UNSUPPORTED.get(job, f"an unknown job; known ones are {', '.join(job_names)}")
            problems.append(f"cluster has {shown(job)}: {why}")
    for job in _SINGLE:
        if len(jobs.get(job, ())) > 1:
            problems.append(f"cluster has {len(jobs[job])} {job}s; there can be only one")
    problems += address_problems(
        (f"cluster[{job!r}][{index}]", address)
        for job in job_names
        for index, address in enumerate(jobs[job])
    )
    task = _object(config, "task", problems)
    if not task and sum(map(len, jobs.values())) <= 1:
        return _Config(jobs)  # A single process needs no task.
    return _Config(jobs, *_task(task, cluster, jobs, problems))


def _task(task, cluster, jobs, problems) -> tuple:
    """Returns the task's type and index; empty if there are problems."""
    _check_keys("task", task, ("type", "index"), _EXTRA_TASK_KEYS, problems)
    for key in ("type", "index"):
        if key not in task:
            problems.append(f"task has no {key!r}")
    kind, index = task.get("type"), task.get("index")
    if "index" in task and (not isinstance(index, int) or isinstance(index, bool)):
        problems.append(f"task's index must be a whole number without quotes, not {shown(index)}")
        index = None
    if "type" not in task:
        return ()
    if not isinstance(kind, str) or kind not in jobs:
        reason = _UNSUPPORTED.get(kind) if isinstance(kind, str) else None
        problems.append(
            f"task's type must be one of {', '.join(jobs)}, not {shown(kind)}"
            + (f": {reason}" if reason else "")
        )
        return ()
    if kind != "evaluator" and cluster and kind not in cluster:
        problems.append(f"task is a {kind}, but cluster lists none")
        return ()
    # The cluster need not list its evaluator.
    size = max(1, len(jobs[kind]))
    if index is not None and not 0 <= index < size:
        problems.append(f"task's index must be from 0 to {size - 1} for a {kind}, not {index}")
        index = None
    return () if index is None or problems else (kind, index)


def _json_object(text, problems):
    if not text.strip():
        return {}
    try:
        config = json.loads(text, object_pairs_hook=lambda pairs: _check_unique(pairs, problems))
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        problems.append(f"it is not valid JSON: {reason}")
        return {}
    if not isinstance(config, dict):
        problems.append(f"it must be an object in braces, not {shown(config)}")
        return {}
    return config


def _check_unique(pairs, problems):
    for key, count in collections.Counter(key for key, _ in pairs).items():
        if count > 1:
            problems.append(f"the key {shown(key)} appears {count} times")
    return dict(pairs)


def _object(config, key, problems):
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        problems.append(f"{key} must be an object in braces, not {shown(value)}")
        return {}
    return value


def _addresses(cluster, job, problems):
    if job not in cluster:
        return []
    value = cluster[job]
    if not isinstance(value, list):
        problems.append(f"cluster[{job!r}] must be a list of 'host:port', not {shown(value)}")
        return []
    if not value:
        problems.append(f"cluster[{job!r}] is empty; list at least one address, or omit it")
    return value


def _check_keys(name, section, required, ignored, problems):
    unknown = sorted(set(section) - set(required) - set(ignored))
    if unknown:
        problems.append(
            f"{name} has unknown keys: {shown(unknown)[1:-1]}; "
            f"known ones are {', '.join(required)}, and {', '.join(ignored)} are ignored"
        )
