"""Checks that a job on Ray that loses two nodes and gains two ends at the same weights.

    pip install ray
    .venv/bin/python benchmarks/ray_elastic.py

A small network on scikit-learn's digits trains 200 steps in float64, with a checkpoint every 5
steps, under `tfparallel.ray.fit(…, num_workers=(2, 4))` on a Ray cluster of four raylets on this
machine, a CPU each. At step 60 two raylets get SIGKILL; two workers continue, and at step 120 two
raylets are added. The reference is the same training, undisturbed in one process. The examples of
each batch are recorded.

The time of a loss runs from the kill of the first raylet to the end of the first new step. It
includes Ray's own detection: an actor ends about a second after its raylet, and the driver's call
to it then fails.
"""

import concurrent.futures
import hashlib
import importlib
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import contest
import numpy as np
import ray_cluster
from fault_runs import newest

sys.path.insert(0, str(contest.TOP))
import tfparallel  # noqa: E402
from tfparallel.installed import version_of  # noqa: E402

WORKER = pathlib.Path(__file__).with_name("elastic_worker.py")
KILLED_AT, JOINED_AT = 60, 120
TOLERANCE = 1e-9
SLOW = 0.35  # Seconds that each step waits: a node takes some seconds to start.
DEADLINE_SECONDS = 300.0
TARGET_SECONDS = 15.0


def main(arguments):
    options = contest.parse(contest.make_parser(__doc__), arguments)
    if ray_cluster.is_missing("ray_elastic.py"):
        return
    with tempfile.TemporaryDirectory() as top:
        alone, on_ray = pathlib.Path(top, "alone"), pathlib.Path(top, "on_ray")
        for folder in (alone, on_ray):
            folder.mkdir()
        command = [sys.executable, str(WORKER), str(alone), "0"]
        subprocess.run(command, check=True, timeout=DEADLINE_SECONDS, capture_output=True)
        with ray_cluster.cluster(4) as cluster:
            killed = disturbed(cluster, on_ray)
        expected, actual = weights(alone), weights(on_ray)
        largest = max(np.abs(a - b).max() for a, b in zip(expected, actual, strict=True))
        losses = [steps(folder)[:, 1] for folder in (alone, on_ray)]
        gaps = pauses(on_ray)
        result = {
            "weights": float(largest),
            "losses": float(np.abs(losses[0] - losses[1]).max()),
            "order": [order(folder) for folder in (alone, on_ray)],
            "sizes": sizes(on_ray),
            "lost": max((b - a, b) for _, a, b in gaps if a < killed + 5.0 < b + 5.0)[1] - killed,
            "grown": max(b - a for step, a, b in gaps if step >= JOINED_AT) - SLOW,
        }
    if result["sizes"] != [4, 2, 4]:
        raise RuntimeError(f"The job ran on {result['sizes']} workers, instead of 4, 2 and 4.")
    is_right = largest <= TOLERANCE and len(set(result["order"])) == 1
    versions = {"Ray": version_of("ray")}
    contest.publish("ray_elastic", page(result), result, options, versions=versions)
    return 0 if is_right else 1


def disturbed(cluster, folder):
    """Trains on 4, 2 and 4 workers; returns when the first raylet was killed."""
    arguments = [str(folder), str(WORKER.parent), SLOW]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        # Ray adds nodes in the main thread only.
        job = pool.submit(tfparallel.ray.fit, work, (2, 4), args=arguments)
        wait_for_step(folder, KILLED_AT, job)
        killed = time.time()
        for node in list(cluster.worker_nodes)[:2]:
            ray_cluster.kill_raylet(cluster, node)
        wait_for_step(folder, JOINED_AT, job)
        for _ in range(2):
            ray_cluster.add_node(cluster)
        job.result(DEADLINE_SECONDS)
    return killed


def work(folder, programs, seconds):
    """What each worker calls."""
    sys.path.insert(0, programs)
    elastic_worker = importlib.import_module("elastic_worker")
    if os.environ["RANK"] == "0":
        path = pathlib.Path(folder, f"attempt_{os.environ['TFPARALLEL_RESTART_COUNT']}")
        path.write_text(os.environ["WORLD_SIZE"])
    elastic_worker.main(folder, seconds)


def sizes(folder):
    """The number of workers of each attempt; attempts of the same size count once."""
    paths = sorted(folder.glob("attempt_*"), key=lambda path: int(path.name.split("_")[1]))
    return [size for size, _ in itertools.groupby(int(path.read_text()) for path in paths)]


def wait_for_step(folder, step, job):
    deadline = time.monotonic() + DEADLINE_SECONDS
    while newest(folder / "checkpoints") < step:
        if job.done() or time.monotonic() > deadline:
            raise RuntimeError(f"The job ended, or {DEADLINE_SECONDS:.0f} s passed, before {step}.")
        time.sleep(0.005)


def pauses(folder):
    """For each new step: its number, when the previous step ended, and when it ended."""
    lines = (json.loads(line) for line in (folder / "steps").read_text().splitlines())
    pauses_of_steps, newest, ended = [], -1, None
    for step, when, *_ in lines:
        if step > newest:
            if ended is not None:
                pauses_of_steps.append((step, ended, when))
            newest, ended = step, when
    return pauses_of_steps


def steps(folder):
    """The chief's last record of each step: when it ended, the loss, and the batch's examples."""
    lines = (json.loads(line) for line in (folder / "steps").read_text().splitlines())
    by_step = {step: seen for step, *seen in lines}
    return np.array([by_step[step] for step in sorted(by_step)])


def order(folder):
    """A hash of which examples each step had."""
    means = np.round(steps(folder)[:, 2], 3)
    return hashlib.sha256(means.tobytes()).hexdigest()[:12]


def weights(folder):
    with np.load(folder / "weights.npz") as file:
        return [file[name] for name in file.files]


def page(result):
    return [
        "## Ray: two nodes lost, and two that come",
        "",
        "200 steps in float64 under `tfparallel.ray.fit(…, num_workers=(2, 4))`, on a Ray cluster "
        "of four raylets on one machine: four workers, of which two lose their raylets at step "
        f"{KILLED_AT}; two; four again from step {JOINED_AT} on. Beside it one "
        "process that nobody disturbs.",
        "",
        "| | measured | promised |",
        "| --- | --- | --- |",
        f"| largest difference of a weight | {result['weights']:.1e} | {TOLERANCE:.0e} |",
        f"| largest difference of a step's loss | {result['losses']:.1e} | {TOLERANCE:.0e} |",
        f"| hash of the examples of each step | {result['order'][1]} | {result['order'][0]} |",
        "| from the raylets' death to the end of the first new step, with Ray's detection of it | "
        f"{result['lost']:.1f} s | {TARGET_SECONDS:.0f} s |",
        f"| from the last step of two workers to the first of four | {result['grown']:.1f} s | |",
    ]


if __name__ == "__main__":
    contest.run(main)
