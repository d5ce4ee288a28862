"""What is raised when a worker of the job is lost, and which it was."""

import contextlib
import re
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfparallel.collectives.process_group import ProcessGroup

# What TensorFlow says of a worker that is lost, and of why it is.
_LOST = (
    re.compile(r"remote target /job:\w+/replica:\d+/task:(\d+)"),
    re.compile(r"\(stopped sending heartbeats\):\s+/job:\S+/task:(\d+)"),
)
_REASON = (
    re.compile(r'grpc_message:"([^"]*)"'),
    re.compile(r"(stopped sending heartbeats)"),
    re.compile(r"Collective ops is aborted by: ([^\n]*)"),
)
# A deadline has this line. Worker 0 takes the heartbeats of all.
_NO_ANSWER = "\nRPC: /tensorflow.CoordinationService/Heartbeat"


class WorkerLostError(RuntimeError):
    """Another worker of the job has ended; no collective can run in this process any more.

    Attributes:
        worker: The index of the worker that was lost; None if that is not known.
    """

    def __init__(self, message: str, worker: int | None = None):
        super().__init__(message)
        self.worker = worker


def lost_error(worker: int | None, reason: str) -> WorkerLostError:
    """Returns the error for a worker that has ended or is out of reach, and what was received."""
    lost = "another worker" if worker is None else f"worker {worker}"
    return WorkerLostError(
        f"The connection to {lost} was lost: it has ended, or the network between the two. "
        f"Every worker is required, and this process cannot join it again. Received: {reason}. "
        "The cause is in the output of the worker that was lost; `tfparallel launch "
        "--max_restarts=3` starts all again, and they resume from their checkpoint if there is "
        "one.",
        worker,
    )


@contextlib.contextmanager
def naming_lost_worker() -> Iterator[None]:
    """Turns what TensorFlow says when a peer has ended, screens of it, into `WorkerLostError`."""
    ProcessGroup.failure = None
    try:
        yield
    except tf.errors.OpError as error:
        if ProcessGroup.failure is not None:
            raise ProcessGroup.failure from None
        # Behind a link cut one way the heartbeat is sent, and its answer does not come.
        is_deadline = isinstance(error, tf.errors.DeadlineExceededError)
        if is_deadline and _NO_ANSWER in error.message:
            worker, reason = 0, "no answer to a heartbeat"
        elif isinstance(error, tf.errors.UnavailableError):
            task = _first(_LOST, error.message)
            worker = None if task is None else int(task)
            reason = _first(_REASON, error.message) or error.message.splitlines()[0]
        else:
            raise
        raise lost_error(worker, reason) from None


def _first(patterns: Sequence[re.Pattern], text: str) -> str | None:
    """What the first pattern that is in a text finds there."""
    return next((found[1] for pattern in patterns if (found := pattern.search(text))), None)
