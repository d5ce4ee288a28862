"""Times a step of `fit` on 2 workers, a core each, against one process on one core.

    .venv/bin/python benchmarks/scaling.py
    .venv/bin/python benchmarks/scaling.py --torch=OTHER_VENV/bin/python

Weak scaling: a worker has as many examples as the one process. Beside it, if a Python with PyTorch
is named, DistributedDataParallel with gloo on the same network, batch and cores. Contenders take
turns, a round each, now forwards, now backwards; only the one whose turn it is runs.
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
from tfparallel.cluster.environment import ALL_REDUCE, Place, worker_environment  # noqa: E402
from tfparallel.cluster.ports import free_ports  # noqa: E402

PAGE = pathlib.Path(__file__).with_name("RESULTS.md")
PROGRAMS = [PAGE.with_name("contender.py"), PAGE.with_name("torch_contender.py")]
NUM_WORKERS = 2
# Examples a worker -> the efficiency promised of `fit`: with TensorFlow's own collectives, by MPI.
TARGETS = {32: 0.75, 128: 0.90}
MPI_TARGETS = {32: 0.88, 128: 0.95}
STEPS = {32: 40, 128: 14}
NUM_SKIPPED = 4
NUM_WARM_UP_ROUNDS = 2
TITLES = {
    "plain": "plain Keras, 1 process, no strategy",
    "torch": "PyTorch, 1 process",
    "ours": "`tfparallel.data_parallel`, 2 workers",
    "mpi": "the same with `all_reduce=\"mpi\"`",
    "ddp": "PyTorch DDP with gloo, 2 workers",
}


class Contender:
    """The processes of one contender, which train together."""

    def __init__(self, kind, num_examples, cores, stack, python):
        num_processes = NUM_WORKERS if kind in ("ours", "mpi", "ddp") else 1
        ports = free_ports(num_processes + 1)
        addresses = [f"127.0.0.1:{port}" for port in ports[1:]]
        self.processes = []
        for worker in range(num_processes):
            place = Place(
                addresses, worker, worker, num_processes, 0, f"127.0.0.1:{ports[0]}", "bench", 0
            )
            variables = worker_environment({"PATH": os.environ["PATH"]}, place)
            if kind == "plain":  # What a user starts by hand has none of the launcher's settings.
                variables = {}
            if kind == "mpi":
                variables[ALL_REDUCE] = "mpi"
            process = ContenderProcess(
                f"cnn_{num_examples}",
                "ours" if kind == "mpi" else kind,
                num_processes,
                cores=[cores[worker]] if cores else [],
                num_threads=1,
                environment=variables,
                program=(python, str(PROGRAMS[kind in ("torch", "ddp")])),
            )
            stack.callback(process.close)
            self.processes.append(process)

    def wait_until_ready(self):
        return [process.wait_until_ready() for process in self.processes][0]

    def train(self, num_steps):
        """Returns the median step in milliseconds: of the slowest worker, step by step."""
        for process in self.processes:
            process.start_training(num_steps, NUM_SKIPPED)
        replies = [process.finish_training(num_steps) for process in self.processes]
        steps = np.max([reply["step_seconds"] for reply in replies], axis=0)
        return 1e3 * float(np.median(steps))


def main(arguments):
    options = parse(arguments)
    cores = environment.cores_to_pin(NUM_WORKERS)
    described = environment.describe()
    found = {n: measure(n, options, cores) for n in options.num_examples or TARGETS}
    lines = page(found, described, options)
    print("\n".join(lines))
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(found, indent=2) + "\n")
    if options.write:
        blocks.write(pathlib.Path(options.write), "scaling", lines)


def parse(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--num_examples", action="append", type=int, choices=TARGETS, help="a worker; repeatable"
    )
    parser.add_argument("--num_rounds", type=int, default=11, help="timed rounds (11)")
    parser.add_argument("--torch", metavar="PYTHON", help="a Python that has PyTorch")
    parser.add_argument("--json", metavar="PATH", help="write every figure here")
    parser.add_argument(
        "--write", metavar="PATH", default=PAGE, help="the page to renew; empty for none"
    )
    return parser.parse_args(arguments)


def measure(num_examples, options, cores):
    kinds = ["plain", "ours", "mpi"] + (["torch", "ddp"] if options.torch else [])
    with contextlib.ExitStack() as stack:
        contenders = {}
        for kind in kinds:
            python = options.torch if kind in ("torch", "ddp") else sys.executable
            contenders[kind] = Contender(kind, num_examples, cores, stack, python)
        versions = {kind: c.wait_until_ready() for kind, c in contenders.items()}
        rounds = []
        for index in range(-NUM_WARM_UP_ROUNDS, options.num_rounds):
            turn = kinds if index % 2 else kinds[::-1]
            medians = {kind: contenders[kind].train(STEPS[num_examples]) for kind in turn}
            rounds.append(medians)
            print(f"{num_examples} a worker, round {index + 1}: {medians}", file=sys.stderr)
    rounds = rounds[NUM_WARM_UP_ROUNDS:]
    return {
        "versions": versions,
        "step_ms": {kind: percentiles([r[kind] for r in rounds]) for kind in kinds},
        "efficiency": {
            f"{many}/{one}": percentiles([r[one] / r[many] for r in rounds])
            for one, many in (
                ("plain", "ours"),
                ("plain", "mpi"),
                ("torch", "ddp"),
                ("ddp", "ours"),
                ("ddp", "mpi"),
            )
            if one in kinds and many in kinds
        },
    }


def percentiles(values):
    p10, median, p90 = (float(value) for value in np.percentile(values, [10, 50, 90]))
    return {"median": median, "p10": p10, "p90": p90}


def page(found, described, options):
    """The lines of RESULTS.md about scaling."""

    def spread(value, digits):
        median, p10, p90 = (f"{value[key]:.{digits}f}" for key in ("median", "p10", "p90"))
        return f"{median} ({p10} to {p90})"

    lines = [
        "## Scaling: 2 workers, a core each",
        "",
        "A step of `fit` of the 1.2 M-parameter network, in ms: the median of the rounds' "
        "medians, with the 10th and 90th percentile; of the workers, the slowest at each step. "
        "Efficiency is the one process's step over the workers'.",
        "",
    ]
    for num_examples, result in found.items():
        lines += [f"### {num_examples} examples a worker", "", "| | step, ms |", "| --- | --- |"]
        lines += [f"| {TITLES[k]} | {spread(v, 1)} |" for k, v in result["step_ms"].items()]
        lines += ["", "| efficiency | measured | to reach |", "| --- | --- | --- |"]
        for name, value in result["efficiency"].items():
            if name == "ours/ddp":
                continue
            many, one = name.split("/")
            targets = {"ours": TARGETS, "mpi": MPI_TARGETS}.get(many, {})
            target = f"{targets.get(num_examples, '')}"
            title = f"{TITLES[many]}, against {TITLES[one]}"
            if one == "ddp":
                title, target = "DDP's step over ours by MPI (above 1: ours is faster)", "above 1"
            lines.append(f"| {title} | {spread(value, 3)} | {target} |")
        lines.append("")
    versions = {k: v for r in found.values() for d in r["versions"].values() for k, v in d.items()}
    named = {k: v for k, v in versions.items() if k in ("tensorflow", "keras", "torch")}
    lines += [
        "Environment: " + "; ".join(f"{k}: {v}" for k, v in (described | named).items()) + ".",
        "",
        f"To reproduce: `.venv/bin/python benchmarks/scaling.py --num_rounds={options.num_rounds}"
        + (" --torch=PYTHON_WITH_TORCH" if options.torch else "")
        + "`, on two idle cores.",
    ]
    return lines


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except RuntimeError as error:
        sys.exit(f"scaling.py: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
