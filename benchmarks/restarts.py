"""Kills a worker at a random moment of a run, ten times, and checks where the run ends.

    .venv/bin/python benchmarks/restarts.py
    .venv/bin/python benchmarks/restarts.py --standby

The runs are those of `faults.py`, whose fault is `kill`: one worker, chief or not, gets SIGKILL
from outside, wherever it is: in a step, in a collective, while it writes a checkpoint. The run's
weights are compared with those of an undisturbed run, and the time from the kill to the first new
step is measured. With `--standby`, `launch` keeps processes ready, which takes half a minute, so
the runs are longer, and the kills late.
"""

import pathlib
import random
import sys
import tempfile

import contest
import fault_runs
import numpy as np

NUM_STEPS_WITH_STANDBY = 3000
TOLERANCE = 1e-5
RESTART_SECONDS = 15.0


def main(arguments):
    options = parse(arguments)
    num_steps = NUM_STEPS_WITH_STANDBY if options.standby else fault_runs.NUM_STEPS
    earliest = num_steps // 2 if options.standby else 1
    more = {"num_steps": num_steps, "launch": ["--standby"] * options.standby}
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder, rows = pathlib.Path(name), []
        expected = fault_runs.Run(folder / "whole", "float32", **more).to_the_end()
        for index in range(options.num_kills):
            # The chief and the other in turn; any step but the first and the last few.
            step = draw.randrange(earliest, num_steps - 10)
            worker, pause = index % 2, draw.random() / 20
            run = fault_runs.Run(folder / f"kill_{index}", "float32", **more)
            weights, seconds = run.kill(worker, step, pause)
            if "restarting all workers (1 of 2)" not in run.said(whole=True):
                raise RuntimeError(f"Nothing was restarted:\n{run.said()}")
            pairs = zip(expected, weights, strict=True)
            largest = max(float(np.max(np.abs(a - b))) for a, b in pairs)
            rows.append((worker, step, largest, seconds))
            print(f"worker {worker}, step {step}: {largest:.1e}, {seconds:.1f} s", file=sys.stderr)
    names = ("worker", "step", "difference", "seconds")
    results = [dict(zip(names, row, strict=True)) for row in rows]
    name = "restarts_standby" if options.standby else "restarts"
    lines = page(rows, num_steps, options)
    contest.publish(name, lines, results, options, "num_kills", "standby", "seed")
    return 0 if all(largest <= TOLERANCE for _, _, largest, _ in rows) else 1


def parse(arguments):
    parser = contest.make_parser(__doc__)
    parser.add_argument("--num_kills", type=int, default=10, help="runs (10)")
    parser.add_argument("--standby", action="store_true", help="`launch` keeps processes ready")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (0)")
    return contest.parse(parser, arguments)


def page(rows, num_steps, options):
    equal = sum(largest <= TOLERANCE for _, _, largest, _ in rows)
    slowest = max(seconds for *_, seconds in rows)
    return [
        f"## Restarts: a worker killed at a random moment{', --standby' * options.standby}",
        "",
        f"`models/digits_cnn.py` on 2 workers for {num_steps} steps, a checkpoint each "
        f"{fault_runs.EVERY}; one worker gets SIGKILL from outside, and `launch` starts both "
        "again. The seconds are from the kill to the first checkpoint with a new step, at most "
        f"{fault_runs.EVERY} steps after it.",
        "",
        *contest.table(
            ("promise", "measured", "promised"),
            (f"{fault_runs.UNDISTURBED} (to {TOLERANCE:.0e})", f"{equal} of {len(rows)}", "all"),
            (
                "restart to first new step, the slowest",
                f"{slowest:.1f} s",
                f"under {RESTART_SECONDS:.0f} s",
            ),
        ),
        "",
        *contest.table(
            ("worker", "killed after step", "largest difference of a weight", "seconds"),
            *(
                (f"{worker}{' (chief)' * (worker == 0)}", step, f"{largest:.1e}", f"{seconds:.1f}")
                for worker, step, largest, seconds in rows
            ),
        ),
    ]


if __name__ == "__main__":
    contest.run(main)
