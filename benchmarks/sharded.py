"""Times a step of 2 workers, a core each, that hold the model in shares, and their memory.

    .venv/bin/python benchmarks/sharded.py
    .venv/bin/python benchmarks/sharded.py --torch=OTHER_VENV/bin/python

The transformer of `pipeline.py`, 10.8 M parameters, 32 sequences of 64 bytes per worker and step.
If you pass a Python with PyTorch, DistributedDataParallel and FSDP2 with gloo train the same
network on the same batch and cores. Contenders take turns, one round each, in alternating order;
the others idle meanwhile.
"""

import contextlib
import sys

import contest
from pipeline import PROGRAMS

NUM_WORKERS = 2
NUM_SKIPPED, NUM_WARM_UP_ROUNDS = 2, 1
# Shares of parameters over whole ones, at most; and no more than FSDP's step over DDP's.
TARGET = 1.15
TITLES = {
    "replicated": "`data_parallel`",
    "optimizer": '`data_parallel(shard="optimizer")`',
    "parameters": '`data_parallel(shard="parameters")`',
    "ddp": "PyTorch DDP with gloo",
    "fsdp": "PyTorch FSDP2 (`fully_shard`) with gloo",
}
RATIOS = {"optimizer": "replicated", "parameters": "replicated", "fsdp": "ddp"}
OF_TORCH = ("ddp", "fsdp")


def main(arguments):
    options = parse(arguments)
    cores = contest.cores_to_pin(NUM_WORKERS)
    results = measure(options, cores)
    written = {"figures": results["ratios"], "versions": results["versions"]}
    flags = ("num_rounds", "num_steps")
    contest.publish("sharded", page(results), results, options, *flags, **written)


def parse(arguments):
    parser = contest.make_parser(__doc__, num_rounds=7, torch=True)
    parser.add_argument("--num_steps", type=int, default=8, help="of a round; 2 not timed (8)")
    options = contest.parse(parser, arguments)
    if options.num_steps <= NUM_SKIPPED:
        parser.error(f"more than {NUM_SKIPPED} steps a round are required")
    return options


def start(kind, stack, cores, torch):
    is_torch = kind in OF_TORCH
    return contest.Group(
        stack,
        "1" if is_torch else "transformer_32",  # PyTorch's: the number of micro-batches.
        kind,
        contest.job_environments(NUM_WORKERS),
        cores=cores,
        program=(torch if is_torch else sys.executable, PROGRAMS[is_torch]),
    )


def measure(options, cores):
    kinds = [kind for kind in TITLES if options.torch or kind not in OF_TORCH]
    with contextlib.ExitStack() as stack:
        contenders, versions = {}, {}
        for kind in kinds:  # One after the other: each traces for a while.
            contenders[kind] = start(kind, stack, cores, options.torch)
            reply = contenders[kind].wait_until_ready()[0]
            versions |= contest.versions_of([reply])
            contenders[kind].train(NUM_SKIPPED + 2, NUM_SKIPPED)
        rounds = contest.rounds_in_turn(
            contenders, options, NUM_WARM_UP_ROUNDS, options.num_steps, NUM_SKIPPED
        )
    return {
        "versions": versions,
        "step_ms": {kind: contest.percentiles([r[kind] for r in rounds]) for kind in kinds},
        "peak_mib": {kind: group.peak_mib for kind, group in contenders.items()},
        "ratios": {
            f"{kind}_over_{whole}": contest.percentiles([r[kind] / r[whole] for r in rounds])
            for kind, whole in RATIOS.items()
            if kind in kinds
        },
    }


def page(results):
    """The lines of RESULTS.md about shares."""
    lines = [
        "## Shares: 2 workers, a core each",
        "",
        "A step of a transformer of 10.8 M parameters, 32 sequences of 64 a worker, in ms: the "
        "median of the rounds' medians, with the 10th and 90th percentile; of the workers, the "
        "slowest at each step. Ratios by round. Memory is the most that a process has held, "
        "tracing included.",
        "",
    ]
    rows = []
    for kind, value in results["step_ms"].items():
        ratio = results["ratios"].get(f"{kind}_over_{RATIOS.get(kind)}")
        ratio = contest.spread(ratio, 2) if ratio else ""
        target = TARGET if kind == "parameters" else ""
        peak = f"{results['peak_mib'][kind]:.0f}"
        rows.append((TITLES[kind], contest.spread(value, 0), ratio, target, peak))
    head = ("", "step, ms", "over whole parameters", "to reach", "peak memory, MiB")
    return lines + contest.table(head, *rows)


if __name__ == "__main__":
    contest.run(main)
