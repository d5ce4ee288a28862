"""Checks whether `tfparallel plan` ranks the fastest mesh first, and how well it predicts.

    .venv/bin/python benchmarks/meshes.py

Each task is planned in a new process, with trials of the first meshes. Another process then trains
every mesh whose step the plan predicts, in turns, on logical devices of a CPU. Meshes that the plan
calls too large are trained too, as the machine has the memory, but do not count as a choice.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

import contest

TOP = pathlib.Path(__file__).parents[1]
RUN = pathlib.Path(__file__).with_name("meshes_run.py")
TASKS = {
    "digits CNN": ("models/digits_cnn.py",),
    "resnet": ("models/resnet.py",),
    "transformer": ("models/transformer.py",),
    "too large for a device": ("benchmarks/meshes_large.py", "--device_memory=64MiB"),
}
DEADLINE_SECONDS = 900.0
LEAST_MIB = 64  # TensorFlow counts only large tensors: it misses most of a small model.


def main(arguments):
    options = parse(arguments)
    results = {}
    for name in options.tasks or TASKS:
        results[name] = measure(*TASKS[name], options=options)
        print("\n".join(table(name, results[name])), file=sys.stderr)
    flags = ("num_rounds", "num_devices", "num_trials")
    contest.publish("meshes", page(results, options), results, options, *flags)


def parse(arguments):
    parser = contest.make_parser(__doc__, num_rounds=5)
    parser.add_argument("--num_devices", type=contest.positive, default=4, help="devices (4)")
    parser.add_argument(
        "--busy", action="store_true", help="one thread, and its time at work: not for speed-ups"
    )
    parser.add_argument("--num_trials", type=int, default=3, help="meshes that plan tries (3)")
    parser.add_argument("--tasks", nargs="*", choices=list(TASKS), help="which; all if left out")
    return contest.parse(parser, arguments)


def measure(path, *flags, options):
    with tempfile.TemporaryDirectory() as name:
        plan, run = pathlib.Path(name, "plan.json"), pathlib.Path(name, "run.json")
        command = [sys.executable, RUN, "plan", path, *flags]
        command += [f"--num_devices={options.num_devices}", f"--num_trials={options.num_trials}"]
        call([*command, f"--report={plan}"], options.busy)
        call([sys.executable, RUN, path, plan, run, options.num_rounds], options.busy)
        rows = json.loads(run.read_text())
        planned = json.loads(plan.read_text())
    for row in rows:
        row["round_seconds"] = statistics.median(row["rounds"])
        mesh = row["mesh"]
        # The plan has the first part of each stage; replicas and parts are alike.
        row["predicted_bytes"] = mesh["data"] * mesh["tensor"] * sum(row["held_bytes"])
        # Weights that are joined for all replicas at once are counted once, in one process.
        if row["held"] and row.get("shard") == "optimizer":
            weights = sum(stage["parameter_bytes"] for stage in row["stages"])
            row["held"] += (mesh["data"] - 1) * weights
    return {"plan": planned["measured"], "why": planned["why"], "rows": rows}


def call(command, busy):
    print(" ".join(map(str, command[1:])), file=sys.stderr)
    environment = os.environ | {"PYTHONPATH": str(TOP)}
    if busy:
        environment |= {"BUSY": "1", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
    subprocess.run(
        list(map(str, command)), cwd=TOP, env=environment, check=True, timeout=DEADLINE_SECONDS
    )


def table(name, task):
    lines = [f"### {name}", "", f"{task['why']}. Planned in {task['plan']['seconds']:.0f} s.", ""]
    head = ("mesh", "predicted step, ms", "tried", "measured", "error", "MiB", "counted", "error")
    rows = []
    for row in task["rows"]:
        sizes = [f"{axis}={size}" for axis, size in row["mesh"].items() if size > 1]
        if "shard" in row:
            sizes.append(f"shard={row['shard']}")
        label = ", ".join(sizes) or "one device"
        label += " (too large)" if "why_not" in row else ""
        step, actual = 1e3 * row["step_seconds"], 1e3 * row["round_seconds"]
        mib, counted = row["predicted_bytes"] / 2**20, (row["held"] or 0) / 2**20
        of_counted = f"{mib / counted - 1:+.0%}" if counted > LEAST_MIB else "–"
        tried = f"{1e3 * row['measured_seconds']:.1f}" if "measured_seconds" in row else "–"
        cells = (label, f"{step:.1f}", tried, f"{actual:.1f}", f"{step / actual - 1:+.0%}")
        rows.append((*cells, f"{mib:.1f}", f"{counted:.1f}" if counted else "–", of_counted))
    fitting = [row for row in task["rows"] if "why_not" not in row]
    best = min(row["round_seconds"] for row in fitting)
    predicted = min(fitting, key=lambda row: row["step_seconds"])["round_seconds"] / best
    tried = fitting[0]["round_seconds"] / best
    return [
        *lines,
        *contest.table(head, *rows),
        "",
        f"The first as predicted takes {predicted:.2f} times the step of the fastest that fits, "
        f"the first after trials {tried:.2f} times.",
    ]


def page(results, options):
    lines = ["## The meshes of `plan`", "", f"{options.num_devices} logical devices of a CPU."]
    if options.busy:
        lines.append("Steps are the time at work of one thread, without what other programs take.")
    for name, result in results.items():
        lines += ["", *table(name, result)]
    return lines


if __name__ == "__main__":
    contest.run(main)
