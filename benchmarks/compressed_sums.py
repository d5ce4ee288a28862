"""Times a sum of gradients between 2 workers in 32 bits and in 16, over TensorFlow's ring.

    .venv/bin/python benchmarks/compressed_sums.py

The timed sum includes the casts and the error feedback, which keeps the cast's error, as in a
training step. Contenders take turns, one round each, in alternating order; the others idle
meanwhile. An iteration's time is the slower worker's, after a barrier. Every element is checked
once per round.
"""

import contextlib

import all_reduce
import contest
import numpy as np

PLAIN = "ours_ring_tuned"
TITLES = {
    PLAIN: "float32",
    "ours_ring_tuned+bf16": '`compression="bf16"`',
    "ours_ring_tuned+fp16": '`compression="fp16"`',
}
SIZES = (all_reduce.MIB, 4 * all_reduce.MIB, 16 * all_reduce.MIB, 64 * all_reduce.MIB)
# (size, contender) -> how many times as fast as in 32 bits.
TARGETS = {(16 * all_reduce.MIB, "ours_ring_tuned+bf16"): 1.6}


def main(arguments):
    parser = contest.make_parser(__doc__, num_rounds=7)
    parser.add_argument(
        "--bytes", action="append", type=int, choices=SIZES, help="a size; repeatable"
    )
    options = contest.parse(parser, arguments)
    cores = contest.cores_to_pin(all_reduce.NUM_WORKERS)
    with contextlib.ExitStack() as stack:
        groups = {kind: all_reduce.start(kind, stack, cores, None) for kind in TITLES}
        reply = [group.wait_until_ready()[0] for group in groups.values()][0]
        results = {size: measure(size, groups, options) for size in options.bytes or SIZES}
    lines, versions = page(results), {"Versions": reply["version"]}
    contest.publish("compressed_sums", lines, results, options, "num_rounds", versions=versions)


def measure(size, groups, options):
    times = all_reduce.timed(size, groups, options)
    medians = {kind: np.median(rounds, axis=1) for kind, rounds in times.items()}
    return {
        "ms": {kind: contest.percentiles(np.concatenate(rounds)) for kind, rounds in times.items()},
        "times_as_fast": {
            kind: contest.percentiles(medians[PLAIN] / of_kind)
            for kind, of_kind in medians.items()
            if kind != PLAIN
        },
    }


def page(results):
    """The lines of RESULTS.md about sums in 16 bits."""
    narrow = [kind for kind in TITLES if kind != PLAIN]
    lines = [
        "## Sums in 16 bits, over TensorFlow's ring",
        "",
        "Milliseconds for a sum of float32 gradients between 2 workers of one host, a core each, "
        "casts and error feedback included: the median of all iterations, with the 10th and 90th "
        "percentile; of the two workers the slower, after a barrier. Every element was checked.",
        "",
        *all_reduce.times_table(results, TITLES),
        "",
    ]
    head, rows = ["size"], [[all_reduce.name_of(size)] for size in results]
    for kind in narrow:
        head += [f"{TITLES[kind]}, times as fast", "to reach"]
        for row, (size, result) in zip(rows, results.items(), strict=True):
            row += [contest.spread(result["times_as_fast"][kind], 2), TARGETS.get((size, kind), "")]
    return lines + contest.table(head, *rows)


if __name__ == "__main__":
    contest.run(main)
