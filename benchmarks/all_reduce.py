"""Times an all-reduce of 2 workers on one host: TensorFlow's ring, ours, and PyTorch's gloo.

    .venv/bin/python benchmarks/all_reduce.py
    .venv/bin/python benchmarks/all_reduce.py --torch=OTHER_VENV/bin/python

Contenders take turns, a round each, now forwards, now backwards; only the one whose turn it is
runs. An iteration is the slower worker's, after a barrier; every element is checked once a round.
"""

import argparse
import contextlib
import json
import os
import pathlib
import sys

import blocks
import environment
import numpy as np
from contender_process import ContenderProcess

TOP = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(TOP))
from tfparallel.cluster.environment import Place, worker_environment  # noqa: E402
from tfparallel.cluster.ports import free_ports  # noqa: E402

PAGE = pathlib.Path(__file__).with_name("RESULTS.md")
PROGRAM = PAGE.with_name("all_reduce_contender.py")
NUM_WORKERS = 2
KIB, MIB = 2**10, 2**20
ITERATIONS = {4 * KIB: 40, 64 * KIB: 40, MIB: 20, 4 * MIB: 15, 16 * MIB: 10, 64 * MIB: 6}
TITLES = {
    "stock": "TensorFlow's ring",
    "ours_ring_tuned": "`ring_tuned`",
    "ours_mpi": "`mpi`",
    "ours_mpi_library": "`mpi_library`",
    "gloo": "PyTorch's gloo",
}
# Size -> how much faster than TensorFlow's ring, and than gloo, `mpi` is to be.
MPI_TARGETS = {4 * KIB: (4, 1), 64 * KIB: (4, 1), MIB: (6, 1.5), 4 * MIB: (6, 1.5)}
MPI_TARGETS |= {16 * MIB: (5, 1.5), 64 * MIB: (5, 1.2)}
RING_TARGETS = {16 * MIB: 1.2, 64 * MIB: 1.5}


class Contender:
    """The workers of one contender."""

    def __init__(self, kind, cores, stack, python):
        ports = free_ports(NUM_WORKERS + 1)
        addresses = [f"127.0.0.1:{port}" for port in ports[1:]]
        self.processes = []
        for worker in range(NUM_WORKERS):
            place = Place(
                addresses, worker, worker, NUM_WORKERS, 0, f"127.0.0.1:{ports[0]}", "bench", 0
            )
            variables = worker_environment({"PATH": os.environ["PATH"]}, place)
            if kind == "stock":  # What a user starts by hand has none of the launcher's settings.
                variables = {k: v for k, v in variables.items() if not k.startswith("MALLOC_")}
            process = ContenderProcess(
                "all_reduce",
                kind,
                NUM_WORKERS,
                cores=[cores[worker]] if cores else [],
                num_threads=1,
                environment=variables,
                program=(python, str(PROGRAM)),
            )
            stack.callback(process.close)
            self.processes.append(process)

    def wait_until_ready(self):
        return [process.wait_until_ready() for process in self.processes][0]

    def measure(self, size):
        """Returns each iteration's milliseconds, of the slower worker."""
        for process in self.processes:
            process.ask(bytes=size, iterations=ITERATIONS[size])
        replies = [process.answer() for process in self.processes]
        if any(reply["num_wrong"] for reply in replies):
            raise RuntimeError(f"Wrong elements at {size} bytes: {replies}")
        return (1e3 * np.max([reply["seconds"] for reply in replies], axis=0)).tolist()


def main(arguments):
    options = parse(arguments)
    cores = environment.cores_to_pin(NUM_WORKERS)
    described = environment.describe()
    kinds = [kind for kind in TITLES if kind != "gloo" or options.torch]
    with contextlib.ExitStack() as stack:
        contenders = {}
        for kind in kinds:
            python = options.torch if kind == "gloo" else sys.executable
            contenders[kind] = Contender(kind, cores, stack, python)
        told = {kind: contender.wait_until_ready() for kind, contender in contenders.items()}
        found = {size: measure(size, contenders, options) for size in options.bytes or ITERATIONS}
    lines = page(found, told, described, options)
    print("\n".join(lines))
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(found, indent=2) + "\n")
    if options.write:
        blocks.write(pathlib.Path(options.write), "all_reduce", lines)


