"""Injects 40 random faults into runs of 200 steps, and checks where each run ends.

    .venv/bin/python benchmarks/faults.py
    .venv/bin/python benchmarks/faults.py --on=ray

Each run trains `models/digits_cnn.py` on two workers, with a checkpoint every 5 steps and one
thread per worker: under `tfparallel launch`, or under `tfparallel.ray.fit` on a Ray cluster of
several raylets on this machine. At a random step one fault strikes, from outside:

    kill         a worker, the chief or the other, gets SIGKILL; all workers restart
    stop         it gets SIGSTOP: it neither works nor ends; `--stall_timeout`
    damage       a byte of the newest checkpoint is turned, and then a worker is killed
    preemption   the launcher, or Ray's driver, gets SIGTERM; the same command again
    full disk    the checkpoints' disk has no room any more; the same command again, with room

and on Ray alone:

    actor        the Ray actor of a worker gets SIGKILL
    arrival      two workers, `num_workers=(2, 3)`, get a third on a node that arrives
    raylet       the raylet of a worker's node gets SIGKILL; a spare node takes the worker
    lost node    the same, of one of three workers, `num_workers=(2, 3)`, and no spare node
    silent node  all processes of such a node get SIGSTOP, as if its link was cut, and SIGCONT once
                 the two others train (as root each node is a host of its own to them)

The weights are compared with those of an undisturbed run: to the last bit, and where the number of
workers changes (`arrival`, `lost node`, `silent node`), to 1e-9 in float64. (In float32 a batch
divided differently rounds differently, by 1e-5 or 1e-4, depending on the processor.) `full disk`
and `silent node` need root, and are skipped otherwise.
"""

import argparse
import contextlib
import functools
import os
import pathlib
import random
import sys
import tempfile
import traceback

import contest
import numpy as np
import ray_cluster
from fault_runs import (
    EVERY,
    KINDS_ON,
    NUM_STEPS,
    RESIZED,
    ROOT_KINDS,
    UNDISTURBED,
    Run,
    RunOnRay,
    small_disk,
)

sys.path.insert(0, str(contest.TOP))
from tfparallel.installed import version_of  # noqa: E402

TOLERANCE = 1e-9


def main(arguments):
    options = parse(arguments)
    is_right_on, results = {}, {}
    for launcher in options.on:
        kinds = kinds_of(launcher, options)
        if not kinds or launcher == "ray" and ray_cluster.is_missing("faults.py --on=ray"):
            continue
        with contextlib.ExitStack() as stack:
            start, versions = Run, {}
            if launcher == "ray":
                versions["Ray"] = version_of("ray")
                # The first node, which stays, takes no worker.
                cluster = stack.enter_context(ray_cluster.cluster(1, num_cpus=0))
                start = functools.partial(RunOnRay, cluster)
            rows = injected(start, kinds, options)
        names = ("kind", "worker", "step", "difference", "seconds", "left")
        results[launcher] = [dict(zip(names, row, strict=True)) for row in rows]
        name = "faults" if launcher == "host" else f"faults_on_{launcher}"
        run = argparse.Namespace(**vars(options) | {"on": launcher})
        lines, flags = page(rows, run), ("on", "num_faults", "seed")
        contest.publish(name, lines, results, run, *flags, versions=versions)
        is_right_on[launcher] = all(is_right(row) and not row[5] for row in rows)
    return 0 if all(is_right_on.values()) else 1


