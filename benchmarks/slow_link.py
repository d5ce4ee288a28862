"""Times a step of `fit` on 2 workers between two hosts, by what the workers send.

    .venv/bin/python benchmarks/slow_link.py
    .venv/bin/python benchmarks/slow_link.py --torch=OTHER_VENV/bin/python

The hosts are network namespaces of this machine, one core each, joined by a link of 1 Gbit/s. The
baselines are two unconnected plain Keras processes that run at once and, if you pass a Python with
PyTorch, DistributedDataParallel with gloo on the same link. Contenders take turns, one round each,
in alternating order; the others idle meanwhile. Needs root, on Linux; otherwise it says so and
measures nothing.
"""

import contextlib
import sys

import contest
import numpy as np
import two_hosts
from scaling import NUM_WORKERS, PROGRAMS, WORKLOADS

WORKLOAD = "wide_cnn_32"
APART = "apart"
RATE = "1gbit"
# Whole rounds of `local_sgd:8`: every eighth step is slow, so means are compared.
NUM_SKIPPED, NUM_STEPS = 8, 24
TITLES = {
    APART: "plain Keras, 2 processes at once that know nothing of each other",
    "every_step": "`data_parallel`",
    "bf16": '`data_parallel`, `compression="bf16"`',
    "powersgd:2": '`data_parallel`, `compression="powersgd:2"`',
    "local_sgd:8": '`data_parallel`, `sync="local_sgd:8"`',
    "ddp": "PyTorch DDP with gloo",
}


def main(arguments):
    options = contest.parse(contest.make_parser(__doc__, num_rounds=3, torch=True), arguments)
    cores = contest.cores_to_pin(NUM_WORKERS)
    with contextlib.ExitStack() as stack:
        try:
            names = stack.enter_context(two_hosts.linked(RATE))
        except RuntimeError as error:
            print(f"slow_link.py measures nothing here. {error}", file=sys.stderr)
            return
        megabits = two_hosts.megabits(names)
        kinds = [kind for kind in TITLES if kind != "ddp" or options.torch]
        groups = {kind: start(kind, stack, cores, names, options.torch) for kind in kinds}
        replies = {kind: group.wait_until_ready()[0] for kind, group in groups.items()}
        rounds = measure(groups, options)
    results = {
        "megabits": megabits,
        "step_ms": {kind: contest.percentiles([r[kind] for r in rounds]) for kind in kinds},
        "over_apart": {
            kind: contest.percentiles([r[kind] / r[APART] for r in rounds]) for kind in kinds
        },
    }
    written = {"figures": {"over_apart": results["over_apart"]}}
    written["versions"] = contest.versions_of(replies.values())
    contest.publish("slow_link", page(results), results, options, "num_rounds", **written)


def start(kind, stack, cores, names, torch):
    """Starts the processes of a contender: a worker on each host, or two unconnected ones."""
    is_torch = kind == "ddp"
    python, program = torch if is_torch else sys.executable, PROGRAMS[is_torch]
    if kind == APART:
        command, variables = (python, program), [{}] * NUM_WORKERS
    else:
        command = (*two_hosts.ON_HOST, python, program)
        jobs = contest.job_environments(NUM_WORKERS, two_hosts.ADDRESSES)
        # gloo would otherwise look for the host's name.
        variables = [
            job | {two_hosts.HOST_VARIABLE: name, "GLOO_SOCKET_IFNAME": two_hosts.LINK}
            for job, name in zip(jobs, names, strict=True)
        ]
    kind = "plain" if kind == APART else kind
    return contest.Group(stack, WORKLOAD, kind, variables, cores=cores, program=command)


def measure(groups, options):
    """Returns the rounds: contender -> its mean step in milliseconds, of the slower process."""
    rounds = []
    for index in range(-1, options.num_rounds):  # One round to warm up.
        means = {}
        for kind in contest.in_turn(list(groups), index):
            replies = groups[kind].ask(steps=NUM_STEPS, skip=NUM_SKIPPED)
            means[kind] = 1e3 * max(float(np.mean(reply["step_seconds"])) for reply in replies)
        rounds += [means] * (index >= 0)
        print(f"round {index + 1}: {means}", file=sys.stderr)
    return rounds


def page(results):
    """The lines of RESULTS.md about two hosts on a slow link."""
    lines = [
        "## Two hosts on a link of 1 Gbit/s",
        "",
        f"{WORKLOADS[WORKLOAD]}: a step of `fit` in ms, the mean over "
        f"{NUM_STEPS - NUM_SKIPPED} steps of the slower worker; the median of the rounds, with the "
        "10th and 90th percentile. The hosts are network namespaces of one machine, a core each, "
        f"whose link carries {results['megabits']:,.0f} Mbit/s of one TCP connection; TensorFlow's "
        "ring joins them.",
        "",
    ]
    rows = []
    for kind, value in results["step_ms"].items():
        over = contest.spread(results["over_apart"][kind], 2) if kind != APART else ""
        rows.append((TITLES[kind], contest.spread(value, 0), over))
    return lines + contest.table(("", "step, ms", "over the unjoined"), *rows)


if __name__ == "__main__":
    contest.run(main)
