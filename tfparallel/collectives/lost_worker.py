"""The error raised when a worker of the job is lost, with the worker's index."""

import contextlib
import re
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfparallel.collectives.process_group import ProcessGroup

# TensorFlow's messages about a lost worker, and about the reason.
_LOST = (
    re.compile(r"remote target /job:\w+/replica:\d+/task:(\d+)"),
    re.compile(r"\(stopped sending heartbeats\):\s+/job:\S+/task:(\d+)"),
)
_REASON = (
    re.compile(r'grpc_message:"([^"]*)"'),
    re.compile(r"(stopped sending heartbeats)"),
    re.compile(r"Collective ops is aborted by: ([^\n]*)"),
)
# A missed deadline contains this line. Worker 0 receives all heartbeats.
_NO_ANSWER = "\nRPC: /tensorflow.CoordinationService/Heartbeat"


class WorkerLostError(RuntimeError):
    """Another worker of the job has ended; no collective can run in this process any more.

    Attributes:
        worker: The index of the lost worker; None if unknown.
    """

    def __init__(self, message: str, worker: int | None = None):
        super().__init__(message)
        self.worker = worker


def lost_error(worker: int | None, reason: str) -> WorkerLostError:
    """Returns the error for a worker that has ended or is unreachable, with the reason."""
    lost = "another worker" if worker is None else f"worker {worker}"
    return WorkerLostError(
        f"The connection to {lost} was lost: the worker exited, or the network failed. Every "
        f"worker is required, and this process cannot rejoin. Received: {reason}. See the output "
        "of the lost worker for the cause; `tfparallel launch --max_restarts=3` restarts the job, "
        "which resumes from its checkpoint if there is one.",
        worker,
    )


@contextlib.contextmanager
def naming_lost_worker() -> Iterator[None]:
    """Converts TensorFlow's long error about a lost peer into a `WorkerLostError`."""
    ProcessGroup.failure = None
    try:
        yield
    except tf.errors.OpError as error:
        if ProcessGroup.failure is not None:
            raise ProcessGroup.failure from None
        # If the link is cut in one direction, the heartbeat is sent but its reply never arrives.
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
    """Returns the group of the first pattern that matches."""
    return next((match[1] for pattern in patterns if (match := pattern.search(text))), None)
