"""Which worker is to blame for a job's end: not always the one that ended first.

A worker that hangs, or is suspended, ends nothing. One that waits for it does, after a while, and
is the first to end. The flight records tell who was waited for (`flight/job.py`), as they do
`tfparallel trace`: the two never name different workers.
"""

import dataclasses
import signal
from collections.abc import Mapping

from tfparallel.cluster.preemption import TRY_AGAIN
from tfparallel.cluster.worker_error import WorkerError
from tfparallel.cluster.worker_exit import Outcome, WorkerExit
from tfparallel.flight.job import behind, elsewhere, silent
from tfparallel.flight.record import WorkerRecord, path_of, read_record

__all__ = ["has_lost_another", "lost_by", "waited_for", "with_errors"]


def has_lost_another(culprit: WorkerExit, folder: str, attempt: int, began: float) -> bool:
    """Whether a worker of this host ended because another was lost, by its flight record.

    Records from before `began`, in seconds since 1970, are of earlier jobs.
    """
    record = _record(folder, culprit.worker, attempt, began)
    return record is not None and record.about.get("ended", "").startswith("WorkerLostError")


def lost_by(worker: int, folder: str, attempt: int, began: float) -> int | None:
    """Which other worker one of this host had lost, by its flight record; None if nobody can tell.

    Records from before `began`, in seconds since 1970, are of earlier jobs.
    """
    record = _record(folder, worker, attempt, began)
    return None if record is None else record.about.get("lost")


def waited_for(outcome: Outcome, folder: str, attempt: int, began: float) -> str:
    """Says in a sentence whom the worker that ended first had waited for.

    Args:
        outcome: How the job ended.
        folder: Where the records are.
        attempt: How often the job had been started before.
        began: When it started this time, in seconds since 1970: the folder may have older records.

    Returns:
        A sentence; "" if it is to blame itself, or nobody can tell.
    """
    culprit = outcome.culprit
    if culprit is None or culprit.node is not None:
        return ""
    # TensorFlow ends a worker that has lost another one by SIGABRT.
    may_have_waited = culprit.returncode in (TRY_AGAIN, -signal.SIGABRT)
    if not may_have_waited and not has_lost_another(culprit, folder, attempt, began):
        return ""
    records = [_record(folder, exit_.worker, attempt, began) for exit_ in outcome.exits]
    found = [each for each in records if each is not None]
    if not found:
        return ""
    workers, why = behind(found)
    # Where other hosts have records, too, this one's alone do not tell who is behind all others.
    is_known = not elsewhere(found) or set(workers) <= set(silent(found))
    return why if workers and is_known and culprit.worker not in workers else ""


def with_errors(
    outcome: Outcome, errors: Mapping[int, WorkerError], log_dir: str | None
) -> Outcome:
    """The outcome, with the error of the culprit where its last lines would stand.

    Args:
        outcome: How the job ended.
        errors: The error that ended each worker that told it, by worker.
        log_dir: Where all that they wrote is kept, if it is.
    """
    culprit = outcome.culprit
    if culprit is None or culprit.node is not None or culprit.worker not in errors:
        return outcome
    own = errors[culprit.worker].place
    alike = sorted(worker for worker, error in errors.items() if error.place == own)
    if len(alike) > 1:
        text = f"workers {', '.join(map(str, alike))} ended by the error above"
    else:
        text = "its error is above"
    if not errors[culprit.worker].has_traceback:
        pass
    elif log_dir is None:
        text += "; --log_dir=DIR keeps the whole traceback"
    else:
        text += f"; the whole traceback is in {log_dir}"
    culprit = dataclasses.replace(culprit, tail=(), error_note=text)
    # Those that ended by the same error were not stopped, though the first had ended before them.
    exits = tuple(
        dataclasses.replace(exit_, stopped=False) if exit_.worker in alike else exit_
        for exit_ in outcome.exits
    )
    return dataclasses.replace(outcome, culprit=culprit, exits=exits)


def _record(folder: str, worker: int, attempt: int, began: float) -> WorkerRecord | None:
    """A worker's record, if it can be read and is not from before `began`."""
    try:
        record = read_record(path_of(folder, worker, attempt))
    except (OSError, ValueError):
        return None
    return record if record.about.get("started", 0.0) >= began else None