def parse(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--bytes", action="append", type=int, choices=ITERATIONS, help="a size; repeatable"
    )
    parser.add_argument("--num_rounds", type=int, default=7, help="timed rounds (7)")
    parser.add_argument("--torch", metavar="PYTHON", help="a Python that has PyTorch")
    parser.add_argument("--json", metavar="PATH", help="write every figure here")
    parser.add_argument(
        "--write", metavar="PATH", default=PAGE, help="the page to renew; empty for none"
    )
    return parser.parse_args(arguments)


def measure(size, contenders, options):
    times = {kind: [] for kind in contenders}
    for index in range(-1, options.num_rounds):  # One round to warm up.
        turn = list(contenders) if index % 2 else list(contenders)[::-1]
        for kind in turn:
            measured = contenders[kind].measure(size)
            if index >= 0:
                times[kind].append(measured)
        print(f"{size} bytes, round {index + 1}", file=sys.stderr)
    medians = {kind: [float(np.median(one)) for one in rounds] for kind, rounds in times.items()}
    return {
        "ms": {kind: percentiles(np.concatenate(rounds)) for kind, rounds in times.items()},
        "ratio": {
            f"{slow}/{fast}": percentiles(np.divide(medians[slow], medians[fast]))
            for fast in ("ours_mpi", "ours_ring_tuned")
            for slow in ("stock", "gloo")
            if slow in medians
        },
    }


def percentiles(values):
    p10, median, p90 = (float(value) for value in np.percentile(values, [10, 50, 90]))
    return {"median": median, "p10": p10, "p90": p90}


def page(found, told, described, options):
    """The lines of RESULTS.md about the all-reduce between workers."""

    def spread(value, digits):
        median, p10, p90 = (f"{value[key]:.{digits}f}" for key in ("median", "p10", "p90"))
        return f"{median} ({p10} to {p90})"

    kinds = list(told)
    lines = [
        "## All-reduce between 2 workers of one host, a core each",
        "",
        "Milliseconds for a sum of float32: the median of all iterations, with the 10th and 90th "
        "percentile; of the two workers the slower, after a barrier. Every element was checked.",
        "",
        "| size | " + " | ".join(TITLES[kind] for kind in kinds) + " |",
        "| --- |" + " --- |" * len(kinds),
    ]
    for size, result in found.items():
        cells = [spread(result["ms"][kind], 2) for kind in kinds]
        lines.append(f"| {name_of(size)} | {' | '.join(cells)} |")
    lines += [
        "",
        "| size | `mpi` over TensorFlow's ring | to reach | `mpi` over gloo | to reach "
        "| `ring_tuned` over TensorFlow's ring | to reach |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for size, result in found.items():
        ratio = result["ratio"]
        over_gloo = spread(ratio["gloo/ours_mpi"], 2) if "gloo/ours_mpi" in ratio else ""
        cells = [
            name_of(size),
            spread(ratio["stock/ours_mpi"], 2),
            f"{MPI_TARGETS[size][0]}",
            over_gloo,
            f"{MPI_TARGETS[size][1]}" if over_gloo else "",
            spread(ratio["stock/ours_ring_tuned"], 2),
            f"{RING_TARGETS.get(size, '')}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    ran = "; ".join(f"{TITLES[kind]}: {told[kind]['implementation']}" for kind in kinds)
    versions = ", ".join(dict.fromkeys(each["version"] for each in told.values()))
    lines += [
        "",
        f"What ran: {ran}.",
        "",
        "Environment: " + "; ".join(f"{k}: {v}" for k, v in described.items())
        + f"; versions: {versions}.",
        "",
        f"To reproduce: `.venv/bin/python benchmarks/all_reduce.py --num_rounds="
        f"{options.num_rounds}" + (" --torch=PYTHON_WITH_TORCH" if options.torch else "")
        + "`, on two idle cores.",
    ]
    return lines


def name_of(size):
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except RuntimeError as error:
        sys.exit(f"all_reduce.py: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
