"""The flight records of a training, gathered from its workers, for its report and its timeline."""

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfparallel.callbacks.flight import FlightRecorder
from tfparallel.collectives.errors import WorkerLostError
from tfparallel.collectives.process_group import ProcessGroup
from tfparallel.flight.job import chrome_trace, splits
from tfparallel.flight.marks import Marks
from tfparallel.flight.record import FOLDER, Event, WorkerRecord, read_record

__all__ = ["folder_for_records", "gathered", "time_of_a_step", "write_timeline"]

_NUM_EVENTS = 4000  # Of each worker, the last.


@contextlib.contextmanager
def folder_for_records(are_wanted: bool) -> Iterator[None]:
    """Makes a folder for them, where no launcher has."""
    if not are_wanted or os.environ.get(FOLDER):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="tfparallel_flight_") as folder:
        os.environ[FOLDER] = folder
        try:
            yield
        finally:
            del os.environ[FOLDER]


def alone() -> contextlib.AbstractContextManager:
    """A recorder for a process without other workers; those of a job have one anyway."""
    # Workers that are to know nothing of each other have records of their own, too.
    return FlightRecorder.wanted(int(os.environ.get("RANK", "0")), 1)


def gathered(workers: ProcessGroup | None, is_wanted: bool) -> list[WorkerRecord]:
    """Returns the records of all workers, on each of them, if one wants them and all recorded.

    All workers call it, whatever they want.
    """
    try:
        if not is_wanted and workers is None:
            return []
        if workers is not None and not any(workers.exchange(is_wanted, "the records of steps")):
            return []
        return _gathered(workers)
    except (tf.errors.OpError, WorkerLostError):  # A worker has ended: what was trained is there.
        return []


def _gathered(workers):
    own: Any = None
    if Marks.current is not None:
        record = read_record(Marks.current.record.path)
        events = [
            [event.what, event.step, event.begin, event.end]
            for event in record.events[-_NUM_EVENTS:]
        ]
        own = {"about": record.about, "now": dataclasses.astuple(record.now), "events": events}
    found = [own] if workers is None else workers.exchange(own, "the records of steps")
    if not all(found):
        return []
    return [
        WorkerRecord(
            each["about"], {}, Event(*each["now"]), "", tuple(Event(*e) for e in each["events"])
        )
        for each in found
    ]


def time_of_a_step(records: list[WorkerRecord]) -> list[dict[str, float]] | None:
    """Returns where the time of each worker's step goes, in seconds; None if nobody can tell."""
    return [dataclasses.asdict(split) for split in splits(records)] if records else None


def write_timeline(path: str, records: list[WorkerRecord]) -> None:
    """Writes a timeline of all workers, for chrome://tracing or Perfetto."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(chrome_trace(records), file)
