"""Finds the worker that caused the end of a job, which is not always the first one to exit.

A worker that hangs or is suspended does not exit; a worker that waits for it eventually does, and
so exits first. The flight records reveal which worker the others waited for (`flight/job.py`).
`tfparallel trace` uses the same analysis, so both name the same worker.
"""

import dataclasses
import signal
from collections.abc import Mapping

from tfparallel.cluster.preemption import TRY_AGAIN
from tfparallel.cluster.worker_error import WorkerError
from tfparallel.cluster.worker_exit import Outcome, WorkerExit
from tfparallel.flight.job import behind, elsewhere, silent
from tfparallel.flight.record import WorkerRecord, path_of, read_record


def has_lost_another(culprit: WorkerExit, folder: str, attempt: int, began: float) -> bool:
    """Whether a worker of this host ended because another one was lost, by its flight record.

    Records from before `began` (seconds since 1970) belong to earlier jobs.
    """
    record = _record(folder, culprit.worker, attempt, began)
    return record is not None and record.about.get("ended", "").startswith("WorkerLostError")


def lost_by(worker: int, folder: str, attempt: int, began: float) -> int | None:
    """Returns the worker that a worker of this host had lost, by its flight record, or None.

    Records from before `began` (seconds since 1970) belong to earlier jobs.
    """
    record = _record(folder, worker, attempt, began)
    return None if record is None else record.about.get("lost")


def waited_for(outcome: Outcome, folder: str, attempt: int, began: float) -> str:
    """Describes which worker the first one to exit had waited for.

    Args:
        outcome: How the job ended.
        folder: The folder of the records.
        attempt: Number of earlier starts of the job.
        began: When this attempt started, in seconds since 1970; the folder may hold older records.

    Returns:
        A sentence; "" if that worker is the culprit itself, or if the records cannot tell.
    """
    culprit = outcome.culprit
    if culprit is None or culprit.node is not None:
        return ""
    # TensorFlow aborts a worker that has lost another one (SIGABRT).
    may_have_waited = culprit.returncode in (TRY_AGAIN, -signal.SIGABRT)
    if not may_have_waited and not has_lost_another(culprit, folder, attempt, began):
        return ""
    records = [_record(folder, exit_.worker, attempt, began) for exit_ in outcome.exits]
    readable = [each for each in records if each is not None]
    if not readable:
        return ""
    workers, why = behind(readable)
    # If other hosts have records too, this host's records alone do not show who is last.
    is_known = not elsewhere(readable) or set(workers) <= set(silent(readable))
    return why if workers and is_known and culprit.worker not in workers else ""


def with_errors(
    outcome: Outcome, errors: Mapping[int, WorkerError], log_dir: str | None
) -> Outcome:
    """Returns the outcome with the culprit's error in place of its last log lines.

    Args:
        outcome: How the job ended.
        errors: The errors that workers have reported, by worker.
        log_dir: The folder of the workers' full logs, if they are kept.
    """
    culprit = outcome.culprit
    if culprit is None or culprit.node is not None or culprit.worker not in errors:
        return outcome
    place = errors[culprit.worker].place
    same_error = sorted(worker for worker, error in errors.items() if error.place == place)
    if len(same_error) > 1:
        text = f"workers {', '.join(map(str, same_error))} failed with the error above"
    else:
        text = "its error is above"
    if not errors[culprit.worker].has_traceback:
        pass
    elif log_dir is None:
        text += "; --log_dir=DIR keeps the full traceback"
    else:
        text += f"; the full traceback is in {log_dir}"
    culprit = dataclasses.replace(culprit, tail=(), error_note=text)
    # Workers with the same error failed on their own, even if the first had ended before them.
    exits = tuple(
        dataclasses.replace(exit_, stopped=False) if exit_.worker in same_error else exit_
        for exit_ in outcome.exits
    )
    return dataclasses.replace(outcome, culprit=culprit, exits=exits)


def _record(folder: str, worker: int, attempt: int, began: float) -> WorkerRecord | None:
    """Returns a worker's record if it is readable and not from before `began`, else None."""
    try:
        record = read_record(path_of(folder, worker, attempt))
    except (OSError, ValueError):
        return None
    return record if record.about.get("started", 0.0) >= began else None