def injected(start, kinds, options):
    """Runs the faults, and returns a row for each.

    Args:
        start: Called with a folder and a type; returns a run.
        kinds: Of the faults, in turn.
        options: The command line's.
    """
    draw = random.Random(options.seed)
    rows = []
    with contextlib.ExitStack() as stack:
        top = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if "full disk" in kinds:
            stack.enter_context(small_disk(top))
        expected = {
            dtype: start(top / dtype, dtype).to_the_end()
            for dtype in sorted({dtype_of(kind) for kind in kinds})
        }
        for index in range(options.num_faults):
            kind = kinds[index % len(kinds)]
            victim, step = draw.randrange(2), draw.randrange(5, NUM_STEPS - 40)
            run = start(top / f"run_{index}", dtype_of(kind))
            try:
                actual, seconds = getattr(run, kind.replace(" ", "_"))(victim, step)
                pairs = zip(expected[dtype_of(kind)], actual, strict=True)
                largest = max(float(np.abs(a - b).max()) for a, b in pairs)
            except Exception:  # In whatever way it failed, it is not right.
                traceback.print_exc()
                largest, seconds = float("inf"), float("nan")
            rows.append((kind, victim, step, largest, seconds, len(run.remaining())))
            print(f"{index + 1}: {kind}, worker {victim}, step {step}: {largest:.1e}, "
                  f"{seconds:.1f} s, {rows[-1][5]} left", file=sys.stderr, flush=True)  # fmt: skip
    return rows


def kinds_of(launcher, options):
    """The kinds of faults that the options ask for, and that this process may inject."""
    kinds = [kind for kind in options.kinds if kind in KINDS_ON[launcher]]
    return [kind for kind in kinds if os.geteuid() == 0 or kind not in ROOT_KINDS]


def dtype_of(kind):
    return "float64" if kind in RESIZED else "float32"


def is_right(row):
    kind, _, _, difference, *_ = row
    return difference <= TOLERANCE if kind in RESIZED else difference == 0


def parse(arguments):
    parser = contest.make_parser(__doc__)
    on, kinds = list(KINDS_ON), list(KINDS_ON["ray"])
    parser.add_argument("--on", default=on, type=words(on), help=f"of {', '.join(on)} (both)")
    parser.add_argument("--num_faults", type=contest.positive, default=40, help="runs on each (40)")
    parser.add_argument("--kinds", default=kinds, type=words(kinds), help="of faults (all)")
    parser.add_argument("--seed", type=int, default=0, help="of kinds and moments (0)")
    parser.add_argument("--busy", action="store_true", help="the cores are not idle: no seconds")
    return contest.parse(parser, arguments)


def words(possible):
    """Returns a function that reads some of these words, with commas between them."""

    def read(text):
        if set(text.split(",")) <= set(possible):
            return text.split(",")
        raise argparse.ArgumentTypeError(f"must be of {', '.join(possible)}. Received: {text}")

    return read


def page(rows, options):
    right = [row for row in rows if is_right(row)]
    on_ray = options.on == "ray"
    sizes = " (3 of them before a node is lost or silent, and after one arrives)" * on_ray
    rounding = f", or to {TOLERANCE:.0e} in float64 where the number of workers changes" * on_ray
    lines = [
        f"## Faults{' on Ray' * on_ray}: {len(rows)} at random moments",
        "",
        f"`models/digits_cnn.py` for {NUM_STEPS} steps, a checkpoint each {EVERY}, on 2 workers"
        f"{sizes}. What the faults are, `benchmarks/faults.py` says. Right means equal to the last "
        f"bit{rounding}.",
        "",
        *contest.table(
            ("promise", "measured", "promised"),
            (UNDISTURBED, f"{len(right)} of {len(rows)}", "all"),
            ("processes left", sum(row[5] for row in rows), 0),
        ),
        "",
    ]
    by_kind = []
    titles = ["fault", "runs", "right", "largest difference"]
    titles += [] if options.busy else ["seconds to a new step, median and most"]
    for kind in dict.fromkeys(row[0] for row in rows):
        runs = [row for row in rows if row[0] == kind]
        seconds = [row[4] for row in runs]
        cells = [kind, len(runs), sum(map(is_right, runs)), f"{max(row[3] for row in runs):.1e}"]
        cells += [] if options.busy else [f"{np.median(seconds):.1f}, {np.max(seconds):.1f}"]
        by_kind.append(cells)
    lines += contest.table(titles, *by_kind)
    if options.busy:
        lines += ["", "Other programs ran on the same cores, so no times are shown."]
    return lines


if __name__ == "__main__":
    contest.run(main)
