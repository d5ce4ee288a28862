"""A worker's flight record: a memory-mapped file, which survives a crash of the process.

    4 KiB         identity: worker, host, process, start time; as JSON
    4 KiB         the names of the marks (marks.py), as JSON
    1 KiB         when each mark was last passed: seconds since 1970, doubles
    4 KiB         the current activity and since when; the stack, if it lasts long
    8,192 × 80 B  events; the newest overwrites the oldest

If the process is killed, the kernel still writes the file's pages. A concurrent reader may see one
half-written event, and recognizes it by its number.
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

FOLDER = "TFPARALLEL_FLIGHT_DIR"  # Variable with the folder of a job's records; set by `launch`.
SUFFIX = ".flight"
BEGINS = " …"  # Suffix of the mark at the start of what the mark of that name ends.
NUM_MARKS = 128

_MAGIC = b"tfparallel flight 1\n"
_ABOUT, _NAMES, _MARKS, _NOW, _EVENTS = 32, 4096, 8192, 9216, 13_312
_NUM_EVENTS = 8192
_EVENT = struct.Struct("<Qddi52s")  # Number, begin, end, step, what.
_ENDED = ("ended", "ended_at", "lost")
_STATE = struct.Struct("<ddi256s")  # Last sign of life, since when, step, what.
_SIZE = _EVENTS + _NUM_EVENTS * _EVENT.size
_STACK_BYTES = _EVENTS - _NOW - _STATE.size


@dataclasses.dataclass(frozen=True)
class Event:
    """An interval of time with a name.

    Attributes:
        what: The name, such as "step", "input", "backward", "sum float32[1000]".
        step: The step, counted from 0 over all epochs.
        begin, end: Seconds since 1970, by the clock of the worker's host.
    """

    what: str
    step: int
    begin: float
    end: float


class FlightRecord:
    """Writes a flight record to a new file.

    Args:
        path: The file.
        about: The identity of the writer: JSON-serializable, less than 4 KiB.

    Raises:
        OSError: If the file cannot be created.
    """

    def __init__(self, path: str | os.PathLike, about: Mapping[str, Any]):
        self.path = os.fspath(path)
        self._lock = threading.Lock()
        self._num_events, self._has_stack = 0, False
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)  # Another process may still write to the old file.
        try:
            with open(self.path, "x+b") as file:
                # Allocate everything now: a disk that fills up later would raise SIGBUS.
                file.write(bytes(_SIZE))
                file.flush()
                self._map = mmap.mmap(file.fileno(), _SIZE)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(self.path)  # A partial record would make the folder unreadable.
            raise
        self._about = dict(about)
        self._write_json(_ABOUT, _NAMES - _ABOUT, self._about)
        self._map[: len(_MAGIC)] = _MAGIC

    def add(self, events: Iterable[tuple[str, int, float, float]]) -> None:
        """Appends events, each a tuple of what, step, begin and end, as in `Event`."""
        with self._lock:
            for what, step, begin, end in events:
                place = _EVENTS + self._num_events % _NUM_EVENTS * _EVENT.size
                self._num_events += 1
                name = what.encode()[:52]
                _EVENT.pack_into(self._map, place, self._num_events, begin, end, step, name)

    def now(self, what: str, step: int, since: float) -> None:
        """Records the worker's current activity."""
        _STATE.pack_into(self._map, _NOW, since, since, step, what.encode()[:256])
        if self._has_stack:
            self.stands_at("")

    def alive(self, when: float) -> None:
        """Records a sign of life of the worker's process."""
        struct.pack_into("<d", self._map, _NOW, when)

    def stands_at(self, stack: str) -> None:
        """Records the worker's stack."""
        text = stack.encode()[: _STACK_BYTES - 1]
        start = _NOW + _STATE.size
        self._map[start : start + len(text) + 1] = text + b"\0"
        self._has_stack = bool(text)

    def name_marks(self, names: Sequence[str]) -> None:
        """Records the names of the marks, in the order of their slots."""
        self._write_json(_NAMES, _MARKS - _NAMES, list(names))

    def passed(self, times: bytes) -> None:
        """Records when each mark was last passed: `NUM_MARKS` doubles."""
        self._map[_MARKS : _MARKS + len(times)] = times

    def begin(self) -> None:
        """Records that the training runs (again), and removes an earlier end."""
        self._about = {k: v for k, v in self._about.items() if k not in _ENDED}
        self._write_json(_ABOUT, _NAMES - _ABOUT, self._about)

    def end(self, how: str, lost: int | None = None) -> None:
        """Records the end: "well" or an error's text, and the lost worker that caused it."""
        self._about |= {"ended": how[:500], "ended_at": time.time()}
        self._about |= {} if lost is None else {"lost": lost}
        with contextlib.suppress(ValueError):  # The map is closed.
            self._write_json(_ABOUT, _NAMES - _ABOUT, self._about)

    def close(self) -> None:
        """Closes the record; a second call does nothing."""
        self._map.close()

    def _write_json(self, start, size, content):
        text = json.dumps(content).encode()
        while len(text) >= size:  # Truncate to the available space.
            content = content[:-1] if isinstance(content, list) else {}
            text = json.dumps(content).encode()
        self._map[start : start + len(text) + 1] = text + b"\0"


@dataclasses.dataclass(frozen=True)
class WorkerRecord:
    """The content of a flight record.

    Attributes:
        about: Identity of the writer: "worker", "num_workers", "num_local", "host", "pid", "job",
            "attempt", "started"; "ended" and "ended_at", if it ended on its own; and "lost", the
            worker whose loss ended it.
        marks: The time when each mark was last passed, by name; 0 if never.
        now: The last activity, from its start to the last sign of life.
        stack: The stack at that time, if the activity had lasted for seconds; else "".
        events: The most recent events, oldest first.
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
    """Returns the path of a worker's record in the folder of its job."""
    restart = f".restart_{attempt}" if attempt else ""
    return os.path.join(folder, f"worker_{worker}{restart}{SUFFIX}")


def read_record(path: str | os.PathLike) -> WorkerRecord:
    """Reads a record, even of a live worker; raises `OSError`, or `ValueError` if it is invalid."""
    with open(path, "rb") as file:
        data = file.read()
    if not data.startswith(_MAGIC) or len(data) != _SIZE:
        raise ValueError(
            f"Not a flight record, or one of another version; {_SIZE} bytes are required. "
            f"Received: {os.fspath(path)}, {len(data)} bytes."
        )
    about, names = _json_at(data, _ABOUT, {}), _json_at(data, _NAMES, [])
    if not _is_about(about) or not all(isinstance(name, str) for name in names):
        raise ValueError(
            "The header of a flight record is damaged; it must name the worker. Received: "
            f"{os.fspath(path)}. Remove the file."
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
        value = json.loads(text) if text else empty
    except RecursionError:
        value = None
    return value if isinstance(value, type(empty)) else empty


def _is_about(about):
    """Whether the identity in a record has the types that readers rely on."""
    kinds = {"worker": int, "num_workers": int, "num_local": int, "started": int | float}
    kinds |= {"ended_at": int | float, "ended": str, "lost": int, "host": str}
    return "worker" in about and all(
        isinstance(about[name], kind) for name, kind in kinds.items() if name in about
    )


def _text(raw):
    return raw.partition(b"\0")[0].decode(errors="replace")
