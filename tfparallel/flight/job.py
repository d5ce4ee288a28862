"""Compares the flight records of a job's workers: which one lags, and where time goes.

Workers step together, and none can get past a collective that waits for the others. So the worker
with the least progress is the one that the others wait for. The clocks of several hosts differ, but
a reduction ends on all workers within about a millisecond: the median over many reductions gives
the offset.
"""

import dataclasses
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tfparallel.flight.record import BEGINS, SUFFIX, Event, WorkerRecord, read_record

_PHASES = ("input", "forward", "backward", "passes", "update")
_SILENT_SECONDS = 3.0  # A live worker updates its record twice a second.
_NUM_FIRST_STEPS = 3  # They include tracing, and comparisons of the batches.
_LOST = ("WorkerLostError", "UnavailableError", "AbortedError", "InternalError")


def read_job(folder: str | os.PathLike) -> list[WorkerRecord]:
    """Returns the records of the last attempt in a folder, by worker.

    Raises:
        ValueError: If there are none.
        OSError: If the folder cannot be read.
    """
    paths = [entry.path for entry in os.scandir(folder) if entry.name.endswith(SUFFIX)]
    if not paths:
        raise ValueError(
            f"A folder with the flight records of a job is required (*{SUFFIX}; `tfparallel launch "
            f"--log_dir=FOLDER` keeps them). Received: {os.fspath(folder)}, which has none."
        )
    records = [read_record(path) for path in paths]
    # The folder may also hold records of earlier jobs; each attempt has its own token.
    last = max(records, key=lambda record: record.about.get("started", 0.0))
    latest = [record for record in records if _attempt(record) == _attempt(last)]
    return sorted(latest, key=lambda record: record.worker)


def _attempt(record):
    return record.about.get("job"), record.about.get("attempt", 0)


def elsewhere(records: Sequence[WorkerRecord]) -> list[int]:
    """Returns the workers whose records are missing because they ran on other hosts."""
    num_local = {r.about.get("host"): r.about.get("num_local", 0) for r in records}
    missing = _missing(records)
    return missing if sum(num_local.values()) <= len(records) else []


def _missing(records):
    num_workers = records[0].about.get("num_workers", len(records))
    return sorted(set(range(num_workers)) - {record.worker for record in records})


def doing(record: WorkerRecord) -> str:
    """Describes a worker's last activity: the step, the place in it, and for how long."""
    now = record.now
    seconds = max(0.0, now.end - now.begin)
    if now.what != "in a step":
        text = f"{now.what} (step {now.step} was the last)" if record.events else now.what
        return f"{text}, for {seconds:.1f} s"
    inside = _passed_in_step(record)
    if not inside:
        what = ", waiting for its data" if "input" in record.marks else ""
        return f"in step {now.step}{what}, for {seconds:.1f} s"
    for begin, when in inside:
        name = begin.removesuffix(BEGINS)
        if name != begin and record.marks.get(name, 0.0) < when:
            return f"in step {now.step}, in `{name}`, for {now.end - when:.1f} s"
    name, when = inside[-1]
    return f"in step {now.step}, after `{name}`, for {max(0.0, now.end - when):.1f} s"


def behind(records: Sequence[WorkerRecord]) -> tuple[tuple[int, ...], str]:
    """Returns the workers that the others waited for, if any, and a sentence of explanation."""
    missing = _missing(records)
    if missing and not elsewhere(records):
        return tuple(missing), f"{_workers(missing)} left no record: `fit` did not start there."
    if all(record.about.get("ended") == "well" for record in records):
        return (), "All workers finished."
    if all(record.about.get("ended", "").startswith(("well", "Preempted")) for record in records):
        return (), "All workers were preempted, and saved their state."
    if workers := silent(records):
        return tuple(workers), (
            f"{_workers(workers)} went silent while others continued: killed, suspended, or lost "
            "with the host."
        )
    failed = [
        record
        for record in records
        if record.about.get("ended", "well") != "well"
        and not record.about["ended"].startswith(_LOST)
    ]
    if failed:
        first = min(failed, key=lambda record: record.about["ended_at"])
        return (first.worker,), (
            f"Worker {first.worker} failed: {first.about['ended'].splitlines()[0]}"
        )
    places = {record.worker: _progress(record) for record in records}
    least, most = min(places.values()), max(places.values())
    if least < most:
        slow = [worker for worker, place in places.items() if place == least]
        return tuple(slow), f"The others waited for {_workers(slow).lower()}."
    return (), "All workers are at the same point: check the network between them."


def silent(records: Sequence[WorkerRecord]) -> list[int]:
    """Returns the workers whose records stop without an end while other workers went on."""
    shifts = clock_shifts(records)
    last_seen = {record.worker: record.now.end - shifts[record.worker] for record in records}
    return [
        record.worker
        for record in records
        if "ended" not in record.about
        and max(last_seen.values()) - last_seen[record.worker] > _SILENT_SECONDS
    ]


@dataclasses.dataclass(frozen=True)
class Split:
    """Where a worker's time goes: average seconds per step.

    Attributes:
        worker: Its index.
        num_steps: Number of steps in the average.
        total: From the start of a step to the start of the next.
        input: Waiting for the step's data.
        compute: Forward pass, backward pass, update, and the rest of a step.
        reduction: In collectives, after the last worker has arrived.
        waiting: In collectives, before the last worker has arrived.
        between: Callbacks, and the training loop itself.
    """

    worker: int
    num_steps: int
    total: float
    input: float
    compute: float
    reduction: float
    waiting: float
    between: float

    def __str__(self):
        parts = {
            "input": self.input,
            "compute": self.compute,
            "reduction": self.reduction,
            "waiting for others": self.waiting,
            "between steps": self.between,
        }
        texts = [f"{name} {seconds * 1e3:.1f}" for name, seconds in parts.items()]
        return f"{self.total * 1e3:.1f} ms per step (of {self.num_steps}): {', '.join(texts)}"


