"""A Ray cluster of several raylets on this machine, and what disturbs it."""

import concurrent.futures
import json
import pathlib
import sys
import time

import psutil

sys.path.append(str(pathlib.Path(__file__).parents[2] / "benchmarks"))
from ray_cluster import add_node, cluster, kill_raylet, own_mounts  # noqa: E402

__all__ = ["add_node", "cluster", "kill_raylet", "own_mounts"]
DEADLINE_SECONDS = 150


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
