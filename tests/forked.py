"""Runs Python programs in processes of their own that need not import TensorFlow again.

    done = run_python(["-m", "tfparallel", "check", "task.py"], timeout=60)
    done.returncode, done.stdout, done.stderr

An import of TensorFlow takes 5 to 15 seconds of a slow core. One process (multiprocessing's fork
server) imports TensorFlow, Keras and tfparallel, starts none of their runtimes, and forks a process
for each program. Such a process has a process id, an environment, a working directory and streams
of its own, and ends as Python would: exit handlers run, and an uncaught exception goes to
`sys.excepthook`.

A test that looks at how a process starts (what it imports, what it writes meanwhile, what the
environment changes before the import) carries the marker `fresh_interpreter`: for it, the same
functions start a new interpreter.
"""

import atexit
import multiprocessing
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from typing import Any

__all__ = ["Forked", "run_python", "wait_for_first"]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.preloaded", "tests.forked"])

_KILL_SECONDS = 10

_state = {"starts_afresh": False}


def starts_afresh(value: bool) -> None:
    """Says whether programs get a new interpreter from now on (for the marker)."""
    _state["starts_afresh"] = value


class Forked:
    """A process that calls a function, forked from one that has imported TensorFlow.

    A context manager: leaving it kills the process.

    Args:
        function: A function of a module, which the process imports.
        arguments: What can be pickled.
        environment: The whole environment; this process's if None.
        folder: Where to keep what it writes.
        cwd: The working directory; this process's if None.
        joined: Whether standard error goes where standard output goes.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        folder: str | os.PathLike,
        *,
        environment: Mapping[str, str] | None = None,
        cwd: str | os.PathLike | None = None,
        joined: bool = False,
    ):
        self._paths = [pathlib.Path(folder, name) for name in ("stdout", "stderr")]
        if joined:
            self._paths[1] = self._paths[0]
        for path in self._paths:
            path.touch()
        self._process = _context.Process(
            target=_child,
            args=(
                function,
                tuple(arguments),
                dict(os.environ if environment is None else environment),
                os.fspath(cwd or os.getcwd()),
                [str(path) for path in self._paths],
            ),
        )
        self._process.start()

    def __enter__(self) -> "Forked":
        return self

    def __exit__(self, *_) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def sentinel(self) -> int:
        """What `multiprocessing.connection.wait` waits on."""
        return self._process.sentinel

    def wait(self, timeout: float) -> int:
        """Returns the exit code, as `subprocess` has it.

        Args:
            timeout: Seconds.

        Raises:
            subprocess.TimeoutExpired: If it has not ended by then.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return self._process.exitcode

    def kill(self) -> None:
        """Kills it, if it runs, and waits until it is gone."""
        self._process.kill()
        self._process.join(_KILL_SECONDS)

    def written(self) -> tuple[str, str]:
        """Returns what it has written to standard output and error."""
        return tuple(path.read_text(errors="replace") for path in self._paths)


def run_python(
    arguments: Sequence[str | os.PathLike],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike | None = None,
    check: bool = False,
) -> subprocess.CompletedProcess:
    """Runs `python ARGUMENTS`, as `subprocess.run` does with `capture_output` and `text`.

    Args:
        arguments: `-c TEXT`, `-m MODULE`, or a script's path, and what follows.
        timeout: Seconds until it is killed.
        env: The whole environment; this process's if None.
        cwd: The working directory; this process's if None.
        check: Whether a failure is an error.

    Raises:
        subprocess.TimeoutExpired: If it did not end in time.
        subprocess.CalledProcessError: With `check`, if it failed.
    """
    arguments = [str(argument) for argument in arguments]
    command = [sys.executable, *arguments]
    if _state["starts_afresh"]:
        return subprocess.run(
            command, env=env, cwd=cwd, timeout=timeout, check=check, capture_output=True, text=True
        )
    with tempfile.TemporaryDirectory() as folder:
        with Forked(_run_program, [arguments], folder, environment=env, cwd=cwd) as process:
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                raise subprocess.TimeoutExpired(command, timeout, *process.written()) from None
            done = subprocess.CompletedProcess(command, code, *process.written())
    if check:
        done.check_returncode()
    return done


def wait_for_first(processes: Sequence[Forked], timeout: float) -> Forked | None:
    """Waits until all have ended, or one has failed.

    Args:
        processes: They.
        timeout: Seconds.

    Returns:
        The first that failed; the first that has not ended in time; None if all succeeded.
    """
    deadline = time.monotonic() + timeout
    running = {process.sentinel: process for process in processes}
    while running:
        ready = connection.wait(list(running), max(0.0, deadline - time.monotonic()))
        if not ready:
            return next(iter(running.values()))
        for sentinel in ready:
            process = running.pop(sentinel)
            if process.wait(_KILL_SECONDS) != 0:
                return process
    return None


def _child(function, arguments, environment, cwd, paths):
    """What the forked process calls; multiprocessing ends it as soon as this returns."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    tempfile.tempdir = None  # Which a new interpreter would take from its environment.
    for entry in reversed(environment.get("PYTHONPATH", "").split(os.pathsep)):
        if entry and entry not in sys.path:
            sys.path.insert(0, entry)
    for descriptor, path in zip((1, 2), paths, strict=True):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    code = 0
    try:
        function(*arguments)
    except SystemExit as error:
        code = error.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.exit(code)


def _end_with_parent():
    """Kills this process when the one that asked for it has ended, however that was."""
    connection.wait([multiprocessing.parent_process().sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def _run_program(arguments):
    """Runs what `python ARGUMENTS` runs, as the module `__main__`."""
    first, *rest = arguments
    if first == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    if first == "-c":
        text, *rest = rest
        sys.path.insert(0, "")
        name = "<string>"
    else:
        text = pathlib.Path(first).read_text()
        sys.path.insert(0, str(pathlib.Path(first).resolve().parent))
        main.__file__ = name = first
    sys.argv = [first, *rest]
    sys.modules["__main__"] = main
    exec(compile(text, name, "exec"), main.__dict__)