def splits(records: Sequence[WorkerRecord]) -> list[Split]:
    """Computes where each worker's time goes, over the steps that all records contain.

    Returns:
        A split for each worker; an empty list if no steps can be compared.
    """
    shifts = clock_shifts(records)
    by_worker = {record.worker: _by_step(record, shifts[record.worker]) for record in records}
    steps = sorted(set.intersection(*(set(steps) for steps in by_worker.values())))
    steps = [step for step in steps[_NUM_FIRST_STEPS:] if _can_compare(by_worker, step)]
    if not steps:
        return []
    result = []
    for worker, events in by_worker.items():
        times = [
            _times(events[step], [each[step] for each in by_worker.values()]) for step in steps
        ]
        means = {name: statistics.fmean(each[name] for each in times) for name in times[0]}
        result.append(Split(worker, len(steps), **means))
    return result


def _times(events, all_events) -> dict[str, float]:
    """Splits a worker's time in one step, given the events of all workers in it."""
    between, waits_for_data = _length(events.get("between steps")), _length(events.get("input"))
    reduction = waiting = 0.0
    for name in filter(is_collective, events):
        last_arrival = max(each[name].begin for each in all_events)
        seconds = events[name].end - events[name].begin
        waited = min(max(0.0, last_arrival - events[name].begin), seconds)
        waiting += waited
        reduction += seconds - waited
    step = _length(events.get("step"))
    return {
        "total": step + between,
        "input": waits_for_data,
        "compute": max(0.0, step - waits_for_data - reduction - waiting),
        "reduction": reduction,
        "waiting": waiting,
        "between": between,
    }


def clock_shifts(records: Sequence[WorkerRecord]) -> dict[int, float]:
    """Returns by how many seconds each worker's clock is ahead of the first worker's."""
    first = records[0]
    ends = {(event.what, event.step): event.end for event in first.events}
    shifts = {}
    for record in records:
        offsets = [
            event.end - ends[event.what, event.step]
            for event in record.events
            if is_collective(event.what) and (event.what, event.step) in ends
        ]
        is_near = record.about.get("host") == first.about.get("host") or not offsets
        shifts[record.worker] = 0.0 if is_near else statistics.median(offsets)
    return shifts


def chrome_trace(records: Sequence[WorkerRecord]) -> dict[str, Any]:
    """Returns a timeline of all workers on one clock, for chrome://tracing or Perfetto.

    Each worker is a process, with rows for its steps, their phases, and collectives.
    """
    shifts = clock_shifts(records)
    traced: list[dict[str, Any]] = []
    for record in records:
        name = f"worker {record.worker} ({record.about.get('host')})"
        traced.append(_meta("process_name", record.worker, 0, name))
        for row, of_row in enumerate(("steps", "in a step", "collectives")):
            traced.append(_meta("thread_name", record.worker, row, of_row))
        events = list(record.events)
        if record.about.get("ended") != "well":
            events.append(dataclasses.replace(record.now, what=doing(record)))
        for event in events:
            row = 2 if is_collective(event.what) else 1 if event.what in _PHASES else 0
            begin = event.begin - shifts[record.worker]
            traced.append(
                {
                    "name": event.what,
                    "ph": "X",
                    "pid": record.worker,
                    "tid": row,
                    "ts": begin * 1e6,
                    "dur": max(0.0, event.end - event.begin) * 1e6,
                    "args": {"step": event.step},
                }
            )
    return {"traceEvents": traced, "displayTimeUnit": "ms"}


def is_collective(what: str) -> bool:
    """Whether an event is a collective, such as "sum float32[1000]"."""
    return re.fullmatch(r"\w+ \w+\[.*\]", what) is not None


def _meta(name, worker, row, value):
    return {"name": name, "ph": "M", "pid": worker, "tid": row, "args": {"name": value}}


def _passed_in_step(record) -> list[tuple[str, float]]:
    """Returns the marks that the current step has passed, in order of time."""
    begin = record.now.begin
    passed = [(name, when) for name, when in record.marks.items() if when >= begin]
    return sorted(passed, key=lambda mark: mark[1])


def _progress(record) -> tuple[int, int]:
    """Returns a worker's progress: the step, and the number of marks passed in it."""
    if record.now.what != "in a step":
        return (record.now.step, len(record.marks) + 1)
    return (record.now.step, len(_passed_in_step(record)))


def _by_step(record, shift) -> dict[int, Mapping[str, Event]]:
    by_step: dict[int, dict[str, Event]] = {}
    for event in record.events:
        moved = dataclasses.replace(event, begin=event.begin - shift, end=event.end - shift)
        by_step.setdefault(event.step, {})[event.what] = moved
    return {step: events for step, events in by_step.items() if "step" in events}


def _can_compare(by_worker, step) -> bool:
    """Whether all workers recorded the step in full, with the same collectives in it."""
    by_events = [of_worker[step] for of_worker in by_worker.values()]
    if not all("update" in events and "between steps" in events for events in by_events):
        return False
    names = [set(filter(is_collective, events)) for events in by_events]
    return all(each == names[0] for each in names)


def _length(event) -> float:
    return 0.0 if event is None else max(0.0, event.end - event.begin)


def _workers(indices):
    return f"Worker{'s' * (len(indices) > 1)} {', '.join(map(str, indices))}"
