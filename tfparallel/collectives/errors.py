"""What is raised when a worker of the job is lost."""


class WorkerLostError(RuntimeError):
    """Another worker of the job has ended; no collective can run in this process any more.

    Args:
        message: What is told.
        worker: The index of the worker that was lost, if that is known.
    """

    def __init__(self, message: str, worker: int | None = None):
        super().__init__(message)
        self.worker = worker
