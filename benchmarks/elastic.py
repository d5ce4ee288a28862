"""Loses a host of a job for good, its chief's, and gives it two others: the same weights.

    .venv/bin/python benchmarks/elastic.py

A small network on scikit-learn's digits, 200 steps in float64, a checkpoint each 5. It starts on
three hosts (`tfparallel launch --nnodes=2:4`, a launcher each on this machine), the launcher of
worker 0 gets SIGKILL at step 60 and does not come back, two hosts go on, and at step 120 two more
come. Beside it the same training in one process that nobody disturbs. Of each batch it is kept
which examples it had.
"""

import contextlib
import hashlib
import json
import pathlib
import subprocess
import sys
import tempfile

import contest
import environment
import numpy as np
import psutil
from restarts import newest, wait_for

sys.path.insert(0, str(contest.TOP))
from tfparallel.cluster.ports import free_ports  # noqa: E402

WORKER = pathlib.Path(__file__).with_name("elastic_worker.py")
SLOW = 0.05  # Seconds that each step waits, so that there is a middle to disturb.
KILLED_AT, JOINED_AT = 60, 120
TOLERANCE, TARGET_SECONDS = 1e-9, 10.0
DEADLINE_SECONDS = 300.0


def main(arguments):
    options = contest.parse(contest.make_parser(__doc__), arguments)
    described = environment.describe()
    with tempfile.TemporaryDirectory() as top:
        alone, elastic = pathlib.Path(top, "alone"), pathlib.Path(top, "elastic")
        for folder in (alone, elastic):
            folder.mkdir()
        command = [sys.executable, str(WORKER), str(alone), "0"]
        subprocess.run(command, check=True, timeout=DEADLINE_SECONDS, capture_output=True)
        said = disturbed(elastic)
        expected, found = weights(alone), weights(elastic)
        largest = max(np.abs(a - b).max() for a, b in zip(expected, found, strict=True))
        losses = [steps(folder)[:, 1] for folder in (alone, elastic)]
        result = {
            "weights": float(largest),
            "losses": float(np.abs(losses[0] - losses[1]).max()),
            "order": [order(folder) for folder in (alone, elastic)],
            "lost": longest_pause(elastic, KILLED_AT, JOINED_AT),
            "grown": longest_pause(elastic, JOINED_AT, float("inf")),
        }
    print(said, file=sys.stderr)
    is_right = largest <= TOLERANCE and len(set(result["order"])) == 1
    contest.publish("elastic", page(result, described, options), result, options)
    return 0 if is_right else 1


def disturbed(folder):
    """Trains on 3 hosts, on 2, on 4; returns what was said."""
    (port,) = free_ports(1)
    launch = [sys.executable, "-m", "tfparallel", "launch", "--nnodes=2:4", "--grace_seconds=20"]
    launch += [f"--rdzv_endpoint=127.0.0.1:{port}", "--", sys.executable, str(WORKER)]
    launch += [str(folder), str(SLOW)]
    checkpoints = folder / "checkpoints"
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(open(folder / "output", "w+b"))
        jobs = []

        def host():
            jobs.append(subprocess.Popen(launch, cwd=contest.TOP, stdout=output, stderr=output))
            stack.callback(jobs[-1].wait)
            stack.callback(jobs[-1].terminate)

        for _ in range(3):
            host()
        wait_for(lambda: newest(checkpoints) >= KILLED_AT, jobs[1], "the step of the kill")
        chief = next(job for job in jobs if is_chief(job))
        chief.kill()
        left = next(job for job in jobs if job is not chief)
        wait_for(lambda: newest(checkpoints) >= JOINED_AT, left, "the step of the newcomers")
        for _ in range(2):
            host()
        for job in jobs:
            if job is not chief and job.wait(DEADLINE_SECONDS):
                output.seek(0)
                raise RuntimeError(f"A launcher failed:\n{output.read().decode()[-3000:]}")
        output.seek(0)
        return output.read().decode()


def is_chief(job):
    """Whether worker 0 is one of its processes."""
    ranks = []
    for process in psutil.Process(job.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            ranks.append(process.environ().get("RANK"))
    return "0" in ranks


def longest_pause(folder, begin, end):
    """The longest time between two new steps, of those from `begin` up to `end`."""
    lines = (json.loads(line) for line in (folder / "steps").read_text().splitlines())
    newest, ended, pauses = -1, None, [0.0]
    for step, when, *_ in lines:
        if step > newest:
            if ended is not None and begin <= step < end:
                pauses.append(when - ended)
            newest, ended = step, when
    return max(pauses) - SLOW


def steps(folder):
    """By step what the chief saw last: when it ended, the loss, which examples it had."""
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


def page(result, described, options):
    def seconds(name):
        return f"{result[name]:.1f} s | {TARGET_SECONDS:.0f} s |"

    lines = [
        "## Elastic: a host lost for good, and two that come",
        "",
        "200 steps in float64 under `launch --nnodes=2:4`, a launcher each on one machine: three "
        f"hosts, of which worker 0's is killed at step {KILLED_AT}; two; four from step "
        f"{JOINED_AT} on. Beside it one process that nobody disturbs.",
        "",
        "| | measured | promised |",
        "| --- | --- | --- |",
        f"| largest difference of a weight | {result['weights']:.1e} | {TOLERANCE:.0e} |",
        f"| largest difference of a step's loss | {result['losses']:.1e} | {TOLERANCE:.0e} |",
        f"| hash of the examples of each step | {result['order'][1]} | {result['order'][0]} |",
        f"| from the last step before the kill to a new one, of two hosts | {seconds('lost')}",
        f"| from the last step of two hosts to the next, of four | {seconds('grown')}",
    ]
    return lines + contest.footer("elastic", described, options)


if __name__ == "__main__":
    contest.run(main)
