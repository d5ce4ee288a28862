"""The runs of `faults.py`, under `launch` and on Ray: a method for each kind of fault."""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import contest
import keras
import psutil
import ray_cluster

NUM_STEPS, STEPS_PER_EPOCH, EVERY = 200, 25, 5
KINDS = ("kill", "stop", "damage", "preemption", "full disk")
RESIZED = ("lost node", "silent node", "arrival")  # Compared in float64.
# With Ray's in this order, few nodes must be started between two runs.
KINDS_ON = {
    "host": KINDS,
    "ray": (*KINDS, "actor", "arrival", "raylet", "lost node", "silent node"),
}
ROOT_KINDS = ("full disk", "silent node")
TRY_AGAIN = 75
UNDISTURBED = "runs that end at the weights of an undisturbed one"
STALL_SECONDS = 30  # Of the fault `stop`; without it, a step on a busy machine may last longer.
DEADLINE_SECONDS = 600.0
ENDING_SECONDS = 10.0  # An actor ends a moment after its driver.
DISK, DISK_BYTES = "disk", 64 * 2**20
FOLDER = pathlib.Path(__file__).parent


@contextlib.contextmanager
def small_disk(folder):
    """Mounts the disk that `full disk` fills, before any node starts, which may have own mounts."""
    path = folder / DISK
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(path)]
    subprocess.run(mount, check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


class Run:
    """A training run in its own folder, under `launch`.

    Args:
        folder: The folder of its checkpoints and output, which is created. Beside it lies the
            disk that is filled.
        dtype: The type of its weights.
        num_steps: How long it trains.
        launch: Further flags of `launch`.
    """

    def __init__(self, folder, dtype, num_steps=NUM_STEPS, launch=()):
        folder.mkdir()
        self._folder, self._dtype = folder, dtype
        self._num_steps, self._flags = num_steps, launch
        self.checkpoints = folder / "checkpoints"
        self.seen = []  # All of its processes that were ever seen.

    def _command(self, num_workers, max_restarts):
        """The command that starts the workers, up to the arguments of `train`."""
        tfparallel = [sys.executable, "-m", "tfparallel"]
        launch = [f"--nproc_per_node={num_workers}", f"--max_restarts={max_restarts}"]
        return [
            *tfparallel,
            "launch",
            "--grace_seconds=20",
            *launch,
            *self._flags,
            "--",
            *tfparallel,
            "train",
        ]

    def _processes(self, job):
        """The processes that the job has started."""
        with contextlib.suppress(psutil.Error):
            return psutil.Process(job.pid).children(recursive=True)
        return []

    def _is_worker(self, words):
        """Whether the words of a command are a worker's, and not those of its reaper."""
        return words[1:4] == ["-m", "tfparallel", "train"]

    def _workers(self, job):
        """The processes of the workers, by rank."""
        workers = {}
        for process in self._processes(job):
            with contextlib.suppress(psutil.Error):
                variables = process.environ()
                # One that stands by has no rank yet, whatever its variables say.
                if self._is_worker(process.cmdline()) and "TFPARALLEL_STANDBY" not in variables:
                    workers[int(variables["RANK"])] = process
        return workers

    @contextlib.contextmanager
    def _running(self, num_workers="2", max_restarts=0, stall_seconds=DEADLINE_SECONDS):
        """Yields the job's first process, and waits for it to end on exit."""
        task = shutil.copy(FOLDER / "faults_task.py", self._folder)
        train = [
            *(task, "--parallel=data", "--num_devices=1", "--device_type=cpu", "--seed=7"),
            *(f"--stall_timeout={stall_seconds}", f"--steps_per_epoch={STEPS_PER_EPOCH}"),
            *(
                f"--epochs={self._num_steps // STEPS_PER_EPOCH}",
                f"--checkpoint_every_steps={EVERY}",
            ),
            *(f"--checkpoint_dir={self.checkpoints}", f"--dtype={self._dtype}"),
            f"--save={self._folder / 'model.keras'}",
        ]
        threads = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
        with open(self._folder / "output", "ab") as output:
            job = subprocess.Popen(
                [*self._command(num_workers, max_restarts), *train],
                cwd=contest.TOP,
                env=os.environ | dict.fromkeys(threads, "1"),
                stdout=output,
                stderr=output,
            )
        try:
            yield job
            job.wait(DEADLINE_SECONDS)
        finally:
            job.terminate()
            job.wait(60)

    def _wait(self, condition, job, what):
        """Waits until a condition holds, and records the processes."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            if job.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"The run never came to {what}:\n{self.said()}")
            time.sleep(0.005)
        self.seen += self._processes(job)

    def _until(self, step, job):
        self._wait(lambda: newest(self.checkpoints) >= step, job, f"step {step}")

    def _restarted(self, job, old, began):
        """Waits for a new step, once the old workers have ended; returns the seconds since then."""
        self._wait(lambda: not alive(old), job, "the end of its workers")
        self._until(newest(self.checkpoints) + 1, job)
        return time.monotonic() - began

    def _weights(self, job):
        """Waits for a good end, and returns the weights."""
        if code := job.wait(DEADLINE_SECONDS):
            raise RuntimeError(f"The job ended with {code}:\n{self.said()}")
        return keras.models.load_model(self._folder / "model.keras").get_weights()

    def said(self, whole=False):
        text = (self._folder / "output").read_text()
        return text if whole else text[-3000:]

    def remaining(self):
        """The processes of the run that are still there."""
        return alive(self.seen)

    def to_the_end(self):
        with self._running() as job:
            return self._weights(job)

    def _strike(self, step, what, num_workers="2", **options):
        with self._running(num_workers, max_restarts=2, **options) as job:
            self._until(step, job)
            old, began = self._workers(job).values(), time.monotonic()
            what(job)
            seconds = self._restarted(job, old, began)
            return self._weights(job), seconds

    def _continued(self):
        """Runs the same command again."""
        with self._running() as job:
            seconds = self._restarted(job, [], time.monotonic())
            return self._weights(job), seconds

    def kill(self, victim, step, pause=0.0):
        def strike(job):
            time.sleep(pause)
            self._workers(job)[victim].kill()

        return self._strike(step, strike)

    def stop(self, victim, step):
        def strike(job):
            self._workers(job)[victim].suspend()

        return self._strike(step, strike, stall_seconds=STALL_SECONDS)

    def damage(self, victim, step):
        def strike(job):
            (state,) = (self.checkpoints / f"step_{newest(self.checkpoints):08d}").glob("*.npy")
            content = bytearray(state.read_bytes())
            content[len(content) // 2] ^= 0xFF
            state.write_bytes(content)
            self._workers(job)[victim].kill()

        return self._strike(step, strike)

    def preemption(self, victim, step):
        with self._running() as job:
            self._until(step, job)
            job.send_signal(signal.SIGTERM)
            code = job.wait(DEADLINE_SECONDS)
        if code != TRY_AGAIN:
            raise RuntimeError(f"A run that was told to end ended with {code}:\n{self.said()}")
        return self._continued()

    def full_disk(self, victim, step):
        disk = self._folder.parent / DISK
        self.checkpoints, filled = disk / self._folder.name, disk / "filled"
        try:
            with self._running() as job:
                self._until(step, job)
                used = DISK_BYTES - os.statvfs(disk).f_bavail * 4096
                with contextlib.suppress(OSError), open(filled, "wb") as file:
                    file.write(bytes(DISK_BYTES - used + 1))
                code = job.wait(DEADLINE_SECONDS)
            if code != 1 or "No space left on device" not in self.said():
                raise RuntimeError(f"A full disk ended a run with {code}:\n{self.said()}")
            filled.unlink()
            return self._continued()
        finally:
            filled.unlink(missing_ok=True)
            shutil.rmtree(self.checkpoints, ignore_errors=True)


class RunOnRay(Run):
    """A training run under `tfparallel.ray.fit`, in a driver of its own.

    Args:
        cluster: The Ray cluster, which stays for the next run.
        folder: As of `Run`.
        dtype: As of `Run`.
    """

    def __init__(self, cluster, folder, dtype):
        super().__init__(folder, dtype)
        self._cluster = cluster

    def _running(self, *options, **named):
        self._have_nodes(max(2, len(self._cluster.worker_nodes)))
        return super()._running(*options, **named)

    def _add_node(self):
        ray_cluster.add_node(self._cluster, own_host=os.geteuid() == 0)

    def _have_nodes(self, number):
        """Starts or removes nodes that can take a worker each."""
        while len(self._cluster.worker_nodes) < number:
            self._add_node()
        while len(self._cluster.worker_nodes) > number:
            ray_cluster.kill_raylet(self._cluster)

    def _command(self, num_workers, max_restarts):
        return [sys.executable, str(FOLDER / "ray_driver.py"), num_workers, str(max_restarts)]

    def _processes(self, job):
        """The actors, and what they have started; the nodes' other processes stay."""
        processes = []
        for node in self._cluster.worker_nodes:
            for process in ray_cluster.processes_of(node):
                with contextlib.suppress(psutil.Error):
                    if _is_actor(process):
                        processes += [process, *process.children(recursive=True)]
        return processes

    def _is_worker(self, words):
        return words[1:4] == ["-P", "-m", "tfparallel.commands.spawned"]

    def remaining(self):
        psutil.wait_procs(super().remaining(), ENDING_SECONDS)
        return super().remaining()

    def _actor(self, job, rank):
        parents = self._workers(job)[rank].parents()
        return next(filter(_is_actor, parents))

    def _node(self, job, rank):
        """The node of a worker."""
        raylets = {parent.pid for parent in self._workers(job)[rank].parents()}
        nodes = self._cluster.worker_nodes
        return next(node for node in nodes if ray_cluster.processes_of(node)[0].pid in raylets)

    def actor(self, victim, step):
        return self._strike(step, lambda job: self._actor(job, victim).kill())

    def raylet(self, victim, step, num_workers="2"):
        def strike(job):
            ray_cluster.kill_raylet(self._cluster, self._node(job, victim))

        self._have_nodes(3)
        return self._strike(step, strike, num_workers)

    def lost_node(self, victim, step):
        return self.raylet(victim, step, "2:3")

    def silent_node(self, victim, step):
        self._have_nodes(3)
        with self._running("2:3") as job:
            self._until(step, job)
            node, workers = self._node(job, victim), self._workers(job).values()
            silent = ray_cluster.processes_of(node)
            began = time.monotonic()
            try:
                for process in silent:
                    process.suspend()
                seconds = self._restarted(job, set(workers) - set(silent), began)
            finally:
                for process in silent:
                    process.resume()
            weights = self._weights(job)
        ray_cluster.kill_raylet(self._cluster, node)
        return weights, seconds

    def arrival(self, victim, step):
        self._have_nodes(2)
        hold = self._folder / "hold"
        with self._running("2:3") as job:
            self._until(step, job)
            hold.touch()  # A node takes some seconds to start.
            old, began = self._workers(job).values(), time.monotonic()
            self._add_node()
            self._wait(lambda: 2 in self._workers(job), job, "three workers")
            hold.unlink()
            seconds = self._restarted(job, old, began)
            return self._weights(job), seconds


def newest(checkpoints):
    """The step of the newest whole checkpoint; -1 for none."""
    with contextlib.suppress(FileNotFoundError):
        return max((int(p.name[5:]) for p in checkpoints.glob("step_????????")), default=-1)
    return -1


def alive(processes):
    """Returns those that have not ended."""
    still = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                still.append(process)
    return still


def _is_actor(process):
    return "WorkerHost" in "".join(process.cmdline())
