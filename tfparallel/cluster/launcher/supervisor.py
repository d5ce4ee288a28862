"""Spawns, monitors, stops and restarts the processes of a job on this host.

```python
programs = [Program(worker=0, command=["python", "train.py"], environment={...}), ...]
outcome = Job(programs, on_output=lambda worker, stream, text: ...).wait()
if outcome.culprit is not None:
    print(outcome.culprit.describe())
```

The first worker to fail is the root cause, and ends the job on all hosts. When a peer is lost,
TensorFlow's survivors fail seconds later, and NCCL's hang. A reaper between this process and each
worker ensures that nothing outlives the job (reaper.py).
"""

import contextlib
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence

from tfparallel.cluster.control_channel import ControlChannel
from tfparallel.cluster.launcher.output import Reader, last_lines
from tfparallel.cluster.launcher.warm_spares import WarmSpares
from tfparallel.cluster.launcher.worker_process import Program, WorkerProcess
from tfparallel.cluster.preemption import SIGNALS, TRY_AGAIN, held_back
from tfparallel.cluster.worker_exit import Outcome, WorkerExit, root_cause_first

__all__ = ["GRACE_SECONDS", "Job", "Program", "StopRequest"]

# TensorFlow catches SIGTERM and survives it, so each stop takes this long.
GRACE_SECONDS = 3.0

# After the loss of a worker, the others may only finish their output.
_LOST_SECONDS = 1.0
# A failure seen this soon after the first may have happened before it.
_SETTLE_SECONDS = 0.25
# A reaper kills within 5 s of the order; after that nothing can.
_GUARDIAN_SECONDS = 10.0
_LAST_OUTPUT_SECONDS = 2.0
_TAIL_LINES = 20
_OF_SCHEDULERS = (signal.SIGHUP, *SIGNALS)


class StopRequest(BaseException):
    """Raised by a signal handler to stop a job; like `KeyboardInterrupt`, not an error.

    Attributes:
        signum: The signal, which is also sent to the workers.
        exits: How the workers then ended.
        has_saved: Whether the workers saved their state, and the same command can resume.
    """

    def __init__(self, signum: int):
        super().__init__(signum)
        self.signum = signum
        self.exits: tuple[WorkerExit, ...] = ()
        self.has_saved = False


