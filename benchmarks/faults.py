"""Injects 40 random faults into runs of 200 steps, and checks where each run ends.

    .venv/bin/python benchmarks/faults.py

Each run trains `models/digits_cnn.py` with a checkpoint every 5 steps and one thread per worker. At
a random step one fault strikes, from outside:

    kill         a worker, the chief or the other, gets SIGKILL; `launch --max_restarts`
    stop         it gets SIGSTOP: it neither works nor ends; `--stall_timeout`
    damage       a byte of the newest checkpoint is turned, and then a worker is killed
    preemption   the launcher gets SIGTERM; the same command again
    full disk    the checkpoints' disk has no room any more; the same command again, with room
    lost host    of three launchers (`--nnodes=2:3`) one gets SIGKILL and does not come back
    partition    two hosts (network namespaces; `--nnodes=1:2`) whose link is cut

The weights are compared with those of an undisturbed run: to the last bit, and for the last two
faults, which continue with fewer workers, to 1e-9 in float64. (In float32 a batch divided
differently rounds differently, by 1e-5 or 1e-4, depending on the processor.) `full disk` and
`partition` need root, and are skipped otherwise.
"""

import contextlib
import os
import pathlib
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time

import contest
import keras
import numpy as np
import psutil
import two_hosts

sys.path.insert(0, str(contest.TOP))
from tfparallel.cluster.ports import free_ports  # noqa: E402

NUM_STEPS, STEPS_PER_EPOCH, EVERY = 200, 25, 5
DEADLINE_SECONDS = 300.0
KINDS = ("kill", "stop", "damage", "preemption", "full disk", "lost host", "partition")
ROOT_KINDS = ("full disk", "partition")
WITH_FEWER = ("lost host", "partition")  # Compared in float64.
TOLERANCE = 1e-9
TRY_AGAIN = 75
UNDISTURBED = "runs that end at the weights of an undisturbed one"
_PORT = 29_777


def main(arguments):
    options = parse(arguments)
    draw = random.Random(options.seed)
    kinds = options.kinds.split(",")
    kinds = [kind for kind in kinds if os.geteuid() == 0 or kind not in ROOT_KINDS]
    rows = []
    with tempfile.TemporaryDirectory() as top:
        expected = {
            dtype: Run(pathlib.Path(top) / dtype, dtype).to_the_end()
            for dtype in sorted({dtype_of(kind) for kind in kinds})
        }
        for index in range(options.num_faults):
            kind = kinds[index % len(kinds)]
            victim, step = draw.randrange(2), draw.randrange(5, NUM_STEPS - 40)
            run = Run(pathlib.Path(top) / f"run_{index}", dtype_of(kind), slow=True)
            try:
                actual, seconds = getattr(run, kind.replace(" ", "_"))(victim, step)
                pairs = zip(expected[dtype_of(kind)], actual, strict=True)
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
    contest.publish("faults", page(rows), results, options, "num_faults", "seed")
    return 0 if all(is_right(row) and not row[5] for row in rows) else 1


def dtype_of(kind):
    return "float64" if kind in WITH_FEWER else "float32"


