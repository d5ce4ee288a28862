"""A folder has one writer: another process that would write there is told who does.

The writer holds a lock on a file in the folder. The kernel frees it when the process dies, however
it dies, and a network file system passes it on to other hosts. Two things are left:

* a host that lost its power may leave its lock behind, for a minute or for ever;
* some file systems have no locks, or keep them to each host;
* the holder itself loses its lock when it opens and closes the file once more, as a callback does
  that copies the folder.

So the file also says who the writer is, and the writer touches it every two seconds. A free lock
counts only if the process that the file names has ended, or does not touch the file. Where nobody
has touched it for half a minute, the holder is gone, and another file takes its place. A writer
that was only cut off, and comes back, sees before it writes again that the file is not its own any
more: each take writes another word into it.
"""

import contextlib
import dataclasses
import datetime
import fcntl
import json
import os
import platform
import secrets
import threading
import time
import warnings
from typing import Any

__all__ = ["is_lost", "release", "take"]

_FILE = ".writer"
_BEAT_SECONDS = 2.0
_PATIENCE_SECONDS = 30.0  # For a holder on another host.
_QUIET_SECONDS = 8.0  # For one that no lock speaks for: it misses four beats.
_LOOK_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class _Hold:
    """What this process holds."""

    path: str
    descriptor: int
    process: int
    word: str
    ends: threading.Event
    beats: threading.Thread

    def is_in_place(self) -> bool:
        try:
            in_place = os.stat(self.path)
        except FileNotFoundError:
            os.stat(os.path.dirname(self.path))  # That the folder itself is gone is another error.
            return False
        try:
            # By its own descriptor: to close another one would give up the lock.
            is_same = os.path.samestat(in_place, os.fstat(self.descriptor))
            return is_same and _read(self.descriptor).get("word") == self.word
        except OSError:  # ESTALE: a server that has another file in its place.
            return False


_holds: dict[str, _Hold] = {}  # By folder.


def take(directory: str) -> str | None:
    """Makes this process the folder's writer, unless another one is.

    A writer on another host is given half a minute to end: it may be a job's former chief.

    Returns:
        Who the writer is; None if it is this process now, or was before.

    Raises:
        OSError: If the folder cannot be written to.
    """
    path = os.path.join(directory, _FILE)
    hold = _holds.get(os.path.realpath(directory))
    if hold is not None and hold.process == os.getpid() and hold.is_in_place():
        return None
    release(directory)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    first_beat = free_beat = None
    quiet = 0.0
    while True:
        descriptor = _opened(path)
        is_free = _lock(descriptor)
        holder, beat = _read(descriptor), os.fstat(descriptor).st_mtime_ns
        if is_free:
            if not _is_at(path, descriptor):
                os.close(descriptor)  # Its holder has removed it meanwhile.
                continue
            lives = _lives(holder)
            if lives is None and free_beat is None:
                free_beat, quiet = beat, time.monotonic() + _QUIET_SECONDS
            elif lives is None:
                lives = beat != free_beat or (None if time.monotonic() < quiet else False)
            if lives is False:
                _keep(directory, path, descriptor)
                return None
            if lives:
                os.close(descriptor)
                return _described(holder)  # It has lost its lock.
        os.close(descriptor)
        if is_free is None and holder == {}:
            break  # No locks here; and the file is new, or its holder died as it began.
        if is_free is False and holder.get("machine") == _machine():
            return _described(holder)  # This kernel knows that it lives.
        if first_beat is None:
            first_beat = beat
            warnings.warn(
                f"The checkpoints in {directory} have a writer, {_described(holder)}. Waiting up "
                f"to {_PATIENCE_SECONDS:g} s for its end, or for a sign that it lives.",
                stacklevel=2,
            )
        if not is_free and time.monotonic() > deadline:
            if beat != first_beat:
                return _described(holder)
            break
        time.sleep(_LOOK_SECONDS)
    # Replaced rather than taken over: a lock that a lost host has left stays with the old file.
    own = f"{path}.{secrets.token_hex(4)}"
    descriptor = _opened(own)
    _lock(descriptor)
    os.rename(own, path)
    _keep(directory, path, descriptor)
    return None


def is_lost(directory: str) -> bool:
    """Whether this process was the folder's writer, and another one has taken its place.

    Raises:
        OSError: If that cannot be seen.
    """
    hold = _holds.get(os.path.realpath(directory))
    return hold is not None and hold.process == os.getpid() and not hold.is_in_place()


def release(directory: str) -> None:
    """Lets others write into the folder, of which this process need not be the writer."""
    hold = _holds.pop(os.path.realpath(directory), None)
    if hold is None:
        return
    hold.ends.set()
    hold.beats.join(_BEAT_SECONDS)
    if hold.process == os.getpid():  # Not the child of a fork, which has no part in the lock.
        with contextlib.suppress(OSError):
            if hold.is_in_place():
                os.unlink(hold.path)
    if not hold.beats.is_alive():  # It may hang, as its server does; the number must stay its own.
        os.close(hold.descriptor)


def _keep(directory: str, path: str, descriptor: int) -> None:
    since = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    word = secrets.token_hex(8)
    about = {"host": platform.node(), "pid": os.getpid(), "since": since, "machine": _machine()}
    about |= {"word": word, "process": _process(os.getpid())}
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(about).encode(), 0)
    os.fsync(descriptor)  # For other hosts to read.
    ends = threading.Event()
    beats = threading.Thread(
        target=_beat, args=(descriptor, ends), name="checkpoint_writer", daemon=True
    )
    hold = _Hold(path, descriptor, os.getpid(), word, ends, beats)
    _holds[os.path.realpath(directory)] = hold
    beats.start()


def _beat(descriptor: int, ends: threading.Event) -> None:
    while not ends.wait(_BEAT_SECONDS):
        with contextlib.suppress(OSError):  # A server may be away for a while.
            os.utime(descriptor)


def _opened(path: str) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:
        return os.open(path, os.O_RDONLY)  # Another user's, in a folder of several.


def _lock(descriptor: int) -> bool | None:
    """Whether the file is this process's now; None where there are no locks.

    Not `flock`: a process that was forked off, to read data, would keep the lock of a dead parent.
    """
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return None
    return True


def _is_at(path: str, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _read(descriptor: int) -> dict[str, Any]:
    try:
        found = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _described(holder: dict[str, Any]) -> str:
    if not holder:
        return "another process"
    return f"process {holder.get('pid')} on {holder.get('host')}, since {holder.get('since')}"


def _machine() -> str:
    """What tells this machine, since it started, from others of its name."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return platform.node()


def _process(pid: int) -> list[str] | None:
    """What tells a process that lives from others of its number; None if there is none.

    A container may have processes of the same numbers.
    """
    try:
        space = os.readlink("/proc/self/ns/pid")
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else [space, fields[19]]


def _lives(holder: dict[str, Any]) -> bool | None:
    """Whether another process that a file names is there; None if only its beats can tell."""
    if not holder or (holder.get("machine"), holder.get("pid")) == (_machine(), os.getpid()):
        return False
    own, named = _process(os.getpid()), holder.get("process")
    if holder.get("machine") != _machine() or not own or not named or own[0] != named[0]:
        return None
    return _process(holder["pid"]) == named