class Job:
    """The workers of this host.

    A context manager: entering it starts them, and leaving it stops those that still run. A signal
    that arrives while they are started takes effect once all of them can be told.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        *,
        on_output: Callable[[int, str, bytes], None] | None = None,
        grace_seconds: float = GRACE_SECONDS,
        news: ControlChannel | None = None,
        on_lost: Callable[[WorkerExit], None] | None = None,
        lost_by: Callable[[int], int | None] | None = None,
        standbys: WarmSpares | None = None,
    ):
        """Starts nothing yet; see `wait`.

        Args:
            programs: The programs of the workers.
            on_output: Called from another thread with the worker, "stdout" or "stderr", and its
                output; see `output.Reader`. An exception in it ends the job.
            grace_seconds: The time between the stop signal and SIGKILL.
            news: The channel to the job's other hosts, if any. The caller closes it.
            on_lost: Called with the exit of a spare program, without which the job continues.
            lost_by: Called with a failed worker; returns the worker that it had lost, or None.
            standbys: Warm spares that can become workers. New ones are started beside the job.
        """
        self._on_lost = on_lost or (lambda _: None)
        self._lost_by = lost_by or (lambda _: None)
        self._reported_lost: list[WorkerProcess] = []
        self._news = news or ControlChannel()
        self._grace_seconds = grace_seconds
        self._started_at = time.monotonic()
        self._stopping_at = None
        self._must_end = False
        self._has_reported_success = False
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        for line in self._news.lines:
            self._selector.register(line, selectors.EVENT_READ, line)
        self._reader = Reader(on_output or (lambda *_: None), lambda: self._wake.send(b"!"))
        self._programs, self._standbys = programs, standbys
        self._workers: list[WorkerProcess] = []

    def __enter__(self) -> "Job":
        try:
            if not self._workers:
                with held_back([signal.SIGINT, *_OF_SCHEDULERS]):
                    self._start()
            return self
        except BaseException as error:
            # Workers that have started may have something to save.
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def _start(self):
        for position, program in enumerate(self._programs):
            worker = self._standbys.take(position, program) if self._standbys is not None else None
            worker = worker or WorkerProcess(program)
            self._workers.append(worker)
            self._selector.register(worker.control, selectors.EVENT_READ, worker)
            self._reader.add(program.worker, "stdout", worker.reaper.stdout)
            self._reader.add(program.worker, "stderr", worker.reaper.stderr)
        self._reader.start()
        if self._standbys is not None:
            self._standbys.prepare(self._programs)

    def __exit__(self, kind, error, traceback) -> None:
        interrupted = isinstance(error, KeyboardInterrupt)
        signum = signal.SIGINT if interrupted else getattr(error, "signum", signal.SIGTERM)
        try:
            self.stop(signum, leaves=interrupted or isinstance(error, StopRequest))
        except StopRequest as request:
            error = request
            raise
        finally:
            if isinstance(error, StopRequest) and self._all_ended():
                error.exits = tuple(map(self._exit_of, self._workers))
                codes = {exit_.returncode for exit_ in error.exits}
                error.has_saved = codes == {TRY_AGAIN}

    def wait(self, timeout_seconds: float | None = None) -> Outcome:
        """Starts the workers, and waits until all succeed or one fails, on any host.

        Then the others are stopped. All are stopped after `timeout_seconds`; None waits without
        limit. Re-raises exceptions of `on_output`.

        Returns:
            The outcome. No process is left on this host.
        """
        with self:
            self._wait_until(self._is_decided, timeout_seconds)
            timed_out = not self._is_decided()
            reported = self._report_failures()
            if reported or self._news.failures:
                self._wait_until(self._all_ended, _SETTLE_SECONDS)
                self._report_failures(reported)
            culprit = self._culprit()
            if self._has_lost_a_worker(culprit):
                self._grace_seconds = min(self._grace_seconds, _LOST_SECONDS)
        exits = tuple(self._exit_of(worker) for worker in self._workers)
        if isinstance(culprit, WorkerProcess):
            culprit = exits[self._workers.index(culprit)]
        departure = self._news.departure
        if culprit is not None and not _explains(departure, culprit):
            departure = None
        return Outcome(exits, culprit, timed_out, departure)

    def end(self, grace_seconds: float) -> None:
        """Makes `wait`, which runs in another thread, stop the workers that still run."""
        self._grace_seconds = grace_seconds
        self._must_end = True
        self._wake.send(b"!")

    def _has_lost_a_worker(self, culprit):
        """Whether the others can no longer save their state, which takes all workers."""
        departure = self._news.departure
        if departure is not None:
            return departure.signum is None
        return culprit is not None and culprit.returncode != TRY_AGAIN

    def _is_decided(self):
        """Whether the job has failed, or succeeded on every host."""
        if self._failures() or self._news.is_bad or self._must_end:
            return True
        self._report_lost()
        if not self._all_ended() and not self._is_over():
            return False
        if not self._has_reported_success:
            self._has_reported_success = True
            self._news.tell_success()
        return self._news.all_succeeded

    def _report_failures(self, reported=()):
        """Reports failed workers to the other hosts, except those already `reported`."""
        failures = self._failures()
        for worker in failures:
            if worker not in reported:
                seconds = worker.ended_at - self._started_at
                index = worker.program.worker
                self._news.tell_failure(index, worker.returncode, seconds, self._lost_by(index))
        return failures

    def _culprit(self):
        """The worker that failed first: a local process, or the exit of a remote worker."""
        local = [(worker.returncode, worker.ended_at, worker) for worker in self._failures()]
        remote = [(exit_.returncode, seen_at, exit_) for exit_, seen_at in self._news.failures]
        by_cause = sorted(local + remote, key=lambda failure: root_cause_first(*failure[:2]))
        return by_cause[0][2] if by_cause else None

    def stop(self, signum: int = signal.SIGTERM, *, leaves: bool = False) -> None:
        """Stops the running workers: `signum` first, SIGKILL after the grace period.

        If this launcher `leaves` the job, it tells the other hosts before. Otherwise they would
        take the end of its workers for a failure, and restart without it.

        A second Ctrl-C, or any exception that arrives meanwhile, cuts the grace period short. A
        scheduler's signals do not: the workers may be saving their state.
        """
        if self._stopping_at is None:
            self._stopping_at = time.monotonic()
        with held_back(_OF_SCHEDULERS):
            try:
                if leaves:
                    self._news.tell_stop(signum)
                for worker in self._workers:
                    worker.send(signum)
                self._wait_until(self._all_ended, self._grace_seconds, check_output=False)
            finally:
                self._close()

    def _wait_until(self, condition, seconds=None, check_output=True):
        deadline = None if seconds is None else time.monotonic() + seconds
        while not condition():
            if check_output and self._reader.error is not None:
                raise self._reader.error
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                return
            for key, _ in self._selector.select(remaining):
                if key.data is None:
                    self._woken.recv(64)
                elif not key.data.listen():
                    self._selector.unregister(key.fileobj)

    def _all_ended(self):
        return all(worker.returncode is not None for worker in self._workers)

    def _report_lost(self):
        for worker in self._workers:
            if worker.is_lost and worker not in self._reported_lost:
                self._reported_lost.append(worker)
                self._on_lost(self._exit_of(worker))

    def _is_over(self):
        return any(w.program.ends_job and w.returncode == 0 for w in self._workers)

    def _failures(self):
        return [worker for worker in self._workers if worker.returncode and not worker.is_lost]

    def _close(self):
        """Makes the reapers kill the remaining processes, and waits for them."""
        with contextlib.suppress(OSError):
            for worker in self._workers:
                worker.order_death()
        self._wait_until(
            lambda: all(worker.gone for worker in self._workers),
            _GUARDIAN_SECONDS,
            check_output=False,
        )
        for worker in self._workers:
            worker.close()
        if self._reader.ident is not None:
            self._reader.join(_LAST_OUTPUT_SECONDS)

    def _exit_of(self, worker):
        return WorkerExit(
            worker=worker.program.worker,
            returncode=worker.returncode,
            time_seconds=worker.ended_at - self._started_at,
            stopped=self._stopping_at is not None and worker.ended_at > self._stopping_at,
            tail=tuple(last_lines(self._reader.tail(worker.program.worker), _TAIL_LINES)),
            name=worker.program.name,
            lost=self._lost_by(worker.program.worker) if worker.returncode else None,
        )


def _explains(departure, culprit):
    """Whether a worker saved its state because another host's launcher was stopped."""
    planned = departure is not None and departure.signum is not None
    return planned and culprit.returncode == TRY_AGAIN
