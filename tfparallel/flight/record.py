"""A worker's flight record: a file in memory that the system writes, whatever happens.

    4 KiB         who: worker, host, process, when; as JSON
    4 KiB         the names of the marks (marks.py), as JSON
    1 KiB         when each mark was passed last: seconds since 1970, doubles
    4 KiB         what the worker does now, and since when; where it stands, if for long
    8,192 × 80 B  events, the newest in the place of the oldest

A process that is killed leaves the file as it is: its pages belong to the system. Whoever reads it
meanwhile may find one event half written, which its number tells.
"""

import contextlib
import dataclasses
import json
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = [
    "BEGINS",
    "FOLDER",
    "NUM_MARKS",
    "SUFFIX",
    "Event",
    "FlightRecord",
    "WorkerRecord",
    "path_of",
    "read_record",
]

FOLDER = "TFPARALLEL_FLIGHT_DIR"  # Where the workers of a job keep theirs; set by `launch`.
SUFFIX = ".flight"
BEGINS = " …"  # Behind the name of a mark: where that begins.
NUM_MARKS = 128

_MAGIC = b"tfparallel flight 1\n"
_ABOUT, _NAMES, _MARKS, _NOW, _EVENTS = 32, 4096, 8192, 9216, 13_312
_NUM_EVENTS = 8192
_EVENT = struct.Struct("<Qddi52s")  # Its number, begin, end, step, what.
_ENDED = ("ended", "ended_at", "lost")
_STATE = struct.Struct("<ddi256s")  # When it was last seen alive, since when, step, what.
_SIZE = _EVENTS + _NUM_EVENTS * _EVENT.size
_STACK_BYTES = _EVENTS - _NOW - _STATE.size


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that took time.

    Attributes:
        what: Such as "step", "input", "backward", "sum float32[1000]".
        step: In which step, counted from 0 over all epochs.
        begin, end: Seconds since 1970, by the clock of the worker's host.
    """

    what: str
    step: int
    begin: float
    end: float


class FlightRecord:
    """Writes a record, in a file that is made anew.

    Args:
        path: The file.
        about: Who writes: what JSON can hold, in less than 4 KiB.

    Raises:
        OSError: If it cannot be made.
    """

    def __init__(self, path: str | os.PathLike, about: Mapping[str, Any]):
        self.path = os.fspath(path)
        self._lock = threading.Lock()
        self._num_events, self._stands = 0, False
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)  # Another may write there yet.
        try:
            with open(self.path, "x+b") as file:
                # All of it at once: a disk that is full later would end the process by SIGBUS.
                file.write(bytes(_SIZE))
                file.flush()
                self._map = mmap.mmap(file.fileno(), _SIZE)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(self.path)  # Half a record would spoil the others of its folder.
            raise
        self._about = dict(about)
        self._write_json(_ABOUT, _NAMES - _ABOUT, self._about)
        self._map[: len(_MAGIC)] = _MAGIC

    def add(self, events: Iterable[tuple[str, int, float, float]]) -> None:
        """Keeps events: what, the step, begin and end each, as of `Event`."""
        with self._lock:
            for what, step, begin, end in events:
                place = _EVENTS + self._num_events % _NUM_EVENTS * _EVENT.size
                self._num_events += 1
                name = what.encode()[:52]
                _EVENT.pack_into(self._map, place, self._num_events, begin, end, step, name)

    def now(self, what: str, step: int, since: float) -> None:
        """Says what the worker does from now on."""
        _STATE.pack_into(self._map, _NOW, since, since, step, what.encode()[:256])
        if self._stands:
            self.stands_at("")

    def alive(self, when: float) -> None:
        """Says that the worker's process lives."""
        struct.pack_into("<d", self._map, _NOW, when)

    def stands_at(self, stack: str) -> None:
        """Says where in its program it is."""
        text = stack.encode()[: _STACK_BYTES - 1]
        start = _NOW + _STATE.size
        self._map[start : start + len(text) + 1] = text + b"\0"
        self._stands = bool(text)

    def name_marks(self, names: Sequence[str]) -> None:
        """Says what the marks are, by their places."""
        self._write_json(_NAMES, _MARKS - _NAMES, list(names))

    def passed(self, times: bytes) -> None:
        """Says when each mark was passed last: `NUM_MARKS` doubles."""
        self._map[_MARKS : _MARKS + len(times)] = times

    def begin(self) -> None:
        """Says that what is recorded goes on."""
        self._about = {k: v for k, v in self._about.items() if k not in _ENDED}
        self._write_json(_ABOUT, _NAMES - _ABOUT, self._about)

    def end(self, how: str, lost: int | None = None) -> None:
        """Says how it ended: "well", or an error's words; and which worker's loss ended it."""
        self._about |= {"ended": how[:500], "ended_at": time.time()}
        self._about |= {} if lost is None else {"lost": lost}
        with contextlib.suppress(ValueError):  # It is closed.
            self._write_json(_ABOUT, _NAMES - _ABOUT, self._about)

    def close(self) -> None:
        """Writes no more; a second time does nothing."""
        self._map.close()

    def _write_json(self, start, size, content):
        text = json.dumps(content).encode()
        while len(text) >= size:  # As much as has room.
            content = content[:-1] if isinstance(content, list) else {}
            text = json.dumps(content).encode()
        self._map[start : start + len(text) + 1] = text + b"\0"


