"""A model in shares whose training state is a multiple of what a process may hold.

    .venv/bin/python benchmarks/sharded_memory.py

Takes Linux, 18 GiB of memory, 12 GiB of disk and a quarter of an hour. RLIMIT_DATA limits each
process. What it may hold is the limit minus what a worker takes to train almost nothing. The
training state, which is the weights, their gradients and Adam's two slots, is six times that. It is
trained

1. by plain Keras in one process under the limit, which fails;
2. by `data_parallel(shard="parameters")` in processes that each are under the limit, and saved;
3. by plain Keras in one process without a limit, whose weights are compared with the saved ones.
"""

import json
import math
import pathlib
import sys
import tempfile

import contest
import environment
import memory
import memory_run

from tfparallel.texts import parse_bytes

# Weights, gradients and two slots.
COPIES = 4


def main(arguments):
    options = parse(arguments)
    limit, number = parse_bytes(options.limit), options.num_processes
    described = environment.describe()
    launched = [sys.executable, "-m", "tfparallel", "launch", f"--nproc_per_node={number}", "--"]
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = pathlib.Path(name)
        memory.run(0, 0, folder / "start.keras", "shares", launched)
        start_bytes = report_of(folder / "start.keras")["peak_data_bytes"]
        budget_bytes = limit - start_bytes
        num_layers = math.ceil(options.times * budget_bytes / COPIES / memory.LAYER_BYTES)
        failed = memory.run(limit, num_layers, folder / "limited.weights.h5", "plain", check=False)
        memory.say(f"one process under the limit: exit code {failed.returncode}")
        memory.run(limit, num_layers, folder / "shares.keras", "shares", launched)
        shares = report_of(folder / "shares.keras")
        memory.say(f"{number} processes: loss {shares['loss']}")
        memory.run(0, num_layers, folder / "plain.weights.h5", "plain")
        plain = report_of(folder / "plain.weights.h5")
        largest = memory.difference(folder / "plain.weights.h5", folder / "shares.keras")
    results = {
        "limit": limit,
        "budget_bytes": budget_bytes,
        "num_layers": num_layers,
        "exit_code": failed.returncode,
        "last_words": memory.last_words(failed.stdout),
        "shares": shares,
        "plain": plain,
        "largest": largest,
    }
    contest.publish("sharded_memory", page(results, described, options), results, options)
    return 0 if failed.returncode and largest <= 1e-4 else 1


def parse(arguments):
    parser = contest.make_parser(__doc__)
    parser.add_argument("--limit", default="2GB", help="what a process may hold (2GB)")
    parser.add_argument("--num_processes", type=contest.positive, default=8, help="processes (8)")
    parser.add_argument("--times", type=float, default=6.0, help="state over what it may hold (6)")
    parser.add_argument("--folder", help="where the files of a run go (the system's own place)")
    return contest.parse(parser, arguments)


def report_of(path):
    return json.loads(pathlib.Path(f"{path}.json").read_text())


def page(results, described, options):
    shares, budget_bytes = results["shares"], results["budget_bytes"]
    weight_bytes = 4 * shares["num_parameters"]
    state_bytes = COPIES * weight_bytes
    peak_bytes = shares["peak_data_bytes"] - (results["limit"] - budget_bytes)
    lines = [
        "## Memory: a model in shares",
        "",
        f"{results['num_layers']} dense layers of {memory_run.WIDTH} units, "
        f"{shares['num_parameters']:,} weights in float32, Adam, {memory.NUM_STEPS} steps of "
        f"{memory_run.BATCH} of scikit-learn's digits, {options.num_processes} workers. "
        f"RLIMIT_DATA is {options.limit} a process; a worker that trains almost nothing takes some "
        "of it.",
        "",
        "| | GB | of what a process may hold |",
        "| --- | --- | --- |",
        *(
            f"| {name} | {memory.gigabytes(size)} | {size / budget_bytes:.2f} |"
            for name, size in (
                ("what a process may hold", budget_bytes),
                ("weights", weight_bytes),
                ("training state: weights, gradients and slots", state_bytes),
                ("a share of the training state", state_bytes / options.num_processes),
                ("one layer's weights", memory.LAYER_BYTES),
                ("the most that worker 0 held", peak_bytes),
            )
        ),
        "",
        "| run | result |",
        "| --- | --- |",
        f"| plain Keras, 1 process under the limit | fails: exit code {results['exit_code']}, "
        f'"{results["last_words"]}" |',
        f'| `data_parallel(shard="parameters")`, {options.num_processes} processes under the limit '
        f"| trains and saves, loss {shares['loss']:.7g} |",
        f"| plain Keras, 1 process without a limit | loss {results['plain']['loss']:.7g} |",
        f"| largest difference of a weight or slot, relative to the largest in its variable "
        f"| {results['largest']:.1e} |",
    ]
    return lines + contest.footer(
        "sharded_memory", described, options, "limit", "num_processes", "times"
    )


if __name__ == "__main__":
    contest.run(main)
