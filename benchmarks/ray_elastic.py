"""Checks that a job on Ray that loses two nodes and gains two ends at the same weights.

    pip install ray
    .venv/bin/python benchmarks/ray_elastic.py

The training of `elastic.py`, 200 steps in float64 with a checkpoint every 5 steps, under
`tfparallel.ray.fit(…, num_workers=(2, 4))` on a Ray cluster of four raylets on this machine, a CPU
each. At step 60 two raylets get SIGKILL; two workers continue, and at step 120 two raylets are
added. The reference is the same training, undisturbed in one process. The examples of each batch
are recorded.

The time of a loss runs from the kill of the first raylet to the end of the first new step. It
includes Ray's own detection: an actor ends about a second after its raylet, and the driver's call
to it then fails.
"""

import concurrent.futures
import importlib
import itertools
import os
import pathlib
import sys
import tempfile
import time

import contest
import elastic

sys.path.insert(0, str(contest.TOP))
import tfparallel  # noqa: E402

NODE = {"num_cpus": 1, "object_store_memory": 80_000_000}
SLOW = 0.35  # Seconds that each step waits: a node takes some seconds to start.
DEADLINE_SECONDS = 300.0
TARGET_SECONDS = 15.0


def main(arguments):
    options = contest.parse(contest.make_parser(__doc__), arguments)
    try:
        import ray
    except ImportError:
        print("ray_elastic.py measures nothing here: `pip install ray` first.", file=sys.stderr)
        return
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with tempfile.TemporaryDirectory() as top:
        alone, on_ray = pathlib.Path(top, "alone"), pathlib.Path(top, "on_ray")
        for folder in (alone, on_ray):
            folder.mkdir()
        elastic.train_alone(alone)
        cluster = Cluster()
        try:
            cluster.add_node(include_dashboard=False, **NODE)
            for _ in range(3):
                cluster.add_node(**NODE)
            ray.init(address=cluster.address, log_to_driver=False)
            killed = disturbed(cluster, on_ray)
        finally:
            ray.shutdown()
            cluster.shutdown()
        gaps = elastic.pauses(on_ray)
        result = elastic.compared(alone, on_ray) | {
            "sizes": sizes(on_ray),
            "lost": max((b - a, b) for _, a, b in gaps if a < killed + 5.0 < b + 5.0)[1] - killed,
            "grown": max(b - a for step, a, b in gaps if step >= elastic.JOINED_AT) - SLOW,
        }
    if result["sizes"] != [4, 2, 4]:
        raise RuntimeError(f"The job ran on {result['sizes']} workers, instead of 4, 2 and 4.")
    versions = {"Ray": ray.__version__}
    contest.publish("ray_elastic", page(result), result, options, versions=versions)
    return 0 if elastic.is_right(result) else 1


def disturbed(cluster, folder):
    """Trains on 4, 2 and 4 workers; returns when the first raylet was killed."""
    arguments = [str(folder), str(elastic.WORKER.parent), SLOW]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        # Ray adds nodes in the main thread only.
        job = pool.submit(tfparallel.ray.fit, work, (2, 4), args=arguments)
        elastic.wait_for_step(folder, elastic.KILLED_AT, job.done)
        nodes = list(cluster.worker_nodes)[:2]
        killed = time.time()
        for node in nodes:
            node.kill_raylet()
        for node in nodes:
            cluster.remove_node(node, allow_graceful=False)
        elastic.wait_for_step(folder, elastic.JOINED_AT, job.done)
        for _ in range(2):
            cluster.add_node(**NODE)
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


def page(result):
    lost = "from the raylets' death to the end of the first new step, with Ray's detection of it"
    grown = "from the last step of two workers to the first of four"
    return [
        "## Ray: two nodes lost, and two that come",
        "",
        "200 steps in float64 under `tfparallel.ray.fit(…, num_workers=(2, 4))`, on a Ray cluster "
        "of four raylets on one machine: four workers, of which two lose their raylets at step "
        f"{elastic.KILLED_AT}; two; four again from step {elastic.JOINED_AT} on. Beside it one "
        "process that nobody disturbs.",
        "",
        *elastic.verdicts(
            result,
            (lost, f"{result['lost']:.1f} s", f"{TARGET_SECONDS:.0f} s"),
            (grown, f"{result['grown']:.1f} s", ""),
        ),
    ]


if __name__ == "__main__":
    contest.run(main)
