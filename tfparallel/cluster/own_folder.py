"""A temporary folder that is removed when its process ends, however it ends.

    this process ──pipe──> a process that waits for the pipe's end, and removes the folder

A process killed by SIGKILL cannot clean up, but the kernel closes its end of the pipe.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile

# After the launcher is killed, workers may write to the folder until their reapers kill them.
# Slurm signals every process of a job, and this one must survive.
_REMOVE = """
import signal, sys
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)
if not sys.stdin.buffer.read():
    import os, shutil, time
    until = time.monotonic() + 20.0
    while os.path.exists(sys.argv[1]) and time.monotonic() < until:
        shutil.rmtree(sys.argv[1], ignore_errors=True)
        time.sleep(0.05)
"""
_END_SECONDS = 5.0


class OwnFolder:
    """A temporary folder at `path`. A context manager, which removes it."""

    def __init__(self, prefix: str):
        self.path = tempfile.mkdtemp(prefix=prefix)
        self._is_kept = False
        self._remover = None
        with contextlib.suppress(OSError):  # Without it the folder outlives a killed process.
            self._remover = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _REMOVE, self.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=os.sep,
                start_new_session=True,
            )

    def __enter__(self) -> "OwnFolder":
        return self

    def __exit__(self, *_):
        if not self._is_kept:
            shutil.rmtree(self.path, ignore_errors=True)
        if self._remover is not None:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self._remover.communicate(b"done", timeout=_END_SECONDS)

    def keep(self) -> None:
        """Keeps the folder."""
        self._is_kept = True
