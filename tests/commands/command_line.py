"""Runs the command line as its users do: a process of its own, with a deadline."""

import os
import pathlib

from tests.forked import run_python

ROOT = pathlib.Path(__file__).resolve().parents[2]
TASKS = ROOT / "tests" / "tasks"


def tfparallel(*arguments, deadline_seconds=120, **environment):
    """Runs `tfparallel ARGUMENTS`; returns the exit code, standard output and error."""
    done = run_python(
        ["-m", "tfparallel", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        timeout=deadline_seconds,
    )
    return done.returncode, done.stdout, done.stderr
