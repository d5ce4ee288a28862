"""A worker's process and the reaper that stands between it and the launcher."""

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

__all__ = ["Program", "WorkerProcess"]

_GUARDIAN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "reaper.py")
_SECOND_SECONDS = 6.0  # It kills within 5 s.


@dataclasses.dataclass(frozen=True)
class Program:
    """What one worker runs.

    Attributes:
        worker: The worker's index in the whole job.
        command: The program and its arguments.
        environment: Its whole environment.
        cores: The CPU cores it may use; all that this process may use if empty.
        name: What to call it, if not by its index.
        is_spare: Whether the job goes on without it, if a signal has ended it. A program that fails
            by itself is at fault.
        ends_job: Whether the job has succeeded as soon as it has.
    """

    worker: int
    command: Sequence[str]
    environment: Mapping[str, str]
    cores: Sequence[int] = ()
    name: str = ""
    is_spare: bool = False
    ends_job: bool = False


class WorkerProcess:
    """A reaper, and what it says of its worker.

    Attributes:
        program: What the worker runs.
        pid: Its process, once it has started.
        returncode: How it ended, as `subprocess` has it; None before.
        ended_at: When, by the monotonic clock.
        gone: Whether the reaper has ended, too.
        control: The socket to the reaper; `listen` reads what it says.
        reaper: The process that has started as the reaper, now its second.
    """

    def __init__(self, program: Program):
        self.program = program
        self.pid: int | None = None
        self.returncode: int | None = None
        self.ended_at: float | None = None
        self.gone = False
        self._heard = b""
        self._first: int | None = None
        self.control, theirs = socket.socketpair()
        cores = ",".join(map(str, program.cores))
        try:
            # -I -S: it needs none of the user's packages, and starts in a third of the time.
            self.reaper = subprocess.Popen(
                [sys.executable, "-I", "-S", _GUARDIAN, cores, *program.command],
                env=dict(program.environment),
                stdin=theirs,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                # Else Ctrl-C at the terminal would reach it before this process decides.
                start_new_session=True,
            )
        except BaseException:
            self.control.close()
            raise
        finally:
            theirs.close()
        self.control.setblocking(False)

    @property
    def is_lost(self) -> bool:
        """Whether it has been killed, and the job goes on."""
        return self.program.is_spare and (self.returncode or 0) < 0

    def listen(self) -> bool:
        """Takes in what the reaper says; False once it has gone."""
        try:
            heard = self.control.recv(4096)
        except BlockingIOError:
            return True
        except ConnectionError:
            heard = b""
        *lines, self._heard = (self._heard + heard).split(b"\n")
        for line in lines:
            kind, *values = line.split()
            if kind == b"started":
                self.pid, self._first = map(int, values)
            elif self.returncode is None and values[0] != b"None":
                self.returncode, self.ended_at = int(values[0]), float(values[1])
        if not heard:
            self._reaper_is_gone()
        return bool(heard)

    def send(self, signum: int) -> None:
        """Sends the worker a signal, through the reaper."""
        if self.returncode is None:
            with contextlib.suppress(OSError):
                self.control.send(bytes([signum]))

    def order_death(self) -> None:
        """Has the reaper kill the worker and all below it."""
        # A shut direction reads as the end of the file there; the answer still comes back.
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Kills what is left, and closes the socket."""
        if not self.gone:
            # The second one kills what the first, which does not answer, leaves.
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                if self._first is not None:
                    os.kill(self._first, signal.SIGKILL)
                    self.reaper.wait(_SECOND_SECONDS)
            self.reaper.kill()
            self._reaper_is_gone()
        self.control.close()

    def _reaper_is_gone(self):
        self.gone = True
        returncode = self.reaper.wait()
        if self.returncode is None:
            # Somebody killed both reapers, and the kernel the worker; the rest is left to do.
            self.returncode, self.ended_at = returncode or -signal.SIGKILL, time.monotonic()
            if self.pid is not None:
                with contextlib.suppress(OSError):
                    os.killpg(self.pid, signal.SIGKILL)
