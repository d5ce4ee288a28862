"""Times a step of `model.fit`: plain Keras, TensorFlow's MirroredStrategy, and ours.

    .venv/bin/python benchmarks/data_parallel.py
    .venv/bin/python benchmarks/data_parallel.py --workload=dispatch_bound --num_rounds=5 --write=

The first command measures all workloads and writes RESULTS.md beside this file, in three minutes on
two idle cores; the second tries one workload.
"""

import contextlib
import sys
from typing import NamedTuple

import contest
import environment
import results
from contender_process import ContenderProcess

NUM_CORES = 2
NUM_WARM_UP_ROUNDS = 2
CONTENDERS = [("plain", 1), ("stock", 1), ("ours", 1), ("stock", 2), ("ours", 2)]
CONTENDERS += [("plain_xla", 1), ("ours_xla", 2)]


class Plan(NamedTuple):
    """The steps of a round; the first are not timed."""

    num_steps: int
    num_skipped: int


# By the names of `workloads.py`. Rounds are short, so that those of a pair lie close together.
PLANS = {
    "dispatch_bound": Plan(num_steps=200, num_skipped=5),
    "compute_bound": Plan(num_steps=12, num_skipped=2),
}


def main(arguments):
    options = parse(arguments)
    cores = environment.cores_to_pin(NUM_CORES)
    num_threads = len(cores) or NUM_CORES
    described = environment.describe()  # Before the contenders raise the load.
    measured, versions = {}, {}
    for workload in options.workload or PLANS:
        measured[workload], versions = measure(workload, options, cores, num_threads)
    described |= {
        "TensorFlow": versions["tensorflow"],
        "Keras": versions["keras"],
        "Threads": f"intra-op {num_threads}, inter-op {num_threads}, in each process",
        "Pinned to cores": ", ".join(map(str, cores)) or "none: this system cannot pin",
    }
    report = {"environment": described, "command": command(options), "workloads": measured}
    contest.publish("data_parallel", results.page(report), report, options, results.figures(report))


def parse(arguments):
    parser = contest.make_parser(__doc__, num_rounds=9)
    parser.add_argument(
        "--workload", action="append", choices=PLANS, help="measure this one alone; repeatable"
    )
    parser.add_argument(
        "--num_steps", type=contest.positive, help="timed steps a round (195 small, 10 large)"
    )
    return contest.parse(parser, arguments)


def command(options):
    """Returns the line that measures the same again; paths are left out."""
    words = [".venv/bin/python benchmarks/data_parallel.py"]
    words += [f"--workload={name}" for name in options.workload or ()]
    words += [f"--num_rounds={options.num_rounds}"]
    words += [f"--num_steps={options.num_steps}"] if options.num_steps else []
    return " ".join(words)


def measure(workload, options, cores, num_threads):
    """Returns a workload's results, and the contenders' versions."""
    plan = PLANS[workload]
    num_steps = plan.num_steps if not options.num_steps else options.num_steps + plan.num_skipped
    with contextlib.ExitStack() as stack:
        contenders = []
        for kind, num_replicas in CONTENDERS:
            contender = ContenderProcess(
                workload, kind, num_replicas, cores=cores, num_threads=num_threads
            )
            stack.callback(contender.close)
            contenders.append(contender)
        progress(f"{workload}: starting {len(contenders)} processes")
        descriptions = [contender.wait_until_ready() for contender in contenders]
        first = {contender.name: contender.train(1) for contender in contenders}
        rounds = []
        for index in range(-NUM_WARM_UP_ROUNDS, options.num_rounds):
            turn = contest.in_turn(contenders, index)
            replies = {
                contender.name: contender.train(num_steps, plan.num_skipped) for contender in turn
            }
            rounds.append({contender.name: replies[contender.name] for contender in contenders})
            progress(f"{workload}: {round_title(index, options.num_rounds)}")
    warm_up, timed = rounds[:NUM_WARM_UP_ROUNDS], rounds[NUM_WARM_UP_ROUNDS:]
    result = {
        **{
            key: descriptions[0][key]
            for key in ("description", "num_parameters", "global_batch_size")
        },
        "num_rounds": options.num_rounds,
        "num_steps_a_round": num_steps,
        "num_skipped": plan.num_skipped,
        "num_steps_of_growth": options.num_rounds * num_steps,
        **results.summarize(workload, timed, first, warm_up[-1]),
    }
    return result, descriptions[0]


def round_title(index, num_rounds):
    if index < 0:
        return f"warm-up {index + NUM_WARM_UP_ROUNDS + 1} of {NUM_WARM_UP_ROUNDS}"
    return f"round {index + 1} of {num_rounds}"


def progress(text):
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    contest.run(main)
