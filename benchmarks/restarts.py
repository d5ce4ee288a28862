"""Kills a worker at a random moment of a run, ten times, and checks where the run ends.

    .venv/bin/python benchmarks/restarts.py
    .venv/bin/python benchmarks/restarts.py --standby

Each run trains `models/digits_cnn.py` on 2 workers for 200 steps under
`tfparallel launch --max_restarts`. One worker, chief or not, gets SIGKILL from outside, wherever it
is: in a step, in a collective, while it writes a checkpoint. The run's weights are compared with
those of an undisturbed run, and the time from the kill to the first new step is measured. With
`--standby`, `launch` keeps processes ready, which takes half a minute, so the runs are longer, and
the kills late.
"""

import contextlib
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

import contest
import environment
import keras
import numpy as np
import psutil

TOP = pathlib.Path(__file__).parents[1]
NUM_STEPS, STEPS_PER_EPOCH, EVERY = 200, 25, 5
NUM_STEPS_WITH_STANDBY = 3000
TOLERANCE = 1e-5
RESTART_SECONDS = 15.0
DEADLINE_SECONDS = 300.0


def main(arguments):
    options = parse(arguments)
    described = environment.describe()
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        num_steps = NUM_STEPS_WITH_STANDBY if options.standby else NUM_STEPS
        earliest = num_steps // 2 if options.standby else 1
        expected, _ = run(pathlib.Path(folder) / "whole", options.standby)
        rows = []
        for index in range(options.num_kills):
            # The chief and the other in turn; any step but the first and the last few.
            step = draw.randrange(earliest, num_steps - 10)
            worker, pause = index % 2, draw.random() / 20
            kill = (worker, step, pause)
            weights, seconds = run(pathlib.Path(folder) / f"kill_{index}", options.standby, kill)
            largest = max(
                float(np.max(np.abs(a - b))) for a, b in zip(expected, weights, strict=True)
            )
            rows.append((worker, step, largest, seconds))
            print(f"worker {worker}, step {step}: {largest:.1e}, {seconds:.1f} s", file=sys.stderr)
    names = ("worker", "step", "difference", "seconds")
    results = [dict(zip(names, row, strict=True)) for row in rows]
    name = "restarts_standby" if options.standby else "restarts"
    contest.publish(name, page(rows, described, options), results, options)
    return 0 if all(largest <= TOLERANCE for _, _, largest, _ in rows) else 1


def parse(arguments):
    parser = contest.make_parser(__doc__)
    parser.add_argument("--num_kills", type=int, default=10, help="runs (10)")
    parser.add_argument("--standby", action="store_true", help="`launch` keeps processes ready")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (0)")
    return contest.parse(parser, arguments)


def run(folder, standby, kill=None):
    """Trains once; returns the weights, and the seconds from the kill to the first new step.

    Args:
        folder: Where the run keeps its checkpoints and its output.
        standby: Whether `launch` keeps processes ready.
        kill: The worker, the step after which, and how many seconds later; None for nobody.
    """
    folder.mkdir()
    num_steps = NUM_STEPS_WITH_STANDBY if standby else NUM_STEPS
    saved, checkpoints = folder / "model.keras", folder / "checkpoints"
    train = [
        *(sys.executable, "-m", "tfparallel", "train", str(TOP / "models/digits_cnn.py")),
        *("--parallel=data", "--seed=7", f"--steps_per_epoch={STEPS_PER_EPOCH}"),
        *(f"--epochs={num_steps // STEPS_PER_EPOCH}", f"--checkpoint_every_steps={EVERY}"),
        *(f"--checkpoint_dir={checkpoints}", f"--save={saved}"),
    ]
    launch = [sys.executable, "-m", "tfparallel", "launch", "--nproc_per_node=2"]
    launch += ["--max_restarts=2", *["--standby"] * standby]
    with (
        open(folder / "output", "wb") as output,
        subprocess.Popen([*launch, "--", *train], cwd=TOP, stdout=output, stderr=output) as job,
    ):
        try:
            seconds = None if kill is None else killed(job, checkpoints, *kill)
            job.wait(DEADLINE_SECONDS)
        finally:
            job.terminate()  # Ends its workers too; no effect on a job that has ended.
    text = (folder / "output").read_text()
    if job.returncode or (kill is not None and "restarting all workers (1 of 2)" not in text):
        raise RuntimeError(f"A run ended with {job.returncode}, kill={kill}:\n{text[-3000:]}")
    return keras.models.load_model(saved).get_weights(), seconds


def killed(job, checkpoints, worker, step, pause):
    """Kills a worker once `step` steps are done; returns the seconds until the next new one."""
    wait_for(lambda: newest(checkpoints) >= step, job, "the step of the kill")
    time.sleep(pause)
    (victim,) = [
        process
        for process in psutil.Process(job.pid).children(recursive=True)
        # The command itself, not the reaper that holds it as an argument.
        if process.cmdline()[1:4] == ["-m", "tfparallel", "train"]
        and process.environ().get("RANK") == str(worker)
        and "TFPARALLEL_STANDBY" not in process.environ()  # One that waits.
    ]
    reached = newest(checkpoints)
    os.kill(victim.pid, signal.SIGKILL)
    started = time.monotonic()
    wait_for(lambda: newest(checkpoints) > reached, job, "a new step")
    return time.monotonic() - started


def newest(checkpoints):
    """The step of the newest whole checkpoint; -1 for none."""
    with contextlib.suppress(FileNotFoundError):
        return max((int(p.name[5:]) for p in checkpoints.glob("step_????????")), default=-1)
    return -1


def wait_for(condition, job, what):
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        if job.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"The job ended, or {DEADLINE_SECONDS:.0f} s passed, before {what}.")
        time.sleep(0.005)


def page(rows, described, options):
    equal = sum(largest <= TOLERANCE for _, _, largest, _ in rows)
    slowest = max(seconds for *_, seconds in rows)
    num_steps = NUM_STEPS_WITH_STANDBY if options.standby else NUM_STEPS
    lines = [
        f"## Restarts: a worker killed at a random moment{', --standby' * options.standby}",
        "",
        f"`models/digits_cnn.py` on 2 workers for {num_steps} steps, a checkpoint each {EVERY}; "
        "one worker gets SIGKILL from outside, and `launch` starts both again. The seconds are "
        f"from the kill to the first checkpoint with a new step, at most {EVERY} steps after it.",
        "",
        "| promise | measured | promised |",
        "| --- | --- | --- |",
        f"| runs that end at the weights of an undisturbed one (to {TOLERANCE:.0e}) "
        f"| {equal} of {len(rows)} | all |",
        f"| restart to first new step, the slowest | {slowest:.1f} s "
        f"| under {RESTART_SECONDS:.0f} s |",
        "",
        "| worker | killed after step | largest difference of a weight | seconds |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| {worker}{' (chief)' * (worker == 0)} | {step} | {largest:.1e} | {seconds:.1f} |"
        for worker, step, largest, seconds in rows
    ]
    flags = ["num_kills", *["standby"] * options.standby, "seed"]
    return lines + contest.footer("restarts", described, options, *flags)


if __name__ == "__main__":
    contest.run(main)
