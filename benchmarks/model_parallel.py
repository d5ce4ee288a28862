"""Times a step of `model_parallel` on two devices against the plain model, on the same cores.

    .venv/bin/python benchmarks/model_parallel.py

The stages work one after the other, so no gain is possible; this measures the cost of the
placement. In another process `planning.planner` predicts the plain model's step from layers that it
runs one by one. Takes two minutes on two idle cores.
"""

import contextlib
import json
import pathlib
import statistics
import subprocess
import sys

import contest
from contender_process import ContenderProcess

CONTENDERS = [("plain", 1), ("placed", 2)]
NUM_CORES, NUM_WARM_UP_ROUNDS = 2, 2
STEPS = {"dispatch_bound": (100, 5), "compute_bound": (12, 2)}
TARGET = 1.10
PREDICT = """
import json, sys
sys.path.insert(0, sys.argv[1])
import tfparallel, contender, workloads
from tfparallel.planning.candidates import Choices
from tfparallel.planning.planner import make_plan
workload = workloads.WORKLOADS[sys.argv[2]]
choices = Choices(workload.global_batch_size, parallelism="model")
plan = make_plan(workload.build_model, contender.compile_model, 1, choices)
print(json.dumps({"step_seconds": plan.first.step_seconds}))
"""


def main(arguments):
    options = contest.parse(contest.make_parser(__doc__, num_rounds=11), arguments)
    cores = contest.cores_to_pin(NUM_CORES)
    rows, versions = [], {}
    for workload in STEPS:
        seconds, info = measure(workload, options.num_rounds, cores)
        versions = {"TensorFlow": info["tensorflow"], "Keras": info["keras"]}
        rows.append((info["description"], seconds, predicted(workload, cores)))
    versions |= {"Threads": f"{NUM_CORES} in each process"}
    results = [
        {"model": name, "seconds": seconds, "predicted_seconds": guess}
        for name, seconds, guess in rows
    ]
    contest.publish("model_parallel", page(rows), results, options, "num_rounds", versions=versions)


def measure(workload, num_rounds, cores):
    """Returns the median step of each round by kind, and a contender's description of itself."""
    num_steps, skip = STEPS[workload]
    with contextlib.ExitStack() as stack:
        contenders = [
            stack.enter_context(
                contextlib.closing(
                    ContenderProcess(
                        workload, kind, number, cores=cores, num_threads=len(cores) or NUM_CORES
                    )
                )
            )
            for kind, number in CONTENDERS
        ]
        replies = [contender.wait_until_ready() for contender in contenders]
        seconds = {kind: [] for kind, _ in CONTENDERS}
        for index in range(NUM_WARM_UP_ROUNDS + num_rounds):
            for contender in contest.in_turn(contenders, index):
                steps = contender.train(num_steps, skip)["step_seconds"]
                if index >= NUM_WARM_UP_ROUNDS:
                    seconds[contender.kind].append(statistics.median(steps))
    return seconds, replies[0]


def predicted(workload, cores):
    """The step that the plan predicts, in seconds."""
    folder = pathlib.Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", PREDICT, str(folder), workload],
        cwd=folder.parent,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    return json.loads(done.stdout.splitlines()[-1])["step_seconds"]


def page(rows):
    lines = [
        "## Layers on two devices",
        "",
        "A step of `model.fit`, two logical devices of the CPU against one, on the same two cores: "
        "the median of the rounds' medians, with the 10th and 90th percentile; ratios by round.",
        "",
    ]
    times, guesses = [], []
    for name, seconds, guess in rows:
        plain, placed = seconds["plain"], seconds["placed"]
        ratios = contest.percentiles([b / a for a, b in zip(plain, placed, strict=True)])
        cells = (milliseconds(plain), milliseconds(placed), contest.spread(ratios, 3))
        times.append((name, *cells, f"at most {TARGET:.2f}"))
        median = statistics.median(plain)
        cells = (f"{1000 * guess:.2f}", f"{1000 * median:.2f}", f"{guess / median:.2f}")
        guesses.append((name, *cells))
    heads = (
        ("model", "plain, ms", "`model_parallel`, 2 devices, ms", "ratio", "promised"),
        ("model", "step that `plan` predicts, ms", "measured, ms", "predicted / measured"),
    )
    return [*lines, *contest.table(heads[0], *times), "", *contest.table(heads[1], *guesses)]


def milliseconds(seconds):
    return contest.spread(contest.percentiles([1e3 * value for value in seconds]), 2)


if __name__ == "__main__":
    contest.run(main)
