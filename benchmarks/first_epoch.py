"""Times the first epoch, which traces the step, on two devices and with plain Keras.

    .venv/bin/python benchmarks/first_epoch.py

Each contender is a new process every time, since a process traces a step only once; they take
turns, one round each. Takes five minutes on two idle cores.
"""

import contextlib
import sys

import contest
from contender_process import ContenderProcess

NUM_CORES = NUM_DEVICES = 2
NUM_STEPS = 8
EPOCH_TARGET, TRACING_TARGET_SECONDS = 1.15, 6
TARGETS = {
    "mobilenet_v2": f"an epoch of at most {EPOCH_TARGET} times plain Keras's",
    "transformer": f"tracing in at most {TRACING_TARGET_SECONDS} s",
}
DESCRIPTIONS = {
    "mobilenet_v2": "MobileNetV2, 64 × 64 pixels, alpha 0.35, 32 images a step",
    "transformer": "the transformer of 10.8 M parameters, 64 sequences a step",
}
TITLES = {
    "plain": "plain Keras",
    "ours": "`data_parallel`, 2 replicas",
    "pipeline:8": "`pipeline_parallel`, 2 stages, M = 8",
}
CONTENDERS = {"mobilenet_v2": ("plain", "ours"), "transformer": ("plain", "pipeline:8")}
FIGURES = ("tracing_seconds", "epoch_seconds", "cpu_seconds", "peak_mib")


def main(arguments):
    options = contest.parse(contest.make_parser(__doc__, num_rounds=5), arguments)
    cores = contest.cores_to_pin(NUM_CORES)
    results = {name: measure(name, options.num_rounds, cores) for name in CONTENDERS}
    versions = contest.versions_of(result["versions"] for result in results.values())
    written = {"figures": figures_of(results), "versions": versions}
    contest.publish("first_epoch", page(results), results, options, "num_rounds", **written)


def measure(workload, num_rounds, cores):
    """Returns each round's figures by kind, and the versions that ran."""
    kinds, versions, rounds = CONTENDERS[workload], {}, []
    for index in range(num_rounds):
        figures = {}
        for kind in contest.in_turn(kinds, index):
            figures[kind], versions = first_epoch(workload, kind, cores)
        rounds.append(figures)
        print(f"{workload}, round {index + 1}: {figures}", file=sys.stderr)
    return {
        "versions": versions,
        "figures": {
            kind: {name: contest.percentiles([r[kind][name] for r in rounds]) for name in FIGURES}
            for kind in kinds
        },
        "ratio": contest.percentiles(
            [r[kinds[1]]["epoch_seconds"] / r[kinds[0]]["epoch_seconds"] for r in rounds]
        ),
    }


def first_epoch(workload, kind, cores):
    """Returns a new process's measurements, and its description of itself."""
    contender = ContenderProcess(
        workload, kind, NUM_DEVICES, cores=cores, num_threads=len(cores) or NUM_CORES
    )
    with contextlib.closing(contender):
        versions = contender.wait_until_ready()
        contender.ask(first_steps=NUM_STEPS)
        return contender.answer(), versions


def figures_of(results):
    """Returns the figures for `summary.py`: our tracing time and first epoch over plain Keras's."""
    return {
        workload: {
            "tracing_seconds": result["figures"][CONTENDERS[workload][1]]["tracing_seconds"],
            "epoch_over_plain": result["ratio"],
        }
        for workload, result in results.items()
    }


def page(results):
    """The lines of RESULTS.md about the first epoch."""
    lines = [
        "## The first epoch",
        "",
        f"A new process trains {NUM_STEPS} steps. Tracing is what the first "
        "takes beyond the others: the step is traced, and TensorFlow prepares its graph. The "
        "median of the rounds, with the 10th and 90th percentile; the ratio is by round.",
    ]
    for workload, result in results.items():
        number = result["versions"]["num_parameters"]
        lines += [
            "",
            f"### {DESCRIPTIONS[workload]}",
            "",
            f"{number:,} weights.",
            "",
        ]
        rows = [
            [TITLES[kind], *(contest.spread(figures[name], 1) for name in FIGURES[:3])]
            + [f"{figures['peak_mib']['median']:.0f}"]
            for kind, figures in result["figures"].items()
        ]
        head = ("", "tracing, s", "first epoch, s", "processor time, s", "peak memory, MiB")
        lines += contest.table(head, *rows)
        ratio = contest.spread(result["ratio"], 2)
        lines += ["", f"Epoch over plain Keras's: {ratio}. To reach: {TARGETS[workload]}."]
    return lines


if __name__ == "__main__":
    contest.run(main)