@dataclasses.dataclass(frozen=True)
class WorkerRecord:
    """What a record holds.

    Attributes:
        about: Who wrote it: "worker", "num_workers", "num_local", "host", "pid", "job", "attempt",
            "started"; "ended" and "ended_at", where it did by itself; and "lost", where it ended
            for the loss of this worker.
        marks: By name when each mark was passed last; 0 if never.
        now: What the worker did last, since when, and when it was last seen alive.
        stack: Where in its program it stood then, if it had for seconds; else nothing.
        events: The last, from the oldest.
    """

    about: dict[str, Any]
    marks: dict[str, float]
    now: Event
    stack: str
    events: tuple[Event, ...]

    @property
    def worker(self) -> int:
        """The worker's index."""
        return self.about["worker"]


def path_of(folder: str | os.PathLike, worker: int, attempt: int) -> str:
    """Returns where a worker keeps its record, in the folder of its job."""
    again = f".restart_{attempt}" if attempt else ""
    return os.path.join(folder, f"worker_{worker}{again}{SUFFIX}")


def read_record(path: str | os.PathLike) -> WorkerRecord:
    """Reads a record, of a live worker or not; `OSError`, or `ValueError` if it is none."""
    with open(path, "rb") as file:
        data = file.read()
    if not data.startswith(_MAGIC) or len(data) != _SIZE:
        raise ValueError(
            f"A flight record of {_SIZE} bytes is required. Received: {os.fspath(path)}, "
            f"{len(data)} bytes that are none, or of another version."
        )
    about, names = _json_at(data, _ABOUT, {}), _json_at(data, _NAMES, [])
    if not _is_about(about) or not all(isinstance(name, str) for name in names):
        raise ValueError(
            "The head of a flight record says which worker wrote it. Received: "
            f"{os.fspath(path)}, which is damaged. Remove the file."
        )
    times = struct.unpack_from(f"<{NUM_MARKS}d", data, _MARKS)
    alive, since, step, what = _STATE.unpack_from(data, _NOW)
    events = []
    for index in range(_NUM_EVENTS):
        number, begin, end, of_step, name = _EVENT.unpack_from(
            data, _EVENTS + index * _EVENT.size
        )
        if number and (number - 1) % _NUM_EVENTS == index:
            events.append((number, Event(_text(name), of_step, begin, end)))
    return WorkerRecord(
        about=about,
        marks=dict(zip(names, times, strict=False)),
        now=Event(_text(what), step, since, alive),
        stack=_text(data[_NOW + _STATE.size : _EVENTS]),
        events=tuple(event for _, event in sorted(events, key=lambda pair: pair[0])),
    )


def _json_at(data, start, empty):
    text = data[start : data.index(b"\0", start)]
    try:
        found = json.loads(text) if text else empty
    except RecursionError:
        found = None
    return found if isinstance(found, type(empty)) else empty


def _is_about(about):
    """Whether what a record says of its worker is of the types that readers compare and show."""
    kinds = {"worker": int, "num_workers": int, "num_local": int, "started": int | float}
    kinds |= {"ended_at": int | float, "ended": str, "lost": int, "host": str}
    return "worker" in about and all(
        isinstance(about[name], kind) for name, kind in kinds.items() if name in about
    )


def _text(raw):
    return raw.partition(b"\0")[0].decode(errors="replace")
