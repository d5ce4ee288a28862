"""Times a step of `fit` on 2 workers, a core each, against one process on one core.

    .venv/bin/python benchmarks/scaling.py
    .venv/bin/python benchmarks/scaling.py --torch=OTHER_VENV/bin/python

Weak scaling: a worker has as many examples as the one process. Two plain processes that run at
once, one on each core, show the machine's limit: they share its memory and caches, and the slower
at each step counts. If you pass a Python with PyTorch, DistributedDataParallel with gloo trains the
same convolutional network on the same batch and cores. Contenders take turns, one round each, in
alternating order; the others idle meanwhile.
"""

import contextlib
import sys

import contest

from tfparallel.cluster.environment import ALL_REDUCE

PROGRAMS = [str(contest.PAGE.with_name(f"{name}.py")) for name in ("contender", "torch_contender")]
NUM_WORKERS = 2
WORKLOADS = {
    "cnn_32": "1.2 M parameters, 32 examples a worker",
    "cnn_128": "1.2 M parameters, 128 examples a worker",
    "wide_cnn_32": "9.5 M parameters, 32 examples a worker",
    "language_model": "A language model of 32,768 words, 16 rows of 64 words a worker",
}
# Of plain `fit`, against two unconnected processes. For the language model: its step and memory
# over theirs, and the bytes sent beyond its gradients, each at most.
LANGUAGE_MODEL = "language_model"
STEP_TARGET, MEMORY_TARGET, SENT_TARGET_KIB = 1.08, 1.10, 64
TARGETS = {"cnn_32": 0.95, "cnn_128": 0.98, "wide_cnn_32": 0.93}
TARGETS[LANGUAGE_MODEL] = round(1 / STEP_TARGET, 3)
STEPS = {"cnn_32": 40, "cnn_128": 14, "wide_cnn_32": 14, "language_model": 10}
WITHOUT_TORCH = (LANGUAGE_MODEL,)
NUM_SKIPPED = 4
NUM_WARM_UP_ROUNDS = 2
TITLES = {
    "plain": "plain Keras, 1 process, no strategy",
    "torch": "PyTorch, 1 process",
    "apart": "the same, 2 processes at once that know nothing of each other",
    "ours": "`tfparallel.data_parallel`, 2 workers",
    "ring": '`data_parallel` with `all_reduce="tensorflow"`, 2 workers',
    "ddp": "PyTorch DDP with gloo, 2 workers",
}


def main(arguments):
    options = parse(arguments)
    cores = contest.cores_to_pin(NUM_WORKERS)
    results = {name: measure(name, options, cores) for name in options.workload or WORKLOADS}
    replies = (reply for result in results.values() for reply in result["versions"].values())
    written = {"figures": figures_of(results), "versions": contest.versions_of(replies)}
    contest.publish("scaling", page(results), results, options, "num_rounds", **written)


def parse(arguments):
    parser = contest.make_parser(__doc__, num_rounds=11, torch=True)
    parser.add_argument(
        "--workload", action="append", choices=WORKLOADS, help="repeatable; all if left out"
    )
    return contest.parse(parser, arguments)


def start(kind, workload, stack, cores, torch):
    """Starts the processes of a contender."""
    # A job started by hand has none of the launcher's settings.
    variables = [{}] * (NUM_WORKERS if kind == "apart" else 1)
    if kind in ("ours", "ring", "ddp"):
        variables = contest.job_environments(NUM_WORKERS)
    if kind == "ring":
        kind, variables = "ours", [each | {ALL_REDUCE: "tensorflow"} for each in variables]
    is_torch = kind in ("torch", "ddp")
    return contest.Group(
        stack,
        workload,
        "plain" if kind == "apart" else kind,
        variables,
        cores=cores,
        program=(torch if is_torch else sys.executable, PROGRAMS[is_torch]),
    )


