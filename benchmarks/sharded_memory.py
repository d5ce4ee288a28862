"""A model in shares whose training state is a multiple of what a process may hold.

    .venv/bin/python benchmarks/sharded_memory.py

Takes Linux, 18 GiB of memory, 3 GiB of disk and five minutes. RLIMIT_DATA limits each process.
What it may hold is the limit minus what a worker takes to train almost nothing. The training state,
which is the weights, their gradients and Adam's two slots, is six times that. It is trained

1. by plain Keras in one process without a limit;
2. by plain Keras in one process under the limit, which fails;
3. by `data_parallel(shard="parameters")` in processes that each are under the limit, whose weights
   are compared with the first ones.
"""

import json
import math
import pathlib
import sys
import tempfile

import contest
import memory
import memory_run

from tfparallel.texts import parse_bytes

LAYER_BYTES = 4 * memory_run.WIDTH**2
# Weights, gradients and two slots.
COPIES = 4


def main(arguments):
    options = parse(arguments)
    limit, number = parse_bytes(options.limit), options.num_processes
    launched = [sys.executable, "-m", "tfparallel", "launch", f"--nproc_per_node={number}", "--"]
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = pathlib.Path(name)
        start = run(0, 0, folder / "start", "shares", launched)
        budget_bytes = limit - start["peak_data_bytes"]
        num_layers = math.ceil(options.times * budget_bytes / COPIES / LAYER_BYTES)
        memory.say(f"{num_layers} layers, {memory.gigabytes(budget_bytes)} GB a process")
        plain = run(0, num_layers, folder / "plain", "whole")
        memory.say(f"plain Keras: loss {plain['loss']}")
        failed = run(limit, num_layers, folder / "limited", "whole")
        memory.say(f"plain Keras under the limit: {failed}")
        shares = run(limit, num_layers, folder / "shares", "shares", launched)
        memory.say(f"{number} processes under the limit: {shares}")
    results = {
        "limit": limit,
        "budget_bytes": budget_bytes,
        "num_layers": num_layers,
        "plain": plain,
        "failed": failed,
        "shares": shares,
    }
    if "error" in shares:
        raise RuntimeError(f"{number} processes under the limit failed: {shares['error']}")
    flags = ("limit", "num_processes", "times")
    contest.publish("sharded_memory", page(results, options), results, options, *flags)
    return 0 if "error" in failed and shares["largest"] <= 1e-4 else 1


def run(limit, num_layers, output, mode, launched=()):
    """Trains once; returns the report, or the error and exit code."""
    done = memory.run(limit, num_layers, output, mode, launched, check=False)
    if done.returncode:
        return {"error": memory.last_words(done.stdout), "exit_code": done.returncode}
    return json.loads(pathlib.Path(f"{output}.json").read_text())


def parse(arguments):
    parser = contest.make_parser(__doc__)
    parser.add_argument("--limit", default="2.2GB", help="what a process may hold (2.2GB)")
    parser.add_argument("--num_processes", type=contest.positive, default=8, help="processes (8)")
    parser.add_argument("--times", type=float, default=6.0, help="state over what it may hold (6)")
    parser.add_argument("--folder", help="where the files of a run go (the system's own place)")
    return contest.parse(parser, arguments)


def page(results, options):
    shares, budget_bytes = results["shares"], results["budget_bytes"]
    weight_bytes = 4 * shares["num_parameters"]
    state_bytes = COPIES * weight_bytes
    peak_bytes = shares["peak_data_bytes"] - (results["limit"] - budget_bytes)
    failed = results["failed"]
    return [
        "## Memory: a model in shares",
        "",
        f"{results['num_layers']} dense layers of {memory_run.WIDTH} units, "
        f"{shares['num_parameters']:,} weights in float32, Adam, {memory.NUM_STEPS} steps of "
        f"{memory_run.BATCH} of scikit-learn's digits, {options.num_processes} workers. "
        f"RLIMIT_DATA is {options.limit} a process; a worker that trains almost nothing takes some "
        "of it.",
        "",
        *memory.sizes_table(
            budget_bytes,
            ("what a process may hold", budget_bytes),
            ("weights", weight_bytes),
            ("training state: weights, gradients and slots", state_bytes),
            ("a share of the training state", state_bytes / options.num_processes),
            ("one layer's weights", LAYER_BYTES),
            ("the most that worker 0 held", peak_bytes),
        ),
        "",
        *contest.table(
            ("run", "result"),
            (
                "plain Keras, 1 process under the limit",
                f'fails: exit code {failed["exit_code"]}, "{failed["error"]}"',
            ),
            (
                f'`data_parallel(shard="parameters")`, {options.num_processes} processes under '
                "the limit",
                f"trains, loss {shares['loss']:.7g}",
            ),
            ("plain Keras, 1 process without a limit", f"loss {results['plain']['loss']:.7g}"),
            (
                "largest difference of a weight, relative to the largest in its variable",
                f"{shares['largest']:.1e}",
            ),
        ),
    ]


if __name__ == "__main__":
    contest.run(main)
