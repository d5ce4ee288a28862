"""Runs the command line as its users do: a process of its own, with a deadline."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
TASKS = ROOT / "tests" / "tasks"


def tfparallel(*arguments, deadline_seconds=120, **environment):
    """Runs `tfparallel ARGUMENTS`; returns the exit code, standard output and error."""
    done = subprocess.run(
        [sys.executable, "-m", "tfparallel", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=deadline_seconds,
    )
    return done.returncode, done.stdout, done.stderr
