"""Times an all-reduce of 2 workers on one host: TensorFlow's ring, ours, and PyTorch's gloo.

    .venv/bin/python benchmarks/all_reduce.py
    .venv/bin/python benchmarks/all_reduce.py --torch=OTHER_VENV/bin/python

Contenders take turns, one round each, in alternating order; the others idle meanwhile. An
iteration's time is the slower worker's, after a barrier. Every element is checked once per round.
"""

import contextlib
import pathlib
import sys
import tempfile

import contest
import numpy as np

PROGRAM = str(pathlib.Path(__file__).with_name("all_reduce_contender.py"))
NUM_WORKERS = 2
KIB, MIB = 2**10, 2**20
ITERATIONS = {4 * KIB: 400, 64 * KIB: 400, MIB: 100, 4 * MIB: 40, 16 * MIB: 10, 64 * MIB: 6}
TITLES = {
    "stock": "TensorFlow's ring",
    "ours_ring_tuned": "`ring_tuned`",
    "ours_mpi": "`mpi`",
    "ours_mpi_library": "`mpi_library`",
    "gloo": "PyTorch's gloo",
}
# Size -> target speed-up of `mpi` over TensorFlow's ring, and over gloo.
MPI_TARGETS = {4 * KIB: (4, 1), 64 * KIB: (4, 1), MIB: (6, 1.5), 4 * MIB: (6, 1.5)}
MPI_TARGETS |= {16 * MIB: (5, 1.5), 64 * MIB: (5, 1.2)}
RING_TARGETS = {16 * MIB: 1.2, 64 * MIB: 1.5}


def main(arguments):
    options = parse(arguments)
    cores = contest.cores_to_pin(NUM_WORKERS)
    kinds = [kind for kind in TITLES if kind != "gloo" or options.torch]
    with contextlib.ExitStack() as stack:
        contenders = {kind: start(kind, stack, cores, options.torch) for kind in kinds}
        replies = {kind: group.wait_until_ready()[0] for kind, group in contenders.items()}
        results = {size: measure(size, contenders, options) for size in options.bytes or ITERATIONS}
    versions = ", ".join(dict.fromkeys(each["version"] for each in replies.values()))
    lines, versions = page(results, replies), {"Versions": versions}
    contest.publish("all_reduce", lines, results, options, "num_rounds", versions=versions)


def parse(arguments):
    parser = contest.make_parser(__doc__, num_rounds=7, torch=True)
    parser.add_argument(
        "--bytes", action="append", type=int, choices=ITERATIONS, help="a size; repeatable"
    )
    return contest.parse(parser, arguments)


def start(kind, stack, cores, torch):
    """Starts the workers of a contender."""
    variables = contest.job_environments(NUM_WORKERS)
    if kind == "stock":  # A job started by hand has none of the launcher's settings.
        variables = [
            {name: value for name, value in each.items() if not name.startswith("MALLOC_")}
            for each in variables
        ]
    python = torch
    if kind != "gloo":
        python = sys.executable
        meeting = stack.enter_context(tempfile.NamedTemporaryFile())
        meeting.write(bytes(64 * NUM_WORKERS))
        meeting.flush()
        variables = [{**each, "MEETING": meeting.name} for each in variables]
    return contest.Group(
        stack, "all_reduce", kind, variables, cores=cores, program=(python, PROGRAM)
    )


def iterations(group, size):
    """Returns the milliseconds of each iteration, those of the slower worker."""
    replies = group.ask(bytes=size, iterations=ITERATIONS[size])
    if any(reply["num_wrong"] for reply in replies):
        raise RuntimeError(f"Wrong elements at {size} bytes: {replies}")
    return (1e3 * np.max([reply["seconds"] for reply in replies], axis=0)).tolist()


def measure(size, contenders, options):
    times = timed(size, contenders, options)
    medians = {kind: np.median(rounds, axis=1) for kind, rounds in times.items()}
    return {
        "ms": {kind: contest.percentiles(np.concatenate(rounds)) for kind, rounds in times.items()},
        "ratio": {
            f"{slow}/{fast}": contest.percentiles(medians[slow] / medians[fast])
            for fast in ("ours_mpi", "ours_ring_tuned")
            for slow in ("stock", "gloo")
            if slow in medians
        },
    }


def timed(size, contenders, options):
    """Returns the milliseconds of the iterations of each round, by contender."""
    times = {kind: [] for kind in contenders}
    for index in range(-1, options.num_rounds):  # One round to warm up.
        for kind in contest.in_turn(list(contenders), index):
            measured = iterations(contenders[kind], size)
            if index >= 0:
                times[kind].append(measured)
        print(f"{size} bytes, round {index + 1}", file=sys.stderr)
    return times


def page(results, replies):
    """The lines of RESULTS.md about the all-reduce between workers."""
    kinds = list(replies)
    lines = [
        "## All-reduce between 2 workers of one host, a core each",
        "",
        "Milliseconds for a sum of float32: the median of all iterations, with the 10th and 90th "
        "percentile; of the two workers the slower, after a barrier. Every element was checked.",
        "",
        *times_table(results, {kind: TITLES[kind] for kind in kinds}),
        "",
    ]
    rows = []
    for size, result in results.items():
        ratio = result["ratio"]
        over_gloo = contest.spread(ratio["gloo/ours_mpi"], 2) if "gloo/ours_mpi" in ratio else ""
        rows.append(
            [
                name_of(size),
                contest.spread(ratio["stock/ours_mpi"], 2),
                MPI_TARGETS[size][0],
                over_gloo,
                MPI_TARGETS[size][1] if over_gloo else "",
                contest.spread(ratio["stock/ours_ring_tuned"], 2),
                RING_TARGETS.get(size, ""),
            ]
        )
    head = ("size", "`mpi` over TensorFlow's ring", "to reach", "`mpi` over gloo", "to reach")
    head += ("`ring_tuned` over TensorFlow's ring", "to reach")
    ran = "; ".join(f"{TITLES[kind]}: {replies[kind]['implementation']}" for kind in kinds)
    return [*lines, *contest.table(head, *rows), "", f"What ran: {ran}."]


def times_table(results, titles):
    """The lines of the times in milliseconds, by size and contender."""
    rows = [
        [name_of(size), *(contest.spread(result["ms"][kind], 2) for kind in titles)]
        for size, result in results.items()
    ]
    return contest.table(["size", *titles.values()], *rows)


def name_of(size):
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


if __name__ == "__main__":
    contest.run(main)