def is_right(row):
    kind, _, _, difference, *_ = row
    return difference <= TOLERANCE if kind in WITH_FEWER else difference == 0


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
        dtype: The type of its weights.
        slow: Whether a step waits a little, so that a fault can hit a given moment.
        num_steps: How long it trains.
        launch: Further flags of `launch`.
    """

    def __init__(self, folder, dtype, slow=False, num_steps=NUM_STEPS, launch=()):
        folder.mkdir()
        self._folder, self._dtype, self._slow = folder, dtype, slow
        self._num_steps, self._flags = num_steps, launch
        self.checkpoints = folder / "checkpoints"
        self.seen = []  # All of its processes that were ever seen.

    def _start(self, *launch, prefix=()):
        tfparallel = [sys.executable, "-m", "tfparallel"]
        num_epochs = self._num_steps // STEPS_PER_EPOCH
        train = [
            *(*tfparallel, "train", str(contest.TOP / "models/digits_cnn.py"), "--parallel=data"),
            *("--num_devices=1", "--device_type=cpu", "--seed=7", "--stall_timeout=10"),
            *(f"--steps_per_epoch={STEPS_PER_EPOCH}", f"--epochs={num_epochs}"),
            *(f"--checkpoint_every_steps={EVERY}", f"--checkpoint_dir={self.checkpoints}"),
            *(f"--dtype={self._dtype}", f"--save={self._folder / 'model.keras'}"),
        ]
        if self._slow:
            train.append("--inject=slow:worker=0,ms=20")
        threads = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
        with open(self._folder / "output", "ab") as output:
            return subprocess.Popen(
                [*prefix, *tfparallel, "launch", *launch, *self._flags, "--", *train],
                cwd=contest.TOP,
                env=os.environ | dict.fromkeys(threads, "1"),
                stdout=output,
                stderr=output,
            )

    @contextlib.contextmanager
    def _running(self, *launches, prefixes=((),)):
        """Yields launchers, and waits for them to end on exit."""
        jobs = []
        try:
            for launch, prefix in zip(launches, prefixes * len(launches), strict=False):
                jobs.append(self._start(*launch, prefix=prefix))
            yield jobs
            for job in jobs:
                job.wait(DEADLINE_SECONDS)
        finally:
            for job in jobs:
                job.terminate()
                job.wait(60)

    def _until(self, step, jobs):
        """Waits for the checkpoint of a step, and records the processes."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while newest(self.checkpoints) < step:
            if all(job.poll() is not None for job in jobs) or time.monotonic() > deadline:
                raise RuntimeError(f"The run never came to step {step}:\n{self.said()}")
            time.sleep(0.005)
        for job in jobs:
            with contextlib.suppress(psutil.Error):
                self.seen += psutil.Process(job.pid).children(recursive=True)

    def _seconds_to_a_new_step(self, jobs):
        reached, started = newest(self.checkpoints), time.monotonic()
        self._until(reached + 1, jobs)
        return time.monotonic() - started

    def _ended_well(self, jobs):
        codes = [job.wait(DEADLINE_SECONDS) for job in jobs]
        if any(codes):
            raise RuntimeError(f"Launchers ended with {codes}:\n{self.said()}")
        return keras.models.load_model(self._folder / "model.keras").get_weights()

    def said(self, whole=False):
        text = (self._folder / "output").read_text()
        return text if whole else text[-3000:]

    def to_the_end(self):
        with self._running(["--nproc_per_node=2"]) as jobs:
            return self._ended_well(jobs)

    def _strike(self, step, what):
        with self._running(["--nproc_per_node=2", "--max_restarts=2"]) as jobs:
            self._until(step, jobs)
            what(jobs[0])
            seconds = self._seconds_to_a_new_step(jobs)
            return self._ended_well(jobs), seconds

    def kill(self, victim, step, pause=0.0):
        def strike(job):
            time.sleep(pause)
            os.kill(worker_of(job, victim), signal.SIGKILL)

        return self._strike(step, strike)

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
        with self._running(launch) as jobs:
            self._until(step, jobs)
            jobs[0].send_signal(signal.SIGTERM)
            code = jobs[0].wait(DEADLINE_SECONDS)
        if code != TRY_AGAIN:
            raise RuntimeError(f"A run that was told to end ended with {code}:\n{self.said()}")
        with self._running(launch) as jobs:
            seconds = self._seconds_to_a_new_step(jobs)
            return self._ended_well(jobs), seconds

    def full_disk(self, victim, step):
        self.checkpoints.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(self.checkpoints)]
        subprocess.run(mount, check=True)
        try:
            with self._running(["--nproc_per_node=2"]) as jobs:
                self._until(step, jobs)
                used = 64 * 2**20 - os.statvfs(self.checkpoints).f_bavail * 4096
                filled = self.checkpoints / "filled"
                with contextlib.suppress(OSError), open(filled, "wb") as file:
                    file.write(bytes(64 * 2**20 - used + 1))
                code = jobs[0].wait(DEADLINE_SECONDS)
            if code != 1 or "No space left on device" not in self.said():
                raise RuntimeError(f"A full disk ended a run with {code}:\n{self.said()}")
            filled.unlink()
            with self._running(["--nproc_per_node=2"]) as jobs:
                seconds = self._seconds_to_a_new_step(jobs)
                return self._ended_well(jobs), seconds
        finally:
            subprocess.run(["umount", str(self.checkpoints)], check=True)

    def lost_host(self, victim, step):
        (port,) = free_ports(1)
        os.environ.setdefault("TFPARALLEL_JOB_TOKEN", secrets.token_hex(16))
        launch = ["--nnodes=2:3", f"--rdzv_endpoint=127.0.0.1:{port}", "--grace_seconds=10"]
        with self._running(launch, launch, launch) as jobs:
            self._until(step, jobs)
            lost = next(job for job in jobs if worker_of(job, victim))
            lost.kill()
            survivors = [job for job in jobs if job is not lost]
            seconds = self._seconds_to_a_new_step(survivors)
            return self._ended_well(survivors), seconds

    def partition(self, victim, step):
        places = ",".join(f"{address}:{_PORT}" for address in two_hosts.ADDRESSES)
        os.environ.setdefault("TFPARALLEL_JOB_TOKEN", secrets.token_hex(16))
        launch = ["--nnodes=1:2", f"--rdzv_endpoint={places}", "--start_timeout=15"]
        with two_hosts.linked() as names:
            prefixes = [[*two_hosts.on_host(name)] for name in names]
            with self._running(launch, launch, prefixes=prefixes) as jobs:
                self._until(step, jobs)
                two_hosts.cut(names)
                seconds = self._seconds_to_a_new_step(jobs)
                deadline = time.monotonic() + DEADLINE_SECONDS
                while any(job.poll() is None for job in jobs) and time.monotonic() < deadline:
                    time.sleep(0.1)
                codes = sorted(job.returncode for job in jobs)
                if codes != [0, 1]:
                    raise RuntimeError(f"A cut link ended launchers with {codes}:\n{self.said()}")
                return self._ended_well([job for job in jobs if job.returncode == 0]), seconds


