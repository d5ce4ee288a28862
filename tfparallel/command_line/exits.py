"""How a command ends: exit codes, and the errors that stand for them."""

import os
import signal
import sys
import traceback
from collections.abc import Callable

from tfparallel.cluster.preemption import TRY_AGAIN
from tfparallel.cluster.worker_error import say_why

__all__ = ["LostError", "StartError", "UsageError", "run_command"]


class UsageError(Exception):
    """A mistake on the command line; its text is shown and the exit code is 2."""


class StartError(Exception):
    """The workers of a job could not start together; its text is shown and the exit code is 1."""


class LostError(Exception):
    """Another worker has ended; the text is shown and this process ends at once.

    Its code is 75: the same command may go on.
    """


def run_command(name: str, run: Callable[[], int], input_errors: tuple[type, ...]) -> int:
    """Runs a program's body and turns the user's mistakes into exit code 2.

    Args:
        name: The sub-command, for the message.
        run: The body.
        input_errors: The exceptions that are mistakes in the input, beside
            `UsageError`. Anything else keeps its traceback.

    Returns:
        The exit code.
    """
    try:
        return _flushed(name, run())
    except BrokenPipeError:
        # Whoever read the output has gone (`| head`).
        _drop_output()
        return 128 + signal.SIGPIPE
    except (UsageError, *input_errors) as error:
        cause = error.__cause__
        if cause is not None and not isinstance(error, UsageError):
            traceback.print_exception(cause)
        say_why(f"tfparallel {name}: {error}")
        return 2
    except StartError as error:
        say_why(f"tfparallel {name}: {error}")
        return 1
    except LostError as error:
        say_why(f"tfparallel {name}: {error}")
        sys.stdout.flush()
        sys.stderr.flush()
        # Past TensorFlow's own end, which waits seconds for the workers that are gone.
        os._exit(TRY_AGAIN)


def _flushed(name, code):
    """Writes what is left of the output; returns the exit code, 1 where a full disk spoils a 0."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _drop_output()
        if code == 0:
            print(f"tfparallel {name}: the output is not whole: {error}", file=sys.stderr)
            return 1
    return code


def _drop_output():
    """Drops what cannot be written: at its end Python would try again, and fail with code 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
