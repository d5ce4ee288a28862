"""Exit codes of commands, and the exceptions that map to them."""

import os
import signal
import sys
import traceback
from collections.abc import Callable

from tfparallel.cluster.preemption import TRY_AGAIN
from tfparallel.cluster.worker_error import say_why

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class UsageError(Exception):
    """A usage error; its text is printed, and the exit code is 2."""


class StartError(Exception):
    """The workers of a job could not start; the text is printed, and the exit code is 1."""


class LostError(Exception):
    """Another worker was lost; the text is printed, and this process exits at once.

    The exit code is 75: the same command can resume.
    """


def run_command(name: str, run: Callable[[], int], input_errors: tuple[type, ...]) -> int:
    """Runs a command's body, and turns the user's mistakes into exit code 2.

    Args:
        name: The sub-command, for the message.
        run: The body.
        input_errors: Exceptions that report invalid input, in addition to `UsageError`. All others
            keep their traceback.

    Returns:
        The exit code.
    """
    try:
        return _flushed(name, run())
    except BrokenPipeError:
        # The output's reader has gone (`| head`).
        _drop_output()
        return 128 + signal.SIGPIPE
    except (UsageError, *input_errors) as error:
        cause = error.__cause__
        if cause is not None and not isinstance(error, UsageError) and not _is_ours(cause):
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
        # Skip TensorFlow's shutdown, which waits seconds for the lost workers.
        os._exit(TRY_AGAIN)


def _is_ours(error: BaseException) -> bool:
    """Whether this package raised an error: its text says all, and its frames say nothing more."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_code.co_filename.startswith(_PACKAGE)


def _flushed(name, code):
    """Flushes the output; returns the exit code, or 1 instead of 0 if the output is incomplete."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _drop_output()
        if code == 0:
            print(f"tfparallel {name}: the output is incomplete: {error}", file=sys.stderr)
            return 1
    return code


def _drop_output():
    """Discards unwritable output: at exit Python would try again, and fail with code 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