def worker_of(job, rank):
    """The process of a worker under a launcher; None if it has no such worker."""
    for process in psutil.Process(job.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            variables = process.environ()
            # The command itself, not the reaper that holds it as an argument, nor one that waits.
            is_training = process.cmdline()[1:4] == ["-m", "tfparallel", "train"]
            is_training = is_training and "TFPARALLEL_STANDBY" not in variables
            if is_training and variables.get("RANK") == str(rank):
                return process.pid
    return None


def newest(checkpoints):
    """The step of the newest whole checkpoint; -1 for none."""
    with contextlib.suppress(FileNotFoundError):
        return max((int(p.name[5:]) for p in checkpoints.glob("step_????????")), default=-1)
    return -1


def page(rows):
    right = [row for row in rows if is_right(row)]
    lines = [
        "## Faults: 40 at random moments",
        "",
        f"`models/digits_cnn.py` for {NUM_STEPS} steps, a checkpoint each {EVERY}, on 2 workers (3 "
        "for a lost host). What the faults are, `benchmarks/faults.py` says. Right means equal "
        f"to the last bit, or to {TOLERANCE:.0e} in float64 where fewer workers go on.",
        "",
        *contest.table(
            ("promise", "measured", "promised"),
            (UNDISTURBED, f"{len(right)} of {len(rows)}", "all"),
            ("processes left", sum(row[5] for row in rows), 0),
        ),
        "",
    ]
    by_kind = []
    for kind in dict.fromkeys(row[0] for row in rows):
        runs = [row for row in rows if row[0] == kind]
        seconds = [row[4] for row in runs]
        largest, times = max(row[3] for row in runs), (np.median(seconds), np.max(seconds))
        counts = (len(runs), sum(map(is_right, runs)))
        by_kind.append((kind, *counts, f"{largest:.1e}", "{:.1f}, {:.1f}".format(*times)))
    head = ("fault", "runs", "right", "largest difference")
    return lines + contest.table((*head, "seconds to a new step, median and most"), *by_kind)


if __name__ == "__main__":
    contest.run(main)
