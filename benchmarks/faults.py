"""Injects 40 random faults into runs of 200 steps, and checks where each run ends.

    .venv/bin/python benchmarks/faults.py

Each run trains `models/digits_cnn.py` with a checkpoint every 5 steps and one thread per worker. At
a random step one fault strikes, from outside:

    kill         a worker, the chief or the other, gets SIGKILL; `launch --max_restarts`
    stop         it gets SIGSTOP: it neither works nor ends; `--stall_timeout`
    damage       a byte of the newest checkpoint is turned, and then a worker is killed
    preemption   the launcher gets SIGTERM; the same command again
    full disk    the checkpoints' disk has no room any more; the same command again, with room

The weights are compared with those of an undisturbed run, to the last bit. `full disk` needs root,
and is skipped otherwise.
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
from restarts import DEADLINE_SECONDS, EVERY, NUM_STEPS, STEPS_PER_EPOCH, newest

KINDS = ("kill", "stop", "damage", "preemption", "full disk")
ROOT_KINDS = ("full disk",)
TRY_AGAIN = 75


def main(arguments):
    options = parse(arguments)
    described = environment.describe()
    draw = random.Random(options.seed)
    kinds = options.kinds.split(",")
    kinds = [kind for kind in kinds if os.geteuid() == 0 or kind not in ROOT_KINDS]
    rows = []
    with tempfile.TemporaryDirectory() as top:
        expected = Run(pathlib.Path(top) / "undisturbed").to_the_end()
        for index in range(options.num_faults):
            kind = kinds[index % len(kinds)]
            victim, step = draw.randrange(2), draw.randrange(5, NUM_STEPS - 40)
            run = Run(pathlib.Path(top) / f"run_{index}", slow=True)
            try:
                actual, seconds = getattr(run, kind.replace(" ", "_"))(victim, step)
                pairs = zip(expected, actual, strict=True)
                largest = max(float(np.abs(a - b).max()) for a, b in pairs)
            except RuntimeError as error:
                print(error, file=sys.stderr)
                largest, seconds = float("inf"), float("nan")
            alive = [p for p in run.seen if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
            rows.append((kind, victim, step, largest, seconds, len(alive)))
            print(f"{index + 1}: {kind}, worker {victim}, step {step}: {largest:.1e}, "
                  f"{seconds:.1f} s, {len(alive)} left", file=sys.stderr, flush=True)  # fmt: skip
    names = ("kind", "worker", "step", "difference", "seconds", "left")
    results = [dict(zip(names, row, strict=True)) for row in rows]
    contest.publish("faults", page(rows, described, options), results, options)
    return 0 if all(is_right(row) and not row[5] for row in rows) else 1


def is_right(row):
    return row[3] == 0


def parse(arguments):
    parser = contest.make_parser(__doc__)
    parser.add_argument("--num_faults", type=contest.positive, default=40, help="runs (40)")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of faults (all)")
    parser.add_argument("--seed", type=int, default=0, help="of kinds and moments (0)")
    return contest.parse(parser, arguments)


class Run:
    """A training run in its own folder.

    Args:
        folder: The folder of its checkpoints and output; it is created.
        slow: Whether a step waits a little, so that a fault can hit a given moment.
    """

    def __init__(self, folder, slow=False):
        folder.mkdir()
        self._folder, self._slow = folder, slow
        self.checkpoints = folder / "checkpoints"
        self.seen = []  # All of its processes that were ever seen.

    def _start(self, *launch):
        tfparallel = [sys.executable, "-m", "tfparallel"]
        train = [
            *(*tfparallel, "train", str(contest.TOP / "models/digits_cnn.py"), "--parallel=data"),
            *("--num_devices=1", "--device_type=cpu", "--seed=7", "--stall_timeout=10"),
            *(f"--steps_per_epoch={STEPS_PER_EPOCH}", f"--epochs={NUM_STEPS // STEPS_PER_EPOCH}"),
            *(f"--checkpoint_every_steps={EVERY}", f"--checkpoint_dir={self.checkpoints}"),
            f"--save={self._folder / 'model.keras'}",
        ]
        if self._slow:
            train.append("--inject=slow:worker=0,ms=20")
        threads = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
        with open(self._folder / "output", "ab") as output:
            return subprocess.Popen(
                [*tfparallel, "launch", *launch, "--", *train],
                cwd=contest.TOP,
                env=os.environ | dict.fromkeys(threads, "1"),
                stdout=output,
                stderr=output,
            )

    @contextlib.contextmanager
    def _running(self, *launch):
        """Yields a launcher, and waits for it to end on exit."""
        job = self._start(*launch)
        try:
            yield job
            job.wait(DEADLINE_SECONDS)
        finally:
            job.terminate()
            job.wait(60)

    def _until(self, step, job):
        """Waits for the checkpoint of a step, and records the processes."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while newest(self.checkpoints) < step:
            if job.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"The run never came to step {step}:\n{self.said()}")
            time.sleep(0.005)
        with contextlib.suppress(psutil.Error):
            self.seen += psutil.Process(job.pid).children(recursive=True)

    def _seconds_to_a_new_step(self, job):
        reached, started = newest(self.checkpoints), time.monotonic()
        self._until(reached + 1, job)
        return time.monotonic() - started

    def _ended_well(self, job):
        code = job.wait(DEADLINE_SECONDS)
        if code:
            raise RuntimeError(f"The launcher ended with {code}:\n{self.said()}")
        return keras.models.load_model(self._folder / "model.keras").get_weights()

    def said(self):
        return (self._folder / "output").read_text()[-3000:]

    def to_the_end(self):
        with self._running("--nproc_per_node=2") as job:
            return self._ended_well(job)

    def _strike(self, step, what):
        with self._running("--nproc_per_node=2", "--max_restarts=2") as job:
            self._until(step, job)
            what(job)
            seconds = self._seconds_to_a_new_step(job)
            return self._ended_well(job), seconds

    def kill(self, victim, step):
        return self._strike(step, lambda job: os.kill(worker_of(job, victim), signal.SIGKILL))

    def stop(self, victim, step):
        return self._strike(step, lambda job: os.kill(worker_of(job, victim), signal.SIGSTOP))

    def damage(self, victim, step):
        def strike(job):
            (state,) = (self.checkpoints / f"step_{newest(self.checkpoints):08d}").glob("*.npy")
            content = bytearray(state.read_bytes())
            content[len(content) // 2] ^= 0xFF
            state.write_bytes(content)
            os.kill(worker_of(job, victim), signal.SIGKILL)

        return self._strike(step, strike)

    def preemption(self, victim, step):
        launch = ["--nproc_per_node=2", "--grace_seconds=20"]
        with self._running(*launch) as job:
            self._until(step, job)
            job.send_signal(signal.SIGTERM)
            code = job.wait(DEADLINE_SECONDS)
        if code != TRY_AGAIN:
            raise RuntimeError(f"A run that was told to end ended with {code}:\n{self.said()}")
        with self._running(*launch) as job:
            seconds = self._seconds_to_a_new_step(job)
            return self._ended_well(job), seconds

    def full_disk(self, victim, step):
        self.checkpoints.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(self.checkpoints)]
        subprocess.run(mount, check=True)
        try:
            with self._running("--nproc_per_node=2") as job:
                self._until(step, job)
                used = 64 * 2**20 - os.statvfs(self.checkpoints).f_bavail * 4096
                filled = self.checkpoints / "filled"
                with contextlib.suppress(OSError), open(filled, "wb") as file:
                    file.write(bytes(64 * 2**20 - used + 1))
                code = job.wait(DEADLINE_SECONDS)
            if code != 1 or "No space left on device" not in self.said():
                raise RuntimeError(f"A full disk ended a run with {code}:\n{self.said()}")
            filled.unlink()
            with self._running("--nproc_per_node=2") as job:
                seconds = self._seconds_to_a_new_step(job)
                return self._ended_well(job), seconds
        finally:
            subprocess.run(["umount", str(self.checkpoints)], check=True)