def measure(workload, options, cores):
    has_torch = options.torch and workload not in WITHOUT_TORCH
    kinds = ["plain", "apart", "ours", "ring"] + (["torch", "ddp"] if has_torch else [])
    with contextlib.ExitStack() as stack:
        contenders = {kind: start(kind, workload, stack, cores, options.torch) for kind in kinds}
        versions = {kind: group.wait_until_ready()[0] for kind, group in contenders.items()}
        rounds = contest.rounds_in_turn(
            contenders, options, NUM_WARM_UP_ROUNDS, STEPS[workload], NUM_SKIPPED, f"{workload}, "
        )
    return {
        "versions": versions,
        "step_ms": {kind: contest.percentiles([r[kind] for r in rounds]) for kind in kinds},
        "peak_mib": {kind: group.peak_mib for kind, group in contenders.items()},
        "sent_bytes": {kind: group.sent_bytes for kind, group in contenders.items()},
        "ours_over_apart": contest.percentiles([r["ours"] / r["apart"] for r in rounds]),
        "efficiency": {
            f"{many}/{one}": contest.percentiles([r[one] / r[many] for r in rounds])
            for one, many in (
                ("plain", "apart"),
                ("apart", "ours"),
                ("apart", "ring"),
                ("torch", "ddp"),
                ("ddp", "ours"),
            )
            if one in kinds and many in kinds
        },
    }


def figures_of(results):
    """Returns the figures for `summary.py`: ours against two unconnected processes."""
    return {
        workload: {
            "step_over_unjoined": result["ours_over_apart"],
            "unjoined_over_step": result["efficiency"]["ours/apart"],
            "memory_over_unjoined": memory_over_apart(result),
            "sent_beyond_gradients_kib": (
                result["sent_bytes"]["ours"] - result["versions"]["plain"]["gradient_bytes"]
            )
            / 1024,
        }
        for workload, result in results.items()
    }


def memory_over_apart(result):
    return result["peak_mib"]["ours"] / result["peak_mib"]["apart"]


def page(results):
    """The lines of RESULTS.md about scaling."""
    lines = [
        "## Scaling: 2 workers, a core each",
        "",
        "A step of `fit`, in ms: the median of the rounds' medians, with the 10th and 90th "
        "percentile; of the workers, the slowest at each step. Memory is the most that a process "
        "has held. Sent is what a worker hands to the others in a step, beside the size of its "
        "gradients; those of embeddings are slices, as small as the words of a batch. Efficiency "
        "is one step over the other.",
        "",
    ]
    for workload, result in results.items():
        lines += [f"### {WORKLOADS[workload]}", ""]
        gradients = result["versions"]["plain"]["gradient_bytes"] / 1024
        rows = []
        for kind, value in result["step_ms"].items():
            peak = result["peak_mib"][kind]
            memory = f"{peak:.0f}" if peak else ""
            sent = result["sent_bytes"][kind]
            sent = f"{sent / 1024:,.0f}" if sent else ""
            rows.append((TITLES[kind], contest.spread(value, 1), memory, sent))
        head = ("", "step, ms", "peak memory, MiB", f"sent, KiB (gradients: {gradients:,.0f})")
        lines += [*contest.table(head, *rows), ""]
        rows = []
        for name, value in result["efficiency"].items():
            many, one = name.split("/")
            target = f"{TARGETS[workload]}" if (many, one) == ("ours", "apart") else ""
            title = f"{TITLES[many]}, against {TITLES[one]}"
            if one == "ddp":
                title, target = "DDP's step over ours (above 1: ours is faster)", "above 1"
            rows.append((title, contest.spread(value, 3), target))
        lines += contest.table(("efficiency", "measured", "to reach"), *rows)
        memory = f"{memory_over_apart(result):.2f}"
        memory_line = f"A worker's memory over that of a process that knows of no other: {memory}"
        if workload == LANGUAGE_MODEL:
            memory_line += (
                f", to reach: at most {MEMORY_TARGET:.2f}. Sent, to reach: at most the gradients "
                f"and {SENT_TARGET_KIB} KiB"
            )
        lines += ["", f"{memory_line}.", ""]
    return lines[:-1]


if __name__ == "__main__":
    contest.run(main)
