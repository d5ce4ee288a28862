"""Times a pipeline of two stages in two processes, a core each, beside PyTorch's.

    .venv/bin/python benchmarks/pipeline.py
    .venv/bin/python benchmarks/pipeline.py --torch=OTHER_VENV/bin/python

A transformer of 10.8 M parameters, 64 sequences of 64 bytes a step, 1F1B. The baselines are plain
Keras in one process on one core and, if you pass a Python with PyTorch,
`torch.distributed.pipelining` with gloo on the same network, cut and cores. Contenders take turns,
one round each, in alternating order; the others idle meanwhile.
"""

import contextlib
import sys

import contest
import numpy as np

PROGRAMS = [
    str(contest.PAGE.with_name(f"{name}.py"))
    for name in ("contender", "torch_pipeline_contender")
]
NUM_STAGES = 2
NUM_SKIPPED, NUM_WARM_UP_ROUNDS = 2, 1
OF_IDEAL, OVER_ONE_PROCESS = 0.9, 1.6
OVER_TORCH = 1.00  # Our step over PyTorch's, at most.


def main(arguments):
    options = parse(arguments)
    cores = contest.cores_to_pin(NUM_STAGES)
    results = measure(options, cores)
    written = {"figures": figures_of(results), "versions": results["versions"]}
    flags = ("num_rounds", "num_steps")
    contest.publish("pipeline", page(results), results, options, *flags, **written)


def parse(arguments):
    parser = contest.make_parser(__doc__, num_rounds=5, torch=True)
    parser.add_argument(
        "--num_micro_batches", action="append", type=contest.positive, help="repeatable (2, 4, 8)"
    )
    parser.add_argument("--num_steps", type=int, default=5, help="of a round; 2 not timed (5)")
    options = contest.parse(parser, arguments)
    options.num_micro_batches = options.num_micro_batches or [2, 4, 8]
    if options.num_steps <= NUM_SKIPPED:
        parser.error(f"more than {NUM_SKIPPED} steps a round are required")
    return options


def start(kind, num_micro_batches, stack, cores, torch):
    """Starts the processes of a contender; our process 1 serves process 0 and does not answer."""
    is_pipeline, is_torch = kind in ("ours", "torch_pipeline"), "torch" in kind
    return contest.Group(
        stack,
        str(num_micro_batches) if is_torch else "transformer",
        f"pipeline:{num_micro_batches}" if kind == "ours" else kind,
        contest.job_environments(NUM_STAGES) if is_pipeline else [{}],
        cores=cores,
        program=(torch if is_torch else sys.executable, PROGRAMS[is_torch]),
        num_speaking=1 if kind == "ours" else None,
    )


def measure(options, cores):
    names = [("plain", 1), *(("ours", number) for number in options.num_micro_batches)]
    if options.torch:
        names += [("torch", 1)]
        names += [("torch_pipeline", number) for number in options.num_micro_batches]
    with contextlib.ExitStack() as stack:
        contenders, versions = {}, {}
        for kind, number in names:  # One after the other: each traces for a while.
            contenders[kind, number] = start(kind, number, stack, cores, options.torch)
            reply = contenders[kind, number].wait_until_ready()[0]
            versions |= contest.versions_of([reply])
            contenders[kind, number].train(NUM_SKIPPED + 2, NUM_SKIPPED)
        rounds = contest.rounds_in_turn(
            contenders, options, NUM_WARM_UP_ROUNDS, options.num_steps, NUM_SKIPPED
        )
        stages = {
            number: contenders["ours", number].ask(steps=0)[0]
            for number in options.num_micro_batches
        }
    rows = []
    for number in options.num_micro_batches:
        ours = [r["ours", number] for r in rounds]
        # The part of a step outside the passes: the update, Keras's loop, the metrics.
        times = stages[number]
        rest = max(float(np.median(ours)) - 1e3 * times["passes_seconds"], 0.0)
        row = {
            "num_micro_batches": number,
            "ours_ms": contest.percentiles(ours),
            "over_plain": contest.percentiles([r["plain", 1] / r["ours", number] for r in rounds]),
            "serial_ms": 1e3 * times["serial_seconds"],
            "over_serial": times["serial_seconds"] / times["passes_seconds"],
            "rest_ms": rest,
            "simulated_over_measured": times["simulated_seconds"] / times["passes_seconds"],
            "bubble": times["bubble"],
        }
        if options.torch:
            theirs = [r["torch_pipeline", number] for r in rounds]
            row["torch_ms"] = contest.percentiles(theirs)
            ratios = [r["torch_pipeline", number] / r["ours", number] for r in rounds]
            row["torch_over_ours"] = contest.percentiles(ratios)
            row["ours_over_torch"] = contest.percentiles([1 / ratio for ratio in ratios])
        rows.append(row)
    results = {"plain_ms": contest.percentiles([r["plain", 1] for r in rounds]), "rows": rows}
    if options.torch:
        results["torch_ms"] = contest.percentiles([r["torch", 1] for r in rounds])
    return results | {"versions": versions}


def figures_of(results):
    """Returns the figures for `summary.py`: by M, our step over PyTorch's, if that was measured."""
    return {
        f"m_{row['num_micro_batches']}": {"ours_over_torch": row["ours_over_torch"]}
        for row in results["rows"]
        if "ours_over_torch" in row
    }


def page(results):
    """The lines of RESULTS.md about pipelines."""
    lines = [
        "## Pipeline: 2 stages in 2 processes, a core each",
        "",
        "A step of a transformer of 10.8 M parameters, 64 sequences of 64, 1F1B, in ms: the median "
        "of the rounds' medians, with the 10th and 90th percentile. Ratios by round.",
        "",
        *contest.table(
            ("one process, one core", "step, ms"),
            *(
                (title, contest.spread(results[name], 0))
                for title, name in (("plain Keras", "plain_ms"), ("PyTorch", "torch_ms"))
                if name in results
            ),
        ),
        "",
    ]
    steps, passes = [], []
    for row in results["rows"]:
        number = row["num_micro_batches"]
        torch = contest.spread(row["torch_ms"], 0) if "torch_ms" in row else ""
        ratio = contest.spread(row["torch_over_ours"], 2) if "torch_ms" in row else ""
        cells = (contest.spread(row["ours_ms"], 0), contest.spread(row["over_plain"], 2))
        target = OVER_ONE_PROCESS if number == 8 else ""
        steps.append((number, *cells, target, torch, ratio, f"{1 / OVER_TORCH:.2f}"))
        ideal = 2 * number / (number + 1)
        cells = (f"{row['serial_ms']:.0f}", f"{row['over_serial']:.2f}", f"{OF_IDEAL * ideal:.2f}")
        cells += (f"{row['bubble']:.0%}", f"{1 / (number + 1):.0%}")
        passes.append((number, *cells, f"{row['simulated_over_measured']:.2f}"))
    ours = ("`tfparallel.pipeline_parallel`", "over plain Keras on one core", "to reach")
    theirs = ("`torch.distributed.pipelining`", "its step over ours", "to reach")
    lines += [
        *contest.table(("M", *ours, *theirs), *steps),
        "",
        "The passes of a step, against the same stages run one after the other, whose times were "
        "measured at that size of a micro-batch; and what the schedule should take with these "
        "times.",
        "",
    ]
    head = ("M", "one after the other, ms", "speed-up", "to reach: 0.9 × 2M/(M + 1)", "bubble")
    return lines + contest.table((*head, "ideal", "simulated / measured"), *passes)


if __name__ == "__main__":
    contest.run(main)
