"""Checks that a job that loses its chief's host and gains two others ends at the same weights.

    .venv/bin/python benchmarks/elastic.py
    .venv/bin/python benchmarks/elastic.py --standby

A small network on scikit-learn's digits trains 200 steps in float64, with a checkpoint every 5
steps. It starts on three hosts (`tfparallel launch --nnodes=2:4`, one launcher each on this
machine). At step 60 the launcher of worker 0 gets SIGKILL and does not come back; two hosts
continue, and at step 120 two more join. The reference is the same training, undisturbed in one
process. The examples of each batch are recorded. With `--standby` launchers keep processes ready
that have loaded TensorFlow; the steps are slower there, because these processes start only after
ten seconds.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import secrets
import subprocess
import sys
import tempfile
import time

import contest
import numpy as np
from faults import newest

sys.path.insert(0, str(contest.TOP))
from tfparallel.cluster.ports import free_ports  # noqa: E402

WORKER = pathlib.Path(__file__).with_name("elastic_worker.py")
SLOW = {False: 0.05, True: 0.35}  # Seconds that each step waits, so that it can be disturbed.
KILLED_AT, JOINED_AT = 60, 120
TOLERANCE, TARGET_SECONDS = 1e-9, 10.0
DEADLINE_SECONDS = 300.0
ENDING_SECONDS = 1.0  # A step that runs at the kill may still end within this time.


def main(arguments):
    parser = contest.make_parser(__doc__)
    parser.add_argument("--standby", action="store_true", help="launchers keep processes ready")
    options = contest.parse(parser, arguments)
    slow = SLOW[options.standby]
    with tempfile.TemporaryDirectory() as top:
        alone, elastic = pathlib.Path(top, "alone"), pathlib.Path(top, "elastic")
        for folder in (alone, elastic):
            folder.mkdir()
        train_alone(alone)
        said, killed = disturbed(elastic, options.standby)
        gaps = pauses(elastic)
        result = compared(alone, elastic) | {
            "lost": max(b - a for _, a, b in gaps if a < killed + ENDING_SECONDS and b > killed)
            - slow,
            "grown": max(b - a for step, a, b in gaps if step >= JOINED_AT) - slow,
        }
    print(said, file=sys.stderr)
    name = "elastic_standby" if options.standby else "elastic"
    contest.publish(name, page(result, options), result, options, "standby")
    return 0 if is_right(result) else 1


def train_alone(folder):
    """The reference: the same training in one process, undisturbed."""
    command = [sys.executable, str(WORKER), str(folder), "0"]
    subprocess.run(command, check=True, timeout=DEADLINE_SECONDS, capture_output=True)


def compared(alone, elastic):
    """Returns how far the folders' weights and losses are apart, and the order of examples."""
    pairs = zip(weights(alone), weights(elastic), strict=True)
    losses = [steps(folder)[:, 1] for folder in (alone, elastic)]
    return {
        "weights": float(max(np.abs(a - b).max() for a, b in pairs)),
        "losses": float(np.abs(losses[0] - losses[1]).max()),
        "order": [order(folder) for folder in (alone, elastic)],
    }


def is_right(result):
    return result["weights"] <= TOLERANCE and len(set(result["order"])) == 1


def wait_for_step(folder, step, has_ended):
    """Waits for the checkpoint of a step."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while newest(folder / "checkpoints") < step:
        if has_ended() or time.monotonic() > deadline:
            raise RuntimeError(f"The job ended, or {DEADLINE_SECONDS:.0f} s passed, before {step}.")
        time.sleep(0.005)


def disturbed(folder, standby):
    """Trains on 3 hosts, on 2, on 4; returns the output, and when a host was lost."""
    (port,) = free_ports(1)
    os.environ.setdefault("TFPARALLEL_JOB_TOKEN", secrets.token_hex(16))
    launch = [sys.executable, "-m", "tfparallel", "launch", "--nnodes=2:4", "--grace_seconds=20"]
    launch += [f"--rdzv_endpoint=127.0.0.1:{port}", *["--standby"] * standby]
    launch += ["--", sys.executable, str(WORKER), str(folder), str(SLOW[standby])]
    with contextlib.ExitStack() as stack:
        jobs, outputs = [], []

        def host():
            outputs.append(folder / f"output_{len(jobs)}")
            output = stack.enter_context(open(outputs[-1], "wb"))
            jobs.append(subprocess.Popen(launch, cwd=contest.TOP, stdout=output, stderr=output))
            stack.callback(jobs[-1].wait)
            stack.callback(jobs[-1].terminate)

        def said():
            return "".join(output.read_text() for output in outputs)

        for _ in range(3):
            host()
        wait_for_step(folder, KILLED_AT, lambda: jobs[1].poll() is not None)
        first = "round 0: node 0 of 3 hosts"
        chief = jobs[[first in output.read_text() for output in outputs].index(True)]
        chief.kill()
        killed = time.time()
        survivor = next(job for job in jobs if job is not chief)
        wait_for_step(folder, JOINED_AT, lambda: survivor.poll() is not None)
        for _ in range(2):
            host()
        for job in jobs:
            if job is not chief and job.wait(DEADLINE_SECONDS):
                raise RuntimeError(f"A launcher failed:\n{said()[-3000:]}")
        return said(), killed


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


def page(result, options):
    target = f"{TARGET_SECONDS:.0f} s"
    kill = "from the last step before the kill to a new one, of two hosts"
    grown = "from the last step of two hosts to the next, of four"
    return [
        f"## Elastic: a host lost for good, and two that come{', --standby' * options.standby}",
        "",
        "200 steps in float64 under `launch --nnodes=2:4`, a launcher each on one machine: three "
        f"hosts, of which worker 0's is killed at step {KILLED_AT}; two; four from step "
        f"{JOINED_AT} on. Beside it one process that nobody disturbs.",
        "",
        *verdicts(
            result,
            (kill, f"{result['lost']:.1f} s", target),
            (grown, f"{result['grown']:.1f} s", target),
        ),
    ]


def verdicts(result, *more):
    """The lines of the table of what `compared` returned, and of more rows."""
    return contest.table(
        ("", "measured", "promised"),
        ("largest difference of a weight", f"{result['weights']:.1e}", f"{TOLERANCE:.0e}"),
        ("largest difference of a step's loss", f"{result['losses']:.1e}", f"{TOLERANCE:.0e}"),
        ("hash of the examples of each step", *result["order"][::-1]),
        *more,
    )


if __name__ == "__main__":
    contest.run(main)
