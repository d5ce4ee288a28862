"""Times a pipeline of two stages in two processes, a core each, beside PyTorch's.

    .venv/bin/python benchmarks/pipeline.py
    .venv/bin/python benchmarks/pipeline.py --torch=OTHER_VENV/bin/python

A transformer of 10.8 M parameters, 16 sequences of 64 bytes a step, 1F1B. Beside it plain Keras in
one process on one core and, if a Python with PyTorch is named, `torch.distributed.pipelining` with
gloo on the same network, cut and cores. Contenders take turns, a round each, now forwards, now
backwards; only the one whose turn it is runs.
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
PROGRAMS = [PAGE.with_name("pipeline_contender.py"), PAGE.with_name("torch_pipeline_contender.py")]
NUM_STAGES = 2
NUM_SKIPPED, NUM_WARM_UP_ROUNDS = 2, 1
OF_IDEAL, OVER_ONE_PROCESS = 0.9, 1.6


class Contender:
    """The processes of one contender."""

    def __init__(self, kind, num_micro_batches, cores, stack, python):
        self.kind = kind
        number = NUM_STAGES if kind in ("ours", "torch_pipeline") else 1
        ports = free_ports(number + 1)
        addresses = [f"127.0.0.1:{port}" for port in ports[1:]]
        self.processes = []
        for worker in range(number):
            place = Place(
                addresses, worker, worker, number, 0, f"127.0.0.1:{ports[0]}", "bench", 0
            )
            variables = worker_environment({"PATH": os.environ["PATH"]}, place)
            process = ContenderProcess(
                str(num_micro_batches),
                kind,
                number,
                cores=[cores[worker]] if cores else [],
                num_threads=1,
                environment=variables if number > 1 else {},
                program=(python, str(PROGRAMS["torch" in kind])),
            )
            stack.callback(process.close)
            self.processes.append(process)
        # Process 1 of ours serves the first and says nothing.
        self.speaking = self.processes[:1] if kind == "ours" else self.processes

    def wait_until_ready(self):
        told = [process.wait_until_ready() for process in self.speaking]
        return told[0] | {"num_parameters": sum(t["num_parameters"] for t in told)}

    def train(self, num_steps, skip):
        """Returns the median step in milliseconds: of the slowest process, step by step."""
        for process in self.speaking:
            process.start_training(num_steps, skip)
        replies = [process.finish_training(num_steps) for process in self.speaking]
        return 1e3 * float(np.median(np.max([r["step_seconds"] for r in replies], axis=0)))

    def stage_times(self):
        return self.speaking[0].train(0)


def main(arguments):
    options = parse(arguments)
    cores = environment.cores_to_pin(NUM_STAGES)
    described = environment.describe()
    found = measure(options, cores)
    lines = page(found, described, options)
    print("\n".join(lines))
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(found, indent=2) + "\n")
    if options.write:
        blocks.write(pathlib.Path(options.write), "pipeline", lines)


def parse(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--num_micro_batches", action="append", type=int, help="repeatable (2, 4, 8)"
    )
    parser.add_argument("--num_rounds", type=int, default=7, help="timed rounds (7)")
    parser.add_argument("--num_steps", type=int, default=8, help="of a round; 2 not timed (8)")
    parser.add_argument("--torch", metavar="PYTHON", help="a Python that has PyTorch")
    parser.add_argument("--json", metavar="PATH", help="write every figure here")
    parser.add_argument(
        "--write", metavar="PATH", default=PAGE, help="the page to renew; empty for none"
    )
    options = parser.parse_args(arguments)
    options.num_micro_batches = options.num_micro_batches or [2, 4, 8]
    if options.num_steps <= NUM_SKIPPED:
        parser.error(f"more than {NUM_SKIPPED} steps a round are required")
    return options


def measure(options, cores):
    names = [("plain", 1), *(("ours", number) for number in options.num_micro_batches)]
    if options.torch:
        names += [("torch", 1)]
        names += [("torch_pipeline", number) for number in options.num_micro_batches]
    with contextlib.ExitStack() as stack:
        contenders, versions = {}, {}
        for kind, number in names:  # One after the other: each traces for a while.
            python = options.torch if "torch" in kind else sys.executable
            contenders[kind, number] = Contender(kind, number, cores, stack, python)
            told = contenders[kind, number].wait_until_ready()
            versions |= {k: v for k, v in told.items() if k in ("tensorflow", "keras", "torch")}
            contenders[kind, number].train(NUM_SKIPPED + 2, NUM_SKIPPED)
        rounds = []
        for index in range(-NUM_WARM_UP_ROUNDS, options.num_rounds):
            turn = names if index % 2 else names[::-1]
            medians = {
                name: contenders[name].train(options.num_steps, NUM_SKIPPED) for name in turn
            }
            rounds.append(medians)
            print(f"round {index + 1}: {medians}", file=sys.stderr)
        stages = {
            number: contenders["ours", number].stage_times()
            for number in options.num_micro_batches
        }
    rounds = rounds[NUM_WARM_UP_ROUNDS:]
    rows = []
    for number in options.num_micro_batches:
        ours = [r["ours", number] for r in rounds]
        # What belongs to the step and not to the passes: the update, Keras's loop, the metrics.
        own = stages[number]
        rest = max(float(np.median(ours)) - 1e3 * own["passes_seconds"], 0.0)
        row = {
            "num_micro_batches": number,
            "ours_ms": percentiles(ours),
            "over_plain": percentiles([r["plain", 1] / r["ours", number] for r in rounds]),
            "serial_ms": 1e3 * own["serial_seconds"],
            "over_serial": own["serial_seconds"] / own["passes_seconds"],
            "rest_ms": rest,
            "simulated_over_measured": own["simulated_seconds"] / own["passes_seconds"],
            "bubble": own["bubble"],
        }
        if options.torch:
            theirs = [r["torch_pipeline", number] for r in rounds]
            row["torch_ms"] = percentiles(theirs)
            ratios = [r["torch_pipeline", number] / r["ours", number] for r in rounds]
            row["torch_over_ours"] = percentiles(ratios)
        rows.append(row)
    found = {"plain_ms": percentiles([r["plain", 1] for r in rounds]), "rows": rows}
    if options.torch:
        found["torch_ms"] = percentiles([r["torch", 1] for r in rounds])
    return found | {"versions": versions}


def percentiles(values):
    p10, median, p90 = (float(value) for value in np.percentile(values, [10, 50, 90]))
    return {"median": median, "p10": p10, "p90": p90}


def page(found, described, options):
    """The lines of RESULTS.md about pipelines."""

    def spread(value, digits):
        median, p10, p90 = (f"{value[key]:.{digits}f}" for key in ("median", "p10", "p90"))
        return f"{median} ({p10} to {p90})"

    lines = [
        "## Pipeline: 2 stages in 2 processes, a core each",
        "",
        "A step of a transformer of 10.8 M parameters, 16 sequences of 64, 1F1B, in ms: the median "
        "of the rounds' medians, with the 10th and 90th percentile. Ratios by round.",
        "",
        "| one process, one core | step, ms |",
        "| --- | --- |",
        f"| plain Keras | {spread(found['plain_ms'], 0)} |",
    ]
    if "torch_ms" in found:
        lines.append(f"| PyTorch | {spread(found['torch_ms'], 0)} |")
    lines += [
        "",
        "| M | `tfparallel.pipeline_parallel` | over plain Keras on one core | to reach "
        "| `torch.distributed.pipelining` | its step over ours | to reach |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found["rows"]:
        number = row["num_micro_batches"]
        torch = spread(row["torch_ms"], 0) if "torch_ms" in row else ""
        ratio = spread(row["torch_over_ours"], 2) if "torch_ms" in row else ""
        target = f"{OVER_ONE_PROCESS}" if number == 8 else ""
        lines.append(
            f"| {number} | {spread(row['ours_ms'], 0)} | {spread(row['over_plain'], 2)} | {target} "
            f"| {torch} | {ratio} | 1 |"
        )
    lines += [
        "",
        "The passes of a step, against the same stages run one after the other, whose times were "
        "measured at that size of a micro-batch; and what the schedule should take with these "
        "times.",
        "",
        "| M | one after the other, ms | speed-up | to reach: 0.9 × 2M/(M + 1) | bubble | ideal "
        "| simulated / measured |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found["rows"]:
        number = row["num_micro_batches"]
        ideal = 2 * number / (number + 1)
        lines.append(
            f"| {number} | {row['serial_ms']:.0f} | {row['over_serial']:.2f} "
            f"| {OF_IDEAL * ideal:.2f} | {row['bubble']:.0%} | {1 / (number + 1):.0%} "
            f"| {row['simulated_over_measured']:.2f} |"
        )
    return [
        *lines,
        "",
        "Environment: "
        + "; ".join(f"{k}: {v}" for k, v in (described | found["versions"]).items())
        + ".",
        "",
        f"To reproduce: `.venv/bin/python benchmarks/pipeline.py --num_rounds={options.num_rounds} "
        f"--num_steps={options.num_steps}"
        + (" --torch=PYTHON_WITH_TORCH" if options.torch else "")
        + "`, on two idle cores.",
    ]


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except RuntimeError as error:
        sys.exit(f"pipeline.py: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