def worker_of(job, rank):
    """The process of a worker under a launcher; None if it has no such worker."""
    for process in psutil.Process(job.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            is_training = process.cmdline()[1:4] == ["-m", "tfparallel", "train"]
            if is_training and process.environ().get("RANK") == str(rank):
                return process.pid
    return None


def page(rows, described, options):
    right = [row for row in rows if is_right(row)]
    lines = [
        "## Faults: 40 at random moments",
        "",
        f"`models/digits_cnn.py` for {NUM_STEPS} steps, a checkpoint each {EVERY}, on 2 workers. "
        "What the faults are, `benchmarks/faults.py` says. Right means equal to the last bit.",
        "",
        "| promise | measured | promised |",
        "| --- | --- | --- |",
        "| runs that end at the weights of an undisturbed one "
        f"| {len(right)} of {len(rows)} | all |",
        f"| processes left | {sum(row[5] for row in rows)} | 0 |",
        "",
        "| fault | runs | right | largest difference | seconds to a new step, median and most |",
        "| --- | --- | --- | --- | --- |",
    ]
    for kind in dict.fromkeys(row[0] for row in rows):
        runs = [row for row in rows if row[0] == kind]
        seconds = [row[4] for row in runs]
        lines.append(
            f"| {kind} | {len(runs)} | {sum(map(is_right, runs))} "
            f"| {max(row[3] for row in runs):.1e} "
            f"| {np.median(seconds):.1f}, {np.max(seconds):.1f} |"
        )
    return lines + contest.footer("faults", described, options, "num_faults", "seed")


if __name__ == "__main__":
    contest.run(main)
