"""Shows the workers' output in the driver, by line with the worker's number, and logs it."""

import contextlib
import os
from collections.abc import Iterator

from tfparallel.chatter import has_nvidia_gpu, wants_quiet
from tfparallel.cluster.launcher.output import Prefixer, TextOutput, WorkerLog
from tfparallel.cluster.launcher.output_filter import OutputFilter
from tfparallel.cluster.worker_exit import Outcome
from tfparallel.flight.culprit import with_errors


class Screen:
    """The driver's stdout and stderr.

    Args:
        say: Prints a message of the driver itself.
        log_dir: Where each worker's full output is kept, if anywhere.
    """

    def __init__(self, say, log_dir: str | None = None):
        self.say = say
        self._log_dir = log_dir
        self._filter: OutputFilter | None = None

    @contextlib.contextmanager
    def showing(self, attempt: int, num_workers: int) -> Iterator[OutputFilter]:
        """Shows the output of the workers of one attempt, which is written to the filter."""
        prefixer = Prefixer(TextOutput("stdout"), TextOutput("stderr"))
        with contextlib.ExitStack() as stack:
            logs = {}
            for worker in range(num_workers if self._log_dir is not None else 0):
                suffix = f".restart_{attempt}" if attempt else ""
                path = os.path.join(self._log_dir, f"worker_{worker}{suffix}.log")
                logs[worker] = stack.enter_context(WorkerLog(path, self._tell_loss))
            self._filter = OutputFilter(
                prefixer.write,
                lambda worker, text: logs[worker].write(text) if logs else None,
                has_gpu=has_nvidia_gpu(),
                is_quiet=wants_quiet(),
            )
            try:
                yield self._filter
            finally:
                self._filter.finish()
                prefixer.finish()

    def explained(self, outcome: Outcome) -> Outcome:
        """Returns the outcome with the error that has been shown in place of the last lines."""
        return with_errors(outcome, self._filter.errors, self._log_dir)

    def _tell_loss(self, error):
        self.say(f"the logs in {self._log_dir} are incomplete ({error.strerror})")
