"""The exit of a worker, the outcome of a job, and the order of failures."""

import dataclasses
import signal

from tfparallel.cluster.preemption import TRY_AGAIN


@dataclasses.dataclass(frozen=True)
class Departure:
    """Another host's launcher left a running job: stopped by a signal (`signum`), or lost."""

    node: int
    signum: int | None

    @property
    def exit_code(self) -> int:
        """128 + n after signal n, as in a shell; 1 if unknown."""
        return 1 if self.signum is None else 128 + self.signum

    def describe(self) -> str:
        """Returns one line such as "the launcher of node 1 was stopped by SIGINT"."""
        if self.signum is not None:
            return f"the launcher of node {self.node} was stopped by {_signal_name(self.signum)}"
        return (
            f"the launcher of node {self.node} is lost: it failed, was killed, or its host is "
            "unreachable"
        )


@dataclasses.dataclass(frozen=True)
class WorkerExit:
    """How a worker ended.

    Attributes:
        worker: The worker's index in the whole job.
        returncode: Its exit code, or minus the number of the signal that killed it.
        time_seconds: When it ended, from the start of the job.
        stopped: Whether the job was already being stopped.
        tail: The last lines of its output.
        node: The remote host that it ran on; None for this host.
        name: Its display name, if not its index.
        error_note: Where its error is shown, if it has been reported.
        lost: The worker whose loss ended it, if one has.
    """

    worker: int
    returncode: int
    time_seconds: float
    stopped: bool
    tail: tuple[str, ...] = ()
    node: int | None = None
    name: str = ""
    error_note: str = ""
    lost: int | None = None

    @property
    def exit_code(self) -> int:
        """The exit code as in a shell: 128 + n after signal n."""
        return self.returncode if self.returncode >= 0 else 128 - self.returncode

    def describe(self) -> str:
        """Returns one line such as "worker 1 was killed by SIGKILL after 2.0 s"."""
        if self.returncode >= 0:
            how = f"exited with code {self.returncode}"
        else:
            how = f"was killed by {_signal_name(-self.returncode)}"
        where = "" if self.node is None else f" of node {self.node}"
        who = self.name or f"worker {self.worker}"
        return f"{who}{where} {how} after {self.time_seconds:.1f} s"

    def explain(self) -> str:
        """Returns `describe()`, its likely meaning, and the last lines of the output."""
        text = self.describe()
        if self.returncode == -signal.SIGKILL and not self.stopped:
            text += " (by a user, or by the system because memory ran out: see `dmesg`)"
        if self.lost is not None:
            text += f" (it lost worker {self.lost}, or its network connection to it)"
        elif self.returncode == TRY_AGAIN and not self.stopped:
            text += " (to be restarted: it lost another worker, hung, or was told to stop)"
        if self.node is not None:
            text += "; its output is on that host"
        if self.error_note:
            text += f"; {self.error_note}"
        if self.tail:
            text += "; its last lines:\n" + "\n".join(f"    {line}" for line in self.tail)
        return text


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        exits: Every worker's exit, in the order of the programs.
        culprit: The worker whose failure ended the job, on any host; None if none failed.
        timed_out: Whether the job was stopped at its time limit.
        departure: The departure of another host's launcher, if that ended the job.
    """

    exits: tuple[WorkerExit, ...]
    culprit: WorkerExit | None
    timed_out: bool = False
    departure: Departure | None = None


def root_cause_first(returncode: int, seen_at: float) -> tuple[bool, float]:
    """Returns a sort key that puts the root cause of several failures first.

    TensorFlow aborts a process that has lost its peers, so SIGABRT ranks with exit codes. Any other
    signal comes from outside, or from a crash of the worker itself.
    """
    return not (returncode < 0 and returncode != -signal.SIGABRT), seen_at


def _signal_name(signum):
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
