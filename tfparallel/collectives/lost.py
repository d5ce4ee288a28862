"""What is raised when a worker of the job is lost."""


class WorkerLostError(RuntimeError):
    """Another worker of the job has ended; no collective can run in this process any more."""
