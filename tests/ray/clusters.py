"""A Ray cluster of several raylets on this machine, and what disturbs it."""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import time

import psutil
import ray
from ray.cluster_utils import Cluster

DEADLINE_SECONDS = 150
_NODE = {"num_cpus": 1, "object_store_memory": 80_000_000}
# The workers' threads come from their reserved CPUs.
_NOT_INHERITED = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")


@contextlib.contextmanager
def cluster(num_nodes, num_cpus=1):
    """Starts nodes of some CPUs each, and connects this process; the first node stays."""
    each = {**_NODE, "num_cpus": num_cpus}
    before = {name: os.environ.pop(name, None) for name in _NOT_INHERITED}
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    started = Cluster()
    try:
        started.add_node(include_dashboard=False, **each)
        for _ in range(num_nodes - 1):
            started.add_node(**each)
        ray.init(address=started.address, log_to_driver=False)
        yield started
    finally:
        ray.shutdown()
        started.shutdown()
        os.environ.update({name: value for name, value in before.items() if value is not None})


def add_node(started):
    """Adds a node with one CPU."""
    started.add_node(**_NODE)


def kill_raylet(started):
    """Kills the raylet of a node that is not the first, by SIGKILL."""
    node = next(iter(started.worker_nodes))
    node.kill_raylet()
    started.remove_node(node, allow_graceful=False)


def wait_for(condition, what):
    """Waits until a condition holds, and returns its value; not for ever."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {DEADLINE_SECONDS} s for {what}")
        time.sleep(0.02)
    return value


def steps(folder):
    """The records of the chief's steps: number, examples, number of workers."""
    path = pathlib.Path(folder, "steps")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def process_of(folder, worker):
    """The process of a worker in its newest attempt."""
    paths = pathlib.Path(folder).glob(f"pid_*_{worker}")
    newest = max(paths, key=lambda path: int(path.name.split("_")[1]))
    return psutil.Process(int(newest.read_text()))


def actor_of(folder, worker):
    """The Ray actor that started a worker's process."""
    parents = process_of(folder, worker).parents()
    return next(parent for parent in parents if "WorkerHost" in "".join(parent.cmdline()))


def still_running(folder):
    """The processes of workers, and their reapers, that are still there."""
    pids = [int(path.read_text()) for path in pathlib.Path(folder).glob("pid_*")]
    return [pid for pid in pids if psutil.pid_exists(pid)]


def disturbed(job, *disturbances):
    """Calls a function in a thread, and meanwhile others; returns its result, or raises its error.

    Ray adds nodes in the main thread only.
    """
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        result = pool.submit(job)
        for disturb in disturbances:
            if not result.done():
                disturb()
        return result.result(DEADLINE_SECONDS)
