"""A run of this package that a benchmark measures, in processes of its own."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from tfparallel.command_line.exits import StartError

__all__ = ["TFPARALLEL", "run_job"]

TFPARALLEL = (sys.executable, "-m", "tfparallel")
_DEADLINE_SECONDS = 900.0


def run_job(what: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Runs a command to its end.

    Args:
        what: The run, in words, for an error.
        command: What is run.
        environment: Variables beside those of this process.

    Raises:
        StartError: If it fails, or has not ended after 15 minutes.
    """
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_DEADLINE_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise StartError(
            f"{what} has not ended within {_DEADLINE_SECONDS:.0f} s. Ask for fewer --steps, or a "
            "smaller batch."
        ) from error
    if done.returncode:
        raise StartError(f"{what} failed with exit code {done.returncode}:\n{done.stdout[-3000:]}")
