"""A worker's process, and the reaper between it and the launcher."""

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from tfparallel.cluster.launcher import reaper

_GUARDIAN = os.path.abspath(reaper.__file__)
_SECOND_SECONDS = 6.0  # The second reaper kills within 5 s.


@dataclasses.dataclass(frozen=True)
class Program:
    """The program of one worker.

    Attributes:
        worker: The worker's index in the whole job.
        command: The program and its arguments.
        environment: Its complete environment.
        cores: The CPU cores it may use; if empty, all cores available to this process.
        name: Its display name, if not its index.
        is_spare: Whether the job continues if a signal kills it. A program that exits with an
            error still fails the job.
        ends_job: Whether the job has succeeded as soon as this program has.
    """

    worker: int
    command: Sequence[str]
    environment: Mapping[str, str]
    cores: Sequence[int] = ()
    name: str = ""
    is_spare: bool = False
    ends_job: bool = False


class WorkerProcess:
    """A worker, as reported by its reaper.

    Attributes:
        program: The worker's program.
        pid: The worker's process id, once it has started.
        returncode: The worker's return code, as in `subprocess`; None while it runs.
        ended_at: When it ended, by the monotonic clock.
        gone: Whether the reaper has ended, too.
        control: The socket to the reaper; `listen` reads its messages.
        reaper: The process started as the reaper, which is now the second reaper.
    """

    def __init__(self, program: Program):
        self.program = program
        self.pid: int | None = None
        self.returncode: int | None = None
        self.ended_at: float | None = None
        self.gone = False
        self._buffer = b""
        self._first: int | None = None
        self.control, reaper_end = socket.socketpair()
        cores = ",".join(map(str, program.cores))
        try:
            # -I -S: it needs no packages of the user, and starts in a third of the time.
            self.reaper = subprocess.Popen(
                [sys.executable, "-I", "-S", _GUARDIAN, cores, *program.command],
                env=dict(program.environment),
                stdin=reaper_end,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                # Otherwise Ctrl-C at the terminal would reach it before this process reacts.
                start_new_session=True,
            )
        except BaseException as error:
            self.control.close()
            if isinstance(error, BlockingIOError):
                raise OSError(reaper.refusal(program.command, error)) from error
            raise
        finally:
            reaper_end.close()
        self.control.setblocking(False)

    @property
    def is_lost(self) -> bool:
        """Whether the worker was killed and the job continues without it."""
        return self.program.is_spare and (self.returncode or 0) < 0

    def listen(self) -> bool:
        """Reads the reaper's messages; False once the reaper has ended."""
        try:
            heard = self.control.recv(4096)
        except BlockingIOError:
            return True
        except ConnectionError:
            heard = b""
        *lines, self._buffer = (self._buffer + heard).split(b"\n")
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
        """Makes the reaper kill the worker and its descendants."""
        # Shutting down one direction reads as end of file there; the reply still arrives.
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Kills the remaining processes, and closes the socket."""
        if not self.gone:
            # The first reaper does not respond; the second kills its remaining children.
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
            # Both reapers were killed, and the kernel killed the worker; its group remains.
            self.returncode, self.ended_at = returncode or -signal.SIGKILL, time.monotonic()
            if self.pid is not None:
                with contextlib.suppress(OSError):
                    os.killpg(self.pid, signal.SIGKILL)
